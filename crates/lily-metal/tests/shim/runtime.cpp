// Runs kernels on the CPU. The threads of a threadgroup are fibers of one OS thread, resumed one after the other in a given
// order; a barrier or a SIMD-group function suspends a fiber until all that must come have come. Every buffer and every
// threadgroup memory argument lies beside pages that can't be touched, so an access outside of it is a fault, which ends the
// launch with a message. Races are found by races.h.
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

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

constexpr uint MOST_THREADS = 1024;
constexpr size_t PAGE = 4096;
/// Bytes on either side of a buffer that can't be touched: only addresses are spent, and a wild index must not meet other memory.
constexpr size_t GUARD = size_t(1) << 30;
// No power of two: the tops of all stacks would share a few lines of the cache.
constexpr size_t STACK = (16 << 10) + 5 * 64;

enum class State { ready, at_barrier, at_exchange, done };

struct Fiber {
    ucontext_t start;
    jmp_buf resume;
    bool started;
    State state;
    uint index;
    /// Of the operations that it took part in, in order.
    uint parts;
};

struct SimdGroup {
    uint arrived, parity, size;
    Operation operation;
    // Two, so that a lane may go on to the next exchange before the others have read this one.
    unsigned char slots[2][LANES * SLOT];
};

Kernel* kernels;

/// What an OS thread needs for launches; kept from one to the next.
struct Machine {
    std::unique_ptr<Fiber[]> fibers{new Fiber[MOST_THREADS]()};
    std::unique_ptr<SimdGroup[]> simdgroups{new SimdGroup[MOST_THREADS / LANES]()};
    unsigned char* stacks = nullptr;
    jmp_buf scheduler;
    Fiber* current = nullptr;
    const Kernel* kernel = nullptr;
    void* const* buffers = nullptr;
    std::vector<std::pair<void*, size_t>> memory;
    Group group{};
    uint threads = 0, at_barrier = 0;
    Races races;
    const char* problem = nullptr;
    ~Machine();
};
thread_local Machine own_machine;
/// The one of this OS thread, set when a launch begins: cheaper to read than a variable with a destructor.
thread_local Machine* here;
#define machine (*here)
/// Whether a kernel is running on this OS thread: only then is a fault ours.
thread_local volatile bool running;

/// What came back through the scheduler's jump.
enum Reason { SUSPENDED = 1, FAILED = 2 };

[[noreturn]] void fail(const char* problem) {
    machine.problem = problem;
    _longjmp(machine.scheduler, FAILED);
}

constexpr const char* PARTS = "not all threads of a scope take part in its operations, in the same order";

/// Whether all threads took part in the same operations.
bool same_parts() {
    for (uint i = 1; i < machine.threads; ++i)
        if (machine.fibers[i].parts != machine.fibers[0].parts) return false;
    return true;
}

void suspend(State state) {
    Fiber* me = machine.current;
    me->state = state;
    if (_setjmp(me->resume) == 0) _longjmp(machine.scheduler, SUSPENDED);
}

/// A fiber runs the kernel again and again, once for each threadgroup.
void fiber_main() {
    for (;;) {
        machine.kernel->entry();
        suspend(State::done);
    }
}

/// Memory and, behind its second guard, a cell for each byte of it.
struct Room {
    size_t bytes;
    explicit Room(size_t n) : bytes((n + PAGE - 1) / PAGE * PAGE) {}
    size_t all() const { return 2 * GUARD + bytes * (1 + sizeof(Cell)); }
    unsigned char* first(void* address) const {
        return reinterpret_cast<unsigned char*>(reinterpret_cast<uintptr_t>(address) / PAGE * PAGE);
    }
    Cell* cells(void* address) const { return reinterpret_cast<Cell*>(first(address) + bytes + GUARD); }
};

void* allocate(size_t bytes, bool guard_end) {
    const Room room(bytes);
    void* all = mmap(nullptr, room.all(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    unsigned char* first = static_cast<unsigned char*>(all) + GUARD;
    if (mprotect(first, room.bytes, PROT_READ | PROT_WRITE) != 0) return nullptr;
    if (mprotect(room.cells(first), room.bytes * sizeof(Cell), PROT_READ | PROT_WRITE) != 0) return nullptr;
    return guard_end ? first + (room.bytes - (bytes + 15) / 16 * 16) : first;
}

void release(void* address, size_t bytes) {
    const Room room(bytes);
    munmap(room.first(address) - GUARD, room.all());
}

/// Watches memory that was allocated with this length.
void watch(void* address, size_t bytes, bool anew) {
    const Room room(bytes);
    const uintptr_t first = reinterpret_cast<uintptr_t>(room.first(address));
    machine.races.watched.push_back({first, first + room.bytes, room.cells(address), anew});
}

/// Where this library was loaded.
const uintptr_t library = [] {
    Dl_info info{};
    dladdr(reinterpret_cast<void*>(allocate), &info);
    return reinterpret_cast<uintptr_t>(info.dli_fbase);
}();
constexpr char RACE[] = "a race";

/// An access of a kernel, told by the compiler.
void access(const volatile void* address, size_t size, Kind kind, void* code) {
    if (!running) return;
    const uint offset = uint(reinterpret_cast<uintptr_t>(code) - library);
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    if (!machine.races.note(at, size, kind, machine.current->index, offset)) fail(RACE);
}

Machine::~Machine() {
    for (auto& m : memory) release(m.first, m.second);
    if (stacks) munmap(stacks, STACK * MOST_THREADS);
}

/// Makes all fibers new: those of a failed launch have stopped in the middle.
bool make_fibers() {
    if (!machine.stacks) {
        void* stacks = mmap(nullptr, STACK * MOST_THREADS, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == MAP_FAILED) return false;
        machine.stacks = static_cast<unsigned char*>(stacks);
    }
    for (uint i = 0; i < MOST_THREADS; ++i) {
        Fiber& fiber = machine.fibers[i];
        fiber.started = false;
        fiber.index = i;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = machine.stacks + i * STACK;
        fiber.start.uc_stack.ss_size = STACK;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, fiber_main, 0);
    }
    return true;
}

constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
struct sigaction before_us[NSIG];

/// A fault in a kernel ends its launch; any other goes to whoever was there before: other kernels' libraries, which run on
/// other OS threads, and in the end the program's own handler.
void on_fault(int number, siginfo_t* info, void* context) {
    if (running) {
        fail(number == SIGILL || number == SIGTRAP ? "undefined behaviour: an index, a shift or an alignment"
                                                   : "an access outside of its memory");
    } else if (before_us[number].sa_flags & SA_SIGINFO) {
        before_us[number].sa_sigaction(number, info, context);
    } else {
        signal(number, SIG_DFL);
    }
}

/// Once a library: handlers that took turns would find that the fault is not theirs.
void catch_faults() {
    static const bool caught = [] {
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        // The handler jumps away, so the signal must not stay blocked.
        action.sa_flags = SA_SIGINFO | SA_NODEFER;
        for (int number : FAULTS) sigaction(number, &action, &before_us[number]);
        return true;
    }();
    (void)caught;
}

/// Runs a fiber until it waits or ends; false: something went wrong. (Never inlined, since it calls setjmp: so its callers'
/// variables are safe.)
bool resume(Fiber& fiber) {
    const int reason = _setjmp(machine.scheduler);
    if (reason != 0) return reason == SUSPENDED;
    machine.current = &fiber;
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    setcontext(&fiber.start);
    return false;
}

/// Runs one threadgroup.
bool run_threadgroup(const std::vector<uint>& order) {
    for (uint i = 0; i < machine.threads; ++i) {
        machine.fibers[i].state = State::ready;
        machine.fibers[i].parts = 0;
    }
    for (uint i = 0; i < machine.threads / LANES; ++i) machine.simdgroups[i].arrived = 0;
    // NaN in every number that isn't written first.
    for (auto& m : machine.memory) memset(m.first, 0xff, m.second);
    machine.at_barrier = 0;
    machine.races.begin_threadgroup();
    uint done = 0;
    while (done < machine.threads) {
        bool moved = false;
        for (uint first = 0; first < machine.threads; first += LANES) {
            // As long as any of them can go on, so that in order a SIMD-group runs ahead of the others as far as it may; by chance
            // all of them advance together.
            for (bool again = true; again;) {
                again = false;
                for (uint i = first; i < first + LANES; ++i) {
                    Fiber& fiber = machine.fibers[order[i]];
                    if (fiber.state != State::ready) continue;
                    again = moved = true;
                    if (!resume(fiber)) return false;
                    if (fiber.state == State::done) ++done;
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

uint next_random(uint& seed) {
    seed ^= seed << 13;
    seed ^= seed >> 17;
    seed ^= seed << 5;
    return seed;
}

/// 0: forwards; 1: backwards; any other number: by chance.
std::vector<uint> make_order(uint n, uint kind) {
    std::vector<uint> order(n);
    uint seed = kind * 2654435761u | 1;
    for (uint i = 0; i < n; ++i) order[i] = kind == 1 ? n - 1 - i : i;
    for (uint i = n; kind > 1 && i > 1; --i) std::swap(order[i - 1], order[next_random(seed) % i]);
    return order;
}
}  // namespace

Kernel::Kernel(const char* name, void (*entry)()) : name(name), entry(entry), next(kernels) { kernels = this; }

uint lane() { return machine.current->index % LANES; }
uint thread_index_in_threadgroup() { return machine.current->index; }
uint simdgroup_index_in_threadgroup() { return machine.current->index / LANES; }
Group threadgroup_position_in_grid() { return machine.group; }
void refuse(const char* problem) { fail(problem); }

void take_part(uint simdgroups, uint operation) {
    // A scope is the whole threadgroup: no kernel needs another.
    if (simdgroups * LANES != machine.threads) fail("an operation for another number of threads");
    machine.current->parts = machine.current->parts * 31 + operation + 1;
}

Pointer buffer(uint index) { return {machine.buffers[index]}; }
Pointer threadgroup_memory(uint index) { return {machine.memory[index].first}; }

void barrier() {
    if (++machine.at_barrier < machine.threads) return suspend(State::at_barrier);
    if (!same_parts()) fail(PARTS);
    machine.at_barrier = 0;
    machine.races.barrier();
    for (uint i = 0; i < machine.threads; ++i) machine.fibers[i].state = State::ready;
}

const unsigned char* exchange(Operation operation, const void* value, uint size, void (*combine)(unsigned char*)) {
    SimdGroup& group = machine.simdgroups[simdgroup_index_in_threadgroup()];
    if (group.arrived == 0) {
        group.operation = operation;
        group.size = size;
    } else if (group.operation != operation || group.size != size) {
        fail("lanes of a SIMD-group are at different functions");
    }
    unsigned char* slots = group.slots[group.parity];
    memcpy(slots + lane() * SLOT, value, size);
    if (++group.arrived < LANES) {
        suspend(State::at_exchange);
        return slots;
    }
    if (combine) combine(slots);
    group.arrived = 0;
    group.parity ^= 1;
    Fiber* first = &machine.fibers[machine.current->index / LANES * LANES];
    for (uint i = 0; i < LANES; ++i) first[i].state = State::ready;
    return slots;
}
}  // namespace shim

using namespace shim;

/// Memory that a kernel may write.
struct Written {
    void* memory;
    size_t bytes;
};

struct Request {
    const char* kernel;
    void* const* buffers;
    uint buffer_count;
    /// Races are looked for in these and in threadgroup memory, if `races` says so.
    const Written* written;
    uint written_count;
    bool races;
    const uint* memory;
    uint memory_count;
    uint grid[3];
    uint threads;
    uint order;
};

/// Memory beside pages that can't be touched: right behind its end (rounded up to 16 bytes), or right before its beginning.
extern "C" void* shim_allocate(size_t bytes, bool guard_end) { return allocate(bytes, guard_end); }

extern "C" void shim_release(void* address, size_t bytes) { release(address, bytes); }

/// Which argument the raced-for address belongs to.
static void find_argument(const Request* request, Race& race) {
    uintptr_t best = 0;
    const auto consider = [&](uint argument, const void* begin) {
        const uintptr_t at = reinterpret_cast<uintptr_t>(begin);
        if (at > machine.races.address || at < best) return;
        best = at;
        race.argument = argument;
    };
    for (uint i = 0; race.in_threadgroup_memory && i < request->memory_count; ++i) consider(i, machine.memory[i].first);
    for (uint i = 0; !race.in_threadgroup_memory && i < request->buffer_count; ++i) consider(i, request->buffers[i]);
    race.offset = machine.races.address - best;
}

/// Runs a kernel that there is, with as many buffers and lengths of threadgroup memory as it has. 0; or 1 with the reason in
/// `error`; or 2, that being a race, which is put down in `race`.
extern "C" int shim_launch(const Request* request, char* error, size_t error_size, Race* race) {
    catch_faults();
    here = &own_machine;
    machine.kernel = kernels;
    while (strcmp(machine.kernel->name, request->kernel) != 0) machine.kernel = machine.kernel->next;
    machine.buffers = request->buffers;
    machine.threads = request->threads;
    machine.problem = nullptr;
    for (auto& m : machine.memory) release(m.first, m.second);
    machine.memory.clear();
    machine.races.begin_launch();
    if (machine.races.exhausted()) machine.problem = "more barriers than races.h can count: run fewer tests at once";
    for (uint i = 0; i < request->memory_count; ++i) {
        machine.memory.push_back({allocate(request->memory[i], true), request->memory[i]});
        if (!machine.memory.back().first) machine.problem = "no memory";
    }
    for (uint i = 0; request->races && !machine.problem && i < request->memory_count; ++i)
        watch(machine.memory[i].first, machine.memory[i].second, true);
    for (uint i = 0; request->races && i < request->written_count; ++i)
        watch(request->written[i].memory, request->written[i].bytes, false);
    if (!machine.stacks && !make_fibers()) machine.problem = "no memory";
    const std::vector<uint> threads = make_order(request->threads, request->order);
    const uint width = request->grid[0], height = request->grid[1], groups = width * height * request->grid[2];
    const std::vector<uint> order = make_order(groups, request->order);
    running = true;
    for (uint i = 0; i < groups && !machine.problem; ++i) {
        machine.group = {order[i] % width, order[i] / width % height, order[i] / width / height};
        if (!run_threadgroup(threads) && !machine.problem) machine.problem = "it stopped";
    }
    running = false;
    if (!machine.problem) return 0;
    make_fibers();
    const bool raced = machine.problem == RACE;
    if (raced) {
        *race = machine.races.race;
        find_argument(request, *race);
    }
    snprintf(error, error_size, "%s, threadgroup (%u, %u, %u), thread %u: %s", request->kernel, machine.group.x,
             machine.group.y, machine.group.z, machine.current ? machine.current->index : 0, machine.problem);
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
