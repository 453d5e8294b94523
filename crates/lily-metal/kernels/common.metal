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

/// Adds to `sums` the products of inputs at `col` with `count` rows of a matrix from `row` on.
template <uint BITS>
inline void multiply(thread float* sums, const thread Inputs& in, Matrix m, ulong row, uint count, uint cols, uint col);

/// A code is used where it lies in a word, so the input is divided by what that multiplies it with, which is exact down to 2^-98.
template <>
inline void multiply<4>(thread float* sums, const thread Inputs& in, Matrix m, ulong row, uint count, uint cols, uint col) {
    constexpr uint CODES = 8;
    float x[INPUTS];
    float place = 1.0f;
    for (uint i = 0; i < INPUTS; ++i) {
        place = i % CODES == 0 ? 1.0f : place * (1.0f / 16.0f);
        x[i] = in.x[i] * place;
    }
    const ulong first = row * cols + col;
    const device uchar* codes = m.codes + first / 2;
    const device bfloat* scales = m.scales + first / GROUP;
    const device bfloat* biases = m.biases + first / GROUP;
    for (uint r = 0; r < ROWS; ++r) {
        // A row that isn't there is read as the last one, and its sum not used.
        const uint at = min(r, count - 1) * cols;
        const device uint* words = (const device uint*)(codes + at / 2);
        float dot = 0.0f;
        for (uint i = 0; i < INPUTS / CODES; ++i) {
            const uint word = words[i];
            for (uint j = 0; j < CODES; ++j) {
                dot += x[i * CODES + j] * float(word & (15u << (4 * j)));
            }
        }
        sums[r] += float(scales[at / GROUP]) * dot + float(biases[at / GROUP]) * in.sum;
    }
}

template <>
inline void multiply<8>(thread float* sums, const thread Inputs& in, Matrix m, ulong row, uint count, uint cols, uint col) {
    const ulong first = row * cols + col;
    const device uchar* codes = m.codes + first;
    const device bfloat* scales = m.scales + first / GROUP;
    const device bfloat* biases = m.biases + first / GROUP;
    for (uint r = 0; r < ROWS; ++r) {
        const uint at = min(r, count - 1) * cols;
        const device uint* words = (const device uint*)(codes + at);
        float dot = 0.0f;
        for (uint i = 0; i < INPUTS / 4; ++i) {
            const uint word = words[i];
            dot += in.x[4 * i] * float(word & 0xff);
            dot += in.x[4 * i + 1] * float(word >> 8 & 0xff);
            dot += in.x[4 * i + 2] * float(word >> 16 & 0xff);
            dot += in.x[4 * i + 3] * float(word >> 24);
        }
        sums[r] += float(scales[at / GROUP]) * dot + float(biases[at / GROUP]) * in.sum;
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
