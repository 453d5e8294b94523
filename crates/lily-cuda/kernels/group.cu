// Experts for several tokens, from 4-bit weights: what `gate_up` and `down` of moe.cu compute, in one kernel. Strips of weights
// are dealt to blocks evenly and in order, those of gate and up first. Of a block's warps one brings strips through a ring in
// shared memory, eight multiply, and one adds up what they got, so that the others need not wait for it. Before a piece's
// first strip of `down` its strips of gate and up must be done, in whichever blocks: a counter in memory says so. All blocks
// must run at a time. Needs compute capability 9.0.

extern __shared__ __align__(128) u8 shared[];

#define RING 2           // strips in shared memory
#define DOWN_GROUP 4     // row blocks of a strip of `down`
#define PARTS 8          // row blocks whose eight warps' sums are in shared memory, of gate and up
#define DOWN_PARTS 2     // strips of `down` likewise
#define BRINGER WARPS    // the warps behind those that multiply
#define ADDER (WARPS + 1)
#define GROUP_THREADS (THREADS + 64)
#define GATE_UP_BYTES (HIDDEN_TILES * tile_bytes<Q4>())
#define DOWN_BYTES (DOWN_GROUP * MIDDLE_TILES * tile_bytes<Q4>())
#define STAGE (GATE_UP_BYTES > DOWN_BYTES ? GATE_UP_BYTES : DOWN_BYTES)
#define DOWN_STRIPS ((HIDDEN_BLOCKS + DOWN_GROUP - 1) / DOWN_GROUP)

#define PART (TILE_ROWS * 4)  // sums of a row block: [row][pair]

struct Ring {
    u64 full[RING], empty[RING];
    u64 added[PARTS], summed[PARTS];  // of parts: free again, and there
    u64 down_added[DOWN_PARTS], down_summed[DOWN_PARTS];
};

// One of the pieces of work, and which of its strips.
struct Strip {
    u32 piece, index;
    u32 left;  // strips of this piece from here on
};

// The strips of a block. Pieces of routed experts have ROUTED strips each; those of the shared one come behind them.
template <u32 ROUTED, u32 SHARED> struct Deal {
    u32 routed, begin, end;
    __device__ __forceinline__ Deal(u32 pieces, u32 of_routed) {
        routed = of_routed;
        const u64 all = (u64)of_routed * ROUTED + (u64)(pieces - of_routed) * SHARED;
        begin = blockIdx.x * all / gridDim.x;
        end = (blockIdx.x + 1) * all / gridDim.x;
    }
    __device__ __forceinline__ Strip at(u32 i) const {
        if (i < routed * ROUTED) return Strip{i / ROUTED, i % ROUTED, ROUTED - i % ROUTED};
        const u32 j = i - routed * ROUTED;
        return Strip{routed + j / SHARED, j % SHARED, SHARED - j % SHARED};
    }
};

typedef Deal<GATE_UP_BLOCKS, SHARED_BLOCKS> GateUpDeal;
typedef Deal<DOWN_STRIPS, DOWN_STRIPS> DownDeal;

// Row blocks of a strip of `down`, and bytes of one.
__device__ __forceinline__ u32 row_blocks(u32 index) { return min((u32)DOWN_GROUP, HIDDEN_BLOCKS - index * DOWN_GROUP); }
__device__ __forceinline__ u32 row_block_bytes(u32 expert) { return (expert == EXPERTS ? SHARED_TILES : EXPERT_TILES) * tile_bytes<Q4>(); }

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
        for (u32 i = 0; i < DOWN_PARTS; i++) {
            barrier_init(&ring.down_added[i], 1);
            barrier_init(&ring.down_summed[i], WARPS);
        }
        barrier_fence();
    }
    __syncthreads();
}

// Brings strips, by one thread; `k` were brought before. `bytes` and `source` say how long strip `index` of an expert is and where.
template <typename D, typename Bytes, typename Source>
__device__ __forceinline__ void bring(Ring& ring, u32& k, const D& deal, const Work* work, Bytes bytes, Source source) {
    for (u32 i = deal.begin; i < deal.end;) {
        Strip s = deal.at(i);
        const u32 expert = work[s.piece].expert, until = min(deal.end, i + s.left);
        for (; i < until; i++, k++, s.index++) {
            const u32 stage = k % RING;
            if (k >= RING) barrier_wait(&ring.empty[stage], (k / RING - 1) & 1);
            const u32 n = bytes(expert, s.index);
            barrier_expect(&ring.full[stage], n);
            bulk_copy(shared + stage * STAGE, source(expert, s.index), n, &ring.full[stage]);
        }
    }
}

// Up to four pairs of an expert as one lane sees them: one is its column of B, another its column of the result.
struct Pairs {
    u32 column, token;
    bool has_column, has_token;
    __device__ __forceinline__ Pairs(const Work& w, const u32* pairs, int lane) {
        has_column = (lane >> 3) < w.count;
        has_token = (lane & 3) < w.count;
        column = has_column ? pairs[w.first + (lane >> 3)] : 0;
        token = __shfl_sync(FULL, column, (lane & 3) * 8);
    }
};

// A warp's share of their inputs.
template <u32 MOST> struct Inputs {
    Fragment f[MOST];
    float sum[MOST];
};

// A warp's part of one row block's products.
template <u32 MOST>
__device__ __forceinline__ void multiply_strip(const u8* tiles, u32 count, const Inputs<MOST>& in, int lane, float* part) {
    float total[2] = {0, 0};
#pragma unroll
    for (u32 k = 0; k < MOST; k++)
        if (k < count) multiply_at<Q4>(tiles + k * tile_bytes<Q4>(), lane, in.f[k], in.sum[k], total);
    part[lane] = total[0];
    part[lane + 32] = total[1];
}

// --- which pairs an expert has ---

#define FEW_ROWS 32  // of a step whose blocks group pairs themselves
#define MOST_PIECES (FEW_ROWS * TOP_K + FEW_ROWS / GROUP_BY_COPIES)
#define GROUP_BY_COPIES 4
#define EXPERTS_OF_THREAD ((EXPERTS + THREADS - 1) / THREADS)

// The list of work, as `route` of moe.cu writes it into memory.
struct List {
    const u32* pairs;
    const Work* work;
    u32 counts[2];  // pieces, in all and of routed experts
};
// The same of few rows, made by each block for itself.
struct OwnList {
    Work work[MOST_PIECES];
    u32 pairs[FEW_ROWS * SLOTS];
    u32 rows_of[EXPERTS], start[EXPERTS];
    u32 sizes[WARPS], pieces[WARPS];
};

// chosen: null, or experts of each row, from which the list is made. All threads; those behind THREADS only wait. Waits for the
// kernel before.
__device__ __forceinline__ List make_list(OwnList& own, const u32* chosen, u32 rows, const Work* work, const u32* counts, const u32* pairs) {
    const u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    for (u32 e = tid; e < EXPERTS; e += GROUP_THREADS) own.rows_of[e] = 0;
    __syncthreads();
    wait_for_inputs();
    if (!chosen) {
        const uint2 n = __ldcg((const uint2*)counts);
        return List{pairs, work, {n.x, n.y}};
    }
    constexpr u32 MINE = (FEW_ROWS * TOP_K + THREADS - 1) / THREADS;
    u32 mine[MINE];
#pragma unroll
    for (u32 j = 0; j < MINE; j++) {
        const u32 i = tid + j * THREADS;
        mine[j] = tid < THREADS && i < rows * TOP_K ? __ldcg(chosen + i) : (u32)EXPERTS;
        if (mine[j] < EXPERTS) atomicOr(&own.rows_of[mine[j]], 1u << i / TOP_K);
    }
    __syncthreads();
    // A thread has consecutive experts: sums over those before them, first within the warp, then over warps.
    u32 size[EXPERTS_OF_THREAD], first = 0, piece = 0, n = 0, parts = 0;
    if (tid < THREADS) {
#pragma unroll
        for (u32 i = 0; i < EXPERTS_OF_THREAD; i++) {
            const u32 e = tid * EXPERTS_OF_THREAD + i;
            size[i] = e < EXPERTS ? __popc(own.rows_of[e]) : 0;
            n += size[i];
            parts += (size[i] + GROUP_BY_COPIES - 1) / GROUP_BY_COPIES;
        }
        first = n;
        piece = parts;
#pragma unroll
        for (u32 o = 1; o < 32; o <<= 1) {
            const u32 a = __shfl_up_sync(FULL, first, o), b = __shfl_up_sync(FULL, piece, o);
            first += lane >= o ? a : 0;
            piece += lane >= o ? b : 0;
        }
        if (lane == 31) {
            own.sizes[warp] = first;
            own.pieces[warp] = piece;
        }
    }
    __syncthreads();
    u32 routed = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) {
        if (w < warp) {
            first += own.sizes[w];
            piece += own.pieces[w];
        }
        routed += own.pieces[w];
    }
    const u32 shared_parts = (rows + GROUP_BY_COPIES - 1) / GROUP_BY_COPIES;
    if (tid < THREADS) {
        first -= n;
        piece -= parts;
#pragma unroll
        for (u32 i = 0; i < EXPERTS_OF_THREAD; i++) {
            const u32 e = tid * EXPERTS_OF_THREAD + i;
            if (e >= EXPERTS) continue;
            own.start[e] = first;
            for (u32 j = 0; j < size[i]; j += GROUP_BY_COPIES)
                own.work[piece++] = Work{e, first + j, min((u32)GROUP_BY_COPIES, size[i] - j), 0};
            first += size[i];
        }
        for (u32 i = tid; i < shared_parts; i += THREADS)
            own.work[routed + i] = Work{EXPERTS, rows * TOP_K + i * GROUP_BY_COPIES, min((u32)GROUP_BY_COPIES, rows - i * GROUP_BY_COPIES), 0};
        for (u32 i = tid; i < rows; i += THREADS) own.pairs[rows * TOP_K + i] = i * SLOTS + TOP_K;
    }
    __syncthreads();
    // By rising row, so that all blocks have them alike.
#pragma unroll
    for (u32 j = 0; j < MINE; j++) {
        const u32 e = mine[j], i = tid + j * THREADS, row = i / TOP_K;
        if (e < EXPERTS) own.pairs[own.start[e] + __popc(own.rows_of[e] & ((1u << row) - 1))] = row * SLOTS + i % TOP_K;
    }
    __syncthreads();
    return List{own.pairs, own.work, {routed + shared_parts, routed}};
}

// Says that a warp is through with a barrier's thing.
__device__ __forceinline__ void warp_arrive(u64* bar, int lane) {
    __syncwarp();
    if (lane == 0) barrier_arrive(bar);
}

// What the warps of a block share and work on.
struct Block {
    Ring& ring;
    const List& list;
    u32 warp, lane;
    u32 k;  // strips of the ring so far
};

// SiLU(gate x) * (up x) of every pair as fragments: middle, [pairs, MIDDLE_TILES], with the sum of every eight values in
// `middle_sums`, [pairs, MIDDLE / 8]. A strip is one row block; `done` counts each piece's.
__device__ __forceinline__ void gate_up_adder(Block& b, const GateUpDeal& deal, const float (*parts)[WARPS][PART], const float* scale,
                                              u8* middle, float* middle_sums, u32* done) {
    u32 k = 0;
    for (u32 i = deal.begin; i < deal.end;) {
        const Strip s = deal.at(i);
        const u32 begin = i, until = min(deal.end, i + s.left), first = i - s.index;
        const Pairs of(b.list.work[s.piece], b.list.pairs, b.lane);
        const float row_scale = of.has_column ? __ldcg(scale + of.column / SLOTS) : 0.0f;
#pragma unroll 1
        for (; i < until; i++, k++) {
            barrier_wait(&b.ring.summed[k % PARTS], k / PARTS & 1);
            // Eight lanes a pair: its eight values become a word of a fragment.
            const u32 r = b.lane % 8, block = i - first;
            const float* p = parts[k % PARTS][0] + r * 4 + b.lane / 8;
            float gate = 0, up = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) {
                gate += p[w * PART];
                up += p[w * PART + 32];
            }
            warp_arrive(&b.ring.added[k % PARTS], b.lane);
            const float v = swiglu(gate, up, row_scale), v4 = __shfl_xor_sync(FULL, v, 4);
            // As `split8` and `split_place` do it, a pair (r, r + 4) in each of four lanes.
            const u32 hi = pack_bf16(v, v4);
            const float x = bf16_low(hi), y = bf16_high(hi);
            const u32 lo = pack_bf16(v - x, v4 - y);
            const float both = (x + bf16_low(lo)) + (y + bf16_high(lo));
            float sum = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) sum += __shfl_sync(FULL, both, (b.lane & 24) + j);
            if (of.has_column && r < 4) {
                u8* to = middle + ((u64)of.column * MIDDLE_TILES + block / 8) * FRAGMENT_BYTES + (block & 1) * 128 + (block % 8 / 2) * 32;
                *(u32*)(to + r * 4) = hi;
                *(u32*)(to + 16 + r * 4) = lo;
                if (r == 0) middle_sums[(u64)of.column * (MIDDLE_TILES * 8) + block] = sum;
            }
        }
        __syncwarp();
        if (b.lane == 0) {
            __threadfence();
            atomicAdd(done + s.piece, until - begin);
        }
    }
}

__device__ __forceinline__ void gate_up_warp(Block& b, const GateUpDeal& deal, float (*parts)[WARPS][PART], const u8* fragments, const float* sums) {
    constexpr u32 MOST = Share<HIDDEN_TILES>::MOST;
    const Share<HIDDEN_TILES> mine(b.warp);
    for (u32 i = deal.begin; i < deal.end;) {
        const Strip s = deal.at(i);
        const u32 until = min(deal.end, i + s.left);
        const Pairs of(b.list.work[s.piece], b.list.pairs, b.lane);
        Inputs<MOST> in;
#pragma unroll
        for (u32 t = 0; t < MOST; t++) {
            in.f[t] = load_fragment(fragments, of.has_column && t < mine.count ? (long long)(of.column / SLOTS) : -1, HIDDEN_TILES,
                                    mine.first + t, b.lane);
            in.sum[t] = of.has_token && t < mine.count ? __ldcg(sums + (u64)(of.token / SLOTS) * HIDDEN_TILES + mine.first + t) : 0.0f;
        }
#pragma unroll 1
        for (; i < until; i++, b.k++) {
            const u32 k = b.k;
            if (k >= PARTS) barrier_wait(&b.ring.added[k % PARTS], (k / PARTS - 1) & 1);
            barrier_wait(&b.ring.full[k % RING], k / RING & 1);
            multiply_strip<MOST>(shared + k % RING * STAGE + mine.first * tile_bytes<Q4>(), mine.count, in, b.lane, parts[k % PARTS][b.warp]);
            __syncwarp();
            if (b.lane == 0) {
                barrier_arrive(&b.ring.empty[k % RING]);
                barrier_arrive(&b.ring.summed[k % PARTS]);
            }
        }
    }
}

// expanded[pair] = down middle[pair]. A strip is DOWN_GROUP row blocks.
__device__ __forceinline__ void down_adder(Block& b, const DownDeal& deal, const float (*parts)[DOWN_GROUP][WARPS][PART], float* expanded) {
    u32 k = 0;
    for (u32 i = deal.begin; i < deal.end;) {
        const Strip s = deal.at(i);
        const u32 until = min(deal.end, i + s.left), first = i - s.index;
        const Work w = b.list.work[s.piece];
        const Pairs of(w, b.list.pairs, b.lane);
        float* to[4];
#pragma unroll
        for (int t = 0; t < 4; t++) to[t] = t < w.count ? expanded + (u64)__shfl_sync(FULL, of.column, t * 8) * HIDDEN : nullptr;
#pragma unroll 1
        for (; i < until; i++, k++) {
            const u32 slot = k % DOWN_PARTS, rows = row_blocks(i - first) * TILE_ROWS, row0 = (i - first) * (DOWN_GROUP * TILE_ROWS);
            barrier_wait(&b.ring.down_summed[slot], k / DOWN_PARTS & 1);
#pragma unroll
            for (u32 row = b.lane; row < DOWN_GROUP * TILE_ROWS; row += 32) {
                const float4* p = (const float4*)parts[slot][row / TILE_ROWS][0] + row % TILE_ROWS;
                float v[4] = {0, 0, 0, 0};
#pragma unroll
                for (int j = 0; j < WARPS; j++) {
                    const float4 x = p[j * (PART / 4)];
                    v[0] += x.x;
                    v[1] += x.y;
                    v[2] += x.z;
                    v[3] += x.w;
                }
                if (row >= rows) continue;
#pragma unroll
                for (int t = 0; t < 4; t++)
                    if (to[t]) to[t][row0 + row] = v[t];
            }
            warp_arrive(&b.ring.down_added[slot], b.lane);
        }
    }
}

// Waits until a counter in memory has reached a number; what was written before it was raised is there then.
__device__ __forceinline__ void wait_for_count(const u32* counter, u32 number, int lane) {
    if (lane == 0) {
        u32 n;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(counter) : "memory");
        } while (n < number);
    }
    __syncwarp();
}

__device__ __forceinline__ void down_warp(Block& b, const DownDeal& deal, float (*parts)[DOWN_GROUP][WARPS][PART], const u8* middle,
                                          const float* middle_sums, const u32* done) {
    constexpr u32 MOST = Share<MIDDLE_TILES>::MOST;
    u32 n = 0;  // strips of `down` so far
    for (u32 i = deal.begin; i < deal.end;) {
        const Strip s = deal.at(i);
        const u32 until = min(deal.end, i + s.left), first = i - s.index;
        const Work w = b.list.work[s.piece];
        const Pairs of(w, b.list.pairs, b.lane);
        const u32 k_tiles = w.expert == EXPERTS ? SHARED_TILES : EXPERT_TILES, bytes = row_block_bytes(w.expert);
        const u32 tile = first_tile(b.warp, k_tiles), count = first_tile(b.warp + 1, k_tiles) - tile;
        wait_for_count(done + s.piece, w.expert == EXPERTS ? SHARED_BLOCKS : GATE_UP_BLOCKS, b.lane);
        Inputs<MOST> in;
#pragma unroll
        for (u32 t = 0; t < MOST; t++) {
            in.f[t] = load_fragment(middle, of.has_column && t < count ? (long long)of.column : -1, MIDDLE_TILES, tile + t, b.lane);
            in.sum[t] = 0;
            if (of.has_token && t < count) {
                // In the order in which `split_place` adds the sums of eight values.
                const float4* p = (const float4*)(middle_sums + ((u64)of.token * MIDDLE_TILES + tile + t) * 8);
                const float4 x = __ldcg(p), y = __ldcg(p + 1);
                in.sum[t] = ((x.x + x.y) + (x.z + x.w)) + ((y.x + y.y) + (y.z + y.w));
            }
        }
#pragma unroll 1
        for (; i < until; i++, b.k++, n++) {
            const u32 units = row_blocks(i - first), slot = n % DOWN_PARTS, k = b.k;
            const u8* strip = shared + k % RING * STAGE + tile * tile_bytes<Q4>();
            if (n >= DOWN_PARTS) barrier_wait(&b.ring.down_added[slot], (n / DOWN_PARTS - 1) & 1);
            barrier_wait(&b.ring.full[k % RING], k / RING & 1);
#pragma unroll
            for (u32 u = 0; u < DOWN_GROUP; u++)
                if (u < units) multiply_strip<MOST>(strip + u * bytes, count, in, b.lane, parts[slot][u][b.warp]);
            __syncwarp();
            if (b.lane == 0) {
                barrier_arrive(&b.ring.empty[k % RING]);
                barrier_arrive(&b.ring.down_summed[slot]);
            }
        }
    }
}

// Where the experts' weights are.
struct Experts {
    const u8 *gate_up, *shared_gate_up, *down, *shared_down;
};

// done: a counter for each piece, 0 before; the kernel behind this one makes it 0 again.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 2)
experts_group_q4(Experts e, const Work* work, const u32* counts, const u32* pairs, const u32* chosen, u32 rows, const u8* fragments,
                 const float* sums, const float* scale, u8* middle, float* middle_sums, u32* done, float* expanded) {
    __shared__ Ring ring;
    __shared__ OwnList own;
    __shared__ float parts[PARTS][WARPS][PART];
    __shared__ __align__(16) float down_parts[DOWN_PARTS][DOWN_GROUP][WARPS][PART];
    launch_dependents();
    init_ring(ring);
    const List list = make_list(own, chosen, rows, work, counts, pairs);
    const GateUpDeal gate_up(list.counts[0], list.counts[1]);
    const DownDeal down(list.counts[0], list.counts[1]);
    Block b{ring, list, threadIdx.x / 32, threadIdx.x % 32, 0};
    if (b.warp == BRINGER) {
        if (b.lane > 0) return;
        bring(ring, b.k, gate_up, list.work, [](u32, u32) { return GATE_UP_BYTES; }, [&](u32 expert, u32 index) {
            return (expert == EXPERTS ? e.shared_gate_up : e.gate_up + (u64)expert * GATE_UP_BLOCKS * GATE_UP_BYTES) + (u64)index * GATE_UP_BYTES;
        });
        bring(ring, b.k, down, list.work, [](u32 expert, u32 index) { return row_blocks(index) * row_block_bytes(expert); },
              [&](u32 expert, u32 index) {
                  const u64 bytes = row_block_bytes(expert);
                  return (expert == EXPERTS ? e.shared_down : e.down + (u64)expert * HIDDEN_BLOCKS * bytes) + index * DOWN_GROUP * bytes;
              });
    } else if (b.warp == ADDER) {
        gate_up_adder(b, gate_up, parts, scale, middle, middle_sums, done);
        down_adder(b, down, down_parts, expanded);
    } else {
        gate_up_warp(b, gate_up, parts, fragments, sums);
        down_warp(b, down, down_parts, middle, middle_sums, done);
    }
}
