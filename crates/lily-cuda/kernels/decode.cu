// One token: products whose weights are on their way before the kernel that makes their input has ended.

extern __shared__ __align__(128) u8 shared[];

// What is done with a result.
#define STORE 0
#define ADD 1     // to what is there: the residual stream
#define LOGITS 2  // stored, and each block's largest is noted

#define STAGES 6  // row blocks in shared memory at most

// Layout of a `project` block's dynamic shared memory behind its stages.
template <int K_TILES> struct Staging {
    u8 fragments[K_TILES * FRAGMENT_BYTES];
    float sums[K_TILES];
    float partial[2][WARPS][STAGES * TILE_ROWS];
    float squares[WARPS];
    u64 full[STAGES];
    u64 empty[STAGES];
};

// A lane's fragment of one token from the staging in shared memory.
__device__ __forceinline__ Fragment staged_fragment(const u8* fragments, u32 tile, int lane) {
    Fragment f;
    f.word[0] = f.word[1] = make_uint4(0, 0, 0, 0);
    if (lane < 8) {
        const u8* p = fragments + tile * FRAGMENT_BYTES + ((lane & 3) * 2 + (lane >> 2)) * 16;
        f.word[0] = *(const uint4*)p;
        f.word[1] = *(const uint4*)(p + 128);
    }
    return f;
}

// y = W f(x) for one token. Rows are dealt to blocks evenly and in order; `stages` row blocks are on their way at a time.
template <int FORM, int K_TILES, int MODE, int END>
__device__ __forceinline__ void project(Matrix w, const float* x, const float* factor, float* y, u32 stages, Best* best) {
    constexpr u32 STRIP = K_TILES * tile_bytes<FORM>();
    Staging<K_TILES>& s = *(Staging<K_TILES>*)(shared + stages * STRIP);
    const u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const u32 blocks = (w.rows + TILE_ROWS - 1) / TILE_ROWS;
    const u32 begin = (u64)blockIdx.x * blocks / gridDim.x, count = (u64)(blockIdx.x + 1) * blocks / gridDim.x - begin;
    auto fetch = [&](u32 i) {
        barrier_expect(&s.full[i % stages], STRIP);
        bulk_copy(shared + i % stages * STRIP, w.tiles + (u64)(begin + i) * STRIP, STRIP, &s.full[i % stages]);
    };
    if (tid == 0) {
        for (u32 i = 0; i < stages; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], WARPS);
        }
        barrier_fence();
        for (u32 i = 0; i < min(stages, count); i++) fetch(i);
    }
    launch_dependents();
    RowSplitter<MODE, K_TILES> row;
    row.load_gains(factor, warp, lane);
    __syncthreads();
    wait_for_inputs();

    const Share<K_TILES> mine(warp);
    constexpr u32 MOST = Share<K_TILES>::MOST;
    float squares = row.split(x, factor, warp, lane, s.fragments, s.sums);
    if constexpr (MODE == NORMED) {
        squares = warp_sum(squares);
        if (lane == 0) s.squares[warp] = squares;
    }
    __syncwarp();
    // Fragments of a few tiles stay in registers over all row blocks; more are read again.
    constexpr u32 KEPT = MOST <= 4 ? MOST : 1;
    Fragment f[KEPT];
    float sum[KEPT];
#pragma unroll
    for (u32 i = 0; i < KEPT; i++) {
        const u32 tile = min(mine.first + i, (u32)K_TILES - 1);
        f[i] = staged_fragment(s.fragments, tile, lane);
        sum[i] = (lane & 3) == 0 ? s.sums[tile] : 0.0f;
    }

    float residual = 0;
    if (END == ADD && tid < count * TILE_ROWS && begin * TILE_ROWS + tid < w.rows) residual = __ldcg(y + begin * TILE_ROWS + tid);
    float best_value = -INFINITY;
    u32 best_row = 0xffffffffu, broken = 0;
    float inverse = 1.0f;
    for (u32 round = 0; round * stages < count; round++) {
        const u32 from = round * stages, until = min(from + stages, count);
#pragma unroll 1
        for (u32 i = from; i < until; i++) {
            barrier_wait(&s.full[i - from], round & 1);
            const u8* strip = shared + (i - from) * STRIP;
            float total[2] = {0, 0};
#pragma unroll
            for (u32 k = 0; k < MOST; k++) {
                if (!mine.has(k)) continue;
                const u8* tile = strip + (mine.first + k) * tile_bytes<FORM>();
                if constexpr (KEPT == MOST) {
                    multiply_at<FORM>(tile, lane, f[k], sum[k], total);
                } else {
                    const float s_k = (lane & 3) == 0 ? s.sums[mine.first + k] : 0.0f;
                    multiply_at<FORM>(tile, lane, staged_fragment(s.fragments, mine.first + k, lane), s_k, total);
                }
            }
            if ((lane & 3) == 0) {
                float* p = s.partial[round & 1][warp] + (i - from) * TILE_ROWS + (lane >> 2);
                p[0] = total[0];
                p[8] = total[1];
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(&s.empty[i - from]);
            // The stage before this one is free once all warps are through with it: its next strip.
            if (tid == 0 && i > 0 && i - 1 + stages < count) {
                barrier_wait(&s.empty[(i - 1) % stages], ((i - 1) / stages) & 1);
                fetch(i - 1 + stages);
            }
        }
        __syncthreads();
        if (MODE == NORMED && round == 0) {
            float sum_of_squares = 0;
#pragma unroll
            for (int k = 0; k < WARPS; k++) sum_of_squares += s.squares[k];
            inverse = rsqrtf(sum_of_squares / HIDDEN + EPS);
        }
        const u32 row = (begin + from) * TILE_ROWS + tid;
        if (tid < (until - from) * TILE_ROWS && row < w.rows) {
            float v = 0;
#pragma unroll
            for (int k = 0; k < WARPS; k++) v += s.partial[round & 1][k][tid];
            v = __fmul_rn(v, inverse);
            // What is added to was read early, for the rows of the first round.
            y[row] = END != ADD ? v : (round == 0 ? residual : y[row]) + v;
            if constexpr (END == LOGITS) {
                broken |= !isfinite(v);
                if (v > best_value) {
                    best_value = v;
                    best_row = row;
                }
            }
        }
        // The last strip of a round is refilled at the beginning of the next one.
    }
    if constexpr (END == LOGITS) {
        __shared__ Best bests[WARPS];
        const u32 key = order_key(best_value), top = __reduce_max_sync(FULL, key);
        const u32 winner = __reduce_min_sync(FULL, key == top ? best_row : 0xffffffffu);
        broken = __any_sync(FULL, broken);
        if (key == top && best_row == winner) bests[warp] = Best{best_value, winner, broken, 0};
        __syncthreads();
        if (tid == 0) {
            Best b = bests[0];
            for (int k = 1; k < WARPS; k++) {
                if (bests[k].value > b.value || (bests[k].value == b.value && bests[k].row < b.row)) {
                    b.value = bests[k].value;
                    b.row = bests[k].row;
                }
                b.broken |= bests[k].broken;
            }
            best[blockIdx.x] = b;
        }
    }
}

#define PROJECT(name, form, tiles, mode, end)                                                                           \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) name(Matrix w, const float* x, const float* factor, float* y, \
                                                                  u32 stages, Best* best) {                            \
        project<form, tiles, mode, end>(w, x, factor, y, stages, best);                                                 \
    }
#define VALUE_TILES (VALUE_HEADS * DV / TILE_COLS)
#define QUERY_TILES (HEADS * HEAD_DIM / TILE_COLS)
PROJECT(project_q4, Q4, HIDDEN_TILES, NORMED, STORE)
PROJECT(project_q8, Q8, HIDDEN_TILES, NORMED, STORE)
PROJECT(logits_q4, Q4, HIDDEN_TILES, NORMED, LOGITS)
PROJECT(out_gdn_q4, Q4, VALUE_TILES, HEAD_NORMED, ADD)
PROJECT(out_attention_q4, Q4, QUERY_TILES, AS_IS, ADD)

// --- mixture of experts ---

#define GATE_UP_UNITS (SHARED_BLOCKS + TOP_K * GATE_UP_BLOCKS)
#define MOST_UNITS 8  // of a block

// middle[slot] = SiLU(gate x) * (up x) for the shared and the chosen experts: 8 rows of both are a unit, and units are
// dealt to blocks evenly. The shared expert's are on their way before the wait, the others once the choice is known.
extern "C" __global__ void __launch_bounds__(THREADS + 32, 2)
gate_up_one_q4(const float* logits, const u8* experts, const u8* shared_expert, const float* x, const float* gain, float* middle) {
    constexpr u32 STRIP = HIDDEN_TILES * tile_bytes<Q4>(), MOST = Share<HIDDEN_TILES>::MOST;
    __shared__ __align__(16) u8 fragments[HIDDEN_TILES * FRAGMENT_BYTES];
    __shared__ float sums[HIDDEN_TILES], partial[WARPS][MOST_UNITS * TILE_ROWS], squares_of[WARPS];
    __shared__ u64 full[MOST_UNITS];
    const u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const u32 begin = blockIdx.x * GATE_UP_UNITS / gridDim.x, count = (blockIdx.x + 1) * GATE_UP_UNITS / gridDim.x - begin;
    auto fetch = [&](u32 i, const u8* from) {
        barrier_expect(&full[i], STRIP);
        bulk_copy(shared + i * STRIP, from, STRIP, &full[i]);
    };
    if (tid == 0) {
        for (u32 i = 0; i < count; i++) barrier_init(&full[i], 1);
        barrier_fence();
        for (u32 i = 0; i < count && begin + i < SHARED_BLOCKS; i++) fetch(i, shared_expert + (u64)(begin + i) * STRIP);
    }
    RowSplitter<NORMED, HIDDEN_TILES> row;
    if (warp < WARPS) row.load_gains(gain, warp, lane);
    __syncthreads();
    wait_for_inputs();
    launch_dependents();  // not before: `down_one` reads the router's logits ahead of its wait
    if (warp == WARPS) {
        u32 index;
        float value;
        warp_top_k(logits, lane, index, value);
        // A lane a unit.
        const int unit = (int)(begin + lane) - SHARED_BLOCKS;
        const bool routed = lane < count && unit >= 0;
        const u32 expert = __shfl_sync(FULL, index, routed ? unit / GATE_UP_BLOCKS : 0);
        if (routed) fetch(lane, experts + ((u64)expert * GATE_UP_BLOCKS + unit % GATE_UP_BLOCKS) * STRIP);
    } else {
        const Share<HIDDEN_TILES> mine(warp);
        const float squares = warp_sum(row.split(x, gain, warp, lane, fragments, sums));
        if (lane == 0) squares_of[warp] = squares;
        __syncwarp();
        Fragment f[MOST];
        float sum[MOST];
#pragma unroll
        for (u32 i = 0; i < MOST; i++) {
            const u32 tile = min(mine.first + i, (u32)HIDDEN_TILES - 1);
            f[i] = staged_fragment(fragments, tile, lane);
            sum[i] = (lane & 3) == 0 ? sums[tile] : 0.0f;
        }
#pragma unroll 1
        for (u32 i = 0; i < count; i++) {
            barrier_wait(&full[i], 0);
            float total[2] = {0, 0};
#pragma unroll
            for (u32 k = 0; k < MOST; k++)
                if (mine.has(k)) multiply_at<Q4>(shared + i * STRIP + (mine.first + k) * tile_bytes<Q4>(), lane, f[k], sum[k], total);
            if ((lane & 3) == 0) {
                partial[warp][i * TILE_ROWS + (lane >> 2)] = total[0];
                partial[warp][i * TILE_ROWS + (lane >> 2) + 8] = total[1];
            }
        }
    }
    __syncthreads();
    if (tid < count * 8) {
        float squares_sum = 0, gate = 0, up = 0;
#pragma unroll
        for (int k = 0; k < WARPS; k++) {
            squares_sum += squares_of[k];
            gate += partial[k][tid / 8 * TILE_ROWS + tid % 8];
            up += partial[k][tid / 8 * TILE_ROWS + tid % 8 + 8];
        }
        const float s = rsqrtf(squares_sum / HIDDEN + EPS);
        const int unit = (int)(begin + tid / 8) - SHARED_BLOCKS;
        const u32 slot = unit < 0 ? TOP_K : unit / GATE_UP_BLOCKS;
        const u32 row = (unit < 0 ? begin + tid / 8 : unit % GATE_UP_BLOCKS) * 8 + tid % 8;
        middle[slot * (MIDDLE) + row] = swiglu(gate, up, s);
    }
}

// x += sum over slots of weight * down middle; a block has 16 rows of all slots. Which experts, it can know before its wait:
// its predecessor let it start only once the router's logits were there.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
down_one_q4(const float* logits, const u8* experts, const u8* shared_expert, const float* middle, float* x) {
    constexpr u32 STRIP = EXPERT_TILES * tile_bytes<Q4>(), SHARED_STRIP = SHARED_TILES * tile_bytes<Q4>();
    constexpr u32 MOST = Share<EXPERT_TILES>::MOST, MOST_SHARED = Share<SHARED_TILES>::MOST;
    constexpr u32 PAIRS = TOP_K * MOST + MOST_SHARED, STEPS = (PAIRS + 3) / 4;  // of slot and tile, of a warp
    __shared__ __align__(16) u8 fragments[WARPS][STEPS * 4 * FRAGMENT_BYTES];
    __shared__ float sums[WARPS][STEPS * 4], partial[WARPS][SLOTS][TILE_ROWS], weights[SLOTS], expanded[SLOTS][TILE_ROWS];
    __shared__ u64 full;
    const u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    if (tid == 0) {
        barrier_init(&full, 1);
        barrier_fence();
        barrier_expect(&full, TOP_K * STRIP + SHARED_STRIP);
        bulk_copy(shared + TOP_K * STRIP, shared_expert + (u64)blockIdx.x * SHARED_STRIP, SHARED_STRIP, &full);
    }
    if (warp == 0) {
        u32 index;
        float value;
        warp_top_k(logits, lane, index, value);
        __syncwarp();
        if (lane < TOP_K) bulk_copy(shared + lane * STRIP, experts + ((u64)index * HIDDEN_BLOCKS + blockIdx.x) * STRIP, STRIP, &full);
        const float weight = top_k_weight(value, lane);
        if (lane < TOP_K) weights[lane] = weight;
        if (lane == TOP_K) weights[lane] = sigmoid(__ldcg(logits + EXPERTS));
    }
    __syncthreads();
    wait_for_inputs();
    launch_dependents();  // not before: the next layer's weights would delay those of `gate_up_one`
    const Share<EXPERT_TILES> mine(warp);
    const Share<SHARED_TILES> mine_shared(warp);
    // Pair p of the warp: slots one after another, the shared one last.
    const u32 pairs = TOP_K * mine.count + mine_shared.count;
    float v[STEPS][8];
#pragma unroll
    for (u32 i = 0; i < STEPS; i++) {
        const u32 p = i * 4 + lane / 8, slot = mine.count && p < TOP_K * mine.count ? p / mine.count : TOP_K;
        const u32 tile = slot < TOP_K ? mine.first + p % mine.count : mine_shared.first + p - TOP_K * mine.count;
#pragma unroll
        for (int j = 0; j < 8; j++) v[i][j] = 0;
        if (p < pairs) load8(middle + slot * (MIDDLE) + tile * TILE_COLS + (lane & 7) * 8, v[i]);
    }
    const float residual = tid < TILE_ROWS ? __ldcg(x + blockIdx.x * TILE_ROWS + tid) : 0.0f;
#pragma unroll
    for (u32 i = 0; i < STEPS; i++) {
        uint4 hi, lo;
        float sum = split8(v[i], hi, lo);
#pragma unroll
        for (int o = 1; o < 8; o <<= 1) sum += __shfl_xor_sync(FULL, sum, o);
        u8* p = fragments[warp] + (i * 4 + lane / 8) * FRAGMENT_BYTES + (lane & 1) * 128 + ((lane & 7) >> 1) * 32;
        *(uint4*)p = hi;
        *(uint4*)(p + 16) = lo;
        if ((lane & 7) == 0) sums[warp][i * 4 + lane / 8] = sum;
    }
    __syncwarp();
    barrier_wait(&full, 0);
#pragma unroll 3
    for (u32 slot = 0; slot < SLOTS; slot++) {
        const u32 begin = slot < TOP_K ? mine.first : mine_shared.first;
        float total[2] = {0, 0};
#pragma unroll
        for (u32 k = 0; k < (slot < TOP_K ? MOST : MOST_SHARED); k++) {
            if (slot < TOP_K ? !mine.has(k) : !mine_shared.has(k)) continue;
            const u32 p = slot * mine.count + k;
            const float sum = (lane & 3) == 0 ? sums[warp][p] : 0.0f;
            multiply_at<Q4>(shared + slot * STRIP + (begin + k) * tile_bytes<Q4>(), lane, staged_fragment(fragments[warp], p, lane), sum, total);
        }
        if ((lane & 3) == 0) {
            partial[warp][slot][lane >> 2] = total[0];
            partial[warp][slot][(lane >> 2) + 8] = total[1];
        }
    }
    __syncthreads();
    if (tid < SLOTS * TILE_ROWS) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < WARPS; k++) sum += partial[k][tid / TILE_ROWS][tid % TILE_ROWS];
        expanded[tid / TILE_ROWS][tid % TILE_ROWS] = sum;
    }
    __syncthreads();
    if (tid < TILE_ROWS) {
        float y = 0;
#pragma unroll
        for (int s = 0; s < SLOTS; s++) y = fmaf(weights[s], expanded[s][tid], y);
        x[blockIdx.x * TILE_ROWS + tid] = residual + y;
    }
}
