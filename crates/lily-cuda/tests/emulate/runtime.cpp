// Runs kernels on the CPU. All threads of the blocks that run at a time are fibers of one OS thread (lily-emulate's fibers.h), resumed by
// chance; whatever they wait for suspends them. Warps have different paces, so that some are far ahead of others. What the hardware does
// in the background ends at a time by chance, and its destination is no number from the beginning on. Shared memory and every buffer end
// beside a page that can't be touched.
#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <vector>

#include "fibers.h"
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

using fibers::Fiber, fibers::Meeting, fibers::reserve, fibers::resume, fibers::suspend, fibers::wait_for;
static_assert(LANES == fibers::LANES, "lanes of a warp");

struct Barrier : Meeting { u32 threads; };
/// A barrier in shared memory: the phase ends when none is pending and all expected bytes have come.
struct Transactions { u32 phase, count, pending; long bytes; };
struct Warp {
    u32 pace;
    fibers::Exchange<sizeof(Words)> exchange;
};
struct Cluster : Meeting { u32 threads, first; };
struct Block {
    Index index;
    Cluster* cluster;
    u8* memory;
    u32 threads;  // that have not ended
    bool begun;
    Barrier barriers[16];
    std::vector<Warp> warps;
};
/// A warp's products on their way: they read shared memory and write `c` as late as can be.
struct Products {
    int* c;
    u32 n, group;
    Words a[2][4];  // of the lanes that have this one's rows
    u64 b[2];
};
struct Thread : Fiber {
    bool spun, in_cluster_barrier;
    u32 index, cluster_generation, groups, product_groups;  // groups: of its copies and of its products, so far
    Block* block;
    std::vector<Products> products;
};
/// A copy on its way: from `from`, or of `value`.
struct Copy {
    u8* to;
    const u8* from;
    u32 bytes;
    float4 value;
    Transactions* bar;
    const Thread* owner;
    Block* block;  // whose memory it goes to
    u32 group;     // of its owner's
};

struct Machine : fibers::Fibers {
    const Kernel* kernel;
    const u8* arguments;
    Index grid;
    u32 threads, dynamic, window;  // of a block: threads, bytes
    u8* arena;
    u8* stacks;
    std::vector<Block> blocks;
    std::vector<Cluster> clusters;
    std::vector<Thread> all;
    std::vector<Copy> copies;
    std::unordered_map<const void*, Transactions> transactions;
    fibers::Chance chance;
};
/// An OS thread has one launch at a time.
#define machine (static_cast<Machine*>(fibers::here))
std::atomic<u32> placed;

u32 chance(u32 n) { return machine->chance(n); }

Thread& me() { return *static_cast<Thread*>(machine->current); }
Block& block() { return *me().block; }
Warp& warp() { return block().warps[me().index / LANES]; }

void fiber_main() {
    block().begun = true;
    machine->kernel->run(machine->arguments);
    me().done = true;
    block().threads--;
    // A thread that has ended is not waited for.
    Cluster& c = *block().cluster;
    if (me().in_cluster_barrier && me().cluster_generation == c.generation) c.arrived--;
    c.threads--;
    if (c.threads > 0) c.complete(c.threads);
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

/// Adds up what one descriptor's matrix brings: see `mma` for rows and columns.
void multiply(const Words (&a)[4], u64 b, const Products& p) {
    const u32 t = me().index % 4;
    const u8* base = block().memory + (b & 0x3fff) * 16;
    const u64 next_inputs = (b >> 16 & 0x3fff) * 16, next_columns = (b >> 32 & 0x3fff) * 16;
    for (u32 i = 0; i < p.n; i++) {
        const u32 column = i / 4 * 8 + t * 2 + i % 2, row = i / 2 % 2;
        for (u32 k = 0; k < 32; k++) {
            const u8* at = base + column / 8 * next_columns + k / 16 * next_inputs + column % 8 * 16 + k % 16;
            owner(at);
            p.c[i] += (int)(u8)(a[k % 16 / 4].word[k / 16 * 2 + row] >> k % 4 * 8) * *(const int8_t*)at;
        }
    }
}

/// Runs a warp's lanes, each until it waits, some times; whether any did more than ask again.
bool run_warp(Thread* lanes) {
    bool moved = false;
    for (u32 times = 1 + chance(32); times > 0 && !machine->problem; times--) {
        bool any = false;
        const u32 first = chance(LANES);
        for (u32 i = 0; i < LANES; i++) {
            Thread& thread = lanes[(first + i) % LANES];
            if (!thread.ready()) continue;
            thread.spun = false;
            if (!resume(thread)) return false;
            any = any || !thread.spun;
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
        machine->chance.shuffle(order);
        bool moved = false, passed = false, left = false;
        for (u32 w : order) {
            Thread* lanes = &machine->all[w * LANES];
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
    for (u32 i = 0; i < machine->all.size(); i++) {
        Thread& thread = machine->all[i];
        thread.index = i % machine->threads;
        thread.block = &machine->blocks[i / machine->threads];
        fibers::make(thread, machine->stacks + i * STACK, STACK, fiber_main);
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
        *block.cluster = {{0, 0}, cluster * machine->threads, b / cluster * cluster};
    }
}
}  // namespace

Index thread_index() { return {me().index, 0, 0}; }
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

void fail(const char* problem) { fibers::fail(problem); }

void spin() {
    me().spun = true;
    suspend();
}

const Words* exchange(Operation operation, const Words& mine) {
    const void* all = warp().exchange.meet(me().index % LANES, operation, &mine, sizeof mine, "lanes of a warp are at different operations");
    return static_cast<const Words*>(all);
}

void barrier(u32 index, u32 threads, bool waits) {
    Barrier& b = block().barriers[index];
    if (b.arrived == 0) b.threads = threads;
    else if (b.threads != threads) fail("threads expect different numbers of them at a barrier");
    const fibers::Wait end = b.end();
    if (!b.arrive(threads) && waits) wait_for(end);
}

void bulk_copy(void* to, const void* from, u32 bytes, u64* bar) {
    if (((uintptr_t)to | (uintptr_t)from | bytes) % 16 || bytes == 0) fail("a bulk copy is not one of 16 bytes");
    begin_copy({static_cast<u8*>(to), static_cast<const u8*>(from), bytes, {}, &transactions(bar), nullptr, nullptr});
}

void cluster_arrive() {
    if (me().in_cluster_barrier) fail("a thread arrives twice at the cluster's barrier");
    Cluster& c = *block().cluster;
    me().in_cluster_barrier = true;
    me().cluster_generation = c.generation;
    c.arrive(c.threads);
}
}  // namespace emu

using namespace emu;

u32 shared_address(const void* p) {
    owner(p);
    return (u32)(static_cast<const u8*>(p) - machine->arena);
}

void copy16(void* to, const void* from, bool real) {
    if (((uintptr_t)to | (uintptr_t)from) % 16) fail("a copy is not one of 16 bytes");
    begin_copy({static_cast<u8*>(to), real ? static_cast<const u8*>(from) : nullptr, 16, {}, nullptr, &me(), nullptr, me().groups});
}
void commit_copies() { me().groups++; }
void await_copies() {
    commit_copies();
    emu::await_groups(0);
}
void emu::await_groups(u32 after) {
    for (size_t i = machine->copies.size(); i > 0; i--)
        if (machine->copies[i - 1].owner == &me() && machine->copies[i - 1].group + after < me().groups) end_copy(i - 1);
}

void emu::start_products(int* c, u32 n, const Words* first, const Words* second, u64 b_first, u64 b_second) {
    Products p{c, n, me().product_groups, {}, {b_first, b_second}};
    const u32 lane = me().index % LANES / 4 * 4;
    std::copy_n(first + lane, 4, p.a[0]);
    std::copy_n(second + lane, 4, p.a[1]);
    std::fill_n(c, n, INT32_MIN);
    me().products.push_back(p);
}
void commit_products() { me().product_groups++; }
void emu::await_products(u32 after) {
    auto& all = me().products;
    while (!all.empty() && all.front().group + after < me().product_groups) {
        const Products p = all.front();
        std::fill_n(p.c, p.n, 0);
        for (u32 half = 0; half < 2; half++) multiply(p.a[half], p.b[half], p);
        all.erase(all.begin());
    }
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
    if (!me().in_cluster_barrier) fail("a thread waits at the cluster's barrier and has not arrived");
    wait_for({&block().cluster->generation, ~0u, me().cluster_generation});
    me().in_cluster_barrier = false;
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
    fibers::here = &m;
    fibers::catch_faults();
    const fibers::Timer timer(MOST_SECONDS);
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
    m.chance = fibers::Chance(request->seed);
    m.all.resize((size_t)blocks * m.threads);
    const size_t arena = (size_t)blocks * WINDOW, stacks = m.all.size() * STACK;
    m.arena = reserve(arena, PROT_NONE);
    m.stacks = reserve(stacks, PROT_READ | PROT_WRITE);
    if (!m.arena || !m.stacks) return "no memory";
    make_blocks(request->cluster);
    make_fibers();
    for (u32 b = 0; b < blocks && !m.problem; b += request->together) run_blocks(b, std::min(request->together, blocks - b));
    munmap(m.arena, arena);
    munmap(m.stacks, stacks);
    return m.problem;
}
