// y = W f(x) for the many tokens of a chunk of a prompt, from 4-bit weights, to the bit as wide.cu has it. A unit of work is 128 rows of W
// with 64 tokens. Its weights and inputs come through a ring in shared memory; two warpgroups have 64 rows each, and all of these rows'
// inputs, so that no sums travel. Of each tile one record of 32 tokens is multiplied while the sums of the other are scaled. Needs the
// products of warpgroups, so compute capability 9.0.

extern __shared__ __align__(128) u8 shared[];

#define UNIT_BLOCKS WARPS  // row blocks of a unit, one a warp
#define RECORDS 2          // of a unit
#define RECORD_TOKENS 32
#define UNIT_TOKENS (RECORDS * RECORD_TOKENS)
#define DEPTH 4            // tiles of a stage, all of the same eighth of a row
#define RING 3             // stages in shared memory, at most
#define BRINGER WARPS      // the warp behind those that multiply
#define CHUNK_THREADS (THREADS + 128)  // its warpgroup is there to give registers to the others
#define SCALED (RING + 1)  // units whose tokens' scales are in shared memory: the bringer is at most so many ahead

constexpr u32 TILE = tile_bytes<Q4>(), RECORD = record_bytes(RECORD_TOKENS);

// Part of a unit's weights and inputs. src/chunk.rs knows how large it is.
struct Stage {
    u8 weights[UNIT_BLOCKS][DEPTH * TILE];
    u8 inputs[RECORDS][DEPTH * RECORD];
};
struct Ring {
    u64 full[RING], empty[RING];
    float scales[SCALED][UNIT_TOKENS];
};

// A place in the ring, and how often it was passed, but for its low bit.
struct Slot {
    u32 i = 0, turn = 0;
    __device__ __forceinline__ void advance(u32 stages) {
        turn ^= ++i == stages;
        i = i == stages ? 0 : i;
    }
};
__device__ __forceinline__ Stage& stage(u32 slot) { return ((Stage*)(u8*)shared)[slot]; }

// Units of a product. Those of the same rows follow each other, so that their weights are read once from memory.
struct Units {
    u32 blocks, groups, all;
    __device__ __forceinline__ Units(const Matrix& w, const Wide& o)
        : blocks((w.rows + TILE_ROWS - 1) / TILE_ROWS), groups((o.tokens + UNIT_TOKENS - 1) / UNIT_TOKENS),
          all((blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS * groups) {}
    __device__ __forceinline__ u32 block0(u32 unit) const { return unit / groups * UNIT_BLOCKS; }
    __device__ __forceinline__ u32 token0(u32 unit) const { return unit % groups * UNIT_TOKENS; }
};

// What a lane brings of each stage of a unit: a row block's tiles or a record's, or nothing. Where there is no second record, it is the
// first once more.
struct Load {
    const u8* from;
    u32 to, size;  // in a stage; of a tile
    bool is;
    __device__ __forceinline__ Load(const Matrix& w, const Wide& o, const Units& units, u32 unit, u32 lane) {
        const bool weights = lane < UNIT_BLOCKS;
        const u32 block = units.block0(unit) + lane, r = lane - UNIT_BLOCKS;
        const u32 record = min(units.token0(unit) / RECORD_TOKENS + r, (o.tokens - 1) / RECORD_TOKENS);
        size = weights ? TILE : RECORD;
        is = weights ? block < units.blocks : r < RECORDS;
        to = weights ? lane * (DEPTH * TILE) : sizeof(Stage::weights) + r * (DEPTH * RECORD);
        from = (weights ? w.tiles : o.columns) + (u64)(weights ? block : record) * w.k_tiles * size;
    }
};

// Brings everything and finds the scales of tokens, by one warp.
__device__ __forceinline__ void bring(Ring& ring, const Matrix& w, const Wide& o, const Units& units, u32 lane) {
    Slot at;
    u32 scaled = 0;
#pragma unroll 1
    for (u32 unit = blockIdx.x; unit < units.all; unit += gridDim.x) {
        const Load load(w, o, units, unit, lane);
        bool begins = true;
#pragma unroll 1
        for (u32 e = 0; e < WARPS; e++) {
            const u32 until = first_tile(e + 1, w.k_tiles);
#pragma unroll 1
            for (u32 k = first_tile(e, w.k_tiles); k < until; k += DEPTH) {
                u64* bar = &ring.full[at.i];
                const u32 bytes = min((u32)DEPTH, until - k) * load.size;
                barrier_wait(&ring.empty[at.i], at.turn ^ 1);
                if (load.is) {
                    barrier_expect_more(bar, bytes);
                    bulk_copy<false>((u8*)&stage(at.i) + load.to, load.from + (u64)k * load.size, bytes, bar);
                }
                if (begins)
                    for (u32 i = lane; i < UNIT_TOKENS; i += 32) {
                        const u32 token = units.token0(unit) + i;
                        ring.scales[scaled][i] = token < o.tokens ? scale_of(o, w, token) : 0.0f;
                    }
                begins = false;
                barrier_arrive(bar);
                at.advance(o.stages);
            }
        }
        scaled = (scaled + 1) % SCALED;
    }
}

// A thread's sums of a unit: rows g and g + 8 with 16 tokens.
typedef float Sums[RECORDS][RECORD_TOKENS / 4][2];
// f of each of them with its index.
template <class F> __device__ __forceinline__ void each_sum(F f) {
#pragma unroll
    for (int i = 0; i < UNIT_TOKENS / 2; i++) f(i / (RECORD_TOKENS / 2), i % (RECORD_TOKENS / 2) / 2, i % 2);
}

// A row's eighths become one sum, as `sum_of` adds them. What waits for the eighths behind it: the sums of one, and in shared memory those
// of two and of four, which registers have no room for.
#define QUADS (UNIT_TOKENS / 8)  // of a thread's sums
struct Tree {
    Sums one;
    float4* kept;  // [2][QUADS][THREADS], from this thread's on
    // Behind eighth e: total becomes 0, behind the last one the sum of all.
    __device__ __forceinline__ void add(u32 e, Sums& total) {
        if (e & 1) {
            each_sum([&](int r, int i, int j) { total[r][i][j] = one[r][i][j] + total[r][i][j]; });
            if (e & 2) add_kept(0, total);
            if ((e & 6) == 6) {
                add_kept(1, total);
                return;
            }
            keep(e >> 1 & 1, total);
        } else {
            each_sum([&](int r, int i, int j) { one[r][i][j] = total[r][i][j]; });
        }
        each_sum([&](int r, int i, int j) { total[r][i][j] = 0; });
    }
    __device__ __forceinline__ void keep(u32 level, const Sums& total) {
        float4* to = kept + level * (QUADS * THREADS);
#pragma unroll
        for (int n = 0; n < QUADS; n++) {
            const int r = n / (QUADS / 2), i = n % (QUADS / 2) * 2;
            to[n * THREADS] = make_float4(total[r][i][0], total[r][i][1], total[r][i + 1][0], total[r][i + 1][1]);
        }
    }
    __device__ __forceinline__ void add_kept(u32 level, Sums& total) const {
        const float4* from = kept + level * (QUADS * THREADS);
#pragma unroll
        for (int n = 0; n < QUADS; n++) {
            const int r = n / (QUADS / 2), i = n % (QUADS / 2) * 2;
            const float4 first = from[n * THREADS];
            total[r][i][0] = first.x + total[r][i][0];
            total[r][i][1] = first.y + total[r][i][1];
            total[r][i + 1][0] = first.z + total[r][i + 1][0];
            total[r][i + 1][1] = first.w + total[r][i + 1][1];
        }
    }
};

// total += R tiles' sums, as by `add_sums`. One record is multiplied while the sums of the one before it are scaled.
template <int R> __device__ __forceinline__ void add_tiles(const u8* weights, const u8* inputs, int lane, Sums& total) {
    constexpr int N = R * RECORDS, T = RECORD_TOKENS;
    Tile<Q4> w[2];
    int c[2][T];
    auto record = [&](int n) { return inputs + n % RECORDS * (DEPTH * RECORD); };
    w[0] = load_tile<Q4>(weights, lane);
    start_tile<T>(w[0], record(0), 0, lane, c[0]);
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (n + 1 < N) {
            const int next = (n + 1) / RECORDS;
            if (next > n / RECORDS) w[next & 1] = load_tile<Q4>(weights + next * TILE, lane);
            start_tile<T>(w[next & 1], record(n + 1), next, lane, c[(n + 1) & 1]);
            end_tile<1, T>(c[n & 1]);
        } else {
            end_tile<0, T>(c[n & 1]);
        }
        add_sums<T>(w[n / RECORDS & 1].scales, record(n) + n / RECORDS * RECORD, lane, c[n & 1], total[n % RECORDS]);
    }
}

// A thread's sums of a unit, by all threads that multiply.
__device__ __forceinline__ void multiply_unit(Ring& ring, Slot& at, const Matrix& w, const Wide& o, u32 warp, int lane, Sums& total) {
    Tree tree;
    tree.kept = (float4*)(shared + o.stages * sizeof(Stage)) + threadIdx.x;
#pragma unroll 1
    for (u32 e = 0; e < WARPS; e++) {
        const u32 until = first_tile(e + 1, w.k_tiles);
#pragma unroll 1
        for (u32 k = first_tile(e, w.k_tiles); k < until; k += DEPTH) {
            const u32 n = min((u32)DEPTH, until - k);
            const u8 *weights = stage(at.i).weights[warp], *inputs = stage(at.i).inputs[0];
            barrier_wait(&ring.full[at.i], at.turn);
            if (n == DEPTH) {
                add_tiles<DEPTH>(weights, inputs, lane, total);
            } else {
#pragma unroll 1
                for (u32 i = 0; i < n; i++) add_tiles<1>(weights + i * TILE, inputs + i * RECORD, lane, total);
            }
            barrier_arrive(&ring.empty[at.i]);
            at.advance(o.stages);
        }
        tree.add(e, total);
    }
}

// f of the places of a thread's outputs with a record: rows `row` and + 8 of tokens `token`, + 4 ..
template <class F> __device__ __forceinline__ void each_output(const Matrix& w, const Wide& o, u32 token, u32 row, F f) {
    float* y = o.y + (u64)token * o.stride + row;
#pragma unroll
    for (int i = 0; i < RECORD_TOKENS / 4; i++) {
        if (token + i * 4 < o.tokens && row < w.rows) f(i, 0, y);
        if (token + i * 4 < o.tokens && row + 8 < w.rows) f(i, 1, y + 8);
        y += 4 * (u64)o.stride;
    }
}
__device__ __forceinline__ void store(const Matrix& w, const Wide& o, u32 token, u32 row, const float* scales, const float (&sums)[RECORD_TOKENS / 4][2]) {
    float old[RECORD_TOKENS / 4][2];
    each_output(w, o, token, row, [&](int i, int j, const float* y) { old[i][j] = o.add ? __ldcg(y) : 0.0f; });
    each_output(w, o, token, row, [&](int i, int j, float* y) { *y = __fadd_rn(__fmul_rn(sums[i][j], scales[i * 4]), old[i][j]); });
}

// Grid: blocks that run at a time; units are dealt to them in turn.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 1) chunk_q4(Matrix w, Wide o) {
    __shared__ Ring ring;
    const u32 tid = threadIdx.x, warp = __shfl_sync(FULL, tid / 32, 0), lane = tid % 32;
    const Units units(w, o);
    if (tid < o.stages) {
        barrier_init(&ring.full[tid], 32);
        barrier_init(&ring.empty[tid], THREADS);
    }
    barrier_fence();
    __syncthreads();
    launch_dependents();
    wait_for_inputs();
    if (warp >= BRINGER) {
        give_registers<40>();
        if (warp == BRINGER) bring(ring, w, o, units, lane);
        return;
    }
    take_registers<232>();
    Slot at;
    u32 scaled = 0;
#pragma unroll 1
    for (u32 unit = blockIdx.x; unit < units.all; unit += gridDim.x) {
        Sums total = {};
        multiply_unit(ring, at, w, o, warp, lane, total);
        const u32 row = (units.block0(unit) + warp) * TILE_ROWS + (lane >> 2), token = lane & 3;
#pragma unroll
        for (int r = 0; r < RECORDS; r++)
            store(w, o, units.token0(unit) + r * RECORD_TOKENS + token, row, &ring.scales[scaled][r * RECORD_TOKENS + token], total[r]);
        scaled = (scaled + 1) % SCALED;
    }
}
