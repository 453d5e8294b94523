// Runs kernels on the CPU. The threads of a threadgroup are fibers of one OS thread (lily-emulate's fibers.h), resumed one after the
// other in a given order; a barrier or a SIMD-group function suspends a fiber until all that must come have come. Every buffer and
// every threadgroup memory argument lies beside pages that can't be touched, so an access outside of it is a fault, which ends the
// launch with a message. Races are found by races.h.
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include <atomic>
#include <memory>
#include <vector>

#include "fibers.h"
#include "metal_stdlib"
#undef kernel
#undef device
#undef constant
#undef threadgroup
#undef thread
#include "entry.h"

namespace shim {
namespace {
#include "races.h"

using fibers::fail, fibers::Fiber, fibers::Meeting, fibers::resume, fibers::wait_for;
static_assert(LANES == fibers::LANES, "lanes of a SIMD-group");

constexpr uint MOST_THREADS = 1024;
// No power of two: the tops of all stacks would share a few lines of the cache.
constexpr size_t STACK = (16 << 10) + 5 * 64;
/// Seconds of the processor that a launch may take: far more than any right one of the tests does.
constexpr int MOST_SECONDS = 60;

struct Thread : Fiber {
    uint index;
    /// Of the operations that it took part in, in order.
    uint parts;
};

Kernel* kernels;

/// Memory that is given to a kernel.
struct Memory {
    unsigned char* first;
    size_t bytes;
    /// One for each byte, if races are looked for.
    Cell* cells;
};

/// What an OS thread needs for launches; kept from one to the next.
struct Machine : fibers::Fibers {
    std::unique_ptr<Thread[]> threads{new Thread[MOST_THREADS]()};
    std::unique_ptr<fibers::Exchange<SLOT>[]> simdgroups{new fibers::Exchange<SLOT>[MOST_THREADS / LANES]()};
    unsigned char* stacks = nullptr;
    const Kernel* kernel = nullptr;
    void* const* buffers = nullptr;
    const Memory* memory = nullptr;
    uint memory_count = 0;
    Group group{};
    /// Threads of a threadgroup.
    uint size = 0;
    Meeting barrier{};
    Races races;
    ~Machine() {
        if (stacks) munmap(stacks, STACK * MOST_THREADS);
    }
};
#define machine (*static_cast<Machine*>(fibers::here))
Thread& me() { return *static_cast<Thread*>(machine.current); }

constexpr const char* PARTS = "not all threads of a scope take part in its operations, in the same order";

/// Whether all threads took part in the same operations.
bool same_parts() {
    for (uint i = 1; i < machine.size; ++i)
        if (machine.threads[i].parts != machine.threads[0].parts) return false;
    return true;
}

/// A fiber runs the kernel again and again, once for each threadgroup.
void fiber_main() {
    for (;;) {
        machine.kernel->entry();
        me().done = true;
        fibers::suspend();
    }
}

/// Watches memory for races, if there are cells for it.
void watch(const Memory& memory, bool anew) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(memory.first);
    if (memory.cells) machine.races.watched.push_back({first, first + memory.bytes, memory.cells, anew});
}

/// Where this library was loaded.
const uintptr_t library = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(same_parts), &info);
    return reinterpret_cast<uintptr_t>(info.dli_fbase);
}();
constexpr char RACE[] = "a race";

/// An access of a kernel, told by the compiler.
void access(const volatile void* address, size_t size, Kind kind, void* code) {
    if (!fibers::here || !fibers::here->running) return;
    const uint offset = uint(reinterpret_cast<uintptr_t>(code) - library);
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    if (!machine.races.note(at, size, kind, me().index, offset)) fail(RACE);
}

/// Makes all fibers new: those of a failed launch have stopped in the middle.
bool make_fibers() {
    if (!machine.stacks) machine.stacks = fibers::reserve(STACK * MOST_THREADS, PROT_READ | PROT_WRITE);
    for (uint i = 0; machine.stacks && i < MOST_THREADS; ++i) {
        machine.threads[i].index = i;
        fibers::make(machine.threads[i], machine.stacks + i * STACK, STACK, fiber_main);
    }
    return machine.stacks;
}

/// The machine of this OS thread, which ends with it.
Machine* own_machine() {
    static const pthread_key_t key = [] {
        pthread_key_t key;
        pthread_key_create(&key, [](void* own) { delete static_cast<Machine*>(own); });
        return key;
    }();
    void* own = pthread_getspecific(key);
    if (!own) pthread_setspecific(key, own = new Machine);
    return static_cast<Machine*>(own);
}

/// Runs one threadgroup.
bool run_threadgroup(const std::vector<uint>& order) {
    for (uint i = 0; i < machine.size; ++i) {
        machine.threads[i].done = false;
        machine.threads[i].parts = 0;
    }
    // A launch that failed may have left some waiting.
    for (uint i = 0; i < machine.size / LANES; ++i) machine.simdgroups[i].meeting.arrived = 0;
    machine.barrier.arrived = 0;
    // NaN in every number that isn't written first.
    for (uint i = 0; i < machine.memory_count; ++i) memset(machine.memory[i].first, 0xff, machine.memory[i].bytes);
    machine.races.begin_threadgroup();
    uint done = 0;
    while (done < machine.size) {
        bool moved = false;
        for (uint first = 0; first < machine.size; first += LANES) {
            // As long as any of them can go on, so that in order a SIMD-group runs ahead of the others as far as it may; by chance
            // all of them advance together.
            for (bool again = true; again;) {
                again = false;
                for (uint i = first; i < first + LANES; ++i) {
                    Fiber& thread = machine.threads[order[i]];
                    if (!thread.ready()) continue;
                    again = moved = true;
                    if (!resume(thread)) return false;
                    if (thread.done) ++done;
                }
            }
        }
        if (!moved) {
            machine.problem = "threads wait for others that don't come: a barrier or a SIMD-group function is not reached by all";
            return false;
        }
    }
    if (!same_parts()) machine.problem = PARTS;
    return !machine.problem;
}

/// 0: forwards; 1: backwards; any other number: by chance.
std::vector<uint> make_order(uint n, uint kind) {
    std::vector<uint> order(n);
    for (uint i = 0; i < n; ++i) order[i] = kind == 1 ? n - 1 - i : i;
    if (kind > 1) fibers::Chance(kind).shuffle(order);
    return order;
}
}  // namespace

Kernel::Kernel(const char* name, void (*entry)()) : name(name), entry(entry), next(kernels) { kernels = this; }

uint lane() { return me().index % LANES; }
uint thread_index_in_threadgroup() { return me().index; }
uint simdgroup_index_in_threadgroup() { return me().index / LANES; }
Group threadgroup_position_in_grid() { return machine.group; }
void refuse(const char* problem) { fail(problem); }

void take_part(uint simdgroups, uint operation) {
    // A scope is the whole threadgroup: no kernel needs another.
    if (simdgroups * LANES != machine.size) fail("an operation for another number of threads");
    me().parts = me().parts * 31 + operation + 1;
}

Pointer buffer(uint index) { return {machine.buffers[index]}; }
Pointer threadgroup_memory(uint index) { return {machine.memory[index].first}; }

void barrier() {
    const fibers::Wait end = machine.barrier.end();
    if (!machine.barrier.arrive(machine.size)) return wait_for(end);
    if (!same_parts()) fail(PARTS);
    machine.races.barrier();
}

const unsigned char* exchange(Operation operation, const void* value, uint size, void (*combine)(unsigned char*)) {
    const uint purpose = static_cast<uint>(operation) * 2 * SLOT + size;
    return machine.simdgroups[simdgroup_index_in_threadgroup()].meet(lane(), purpose, value, size,
                                                                    "lanes of a SIMD-group are at different functions", combine);
}
}  // namespace shim

using namespace shim;

namespace {
struct Request {
    const char* kernel;
    void* const* buffers;
    uint buffer_count;
    /// Memory that a kernel may write, and the threadgroup memory arguments.
    const Memory* written;
    uint written_count;
    const Memory* memory;
    uint memory_count;
    uint grid[3];
    uint threads;
    uint order;
};

/// Which argument the raced-for address belongs to.
void find_argument(const Request* request, Race& race) {
    uintptr_t best = 0;
    const auto consider = [&](uint argument, const void* begin) {
        const uintptr_t at = reinterpret_cast<uintptr_t>(begin);
        if (at > machine.races.address || at < best) return;
        best = at;
        race.argument = argument;
    };
    for (uint i = 0; race.in_threadgroup_memory && i < request->memory_count; ++i) consider(i, request->memory[i].first);
    for (uint i = 0; !race.in_threadgroup_memory && i < request->buffer_count; ++i) consider(i, request->buffers[i]);
    race.offset = machine.races.address - best;
}
}  // namespace

/// Runs a kernel that there is, with as many buffers and lengths of threadgroup memory as it has. 0; or 1 with the reason in
/// `error`; or 2, that being a race, which is put down in `race`.
extern "C" int shim_launch(const Request* request, char* error, size_t error_size, Race* race) {
    fibers::catch_faults();
    const fibers::Timer timer(MOST_SECONDS);
    fibers::here = own_machine();
    machine.kernel = kernels;
    while (strcmp(machine.kernel->name, request->kernel) != 0) machine.kernel = machine.kernel->next;
    machine.buffers = request->buffers;
    machine.memory = request->memory;
    machine.memory_count = request->memory_count;
    machine.size = request->threads;
    machine.current = nullptr;
    machine.problem = nullptr;
    machine.races.begin_launch();
    if (machine.races.exhausted()) machine.problem = "more barriers than races.h can count: run fewer tests at once";
    for (uint i = 0; i < request->memory_count; ++i) watch(request->memory[i], true);
    for (uint i = 0; i < request->written_count; ++i) watch(request->written[i], false);
    if (!machine.stacks && !make_fibers()) machine.problem = "no memory";
    const std::vector<uint> threads = make_order(request->threads, request->order);
    const uint width = request->grid[0], height = request->grid[1], groups = width * height * request->grid[2];
    const std::vector<uint> order = make_order(groups, request->order);
    for (uint i = 0; i < groups && !machine.problem; ++i) {
        machine.group = {order[i] % width, order[i] / width % height, order[i] / width / height};
        if (!run_threadgroup(threads) && !machine.problem) machine.problem = "it stopped";
    }
    if (!machine.problem) return 0;
    make_fibers();
    const bool raced = machine.problem == RACE;
    if (raced) {
        *race = machine.races.race;
        find_argument(request, *race);
    }
    snprintf(error, error_size, "%s, threadgroup (%u, %u, %u), thread %u: %s", request->kernel, machine.group.x,
             machine.group.y, machine.group.z, machine.current ? me().index : 0, machine.problem);
    return raced ? 2 : 1;
}

// What the compiler calls. There are no others: the library doesn't link if it needs one.
#define ACCESS(name, size, kind) \
    void __tsan_##name(void* address) { access(address, size, kind, __builtin_return_address(0)); }
extern "C" {
void __tsan_init() {}
ACCESS(read1, 1, Kind::read)
ACCESS(read2, 2, Kind::read)
ACCESS(read4, 4, Kind::read)
ACCESS(read8, 8, Kind::read)
ACCESS(read16, 16, Kind::read)
ACCESS(write1, 1, Kind::write)
ACCESS(write2, 2, Kind::write)
ACCESS(write4, 4, Kind::write)
ACCESS(write8, 8, Kind::write)
ACCESS(write16, 16, Kind::write)
void __tsan_read_range(void* address, size_t size) { access(address, size, Kind::read, __builtin_return_address(0)); }
void __tsan_write_range(void* address, size_t size) { access(address, size, Kind::write, __builtin_return_address(0)); }
uint __tsan_atomic32_fetch_add(volatile uint* address, uint operand, int) {
    access(address, sizeof operand, Kind::add, __builtin_return_address(0));
    const uint before = *address;
    *address = before + operand;
    return before;
}
}
