// A machine of one warp, whose lanes run in turn: the least that fibers.h needs.
#include "fibers.h"

using namespace fibers;

namespace {
struct Warp : Fibers {
    Fiber lanes[LANES];
    Exchange<sizeof(int)> exchange;
    void (*kernel)(int lane, int* memory);
    int* memory;
};
Warp& warp() { return *static_cast<Warp*>(here); }

int sum(int purpose, int lane, int mine) {
    const unsigned char* all = warp().exchange.meet(lane, purpose, &mine, sizeof mine, "lanes at different functions");
    int out = 0;
    for (uint32_t i = 0; i < LANES; i++) out += reinterpret_cast<const int*>(all)[i];
    return out;
}

// Kernels.
void sums(int lane, int* memory) { memory[lane] = sum(0, lane, lane) + sum(0, lane, 1); }
void mixed(int lane, int*) { sum(lane / 31, lane, 0); }
void waits(int lane, int*) {
    if (lane > 0) sum(0, lane, 0);
}
void behind(int lane, int* memory) { memory[LANES * (lane + 1)] = 1; }
void before(int lane, int* memory) { memory[-1 - (1 << 27) * (lane % 2)] = 1; }
void undefined(int lane, int* memory) {
    int mine[4] = {};
    mine[memory[lane] + 4] = 1;
    memory[lane] = mine[memory[lane]];
}
void endless(int, int* memory) {
    for (volatile int* at = memory; *at >= 0;) {}
}

constexpr struct {
    const char* name;
    void (*kernel)(int lane, int* memory);
} KERNELS[] = {{"sums", sums},       {"mixed", mixed},         {"waits", waits},    {"behind", behind},
               {"before", before},   {"undefined", undefined}, {"endless", endless}};

void run() {
    Fiber* me = here->current;
    warp().kernel(static_cast<int>(static_cast<Fiber*>(me) - warp().lanes), warp().memory);
    me->done = true;
    suspend();
}

/// Runs the lanes until all have ended, or wait.
const char* run_all() {
    for (bool moved = true; moved;) {
        moved = false;
        for (Fiber& lane : warp().lanes) {
            if (!lane.ready()) continue;
            moved = true;
            if (!resume(lane)) return here->problem;
        }
    }
    for (const Fiber& lane : warp().lanes)
        if (!lane.done) return "it waits";
    return nullptr;
}
}  // namespace

/// Null, or what was wrong.
extern "C" const char* launch(const char* kernel, int* memory) {
    static thread_local Warp* kept = new Warp{};
    constexpr size_t STACK = 16 << 10;
    static thread_local unsigned char* stacks = reserve(LANES * STACK, PROT_READ | PROT_WRITE);
    catch_faults();
    const Timer timer(1);
    here = kept;
    warp().memory = memory;
    warp().exchange = {};
    for (const auto& known : KERNELS)
        if (!strcmp(known.name, kernel)) warp().kernel = known.kernel;
    for (uint32_t i = 0; i < LANES; i++) make(warp().lanes[i], stacks + i * STACK, STACK, run);
    const char* problem = run_all();
    here = nullptr;
    return problem;
}

/// Whether chance hits everything below n, and a shuffled list keeps all of its parts.
extern "C" bool is_chance_fair(uint32_t n) {
    struct List {
        uint32_t all[64];
        size_t n;
        size_t size() const { return n; }
        uint32_t& operator[](size_t i) { return all[i]; }
    };
    Chance chance(n);
    uint64_t hit = 0, kept = 0;
    for (uint32_t i = 0; i < 50 * n; i++) hit |= 1ull << chance(n);
    List list = {{}, n};
    for (uint32_t i = 0; i < n; i++) list.all[i] = i;
    chance.shuffle(list);
    for (uint32_t i = 0; i < n; i++) kept |= 1ull << list.all[i];
    return hit == (1ull << n) - 1 && kept == hit;
}
