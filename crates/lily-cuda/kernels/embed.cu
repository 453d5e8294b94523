// Rows of the embedding, expanded to f32: x[row] = E[token].

// Input `col` of row `row` of a packed matrix.
template <int FORM> __device__ __forceinline__ float element(const Matrix& w, u32 row, u32 col) {
    const u8* tile = w.tiles + ((u64)(row / TILE_ROWS) * w.k_tiles + col / TILE_COLS) * tile_bytes<FORM>();
    const u32 g = row % 8, high = row / 8 % 2, k = col % TILE_COLS, t = k / 16, word = k / 8 % 2, j = k % 8;
    const u32 lane = g * 4 + t;
    if constexpr (FORM == Q4) {
        // Words of a lane: row g first and second, then row g + 8.
        const u32 codes = *(const u32*)(tile + lane * 16 + (high * 2 + word) * 4);
        const u32 scale = *(const u32*)(tile + 512 + g * 8 + high * 4);
        return bf16_low(scale) * (float)(codes >> (4 * j) & 15) + bf16_high(scale);
    } else if constexpr (FORM == Q8) {
        // Two words a row and half: codes 0 2 4 6, then 1 3 5 7.
        const u32 codes = tile[word * 512 + lane * 16 + high * 8 + j % 2 * 4 + j / 2];
        const u32 scale = *(const u32*)(tile + 1024 + g * 8 + high * 4);
        return bf16_low(scale) * (float)codes + bf16_high(scale);
    } else {
        // Per half word: registers a0 (row g), a1 (row g + 8), a2 and a3 of each of two products.
        const u32 pair = j % 4, product = pair / 2, reg = pair % 2 * 2 + high;
        const u64 at = (u64)(word * 2 + product) * 512 + lane * 16 + reg * 4 + j / 4 * 2;
        float v = bf16_low(*(const u16*)(tile + at));
        if constexpr (FORM == BF16X2) v += bf16_low(*(const u16*)(tile + 2048 + at));
        return v;
    }
}

// One block a row. A row whose segment feeds the token it sampled reads it on the device. history: per slot its tokens.
template <int FORM>
__device__ __forceinline__ void embed(Matrix w, const Row* rows, const Segment* segments, const u32* sampled,
                                      u32* history, u64 history_stride, float* x) {
    launch_dependents();
    wait_for_inputs();
    const Row row = rows[blockIdx.x];
    const u32 source = segments[row.segment].source;
    const u32 token = source == NONE ? row.token : __ldcg(sampled + source);
    if (threadIdx.x == 0) history[segments[row.segment].slot * history_stride + row.position] = token;
    for (u32 i = threadIdx.x; i < HIDDEN; i += blockDim.x) x[(u64)blockIdx.x * HIDDEN + i] = element<FORM>(w, token, i);
}
#define EMBED(name, form)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS) name(Matrix w, const Row* rows, const Segment* segments,           \
                                                               const u32* sampled, u32* history, u64 history_stride, float* x) { \
        embed<form>(w, rows, segments, sampled, history, history_stride, x);                                                 \
    }
EMBED(embed_q4, Q4)
EMBED(embed_q8, Q8)
EMBED(embed_bf16, BF16)
EMBED(embed_bf16x2, BF16X2)
