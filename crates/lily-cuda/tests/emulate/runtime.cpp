// Runs kernels on the CPU. All threads of the blocks that run at a time are fibers of one OS thread, resumed by chance; whatever they
// wait for suspends them. Warps have different paces, so that some are far ahead of others. What the hardware does in the background
// ends at a time by chance, and its destination is no number from the beginning on. Shared memory and every buffer end beside a page
// that can't be touched.
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <vector>

#include "shim.h"

namespace emu {
namespace {
constexpr size_t PAGE = 4096;
constexpr size_t STACK = (64 << 10) + 5 * 64;
/// Addresses of a block's shared memory: its own variables, those that the launch gives, a guard.
constexpr u32 WINDOW = 512 << 10, OWN = 64 << 10;
/// Rounds in which threads only ask again for what others must write.
constexpr u32 PATIENCE = 30000;
/// Seconds of the processor that a launch may take: far more than any right one of the tests does.
constexpr int MOST_SECONDS = 5;

/// Goes on when (*word & mask) is another value.
struct Wait {
    const u32* word;
    u32 mask, value;
    bool over() const { return !word || (*word & mask) != value; }
};
struct Barrier { u32 generation, arrived, threads; };
/// A barrier in shared memory: the phase ends when none is pending and all expected bytes have come.
struct Transactions { u32 phase, count, pending; long bytes; };
struct Warp {
    u32 generation, arrived, pace;
    Operation operation;
    // Two, so that a lane may come to the next exchange before the others have read this one.
    Words words[2][LANES];
};
struct Cluster { u32 generation, arrived, threads, first; };
struct Block {
    Index index;
    Cluster* cluster;
    u8* memory;
    u32 threads;  // that have not ended
    bool begun;
    Barrier barriers[16];
    std::vector<Warp> warps;
};
struct Fiber {
    ucontext_t start;
    jmp_buf resume;
    bool started, done, spun, in_cluster_barrier;
    u32 thread, cluster_generation, groups;  // groups: of its copies, so far
    Block* block;
    Wait wait;
};
/// A copy on its way: from `from`, or of `value`.
struct Copy {
    u8* to;
    const u8* from;
    u32 bytes;
    float4 value;
    Transactions* bar;
    const Fiber* owner;
    Block* block;  // whose memory it goes to
    u32 group;     // of its owner's
};

struct Machine {
    const Kernel* kernel;
    const u8* arguments;
    Index grid;
    u32 threads, dynamic, window;  // of a block: threads, bytes
    u8* arena;
    u8* stacks;
    std::vector<Block> blocks;
    std::vector<Cluster> clusters;
    std::vector<Fiber> fibers;
    std::vector<Copy> copies;
    std::unordered_map<const void*, Transactions> transactions;
    Fiber* current;
    jmp_buf scheduler;
    const char* problem;
    u64 seed;
};
/// An OS thread has one launch at a time.
thread_local Machine* machine;
/// Whether a kernel is running on this OS thread: only then is a fault ours.
thread_local volatile bool running;
std::atomic<u32> placed;

enum Reason { SUSPENDED = 1, FAILED = 2 };

u32 chance(u32 n) {
    u64& seed = machine->seed;
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (u32)(seed >> 32) % n;
}

Block& block() { return *machine->current->block; }
Warp& warp() { return block().warps[machine->current->thread / LANES]; }

void suspend() {
    if (_setjmp(machine->current->resume) == 0) _longjmp(machine->scheduler, SUSPENDED);
}
void wait_for(const Wait& wait) {
    Fiber* me = machine->current;
    me->wait = wait;
    if (!wait.over()) suspend();
    me->wait.word = nullptr;
}

void complete_cluster(Cluster& c) {
    if (c.threads > 0 && c.arrived == c.threads) {
        c.arrived = 0;
        c.generation++;
    }
}
void fiber_main() {
    Fiber* me = machine->current;
    me->block->begun = true;
    machine->kernel->run(machine->arguments);
    me->done = true;
    me->block->threads--;
    // A thread that has ended is not waited for.
    Cluster& c = *me->block->cluster;
    if (me->in_cluster_barrier) {
        if (me->cluster_generation == c.generation) c.arrived--;
    }
    c.threads--;
    complete_cluster(c);
    suspend();
}

/// The barrier at an address.
Transactions& transactions(const void* bar) {
    const auto found = machine->transactions.find(bar);
    if (found == machine->transactions.end()) fail("a barrier that was not initialised");
    return found->second;
}
void complete(Transactions& t) {
    if (t.pending > 0 || t.bytes != 0) return;
    t.phase++;
    t.pending = t.count;
}

/// The block that an address in shared memory belongs to.
Block& owner(const void* p) {
    const size_t at = static_cast<const u8*>(p) - machine->arena;
    if (at >= (size_t)WINDOW * machine->blocks.size()) fail("an address that is not one of shared memory");
    return machine->blocks[at / WINDOW];
}
void begin_copy(Copy copy) {
    copy.block = &owner(copy.to);
    if (!copy.block->begun) fail("a block is sent to that may not have begun");
    memset(copy.to, 0xff, copy.bytes);
    machine->copies.push_back(copy);
}
void end_copy(size_t i) {
    const Copy c = machine->copies[i];
    machine->copies[i] = machine->copies.back();
    machine->copies.pop_back();
    if (c.block->threads == 0) {
        machine->problem = "a block has ended before what is sent to it has come";
        return;
    }
    memcpy(c.to, c.from ? (const void*)c.from : &c.value, c.bytes);
    if (!c.bar) return;
    c.bar->bytes -= c.bytes;
    complete(*c.bar);
}

/// Runs a fiber until it waits or ends; false: something went wrong. (Never inlined, since it calls setjmp: so its callers' variables
/// are safe.)
__attribute__((noinline)) bool resume(Fiber& fiber) {
    const int reason = _setjmp(machine->scheduler);
    if (reason != 0) {
        running = false;
        return reason == SUSPENDED;
    }
    machine->current = &fiber;
    running = true;
    if (fiber.started) _longjmp(fiber.resume, 1);
    fiber.started = true;
    setcontext(&fiber.start);
    return false;
}

/// Runs a warp's lanes, each until it waits, some times; whether any did more than ask again.
bool run_warp(Fiber* lanes) {
    bool moved = false;
    for (u32 times = 1 + chance(32); times > 0 && !machine->problem; times--) {
        bool any = false;
        const u32 first = chance(LANES);
        for (u32 i = 0; i < LANES; i++) {
            Fiber& fiber = lanes[(first + i) % LANES];
            if (fiber.done || !fiber.wait.over()) continue;
            fiber.spun = false;
            if (!resume(fiber)) return false;
            any = any || !fiber.spun;
        }
        if (!any) break;
        moved = true;
    }
    return moved;
}

/// Runs blocks first .. first + count until all have ended.
void run_blocks(u32 first, u32 count) {
    const u32 warps = machine->threads / LANES, lateness = 1u << chance(7);
    for (u32 b = first; b < first + count; b++)
        for (Warp& w : machine->blocks[b].warps) w.pace = 1u << 2 * chance(4);
    std::vector<u32> order;
    for (u32 w = first * warps; w < (first + count) * warps; w++) order.push_back(w);
    for (u32 idle = 0;;) {
        for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[chance(i)]);
        bool moved = false, passed = false, left = false;
        for (u32 w : order) {
            Fiber* lanes = &machine->fibers[w * LANES];
            for (u32 i = 0; i < LANES; i++) left = left || !lanes[i].done;
            if (chance(machine->blocks[w / warps].warps[w % warps].pace) > 0) passed = true;
            else moved = run_warp(lanes) || moved;
            if (machine->problem) return;
        }
        for (size_t i = machine->copies.size(); i > 0 && !machine->problem; i--)
            if (chance(lateness) == 0) end_copy(i - 1);
        if (machine->problem) return;
        if (!left) {
            while (!machine->copies.empty() && !machine->problem) end_copy(0);
            return;
        }
        idle = moved || !machine->copies.empty() ? 0 : idle + 1;
        if (idle > (passed ? PATIENCE : PATIENCE / 10)) {
            machine->problem = "threads wait for what does not come";
            return;
        }
    }
}

void make_fibers() {
    for (u32 i = 0; i < machine->fibers.size(); i++) {
        Fiber& fiber = machine->fibers[i];
        fiber.thread = i % machine->threads;
        fiber.block = &machine->blocks[i / machine->threads];
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = machine->stacks + i * STACK;
        fiber.start.uc_stack.ss_size = STACK;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, fiber_main, 0);
    }
}
void make_blocks(u32 cluster) {
    const u32 blocks = machine->grid.x * machine->grid.y;
    machine->blocks.resize(blocks);
    machine->clusters.resize(blocks / cluster);
    for (u32 b = 0; b < blocks; b++) {
        Block& block = machine->blocks[b];
        block.index = {b % machine->grid.x, b / machine->grid.x, 0};
        block.cluster = &machine->clusters[b / cluster];
        block.memory = machine->arena + (size_t)b * WINDOW;
        block.threads = machine->threads;
        block.warps.resize(machine->threads / LANES);
        // No number until it is written.
        mprotect(block.memory, machine->window, PROT_READ | PROT_WRITE);
        memset(block.memory, 0xff, machine->window);
        *block.cluster = {0, 0, cluster * machine->threads, b / cluster * cluster};
    }
}

void* reserve(size_t bytes, int protection) {
    void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
}

/// What a launch's timer raises.
constexpr int TOO_LONG = SIGVTALRM;
constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, TOO_LONG};
struct sigaction before_us[NSIG];
void on_fault(int number, siginfo_t* info, void* context) {
    if (running) {
        if (number == TOO_LONG) fail("threads go on without end");
        fail(number == SIGILL || number == SIGTRAP ? "undefined behaviour: an index, a shift or an alignment"
                                                   : "an access outside of its memory");
    } else if (before_us[number].sa_flags & SA_SIGINFO) {
        before_us[number].sa_sigaction(number, info, context);
    } else if (number != TOO_LONG) {
        signal(number, SIG_DFL);
    }
}
/// Ends a launch of this OS thread that never lets another fiber run.
class Timer {
    timer_t timer;

public:
    Timer() {
        struct sigevent event = {};
        event.sigev_notify = SIGEV_THREAD_ID;
        event._sigev_un._tid = gettid();
        event.sigev_signo = TOO_LONG;
        timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
        // Again if it was the scheduler that it met.
        const struct itimerspec when = {{0, 10000000}, {MOST_SECONDS, 0}};
        timer_settime(timer, 0, &when, nullptr);
    }
    ~Timer() { timer_delete(timer); }
};
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
}  // namespace

Index thread_index() { return {machine->current->thread, 0, 0}; }
Index block_index() { return block().index; }
Index grid_size() { return machine->grid; }
u32 block_threads() { return machine->threads; }
void* shared_memory(u32 at) { return block().memory + at; }
u8* dynamic_shared_memory() { return block().memory + machine->window - machine->dynamic; }
u32 place(u32 bytes) {
    const u32 size = (bytes + 15) / 16 * 16, at = placed.fetch_add(size);
    if (at + size > OWN) fail("more shared memory than there is");
    return at;
}

void fail(const char* problem) {
    machine->problem = problem;
    _longjmp(machine->scheduler, FAILED);
}

void spin() {
    machine->current->spun = true;
    suspend();
}

const Words* exchange(Operation operation, const Words& mine) {
    Warp& w = warp();
    if (w.arrived == 0) w.operation = operation;
    else if (w.operation != operation) fail("lanes of a warp are at different operations");
    const Words* all = w.words[w.generation % 2];
    w.words[w.generation % 2][machine->current->thread % LANES] = mine;
    if (++w.arrived < LANES) {
        wait_for({&w.generation, ~0u, w.generation});
    } else {
        w.arrived = 0;
        w.generation++;
    }
    return all;
}

void barrier(u32 index, u32 threads, bool waits) {
    Barrier& b = block().barriers[index];
    if (b.arrived == 0) b.threads = threads;
    else if (b.threads != threads) fail("threads expect different numbers of them at a barrier");
    if (++b.arrived < threads) {
        if (waits) wait_for({&b.generation, ~0u, b.generation});
    } else {
        b.arrived = 0;
        b.generation++;
    }
}

void bulk_copy(void* to, const void* from, u32 bytes, u64* bar) {
    if (((uintptr_t)to | (uintptr_t)from | bytes) % 16 || bytes == 0) fail("a bulk copy is not one of 16 bytes");
    begin_copy({static_cast<u8*>(to), static_cast<const u8*>(from), bytes, {}, &transactions(bar), nullptr, nullptr});
}

void cluster_arrive() {
    Fiber* me = machine->current;
    if (me->in_cluster_barrier) fail("a thread arrives twice at the cluster's barrier");
    Cluster& c = *block().cluster;
    me->in_cluster_barrier = true;
    me->cluster_generation = c.generation;
    c.arrived++;
    complete_cluster(c);
}
}  // namespace emu

using namespace emu;

u32 shared_address(const void* p) {
    owner(p);
    return (u32)(static_cast<const u8*>(p) - machine->arena);
}

void copy16(void* to, const void* from, bool real) {
    if (((uintptr_t)to | (uintptr_t)from) % 16) fail("a copy is not one of 16 bytes");
    begin_copy({static_cast<u8*>(to), real ? static_cast<const u8*>(from) : nullptr, 16, {}, nullptr, machine->current, nullptr, machine->current->groups});
}
void commit_copies() { machine->current->groups++; }
void await_copies() {
    commit_copies();
    emu::await_groups(0);
}
void emu::await_groups(u32 after) {
    const Fiber* me = machine->current;
    for (size_t i = machine->copies.size(); i > 0; i--)
        if (machine->copies[i - 1].owner == me && machine->copies[i - 1].group + after < me->groups) end_copy(i - 1);
}

void barrier_init(u64* bar, u32 count) {
    owner(bar);
    machine->transactions[bar] = {0, count, count, 0};
}
void barrier_expect_more(u64* bar, u32 bytes) { transactions(bar).bytes += bytes; }
void barrier_arrive(u64* bar) {
    Transactions& t = transactions(bar);
    if (t.pending == 0) fail("more threads arrive at a barrier than it counts");
    t.pending--;
    complete(t);
}
void barrier_expect(u64* bar, u32 bytes) {
    barrier_expect_more(bar, bytes);
    barrier_arrive(bar);
}
void barrier_wait(u64* bar, u32 parity) { wait_for({&transactions(bar).phase, 1, parity}); }
void bulk_prefetch(const void* from, u32 bytes) {
    if (((uintptr_t)from | bytes) % 16) fail("a prefetch is not one of 16 bytes");
    // That the bytes are there is all that can be seen.
    for (u32 i = 0; i < bytes; i++) (void)static_cast<const volatile u8*>(from)[i];
}

u32 cluster_rank() { return (u32)(&block() - machine->blocks.data()) - block().cluster->first; }
void cluster_wait() {
    Fiber* me = machine->current;
    if (!me->in_cluster_barrier) fail("a thread waits at the cluster's barrier and has not arrived");
    wait_for({&block().cluster->generation, ~0u, me->cluster_generation});
    me->in_cluster_barrier = false;
}
u32 peer_address(u32 address, u32 rank) {
    const u32 first = block().cluster->first, to = first + rank;
    if (to >= machine->blocks.size() || machine->blocks[to].cluster != block().cluster) fail("a block that the cluster does not have");
    return to * WINDOW + address % WINDOW;
}
void store_peer(u32 address, float x) {
    Block& to = owner(machine->arena + address);
    if (!to.begun || to.threads == 0) fail("a block is written to that may not have begun, or has ended");
    memcpy(machine->arena + address, &x, sizeof x);
}
static void send(u32 address, const float4& x, u32 bytes, u32 bar) {
    if (address % bytes) fail("what is sent is not aligned");
    begin_copy({machine->arena + address, nullptr, bytes, x, &transactions(machine->arena + bar), nullptr, nullptr});
}
void send_peer(u32 address, float x, u32 bar) { send(address, {x, 0, 0, 0}, 4, bar); }
void send_peer(u32 address, const float4& x, u32 bar) { send(address, x, 16, bar); }

/// Memory that ends (rounded up to 16 bytes) beside a page that can't be touched.
extern "C" void* emu_allocate(size_t bytes) {
    const size_t pages = (bytes + PAGE - 1) / PAGE * PAGE;
    u8* all = static_cast<u8*>(reserve(pages + PAGE, PROT_READ | PROT_WRITE));
    if (!all || mprotect(all + pages, PAGE, PROT_NONE) != 0) return nullptr;
    return all + pages - (bytes + 15) / 16 * 16;
}
extern "C" void emu_release(void* p, size_t bytes) {
    munmap(reinterpret_cast<void*>((uintptr_t)p / PAGE * PAGE), (bytes + PAGE - 1) / PAGE * PAGE + PAGE);
}

struct Request {
    const char* kernel;
    const u8* arguments;
    u32 grid[2];
    u32 threads, cluster;
    u32 together;  // blocks that run at a time, clusters as a whole
    u32 dynamic;   // bytes of shared memory
    u64 seed;
};

/// Runs a kernel; null, or why that did not do.
extern "C" const char* emu_launch(const Request* request) {
    Machine m{};
    machine = &m;
    catch_faults();
    const Timer timer;
    for (m.kernel = kernels; m.kernel->name && strcmp(m.kernel->name, request->kernel); m.kernel++) {}
    const u32 blocks = request->grid[0] * request->grid[1];
    if (!m.kernel->name) return "no such kernel";
    if (request->threads % LANES || request->grid[0] % request->cluster || request->together % request->cluster) return "no such shape";
    m.arguments = request->arguments;
    m.grid = {request->grid[0], request->grid[1], 1};
    m.threads = request->threads;
    m.dynamic = (request->dynamic + 127) / 128 * 128;
    m.window = (u32)((OWN + m.dynamic + PAGE - 1) / PAGE * PAGE);
    if (m.window + PAGE > WINDOW) return "more shared memory than there is";
    m.seed = request->seed * 0x9e3779b97f4a7c15ull | 1;
    m.fibers.resize((size_t)blocks * m.threads);
    const size_t arena = (size_t)blocks * WINDOW, stacks = m.fibers.size() * STACK;
    m.arena = static_cast<u8*>(reserve(arena, PROT_NONE));
    m.stacks = static_cast<u8*>(reserve(stacks, PROT_READ | PROT_WRITE));
    if (!m.arena || !m.stacks) return "no memory";
    make_blocks(request->cluster);
    make_fibers();
    for (u32 b = 0; b < blocks && !m.problem; b += request->together) run_blocks(b, std::min(request->together, blocks - b));
    munmap(m.arena, arena);
    munmap(m.stacks, stacks);
    return m.problem;
}
