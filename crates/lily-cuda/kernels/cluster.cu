// y = W f(x) for several tokens, from 8-bit weights (wide.cu has those of 4 bits), by clusters of eight blocks; and the router with the
// choice of experts. A block has the inputs that elsewhere one warp has: the weights of a cluster's rows and the inputs of all its
// tokens are read, split and kept once, an eighth in each block, and the eight sums of a row are added across the blocks. Needs
// compute capability 9.0.

extern __shared__ __align__(128) u8 shared[];

#define CLUSTER WARPS

#if __CUDA_ARCH__ >= 900
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif

// Tiles [first, first + count) of the inputs of 4 NT tokens as fragments: [tile][token], zeros for tokens behind `tokens`. The
// sums of squares of the inputs go to squares[rank][token] of all blocks of the cluster.
template <int NT>
__device__ __forceinline__ void split_tokens(u32 mode, const float* x, u32 k_tiles, const float* factor, const float (&gains)[8],
                                             u32 tokens, u32 first, u32 count, u32 rank, u8* fragments, Unit* units,
                                             float (*squares)[NT * 4]) {
    constexpr int ROWS = NT * 4 / WARPS;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = k_tiles * TILE_COLS;
    float square[ROWS] = {};
    float v[ROWS][8], scale[ROWS], next[ROWS][8], next_scale[ROWS];
    auto load = [&](u32 tile0, float (&v)[ROWS][8], float (&scale)[ROWS]) {
        const Place p = place(tile0, first + count, width, lane);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const u32 token = warp + r * WARPS;
            const bool has = p.active && token < tokens;
#pragma unroll
            for (int i = 0; i < 8; i++) v[r][i] = 0;
            if (has) load8(x + (u64)token * width + p.col, v[r]);
            scale[r] = has && mode == HEAD_NORMED ? head_scale(factor + (u64)token * (VALUE_HEADS * VALUE_SPLIT), p.col / DV) : 1.0f;
        }
    };
    load(first, v, scale);
#pragma unroll 1
    for (u32 tile0 = first; tile0 < first + count; tile0 += 4) {
        const Place p = place(tile0, first + count, width, lane);
        // The next four tiles are on their way meanwhile.
        load(tile0 + 4, next, next_scale);
        float gain[8];
#pragma unroll
        for (int i = 0; i < 8; i++) gain[i] = gains[i];
        if (mode == NORMED && tile0 != first) load_factors<NORMED>(factor, p, gain);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const u32 token = warp + r * WARPS;
            float factors[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                square[r] = fmaf(v[r][i], v[r][i], square[r]);
                factors[i] = mode == NORMED ? gain[i] : scale[r];
            }
            const Place to{(p.tile - first) * (NT * 4) + token, p.col, p.active};
            split_place<true>(to, v[r], factors, lane, fragments, units);
            scale[r] = next_scale[r];
#pragma unroll
            for (int i = 0; i < 8; i++) v[r][i] = next[r][i];
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float sum = warp_sum(square[r]);
        if (lane < CLUSTER) store_peer(peer_address(shared_address(&squares[rank][warp + r * WARPS]), lane), sum);
    }
}

// total += the products of R row blocks, whose tiles lie in the slots from `at` on, with all tokens.
template <int NT, int R>
__device__ __forceinline__ void multiply_slots(const u8* at, u32 slot, u32 count, const u8* fragments, const Unit* units, int lane,
                                               float (&total)[R][NT][2]) {
    const u8* tile = at;
    const u8* f = fragments + (lane >> 3) * FRAGMENT_BYTES<true>;
    const Unit* unit = units + (lane & 3);
    constexpr int AHEAD = NT > 4 ? 1 : 2;  // more would not fit into registers
#pragma unroll AHEAD
    for (u32 k = 0; k < count; k++) {
        Tile<Q8> a[R];
#pragma unroll
        for (int r = 0; r < R; r++) a[r] = load_tile<Q8>(tile + r * slot, lane);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const Fragment<Q8> x = load_staged<true>(f + n * 4 * FRAGMENT_BYTES<true>, lane);
            const Unit of = unit[n * 4];
#pragma unroll
            for (int r = 0; r < R; r++) multiply<Q8>(a[r], x, of, total[r][n]);
        }
        tile += tile_bytes<Q8>();
        f += NT * 4 * FRAGMENT_BYTES<true>;
        unit += NT * 4;
    }
}

// Sends a row block's sums to the block that adds them up: `to`, [token][row] there.
template <int NT> __device__ __forceinline__ void send_sums(u32 to, int lane, const float (&total)[NT][2]) {
    to += ((lane & 3) * TILE_ROWS + (lane >> 2)) * 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        store_peer(to + n * 4 * TILE_ROWS * 4, total[n][0]);
        store_peer(to + n * 4 * TILE_ROWS * 4 + 32, total[n][1]);
    }
}

// What a product is, beside its weights.
struct Product {
    const float* x;       // [tokens, 64 k_tiles]
    const float* factor;  // see `mode`
    float* y;             // [tokens, stride]
    u8* fragments;        // null, or where f(x) goes as fragments, with `units` and `scale`: for the kernels behind this one
    Unit* units;
    float* scale;
    u32 mode;             // AS_IS, NORMED, HEAD_NORMED
    u32 tokens;
    u32 stride;
    u32 add;              // 1: to what is there
    u32 per;              // row blocks in shared memory at a time
    u32 rounds;           // most of a cluster; weights of two are in shared memory at a time, and sums of two where there are more
};

// Grid: (CLUSTER * clusters, groups of 4 NT tokens). Row blocks are dealt to clusters evenly and in order.
template <int NT> __device__ __forceinline__ void product(const Matrix& w, const Product& o) {
#if __CUDA_ARCH__ >= 900
    constexpr u32 T = NT * 4;
    __shared__ float squares[CLUSTER][T], scales[T];
    __shared__ u64 full[2];
    const u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32, rank = cluster_rank();
    const u32 cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER, token0 = blockIdx.y * T, tokens = min(T, o.tokens - token0);
    const u32 first = first_tile(rank, w.k_tiles), count = first_tile(rank + 1, w.k_tiles) - first, most = (w.k_tiles + CLUSTER - 1) / CLUSTER;
    const u32 slot = most * tile_bytes<Q8>(), bytes = count * tile_bytes<Q8>();
    const u32 blocks = (w.rows + TILE_ROWS - 1) / TILE_ROWS, begin = cluster * blocks / clusters, all = (cluster + 1) * blocks / clusters - begin;
    // Sums arrive in [rank][row block][token][row]; of row block i those of all ranks go to rank i % CLUSTER.
    constexpr u32 SUMS_BYTES = T * TILE_ROWS * 4;
    const u32 from_rank = (o.per + CLUSTER - 1) / CLUSTER * SUMS_BYTES;
    u8* inboxes = shared + min(o.rounds, 2u) * o.per * slot;
    u8* fragments = inboxes + (o.rounds > 2 ? 2 : 1) * CLUSTER * from_rank;
    Unit* units = (Unit*)(fragments + T * most * FRAGMENT_BYTES<true>);
    // A round's weights. Every warp asks for a part: one alone would be busy with that for longer than with its products.
    auto fetch = [&](u32 round) {
        if (round * o.per >= all) return;
        const u32 from = round * o.per, n = min(o.per, all - from);
        u64* bar = &full[round & 1];
        if (tid == 0) barrier_expect(bar, n * bytes);
        for (u32 i = lane * WARPS + warp; i < n && count > 0; i += THREADS)
            bulk_copy(shared + ((round & 1) * o.per + i) * slot, w.tiles + ((u64)(begin + from + i) * w.k_tiles + first) * tile_bytes<Q8>(), bytes, bar);
        __syncwarp();
    };
    if (tid == 0) {
        barrier_init(&full[0], 1);
        barrier_init(&full[1], 1);
        barrier_fence();
    }
    __syncthreads();
    fetch(0);
    fetch(1);
    launch_dependents();
    cluster_arrive();
    float gains[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (o.mode == NORMED) load_factors<NORMED>(o.factor, place(first, first + count, w.k_tiles * TILE_COLS, lane), gains);
    wait_for_inputs();
    cluster_wait();  // all blocks of the cluster run: their shared memory may be written
    const float* factor = o.mode == HEAD_NORMED ? o.factor + (u64)token0 * (VALUE_HEADS * VALUE_SPLIT) : o.factor;
    split_tokens<NT>(o.mode, o.x + (u64)token0 * w.k_tiles * TILE_COLS, w.k_tiles, factor, gains, tokens, first, count, rank, fragments, units, squares);
    __syncthreads();
    if (o.fragments) {
        // Tokens are dealt to the clusters, which all have the same.
        constexpr u32 WORDS = FRAGMENT_BYTES<true> / 16;
        for (u32 i = tid; i < count * T * WORDS; i += THREADS) {
            const u32 word = i % WORDS, token = i / WORDS % T, tile = i / WORDS / T;
            if (token % clusters != cluster || token >= tokens) continue;
            const u64 to = (u64)(token0 + token) * w.k_tiles + first + tile;
            ((uint4*)(o.fragments + to * FRAGMENT_BYTES<true>))[word] = ((const uint4*)fragments)[i];
            if (word == 0) o.units[to] = units[tile * T + token];
        }
    }
    for (u32 round = 0; round * o.per < all; round++) {
        const u32 from = round * o.per, n = min(o.per, all - from), end = (warp + 1) * n / WARPS;
        const u8* slots = shared + (round & 1) * o.per * slot;
        u8* inbox = inboxes + (o.rounds > 2 ? round & 1 : 0) * CLUSTER * from_rank;
        // Where there is one inbox, its last sums must have been added up everywhere.
        bool may_send = o.rounds != 2 || round == 0;
        auto send = [&](u32 i, const float (&total)[NT][2]) {
            if (!may_send) cluster_wait();
            may_send = true;
            send_sums<NT>(peer_address(shared_address(inbox + rank * from_rank + i / CLUSTER * SUMS_BYTES), i % CLUSTER), lane, total);
        };
        barrier_wait(&full[round & 1], round / 2 & 1);
#pragma unroll 1
        for (u32 i = warp * n / WARPS; i < end; i += 2) {
            if (i + 1 < end) {
                float total[2][NT][2] = {};
                multiply_slots<NT, 2>(slots + i * slot, slot, count, fragments, units, lane, total);
                send(i, total[0]);
                send(i + 1, total[1]);
            } else {
                float total[1][NT][2] = {};
                multiply_slots<NT, 1>(slots + i * slot, slot, count, fragments, units, lane, total);
                send(i, total[0]);
            }
        }
        __syncwarp();
        if (!may_send) cluster_wait();
        cluster_arrive();
        cluster_wait();
        proxy_fence();
        fetch(round + 2);
        if (round == 0) {
            if (tid < T) {
                float sum = 0;
#pragma unroll
                for (int k = 0; k < CLUSTER; k++) sum += squares[k][tid];
                scales[tid] = o.mode == NORMED ? rsqrtf(sum / (w.k_tiles * TILE_COLS) + EPS) : 1.0f;
                if (o.fragments && rank == 0 && tid < tokens && tid % clusters == cluster) o.scale[token0 + tid] = scales[tid];
            }
            __syncthreads();
        }
        // Four rows a thread.
        const u32 own = (n + CLUSTER - 1 - rank) / CLUSTER;
        for (u32 i = tid; i < own * T * 4; i += THREADS) {
            const u32 quad = i % 4, token = i / 4 % T, row = (begin + from + i / 4 / T * CLUSTER + rank) * TILE_ROWS + quad * 4;
            if (token >= tokens) continue;
            const float4 sum = sum_of<CLUSTER>([&](int k) { return *(const float4*)(inbox + k * from_rank + i * 16); });
            float v[4] = {sum.x, sum.y, sum.z, sum.w};
            float* y = o.y + (u64)(token0 + token) * o.stride + row;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (o.mode == NORMED) v[j] = __fmul_rn(v[j], scales[token]);
                if (o.add && row + j < w.rows) v[j] = __ldcg(y + j) + v[j];
            }
            if (o.stride % 4 == 0 && row + 4 <= w.rows) {
                *(float4*)y = make_float4(v[0], v[1], v[2], v[3]);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (row + j < w.rows) y[j] = v[j];
            }
        }
        __syncwarp();
        if (o.rounds == 2 && (round + 1) * o.per < all) cluster_arrive();
    }
#endif
}

#define PRODUCT(name, nt) extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) name(Matrix w, Product o) { product<nt>(w, o); }
PRODUCT(product_q8_8, 2)
PRODUCT(product_q8_32, 8)

#define ROUTER_BLOCKS ((ROUTER_ROWS + TILE_ROWS - 1) / TILE_ROWS)
// Dynamic shared memory of `router_q8`; src/cluster.rs knows how much it is.
struct RouterShared {
    static constexpr u32 MOST = Share<HIDDEN_TILES>::MOST;  // tiles of a row that a block has
    u8 tiles[ROUTER_BLOCKS][MOST * tile_bytes<Q8>()];
    u8 fragments[CLUSTER][MOST * FRAGMENT_BYTES<true>];  // of tokens
    Unit units[CLUSTER][MOST];
    float inbox[CLUSTER][ROUTER_BLOCKS * TILE_ROWS];  // sums of a token, by the block that sent them
    float logits[ROUTER_BLOCKS * TILE_ROWS];
    float squares[CLUSTER];
    u64 scratch[CANDIDATES + TOP_K];
    u64 full, received;  // weights are there; all of `inbox` and `squares`
};
static_assert(sizeof(float) * CLUSTER + sizeof(u64) * (CANDIDATES + TOP_K + 2) <= 1024, "what src/cluster.rs adds to the large parts");

// Router logits as by `product`, and from them the choice of experts: `weights`, [rows, SLOTS], and `chosen`, [rows, TOP_K]. A cluster
// has as many tokens as blocks, and all sums of a token go to one block. Inputs stay as fragments for the experts. Grid:
// (CLUSTER, groups of as many tokens).
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1)
router_q8(const u8* weight_tiles, const float* x, const float* gain, u32 rows, u8* fragments, Unit* units, float* scale, float* weights, u32* chosen) {
#if __CUDA_ARCH__ >= 900
    RouterShared& s = *(RouterShared*)shared;
    constexpr u32 MOST = RouterShared::MOST;
    const u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32, rank = cluster_rank(), token0 = blockIdx.y * CLUSTER;
    const Share<HIDDEN_TILES> mine(rank);
    if (tid == 0) {
        barrier_init(&s.full, 1);
        barrier_init(&s.received, 1);
        barrier_fence();
        barrier_expect(&s.received, sizeof(s.inbox) + sizeof(s.squares));
        barrier_expect(&s.full, ROUTER_BLOCKS * mine.count * tile_bytes<Q8>());
    }
    __syncthreads();
    for (u32 i = tid; i < ROUTER_BLOCKS && mine.count > 0; i += THREADS)
        bulk_copy(s.tiles[i], weight_tiles + ((u64)i * HIDDEN_TILES + mine.first) * tile_bytes<Q8>(), mine.count * tile_bytes<Q8>(), &s.full);
    launch_dependents();
    cluster_arrive<false>();
    // A token a warp.
    const u32 last = mine.first + mine.count;
    float v[8], gains[8] = {0, 0, 0, 0, 0, 0, 0, 0}, square = 0;
    load_factors<NORMED>(gain, place(mine.first, last, HIDDEN, lane), gains);
    wait_for_inputs();
    cluster_wait();  // all blocks of the cluster run: their shared memory may be written
    for (u32 tile0 = mine.first; tile0 < last; tile0 += 4) {
        const Place p = place(tile0, last, HIDDEN, lane);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = 0;
        if (p.active && token0 + warp < rows) load8(x + (u64)(token0 + warp) * HIDDEN + p.col, v);
        if (tile0 != mine.first) load_factors<NORMED>(gain, p, gains);
#pragma unroll
        for (int i = 0; i < 8; i++) square = fmaf(v[i], v[i], square);
        split_place<true>(Place{p.tile - mine.first, p.col, p.active}, v, gains, lane, s.fragments[warp], s.units[warp]);
    }
    square = warp_sum(square);
    if (lane == 0) send_peer(peer_address(shared_address(&s.squares[rank]), warp), square, peer_address(shared_address(&s.received), warp));
    __syncthreads();
    Fragment<Q8> f[MOST][2];
    Unit unit[MOST][2];
    u32 to[2], bar[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (u32 k = 0; k < MOST; k++) {
            if (!mine.has(k)) continue;
            f[k][n] = load_staged<true>(s.fragments[n * 4 + (lane >> 3)] + k * FRAGMENT_BYTES<true>, lane);
            unit[k][n] = s.units[n * 4 + (lane & 3)][k];
        }
        to[n] = peer_address(shared_address(&s.inbox[rank][lane >> 2]), n * 4 + (lane & 3));
        bar[n] = peer_address(shared_address(&s.received), n * 4 + (lane & 3));
    }
    barrier_wait(&s.full, 0);
#pragma unroll 1
    for (u32 i = warp; i < ROUTER_BLOCKS; i += WARPS) {
        float total[2][2] = {};
#pragma unroll
        for (u32 k = 0; k < MOST; k++) {
            if (!mine.has(k)) continue;
            const Tile<Q8> tile = load_tile<Q8>(s.tiles[i] + k * tile_bytes<Q8>(), lane);
#pragma unroll
            for (int n = 0; n < 2; n++) multiply<Q8>(tile, f[k][n], unit[k][n], total[n]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            send_peer(to[n] + i * TILE_ROWS * 4, total[n][0], bar[n]);
            send_peer(to[n] + i * TILE_ROWS * 4 + 32, total[n][1], bar[n]);
        }
    }
    constexpr u32 WORDS = FRAGMENT_BYTES<true> / 16;
    for (u32 i = tid; i < CLUSTER * mine.count * WORDS; i += THREADS) {
        const u32 word = i % WORDS, tile = i / WORDS % mine.count, token = i / WORDS / mine.count;
        if (token0 + token >= rows) continue;
        const u64 to = (u64)(token0 + token) * HIDDEN_TILES + mine.first + tile;
        ((uint4*)(fragments + to * FRAGMENT_BYTES<true>))[word] = ((const uint4*)(s.fragments[token] + tile * FRAGMENT_BYTES<true>))[word];
        if (word == 0) units[to] = s.units[token][tile];
    }
    barrier_wait(&s.received, 0);
    // Of one token from here on.
    const u32 row = token0 + rank;
    if (row >= rows) return;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < CLUSTER; k++) sum += s.squares[k];
    const float row_scale = rsqrtf(sum / (HIDDEN_TILES * TILE_COLS) + EPS);
    for (u32 i = tid; i < ROUTER_ROWS; i += THREADS) {
        s.logits[i] = __fmul_rn(sum_of<CLUSTER>([&](int k) { return s.inbox[k][i]; }), row_scale);
    }
    __syncthreads();
    if (warp > 0) return;
    const u32 index = choose([&](u32 i) { return s.logits[i]; }, lane, s.scratch, weights + row * SLOTS);
    if (lane < TOP_K) chosen[row * TOP_K + lane] = index;
    if (lane == 0) scale[row] = row_scale;
#endif
}
