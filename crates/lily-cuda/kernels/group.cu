// Experts for several tokens, from 4-bit weights: what `gate_up` and `down` of moe.cu compute, with the weights of a block's
// row blocks on their way into shared memory at once. Needs compute capability 9.0.

extern __shared__ __align__(128) u8 shared[];

#define GATE_UP_GROUP 5  // row blocks of a block
#define DOWN_GROUP 16

// What a block works on: up to GROUP pairs of one expert.
struct Piece {
    Work work;
    u32 pair[GROUP];
    u32 row[GROUP];  // of the input
};

// Reads piece `index`; false if there is none. All threads.
__device__ __forceinline__ bool read_piece(Piece& p, const Work* work, const u32* counts, const u32* pairs, u32 index, u32 per_row) {
    if (index >= __ldcg(counts)) return false;
    const Work w = work[index];
    if (threadIdx.x < w.count) {
        const u32 pair = __ldcg(pairs + w.first + threadIdx.x);
        p.pair[threadIdx.x] = pair;
        p.row[threadIdx.x] = pair / per_row;
    }
    if (threadIdx.x == 0) p.work = w;
    return true;
}

// Products of four pairs, from `first` on, with `units` row blocks in shared memory; each warp leaves its part of
// partial[warp][unit * TILE_ROWS + row][pair].
template <u32 MOST, u32 UNITS>
__device__ __forceinline__ void multiply_units(const Piece& p, u32 first, u32 units, u32 k_tiles, const u8* fragments, const float* sums,
                                               u32 row_tiles, u64* full, float (*partial)[UNITS * TILE_ROWS][4]) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 begin = first_tile(warp, k_tiles), count = first_tile(warp + 1, k_tiles) - begin;
    const u32 column = first + (lane >> 3), token = first + (lane & 3);
    Fragment f[MOST];
    float sum[MOST];
#pragma unroll
    for (u32 k = 0; k < MOST; k++) {
        f[k] = load_fragment(fragments, k < count && column < p.work.count ? (long long)p.row[column] : -1, row_tiles, begin + k, lane);
        sum[k] = k < count && token < p.work.count ? __ldcg(sums + (u64)p.row[token] * row_tiles + begin + k) : 0.0f;
    }
#pragma unroll 1
    for (u32 i = 0; i < units; i++) {
        barrier_wait(&full[i], 0);
        const u8* strip = shared + (u64)i * k_tiles * tile_bytes<Q4>();
        float total[2] = {0, 0};
#pragma unroll
        for (u32 k = 0; k < MOST; k++)
            if (k < count) multiply_at<Q4>(strip + (begin + k) * tile_bytes<Q4>(), lane, f[k], sum[k], total);
        partial[warp][i * TILE_ROWS + (lane >> 2)][lane & 3] = total[0];
        partial[warp][i * TILE_ROWS + (lane >> 2) + 8][lane & 3] = total[1];
    }
}

__device__ __forceinline__ void fetch_units(u64* full, u32 units, const u8* from, u32 strip) {
    for (u32 i = 0; i < units; i++) barrier_init(&full[i], 1);
    barrier_fence();
    for (u32 i = 0; i < units; i++) {
        barrier_expect(&full[i], strip);
        bulk_copy(shared + (u64)i * strip, from + (u64)i * strip, strip, &full[i]);
    }
}

// middle[pair] = SiLU(gate x) * (up x). Grid: (groups of row blocks, pieces).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
gate_up_group_q4(const u8* experts, const u8* shared_expert, const Work* work, const u32* counts, const u32* pairs,
                 const u8* fragments, const float* sums, const float* scale, float* middle) {
    constexpr u32 MOST = Share<HIDDEN_TILES>::MOST, STRIP = HIDDEN_TILES * tile_bytes<Q4>();
    __shared__ Piece p;
    __shared__ float partial[WARPS][GATE_UP_GROUP * TILE_ROWS][4];
    __shared__ u64 full[GATE_UP_GROUP];
    launch_dependents();
    wait_for_inputs();
    if (!read_piece(p, work, counts, pairs, blockIdx.y, SLOTS)) return;
    __syncthreads();
    const bool is_shared = p.work.expert == EXPERTS;
    const u32 blocks = is_shared ? SHARED_BLOCKS : GATE_UP_BLOCKS, begin = blockIdx.x * GATE_UP_GROUP;
    if (begin >= blocks) return;
    const u32 units = min((u32)GATE_UP_GROUP, blocks - begin);
    if (threadIdx.x == 0)
        fetch_units(full, units, (is_shared ? shared_expert : experts + (u64)p.work.expert * GATE_UP_BLOCKS * STRIP) + (u64)begin * STRIP, STRIP);
    __syncthreads();
    for (u32 first = 0; first < p.work.count; first += 4) {
        multiply_units<MOST, GATE_UP_GROUP>(p, first, units, HIDDEN_TILES, fragments, sums, HIDDEN_TILES, full, partial);
        __syncthreads();
        for (u32 j = threadIdx.x; j < units * 8 * 4; j += THREADS) {
            const u32 unit = j / 32, r = j % 8, t = j / 8 % 4;
            if (first + t >= p.work.count) continue;
            float gate = 0, up = 0;
#pragma unroll
            for (int k = 0; k < WARPS; k++) {
                gate += partial[k][unit * TILE_ROWS + r][t];
                up += partial[k][unit * TILE_ROWS + r + 8][t];
            }
            const float s = __ldcg(scale + p.row[first + t]);
            middle[(u64)p.pair[first + t] * (MIDDLE) + (begin + unit) * 8 + r] = swiglu(gate, up, s);
        }
        __syncthreads();
    }
}

// expanded[pair] = down middle[pair]. Grid: as above.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
down_group_q4(const u8* experts, const u8* shared_expert, const Work* work, const u32* counts, const u32* pairs,
              const u8* fragments, const float* sums, float* expanded) {
    constexpr u32 MOST = Share<MIDDLE_TILES>::MOST;
    __shared__ Piece p;
    __shared__ float partial[WARPS][DOWN_GROUP * TILE_ROWS][4];
    __shared__ u64 full[DOWN_GROUP];
    launch_dependents();
    wait_for_inputs();
    if (!read_piece(p, work, counts, pairs, blockIdx.y, 1)) return;
    __syncthreads();
    const bool is_shared = p.work.expert == EXPERTS;
    const u32 k_tiles = is_shared ? SHARED_TILES : EXPERT_TILES, strip = k_tiles * tile_bytes<Q4>(), begin = blockIdx.x * DOWN_GROUP;
    const u32 units = min((u32)DOWN_GROUP, HIDDEN_BLOCKS - begin);
    if (threadIdx.x == 0)
        fetch_units(full, units, (is_shared ? shared_expert : experts + (u64)p.work.expert * HIDDEN_BLOCKS * strip) + (u64)begin * strip, strip);
    __syncthreads();
    for (u32 first = 0; first < p.work.count; first += 4) {
        multiply_units<MOST, DOWN_GROUP>(p, first, units, k_tiles, fragments, sums, MIDDLE_TILES, full, partial);
        __syncthreads();
        for (u32 j = threadIdx.x; j < units * TILE_ROWS * 4; j += THREADS) {
            const u32 r = j % (units * TILE_ROWS), t = j / (units * TILE_ROWS);
            if (first + t >= p.work.count) continue;
            float v = 0;
#pragma unroll
            for (int k = 0; k < WARPS; k++) v += partial[k][r][t];
            expanded[(u64)p.pair[first + t] * HIDDEN + begin * TILE_ROWS + r] = v;
        }
        __syncthreads();
    }
}
