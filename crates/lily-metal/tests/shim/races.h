// Finds races: two threads at the same memory, one of them writing, with nothing that orders them. The kernels are compiled with
// -fsanitize=thread, which calls a function before each access to memory that others may see; these functions are ours. For each
// byte that a launch may write they keep who wrote it last, and who read it.
//
// A barrier orders the threads of a threadgroup; nothing orders threadgroups of a launch. SIMD-group functions order nothing: Metal
// promises no more of them than a value. So accesses are ordered if they are of one thread, or of one threadgroup with a
// barrier between them.
#pragma once

/// What an access does. Reads don't harm each other, nor do atomic additions; all else does, be it atomic: what comes of an addition
/// beside a load or a store depends on the order.
enum class Kind : unsigned char { read, add, write };

/// An access: in which epoch, from where in the library's code, and by which thread of its threadgroup.
struct Access {
    uint epoch, code;
    unsigned short thread;
    Kind kind;
};

/// Of a byte: the last write, and the last read or addition. Of these there are two, so that an access that harms them meets one
/// of another thread, if there is one.
struct Cell {
    Access write, last, other;
};

/// What a race is told with.
struct Race {
    /// Number of the buffer, or of the threadgroup memory argument.
    uint argument;
    bool in_threadgroup_memory, same_threadgroup;
    /// Bytes from where the argument begins.
    size_t offset;
    Access first, second;
};

/// Memory that is watched in a launch.
struct Watched {
    uintptr_t first, end;
    Cell* cells;
    /// Threadgroup memory, which each threadgroup has anew.
    bool anew;
};

/// The accesses of a launch. Epochs are counted in all launches together, so that what earlier ones left behind is known by its
/// number.
struct Races {
    std::vector<Watched> watched;
    size_t latest = 0;
    uint launch = 0, threadgroup = 0, epoch = 0;
    /// What was found.
    uintptr_t address = 0;
    Race race{};

    void begin_launch() {
        watched.clear();
        latest = 0;
        launch = epoch = next();
    }
    void begin_threadgroup() { threadgroup = epoch = next(); }
    void barrier() { epoch = next(); }
    bool exhausted() const { return epoch > 0xff000000u; }

    /// Notes an access by a thread; false: it races.
    bool note(uintptr_t at, size_t size, Kind kind, uint thread, uint code) {
        const Watched* memory = find(at);
        if (!memory) return true;
        const uint since = memory->anew ? threadgroup : launch;
        const Access now = {epoch, code, static_cast<unsigned short>(thread), kind};
        for (Cell* cell = memory->cells + (at - memory->first); size > 0 && at < memory->end; ++cell, ++at, --size) {
            for (const Access* before : {&cell->write, &cell->last, &cell->other}) {
                if (ordered(*before, now, since) || (before->kind == kind && kind != Kind::write)) continue;
                address = at;
                race.in_threadgroup_memory = memory->anew;
                race.same_threadgroup = before->epoch >= threadgroup;
                race.first = *before;
                race.second = now;
                return false;
            }
            if (kind == Kind::write) {
                cell->write = now;
                continue;
            }
            // One by another threadgroup is never ordered with what is to come, so it stays.
            const bool stays = cell->other.epoch >= since && cell->other.epoch < threadgroup;
            if (!stays && !ordered(cell->last, now, since)) cell->other = cell->last;
            cell->last = now;
        }
        return true;
    }

private:
    static uint next() {
        static std::atomic<uint> last{0};
        return ++last;
    }
    /// Whether an access is of an earlier launch, or by the same thread, or a barrier parts them.
    bool ordered(const Access& before, const Access& now, uint since) const {
        if (before.epoch < since) return true;
        return before.epoch >= threadgroup && (before.epoch < now.epoch || before.thread == now.thread);
    }
    const Watched* find(uintptr_t at) {
        if (latest < watched.size() && at - watched[latest].first < watched[latest].end - watched[latest].first)
            return &watched[latest];
        for (size_t i = 0; i < watched.size(); ++i) {
            if (at < watched[i].first || at >= watched[i].end) continue;
            latest = i;
            return &watched[i];
        }
        return nullptr;
    }
};
