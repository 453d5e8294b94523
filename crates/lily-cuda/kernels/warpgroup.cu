// What the products of warpgroups in wide.cu and chunk.cu have in common: 64 rows of 4-bit weights, in registers, with the digits of several
// tokens, in shared memory.

// What a product is, beside its weights.
struct Wide {
    const u8* columns;     // inputs: records
    const float* squares;  // null, or [tokens, WARPS], sums of squares of the inputs' eighths: 1 / rms multiplies y
    float* y;              // [tokens, stride]
    u32 tokens, stride;
    u32 add;               // 1: to what is there
    u32 stages;            // of weights in shared memory
};

// A matrix in shared memory as `Columns` has it, that begins `offset` behind `p`, for products of two block rows. Of an address only the
// low bits count: those above are the block's rank in its cluster.
template <int T> __device__ __forceinline__ u64 descriptor(const u8* p, u32 offset) {
    const u32 low = ((shared_address(p) >> 4 & 0x3fff) | (T * 32 >> 4) << 16) + (offset >> 4);
    return (u64)(128 >> 4) << 32 | low;
}
// Products of a warp's tile with the digits of one of several records: c is what they are once they have ended. All warps of a warpgroup call it.
template <int T> __device__ __forceinline__ void start_tile(const Tile<Q4>& w, const u8* records, int index, int lane, int (&c)[T]) {
    const uint4 q = w.codes;
#if HAS_WARPGROUPS
    const u32 a[8] = {even_codes(q.x), even_codes(q.z), odd_codes(q.x), odd_codes(q.z), even_codes(q.y), even_codes(q.w), odd_codes(q.y), odd_codes(q.w)};
    begin_products();
    start_products(c, a, descriptor<T>(records, index * record_bytes(T)), descriptor<T>(records, index * record_bytes(T) + T * 64));
    commit_products();
#else
    const u32* b = (const u32*)(records + index * record_bytes(T)) + lane;
#pragma unroll
    for (int n = 0; n < T / 4; n++) {
        int sums[4] = {0, 0, 0, 0};
        mma(sums, even_codes(q.x), even_codes(q.z), odd_codes(q.x), odd_codes(q.z), b[n * 32], b[T * 8 + n * 32]);
        mma(sums, even_codes(q.y), even_codes(q.w), odd_codes(q.y), odd_codes(q.w), b[T * 16 + n * 32], b[T * 24 + n * 32]);
#pragma unroll
        for (int i = 0; i < 4; i++) c[n * 4 + i] = sums[i];
    }
#endif
}
// Waits until only AFTER of the tiles started behind this one are still on their way.
template <int AFTER, int T> __device__ __forceinline__ void end_tile(int (&c)[T]) {
#if HAS_WARPGROUPS
    await_products<AFTER>(c);
#endif
}

// total += a tile's sums with a record, of rows g and g + 8 with tokens t, t + 4, t + 8 .. (g = lane / 4, t = lane % 4): the arithmetic of
// `multiply`.
template <int T>
__device__ __forceinline__ void add_sums(const uint2& scales, const u8* record, int lane, const int (&c)[T], float (&total)[T / 4][2]) {
    const float4* units = (const float4*)(record + T * 128) + (lane & 3);
#pragma unroll
    for (int pair = 0; pair < T / 8; pair++) {
        const float4 u = units[pair * 4];
        add_digits(scales, Unit{u.x, u.y}, &c[pair * 8], total[pair * 2]);
        add_digits(scales, Unit{u.z, u.w}, &c[pair * 8 + 4], total[pair * 2 + 1]);
    }
}

// What multiplies a token's sums: 1 / rms of its inputs, if they are normed.
__device__ __forceinline__ float scale_of(const Wide& o, const Matrix& w, u32 token) {
    if (!o.squares) return 1;
    float squares[WARPS], sum = 0;
    load8(o.squares + token * WARPS, squares);
#pragma unroll
    for (int k = 0; k < WARPS; k++) sum += squares[k];
    return rsqrtf(sum / (w.k_tiles * TILE_COLS) + EPS);
}
