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

/// Inputs `at` to `at + 15` as they are.
inline Inputs plain_inputs(const device float* x, uint at) {
    Inputs in;
    in.sum = 0.0f;
    for (uint i = 0; i < INPUTS; ++i) {
        in.x[i] = x[at + i];
        in.sum += in.x[i];
    }
    return in;
}

/// Inputs times the gains of a norm; adds their own squares to `squares`. The norm's factor is applied to the product.
inline Inputs gained_inputs(const device float* x, const device float* gains, uint at, thread float& squares) {
    Inputs in;
    in.sum = 0.0f;
    for (uint i = 0; i < INPUTS; ++i) {
        const float value = x[at + i];
        squares += value * value;
        in.x[i] = value * gains[at + i];
        in.sum += in.x[i];
    }
    return in;
}

/// The factor of an RMS norm over the inputs whose squares the lanes have.
inline float norm_factor(float squares, uint width) {
    return rsqrt(simd_sum(squares) / float(width) + NORM_EPS);
}

/// Adds to `sums` the products of inputs at `col` with `count` rows of a matrix from `row` on.
template <uint BITS>
inline void multiply(thread float* sums, const thread Inputs& in, Matrix m, ulong row, uint count, uint cols, uint col);

/// A code is used where it lies in a 16-bit word, so the input is divided by what that multiplies it with, which is exact.
template <>
inline void multiply<4>(thread float* sums, const thread Inputs& in, Matrix m, ulong row, uint count, uint cols, uint col) {
    float x[INPUTS];
    for (uint i = 0; i < INPUTS; i += 4) {
        x[i] = in.x[i];
        x[i + 1] = in.x[i + 1] * (1.0f / 16.0f);
        x[i + 2] = in.x[i + 2] * (1.0f / 256.0f);
        x[i + 3] = in.x[i + 3] * (1.0f / 4096.0f);
    }
    for (uint r = 0; r < ROWS; ++r) {
        // A row that isn't there is read as the last one, and its sum not used.
        const ulong at = (row + min(r, count - 1)) * cols + col;
        const device ushort* words = (const device ushort*)(m.codes + at / 2);
        float dot = 0.0f;
        for (uint i = 0; i < INPUTS / 4; ++i) {
            const uint word = words[i];
            dot += x[4 * i] * float(word & 0x000f);
            dot += x[4 * i + 1] * float(word & 0x00f0);
            dot += x[4 * i + 2] * float(word & 0x0f00);
            dot += x[4 * i + 3] * float(word & 0xf000);
        }
        sums[r] += float(m.scales[at / GROUP]) * dot + float(m.biases[at / GROUP]) * in.sum;
    }
}

template <>
inline void multiply<8>(thread float* sums, const thread Inputs& in, Matrix m, ulong row, uint count, uint cols, uint col) {
    for (uint r = 0; r < ROWS; ++r) {
        const ulong at = (row + min(r, count - 1)) * cols + col;
        const device uint* words = (const device uint*)(m.codes + at);
        float dot = 0.0f;
        for (uint i = 0; i < INPUTS / 4; ++i) {
            const uint word = words[i];
            dot += in.x[4 * i] * float(word & 0xff);
            dot += in.x[4 * i + 1] * float(word >> 8 & 0xff);
            dot += in.x[4 * i + 2] * float(word >> 16 & 0xff);
            dot += in.x[4 * i + 3] * float(word >> 24);
        }
        sums[r] += float(m.scales[at / GROUP]) * dot + float(m.biases[at / GROUP]) * in.sum;
    }
}

template <>
inline void multiply<16>(thread float* sums, const thread Inputs& in, Matrix m, ulong row, uint count, uint cols, uint col) {
    for (uint r = 0; r < ROWS; ++r) {
        const device bfloat* values = (const device bfloat*)m.codes + (row + min(r, count - 1)) * cols + col;
        float dot = 0.0f;
        for (uint i = 0; i < INPUTS; ++i) {
            dot += in.x[i] * float(values[i]);
        }
        sums[r] += dot;
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
        multiply<MATRIX_BITS>(sums, in, m, row, count, HIDDEN, col);
    }
    const float factor = norm_factor(squares, HIDDEN);
    for (uint r = 0; r < ROWS; ++r) {
        sums[r] = simd_sum(sums[r]) * factor;
    }
}
