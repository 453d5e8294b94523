// What every kernel file starts with: types, packed matrices, the tensor-core product, reductions.
//
// Shapes come in as macros from the model's config: HIDDEN, VOCAB, EPS, KEY_HEADS, VALUE_HEADS, DK, DV, TAPS, HEADS,
// KV_HEADS, HEAD_DIM, ROTARY, EXPERTS, TOP_K, EXPERT_WIDTH, SHARED_WIDTH.
//
// Products. Weights are packed on the host into tiles of 16 rows x 64 inputs in the order in which the lanes of a warp
// want them as the A operand of mma.m16n8k16. An f32 input x is split into two bf16, x = hi + lo, which become two
// columns of B: one instruction multiplies 16 rows with four tokens to 16 bits of mantissa, in the range of f32.
// A warp sums the tiles [w * n / 8, (w + 1) * n / 8) of a row, and the eight warps' sums are added in their order: the
// result of a token does not depend on what stands beside it, nor on which kernel computes it.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARPS 8
#define THREADS 256
#define TILE_ROWS 16
#define TILE_COLS 64
#define FULL 0xffffffffu

#define Q4 0
#define Q8 1
#define BF16 2
#define BF16X2 3

// Bytes of a tile: codes in lane order, then (quantised forms) scale and bias as bf16 of each row.
template <int FORM> __host__ __device__ constexpr u32 tile_bytes() {
    return FORM == Q4 ? 576 : FORM == Q8 ? 1088 : FORM == BF16 ? 2048 : 4096;
}

// A packed matrix: row blocks of 16, each of k_tiles tiles.
struct Matrix {
    const u8* tiles;
    u32 rows;
    u32 k_tiles;
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float bits_to_float(u32 x) { return __uint_as_float(x); }
__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// (low half, high half) as bf16, rounded to nearest even.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}

// Programmatic dependent launch; before compute capability 9.0 kernels simply follow one another.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + __expf(-x)); }

// SiLU(gate) * up of a product's sums, which `scale` makes outputs.
__device__ __forceinline__ float swiglu(float gate, float up, float scale) {
    return __fmul_rn(silu(__fmul_rn(gate, scale)), __fmul_rn(up, scale));
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(FULL, x, o);
    return x;
}

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two bf16 of 128 + code from a word of eight 4-bit codes: codes j and j + 4. 128 is taken back through the sum of x.
template <int J> __device__ __forceinline__ u32 unpack4(u32 word) {
    u32 out;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word >> (4 * J)), "r"(0x000f000fu), "r"(0x43004300u));
    return out;
}

__device__ __forceinline__ u32 add_bf16(u32 a, u32 b) {
    u32 out;  // a * 1 + b; addition alone needs compute capability 9.0
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(0x3f803f80u), "r"(b));
    return out;
}

// Two bf16 codes from bytes J and J + 2 of a word of four 8-bit codes: exact, as the sum of their nibbles' values.
template <int J> __device__ __forceinline__ u32 unpack8(u32 word) {
    u32 low = ((word >> (8 * J)) & 0x000f000fu) | 0x43004300u;       // 128 + low nibble
    u32 high = ((word >> (8 * J + 4)) & 0x000f000fu) | 0x45004500u;  // 2048 + 16 * high nibble
    return add_bf16(add_bf16(low, 0xc300c300u), add_bf16(high, 0xc500c500u));
}

// The sum of eight parts of a delta rule's rows, in the order that all its kernels have.
__device__ __forceinline__ float sum_of_eighths(const float (&parts)[8][32], int lane) {
    return ((parts[0][lane] + parts[1][lane]) + (parts[2][lane] + parts[3][lane])) +
           ((parts[4][lane] + parts[5][lane]) + (parts[6][lane] + parts[7][lane]));
}

// --- steps of the delta rule and of the rotation, spelt out so that all kernels round alike ---

// What is the same for all columns of a value head.
struct Gates {
    float q_scale, k_scale, alpha, beta, qk;
};
// From the sums of q q, k k and q k over the head, and the head's projections a and b.
__device__ __forceinline__ Gates delta_gates(float qq, float kk, float qk, float a, float b, float rate, float bias) {
    const float decay = a + bias, softplus = fmaxf(decay, 0.0f) + log1pf(expf(-fabsf(decay)));
    return Gates{__fmul_rn(rsqrtf(qq + 1e-6f), rsqrtf((float)DK)), rsqrtf(kk + 1e-6f), expf(__fmul_rn(rate, softplus)), sigmoid(b), qk};
}
// One column, from S^T k and S^T q of the state before its decay: what is read out, and what each key adds to the state. The
// error is that of the decayed state; the readout of the updated state is alpha S^T q + (k q) error.
__device__ __forceinline__ void delta_column(const Gates& g, float sk, float sq, float v, float& out, float& step) {
    const float error = __fmul_rn(g.beta, fmaf(-__fmul_rn(g.alpha, g.k_scale), sk, v));
    out = fmaf(__fmul_rn(g.alpha, g.q_scale), sq, __fmul_rn(__fmul_rn(__fmul_rn(g.qk, g.q_scale), g.k_scale), error));
    step = __fmul_rn(g.k_scale, error);
}
__device__ __forceinline__ float delta_state(float alpha, float s, float k, float step) { return fmaf(k, step, __fmul_rn(alpha, s)); }

// Value `d` of a head `h` whose first ROTARY values are rotated in pairs d, d + ROTARY / 2.
__device__ __forceinline__ float rotated(const float* h, u32 d, const float2* angles) {
    if (d >= ROTARY) return h[d];
    const float2 a = __ldg(angles + d % (ROTARY / 2));
    const float sine = d < ROTARY / 2 ? -__fmul_rn(h[d + ROTARY / 2], a.y) : __fmul_rn(h[d - ROTARY / 2], a.y);
    return fmaf(h[d], a.x, sine);
}

// One lane's share of a tile.
template <int FORM> struct Tile;
template <> struct Tile<Q4> {
    uint4 codes;
    uint2 scales;
};
template <> struct Tile<Q8> {
    uint4 codes[2];
    uint2 scales;
};
template <> struct Tile<BF16> {
    uint4 values[4];
};

__device__ __forceinline__ uint4 load16(const u8* p) { return *(const uint4*)p; }

// `p`: the tile, in shared or global memory.
template <int FORM> __device__ __forceinline__ Tile<FORM> load_tile(const u8* p, int lane) {
    Tile<FORM> t;
    if constexpr (FORM == Q4) {
        t.codes = load16(p + lane * 16);
        t.scales = *(const uint2*)(p + 512 + (lane >> 2) * 8);
    } else if constexpr (FORM == Q8) {
        t.codes[0] = load16(p + lane * 16);
        t.codes[1] = load16(p + 512 + lane * 16);
        t.scales = *(const uint2*)(p + 1024 + (lane >> 2) * 8);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) t.values[i] = load16(p + i * 512 + lane * 16);
    }
    return t;
}

// A lane's share of B for one tile and four tokens: word w is inputs 8 w .. 8 w + 7 of its 16, as pairs (j, j + 4).
struct Fragment {
    uint4 word[2];
};

// total[0], total[1]: rows g and g + 8 of the tile, for token t of the four (g = lane / 4, t = lane % 4); `sum` is the
// sum of that token's 64 inputs.
template <int FORM>
__device__ __forceinline__ void multiply(const Tile<FORM>& w, const Fragment& x, float sum, float (&total)[2]) {
    // Two chains of products, so that one need not wait for the other.
    float c[2][4] = {};
    if constexpr (FORM == Q4) {
        const uint4 q = w.codes, a = x.word[0], b = x.word[1];
        c[0][0] = c[0][2] = -128.0f * sum;
        mma(c[0], unpack4<0>(q.x), unpack4<0>(q.z), unpack4<1>(q.x), unpack4<1>(q.z), a.x, a.y);
        mma(c[1], unpack4<0>(q.y), unpack4<0>(q.w), unpack4<1>(q.y), unpack4<1>(q.w), b.x, b.y);
        mma(c[0], unpack4<2>(q.x), unpack4<2>(q.z), unpack4<3>(q.x), unpack4<3>(q.z), a.z, a.w);
        mma(c[1], unpack4<2>(q.y), unpack4<2>(q.w), unpack4<3>(q.y), unpack4<3>(q.w), b.z, b.w);
    } else if constexpr (FORM == Q8) {
#pragma unroll
        for (int h = 0; h < 2; h++) {  // words x, y: row g; z, w: row g + 8
            const uint4 q = w.codes[h], b = x.word[h];
            mma(c[h], unpack8<0>(q.x), unpack8<0>(q.z), unpack8<1>(q.x), unpack8<1>(q.z), b.x, b.y);
            mma(c[h], unpack8<0>(q.y), unpack8<0>(q.w), unpack8<1>(q.y), unpack8<1>(q.w), b.z, b.w);
        }
    } else {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint4 p = w.values[2 * h], q = w.values[2 * h + 1], b = x.word[h];
            mma(c[h], p.x, p.y, p.z, p.w, b.x, b.y);
            mma(c[h], q.x, q.y, q.z, q.w, b.z, b.w);
        }
    }
    // Columns 2 t and 2 t + 1 are a token's hi and lo.
    const float low = (c[0][0] + c[0][1]) + (c[1][0] + c[1][1]), high = (c[0][2] + c[0][3]) + (c[1][2] + c[1][3]);
    if constexpr (FORM == Q4 || FORM == Q8) {
        // Every multiply-add is spelt out: left to the compiler, kernels would round differently.
        total[0] = fmaf(bf16_low(w.scales.x), low, fmaf(bf16_high(w.scales.x), sum, total[0]));
        total[1] = fmaf(bf16_low(w.scales.y), high, fmaf(bf16_high(w.scales.y), sum, total[1]));
    } else {
        total[0] += low;
        total[1] += high;
    }
}

// Multiplies the tile at `p`; BF16X2 is two bf16 tiles whose sum is meant.
template <int FORM>
__device__ __forceinline__ void multiply_at(const u8* p, int lane, const Fragment& x, float sum, float (&total)[2]) {
    if constexpr (FORM == BF16X2) {
        multiply<BF16>(load_tile<BF16>(p, lane), x, sum, total);
        multiply<BF16>(load_tile<BF16>(p + 2048, lane), x, sum, total);
    } else {
        multiply<FORM>(load_tile<FORM>(p, lane), x, sum, total);
    }
}

// Tiles of a row that warp `w` sums.
__device__ __forceinline__ u32 first_tile(u32 w, u32 k_tiles) { return w * k_tiles / WARPS; }
// The same for a number known to the compiler: where it is a multiple of WARPS, so is how many each warp has.
template <u32 K_TILES> struct Share {
    static constexpr bool EVEN = K_TILES % WARPS == 0;
    static constexpr u32 MOST = (K_TILES + WARPS - 1) / WARPS;
    u32 first, count;
    __device__ __forceinline__ explicit Share(u32 warp)
        : first(EVEN ? warp * MOST : first_tile(warp, K_TILES)), count(EVEN ? MOST : first_tile(warp + 1, K_TILES) - first) {}
    __device__ __forceinline__ bool has(u32 i) const { return EVEN || i < count; }
};

// Eight consecutive inputs as the bf16 halves of a fragment's word; returns the sum of hi + lo.
__device__ __forceinline__ float split8(const float (&v)[8], uint4& hi, uint4& lo) {
    u32 h[4], l[4];
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        h[j] = pack_bf16(v[j], v[j + 4]);
        const float a = bf16_low(h[j]), b = bf16_high(h[j]);
        l[j] = pack_bf16(v[j] - a, v[j + 4] - b);
        sum += (a + bf16_low(l[j])) + (b + bf16_high(l[j]));
    }
    hi = make_uint4(h[0], h[1], h[2], h[3]);
    lo = make_uint4(l[0], l[1], l[2], l[3]);
    return sum;
}

__device__ __forceinline__ void load8(const float* p, float (&v)[8]) {
    const float4 a = __ldcg((const float4*)p), b = __ldcg((const float4*)p + 1);
    v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
    v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}

// Inputs of a product in memory, ready as fragments: per row and tile 2 words x 4 lanes x (hi, lo), 16 bytes each.
#define FRAGMENT_BYTES 256

// Fragment of four rows; `row` is the row of this lane's token (lane / 8), or negative for none.
__device__ __forceinline__ Fragment load_fragment(const u8* fragments, long long row, u32 k_tiles, u32 tile, int lane) {
    Fragment f;
    f.word[0] = f.word[1] = make_uint4(0, 0, 0, 0);
    if (row >= 0) {
        const u8* p = fragments + ((u64)row * k_tiles + tile) * FRAGMENT_BYTES + ((lane & 3) * 2 + ((lane >> 2) & 1)) * 16;
        f.word[0] = __ldcg((const uint4*)p);
        f.word[1] = __ldcg((const uint4*)(p + 128));
    }
    return f;
}

// The same of one row's tile in shared memory: this lane's token's.
__device__ __forceinline__ Fragment load_staged(const u8* p, int lane) {
    p += ((lane & 3) * 2 + ((lane >> 2) & 1)) * 16;
    return Fragment{*(const uint4*)p, *(const uint4*)(p + 128)};
}

// --- inputs become fragments ---

// How an input is read.
#define AS_IS 0  // as it is
#define NORMED 1   // times the gain of an RMS norm; 1 / rms multiplies the result
#define HEAD_NORMED 2  // each value head times its own 1 / rms, from the partial sums of squares that `delta` leaves

#define VALUE_SPLIT (DV / 32)  // blocks of `delta` per value head

__device__ __forceinline__ float head_scale(const float* squares, u32 head) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < VALUE_SPLIT; i++) sum += __ldcg(squares + head * VALUE_SPLIT + i);
    return rsqrtf(sum / DV + EPS);
}

// Where a lane's eight inputs of four tiles are: tile `tile0 + lane / 8`, from input `col` on.
struct Place {
    u32 tile, col;
    bool active;
};
__device__ __forceinline__ Place place(u32 tile0, u32 last, u32 width, int lane) {
    const u32 tile = tile0 + (lane >> 3), col = tile * TILE_COLS + (lane & 7) * 8;
    return Place{tile, col, tile < last && col < width};
}

// Splits the eight inputs of every lane, times their factors, into fragments of up to four tiles.
__device__ __forceinline__ void split_place(const Place& p, float (&v)[8], const float (&factors)[8], int lane, u8* fragments, float* sums) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __fmul_rn(v[i], factors[i]);  // not fused with what `split8` subtracts
    uint4 hi, lo;
    float sum = split8(v, hi, lo);
#pragma unroll
    for (int o = 1; o < 8; o <<= 1) sum += __shfl_xor_sync(FULL, sum, o);
    if (p.active) {
        u8* to = fragments + (u64)p.tile * FRAGMENT_BYTES + (lane & 1) * 128 + ((lane & 7) >> 1) * 32;
        *(uint4*)to = hi;
        *(uint4*)(to + 16) = lo;
        if ((lane & 7) == 0) sums[p.tile] = sum;
    }
}

// What the eight inputs at a place are multiplied with.
template <int MODE> __device__ __forceinline__ void load_factors(const float* factor, const Place& p, float (&out)[8]) {
    if constexpr (MODE == NORMED) {
        if (p.active) load8(factor + p.col, out);
    } else {
        const float s = MODE == HEAD_NORMED && p.active ? head_scale(factor, p.col / DV) : 1.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = s;
    }
}

// Splits this warp's share of one input row into fragments; returns this lane's share of the sum of squares.
template <int MODE>
__device__ __forceinline__ float split_row(const float* x, u32 width, const float* factor, u32 k_tiles, u32 warp, int lane,
                                           u8* fragments, float* sums) {
    const u32 last = first_tile(warp + 1, k_tiles);
    float squares = 0;
    for (u32 tile0 = first_tile(warp, k_tiles); tile0 < last; tile0 += 4) {
        const Place p = place(tile0, last, width, lane);
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0}, factors[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (p.active) load8(x + p.col, v);
        load_factors<MODE>(factor, p, factors);
#pragma unroll
        for (int i = 0; i < 8; i++) squares = fmaf(v[i], v[i], squares);
        split_place(p, v, factors, lane, fragments, sums);
    }
    return squares;
}

// Large to small, then small index to large: the order in which experts and tokens are preferred. NaN is last.
__device__ __forceinline__ u32 order_key(float x) {
    const u32 b = __float_as_uint(x);
    if (x != x) return 0;
    return b & 0x80000000u ? ~b : b | 0x80000000u;
}
__device__ __forceinline__ float value_of_key(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// The TOP_K largest of EXPERTS logits by one warp, by falling value, of equal ones the smaller index first. Lane k < TOP_K
// gets index and value of the k-th. `keys`: the order keys of a lane's consecutive logits, so that the first of several equal
// lanes has the smaller index; 0 where there is none.
#define LANE_EXPERTS ((EXPERTS + 31) / 32)
#define LANE_KEYS (LANE_EXPERTS <= 1 ? 1 : LANE_EXPERTS <= 2 ? 2 : LANE_EXPERTS <= 4 ? 4 : LANE_EXPERTS <= 8 ? 8 : LANE_EXPERTS <= 16 ? 16 : 32)
__device__ __forceinline__ void top_k_of_keys(const u32 (&keys)[LANE_KEYS], int lane, u32& index, float& value) {
    index = 0;
    value = 0;
    u32 taken = 0;  // a bit per key of this lane
#pragma unroll 1
    for (int k = 0; k < TOP_K; k++) {
        u32 best[LANE_KEYS];
        u32 at[LANE_KEYS];
#pragma unroll
        for (int i = 0; i < LANE_KEYS; i++) {
            best[i] = taken >> i & 1 ? 0u : keys[i];
            at[i] = i;
        }
#pragma unroll
        for (int width = LANE_KEYS / 2; width >= 1; width /= 2)
#pragma unroll
            for (int i = 0; i < width; i++) {
                // Neighbours meet, so that the left one always has the smaller index.
                const bool right = best[2 * i + 1] > best[2 * i];
                best[i] = right ? best[2 * i + 1] : best[2 * i];
                at[i] = right ? at[2 * i + 1] : at[2 * i];
            }
        const u32 top = __reduce_max_sync(FULL, best[0]);
        const int winner = __ffs(__ballot_sync(FULL, best[0] == top)) - 1;
        const u32 found = winner * LANE_EXPERTS + __shfl_sync(FULL, at[0], winner);
        if (lane == winner) taken |= 1u << at[0];
        if (lane == k) {
            index = min(found, (u32)EXPERTS - 1);
            value = value_of_key(top);
        }
    }
}

// The same of logits in memory.
__device__ __forceinline__ void warp_top_k(const float* logits, int lane, u32& index, float& value) {
    u32 keys[LANE_KEYS];
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++)
        keys[i] = i < LANE_EXPERTS && lane * LANE_EXPERTS + i < EXPERTS ? order_key(__ldcg(logits + lane * LANE_EXPERTS + i)) : 0u;
    top_k_of_keys(keys, lane, index, value);
}

// Weights of the chosen experts: softmax over all, renormalised over the chosen, is softmax over the chosen.
__device__ __forceinline__ float top_k_weight(float value, int lane) {
    const float top = __shfl_sync(FULL, value, 0);
    const float e = lane < TOP_K ? expf(value - top) : 0.0f;
    return e / warp_sum(e);
}

// --- bulk copies into shared memory ---

__device__ __forceinline__ void barrier_init(u64* bar, u32 count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
#endif
}
__device__ __forceinline__ void barrier_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_expect(u64* bar, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(u64* bar) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
#endif
}
__device__ __forceinline__ void barrier_wait(u64* bar, u32 parity) {
#if __CUDA_ARCH__ >= 900
    u32 done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
#endif
}
// Weights are read once a step: the first to leave the L2 cache, which holds what kernels pass on to each other.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, u32 bytes, u64* bar) {
#if __CUDA_ARCH__ >= 900
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(bar)), "l"(policy) : "memory");
#endif
}
