// Experts for several tokens, from 4-bit weights: what `gate_up` and `down` of moe.cu compute, in one kernel. Its work is strips of
// weights, first all of gate and up, then all of down. Chunks of strips go to blocks in turn, the last ones to whoever asks. Of a
// block's warps one finds chunks and brings their inputs, one brings strips of weights through a ring in shared memory, eight multiply,
// and one adds up what they got, so that the others need not wait for it. Needs compute capability 9.0.

extern __shared__ __align__(128) u8 shared[];

#define RING 3           // strips in shared memory
#define DOWN_GROUP 4     // row blocks of a strip of down; one of gate and up is one row block
#define PARTS 8          // row blocks whose eight warps' sums are in shared memory
#define DOWN_PARTS (PARTS / DOWN_GROUP)
#define GATE_UP_CHUNK 8  // strips of a chunk; more are dealt less evenly, and fewer bring more inputs
#define DOWN_CHUNK 2
#define DEALT 3          // eighths of the chunks of down that need not be asked for
#define CHUNKS 16        // descriptions of chunks in shared memory: the adding warp may be that far behind
#define FEEDER WARPS     // the warps behind those that multiply
#define BRINGER (WARPS + 1)
#define ADDER (WARPS + 2)
#define GROUP_THREADS (THREADS + 96)
#define DOWN_STRIPS ((HIDDEN_BLOCKS + DOWN_GROUP - 1) / DOWN_GROUP)

#define PART (TILE_ROWS * 4)  // sums of a row block: [row][pair]

// Every thread arrives for itself: one for its warp would do and be no faster, but racecheck does not follow that.
struct Ring {
    u64 full[RING], empty[RING];
    u64 added[PARTS], added_down[DOWN_PARTS];  // parts that are free again; those that are there are told at the hardware's barriers
    u64 described[CHUNKS];
    u64 inputs[2], used[2];  // a chunk's inputs are there; have been read
};

// The hardware's barrier of a slot of parts: the multiplying warps arrive and go on, the adding one waits for all of them.
__device__ __forceinline__ void parts_arrive(u32 slot) { named_arrive<THREADS + 32>(1 + slot); }
__device__ __forceinline__ void parts_wait(u32 slot) { named_sync<THREADS + 32>(1 + slot); }

// The pieces of work and the pairs that they are of, in order of experts: as `route` lists them, or in shared memory.
struct Lists {
    const Work* work;
    const u32* pairs;
    u32 pieces, routed;  // in all; of routed experts
    __device__ __forceinline__ Work at(u32 piece) const {
        const uint4 w = load_relaxed((const uint4*)work + piece);
        return Work{w.x, w.y, w.z, w.w};
    }
    __device__ __forceinline__ u32 pair(u32 i) const { return load_relaxed(pairs + i); }
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

// Strips of a piece of work that follow each other.
#define NO_CHUNK 0  // the last one
#define GATE_UP 1
#define DOWN 2
struct Chunk {
    u32 kind;
    u32 piece, expert, count;  // `count`: pairs
    u32 first, strips;
    u32 pairs[BY_COPIES];
    float scale[BY_COPIES];  // of gate and up: 1 / rms of the pairs' rows
};

// Chunks in the order in which they are begun. Pieces of the shared expert come first: most of their bytes are in the L2 cache, where
// the last strips should not be.
struct Order {
    static constexpr u32 ROUTED_CHUNKS = (GATE_UP_BLOCKS + GATE_UP_CHUNK - 1) / GATE_UP_CHUNK;
    static constexpr u32 SHARED_CHUNKS = (SHARED_BLOCKS + GATE_UP_CHUNK - 1) / GATE_UP_CHUNK;
    static constexpr u32 DOWN_CHUNKS = (DOWN_STRIPS + DOWN_CHUNK - 1) / DOWN_CHUNK;
    u32 routed, shared;  // pieces
    u32 gate_up, all;    // chunks of gate and up; in all
    u32 dealt;           // chunks that go to blocks in turn
    __device__ __forceinline__ explicit Order(const Lists& lists) {
        routed = lists.routed;
        shared = lists.pieces - routed;
        gate_up = shared * SHARED_CHUNKS + routed * ROUTED_CHUNKS;
        all = gate_up + lists.pieces * DOWN_CHUNKS;
        dealt = gate_up + (all - gate_up) * DEALT / 8;
    }
    // Chunk `i`, but for its expert and pairs.
    __device__ __forceinline__ Chunk at(u32 i) const {
        Chunk c;
        u32 place;  // of the piece in this order
        if (i < gate_up) {
            const u32 in_shared = shared * SHARED_CHUNKS, is_shared = i < in_shared, j = is_shared ? i : i - in_shared;
            const u32 chunks = is_shared ? SHARED_CHUNKS : ROUTED_CHUNKS, blocks = is_shared ? SHARED_BLOCKS : GATE_UP_BLOCKS;
            place = j / chunks + (is_shared ? 0 : shared);
            c.kind = GATE_UP;
            c.first = j % chunks * GATE_UP_CHUNK;
            c.strips = min((u32)GATE_UP_CHUNK, blocks - c.first);
        } else {
            const u32 j = i - gate_up;
            place = j / DOWN_CHUNKS;
            c.kind = i < all ? DOWN : NO_CHUNK;
            c.first = j % DOWN_CHUNKS * DOWN_CHUNK;
            c.strips = min((u32)DOWN_CHUNK, DOWN_STRIPS - c.first);
        }
        c.piece = place < shared ? routed + place : place - shared;
        return c;
    }
};

// Chunks of a launch that blocks have asked for; 0 between launches.
__device__ u32 tickets;

__device__ __forceinline__ void init(Ring& ring, Grouping& g) {
    const u32 tid = threadIdx.x;
    for (u32 e = tid; e < EXPERTS; e += GROUP_THREADS) g.rows[e] = 0;
    if (tid < RING) {
        barrier_init(&ring.full[tid], 1);
        barrier_init(&ring.empty[tid], THREADS);
    }
    if (tid < PARTS) barrier_init(&ring.added[tid], 32);
    if (tid < DOWN_PARTS) barrier_init(&ring.added_down[tid], 32);
    if (tid < CHUNKS) barrier_init(&ring.described[tid], 32);
    if (tid < 2) {
        barrier_init(&ring.inputs[tid], 32);
        barrier_init(&ring.used[tid], THREADS);
    }
    barrier_fence();
    __syncthreads();
}

// What the kernel reads and writes.
struct Experts {
    const u8* gate_up;  // packed one after another
    const u8* gate_up_shared;
    const u8* down;
    const u8* down_shared;
    Routed step;
    const u8* fragments;  // of x, as the router leaves them
    const Unit* units;
    const float* scale;
    float* middle;    // [pair, MIDDLE]: SiLU(gate x) * (up x)
    float* expanded;  // [pair, HIDDEN]: down middle
    u32* done;        // strips of gate and up that are in `middle`, by piece; 0 before
};

// Dynamic shared memory: strips, then inputs of a chunk of gate and up or of two of down; src/group.rs knows how much it is.
constexpr u32 GATE_UP_STRIP = HIDDEN_TILES * tile_bytes<Q4>();
__host__ __device__ constexpr u32 cmax(u32 a, u32 b) { return a > b ? a : b; }
constexpr u32 STAGE = cmax(GATE_UP_STRIP, DOWN_GROUP * MIDDLE_TILES * tile_bytes<Q4>());
constexpr u32 ROW_FRAGMENTS = HIDDEN_TILES * FRAGMENT_BYTES<true>;
constexpr u32 ROW_UNITS = HIDDEN_TILES * 8 + 16;  // pairs' lie in different banks
constexpr u32 DOWN_INPUTS = BY_COPIES * (MIDDLE) * 4;

__device__ __forceinline__ u32 row_blocks(u32 strip) { return min((u32)DOWN_GROUP, HIDDEN_BLOCKS - strip * DOWN_GROUP); }
__device__ __forceinline__ u32 down_tiles(u32 expert) { return expert == EXPERTS ? SHARED_TILES : EXPERT_TILES; }
// Chunk `j` of the block, once it is described.
__device__ __forceinline__ Chunk& chunk_at(Ring& ring, Chunk* chunks, u32 j) {
    barrier_wait(&ring.described[j % CHUNKS], j / CHUNKS & 1);
    return chunks[j % CHUNKS];
}

// Asks for the next chunk that is not dealt. A block does until there are none, so it is known who is the last to ask.
__device__ __forceinline__ u32 draw(const Order& order) {
    const u32 ticket = atomicAdd(&tickets, 1), i = order.dealt + ticket;
    if (i == order.all + gridDim.x - 1) atomicExch(&tickets, 0);
    return i;
}

// Waits until all of a piece's `middle` is in memory, for bulk copies behind it.
__device__ __forceinline__ void await_middle(const u32* done, u32 strips) {
    while (load_acquire(done) < strips) {}
    whole_proxy_fence();
}

// Brings the inputs of gate and up of `count` pairs, in whose rows lanes have theirs: fragments, then units; and what scales their outputs.
__device__ __forceinline__ void bring_rows(const Experts& o, u32 row, u32 count, u8* in, u32 lane, u64* bar, float* scales) {
    if (lane < count) {
        barrier_expect_more(bar, ROW_FRAGMENTS);
        bulk_copy<false>(in + lane * ROW_FRAGMENTS, o.fragments + (u64)row * ROW_FRAGMENTS, ROW_FRAGMENTS, bar);
    }
    __syncwarp();
    const float scale = lane < count ? __ldcg(o.scale + row) : 0.0f;
    u32 rows[BY_COPIES];
#pragma unroll
    for (u32 p = 0; p < BY_COPIES; p++) rows[p] = __shfl_sync(FULL, row, p);
    for (u32 t = lane; t < HIDDEN_TILES; t += 32) {
        float2 u[BY_COPIES];
#pragma unroll
        for (u32 p = 0; p < BY_COPIES; p++)
            if (p < count) u[p] = __ldcg((const float2*)o.units + (u64)rows[p] * HIDDEN_TILES + t);
#pragma unroll
        for (u32 p = 0; p < BY_COPIES; p++)
            if (p < count) *(float2*)(in + BY_COPIES * ROW_FRAGMENTS + p * ROW_UNITS + t * 8) = u[p];
    }
    if (lane < count) scales[lane] = scale;
}

// Finds a block's chunks, describes them and brings their inputs, by one warp. Asking and describing are ahead of the inputs, so that
// nobody waits for them.
__device__ __forceinline__ void feed(Ring& ring, Chunk* chunks, const Lists& lists, const Experts& o, u32 lane) {
    const Order order(lists);
    u32 next = blockIdx.x, was = 0;
    if (next >= order.dealt) next = __shfl_sync(FULL, lane == 0 ? draw(order) : 0, 0);
    for (u32 j = 0;; j++) {
        const u32 i = next;
        const bool is = i < order.all, asks = i + gridDim.x >= order.dealt;
        u32 drawn = 0;
        if (is && asks && lane == 0) drawn = draw(order);
        Chunk& to = chunks[j % CHUNKS];
        const Chunk c = order.at(i);
        u32 pair = 0, count = 0;
        if (is) {
            const Work w = lists.at(c.piece);
            count = w.count;
            if (lane < count) pair = lists.pair(w.first + lane);
            if (lane == 0) {
                to.piece = c.piece;
                to.expert = w.expert;
                to.count = count;
                to.first = c.first;
                to.strips = c.strips;
            }
            if (lane < count) to.pairs[lane] = pair;
        }
        if (lane == 0) to.kind = c.kind;
        barrier_arrive(&ring.described[j % CHUNKS]);
        if (!is) return;
        // There is room for the inputs of one chunk of gate and up, or of two of down.
        const u32 before = min(i, was) >= order.gate_up ? 2 : 1;
        if (j >= before) barrier_wait(&ring.used[(j - before) & 1], (j - before) / 2 & 1);
        u8* in = shared + RING * STAGE + (c.kind == DOWN ? (j & 1) * DOWN_INPUTS : 0);
        u64* bar = &ring.inputs[j & 1];
        if (c.kind == GATE_UP) {
            bring_rows(o, pair / SLOTS, count, in, lane, bar, to.scale);
        } else {
            await_middle(o.done + c.piece, c.piece < order.routed ? GATE_UP_BLOCKS : SHARED_BLOCKS);
            constexpr u32 BYTES = (MIDDLE) * 4;
            if (lane < count) {
                barrier_expect_more(bar, BYTES);
                bulk_copy<false>(in + lane * BYTES, o.middle + (u64)pair * (MIDDLE), BYTES, bar);
            }
        }
        barrier_arrive(bar);
        was = i;
        next = asks ? __shfl_sync(FULL, drawn, 0) : i + gridDim.x;
    }
}

// Brings the strips of all chunks, by one thread.
__device__ __forceinline__ void bring(Ring& ring, Chunk* chunks, const Experts& o) {
    u32 k = 0;
    for (u32 j = 0;; j++) {
        const Chunk& c = chunk_at(ring, chunks, j);
        const u32 kind = c.kind, expert = c.expert, end = c.first + c.strips;
        if (kind == NO_CHUNK) return;
        const u32 row_block = down_tiles(expert) * tile_bytes<Q4>();
        const u8* from = kind == GATE_UP ? (expert == EXPERTS ? o.gate_up_shared : o.gate_up + (u64)expert * GATE_UP_BLOCKS * GATE_UP_STRIP)
                                         : (expert == EXPERTS ? o.down_shared : o.down + (u64)expert * HIDDEN_BLOCKS * row_block);
        const u32 stride = kind == GATE_UP ? GATE_UP_STRIP : DOWN_GROUP * row_block;
        for (u32 i = c.first; i < end; i++, k++) {
            const u32 stage = k % RING, bytes = kind == GATE_UP ? GATE_UP_STRIP : row_blocks(i) * row_block;
            if (k >= RING) barrier_wait(&ring.empty[stage], (k / RING - 1) & 1);
            barrier_expect(&ring.full[stage], bytes);
            bulk_copy(shared + stage * STAGE, from + (u64)i * stride, bytes, &ring.full[stage]);
        }
    }
}

// The 64 inputs of a tile, those of this lane's pair (lane / 8), as `split_place` would make them; `unit` is that of pair lane % 4.
// Both lanes of a column, which differ in the digit that they have, make all digits.
__device__ __forceinline__ void make_fragment(const float* x, bool has, int lane, Fragment<Q4>& f, Unit& unit) {
    float v[2][8] = {};
    if (has) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 four = *((const float4*)(x + (lane & 3) * 16) + i);
            v[i / 2][i % 2 * 4] = four.x;
            v[i / 2][i % 2 * 4 + 1] = four.y;
            v[i / 2][i % 2 * 4 + 2] = four.z;
            v[i / 2][i % 2 * 4 + 3] = four.w;
        }
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

// The sums of eight warps for a row block: [warp][row][pair].
typedef float Parts[WARPS][PART];

// A warp's part of one row block's products.
__device__ __forceinline__ void store_part(float* part, int lane, const float (&total)[2]) {
    part[lane] = total[0];
    part[lane + 32] = total[1];
}

// Multiplies the chunks of gate and up, by one of the WARPS. j, k: chunks and strips so far.
__device__ __forceinline__ void multiply_gate_up(Ring& ring, Chunk* chunks, Parts* parts, u32 warp, u32 lane, u32& j, u32& k) {
    const Share<HIDDEN_TILES> mine(warp);
    for (;; j++) {
        const Chunk& c = chunk_at(ring, chunks, j);
        if (c.kind != GATE_UP) return;
        const u8* in = shared + RING * STAGE;
        const u8* fragments = in + (lane >> 3) * ROW_FRAGMENTS + mine.first * FRAGMENT_BYTES<true>;
        const float2* units = (const float2*)(in + BY_COPIES * ROW_FRAGMENTS + (lane & 3) * ROW_UNITS) + mine.first;
        const u32 until = k + c.strips;
        barrier_wait(&ring.inputs[j & 1], j / 2 & 1);
        Fragment<Q4> f[mine.MOST];
        Unit unit[mine.MOST];
#pragma unroll
        for (u32 t = 0; t < mine.MOST; t++) {
            if (!mine.has(t)) continue;
            f[t] = load_staged<true>(fragments + t * FRAGMENT_BYTES<true>, lane);
            unit[t] = Unit{units[t].x, units[t].y};
        }
        barrier_arrive(&ring.used[j & 1]);
#pragma unroll 1
        for (; k < until; k++) {
            if (k >= PARTS) barrier_wait(&ring.added[k % PARTS], (k / PARTS - 1) & 1);
            barrier_wait(&ring.full[k % RING], k / RING & 1);
            const u8* tiles = shared + k % RING * STAGE + mine.first * tile_bytes<Q4>();
            float total[2] = {0, 0};
#pragma unroll
            for (u32 t = 0; t < mine.MOST; t++) {
                if (mine.has(t)) multiply_at<Q4>(tiles + t * tile_bytes<Q4>(), lane, f[t], unit[t], total);
            }
            store_part(parts[k % PARTS][warp], lane, total);
            parts_arrive(k % PARTS);
            barrier_arrive(&ring.empty[k % RING]);
        }
    }
}

// Those of down.
__device__ __forceinline__ void multiply_down(Ring& ring, Chunk* chunks, Parts* parts, u32 warp, u32 lane, u32 j, u32 k) {
    // Their parts lie elsewhere: all of gate and up must have been added up.
    const u32 gate_ups = k;
    for (u32 i = k > PARTS ? k - PARTS : 0; i < gate_ups; i++) barrier_wait(&ring.added[i % PARTS], i / PARTS & 1);
    for (;; j++) {
        const Chunk& c = chunk_at(ring, chunks, j);
        if (c.kind == NO_CHUNK) return;
        constexpr u32 MOST = Share<MIDDLE_TILES>::MOST;
        const u32 k_tiles = down_tiles(c.expert), bytes = k_tiles * tile_bytes<Q4>(), until = k + c.strips;
        const u32 tile = first_tile(warp, k_tiles), count = first_tile(warp + 1, k_tiles) - tile;
        const float* middle = (const float*)(shared + RING * STAGE + (j & 1) * DOWN_INPUTS) + (lane >> 3) * (MIDDLE) + tile * TILE_COLS;
        u32 strip_index = c.first;
        const bool has = (lane >> 3) < c.count;
        barrier_wait(&ring.inputs[j & 1], j / 2 & 1);
        Fragment<Q4> f[MOST];
        Unit unit[MOST];
#pragma unroll
        for (u32 t = 0; t < MOST; t++) make_fragment(middle + t * TILE_COLS, has && t < count, lane, f[t], unit[t]);
        barrier_arrive(&ring.used[j & 1]);
#pragma unroll 1
        for (; k < until; k++, strip_index++) {
            const u32 blocks = row_blocks(strip_index), n = k - gate_ups, slot = n % DOWN_PARTS;
            const u8* strip = shared + k % RING * STAGE + tile * tile_bytes<Q4>();
            if (n >= DOWN_PARTS) barrier_wait(&ring.added_down[slot], (n / DOWN_PARTS - 1) & 1);
            barrier_wait(&ring.full[k % RING], k / RING & 1);
            float total[DOWN_GROUP][2] = {};
#pragma unroll
            for (u32 u = 0; u < DOWN_GROUP; u++)
#pragma unroll
                for (u32 t = 0; t < MOST; t++)
                    if (u < blocks && t < count) multiply_at<Q4>(strip + u * bytes + t * tile_bytes<Q4>(), lane, f[t], unit[t], total[u]);
#pragma unroll
            for (u32 u = 0; u < DOWN_GROUP; u++) store_part(parts[slot * DOWN_GROUP + u][warp], lane, total[u]);
            parts_arrive(PARTS + slot);
            barrier_arrive(&ring.empty[k % RING]);
        }
    }
}

// Adds up eighths of gate and up and stores `middle`, by one warp. j: chunks so far.
__device__ __forceinline__ void add_gate_up(Ring& ring, Chunk* chunks, Parts* parts, const Experts& o, u32 lane, u32& j) {
    for (u32 k = 0;; j++) {
        const Chunk& c = chunk_at(ring, chunks, j);
        if (c.kind != GATE_UP) return;
        // Eight lanes a pair.
        const u32 t = lane / 8, r = lane % 8, end = c.first + c.strips, piece = c.piece, strips = c.strips;
        const bool has = t < c.count;
        const u32 width = c.expert == EXPERTS ? SHARED_WIDTH : EXPERT_WIDTH;
        float* to = o.middle + (has ? (u64)c.pairs[t] * (MIDDLE) : 0);
        float scale = 0;
#pragma unroll 1
        for (u32 block = c.first; block < end; block++, k++) {
            parts_wait(k % PARTS);
            if (block == c.first) scale = has ? c.scale[t] : 0.0f;  // is there only with the other inputs
            const float* p = parts[k % PARTS][0] + r * 4 + t;
            const float gate = sum_of<WARPS>([&](int w) { return p[w * PART]; });
            const float up = sum_of<WARPS>([&](int w) { return p[w * PART + 32]; });
            barrier_arrive(&ring.added[k % PARTS]);
            if (has && block * 8 + r < width) to[block * 8 + r] = swiglu(gate, up, scale);
        }
        __syncwarp();
        if (lane == 0) add_release(o.done + piece, strips);
    }
}

// Those of down, and stores `expanded`.
__device__ __forceinline__ void add_down(Ring& ring, Chunk* chunks, Parts* parts, const Experts& o, u32 lane, u32 j) {
    for (u32 k = 0;; j++) {
        const Chunk& c = chunk_at(ring, chunks, j);
        if (c.kind == NO_CHUNK) return;
        float* to[BY_COPIES];
#pragma unroll
        for (u32 t = 0; t < BY_COPIES; t++) to[t] = t < c.count ? o.expanded + (u64)c.pairs[t] * HIDDEN : nullptr;
        const u32 end = c.first + c.strips;
#pragma unroll 1
        for (u32 i = c.first; i < end; i++, k++) {
            const u32 slot = k % DOWN_PARTS, rows = row_blocks(i) * TILE_ROWS, row0 = i * (DOWN_GROUP * TILE_ROWS);
            parts_wait(PARTS + slot);
#pragma unroll
            for (u32 row = lane; row < DOWN_GROUP * TILE_ROWS; row += 32) {
                const float4* p = (const float4*)parts[slot * DOWN_GROUP + row / TILE_ROWS][0] + row % TILE_ROWS;
                const float4 sum = sum_of<WARPS>([&](int w) { return p[w * (PART / 4)]; });
                const float v[4] = {sum.x, sum.y, sum.z, sum.w};
                if (row >= rows) continue;
#pragma unroll
                for (u32 t = 0; t < BY_COPIES; t++)
                    if (to[t]) to[t][row0 + row] = v[t];
            }
            barrier_arrive(&ring.added_down[slot]);
        }
    }
}

// All blocks of the grid must run at a time: those of down wait for those of gate and up.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS, 2) experts_group_q4(Experts o) {
    __shared__ Ring ring;
    __shared__ Grouping grouping;
    __shared__ Chunk chunks[CHUNKS];
    __shared__ __align__(16) Parts parts[PARTS];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    init(ring, grouping);
    // Weights of the shared expert can be on their way to the L2 cache before the choice is there.
    for (u32 i = blockIdx.x; i < SHARED_BLOCKS + DOWN_STRIPS && threadIdx.x == 0; i += gridDim.x) {
        const u32 row_block = down_tiles(EXPERTS) * tile_bytes<Q4>(), strip = i - SHARED_BLOCKS;
        if (i < SHARED_BLOCKS) bulk_prefetch(o.gate_up_shared + (u64)i * GATE_UP_STRIP, GATE_UP_STRIP);
        else bulk_prefetch(o.down_shared + (u64)strip * (DOWN_GROUP * row_block), row_blocks(strip) * row_block);
    }
    wait_for_inputs();
    launch_dependents();
    const Lists lists = o.step.lists(grouping);
    u32 j = 0, k = 0;
    if (warp < WARPS) {
        multiply_gate_up(ring, chunks, parts, warp, lane, j, k);
        multiply_down(ring, chunks, parts, warp, lane, j, k);
    } else if (warp == ADDER) {
        add_gate_up(ring, chunks, parts, o, lane, j);
        add_down(ring, chunks, parts, o, lane, j);
    } else if (warp == FEEDER) {
        feed(ring, chunks, lists, o, lane);
    } else if (lane == 0) {
        bring(ring, chunks, o);
    }
}
