// Experts for several tokens, from 4-bit weights: what `gate_up` and `down` of moe.cu compute. Strips of weights are dealt to
// blocks evenly and in order. Of a block's warps one brings strips through a ring in shared memory, eight multiply, and one
// adds up what they got, so that the others need not wait for it. Needs compute capability 9.0.

extern __shared__ __align__(128) u8 shared[];

#define RING 3           // strips in shared memory
#define DOWN_GROUP 4     // row blocks of a strip of `down`
#define PARTS 8          // row blocks whose eight warps' sums are in shared memory
#define BRINGER WARPS    // the warps behind those that multiply
#define ADDER (WARPS + 1)
#define GROUP_THREADS (THREADS + 64)
#define DOWN_STRIPS ((HIDDEN_BLOCKS + DOWN_GROUP - 1) / DOWN_GROUP)

#define PART (TILE_ROWS * 4)  // sums of a row block: [row][pair]

struct Ring {
    u64 full[RING], empty[RING];
    u64 added[PARTS], summed[PARTS];  // of parts: free again, and there
};

// One of the pieces of work, and which of its strips.
struct Strip {
    u32 piece, index;
    u32 left;  // strips of this piece from here on
};

// The strips of a block. Pieces of routed experts have ROUTED strips each; those of the shared one come behind them.
template <u32 ROUTED, u32 SHARED> struct Deal {
    u32 routed, begin, end;
    __device__ __forceinline__ explicit Deal(const u32* counts) {
        const uint2 n = __ldcg((const uint2*)counts);
        routed = n.y;
        const u64 all = (u64)n.y * ROUTED + (u64)(n.x - n.y) * SHARED;
        begin = blockIdx.x * all / gridDim.x;
        end = (blockIdx.x + 1) * all / gridDim.x;
    }
    __device__ __forceinline__ Strip at(u32 i) const {
        if (i < routed * ROUTED) return Strip{i / ROUTED, i % ROUTED, ROUTED - i % ROUTED};
        const u32 j = i - routed * ROUTED;
        return Strip{routed + j / SHARED, j % SHARED, SHARED - j % SHARED};
    }
};

__device__ __forceinline__ Work read_work(const Work* work, u32 piece) {
    const uint4 w = __ldcg((const uint4*)(work + piece));
    return Work{w.x, w.y, w.z, w.w};
}

__device__ __forceinline__ void init_ring(Ring& ring) {
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < RING; i++) {
            barrier_init(&ring.full[i], 1);
            barrier_init(&ring.empty[i], WARPS);
        }
        for (u32 i = 0; i < PARTS; i++) {
            barrier_init(&ring.added[i], 1);
            barrier_init(&ring.summed[i], WARPS);
        }
        barrier_fence();
    }
    __syncthreads();
}

// Brings strips, by one thread. `bytes` and `source` say how long strip `index` of an expert is and where.
template <typename D, typename Bytes, typename Source>
__device__ __forceinline__ void bring(Ring& ring, const D& deal, const Work* work, u32 stage_bytes, Bytes bytes, Source source) {
    u32 k = 0;
    for (u32 i = deal.begin; i < deal.end;) {
        Strip s = deal.at(i);
        const u32 expert = read_work(work, s.piece).expert, until = min(deal.end, i + s.left);
        for (; i < until; i++, k++, s.index++) {
            const u32 stage = k % RING;
            if (k >= RING) barrier_wait(&ring.empty[stage], (k / RING - 1) & 1);
            const u32 n = bytes(expert, s.index);
            barrier_expect(&ring.full[stage], n);
            bulk_copy(shared + stage * stage_bytes, source(expert, s.index), n, &ring.full[stage]);
        }
    }
}

// Up to four pairs of an expert as one lane sees them: one is its column of B, another its column of the result.
struct Pairs {
    u32 column, token, expert;
    bool has_column, has_token;
    __device__ __forceinline__ Pairs(const Work& w, const u32* pairs, int lane) {
        expert = w.expert;
        has_column = (lane >> 3) < w.count;
        has_token = (lane & 3) < w.count;
        column = has_column ? __ldcg(pairs + w.first + (lane >> 3)) : 0;
        token = __shfl_sync(FULL, column, (lane & 3) * 8);
    }
};

// A warp's share of their inputs.
template <u32 MOST> struct Inputs {
    Fragment<Q4> f[MOST];
    Unit unit[MOST];
};

// The 64 inputs of a tile, those of this lane's pair (lane / 8), as `split_place` would make them; `unit` is that of pair lane % 4.
// Both lanes of a column, which differ in the digit that they have, make all digits.
__device__ __forceinline__ void make_fragment(const float* x, bool has, int lane, Fragment<Q4>& f, Unit& unit) {
    float v[2][8] = {};
    if (has) {
        load8(x + (lane & 3) * 16, v[0]);
        load8(x + (lane & 3) * 16 + 8, v[1]);
    }
    float most = max_magnitude(most_of(v[0]), most_of(v[1]));
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) most = max_magnitude(most, __shfl_xor_sync(FULL, most, o));
    const Scale scale(most);
    int sum = 0;
    u32 words[4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint2 high, low;
        int part;
        digits8(v[h], scale, high, low, part);
        sum += part;
        words[2 * h] = lane & 4 ? low.x : high.x;
        words[2 * h + 1] = lane & 4 ? low.y : high.y;
    }
    f.word[0] = make_uint4(words[0], words[1], words[2], words[3]);
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) sum += __shfl_xor_sync(FULL, sum, o);
    const float mine = __fmul_rn((float)sum, scale.unit);
    unit.unit = __shfl_sync(FULL, scale.unit, (lane & 3) * 8);
    unit.sum = __shfl_sync(FULL, mine, (lane & 3) * 8);
}

// A warp's part of one row block's products.
template <u32 MOST>
__device__ __forceinline__ void multiply_strip(const u8* tiles, u32 count, const Inputs<MOST>& in, int lane, float* part) {
    float total[2] = {0, 0};
#pragma unroll
    for (u32 k = 0; k < MOST; k++)
        if (k < count) multiply_at<Q4>(tiles + k * tile_bytes<Q4>(), lane, in.f[k], in.unit[k], total);
    part[lane] = total[0];
    part[lane + 32] = total[1];
}

// Says that a warp is through with a barrier's thing.
__device__ __forceinline__ void warp_arrive(u64* bar, int lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(bar);
}

// middle[pair] = SiLU(gate x) * (up x). A strip is one row block.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 2)
gate_up_group_q4(const u8* experts, const u8* shared_expert, const Work* work, const u32* counts, const u32* pairs,
                 const u8* fragments, const Unit* units, const float* scale, float* middle) {
    constexpr u32 MOST = Share<HIDDEN_TILES>::MOST, STRIP = HIDDEN_TILES * tile_bytes<Q4>();
    __shared__ Ring ring;
    __shared__ float parts[PARTS][WARPS][PART];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    init_ring(ring);
    wait_for_inputs();
    launch_dependents();  // not before: `down_group_q4` reads the list of work ahead of its wait
    const Deal<GATE_UP_BLOCKS, SHARED_BLOCKS> deal(counts);
    if (warp == BRINGER) {
        if (lane == 0)
            bring(ring, deal, work, STRIP, [](u32, u32) { return STRIP; }, [&](u32 expert, u32 index) {
                return (expert == EXPERTS ? shared_expert : experts + (u64)expert * GATE_UP_BLOCKS * STRIP) + (u64)index * STRIP;
            });
        return;
    }
    const Share<HIDDEN_TILES> mine(warp);
    u32 k = 0;  // strips so far
    for (u32 i = deal.begin; i < deal.end;) {
        const Strip s = deal.at(i);
        const u32 until = min(deal.end, i + s.left), first = i - s.index;
        const Pairs of(read_work(work, s.piece), pairs, lane);
        if (warp == ADDER) {
            const float row_scale = of.has_column ? __ldcg(scale + of.column / SLOTS) : 0.0f;
#pragma unroll 1
            for (; i < until; i++, k++) {
                barrier_wait(&ring.summed[k % PARTS], k / PARTS & 1);
                // Eight lanes a pair.
                const u32 r = lane % 8, block = i - first;
                const float* p = parts[k % PARTS][0] + r * 4 + lane / 8;
                const float gate = sum_of<WARPS>([&](int w) { return p[w * PART]; });
                const float up = sum_of<WARPS>([&](int w) { return p[w * PART + 32]; });
                warp_arrive(&ring.added[k % PARTS], lane);
                const u32 width = of.expert == EXPERTS ? SHARED_WIDTH : EXPERT_WIDTH;
                if (of.has_column && block * 8 + r < width) middle[(u64)of.column * (MIDDLE) + block * 8 + r] = swiglu(gate, up, row_scale);
            }
            continue;
        }
        Inputs<MOST> in;
#pragma unroll
        for (u32 t = 0; t < MOST; t++) {
            const bool has = t < mine.count;
            in.f[t] = load_fragment<Q4>(fragments, of.has_column && has ? (long long)(of.column / SLOTS) : -1, HIDDEN_TILES, mine.first + t, lane);
            in.unit[t] = load_unit<Q4>(units, of.has_token && has ? (long long)(of.token / SLOTS) : -1, HIDDEN_TILES, mine.first + t);
        }
#pragma unroll 1
        for (; i < until; i++, k++) {
            if (k >= PARTS) barrier_wait(&ring.added[k % PARTS], (k / PARTS - 1) & 1);
            barrier_wait(&ring.full[k % RING], k / RING & 1);
            multiply_strip<MOST>(shared + k % RING * STRIP + mine.first * tile_bytes<Q4>(), mine.count, in, lane, parts[k % PARTS][warp]);
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(&ring.empty[k % RING]);
                barrier_arrive(&ring.summed[k % PARTS]);
            }
        }
    }
}

// expanded[pair] = down middle[pair]. A strip is DOWN_GROUP row blocks.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 2)
down_group_q4(const u8* experts, const u8* shared_expert, const Work* work, const u32* counts, const u32* pairs,
              const float* middle, float* expanded) {
    constexpr u32 MOST = Share<MIDDLE_TILES>::MOST, STAGE = DOWN_GROUP * MIDDLE_TILES * tile_bytes<Q4>();
    __shared__ Ring ring;
    constexpr u32 SLOTS_OF_PARTS = PARTS / DOWN_GROUP;
    __shared__ __align__(16) float parts[SLOTS_OF_PARTS][DOWN_GROUP][WARPS][PART];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    init_ring(ring);
    // The list of work is there before the wait: the predecessor let this kernel start only once it had it.
    const Deal<DOWN_STRIPS, DOWN_STRIPS> deal(counts);
    auto row_blocks = [](u32 index) { return min((u32)DOWN_GROUP, HIDDEN_BLOCKS - index * DOWN_GROUP); };
    auto row_block_bytes = [](u32 expert) { return (expert == EXPERTS ? SHARED_TILES : EXPERT_TILES) * tile_bytes<Q4>(); };
    if (warp == BRINGER) {
        if (lane == 0)
            bring(ring, deal, work, STAGE, [&](u32 expert, u32 index) { return row_blocks(index) * row_block_bytes(expert); },
                  [&](u32 expert, u32 index) {
                      const u64 bytes = row_block_bytes(expert);
                      return (expert == EXPERTS ? shared_expert : experts + (u64)expert * HIDDEN_BLOCKS * bytes) + index * DOWN_GROUP * bytes;
                  });
        return;
    }
    wait_for_inputs();
    u32 k = 0;
    for (u32 i = deal.begin; i < deal.end;) {
        const Strip s = deal.at(i);
        const u32 until = min(deal.end, i + s.left), first = i - s.index;
        const Work w = read_work(work, s.piece);
        const Pairs of(w, pairs, lane);
        if (warp == ADDER) {
            float* to[4];
#pragma unroll
            for (int t = 0; t < 4; t++) to[t] = t < w.count ? expanded + (u64)__shfl_sync(FULL, of.column, t * 8) * HIDDEN : nullptr;
#pragma unroll 1
            for (; i < until; i++, k++) {
                const u32 slot = k % SLOTS_OF_PARTS, rows = row_blocks(i - first) * TILE_ROWS, row0 = (i - first) * (DOWN_GROUP * TILE_ROWS);
                barrier_wait(&ring.summed[slot], k / SLOTS_OF_PARTS & 1);
#pragma unroll
                for (u32 row = lane; row < DOWN_GROUP * TILE_ROWS; row += 32) {
                    const float4* p = (const float4*)parts[slot][row / TILE_ROWS][0] + row % TILE_ROWS;
                    const float4 sum = sum_of<WARPS>([&](int j) { return p[j * (PART / 4)]; });
                    const float v[4] = {sum.x, sum.y, sum.z, sum.w};
                    if (row >= rows) continue;
#pragma unroll
                    for (int t = 0; t < 4; t++)
                        if (to[t]) to[t][row0 + row] = v[t];
                }
                warp_arrive(&ring.added[slot], lane);
            }
            continue;
        }
        const u32 k_tiles = w.expert == EXPERTS ? SHARED_TILES : EXPERT_TILES, bytes = row_block_bytes(w.expert);
        const u32 tile = first_tile(warp, k_tiles), count = first_tile(warp + 1, k_tiles) - tile;
        Inputs<MOST> in;
#pragma unroll
        for (u32 t = 0; t < MOST; t++) {
            make_fragment(middle + (u64)of.column * (MIDDLE) + (tile + t) * TILE_COLS, of.has_column && t < count, lane, in.f[t], in.unit[t]);
        }
#pragma unroll 1
        for (; i < until; i++, k++) {
            const u32 blocks = row_blocks(i - first), slot = k % SLOTS_OF_PARTS;
            const u8* strip = shared + k % RING * STAGE + tile * tile_bytes<Q4>();
            if (k >= SLOTS_OF_PARTS) barrier_wait(&ring.added[slot], (k / SLOTS_OF_PARTS - 1) & 1);
            barrier_wait(&ring.full[k % RING], k / RING & 1);
#pragma unroll
            for (u32 u = 0; u < DOWN_GROUP; u++)
                if (u < blocks) multiply_strip<MOST>(strip + u * bytes, count, in, lane, parts[slot][u][warp]);
            __syncwarp();
            if (lane == 0) {
                barrier_arrive(&ring.empty[k % RING]);
                barrier_arrive(&ring.summed[slot]);
            }
        }
    }
}
