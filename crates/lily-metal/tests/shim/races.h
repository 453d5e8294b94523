// Finds races: two threads at the same memory, one of them writing, with nothing that orders them. The kernels are compiled with
// -fsanitize=thread, which calls a function before each access to memory that others may see; these functions are ours. For each
// byte that a launch may write they keep who wrote it last, and who read it.
//
// A barrier orders the threads of a threadgroup; nothing orders threadgroups of a launch. SIMD-group functions order nothing: Metal
// promises no more of them than their value. So accesses are ordered if they are of one thread, or of one threadgroup with a
// barrier between them.
#pragma once

/// An access: in which epoch, by which thread of its threadgroup, and from where in the library's code.
struct Access {
    uint epoch, thread, code;
};

/// Of a byte. Two reads, so that whoever writes meets one of another thread, if there is one.
struct Cell {
    Access write, read, other_read;
};

/// What a race is told with.
struct Race {
    /// Number of the buffer, or of the threadgroup memory argument.
    uint argument;
    bool in_threadgroup_memory, same_threadgroup;
    /// Bytes from where the argument begins.
    size_t offset;
    struct {
        uint thread, code;
        bool writes;
    } first, second;
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
    bool note(uintptr_t at, size_t size, bool writes, uint thread, uint code) {
        const Watched* memory = find(at);
        if (!memory) return true;
        const uint since = memory->anew ? threadgroup : launch;
        const Access now = {epoch, thread, code};
        for (Cell* cell = memory->cells + (at - memory->first); size > 0 && at < memory->end; ++cell, ++at, --size) {
            const Access* before = nullptr;
            if (races(cell->write, now, since)) before = &cell->write;
            if (writes && races(cell->read, now, since)) before = &cell->read;
            if (writes && races(cell->other_read, now, since)) before = &cell->other_read;
            if (before) {
                address = at;
                race.in_threadgroup_memory = memory->anew;
                race.same_threadgroup = before->epoch >= threadgroup;
                race.first = {before->thread, before->code, before == &cell->write};
                race.second = {thread, code, writes};
                return false;
            }
            if (writes) {
                cell->write = now;
                continue;
            }
            // A read by another threadgroup is never ordered with what is to come, so it stays.
            const bool stays = cell->other_read.epoch >= since && cell->other_read.epoch < threadgroup;
            if (!stays && races(cell->read, now, since)) cell->other_read = cell->read;
            cell->read = now;
        }
        return true;
    }

private:
    static uint next() {
        static std::atomic<uint> last{0};
        return ++last;
    }
    bool races(const Access& before, const Access& now, uint since) const {
        if (before.epoch < since) return false;
        return before.epoch < threadgroup || (before.epoch == now.epoch && before.thread != now.thread);
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
