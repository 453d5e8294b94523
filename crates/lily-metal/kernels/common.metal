// What the kernels share. Shapes are macros, set when the library is compiled: see `source.rs`.
//
// Matrices lie as their files have them, row by row: codes of 4 or 8 bits, the first in the lowest bits, and for every 64 inputs of
// a row a scale and a bias, `value = scale * code + bias`, as MLX writes them; or values of bf16, which are called 16 bits here. Of
// routers the bits are ROUTER_BITS, of all others MATRIX_BITS. A SIMD-group multiplies ROWS rows. A lane takes INPUTS inputs at a
// time, always within one group of 64, and keeps them in registers for all rows.
#include <metal_stdlib>
using namespace metal;

constant constexpr uint LANES = 32;
constant constexpr uint ROWS = 4;
constant constexpr uint INPUTS = 16;
constant constexpr uint GROUP = 64;
/// Inputs that the lanes of a SIMD-group take together.
constant constexpr uint STRIDE = LANES * INPUTS;
/// SIMD-groups of a threadgroup that multiplies; it does so many times ROWS rows.
constant constexpr uint PRODUCT_SIMDGROUPS = 4;

/// No index.
constant constexpr uint NONE = 0xffffffffu;

/// A matrix. Where it has values of bf16 they are at `codes`, and nothing is at the others.
struct Matrix {
    const device uchar* codes;
    const device bfloat* scales;
    const device bfloat* biases;
};

/// A lane's inputs, and their sum, which meets the biases.
struct Inputs {
    float x[INPUTS];
    float sum;
};

inline float silu(float x) {
    return x / (1.0f + exp(-x));
}

inline float sigmoid(float x) {
    return 1.0f / (1.0f + exp(-x));
}

/// Inputs `at` to `at + 15` as they are. Four of them a load: lanes are 64 bytes apart, so that each load of a SIMD-group touches
/// all of its 2 KiB, however little it brings. Rows are multiples of 256 bytes and begin at multiples of 16.
inline Inputs plain_inputs(const device float* x, uint at) {
    const device float4* fours = (const device float4*)(x + at);
    Inputs in;
    in.sum = 0.0f;
    for (uint i = 0; i < INPUTS / 4; ++i) {
        const float4 four = fours[i];
        in.x[4 * i] = four.x;
        in.x[4 * i + 1] = four.y;
        in.x[4 * i + 2] = four.z;
        in.x[4 * i + 3] = four.w;
        in.sum = in.sum + four.x + four.y + four.z + four.w;
    }
    return in;
}

/// Multiplies inputs by one factor.
inline void scale_inputs(thread Inputs& in, float factor) {
    for (uint i = 0; i < INPUTS; ++i) {
        in.x[i] *= factor;
    }
    in.sum *= factor;
}

/// Inputs times the gains of a norm; adds their own squares to `squares`. The norm's factor is applied to the product.
inline Inputs gained_inputs(const device float* x, const device float* gains, uint at, thread float& squares) {
    Inputs in = plain_inputs(x, at);
    const device float4* fours = (const device float4*)(gains + at);
    in.sum = 0.0f;
    for (uint i = 0; i < INPUTS / 4; ++i) {
        const float4 four = fours[i];
        const float gain[4] = {four.x, four.y, four.z, four.w};
        for (uint j = 0; j < 4; ++j) {
            squares += in.x[4 * i + j] * in.x[4 * i + j];
            in.x[4 * i + j] *= gain[j];
            in.sum += in.x[4 * i + j];
        }
    }
    return in;
}

/// The factor of an RMS norm over the inputs whose squares the lanes have.
inline float norm_factor(float squares, uint width) {
    return rsqrt(simd_sum(squares) / float(width) + NORM_EPS);
}

/// The eight codes of a word as halves: those at even places 1024 too large, those at odd ones 64. `codes[i]` has the codes i and i + 4.
///
/// Shifting each code down and making it a float would take eight clocks of the one unit in four that can. Instead, a code is set into
/// the lower bits of a half that is 1024, or, where it lies four bits higher, of one that is 64: two codes at a time.
inline void raised_codes(uint word, thread half2* codes) {
    const uint later = word >> 8;
    codes[0] = as_type<half2>((word & 0x000f000fu) | 0x64006400u);
    codes[1] = as_type<half2>((word & 0x00f000f0u) | 0x54005400u);
    codes[2] = as_type<half2>((later & 0x000f000fu) | 0x64006400u);
    codes[3] = as_type<half2>((later & 0x00f000f0u) | 0x54005400u);
}

/// The codes of a word of 4 or 8 bits each, exactly: a half has 11 bits.
template <uint BITS> inline void codes_of(uint word, thread half* codes);

template <> inline void codes_of<4>(uint word, thread half* codes) {
    half2 raised[4];
    raised_codes(word, raised);
    for (uint i = 0; i < 4; ++i) {
        const half2 two = raised[i] - as_type<half2>(i % 2 == 0 ? 0x64006400u : 0x54005400u);
        codes[i] = two.x;
        codes[i + 4] = two.y;
    }
}

template <> inline void codes_of<8>(uint word, thread half* codes) {
    for (uint i = 0; i < 2; ++i) {
        const half2 two = as_type<half2>((word >> (8 * i) & 0x00ff00ffu) | 0x64006400u) - as_type<half2>(0x64006400u);
        codes[i] = two.x;
        codes[i + 2] = two.y;
    }
}

/// A matrix without the first `at` values.
template <uint BITS> inline Matrix matrix_from(Matrix m, ulong at) {
    return {m.codes + at * BITS / 8, m.scales + at / GROUP, m.biases + at / GROUP};
}

/// Product of a lane's inputs with the values from `at` on.
template <uint BITS> inline float product_at(const thread Inputs& in, Matrix m, uint at) {
    constexpr uint CODES = 32 / BITS;
    const device uint* words = (const device uint*)(m.codes + at * BITS / 8);
    float dot = 0.0f;
    for (uint i = 0; i < INPUTS / CODES; ++i) {
        half codes[CODES];
        codes_of<BITS>(words[i], codes);
        for (uint j = 0; j < CODES; ++j) {
            dot += in.x[i * CODES + j] * float(codes[j]);
        }
    }
    return float(m.scales[at / GROUP]) * dot + float(m.biases[at / GROUP]) * in.sum;
}

template <> inline float product_at<16>(const thread Inputs& in, Matrix m, uint at) {
    const device bfloat* values = (const device bfloat*)m.codes + at;
    float dot = 0.0f;
    for (uint i = 0; i < INPUTS; ++i) {
        dot += in.x[i] * float(values[i]);
    }
    return dot;
}

/// Adds to `sums` the products of inputs at `col` with the rows of a matrix from `row` on: MOST rows, of which there are `count`.
template <uint BITS, uint MOST>
inline void multiply(thread float* sums, const thread Inputs& in, Matrix m, ulong row, uint count, uint cols, uint col) {
    const Matrix here = matrix_from<BITS>(m, row * cols + col);
    for (uint r = 0; r < MOST; ++r) {
        // A row that isn't there is read as the last one, and its sum not used.
        sums[r] += product_at<BITS>(in, here, min(r, count - 1) * cols);
    }
}

/// Products of ROWS rows with the normed x, `[HIDDEN]`; all lanes have the sums.
inline void normed_product(
    thread float* sums, const device float* x, const device float* gains, Matrix m, ulong row, uint count, uint lane
) {
    float squares = 0.0f;
    for (uint r = 0; r < ROWS; ++r) {
        sums[r] = 0.0f;
    }
    for (uint col = lane * INPUTS; col < HIDDEN; col += STRIDE) {
        const Inputs in = gained_inputs(x, gains, col, squares);
        multiply<MATRIX_BITS, ROWS>(sums, in, m, row, count, HIDDEN, col);
    }
    const float factor = norm_factor(squares, HIDDEN);
    for (uint r = 0; r < ROWS; ++r) {
        sums[r] = simd_sum(sums[r]) * factor;
    }
}
