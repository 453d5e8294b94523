// Gated softmax attention between its two projections: docs/model-spec.md, section 4.

#define QUERY (HEADS * HEAD_DIM)
#define KV (KV_HEADS * HEAD_DIM)
#define PROJECTED (2 * QUERY + 2 * KV)  // per head query and gate | k | v
#define RATIO (HEADS / KV_HEADS)
#define HALF_ROTARY (ROTARY / 2)
#define PAGE_VALUES (PAGE * HEAD_DIM)  // of one K or V of one head

// K/V of all sequences. Page p of an attention layer: [K or V, KV_HEADS, PAGE, HEAD_DIM] bf16, pages `stride` values apart. The
// 16-byte chunks of a row are turned by the row, so that eight rows' chunks lie in different banks of shared memory too.
struct Cache {
    u16* values;      // of this layer
    u64 stride;       // between pages
    const u32* pages; // per slot `most` page numbers
    u32 most;
};

__device__ __forceinline__ u16* page_of(const Cache& c, u32 slot, u32 position, u32 value, u32 head) {
    const u64 page = __ldcg(c.pages + (u64)slot * c.most + position / PAGE);
    return c.values + page * c.stride + (u64)(value * KV_HEADS + head) * PAGE_VALUES;
}

// Value `d` of a row, in the cache and in shared memory.
__device__ __forceinline__ u32 turned(u32 row, u32 d) { return (d / 8 ^ (row & 7)) * 8 + d % 8; }

// Cosines and sines of all positions, [positions, HALF_ROTARY]; in f64, since an f32 angle is off by 0.01 far out.
extern "C" __global__ void __launch_bounds__(THREADS) rotary_table(const double* frequencies, float2* table, u32 positions) {
    const u64 i = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (u64)positions * HALF_ROTARY) return;
    const double angle = (double)(i / HALF_ROTARY) * frequencies[i % HALF_ROTARY];
    table[i] = make_float2((float)cos(angle), (float)sin(angle));
}

// Norm and rotation of queries (into `queries`, times HEAD_DIM^-0.5) and keys, and the append of K and V. A warp has a head
// of a row; grid: (ceil((HEADS + 2 KV_HEADS) / WARPS), rows).
extern "C" __global__ void __launch_bounds__(THREADS)
append(const Segment* segments, const Row* rows, const float* projected, const float* q_norm, const float* k_norm,
       const float2* table, Cache cache, float* queries) {
    constexpr int N = (HEAD_DIM + 31) / 32;
    __shared__ float heads[WARPS][HEAD_DIM];
    launch_dependents();
    wait_for_inputs();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, item = blockIdx.x * WARPS + warp;
    const u64 index = blockIdx.y;
    if (item >= HEADS + 2 * KV_HEADS) return;
    const Row row = rows[index];
    const u32 slot = segments[row.segment].slot;
    const bool is_query = item < HEADS, is_key = !is_query && item < HEADS + KV_HEADS;
    const u32 head = is_query ? item : (item - HEADS) % KV_HEADS;
    const float* in = projected + index * PROJECTED +
                      (is_query ? 2 * item * HEAD_DIM : 2 * QUERY + (is_key ? 0 : KV) + head * HEAD_DIM);
    float v[N], squares = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] = i * 32 + lane < HEAD_DIM ? __ldcg(in + i * 32 + lane) : 0.0f;
        squares += v[i] * v[i];
    }
    u16* page = is_query ? nullptr : page_of(cache, slot, row.position, is_key ? 0 : 1, head) + row.position % PAGE * HEAD_DIM;
    if (!is_query && !is_key) {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i * 32 + lane < HEAD_DIM) page[turned(row.position, i * 32 + lane)] = (u16)pack_bf16(v[i], 0);
        return;
    }
    const float scale = rsqrtf(warp_sum(squares) / HEAD_DIM + EPS);
    const float* gain = is_query ? q_norm : k_norm;
#pragma unroll
    for (int i = 0; i < N; i++)
        if (i * 32 + lane < HEAD_DIM) heads[warp][i * 32 + lane] = v[i] * scale * __ldg(gain + i * 32 + lane);
    __syncwarp();
    const float2* angles = table + (u64)row.position * HALF_ROTARY;
    const float* h = heads[warp];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const u32 d = i * 32 + lane;
        if (d >= HEAD_DIM) continue;
        const float x = rotated(h, d, angles);
        if (is_query) queries[(index * HEADS + head) * HEAD_DIM + d] = x * (rsqrtf((float)HEAD_DIM));
        else page[turned(row.position, d)] = (u16)pack_bf16(x, 0);
    }
}

// --- split-K flash attention ---
//
// A block has a row's queries of one K/V head and some of its pages. The heads' queries are the rows of A, hi in rows 0..7 and lo in
// rows 8..15; a warp has 16 keys of each page, which it brings itself. Softmax weights are split into hi and lo too.

#define FLASH_WARPS 4
#define FLASH_THREADS 128
#define FLASH_KEYS (PAGE / FLASH_WARPS)  // of a warp
#define CHUNKS (HEAD_DIM / 8)            // of 16 bytes in a row
#define PART (HEAD_DIM / 2)              // values of a head that warps' sums are joined of at a time

__device__ __forceinline__ void load_matrices(u32 (&r)[4], const u8* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], const u8* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}
// 16-byte chunks of a row in shared memory, turned as in the cache.
__device__ __forceinline__ const u8* chunk(const u8* tile, u32 row, u32 c) {
    return tile + row * (HEAD_DIM * 2) + ((c ^ (row & 7)) * 16);
}

struct Softmax {
    float max, sum;
};

// A block's shared memory; `flash_shared` in src/forward.rs has its size.
struct __align__(128) Flash {
    u8 queries[16 * HEAD_DIM * 2];
    u8 tiles[2][FLASH_WARPS][FLASH_KEYS * HEAD_DIM * 2];  // K, V
    float parts[FLASH_WARPS][8][PART + 8];  // so that heads are in different banks
    Softmax softmaxes[FLASH_WARPS][8];
};

// Pages of a row that split `split` of `splits` has.
__device__ __forceinline__ void page_range(u32 position, u32 split, u32 splits, u32& begin, u32& end) {
    const u32 pages = position / PAGE + 1, per = (pages + splits - 1) / splits;
    begin = min(pages, split * per);
    end = min(pages, begin + per);
}

// Splits that have a page.
__device__ __forceinline__ u32 used_splits(u32 position, u32 splits) {
    const u32 pages = position / PAGE + 1, per = (pages + splits - 1) / splits;
    return (pages + per - 1) / per;
}

// Pages of a row in the order in which a block takes them: those of every gridDim.x-th split.
struct Pages {
    u32 position, splits, split, page, end;
    __device__ __forceinline__ Pages(u32 position, u32 splits) : position(position), splits(splits), split(blockIdx.x) {
        page_range(position, split, splits, page, end);
    }
    __device__ __forceinline__ bool any() const { return page < end; }
    __device__ __forceinline__ bool last() const { return page + 1 == end; }  // of its split
    __device__ __forceinline__ void next() {
        if (++page < end) return;
        split += gridDim.x;
        page_range(position, split, splits, page, end);
    }
};

// A warp's sums over its keys. It takes 16 N keys at a time: this lane has 2 t, 2 t + 1 and the same behind eight of each 16.
struct Attention {
    float o[HEAD_DIM / 8][4], top, sum;
    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 8; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
        top = -INFINITY;
        sum = 0;
    }
    // Scores of this lane's keys; -INFINITY for those behind `position`.
    template <int N>
    static __device__ __forceinline__ void scores(const u8* queries, const u8* keys, u32 first, u32 position, u32 lane, float (&s)[4 * N]) {
        float c[2 * N][4] = {};
#pragma unroll
        for (int ks = 0; ks < HEAD_DIM / 16; ks++) {
            u32 a[4], b[4];
            load_matrices(a, chunk(queries, lane % 16, ks * 2 + lane / 16));
#pragma unroll
            for (int n = 0; n < N; n++) {
                load_matrices(b, chunk(keys, n * 16 + lane / 16 * 8 + lane % 8, ks * 2 + lane / 8 % 2));
                mma(c[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma(c[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4 * N; i++) {
            s[i] = c[i / 2][i % 2] + c[i / 2][i % 2 + 2];
            if (first + i / 2 * 8 + lane % 4 * 2 + i % 2 > position) s[i] = -INFINITY;
        }
    }
    // Scores become weights, and what is there counts as much less as the largest has grown.
    template <int N> __device__ __forceinline__ void weigh(float (&s)[N]) {
        float high = s[0];
#pragma unroll
        for (int i = 1; i < N; i++) high = fmaxf(high, s[i]);
        high = fmaxf(high, __shfl_xor_sync(FULL, high, 1));
        high = fmaxf(high, __shfl_xor_sync(FULL, high, 2));
        const float before = top;
        top = fmaxf(top, high);
        // A head without a finite score stays at -inf; its sums become NaN, as they must.
        const float shrink = before == top ? 1.0f : __expf(before - top);
        if (__any_sync(FULL, shrink != 1.0f)) {
            sum *= shrink;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 8; i++) {
                o[i][0] *= shrink; o[i][1] *= shrink; o[i][2] *= shrink; o[i][3] *= shrink;
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            s[i] = __expf(s[i] - top);
            sum += s[i];
        }
    }
    template <int N> __device__ __forceinline__ void add(const u8* values, const float (&p)[4 * N], u32 lane) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float* w = p + 4 * n;
            const u32 h0 = pack_bf16(w[0], w[1]), h1 = pack_bf16(w[2], w[3]);
            const u32 l0 = pack_bf16(w[0] - bf16_low(h0), w[1] - bf16_high(h0)), l1 = pack_bf16(w[2] - bf16_low(h1), w[3] - bf16_high(h1));
#pragma unroll
            for (int d = 0; d < HEAD_DIM / 16; d++) {
                u32 b[4];
                load_matrices_transposed(b, chunk(values, n * 16 + lane % 16, d * 2 + lane / 16));
                mma(o[2 * d], h0, l0, h1, l1, b[0], b[1]);
                mma(o[2 * d + 1], h0, l0, h1, l1, b[2], b[3]);
            }
        }
    }
    // The lanes' sums of weights become that of the head.
    __device__ __forceinline__ void join() {
        sum += __shfl_xor_sync(FULL, sum, 1);
        sum += __shfl_xor_sync(FULL, sum, 2);
    }
};

// A row's queries, hi and lo, by N threads.
template <int N> __device__ __forceinline__ void put_queries(const float* q, u8* to, u32 thread) {
    constexpr int STEPS = (8 * HEAD_DIM / 4 + N - 1) / N;
    float4 v[STEPS];
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        const u32 i = thread + j * N;
        v[j] = i / (HEAD_DIM / 4) < RATIO ? __ldcg((const float4*)q + i) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        const u32 i = thread + j * N, head = i / (HEAD_DIM / 4), d = i % (HEAD_DIM / 4) * 4;
        if (head >= 8) continue;
        const u32 h0 = pack_bf16(v[j].x, v[j].y), h1 = pack_bf16(v[j].z, v[j].w);
        *(uint2*)(chunk(to, head, d / 8) + d % 8 * 2) = make_uint2(h0, h1);
        *(uint2*)(chunk(to, head + 8, d / 8) + d % 8 * 2) =
            make_uint2(pack_bf16(v[j].x - bf16_low(h0), v[j].y - bf16_high(h0)), pack_bf16(v[j].z - bf16_low(h1), v[j].w - bf16_high(h1)));
    }
}

// The warps' sums of a split become one, half of each head at a time. to: of the first head, `splits` rows of HEAD_DIM apart.
__device__ __forceinline__ void put_split(Attention& mine, Flash& f, u32 splits, float* to, Softmax* stats) {
    const u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
    mine.join();
    if (t == 0) f.softmaxes[warp][g] = Softmax{mine.top, mine.sum};
    float scale;  // what the sums of warp `t` of head `g` count
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < PART / 8; i++) {
            const float(&o)[4] = mine.o[half * (PART / 8) + i];
            *(float2*)(f.parts[warp][g] + i * 8 + t * 2) = make_float2(o[0] + o[2], o[1] + o[3]);
        }
        __syncthreads();
        if (half == 0) {
            const Softmax s = f.softmaxes[t][g];
            float high = fmaxf(s.max, __shfl_xor_sync(FULL, s.max, 1)), total = 0;
            high = fmaxf(high, __shfl_xor_sync(FULL, high, 2));
            scale = s.sum == 0.0f ? 0.0f : __expf(s.max - high);  // 0: a warp without keys
#pragma unroll
            for (int w = 0; w < FLASH_WARPS; w++)
                total = fmaf(__shfl_sync(FULL, s.sum, w, 4), __shfl_sync(FULL, scale, w, 4), total);
            if (warp == 0 && t == 0 && g < RATIO) stats[g * splits] = Softmax{high, total};
        }
#pragma unroll
        for (u32 i = tid; i < 8 * PART; i += FLASH_THREADS) {
            const u32 head = i / PART, d = i % PART;
            float value = 0;
#pragma unroll
            for (int w = 0; w < FLASH_WARPS; w++) value = fmaf(f.parts[w][head][d], __shfl_sync(FULL, scale, head * 4 + w), value);
            if (head < RATIO) to[(u64)head * splits * HEAD_DIM + half * PART + d] = value;
        }
        __syncthreads();  // shared memory is used again
    }
}

// partial: [rows, HEADS, splits, HEAD_DIM], not yet divided by the sums in `stats`, [rows, HEADS, splits].
// Grid: (any, KV_HEADS, rows): blocks of x stride over the splits. Rows of segments of `many` rows and more are left to `flash_rows`.
extern "C" __global__ void __launch_bounds__(FLASH_THREADS, 2)
flash(const Segment* segments, const Row* rows, const float* queries, Cache cache, u32 splits, u32 many, float* partial, Softmax* stats) {
    extern __shared__ __align__(128) u8 shared[];
    Flash& f = *(Flash*)(u8*)shared;
    launch_dependents();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.y;
    const Row row = rows[blockIdx.z];
    const Segment segment = segments[row.segment];
    if (segment.rows >= many) return;
    const u32* table = cache.pages + (u64)segment.slot * cache.most;
    // Brings this warp's keys or values of a page, number `number` of the cache.
    auto fetch = [&](u32 value, const Pages& at, u32 number) {
        const u32 first = at.page * PAGE + warp * FLASH_KEYS;
        if (at.any() && first <= row.position) {
            const u16* from = cache.values + number * cache.stride + (u64)(value * KV_HEADS + kv_head) * PAGE_VALUES + warp * FLASH_KEYS * HEAD_DIM;
#pragma unroll 4
            for (u32 i = lane; i < FLASH_KEYS * CHUNKS; i += 32)
                // What lies behind the sequence's end may be anything: zeros stand in for it.
                copy16(f.tiles[value][warp] + i * 16, from + i * 8, first + i / CHUNKS <= row.position);
        }
        commit_copies();
    };
    auto number_of = [&](const Pages& at) { return at.any() ? __ldcg(table + at.page) : 0; };
    Pages at(row.position, splits), ahead = at;
    if (!at.any()) return;
    u32 number = number_of(ahead);
    // Pages that this step does not write are there already.
    const bool early = ahead.page < segment.start / PAGE;
    if (!early) wait_for_inputs();
    fetch(0, ahead, number);
    fetch(1, ahead, number);
    if (early) wait_for_inputs();
    ahead.next();
    number = number_of(ahead);
    const u64 head = (u64)blockIdx.z * HEADS + kv_head * RATIO;
    put_queries<FLASH_THREADS>(queries + head * HEAD_DIM, f.queries, threadIdx.x);
    __syncthreads();
    Attention mine;
    mine.reset();
    for (; at.any(); at.next()) {
        // Of the groups of copies, the last two are this page's values and the next page's keys, or those and its values.
        await_groups<1>();
        __syncwarp();
        const u32 first = at.page * PAGE + warp * FLASH_KEYS;
        float p[4];
        if (first <= row.position) Attention::scores<1>(f.queries, f.tiles[0][warp], first, row.position, lane, p);
        __syncwarp();
        fetch(0, ahead, number);
        if (first <= row.position) mine.weigh(p);
        await_groups<1>();
        __syncwarp();
        if (first <= row.position) mine.add<1>(f.tiles[1][warp], p, lane);
        __syncwarp();
        fetch(1, ahead, number);
        ahead.next();
        number = number_of(ahead);
        if (!at.last()) continue;
        put_split(mine, f, splits, partial + (head * splits + at.split) * HEAD_DIM, stats + head * splits + at.split);
        mine.reset();
    }
}

// --- attention of many rows of a sequence ---
//
// A block has eight rows' queries of one K/V head, a warp each: pages come into shared memory once for all of them. A warp takes all
// keys of its row one behind the other, so there is nothing to join.

#define ROW_WARPS 8
#define KEYS_TOGETHER 2  // times 16

// A block's shared memory; `flash_rows_shared` in src/forward.rs has its size.
struct __align__(128) FlashRows {
    u8 queries[ROW_WARPS][16 * HEAD_DIM * 2];
    u8 tiles[2][2][PAGE * HEAD_DIM * 2];  // of two pages in turn: K, V
};

// Rows `begin` to `end` of a segment.
__device__ __forceinline__ void attend_rows(FlashRows& f, const Segment& segment, u32 begin, u32 end, u32 kv_head, const float* queries,
                                            const Cache& cache, u32 splits, float* partial, Softmax* stats) {
    const u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32, row = begin + warp;
    const u32 position = segment.start + row - segment.first, last = segment.start + end - 1 - segment.first;
    const u32* table = cache.pages + (u64)segment.slot * cache.most;
    auto fetch = [&](u32 page) {
        if (page * PAGE <= last) {
            const u64 number = __ldcg(table + page);
#pragma unroll
            for (u32 value = 0; value < 2; value++) {
                const u16* from = cache.values + number * cache.stride + (u64)(value * KV_HEADS + kv_head) * PAGE_VALUES;
#pragma unroll 4
                for (u32 i = tid; i < PAGE * CHUNKS; i += 32 * ROW_WARPS)
                    // What lies behind the sequence's end may be anything: zeros stand in for it.
                    copy16(f.tiles[page & 1][value] + i * 16, from + i * 8, page * PAGE + i / CHUNKS <= last);
            }
        }
        commit_copies();
    };
    fetch(0);
    const u64 head = (u64)row * HEADS + kv_head * RATIO;
    if (row < end) put_queries<32>(queries + head * HEAD_DIM, f.queries[warp], lane);
    Attention mine;
    mine.reset();
    for (u32 page = 0; page * PAGE <= last; page++) {
        fetch(page + 1);
        await_groups<1>();
        __syncthreads();
        const u8* keys = f.tiles[page & 1][0];
        const u8* values = f.tiles[page & 1][1];
        for (u32 key = 0; key < PAGE; key += 16 * KEYS_TOGETHER) {
            if (row >= end || page * PAGE + key > position) break;
            float p[4 * KEYS_TOGETHER];
            Attention::scores<KEYS_TOGETHER>(f.queries[warp], keys + key * HEAD_DIM * 2, page * PAGE + key, position, lane, p);
            mine.weigh(p);
            mine.add<KEYS_TOGETHER>(values + key * HEAD_DIM * 2, p, lane);
        }
        __syncthreads();  // before the page after the next one comes
    }
    await_copies();
    mine.join();
    const u32 g = lane / 4, t = lane % 4;
    if (row >= end || g >= RATIO) return;
    if (t == 0) stats[(head + g) * splits] = Softmax{mine.top, mine.sum};
    float* to = partial + (head + g) * splits * HEAD_DIM + t * 2;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) *(float2*)(to + i * 8) = make_float2(mine.o[i][0] + mine.o[i][2], mine.o[i][1] + mine.o[i][3]);
}

// What `flash` leaves, of segments of `many` rows and more: one split each. Grid: (ceil(count / ROW_WARPS), KV_HEADS).
extern "C" __global__ void __launch_bounds__(32 * ROW_WARPS, 1)
flash_rows(const Segment* segments, const Row* rows, u32 count, const float* queries, Cache cache, u32 splits, u32 many, float* partial,
           Softmax* stats) {
    extern __shared__ __align__(128) u8 shared[];
    launch_dependents();
    wait_for_inputs();
    const u32 first = blockIdx.x * ROW_WARPS, last = min(first + ROW_WARPS, count);
    for (u32 begin = first; begin < last;) {
        const Segment segment = segments[rows[begin].segment];
        const u32 end = min(last, segment.first + segment.rows);
        if (segment.rows >= many)
            attend_rows(*(FlashRows*)(u8*)shared, segment, begin, end, blockIdx.y, queries, cache, splits, partial, stats);
        __syncthreads();
        begin = end;
    }
}

// Joins a row's splits and applies the output gate: attended, [rows, QUERY], or as columns, if those are wanted. A warp four tiles of
// a row. Grid: (QUERY / (256 COMBINE_WARPS), rows).
#define COMBINE_WARPS 2
#define MOST_SPLITS 64                       // SPLITS in src/forward.rs
#define COMBINE_HEADS (256 / HEAD_DIM + 2)  // that a warp has columns of, at most
extern "C" __global__ void __launch_bounds__(32 * COMBINE_WARPS)
combine(const Segment* segments, const Row* rows, const float* projected, const float* partial, const Softmax* stats, u32 splits, u32 many,
        float* attended, Columns to) {
    // What each split of a head counts, and its sum.
    __shared__ float2 shares[COMBINE_WARPS][COMBINE_HEADS][MOST_SPLITS];
    launch_dependents();
    const u32 row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Place p = place((blockIdx.x * COMBINE_WARPS + warp) * 4, QUERY / TILE_COLS, QUERY, lane);
    const u32 first = __reduce_min_sync(FULL, p.active ? p.col / HEAD_DIM : HEADS);
    if (first == HEADS) return;
    const u32 head = p.active ? p.col / HEAD_DIM : first, last = __reduce_max_sync(FULL, head);
    const u32 d = p.col % HEAD_DIM;
    const u32 used = segments[rows[row].segment].rows >= many ? 1 : used_splits(rows[row].position, splits);
    wait_for_inputs();
    float gate[8], value[8] = {}, total = 0;
    load8(projected + (u64)row * PROJECTED + (2 * head + 1) * HEAD_DIM + d, gate);
    for (u32 h = first; h <= last; h++) {
        float2 stat[MOST_SPLITS / 32];  // max, sum
        float high = -INFINITY;
#pragma unroll
        for (u32 i = 0; i < MOST_SPLITS / 32; i++) {
            const u32 s = i * 32 + lane;
            stat[i] = s < used ? __ldcg((const float2*)stats + ((u64)row * HEADS + h) * splits + s) : make_float2(-INFINITY, 0);
            high = fmaxf(high, stat[i].x);
        }
#pragma unroll
        for (int o = 16; o; o >>= 1) high = fmaxf(high, __shfl_xor_sync(FULL, high, o));
#pragma unroll
        for (u32 i = 0; i < MOST_SPLITS / 32; i++) shares[warp][h - first][i * 32 + lane] = make_float2(__expf(stat[i].x - high), stat[i].y);
    }
    __syncwarp();
    const float* part = partial + ((u64)row * HEADS + head) * splits * HEAD_DIM + d;
#pragma unroll 8
    for (u32 s = 0; s < used; s++) {
        const float2 share = shares[warp][head - first][s];
        float x[8];
        load8(part + s * HEAD_DIM, x);
        total = fmaf(share.x, share.y, total);
#pragma unroll
        for (int i = 0; i < 8; i++) value[i] = fmaf(share.x, x[i], value[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) value[i] = value[i] / total * sigmoid(gate[i]);
    if (to.records) {
        to.store(row, p, make_digits(value), lane);
    } else if (p.active) {
        store8(attended + (u64)row * QUERY + p.col, value);
    }
}
