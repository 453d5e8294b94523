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

// Every thread arrives for itself: one for its warp would do and be no faster, but racecheck does not follow that.
struct Ring {
    u64 full[RING], empty[RING];
    u64 added[PARTS];  // parts that are free again; those that are there are told at the hardware's barriers
};

// The hardware's barrier of a slot of parts: the multiplying warps arrive and go on, the adding one waits for all of them.
#define PARTS_THERE(slot) (1 + (slot))
__device__ __forceinline__ void parts_arrive(u32 slot) {
    asm volatile("bar.arrive %0, %1;" ::"r"(PARTS_THERE(slot)), "n"(THREADS + 32) : "memory");
}
__device__ __forceinline__ void parts_wait(u32 slot) {
    asm volatile("bar.sync %0, %1;" ::"r"(PARTS_THERE(slot)), "n"(THREADS + 32) : "memory");
}

// The pieces of work and the pairs that they are of, in order of experts: as `route` lists them, or in shared memory.
struct Lists {
    const Work* work;
    const u32* pairs;
    u32 pieces, routed;  // in all; of routed experts
    __device__ __forceinline__ Work at(u32 piece) const {
        Work w;
        asm volatile("ld.relaxed.gpu.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(w.expert), "=r"(w.first), "=r"(w.count), "=r"(w.unused) : "l"(work + piece) : "memory");
        return w;
    }
    __device__ __forceinline__ u32 pair(u32 i) const {
        u32 pair;
        asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(pair) : "l"(pairs + i) : "memory");
        return pair;
    }
};

// Steps of up to LISTED_ROWS rows come without lists: each block makes them for itself, of what `router_q8` has chosen. A row is a
// bit of an expert's word, a pair a thread.
#define LISTED_ROWS (GROUP_THREADS / TOP_K < 32 ? GROUP_THREADS / TOP_K : 32)
#define BY_COPIES 4  // pairs of a piece
struct Grouping {
    u32 rows[EXPERTS];   // that chose the expert, a bit each; 0 before
    u32 first[EXPERTS];  // of its pairs
    u32 sums[WARPS];     // of a warp's experts: pairs, and pieces in the upper half
    uint4 work[LISTED_ROWS * SLOTS];
    u32 pairs[LISTED_ROWS * SLOTS];
};

// By all threads of the block. A thread has EACH experts, so that places in the lists are sums over the threads before it. Loops
// are not unrolled: this runs once, and then its length is what it costs.
__device__ __forceinline__ Lists group_pairs(Grouping& g, const u32* chosen, u32 rows) {
    constexpr u32 EACH = (EXPERTS + THREADS - 1) / THREADS;
    const u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32, routed_pairs = rows * TOP_K, row = tid / TOP_K;
    // A row chooses an expert once.
    const u32 expert = tid < routed_pairs ? __ldcg(chosen + tid) : 0;
    if (tid < routed_pairs) atomicOr(&g.rows[expert], 1u << row);
    __syncthreads();
    u32 own = 0;
#pragma unroll
    for (u32 e = tid * EACH; e < tid * EACH + EACH; e++) {
        const u32 count = e < EXPERTS ? __popc(g.rows[e]) : 0;
        own += count + ((count + BY_COPIES - 1) / BY_COPIES << 16);
    }
    u32 before = own;
#pragma unroll
    for (u32 o = 1; o < 32; o <<= 1) {
        const u32 other = __shfl_up_sync(FULL, before, o);
        before += lane >= o ? other : 0;
    }
    if (lane == 31 && warp < WARPS) g.sums[warp] = before;
    before -= own;
    __syncthreads();
    u32 all = 0;
#pragma unroll
    for (u32 k = 0; k < WARPS; k++) {
        before += k < warp ? g.sums[k] : 0;
        all += g.sums[k];
    }
    const u32 routed = all >> 16, shared_pieces = (rows + BY_COPIES - 1) / BY_COPIES;
#pragma unroll 1
    for (u32 e = tid * EACH; e < tid * EACH + EACH && e < EXPERTS; e++) {
        u32 first = before & 0xffff, left = __popc(g.rows[e]);
        g.first[e] = first;
#pragma unroll 1
        for (; left > 0; before += 1 << 16) {
            const u32 count = min(left, (u32)BY_COPIES);
            g.work[before >> 16] = make_uint4(e, first, count, 0);
            first += count;
            left -= count;
            before += count;
        }
    }
    if (tid < shared_pieces) g.work[routed + tid] = make_uint4(EXPERTS, routed_pairs + tid * BY_COPIES, min((u32)BY_COPIES, rows - tid * BY_COPIES), 0);
    if (tid < rows) g.pairs[routed_pairs + tid] = tid * SLOTS + TOP_K;
    __syncthreads();
    if (tid < routed_pairs) g.pairs[g.first[expert] + __popc(g.rows[expert] & ((1u << row) - 1))] = row * SLOTS + tid % TOP_K;
    __syncthreads();
    return Lists{(const Work*)g.work, g.pairs, routed + shared_pieces, routed};
}

// A step's lists: `route`'s, or with what `router_q8` has chosen the block's own.
struct Routed {
    const Work* work;
    const u32* counts;
    const u32* pairs;
    const u32* chosen;  // null: lists are there
    u32 rows;
    u32 unused;
    __device__ __forceinline__ Lists lists(Grouping& g) const {
        if (chosen) return group_pairs(g, chosen, rows);
        const uint2 n = __ldcg((const uint2*)counts);
        return Lists{work, pairs, n.x, n.y};
    }
};

// One of the pieces of work, and which of its strips.
struct Strip {
    u32 piece, index;
    u32 left;  // strips of this piece from here on
};

// The strips of a block, dealt evenly and in order. Pieces of routed experts have ROUTED each; those of the shared one come behind
// them.
template <u32 ROUTED, u32 SHARED> struct Deal {
    u32 routed, begin, end;  // strips of routed experts; the block's
    __device__ __forceinline__ explicit Deal(const Lists& lists) {
        routed = lists.routed * ROUTED;
        const u32 all = routed + (lists.pieces - lists.routed) * SHARED, each = all / gridDim.x, rest = all % gridDim.x;
        begin = blockIdx.x * each + blockIdx.x * rest / gridDim.x;
        end = (blockIdx.x + 1) * each + (blockIdx.x + 1) * rest / gridDim.x;
    }
    __device__ __forceinline__ Strip at(u32 i) const {
        if (i < routed) return Strip{i / ROUTED, i % ROUTED, ROUTED - i % ROUTED};
        const u32 j = i - routed;
        return Strip{routed / ROUTED + j / SHARED, j % SHARED, SHARED - j % SHARED};
    }
};

__device__ __forceinline__ void init(Ring& ring, Grouping& g) {
    for (u32 e = threadIdx.x; e < EXPERTS; e += GROUP_THREADS) g.rows[e] = 0;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < RING; i++) {
            barrier_init(&ring.full[i], 1);
            barrier_init(&ring.empty[i], THREADS);
        }
        for (u32 i = 0; i < PARTS; i++) {
            barrier_init(&ring.added[i], 32);
        }
        barrier_fence();
    }
    __syncthreads();
}

// Brings strips, by one thread. `bytes` and `source` say how long strip `index` of an expert is and where.
template <typename D, typename Bytes, typename Source>
__device__ __forceinline__ void bring(Ring& ring, const D& deal, const Lists& lists, u32 stage_bytes, Bytes bytes, Source source) {
    u32 k = 0;
    for (u32 i = deal.begin; i < deal.end;) {
        Strip s = deal.at(i);
        const u32 expert = lists.at(s.piece).expert, until = min(deal.end, i + s.left);
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
    __device__ __forceinline__ Pairs(const Work& w, const Lists& lists, int lane) {
        expert = w.expert;
        has_column = (lane >> 3) < w.count;
        has_token = (lane & 3) < w.count;
        column = has_column ? lists.pair(w.first + (lane >> 3)) : 0;
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

// middle[pair] = SiLU(gate x) * (up x). A strip is one row block.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 2)
gate_up_group_q4(const u8* experts, const u8* shared_expert, Routed step, const u8* fragments, const Unit* units, const float* scale, float* middle) {
    constexpr u32 MOST = Share<HIDDEN_TILES>::MOST, STRIP = HIDDEN_TILES * tile_bytes<Q4>();
    __shared__ Ring ring;
    __shared__ Grouping grouping;
    __shared__ float parts[PARTS][WARPS][PART];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    init(ring, grouping);
    wait_for_inputs();
    launch_dependents();  // not before: `down_group_q4` reads the choice ahead of its wait
    const Lists lists = step.lists(grouping);
    const Deal<GATE_UP_BLOCKS, SHARED_BLOCKS> deal(lists);
    if (warp == BRINGER) {
        if (lane == 0)
            bring(ring, deal, lists, STRIP, [](u32, u32) { return STRIP; }, [&](u32 expert, u32 index) {
                return (expert == EXPERTS ? shared_expert : experts + (u64)expert * GATE_UP_BLOCKS * STRIP) + (u64)index * STRIP;
            });
        return;
    }
    const Share<HIDDEN_TILES> mine(warp);
    u32 k = 0;  // strips so far
    for (u32 i = deal.begin; i < deal.end;) {
        const Strip s = deal.at(i);
        const u32 until = min(deal.end, i + s.left), first = i - s.index;
        const Pairs of(lists.at(s.piece), lists, lane);
        if (warp == ADDER) {
            const float row_scale = of.has_column ? __ldcg(scale + of.column / SLOTS) : 0.0f;
#pragma unroll 1
            for (; i < until; i++, k++) {
                parts_wait(k % PARTS);
                // Eight lanes a pair.
                const u32 r = lane % 8, block = i - first;
                const float* p = parts[k % PARTS][0] + r * 4 + lane / 8;
                const float gate = sum_of<WARPS>([&](int w) { return p[w * PART]; });
                const float up = sum_of<WARPS>([&](int w) { return p[w * PART + 32]; });
                barrier_arrive(&ring.added[k % PARTS]);
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
            parts_arrive(k % PARTS);
            barrier_arrive(&ring.empty[k % RING]);
        }
    }
}

// expanded[pair] = down middle[pair]. A strip is DOWN_GROUP row blocks.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 2)
down_group_q4(const u8* experts, const u8* shared_expert, Routed step, const float* middle, float* expanded) {
    constexpr u32 MOST = Share<MIDDLE_TILES>::MOST, STAGE = DOWN_GROUP * MIDDLE_TILES * tile_bytes<Q4>();
    __shared__ Ring ring;
    __shared__ Grouping grouping;
    constexpr u32 SLOTS_OF_PARTS = PARTS / DOWN_GROUP;
    __shared__ __align__(16) float parts[SLOTS_OF_PARTS][DOWN_GROUP][WARPS][PART];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    init(ring, grouping);
    // The choice is there before the wait: the predecessor let this kernel start only once it had it.
    const Lists lists = step.lists(grouping);
    const Deal<DOWN_STRIPS, DOWN_STRIPS> deal(lists);
    auto row_blocks = [](u32 index) { return min((u32)DOWN_GROUP, HIDDEN_BLOCKS - index * DOWN_GROUP); };
    auto row_block_bytes = [](u32 expert) { return (expert == EXPERTS ? SHARED_TILES : EXPERT_TILES) * tile_bytes<Q4>(); };
    if (warp == BRINGER) {
        if (lane == 0)
            bring(ring, deal, lists, STAGE, [&](u32 expert, u32 index) { return row_blocks(index) * row_block_bytes(expert); },
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
        const Work w = lists.at(s.piece);
        const Pairs of(w, lists, lane);
        if (warp == ADDER) {
            float* to[4];
#pragma unroll
            for (int t = 0; t < 4; t++) to[t] = t < w.count ? expanded + (u64)__shfl_sync(FULL, of.column, t * 8) * HIDDEN : nullptr;
#pragma unroll 1
            for (; i < until; i++, k++) {
                const u32 slot = k % SLOTS_OF_PARTS, rows = row_blocks(i - first) * TILE_ROWS, row0 = (i - first) * (DOWN_GROUP * TILE_ROWS);
                parts_wait(slot);
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
                barrier_arrive(&ring.added[slot]);
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
            parts_arrive(slot);
            barrier_arrive(&ring.empty[k % RING]);
        }
    }
}
