// y = W x for any number of tokens, with inputs made ready by `prepare`.

// Fragments of every row of x, [rows, stride], of which `width` are inputs; one block a row. NORMED: `factor` is the gain and
// `scale` gets 1 / rms. HEAD_NORMED: `factor` are the partial sums of squares, [rows, VALUE_HEADS, VALUE_SPLIT].
template <int MODE>
__device__ __forceinline__ void prepare(const float* x, u32 stride, u32 width, const float* factor, u32 k_tiles, u32 as_digits,
                                        u8* fragments, Unit* units, float* scale) {
    __shared__ float squares[WARPS];
    launch_dependents();
    wait_for_inputs();
    const u64 row = blockIdx.x;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (MODE == HEAD_NORMED) factor += row * VALUE_HEADS * VALUE_SPLIT;
    const float* from = x + row * stride;
    const u64 tile = row * k_tiles;
    float s = as_digits ? split_row<MODE, true>(from, width, factor, k_tiles, warp, lane, fragments + tile * FRAGMENT_BYTES<true>, units + tile)
                        : split_row<MODE, false>(from, width, factor, k_tiles, warp, lane, fragments + tile * FRAGMENT_BYTES<false>, units + tile);
    if constexpr (MODE == NORMED) {
        s = warp_sum(s);
        if (lane == 0) squares[warp] = s;
        __syncthreads();
        if (threadIdx.x == 0) {
            float sum = 0;
            for (int w = 0; w < WARPS; w++) sum += squares[w];
            scale[row] = rsqrtf(sum / width + EPS);
        }
    }
}

#define PREPARE(name, mode)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS) name(const float* x, u32 stride, u32 width, const float* factor, \
                                                               u32 k_tiles, u32 as_digits, u8* fragments, Unit* units,     \
                                                               float* scale) {                                             \
        prepare<mode>(x, stride, width, factor, k_tiles, as_digits, fragments, units, scale);                              \
    }
PREPARE(prepare_plain, AS_IS)
PREPARE(prepare_norm, NORMED)
PREPARE(prepare_heads, HEAD_NORMED)

template <int FORM> __device__ __forceinline__ const u8* tile_at(const Matrix& w, u32 block, u32 tile) {
    return w.tiles + ((u64)block * w.k_tiles + tile) * tile_bytes<FORM>();
}

// y[token, row] = scale[token] * W x, or added to y. A block takes R row blocks and 4 NT tokens.
template <int FORM, int R, int NT>
__device__ __forceinline__ void matmul(Matrix w, const u8* fragments, const Unit* units, const float* scale, float* y, u32 tokens,
                                       u32 stride, u32 add) {
    __shared__ float partial[WARPS][R * TILE_ROWS * NT * 4];
    launch_dependents();
    wait_for_inputs();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 block0 = blockIdx.x * R, blocks = (w.rows + TILE_ROWS - 1) / TILE_ROWS, token0 = blockIdx.y * (NT * 4);
    float total[R][NT][2];
#pragma unroll
    for (int i = 0; i < R * NT * 2; i++) (&total[0][0][0])[i] = 0;
    const u32 last = first_tile(warp + 1, w.k_tiles);
    // 4-bit tiles are on their way a few at a time.
    constexpr int AHEAD = FORM != Q4 ? 1 : R == 4 ? 2 : 4, STORED = FORM == BF16X2 ? BF16 : FORM;
    for (u32 tile0 = first_tile(warp, w.k_tiles); tile0 < last; tile0 += AHEAD) {
        Tile<STORED> a[R][AHEAD];
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                a[r][i] = load_tile<STORED>(tile_at<FORM>(w, min(block0 + r, blocks - 1), min(tile0 + i, last - 1)), lane);
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (tile0 + i >= last) continue;
            Fragment<FORM> x[NT];
            Unit unit[NT];
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const u32 column = token0 + n * 4 + (lane >> 3), token = token0 + n * 4 + (lane & 3);
                x[n] = load_fragment<FORM>(fragments, column < tokens ? (long long)column : -1, w.k_tiles, tile0 + i, lane);
                unit[n] = load_unit<FORM>(units, token < tokens ? (long long)token : -1, w.k_tiles, tile0 + i);
            }
#pragma unroll
            for (int r = 0; r < R; r++) {
#pragma unroll
                for (int n = 0; n < NT; n++) multiply<STORED>(a[r][i], x[n], unit[n], total[r][n]);
                if constexpr (FORM == BF16X2) {
                    const u8* p = tile_at<FORM>(w, min(block0 + r, blocks - 1), tile0 + i) + 2048;
                    const Tile<BF16> low = load_tile<BF16>(p, lane);
#pragma unroll
                    for (int n = 0; n < NT; n++) multiply<BF16>(low, x[n], unit[n], total[r][n]);
                }
            }
        }
    }
    const u32 g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int n = 0; n < NT; n++) {
            partial[warp][((n * 4 + t) * R + r) * TILE_ROWS + g] = total[r][n][0];
            partial[warp][((n * 4 + t) * R + r) * TILE_ROWS + g + 8] = total[r][n][1];
        }
    __syncthreads();
    for (u32 i = threadIdx.x; i < R * TILE_ROWS * NT * 4; i += THREADS) {
        const u32 row = block0 * TILE_ROWS + i % (R * TILE_ROWS), token = token0 + i / (R * TILE_ROWS);
        if (row >= w.rows || token >= tokens) continue;
        float v = sum_of<WARPS>([&](int k) { return partial[k][i]; });
        if (scale) v = __fmul_rn(v, __ldcg(scale + token));
        float* out = y + (u64)token * stride + row;
        *out = add ? *out + v : v;
    }
}

#define MATMUL(name, form, r, nt)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS) name(Matrix w, const u8* fragments, const Unit* units,           \
                                                               const float* scale, float* y, u32 tokens, u32 stride, u32 add) { \
        matmul<form, r, nt>(w, fragments, units, scale, y, tokens, stride, add);                                            \
    }
#define MATMULS(suffix, form)                \
    MATMUL(matmul_##suffix##_1x1, form, 1, 1) \
    MATMUL(matmul_##suffix##_4x1, form, 4, 1) \
    MATMUL(matmul_##suffix##_1x2, form, 1, 2) \
    MATMUL(matmul_##suffix##_2x2, form, 2, 2) \
    MATMUL(matmul_##suffix##_1x4, form, 1, 4) \
    MATMUL(matmul_##suffix##_4x4, form, 4, 4)
MATMULS(q4, Q4)
MATMULS(q8, Q8)
MATMULS(bf16, BF16)
MATMULS(bf16x2, BF16X2)
