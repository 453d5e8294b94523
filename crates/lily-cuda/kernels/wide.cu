// y = W f(x) for several tokens, from 4-bit weights, by the tensor cores' products of warpgroups: 64 rows of W with the digits of
// 8, 16 or 32 tokens. A cluster of C blocks has the same rows; block r has the r-th part of every row's inputs, and its two
// warpgroups half of that each. What they get is sent to the block of the cluster that adds it up. Needs compute capability 9.0.

extern __shared__ __align__(128) u8 shared[];

#define UNIT 4     // row blocks of a unit of work, one a warp
#define STAGES 8   // units in shared memory, at most
#define BRINGER WARPS  // the warp behind those that multiply: asking for weights takes as long as they come
#define WIDE_THREADS (THREADS + 32)
#define SHARES(c) (2 * (c))  // parts of a row that are summed apart

#if __CUDA_ARCH__ >= 900
#define IN_CLUSTERS(c) __cluster_dims__(c, 1, 1)
#else
#define IN_CLUSTERS(c)
#endif

// Tokens whose inputs are in a record together, for kernels that take so many at once.
__device__ __forceinline__ constexpr u32 tokens_of_record(u32 tokens) { return tokens <= 8 ? 8 : 32; }

// total += R tiles' sums, as by `add_sums`. One tile is multiplied while the sums of the one before it are scaled.
template <int R, int T>
__device__ __forceinline__ void add_tiles(const u8* tiles, const u8* record, int lane, float (&total)[T / 4][2]) {
    Tile<Q4> w[2];
    int c[2][T];
    w[0] = load_tile<Q4>(tiles, lane);
    start_tile<T>(w[0], record, 0, lane, c[0]);
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (r + 1 < R) {
            w[(r + 1) & 1] = load_tile<Q4>(tiles + (r + 1) * tile_bytes<Q4>(), lane);
            start_tile<T>(w[(r + 1) & 1], record, r + 1, lane, c[(r + 1) & 1]);
            end_tile<1, T>(c[r & 1]);
        } else {
            end_tile<0, T>(c[r & 1]);
        }
        add_sums<T>(w[r & 1].scales, record + r * record_bytes(T), lane, c[r & 1], total);
    }
}

// A warp's rows times a part of the inputs, which is N eighths from tile `from` of the matrix on. await: waits for the inputs of one.
template <int N, int T, class Await>
__device__ __forceinline__ void multiply_part(const u8* tiles, const u8* records, u32 eighth, u32 k_tiles, int lane, float (&total)[T / 4][2], Await await) {
    const u32 from = first_tile(eighth, k_tiles);
#pragma unroll 1
    for (int e = 0; e < N; e++) {
        float sum[T / 4][2] = {};
        const u32 until = first_tile(eighth + e + 1, k_tiles);
        u32 k = first_tile(eighth + e, k_tiles);
        await(e);
#pragma unroll 1
        for (; k + 4 <= until; k += 4) add_tiles<4, T>(tiles + (k - from) * tile_bytes<Q4>(), records + (k - from) * record_bytes(T), lane, sum);
#pragma unroll 1
        for (; k < until; k++) add_tiles<1, T>(tiles + (k - from) * tile_bytes<Q4>(), records + (k - from) * record_bytes(T), lane, sum);
#pragma unroll
        for (int i = 0; i < T / 4; i++) {
            total[i][0] = e == 0 ? sum[i][0] : total[i][0] + sum[i][0];
            total[i][1] = e == 0 ? sum[i][1] : total[i][1] + sum[i][1];
        }
    }
}

// A token's outputs, as one thread adds them up.
struct Output {
    float* y;
    float scale;
    bool is;
    Output() = default;
    __device__ __forceinline__ Output(const Wide& o, const Matrix& w, u32 token, bool is) : y(o.y + (u64)token * o.stride), scale(1), is(is) {
        if (is) scale = scale_of(o, w, token);
    }
    // What is there, if it is added to.
    __device__ __forceinline__ float old(const Wide& o, const Matrix& w, u32 row) const {
        return o.add && is && row < w.rows ? __ldcg(y + row) : 0.0f;
    }
    __device__ __forceinline__ void store(const Wide& o, const Matrix& w, u32 row, float sum, float old) const {
        if (is && row < w.rows) y[row] = __fadd_rn(__fmul_rn(sum, scale), old);
    }
};

// What a block has of a product: units are dealt to clusters evenly and in order.
template <int T, int C> struct Part {
    static constexpr u32 RECORD = record_bytes(T), EIGHTHS = WARPS / SHARES(C);
    const Matrix& w;
    const Wide& o;
    u32 rank, eighth;               // in the cluster; the first of the row's eighths that are this block's
    u32 first, middle, last, most;  // tiles of the first warpgroup and of the second; of any block
    u32 blocks, begin, all;         // row blocks of the matrix; units
    __device__ __forceinline__ Part(const Matrix& w, const Wide& o) : w(w), o(o), rank(cluster_rank()) {
        const u32 cluster = blockIdx.x / C, clusters = gridDim.x / C;
        eighth = rank * 2 * EIGHTHS;
        first = first_tile(eighth, w.k_tiles);
        middle = first_tile(eighth + EIGHTHS, w.k_tiles);
        last = first_tile(eighth + 2 * EIGHTHS, w.k_tiles);
        most = (w.k_tiles + C - 1) / C;
        blocks = (w.rows + TILE_ROWS - 1) / TILE_ROWS;
        const u32 units = (blocks + UNIT - 1) / UNIT;
        begin = cluster * units / clusters;
        all = (cluster + 1) * units / clusters - begin;
    }
    // Asks for the weights of unit i, by one thread.
    __device__ __forceinline__ void fetch(u32 i, u8* weights, u64* full) const {
        if (i >= all) return;
        const u32 block0 = (begin + i) * UNIT, n = min((u32)UNIT, blocks - block0);
        const u32 bytes = (last - first) * tile_bytes<Q4>(), stage = most * UNIT * tile_bytes<Q4>();
        barrier_expect(&full[i % o.stages], n * bytes);
        for (u32 r = 0; r < n && bytes > 0; r++)
            bulk_copy(weights + i % o.stages * stage + r * most * tile_bytes<Q4>(), w.tiles + ((u64)(block0 + r) * w.k_tiles + first) * tile_bytes<Q4>(),
                      bytes, &full[i % o.stages]);
    }
    // Asks for all weights, by a warp that takes part in the cluster's barriers: behind one, all are through with the unit before.
    __device__ __forceinline__ void bring_weights(u8* weights, u64* full) const {
        const bool asks = threadIdx.x % 32 == 0;
        if (asks)
            for (u32 i = 0; i < o.stages; i++) fetch(i, weights, full);
#pragma unroll 1
        for (u32 i = 0; i < all; i++) {
            __syncwarp();
            cluster_wait();
            cluster_arrive<false>();
            if (i > 0 && asks) fetch(i - 1 + o.stages, weights, full);
        }
        __syncwarp();
        cluster_wait();
    }
    // Byte i of this block's records, in those of all tokens of a group.
    __device__ __forceinline__ u32 place_of(u32 i) const {
        constexpr u32 ALL = tokens_of_record(T), BLOCK = T * 32;  // of 16 inputs
        const u32 part = blockIdx.y % (ALL / T), tile = i / RECORD, at = i % RECORD, units = T * 128;
        const u32 to = at < units ? at / BLOCK * (ALL * 32) + part * BLOCK + at % BLOCK : ALL * 128 + part * (T * 8) + at - units;
        return tile * record_bytes(ALL) + to;
    }
    // Asks for the inputs, each warpgroup's part apart. Many come by all threads, beside the bulk copies of weights and not behind them, an
    // eighth after another.
    __device__ __forceinline__ void bring_inputs(u8* records, u64* inputs) const {
        constexpr u32 ALL = tokens_of_record(T);
        const u8* from = o.columns + ((u64)(blockIdx.y / (ALL / T)) * w.k_tiles + first) * record_bytes(ALL);
        if constexpr (T > 8) {
            const u32 group = threadIdx.x / 128;
#pragma unroll
            for (u32 e = group * EIGHTHS; e < (group + 1) * EIGHTHS; e++) {
                const u32 begin = (first_tile(eighth + e, w.k_tiles) - first) * RECORD, end = (first_tile(eighth + e + 1, w.k_tiles) - first) * RECORD;
                for (u32 i = begin + threadIdx.x % 128 * 16; i < end; i += 128 * 16) copy16(records + i, from + place_of(i), true);
                commit_copies();
            }
        } else if (threadIdx.x == 0) {
            auto bring = [&](u32 begin, u32 end, u64* bar) {
                barrier_expect(bar, (end - begin) * RECORD);
                if (end > begin) bulk_copy<false>(records + (begin - first) * RECORD, from + (begin - first) * RECORD, (end - begin) * RECORD, bar);
            };
            bring(first, middle, &inputs[0]);
            bring(middle, last, &inputs[1]);
        }
    }
    // Of a warpgroup's e-th eighth.
    __device__ __forceinline__ void await_inputs(u32 group, u32 e, u64* inputs) const {
        if constexpr (T > 8) {
            static_assert(EIGHTHS <= 2, "groups of copies");
            if (e + 1 < EIGHTHS) await_groups<1>();
            else await_groups<0>();
            proxy_fence();  // the tensor cores read them as bulk copies write
            named_sync<128>(1 + group);
        } else if (e == 0) {
            barrier_wait(&inputs[group], 0);
        }
    }
};

// Grid: (C * clusters, groups of T tokens).
template <int T, int C> __device__ __forceinline__ void wide(const Matrix& w, const Wide& o) {
#if __CUDA_ARCH__ >= 900
    constexpr u32 OWN = UNIT / C;  // row blocks of a unit whose outputs a block of the cluster adds up
    constexpr u32 PART = T * TILE_ROWS, INBOX = SHARES(C) * OWN * PART;
    __shared__ u64 full[STAGES], inputs[2], sums[2];
    const u32 tid = threadIdx.x, warp = __shfl_sync(FULL, tid / 32, 0), lane = tid % 32, group = warp / 4, member = warp % 4;
    const Part<T, C> p(w, o);
    u8* records = shared;
    float* inbox = (float*)(shared + p.most * p.RECORD);  // [2][share][row block][pair of rows of tokens][lane][4]
    u8* weights = (u8*)(inbox + 2 * INBOX);
    if (tid == 0) {
        for (u32 i = 0; i < STAGES; i++) barrier_init(&full[i], 1);
        for (u32 i = 0; i < 2; i++) {
            barrier_init(&inputs[i], 1);
            barrier_init(&sums[i], 1);
        }
        barrier_fence();
    }
    __syncthreads();
    launch_dependents();
    cluster_arrive<false>();
    if (warp == BRINGER) {
        p.bring_weights(weights, full);
        return;
    }
    wait_for_inputs();
    p.bring_inputs(records, inputs);
    // Which outputs this thread adds up: of this block's row block `own` rows g and g + 8, of two tokens.
    const u32 pair = warp % (T / 8), own = warp / (T / 8);
    const u32 token0 = blockIdx.y * T, tokens = min((u32)T, o.tokens - token0);
    const u32 row0 = (p.begin * UNIT + own * C + p.rank) * TILE_ROWS + (lane >> 2);
    Output outputs[2];
    float old[4];  // of the unit that is added up next
    if (own < OWN)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 token = pair * 8 + i * 4 + (lane & 3);
            outputs[i] = Output(o, w, token0 + token, token < tokens);
        }
    auto add_up = [&](u32 i) {
        if (tid == 0) barrier_expect(&sums[i & 1], INBOX * 4);
        if (own >= OWN) return;
        barrier_wait(&sums[i & 1], i / 2 & 1);
        const float* from = inbox + (i & 1) * INBOX + own * PART + (pair * 32 + lane) * 4;
        const float4 sum = sum_of<SHARES(C)>([&](int k) { return *(const float4*)(from + k * (OWN * PART)); });
        const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 4; j++) outputs[j / 2].store(o, w, row0 + i * (UNIT * TILE_ROWS) + j % 2 * 8, sums[j], old[j]);
    };
    const u32 mine = (group ? p.middle : p.first) - p.first;
#pragma unroll 1
    for (u32 i = 0; i < p.all; i++) {
        float there[4] = {};
        if (own < OWN)
#pragma unroll
            for (int j = 0; j < 4; j++) there[j] = outputs[j / 2].old(o, w, row0 + i * (UNIT * TILE_ROWS) + j % 2 * 8);
        barrier_wait(&full[i % o.stages], i / o.stages & 1);
        float total[T / 4][2];
        multiply_part<p.EIGHTHS, T>(weights + (i % o.stages * (p.most * UNIT) + member * p.most + mine) * tile_bytes<Q4>(), records + mine * p.RECORD,
                                    p.eighth + group * p.EIGHTHS, w.k_tiles, lane, total, [&](u32 e) {
                                        if (i == 0) p.await_inputs(group, e, inputs);
                                    });
        // At first: all blocks of the cluster run. Then: their warps are through with the unit before.
        cluster_wait();
        const u32 bar = peer_address(shared_address(&sums[i & 1]), member % C);
        const u32 to = peer_address(shared_address(inbox + (i & 1) * INBOX + ((p.rank * 2 + group) * OWN + member / C) * PART), member % C) + lane * 16;
#pragma unroll
        for (int n = 0; n < T / 4; n += 2) send_peer(to + n * 256, make_float4(total[n][0], total[n][1], total[n + 1][0], total[n + 1][1]), bar);
        if (i > 0) add_up(i - 1);
#pragma unroll
        for (int j = 0; j < 4; j++) old[j] = there[j];
        cluster_arrive<false>();  // the unit's weights are read: the sums that were sent are of all of them
    }
    add_up(p.all - 1);
    cluster_wait();  // no block ends while others send to it
#endif
}

// Two blocks for few tokens share a multiprocessor.
#define WIDE(name, tokens, blocks)                                                                                                \
    extern "C" __global__ void IN_CLUSTERS(blocks) __launch_bounds__(WIDE_THREADS, tokens == 8 ? 2 : 1) name(Matrix w, Wide o) { wide<tokens, blocks>(w, o); }
WIDE(wide_8_by_2, 8, 2)
WIDE(wide_16_by_2, 16, 2)
WIDE(wide_32_by_2, 32, 2)
WIDE(wide_32_by_4, 32, 4)

// Every row of x, [rows, width], as columns; a block a row. NORMED: `factor` is the gain, and squares[row] gets the sums of squares of
// its eighths. HEAD_NORMED: `factor` are the partial sums of squares, [rows, VALUE_HEADS, VALUE_SPLIT].
template <int MODE>
__device__ __forceinline__ void make_columns(const float* x, const float* factor, const Columns& to, float* squares) {
    launch_dependents();
    wait_for_inputs();
    const u32 row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = to.k_tiles * TILE_COLS;
    if (MODE == HEAD_NORMED) factor += (u64)row * VALUE_HEADS * VALUE_SPLIT;
    const u32 last = first_tile(warp + 1, to.k_tiles);
    float square = 0;
    for (u32 tile0 = first_tile(warp, to.k_tiles); tile0 < last; tile0 += 4) {
        const Place p = place(tile0, last, width, lane);
        float v[8] = {}, factors[8] = {};
        if (p.active) load8(x + (u64)row * width + p.col, v);
        load_factors<MODE>(factor, p, factors);
        put_columns(row, p, v, factors, to, lane, square);
    }
    if (MODE != NORMED) return;
    square = warp_sum(square);
    if (lane == 0) squares[row * WARPS + warp] = square;
}
#define COLUMNS(name, mode)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const float* x, const float* factor, Columns to, float* squares) { \
        make_columns<mode>(x, factor, to, squares);                                                                               \
    }
COLUMNS(columns_plain, AS_IS)
COLUMNS(columns_norm, NORMED)
COLUMNS(columns_heads, HEAD_NORMED)
