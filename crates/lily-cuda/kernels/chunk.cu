// Products of the many tokens of a chunk of a prompt, from 4-bit weights: y = W f(x), to the bit as wide.cu has it, and experts, as group.cu
// has them. A unit of work is 128 rows of weights with up to 64 tokens. Its weights and inputs come through a ring in shared memory; two
// warpgroups have 64 rows each, and all of these rows' inputs, so that no sums travel. Of each tile one record of 32 tokens is multiplied
// while the sums of another are scaled. Needs the products of warpgroups, so compute capability 9.0.

extern __shared__ __align__(128) u8 shared[];

#define UNIT_BLOCKS WARPS  // row blocks of a unit, one a warp
#define RECORDS 2          // of a unit, at most
#define RECORD_TOKENS 32
#define UNIT_TOKENS (RECORDS * RECORD_TOKENS)
#define DEPTH 4            // tiles of a stage, of the same eighth of a row, or (EACH) of as many eighths of one tile
#define RING 3             // stages in shared memory, at most
#define BRINGER WARPS      // the warp behind those that multiply
#define CHUNK_THREADS (THREADS + 128)  // its warpgroup is there to give registers to the others
#define TOLD (RING + 1)    // units that are described in shared memory: the bringer is at most so many ahead

constexpr u32 TILE = tile_bytes<Q4>(), RECORD = record_bytes(RECORD_TOKENS);

// Part of a unit's weights and inputs. src/chunk.rs knows how large it is.
struct Stage {
    u8 weights[UNIT_BLOCKS][DEPTH * TILE];
    u8 inputs[RECORDS][DEPTH * RECORD];
};
// What the bringer tells of a unit: where tokens' outputs go, and what multiplies their sums.
struct Told {
    u32 tokens;
    u32 places[UNIT_TOKENS];
    float scales[UNIT_TOKENS];
};
struct Ring {
    u64 full[RING], empty[RING];
    Told told[TOLD];
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

// Where a unit's weights and inputs are.
struct Part {
    const u8* weights;  // [blocks][k_tiles]
    u32 blocks;         // 0 where an expert is less wide than others
    u32 k_tiles;
    const u8* inputs;   // records
    u32 between;        // bytes from one to the next
    u32 tokens;
    u32 first;          // of its tokens
};

// What a lane brings of each stage of a unit: a row block's tiles or a record's, or nothing.
struct Load {
    const u8* from;
    u32 to, size;  // in a stage; of a tile
    bool is;
    __device__ __forceinline__ Load(const Part& p, u32 lane) {
        const bool weights = lane < UNIT_BLOCKS;
        const u32 r = lane - UNIT_BLOCKS;
        size = weights ? TILE : RECORD;
        is = weights ? lane < p.blocks : r * RECORD_TOKENS < p.tokens;
        to = weights ? lane * (DEPTH * TILE) : sizeof(Stage::weights) + r * (DEPTH * RECORD);
        from = weights ? p.weights + (u64)lane * p.k_tiles * TILE : p.inputs + (u64)r * p.between;
    }
};

// Eighths of a row that a stage has tiles of.
template <bool EACH> constexpr u32 EIGHTHS = EACH ? DEPTH : 1;

// Describes and brings all units of the block, by one warp. Of a product: `all` units, `part(unit)`, place(part, i) and scale(place) of its
// tokens, and EACH: every row has WARPS tiles.
template <class Of> __device__ __forceinline__ void bring(Ring& ring, const Of& of, u32 stages, u32 lane) {
    Slot at;
    u32 told = 0;
#pragma unroll 1
    for (u32 unit = blockIdx.x; unit < of.all; unit += gridDim.x) {
        const Part part = of.part(unit);
        const Load load(part, lane);
        Told& to = ring.told[told];
        bool begins = true;
#pragma unroll 1
        for (u32 e = 0; e < WARPS; e += EIGHTHS<Of::EACH>) {
            const u32 until = first_tile(e + EIGHTHS<Of::EACH>, part.k_tiles);
#pragma unroll 1
            for (u32 k = first_tile(e, part.k_tiles); k < until; k += DEPTH) {
                u64* bar = &ring.full[at.i];
                const u32 bytes = min((u32)DEPTH, until - k) * load.size;
                barrier_wait(&ring.empty[at.i], at.turn ^ 1);
                if (load.is) {
                    barrier_expect_more(bar, bytes);
                    bulk_copy<false>((u8*)&stage(at.i) + load.to, load.from + (u64)k * load.size, bytes, bar);
                }
                if (begins) {
                    if (lane == 0) to.tokens = part.tokens;
                    for (u32 i = lane; i < part.tokens; i += 32) {
                        const u32 place = of.place(part, i);
                        to.places[i] = place;
                        to.scales[i] = of.scale(place);
                    }
                }
                begins = false;
                barrier_arrive(bar);
                at.advance(stages);
            }
        }
        told = (told + 1) % TOLD;
    }
}

// A thread's sums of a unit with N records: rows g and g + 8 with 8 tokens of each.
template <int N> using Sums = float[N][RECORD_TOKENS / 4][2];
// f of each of them with its index.
template <int N, class F> __device__ __forceinline__ void each_sum(F f) {
#pragma unroll
    for (int i = 0; i < N * RECORD_TOKENS / 2; i++) f(i / (RECORD_TOKENS / 2), i % (RECORD_TOKENS / 2) / 2, i % 2);
}

// A row's eighths become one sum, as `sum_of` adds them. What waits for the eighths behind it: the sums of one, and in shared memory those
// of two and of four, which registers have no room for.
template <int N> struct Tree {
    Sums<N> one;
    float4* kept;  // [2][UNIT_TOKENS / 8][THREADS], from this thread's on
    // Behind eighth e: total becomes 0, behind the last one the sum of all.
    __device__ __forceinline__ void add(u32 e, Sums<N>& total) {
        if (e & 1) {
            each_sum<N>([&](int r, int i, int j) { total[r][i][j] = one[r][i][j] + total[r][i][j]; });
            if (e & 2) add_kept(0, total);
            if ((e & 6) == 6) {
                add_kept(1, total);
                return;
            }
            keep(e >> 1 & 1, total);
        } else {
            each_sum<N>([&](int r, int i, int j) { one[r][i][j] = total[r][i][j]; });
        }
        each_sum<N>([&](int r, int i, int j) { total[r][i][j] = 0; });
    }
    __device__ __forceinline__ float4* four(u32 level, int r, int i) const {
        return kept + (level * (UNIT_TOKENS / 8) + r * (RECORD_TOKENS / 8) + i / 2) * THREADS;
    }
    __device__ __forceinline__ void keep(u32 level, const Sums<N>& total) {
#pragma unroll
        for (int r = 0; r < N; r++)
#pragma unroll
            for (int i = 0; i < RECORD_TOKENS / 4; i += 2)
                *four(level, r, i) = make_float4(total[r][i][0], total[r][i][1], total[r][i + 1][0], total[r][i + 1][1]);
    }
    __device__ __forceinline__ void add_kept(u32 level, Sums<N>& total) const {
#pragma unroll
        for (int r = 0; r < N; r++)
#pragma unroll
            for (int i = 0; i < RECORD_TOKENS / 4; i += 2) {
                const float4 first = *four(level, r, i);
                total[r][i][0] = first.x + total[r][i][0];
                total[r][i][1] = first.y + total[r][i][1];
                total[r][i + 1][0] = first.z + total[r][i + 1][0];
                total[r][i + 1][1] = first.w + total[r][i + 1][1];
            }
    }
};

// total += R tiles' sums with N records, as by `add_sums`. One record is multiplied while the sums of the one before it are scaled. behind(r):
// tile r is added.
template <int R, int N, class Behind>
__device__ __forceinline__ void add_tiles(const u8* weights, const u8* inputs, int lane, Sums<N>& total, Behind behind) {
    constexpr int ALL = R * N, T = RECORD_TOKENS;
    Tile<Q4> w[2];
    int c[2][T];
    auto record = [&](int n) { return inputs + n % N * (DEPTH * RECORD); };
    w[0] = load_tile<Q4>(weights, lane);
    start_tile<T>(w[0], record(0), 0, lane, c[0]);
#pragma unroll
    for (int n = 0; n < ALL; n++) {
        if (n + 1 < ALL) {
            const int next = (n + 1) / N;
            if (next > n / N) w[next & 1] = load_tile<Q4>(weights + next * TILE, lane);
            start_tile<T>(w[next & 1], record(n + 1), next, lane, c[(n + 1) & 1]);
            end_tile<1, T>(c[n & 1]);
        } else {
            end_tile<0, T>(c[n & 1]);
        }
        add_sums<T>(w[n / N & 1].scales, record(n) + n / N * RECORD, lane, c[n & 1], total[n % N]);
        if (n % N + 1 == N) behind(n / N);
    }
}

// A thread's sums of a unit with N records, by all threads that multiply.
template <int N, bool EACH>
__device__ __forceinline__ void multiply_unit(Ring& ring, Slot& at, u32 k_tiles, u32 stages, u32 warp, int lane, Sums<N>& total) {
    Tree<N> tree;
    tree.kept = (float4*)(shared + stages * sizeof(Stage)) + threadIdx.x;
#pragma unroll 1
    for (u32 e = 0; e < WARPS; e += EIGHTHS<EACH>) {
        const u32 until = first_tile(e + EIGHTHS<EACH>, k_tiles);
#pragma unroll 1
        for (u32 k = first_tile(e, k_tiles); k < until; k += DEPTH) {
            const u32 n = min((u32)DEPTH, until - k);
            const u8 *weights = stage(at.i).weights[warp], *inputs = stage(at.i).inputs[0];
            barrier_wait(&ring.full[at.i], at.turn);
            if constexpr (EACH) {
                add_tiles<DEPTH, N>(weights, inputs, lane, total, [&](u32 r) { tree.add((e & 4) | r, total); });
            } else if (n == DEPTH) {
                add_tiles<DEPTH, N>(weights, inputs, lane, total, [](u32) {});
            } else {
#pragma unroll 1
                for (u32 i = 0; i < n; i++) add_tiles<1, N>(weights + i * TILE, inputs + i * RECORD, lane, total, [](u32) {});
            }
            barrier_arrive(&ring.empty[at.i]);
            at.advance(stages);
        }
        if (!EACH) tree.add(e, total);
    }
}

// All units of a block. Of a product, beside what `bring` wants: `k_tiles(unit)`, and store<N>(unit, told, warp, lane, sums).
template <class Of> __device__ __forceinline__ void multiply(Ring& ring, const Of& of, u32 stages, u32 warp, int lane) {
    Slot at;
    u32 turn = 0;
#pragma unroll 1
    for (u32 unit = blockIdx.x; unit < of.all; unit += gridDim.x) {
        const Told& told = ring.told[turn];
        barrier_wait(&ring.full[at.i], at.turn);  // it is described
        if (__shfl_sync(FULL, told.tokens, 0) > RECORD_TOKENS) {
            Sums<2> sums = {};
            multiply_unit<2, Of::EACH>(ring, at, of.k_tiles(unit), stages, warp, lane, sums);
            of.template store<2>(unit, told, warp, lane, sums);
        } else {
            Sums<1> sums = {};
            multiply_unit<1, Of::EACH>(ring, at, of.k_tiles(unit), stages, warp, lane, sums);
            of.template store<1>(unit, told, warp, lane, sums);
        }
        turn = (turn + 1) % TOLD;
    }
}

template <class Of> __device__ __forceinline__ void run(Ring& ring, const Of& of, u32 stages) {
    const u32 warp = __shfl_sync(FULL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (warp >= BRINGER) {
        give_registers<40>();
        if (warp == BRINGER) bring(ring, of, stages, lane);
        return;
    }
    take_registers<232>();
    multiply(ring, of, stages, warp, lane);
}

// Before anything is read.
__device__ __forceinline__ void begin(Ring& ring, u32 stages) {
    if (threadIdx.x < stages) {
        barrier_init(&ring.full[threadIdx.x], 32);
        barrier_init(&ring.empty[threadIdx.x], THREADS);
    }
    barrier_fence();
    __syncthreads();
    launch_dependents();
    wait_for_inputs();
}

// f(token, record, i) of those of a thread's tokens that there are.
template <int N, class F> __device__ __forceinline__ void each_token(const Told& told, int lane, F f) {
#pragma unroll
    for (int n = 0; n < N * RECORD_TOKENS / 4; n++)
        if (n * 4 + (lane & 3) < told.tokens) f(n * 4 + (lane & 3), n / (RECORD_TOKENS / 4), n % (RECORD_TOKENS / 4));
}

// y = W f(x). Units of the same rows follow each other, so that their weights are read once from memory.
struct Dense {
    static constexpr bool EACH = false;
    const Matrix& w;
    const Wide& o;
    u32 blocks, groups, all;
    __device__ __forceinline__ Dense(const Matrix& w, const Wide& o)
        : w(w), o(o), blocks((w.rows + TILE_ROWS - 1) / TILE_ROWS), groups((o.tokens + UNIT_TOKENS - 1) / UNIT_TOKENS),
          all((blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS * groups) {}
    __device__ __forceinline__ u32 k_tiles(u32) const { return w.k_tiles; }
    __device__ __forceinline__ Part part(u32 unit) const {
        const u32 block = unit / groups * UNIT_BLOCKS, token = unit % groups * UNIT_TOKENS, row = w.k_tiles * RECORD;
        return Part{w.tiles + (u64)block * w.k_tiles * TILE,           min((u32)UNIT_BLOCKS, blocks - block), w.k_tiles,
                    o.columns + (u64)(token / RECORD_TOKENS) * row, row, min((u32)UNIT_TOKENS, o.tokens - token), token};
    }
    __device__ __forceinline__ u32 place(const Part& p, u32 i) const { return p.first + i; }
    __device__ __forceinline__ float scale(u32 place) const { return scale_of(o, w, place); }
    template <int N> __device__ __forceinline__ void store(u32 unit, const Told& told, u32 warp, int lane, const Sums<N>& sums) const {
        const u32 row = (unit / groups * UNIT_BLOCKS + warp) * TILE_ROWS + (lane >> 2);
        Sums<N> old = {};
        auto at = [&](u32 token) { return o.y + (u64)told.places[token] * o.stride + row; };
        if (o.add)
            each_token<N>(told, lane, [&](u32 token, int r, int i) {
#pragma unroll
                for (int j = 0; j < 2; j++)
                    if (row + j * 8 < w.rows) old[r][i][j] = __ldcg(at(token) + j * 8);
            });
        each_token<N>(told, lane, [&](u32 token, int r, int i) {
            const float scale = told.scales[token];
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (row + j * 8 < w.rows) at(token)[j * 8] = __fadd_rn(__fmul_rn(sums[r][i][j], scale), old[r][i][j]);
        });
    }
};

// Grid: blocks that run at a time; units are dealt to them in turn. So for the others.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 1) chunk_q4(Matrix w, Wide o) {
    __shared__ Ring ring;
    begin(ring, o.stages);
    run(ring, Dense(w, o), o.stages);
}

// Experts of the pieces of work, of up to UNIT_TOKENS pairs each, that `route` lists.
struct Experts {
    const u8* gate_up;  // packed one after another
    const u8* gate_up_shared;
    const u8* down;
    const u8* down_shared;
    const Work* work;
    const u32* counts;
    const u32* pairs;
    const u8* fragments;  // of x, as the router leaves them
    const Unit* units;
    const float* scale;
    u8* records;      // a piece's inputs: [piece][RECORDS][tiles of a row]
    float* middle;    // [pair, MIDDLE]: SiLU(gate x) * (up x)
    float* expanded;  // [pair, HIDDEN]: down middle
    u32 stages;       // in shared memory
    __device__ __forceinline__ Work piece(u32 i) const {
        const uint4 w = __ldcg((const uint4*)work + i);
        return Work{w.x, w.y, w.z, w.w};
    }
    __device__ __forceinline__ u32 pieces() const { return __ldcg(counts); }
    // Pieces of the shared expert are the last.
    __device__ __forceinline__ u32 routed() const { return __ldcg(counts + 1); }
};

// Both products are of units that follow each other by their piece. BLOCKS: row blocks of the widest expert; TILES: of a row of its inputs.
template <u32 BLOCKS, u32 TILES, bool IS_EACH> struct OfExperts {
    static constexpr bool EACH = IS_EACH;
    static constexpr u32 UNITS = (BLOCKS + UNIT_BLOCKS - 1) / UNIT_BLOCKS;
    const Experts& o;
    u32 all, routed;
    __device__ __forceinline__ explicit OfExperts(const Experts& o) : o(o), all(o.pieces() * UNITS), routed(o.routed()) {}
    __device__ __forceinline__ bool is_shared(u32 unit) const { return unit / UNITS >= routed; }
    __device__ __forceinline__ u32 block0(u32 unit) const { return unit % UNITS * UNIT_BLOCKS; }
    // Of an expert's `blocks` row blocks of k_tiles tiles, the routed ones' or the shared one's.
    __device__ __forceinline__ Part part_of(u32 unit, const u8* experts, const u8* shared_expert, u32 blocks, u32 k_tiles) const {
        const u32 piece = unit / UNITS, block = block0(unit), row = TILES * RECORD;
        const Work w = o.piece(piece);
        const u64 from = (is_shared(unit) ? 0 : (u64)w.expert * blocks) + block;
        return Part{(is_shared(unit) ? shared_expert : experts) + from * k_tiles * TILE, block < blocks ? min((u32)UNIT_BLOCKS, blocks - block) : 0, k_tiles,
                    o.records + (u64)piece * (RECORDS * row), row, w.count, w.first};
    }
    __device__ __forceinline__ u32 place(const Part& p, u32 i) const { return __ldcg(o.pairs + p.first + i); }
};
__host__ __device__ constexpr u32 larger(u32 a, u32 b) { return a > b ? a : b; }

struct GateUp : OfExperts<larger(GATE_UP_BLOCKS, SHARED_BLOCKS), HIDDEN_TILES, HIDDEN_TILES == WARPS> {
    __device__ __forceinline__ explicit GateUp(const Experts& o) : OfExperts(o) {}
    __device__ __forceinline__ u32 k_tiles(u32) const { return HIDDEN_TILES; }
    __device__ __forceinline__ Part part(u32 unit) const {
        return part_of(unit, o.gate_up, o.gate_up_shared, is_shared(unit) ? SHARED_BLOCKS : GATE_UP_BLOCKS, HIDDEN_TILES);
    }
    __device__ __forceinline__ float scale(u32 place) const { return __ldcg(o.scale + place / SLOTS); }
    template <int N> __device__ __forceinline__ void store(u32 unit, const Told& told, u32 warp, int lane, const Sums<N>& sums) const {
        const u32 row = (block0(unit) + warp) * 8 + (lane >> 2), width = is_shared(unit) ? SHARED_WIDTH : EXPERT_WIDTH;
        each_token<N>(told, lane, [&](u32 token, int r, int i) {
            if (row < width) o.middle[(u64)told.places[token] * (MIDDLE) + row] = swiglu(sums[r][i][0], sums[r][i][1], told.scales[token]);
        });
    }
};
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 1) chunk_gate_up_q4(Experts o) {
    __shared__ Ring ring;
    begin(ring, o.stages);
    run(ring, GateUp(o), o.stages);
}

struct Down : OfExperts<HIDDEN_BLOCKS, MIDDLE_TILES, EXPERT_TILES == WARPS && SHARED_TILES == WARPS> {
    __device__ __forceinline__ explicit Down(const Experts& o) : OfExperts(o) {}
    __device__ __forceinline__ u32 k_tiles(u32 unit) const { return is_shared(unit) ? SHARED_TILES : EXPERT_TILES; }
    __device__ __forceinline__ Part part(u32 unit) const { return part_of(unit, o.down, o.down_shared, HIDDEN_BLOCKS, k_tiles(unit)); }
    __device__ __forceinline__ float scale(u32) const { return 1; }
    template <int N> __device__ __forceinline__ void store(u32 unit, const Told& told, u32 warp, int lane, const Sums<N>& sums) const {
        const u32 row = (block0(unit) + warp) * TILE_ROWS + (lane >> 2);
        each_token<N>(told, lane, [&](u32 token, int r, int i) {
#pragma unroll
            for (int j = 0; j < 2; j++)
                if (row + j * 8 < HIDDEN) o.expanded[(u64)told.places[token] * HIDDEN + row + j * 8] = sums[r][i][j];
        });
    }
};
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, 1) chunk_down_q4(Experts o) {
    __shared__ Ring ring;
    begin(ring, o.stages);
    run(ring, Down(o), o.stages);
}

// Fragments of the rows of x as each piece's records. Grid: (pieces at most, any): blocks of y stride over tiles.
extern "C" __global__ void __launch_bounds__(THREADS) chunk_gather(Experts o) {
    launch_dependents();
    wait_for_inputs();
    const u32 piece = blockIdx.x;
    if (piece >= o.pieces()) return;
    const Work w = o.piece(piece);
    // Two threads a pair, one a digit.
    const u32 digit = threadIdx.x % 2, pair = threadIdx.x / 2 % UNIT_TOKENS, in = pair % RECORD_TOKENS;
    if (pair >= w.count) return;
    const u32 row = __ldcg(o.pairs + w.first + pair) / SLOTS;
    u8* records = o.records + ((u64)piece * RECORDS + pair / RECORD_TOKENS) * (HIDDEN_TILES * RECORD);
    for (u32 tile = blockIdx.y * 2 + threadIdx.x / (2 * UNIT_TOKENS); tile < HIDDEN_TILES; tile += gridDim.y * 2) {
        const u64 from = (u64)row * HIDDEN_TILES + tile;
        const uint4* lanes = (const uint4*)(o.fragments + from * FRAGMENT_BYTES<true>) + digit;
        const uint4 a = __ldcg(lanes), b = __ldcg(lanes + 2), c = __ldcg(lanes + 4), d = __ldcg(lanes + 6);
        uint4* to = (uint4*)(records + tile * RECORD) + in * 2 + digit;
        to[0] = make_uint4(a.x, b.x, c.x, d.x);
        to[RECORD_TOKENS * 2] = make_uint4(a.y, b.y, c.y, d.y);
        to[RECORD_TOKENS * 4] = make_uint4(a.z, b.z, c.z, d.z);
        to[RECORD_TOKENS * 6] = make_uint4(a.w, b.w, c.w, d.w);
        const Columns columns{records, RECORD_TOKENS, HIDDEN_TILES};
        const float2 unit = __ldcg((const float2*)o.units + from);
        if (digit == 0) columns.store_unit(in, tile, Unit{unit.x, unit.y});
    }
}

// `middle` as each piece's records, a warp a pair. Grid: (pieces at most, any): warps of y stride over pairs.
extern "C" __global__ void __launch_bounds__(THREADS) chunk_columns(Experts o) {
    launch_dependents();
    wait_for_inputs();
    const u32 piece = blockIdx.x, lane = threadIdx.x % 32;
    if (piece >= o.pieces()) return;
    const Work w = o.piece(piece);
    const u32 tiles = piece >= o.routed() ? SHARED_TILES : EXPERT_TILES;
    const Columns to{o.records + (u64)piece * (RECORDS * MIDDLE_TILES * RECORD), RECORD_TOKENS, MIDDLE_TILES};
    for (u32 i = blockIdx.y * WARPS + threadIdx.x / 32; i < w.count; i += gridDim.y * WARPS) {
        const float* x = o.middle + (u64)__ldcg(o.pairs + w.first + i) * (MIDDLE);
        for (u32 tile0 = 0; tile0 < tiles; tile0 += 4) {
            const Place p = place(tile0, tiles, tiles * TILE_COLS, lane);
            float v[8] = {};
            if (p.active) load8(x + p.col, v);
            to.store(i, p, make_digits(v), lane);
        }
    }
}
