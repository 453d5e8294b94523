// What every kernel file starts with: types, packed matrices, the tensor-core product, reductions.
//
// Shapes come in as macros from the model's config: HIDDEN, VOCAB, EPS, KEY_HEADS, VALUE_HEADS, DK, DV, TAPS, HEADS,
// KV_HEADS, HEAD_DIM, ROTARY, EXPERTS, TOP_K, EXPERT_WIDTH, SHARED_WIDTH.
//
// Products. Weights are packed on the host into tiles of 16 rows x 64 inputs in the order in which the lanes of a warp
// want them as the A operand of the tensor cores. An input takes two columns of B, so that one instruction multiplies 16
// rows with four tokens:
// * Codes of 4 or 8 bits meet integers of 16 bits, x = unit * (256 high + low), the digits in a column each; the 64 inputs
//   of a tile have one unit, 1 / 32,600 of the largest. Products and their sum over a tile are exact
//   (docs/decisions/0013-fixed-point-on-the-gpu.md).
// * Weights in bf16 meet two bf16, x = hi + lo, in the range of f32.
// An eighth of a row are the tiles [w * n / 8, (w + 1) * n / 8), mostly those of one warp. Its sum is made in their order, and the
// eight sums are added as a tree (`sum_of`): the result of a token does not depend on what stands beside it, nor on which kernel
// computes it.

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

__device__ __forceinline__ float bits_to_float(u32 x) { return __uint_as_float(x); }
__device__ __forceinline__ float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

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

// Of a word of eight 4-bit codes: codes 0 2 4 6 as bytes, and 1 3 5 7.
__device__ __forceinline__ u32 even_codes(u32 word) { return word & 0x0f0f0f0fu; }
__device__ __forceinline__ u32 odd_codes(u32 word) { return word >> 4 & 0x0f0f0f0fu; }

// The sum of N parts, a power of two, in the order of a tree: so a sum of the first of them may be made anywhere.
__device__ __forceinline__ float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
template <int N, class Part> __device__ __forceinline__ auto sum_of(Part part, int first = 0) {
    if constexpr (N == 1) return part(first);
    else return sum_of<N / 2>(part, first) + sum_of<N / 2>(part, first + N / 2);
}

// --- steps of the delta rule and of the rotation, spelt out so that all kernels round alike ---

// What is the same for all columns of a value head.
struct Gates {
    float q_scale, k_scale, alpha, beta, qk;
};
// From the sums of q q and of k k over the head.
__device__ __forceinline__ float delta_q_scale(float qq) { return __fmul_rn(rsqrtf(qq + 1e-6f), rsqrtf((float)DK)); }
__device__ __forceinline__ float delta_k_scale(float kk) { return rsqrtf(kk + 1e-6f); }
// How much of the state stays, from the head's projection a.
__device__ __forceinline__ float delta_softplus(float a, float bias) {
    const float decay = a + bias;
    return fmaxf(decay, 0.0f) + log1pf(expf(-fabsf(decay)));
}
__device__ __forceinline__ float delta_alpha(float softplus, float rate) { return expf(__fmul_rn(rate, softplus)); }
// All of them, with the sum of q k and the head's projection b.
__device__ __forceinline__ Gates delta_gates(float qq, float kk, float qk, float a, float b, float rate, float bias) {
    const float softplus = delta_softplus(a, bias);
    return Gates{delta_q_scale(qq), delta_k_scale(kk), delta_alpha(softplus, rate), sigmoid(b), qk};
}
// What a column's sums are multiplied with.
struct __align__(16) Factors {
    float alpha, beta, k_scale, decayed_k, decayed_q, qk;
};
__device__ __forceinline__ Factors delta_factors(const Gates& g) {
    return Factors{g.alpha, g.beta, g.k_scale, __fmul_rn(g.alpha, g.k_scale), __fmul_rn(g.alpha, g.q_scale),
                   __fmul_rn(__fmul_rn(g.qk, g.q_scale), g.k_scale)};
}
// The error of the decayed state, from S^T k of the state before its decay; what each key adds to the state; and the readout of the
// updated state from S^T q of that before, alpha S^T q + (k q) error.
__device__ __forceinline__ float delta_error(const Factors& f, float sk, float v) { return __fmul_rn(f.beta, fmaf(-f.decayed_k, sk, v)); }
__device__ __forceinline__ float delta_step(const Factors& f, float error) { return __fmul_rn(f.k_scale, error); }
__device__ __forceinline__ float delta_readout(const Factors& f, float sq, float error) {
    return fmaf(f.decayed_q, sq, __fmul_rn(f.qk, error));
}
// All of them of one column.
__device__ __forceinline__ void delta_column(const Gates& g, float sk, float sq, float v, float& out, float& step) {
    const Factors f = delta_factors(g);
    const float error = delta_error(f, sk, v);
    out = delta_readout(f, sq, error);
    step = delta_step(f, error);
}
__device__ __forceinline__ float delta_state(float alpha, float s, float k, float step) { return fmaf(k, step, __fmul_rn(alpha, s)); }

// Value `d` of a head `h` whose first ROTARY values are rotated in pairs d, d + ROTARY / 2.
__device__ __forceinline__ float rotated(const float* h, u32 d, const float2* angles) {
    if (d >= ROTARY) return h[d];
    const float2 a = angles[d % (ROTARY / 2)];
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

// Whether inputs of a form's products are integers of two digits.
template <int FORM> constexpr bool DIGITS = FORM == Q4 || FORM == Q8;

// A lane's share of B for one tile and four tokens, of its 16 inputs. Digits: bytes of inputs 0 2 4 6, 1 3 5 7, and the same
// from 8 on. bf16: word w is inputs 8 w .. 8 w + 7, as pairs (j, j + 4).
template <bool AS_DIGITS> struct Words {
    uint4 word[AS_DIGITS ? 1 : 2];
};
template <int FORM> using Fragment = Words<DIGITS<FORM>>;

// Of one token's 64 inputs of a tile, as integers: what 1 is worth, and their sum times that.
struct Unit {
    float unit, sum;
};

// total += a tile's product with a token's 64 inputs, of rows g and g + 8. c: for each row the sums of codes with high digits and
// with low ones. Every multiply-add is spelt out: left to the compiler, kernels would round differently.
__device__ __forceinline__ void add_digits(const uint2& scales, const Unit& unit, const int* c, float (&total)[2]) {
    const float low = (float)(c[0] * 256 + c[1]), high = (float)(c[2] * 256 + c[3]);
    total[0] = fmaf(__fmul_rn(bf16_low(scales.x), unit.unit), low, fmaf(bf16_high(scales.x), unit.sum, total[0]));
    total[1] = fmaf(__fmul_rn(bf16_low(scales.y), unit.unit), high, fmaf(bf16_high(scales.y), unit.sum, total[1]));
}

// total[0], total[1]: rows g and g + 8 of the tile, for token t of the four (g = lane / 4, t = lane % 4), whose inputs have
// this `unit`.
template <int FORM>
__device__ __forceinline__ void multiply(const Tile<FORM>& w, const Fragment<FORM>& x, const Unit& unit, float (&total)[2]) {
    if constexpr (DIGITS<FORM>) {
        int c[4] = {0, 0, 0, 0};
        const uint4 b = x.word[0];
        if constexpr (FORM == Q4) {
            const uint4 q = w.codes;  // words x, y: row g; z, w: row g + 8
            mma(c, even_codes(q.x), even_codes(q.z), odd_codes(q.x), odd_codes(q.z), b.x, b.y);
            mma(c, even_codes(q.y), even_codes(q.w), odd_codes(q.y), odd_codes(q.w), b.z, b.w);
        } else {
            const uint4 p = w.codes[0], q = w.codes[1];
            mma(c, p.x, p.z, p.y, p.w, b.x, b.y);
            mma(c, q.x, q.z, q.y, q.w, b.z, b.w);
        }
        add_digits(w.scales, unit, c, total);
    } else {
        // Two chains of products, so that one need not wait for the other; columns 2 t and 2 t + 1 are a token's hi and lo.
        float c[2][4] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint4 p = w.values[2 * h], q = w.values[2 * h + 1], b = x.word[h];
            mma(c[h], p.x, p.y, p.z, p.w, b.x, b.y);
            mma(c[h], q.x, q.y, q.z, q.w, b.z, b.w);
        }
        total[0] += (c[0][0] + c[0][1]) + (c[1][0] + c[1][1]);
        total[1] += (c[0][2] + c[0][3]) + (c[1][2] + c[1][3]);
    }
}

// Multiplies the tile at `p`; BF16X2 is two bf16 tiles whose sum is meant.
template <int FORM>
__device__ __forceinline__ void multiply_at(const u8* p, int lane, const Fragment<FORM>& x, const Unit& unit, float (&total)[2]) {
    if constexpr (FORM == BF16X2) {
        multiply<BF16>(load_tile<BF16>(p, lane), x, unit, total);
        multiply<BF16>(load_tile<BF16>(p + 2048, lane), x, unit, total);
    } else {
        multiply<FORM>(load_tile<FORM>(p, lane), x, unit, total);
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

// Eight consecutive inputs as the bf16 halves of a fragment's word.
__device__ __forceinline__ void halves(const float (&v)[8], uint4& hi, uint4& lo) {
    u32 h[4], l[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        h[j] = pack_bf16(v[j], v[j + 4]);
        l[j] = pack_bf16(v[j] - bf16_low(h[j]), v[j + 4] - bf16_high(h[j]));
    }
    hi = make_uint4(h[0], h[1], h[2], h[3]);
    lo = make_uint4(l[0], l[1], l[2], l[3]);
}

// Integers of 16 bits for the inputs of a tile, the largest of which is `most`: x = unit * integer.
struct Scale {
    float unit, inverse;
    __device__ __forceinline__ explicit Scale(float most) {
        // Integers stay below 127.5 * 256, so that both digits are signed bytes. A unit is a normal number; NaN remains.
        const float least = 1e-30f, m = most < least ? least : most;
        unit = __fmul_rn(m, 1.0f / 32600.0f);
        inverse = __fmul_rn(32600.0f, reciprocal(m));
    }
};

// Four inputs as digits: bytes of the high ones and of the low ones. Adds their integers to `sum`.
__device__ __forceinline__ void digits4(float a, float b, float c, float d, const Scale& scale, u32& high, u32& low, int& sum) {
    // 1.5 * 2^23 rounds to an integer; with 128 more, byte 1 is the high digit and byte 0 the low one plus 128.
    const float magic = 12582912.0f + 128.0f;
    const u32 i = __float_as_uint(fmaf(a, scale.inverse, magic)), j = __float_as_uint(fmaf(b, scale.inverse, magic));
    const u32 k = __float_as_uint(fmaf(c, scale.inverse, magic)), l = __float_as_uint(fmaf(d, scale.inverse, magic));
    const u32 ij = __byte_perm(i, j, 0x5140), kl = __byte_perm(k, l, 0x5140);  // low low high high
    low = __byte_perm(ij, kl, 0x5410) ^ 0x80808080u;
    high = __byte_perm(ij, kl, 0x7632);
    sum += __dp4a((int)high, 0x01010101, 0) * 256 + __dp4a((int)low, 0x01010101, 0);
}
// Eight consecutive ones as a lane's words.
__device__ __forceinline__ void digits8(const float (&v)[8], const Scale& scale, uint2& high, uint2& low, int& sum) {
    sum = 0;
    digits4(v[0], v[2], v[4], v[6], scale, high.x, low.x, sum);
    digits4(v[1], v[3], v[5], v[7], scale, high.y, low.y, sum);
}
__device__ __forceinline__ float most_of(const float (&v)[8]) {
    return max_magnitude(max_magnitude(max_magnitude(v[0], v[1]), max_magnitude(v[2], v[3])),
                         max_magnitude(max_magnitude(v[4], v[5]), max_magnitude(v[6], v[7])));
}

__device__ __forceinline__ void load8(const float* p, float (&v)[8]) {
    const float4 a = __ldcg((const float4*)p), b = __ldcg((const float4*)p + 1);
    v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
    v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}

__device__ __forceinline__ void store8(float* p, const float (&v)[8]) {
    *(float4*)p = make_float4(v[0], v[1], v[2], v[3]);
    *((float4*)p + 1) = make_float4(v[4], v[5], v[6], v[7]);
}

// Inputs of a product in memory, ready as fragments: per row and tile 4 lanes x (high, low), 16 bytes each; of bf16, 2 words
// of those.
template <bool AS_DIGITS> constexpr u32 FRAGMENT_BYTES = AS_DIGITS ? 128 : 256;

// Where the lane that has eight consecutive inputs writes its part of a fragment, by which eighth of the tile it is.
template <bool AS_DIGITS> __device__ __forceinline__ u32 part_of_fragment(u32 eighth) {
    return AS_DIGITS ? (eighth >> 1) * 32 + (eighth & 1) * 8 : (eighth & 1) * 128 + (eighth >> 1) * 32;
}

// One row's tile in shared memory: the share of the lanes of its token.
template <bool AS_DIGITS> __device__ __forceinline__ Words<AS_DIGITS> load_staged(const u8* p, int lane) {
    Words<AS_DIGITS> f;
    p += ((lane & 3) * 2 + ((lane >> 2) & 1)) * 16;
#pragma unroll
    for (int i = 0; i < (AS_DIGITS ? 1 : 2); i++) f.word[i] = *(const uint4*)(p + i * 128);
    return f;
}

// Fragment of four rows; `row` is the row of this lane's token (lane / 8), or negative for none.
template <int FORM> __device__ __forceinline__ Fragment<FORM> load_fragment(const u8* fragments, long long row, u32 k_tiles, u32 tile, int lane) {
    constexpr bool D = DIGITS<FORM>;
    Fragment<FORM> f;
    const u8* p = fragments + ((u64)(row < 0 ? 0 : row) * k_tiles + tile) * FRAGMENT_BYTES<D> + ((lane & 3) * 2 + ((lane >> 2) & 1)) * 16;
#pragma unroll
    for (int i = 0; i < (D ? 1 : 2); i++) f.word[i] = row < 0 ? make_uint4(0, 0, 0, 0) : __ldcg((const uint4*)(p + i * 128));
    return f;
}
// Units of a row's tile; `row` is negative for none.
template <int FORM> __device__ __forceinline__ Unit load_unit(const Unit* units, long long row, u32 k_tiles, u32 tile) {
    if (!DIGITS<FORM> || row < 0) return Unit{0, 0};
    const float2 u = __ldcg((const float2*)units + (u64)row * k_tiles + tile);
    return Unit{u.x, u.y};
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

// Eight inputs of a tile as digits, evens and odds of each, and the unit of all 64: of eight lanes that follow each other.
struct Digits {
    uint2 high, low;
    Unit unit;
};
__device__ __forceinline__ Digits make_digits(const float (&v)[8]) {
    float most = most_of(v);
#pragma unroll
    for (int o = 1; o < 8; o <<= 1) most = max_magnitude(most, __shfl_xor_sync(FULL, most, o));
    const Scale scale(most);
    Digits d;
    int sum;
    digits8(v, scale, d.high, d.low, sum);
#pragma unroll
    for (int o = 1; o < 8; o <<= 1) sum += __shfl_xor_sync(FULL, sum, o);
    d.unit = Unit{scale.unit, __fmul_rn((float)sum, scale.unit)};
    return d;
}

// Makes the eight inputs of every lane, times their factors, into fragments of up to four tiles.
template <bool AS_DIGITS>
__device__ __forceinline__ void split_place(const Place& p, float (&v)[8], const float (&factors)[8], int lane, u8* fragments, Unit* units) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = __fmul_rn(v[i], factors[i]);  // not fused with what follows
    u8* to = fragments + (u64)p.tile * FRAGMENT_BYTES<AS_DIGITS> + part_of_fragment<AS_DIGITS>(lane & 7);
    if constexpr (AS_DIGITS) {
        const Digits d = make_digits(v);
        if (!p.active) return;
        *(uint2*)to = d.high;
        *(uint2*)(to + 16) = d.low;
        if ((lane & 7) == 0) units[p.tile] = d.unit;
    } else {
        uint4 hi, lo;
        halves(v, hi, lo);
        if (!p.active) return;
        *(uint4*)to = hi;
        *(uint4*)(to + 16) = lo;
    }
}

// Inputs of the products of wide.cu: for each group of `tokens` rows (8 or 32) and each tile a record, [groups][k_tiles]. A row's
// digits are columns 2 i (high) and 2 i + 1 of a matrix of 64 rows. It lies in blocks of 16 rows by 8 columns, [4][columns / 8],
// a column's 16 bytes one behind another: those of block c are what the four lanes of a row have in word c of a fragment. Units
// come behind it, those of rows i and i + 4 side by side.
__host__ __device__ constexpr u32 record_bytes(u32 tokens) { return tokens * 136; }

struct Columns {
    u8* records;  // null: not wanted
    u32 tokens, k_tiles;
    __device__ __forceinline__ u8* record(u32 row, u32 tile) const {
        return records + ((u64)(row / tokens) * k_tiles + tile) * record_bytes(tokens);
    }
    // Digits of a row's inputs 8 eighth + odd, + 2, + 4, + 6 of a tile.
    __device__ __forceinline__ void store(u32 row, u32 tile, u32 eighth, u32 odd, u32 high, u32 low) const {
        u8* to = record(row, tile) + ((eighth & 1) * 2 + odd) * (tokens * 32) + row % tokens * 32 + (eighth >> 1) * 4;
        *(u32*)to = high;
        *(u32*)(to + 16) = low;
    }
    __device__ __forceinline__ void store_unit(u32 row, u32 tile, const Unit& unit) const {
        const u32 in = row % tokens;
        ((Unit*)(record(row, tile) + tokens * 128))[in / 8 * 8 + in % 4 * 2 + in / 4 % 2] = unit;
    }
    // What eight lanes have of a tile, those at a place.
    __device__ __forceinline__ void store(u32 row, const Place& p, const Digits& d, int lane) const {
        if (!p.active) return;
        store(row, p.tile, lane & 7, 0, d.high.x, d.low.x);
        store(row, p.tile, lane & 7, 1, d.high.y, d.low.y);
        if ((lane & 7) == 0) store_unit(row, p.tile, d.unit);
    }
};

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

// The eight values of every lane, times their factors, as columns of up to four tiles of a row; adds to this lane's sum of squares.
__device__ __forceinline__ void put_columns(u32 row, const Place& p, float (&v)[8], const float (&factors)[8], const Columns& to, int lane,
                                            float& square) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        square = fmaf(v[i], v[i], square);
        v[i] = __fmul_rn(v[i], factors[i]);
    }
    to.store(row, p, make_digits(v), lane);
}

// Splits this warp's share of one input row into fragments; returns this lane's share of the sum of squares.
template <int MODE, bool AS_DIGITS>
__device__ __forceinline__ float split_row(const float* x, u32 width, const float* factor, u32 k_tiles, u32 warp, int lane,
                                           u8* fragments, Unit* units) {
    const u32 last = first_tile(warp + 1, k_tiles);
    float squares = 0;
    for (u32 tile0 = first_tile(warp, k_tiles); tile0 < last; tile0 += 4) {
        const Place p = place(tile0, last, width, lane);
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0}, factors[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (p.active) load8(x + p.col, v);
        load_factors<MODE>(factor, p, factors);
#pragma unroll
        for (int i = 0; i < 8; i++) squares = fmaf(v[i], v[i], squares);
        split_place<AS_DIGITS>(p, v, factors, lane, fragments, units);
    }
    return squares;
}

// Large to small, then small index to large: the order in which experts and tokens are preferred. NaN is last.
__device__ __forceinline__ u32 order_key(float x) {
    const u32 b = __float_as_uint(x);
    return x != x ? 0 : b ^ ((u32)((int)b >> 31) | 0x80000000u);
}
__device__ __forceinline__ float value_of_key(u32 key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

// The TOP_K largest of EXPERTS logits by one warp, by falling value, of equal ones the smaller index first. Lane k < TOP_K
// gets index and value of the k-th. `keys`: the order keys of a lane's consecutive logits, so that the first of several equal
// lanes has the smaller index; 0 where there is none.
#define LANE_EXPERTS ((EXPERTS + 31) / 32)
#define LANE_KEYS (LANE_EXPERTS <= 1 ? 1 : LANE_EXPERTS <= 2 ? 2 : LANE_EXPERTS <= 4 ? 4 : LANE_EXPERTS <= 8 ? 8 : LANE_EXPERTS <= 16 ? 16 : 32)
#define CANDIDATES 64
// The same one by one.
__device__ __forceinline__ void top_k_of_many(const u32 (&keys)[LANE_KEYS], int lane, u32& index, float& value) {
    u32 taken = 0;  // a bit per key of this lane
#pragma unroll 1
    for (int k = 0; k < TOP_K; k++) {
        u32 best = 0, at = 0;
#pragma unroll
        for (int i = 0; i < LANE_KEYS; i++) {
            if ((taken >> i & 1) || keys[i] <= best) continue;
            best = keys[i];
            at = i;
        }
        const u32 top = __reduce_max_sync(FULL, best);
        const int winner = __ffs(__ballot_sync(FULL, best == top)) - 1;
        const u32 found = winner * LANE_EXPERTS + __shfl_sync(FULL, at, winner);
        if (lane == winner) taken |= 1u << at;
        if (lane == k) {
            index = min(found, (u32)EXPERTS - 1);
            value = value_of_key(top);
        }
    }
}
// Few keys are at least as large as the TOP_K-th largest of the lanes' largest: these are ranked by counting. `scratch`: CANDIDATES
// and TOP_K more, of this warp.
__device__ __forceinline__ void top_k_of_keys(const u32 (&keys)[LANE_KEYS], int lane, u64* scratch, u32& index, float& value) {
    u32 best[LANE_KEYS], least = 0;
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) best[i] = keys[i];
#pragma unroll
    for (int width = LANE_KEYS / 2; width >= 1; width /= 2)
#pragma unroll
        for (int i = 0; i < width; i++) best[i] = max(best[i], best[i + width]);
#pragma unroll
    for (int k = 0; k < TOP_K; k++) {
        least = __reduce_max_sync(FULL, best[0]);
        best[0] = best[0] == least ? 0u : best[0];
    }
    u32 n = 0;
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) {
        const bool is = keys[i] >= least;
        const u32 who = __ballot_sync(FULL, is), at = n + __popc(who & ((1u << lane) - 1));
        // Larger keys first, of equal ones the smaller index.
        if (is && at < CANDIDATES) scratch[at] = (u64)keys[i] << 32 | (u32)~(lane * LANE_EXPERTS + i);
        n += __popc(who);
    }
    index = 0;
    value = 0;
    if (n > CANDIDATES) {
        top_k_of_many(keys, lane, index, value);
        return;
    }
    __syncwarp();
    u64* chosen = scratch + CANDIDATES;
#pragma unroll 1
    for (u32 i = lane; i < n; i += 32) {
        const u64 mine = scratch[i];
        u32 rank = 0;
#pragma unroll 4
        for (u32 j = 0; j < n; j++) rank += scratch[j] > mine;
        if (rank < TOP_K) chosen[rank] = mine;
    }
    __syncwarp();
    if (lane < TOP_K) {
        const u64 mine = chosen[lane];
        index = min(~(u32)mine, (u32)EXPERTS - 1);
        value = value_of_key((u32)(mine >> 32));
    }
    __syncwarp();
}

// Weights of the chosen experts: softmax over all, renormalised over the chosen, is softmax over the chosen.
__device__ __forceinline__ float top_k_weight(float value, int lane) {
    const float top = __shfl_sync(FULL, value, 0);
    const float e = lane < TOP_K ? expf(value - top) : 0.0f;
    return e / warp_sum(e);
}

// Chooses a row's experts by one warp: lane k < TOP_K gets the k-th, and all weights go to `weights` (TOP_K and the shared
// expert's). `logit` gives those of experts, and at EXPERTS the shared gate's. Logits that are NaN come last, each expert once.
template <typename Logit> __device__ __forceinline__ u32 choose(Logit logit, int lane, u64* scratch, float* weights) {
    u32 keys[LANE_KEYS], index;
    float value;
#pragma unroll
    for (int i = 0; i < LANE_KEYS; i++) {
        const u32 expert = lane * LANE_EXPERTS + i;
        keys[i] = i < LANE_EXPERTS && expert < EXPERTS ? max(order_key(logit(expert)), 1u) : 0u;
    }
    top_k_of_keys(keys, lane, scratch, index, value);
    const float weight = top_k_weight(value, lane);
    if (lane < TOP_K) weights[lane] = weight;
    if (lane == TOP_K) weights[TOP_K] = sigmoid(logit(EXPERTS));
    return index;
}
