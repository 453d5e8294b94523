// Mixture of experts: docs/model-spec.md, section 5. Router logits come from a product, its last row the shared gate.
//
// Experts are packed one after another; a row block of gate and up has 8 rows of gate, then the same 8 of up, so that the
// lane that holds a gate also holds its up. Slot TOP_K of a token is the shared expert.

// What `route` and `list_experts` leave. pairs: row * SLOTS + slot, by expert, those of the shared one last; work: pieces of up to `group`
// pairs in the same order, counts[0] in all, counts[1] of routed experts.
struct Listing {
    u32* pairs;
    Work* work;
    u32* counts;
    u32 rows, group;
};

// Pairs of each expert, then the place of its next one.
struct Places {
    u32 size[EXPERTS], start[EXPERTS], sizes[32], pieces[32];
};

// The pieces of all experts, and where each one's pairs begin. A block of 1,024 threads, one an expert: sums over those before it, first
// within the warp, then over warps.
__device__ __forceinline__ void list_pieces(Places& p, const Listing& to) {
    const u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    __syncthreads();
    const u32 n = tid < EXPERTS ? p.size[tid] : 0, parts = (n + to.group - 1) / to.group;
    u32 first = n, piece = parts;
#pragma unroll
    for (u32 o = 1; o < 32; o <<= 1) {
        const u32 a = __shfl_up_sync(FULL, first, o), b = __shfl_up_sync(FULL, piece, o);
        first += lane >= o ? a : 0;
        piece += lane >= o ? b : 0;
    }
    if (lane == 31) {
        p.sizes[warp] = first;
        p.pieces[warp] = piece;
    }
    __syncthreads();
    first += __reduce_add_sync(FULL, lane < warp ? p.sizes[lane] : 0) - n;
    piece += __reduce_add_sync(FULL, lane < warp ? p.pieces[lane] : 0) - parts;
    const u32 routed = __reduce_add_sync(FULL, p.pieces[lane]), shared_parts = (to.rows + to.group - 1) / to.group;
    if (tid < EXPERTS) p.start[tid] = first;
    for (u32 i = 0; i < parts; i++) to.work[piece + i] = Work{tid, first + i * to.group, min(to.group, n - i * to.group), 0};
    for (u32 i = tid; i < shared_parts; i += 1024)
        to.work[routed + i] = Work{EXPERTS, to.rows * TOP_K + i * to.group, min(to.group, to.rows - i * to.group), 0};
    for (u32 i = tid; i < to.rows; i += 1024) to.pairs[to.rows * TOP_K + i] = i * SLOTS + TOP_K;
    if (tid == 0) {
        to.counts[0] = routed + shared_parts;
        to.counts[1] = routed;
    }
    __syncthreads();
}

// Chooses experts for every row and lists the pairs (row, slot) by expert. One block of 1,024 threads.
// weights: [rows, SLOTS]; chosen: scratch, [rows, TOP_K].
extern "C" __global__ void __launch_bounds__(1024, 1)
route(const float* logits, u32 rows, u32 group, float* weights, u32* chosen, u32* pairs, Work* work, u32* counts) {
    __shared__ Places places;
    __shared__ u64 scratch[32][CANDIDATES + TOP_K];
    launch_dependents();
    const u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    if (tid < EXPERTS) places.size[tid] = 0;
    __syncthreads();
    wait_for_inputs();
    u32 mine = 0;  // of the row whose index is `warp`
    for (u32 row = warp; row < rows; row += 32) {
        const float* l = logits + (u64)row * ROUTER_ROWS;
        const u32 index = choose([&](u32 i) { return __ldcg(l + i); }, lane, scratch[warp], weights + row * SLOTS);
        if (lane < TOP_K) {
            atomicAdd(&places.size[index], 1);
            if (row == warp) mine = index;
            else chosen[row * TOP_K + lane] = index;
        }
    }
    list_pieces(places, Listing{pairs, work, counts, rows, group});
    // `chosen` was written by this warp.
    for (u32 row = warp; row < rows; row += 32)
        if (lane < TOP_K) pairs[atomicAdd(&places.start[row == warp ? mine : __ldcg(chosen + row * TOP_K + lane)], 1)] = row * SLOTS + lane;
}

// Lists the pairs of experts that `router_q8` has chosen, of more rows than `experts_group_q4` lists itself. One block of 1,024 threads.
extern "C" __global__ void __launch_bounds__(1024, 1)
list_experts(const u32* chosen, u32 rows, u32 group, u32* pairs, Work* work, u32* counts) {
    __shared__ Places places;
    launch_dependents();
    const u32 tid = threadIdx.x;
    if (tid < EXPERTS) places.size[tid] = 0;
    __syncthreads();
    wait_for_inputs();
#pragma unroll 4
    for (u32 i = tid; i < rows * TOP_K; i += 1024) atomicAdd(&places.size[__ldcg(chosen + i)], 1);
    list_pieces(places, Listing{pairs, work, counts, rows, group});
#pragma unroll 4
    for (u32 i = tid; i < rows * TOP_K; i += 1024)
        pairs[atomicAdd(&places.start[__ldcg(chosen + i)], 1)] = i / TOP_K * SLOTS + i % TOP_K;
}

// A warp's tiles of one row block for up to GROUP pairs; fragments' row of pair i is rows[i] (in shared memory). Four tiles
// are on their way at a time.
template <int FORM>
__device__ __forceinline__ void multiply_group(const u8* tiles, u32 k_tiles, const u8* fragments, const Unit* units, u32 row_tiles,
                                               const u32* rows, u32 count, u32 warp, int lane, float (&total)[4][2]) {
    constexpr int AHEAD = FORM == Q4 ? 4 : 1, STORED = FORM == BF16X2 ? BF16 : FORM;
    const u32 last = first_tile(warp + 1, k_tiles);
    for (u32 tile0 = first_tile(warp, k_tiles); tile0 < last; tile0 += AHEAD) {
        Tile<STORED> w[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            w[i] = load_tile<STORED>(tiles + (u64)min(tile0 + i, last - 1) * tile_bytes<FORM>(), lane);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (n * 4 >= count) continue;
            const u32 column = n * 4 + (lane >> 3), token = n * 4 + (lane & 3);
            const long long row = column < count ? (long long)rows[column] : -1;
            const long long unit_row = token < count ? (long long)rows[token] : -1;
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (tile0 + i >= last) continue;
                const Fragment<FORM> x = load_fragment<FORM>(fragments, row, row_tiles, tile0 + i, lane);
                const Unit unit = load_unit<FORM>(units, unit_row, row_tiles, tile0 + i);
                multiply<STORED>(w[i], x, unit, total[n]);
                if constexpr (FORM == BF16X2)
                    multiply<BF16>(load_tile<BF16>(tiles + (u64)(tile0 + i) * tile_bytes<FORM>() + 2048, lane), x, unit, total[n]);
            }
        }
    }
}

__device__ __forceinline__ void store_totals(float (*partial)[GROUP][TILE_ROWS], u32 warp, int lane, const float (&total)[4][2]) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        partial[warp][n * 4 + (lane & 3)][lane >> 2] = total[n][0];
        partial[warp][n * 4 + (lane & 3)][(lane >> 2) + 8] = total[n][1];
    }
}

// middle[pair] = SiLU(gate x) * (up x). Grid: (row blocks, any): blocks of y stride over the pieces of work.
template <int FORM>
__device__ __forceinline__ void gate_up(const u8* experts, const u8* shared_expert, const Work* work, const u32* counts,
                                        const u32* pairs, const u8* fragments, const Unit* units, const float* scale, float* middle) {
    __shared__ float partial[WARPS][GROUP][TILE_ROWS];
    __shared__ u32 rows[GROUP], mine[GROUP];
    launch_dependents();
    wait_for_inputs();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, n = __ldcg(counts);
    for (u32 i = blockIdx.y; i < n; i += gridDim.y) {
        const Work w = work[i];
        if (block >= (w.expert == EXPERTS ? SHARED_BLOCKS : GATE_UP_BLOCKS)) continue;
        __syncthreads();
        if (threadIdx.x < w.count) {
            mine[threadIdx.x] = __ldcg(pairs + w.first + threadIdx.x);
            rows[threadIdx.x] = mine[threadIdx.x] / SLOTS;
        }
        __syncthreads();
        constexpr u64 STRIP = HIDDEN_TILES * tile_bytes<FORM>();
        const u8* tiles = w.expert == EXPERTS ? shared_expert + block * STRIP : experts + ((u64)w.expert * GATE_UP_BLOCKS + block) * STRIP;
        float total[4][2] = {};
        multiply_group<FORM>(tiles, HIDDEN_TILES, fragments, units, HIDDEN_TILES, rows, w.count, warp, lane, total);
        store_totals(partial, warp, lane, total);
        __syncthreads();
        for (u32 j = threadIdx.x; j < w.count * 8; j += THREADS) {
            const u32 pair = j / 8, r = j % 8, width = w.expert == EXPERTS ? SHARED_WIDTH : EXPERT_WIDTH;
            const float gate = sum_of<WARPS>([&](int k) { return partial[k][pair][r]; });
            const float up = sum_of<WARPS>([&](int k) { return partial[k][pair][r + 8]; });
            const float s = __ldcg(scale + rows[pair]);
            if (block * 8 + r < width) middle[(u64)mine[pair] * (MIDDLE) + block * 8 + r] = swiglu(gate, up, s);
        }
    }
}

// expanded[pair] = down middle[pair]. Grid as `gate_up`.
template <int FORM>
__device__ __forceinline__ void down(const u8* experts, const u8* shared_expert, const Work* work, const u32* counts,
                                     const u32* pairs, const u8* fragments, const Unit* units, float* expanded) {
    __shared__ float partial[WARPS][GROUP][TILE_ROWS];
    __shared__ u32 mine[GROUP];
    launch_dependents();
    wait_for_inputs();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x, n = __ldcg(counts);
    for (u32 i = blockIdx.y; i < n; i += gridDim.y) {
        const Work w = work[i];
        __syncthreads();
        if (threadIdx.x < w.count) mine[threadIdx.x] = __ldcg(pairs + w.first + threadIdx.x);
        __syncthreads();
        const bool is_shared = w.expert == EXPERTS;
        const u64 strip = (is_shared ? SHARED_TILES : EXPERT_TILES) * tile_bytes<FORM>();
        const u8* tiles = is_shared ? shared_expert + block * strip : experts + ((u64)w.expert * HIDDEN_BLOCKS + block) * strip;
        float total[4][2] = {};
        multiply_group<FORM>(tiles, is_shared ? SHARED_TILES : EXPERT_TILES, fragments, units, MIDDLE_TILES, mine, w.count, warp, lane, total);
        store_totals(partial, warp, lane, total);
        __syncthreads();
        for (u32 j = threadIdx.x; j < w.count * TILE_ROWS; j += THREADS) {
            const u32 pair = j / TILE_ROWS, r = j % TILE_ROWS;
            const float v = sum_of<WARPS>([&](int k) { return partial[k][pair][r]; });
            if (block * TILE_ROWS + r < HIDDEN) expanded[(u64)mine[pair] * HIDDEN + block * TILE_ROWS + r] = v;
        }
    }
}

// x[row] += sum over slots of weight * expanded, in the order of the slots; and x times the next norm's gain as columns, with the sums
// of squares of its eighths. A warp an eighth of a row. Grid: (WARPS / ADD_WARPS, rows).
#define ADD_WARPS 2
extern "C" __global__ void __launch_bounds__(32 * ADD_WARPS)
add_experts(const float* weights, const float* expanded, float* x, const float* gain, Columns to, float* squares, u32* done) {
    launch_dependents();
    const u32 row = blockIdx.y, eighth = blockIdx.x * ADD_WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 last = first_tile(eighth + 1, HIDDEN_TILES);
    __shared__ float4 parts[32 * ADD_WARPS][2 * SLOTS + 1];  // one more: lanes' values lie in different banks
    float square = 0;
    wait_for_inputs();
    if (eighth == 0 && lane < SLOTS) done[row * SLOTS + lane] = 0;  // for the next layer; a step has at most as many pieces as pairs
    for (u32 tile0 = first_tile(eighth, HIDDEN_TILES); tile0 < last; tile0 += 4) {
        const Place p = place(tile0, last, HIDDEN, lane);
        // All that is read is on its way at a time, which registers would not suffice for.
        float4* mine = parts[threadIdx.x];
#pragma unroll
        for (int s = 0; s < 2 * SLOTS; s++) copy16(mine + s, expanded + ((u64)row * SLOTS + s / 2) * HIDDEN + p.col + s % 2 * 4, p.active);
        float v[8] = {}, sum[8] = {}, gains[8] = {};
        if (p.active) load8(x + (u64)row * HIDDEN + p.col, v);
        if (to.records) load_factors<NORMED>(gain, p, gains);
        const float weight = lane < SLOTS ? __ldcg(weights + row * SLOTS + lane) : 0;
        await_copies();
#pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            const float w = __shfl_sync(FULL, weight, s);
            const float4 a = mine[2 * s], b = mine[2 * s + 1];
            const float part[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] = fmaf(w, part[i], sum[i]);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] += sum[i];
        if (p.active) store8(x + (u64)row * HIDDEN + p.col, v);
        if (to.records) put_columns(row, p, v, gains, to, lane, square);
    }
    if (!to.records) return;
    square = warp_sum(square);
    if (lane == 0) squares[row * WARPS + eighth] = square;
}

#define MOE(suffix, form)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) gate_up_##suffix(                                                   \
        const u8* experts, const u8* shared_expert, const Work* work, const u32* counts, const u32* pairs, const u8* fragments, \
        const Unit* units, const float* scale, float* middle) {                                                               \
        gate_up<form>(experts, shared_expert, work, counts, pairs, fragments, units, scale, middle);                           \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) down_##suffix(                                                      \
        const u8* experts, const u8* shared_expert, const Work* work, const u32* counts, const u32* pairs, const u8* fragments, \
        const Unit* units, float* expanded) {                                                                                 \
        down<form>(experts, shared_expert, work, counts, pairs, fragments, units, expanded);                                   \
    }
MOE(q4, Q4)
MOE(q8, Q8)
MOE(bf16, BF16)
MOE(bf16x2, BF16X2)
