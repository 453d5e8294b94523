// Many rows times one matrix, with the tensor operations of Metal 4: `matmul_tensor`, `matmul_tensor_32`. They do what `matmul` and
// `matmul_16` do, but inputs and weights are rounded to half; sums are f32.
//
// A tile is TENSOR_OUTS outputs of 32 or 64 rows, which the four SIMD-groups multiply together; inputs and dequantised weights come
// through threadgroup memory, a group of 64 inputs at a time. Which sums a thread has is the GPU's secret: each is asked for its place.
//
// 64 rows: 8,192 B of inputs and as many of weights. They are multiplied in 512 clocks (1,024 operations a clock and core); a thread
// brings 32 inputs and takes 32 weights apart for it, some 280 instructions, which other threadgroups' products hide.

constant constexpr uint TENSOR_OUTS = 64;
/// Inputs at a time.
constant constexpr uint TENSOR_COLS = GROUP;
/// Inputs beside each other that a thread brings.
constant constexpr uint TENSOR_RUN = 4;
/// Threads that bring a row.
constant constexpr uint TENSOR_RUNS = TENSOR_COLS / TENSOR_RUN;
/// Rows that the threads bring at once.
constant constexpr uint TENSOR_STEP = TILE_THREADS / TENSOR_RUNS;

/// Inputs or weights in threadgroup memory, row by row.
typedef tensor<threadgroup half, dextents<int, 2>, tensor_inline> HalfTile;

/// Inputs [M, TENSOR_COLS] times weights [TENSOR_OUTS, TENSOR_COLS], transposed; added to what is there.
template <int M>
using TensorProduct = mpp::tensor_ops::matmul2d<
    mpp::tensor_ops::matmul2d_descriptor(
        M, int(TENSOR_OUTS), int(TENSOR_COLS), false, true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate
    ),
    execution_simdgroups<4>>;

inline HalfTile half_tile(threadgroup half* at, uint rows) {
    return HalfTile(at, dextents<int, 2>(int(TENSOR_COLS), int(rows)), array<int, 2>{1, int(TENSOR_COLS)});
}

/// All elements become 0.
template <class Sums> inline void clear_sums(thread Sums& sums) {
#pragma clang loop unroll(full)
    for (ushort i = 0; i < sums.get_capacity(); ++i) {
        if (sums.is_valid_element(i)) {
            sums[i] = 0.0f;
        }
    }
}

/// Brings the inputs from `col` on. A thread has TENSOR_RUN of rows `thread_index / TENSOR_RUNS + TENSOR_STEP * b`, which are
/// `sources[b]` of x, `pitch` apart, or zeros where there is none.
template <uint M>
inline void bring_inputs(
    threadgroup half* inputs, const device float* x, const thread uint* sources, uint pitch, uint col, uint thread_index
) {
    const uint mine = thread_index % TENSOR_RUNS * TENSOR_RUN;
    for (uint b = 0; b < M / TENSOR_STEP; ++b) {
        const ulong from = ulong(sources[b]) * pitch + col + mine;
        threadgroup half* to = inputs + (thread_index / TENSOR_RUNS + TENSOR_STEP * b) * TENSOR_COLS + mine;
        for (uint i = 0; i < TENSOR_RUN; ++i) {
            to[i] = half(sources[b] == NONE ? 0.0f : x[from + i]);
        }
    }
}

/// Brings a group of weights: a thread half of one of row `row` of m, from input `col` on, `row` being that of its output.
inline void bring_weights(threadgroup half* weights, Matrix m, ulong row, uint cols, uint col, uint thread_index) {
    const uint mine = thread_index % 2 * (TENSOR_COLS / 2);
    threadgroup half* to = weights + thread_index / 2 * TENSOR_COLS + mine;
    for (uint i = 0; i < TENSOR_COLS / 2; i += INPUTS) {
        dequantise<MATRIX_BITS>(m, row * cols + col + mine + i, to + i);
    }
}

/// Products of a tile's M rows, as `bring_inputs` has them, with TENSOR_OUTS rows of m: see `bring_weights`.
template <uint M, class Sums>
inline void multiply_tensors(
    const thread TensorProduct<int(M)>& product, thread Sums& sums, const device float* x, const thread uint* sources, uint pitch,
    Matrix m, ulong row, uint cols, threadgroup half* tile, uint thread_index
) {
    threadgroup half* weights_at = tile + M * TENSOR_COLS;
    HalfTile inputs = half_tile(tile, M);
    HalfTile weights = half_tile(weights_at, TENSOR_OUTS);
    clear_sums(sums);
    for (uint col = 0; col < cols; col += TENSOR_COLS) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        bring_inputs<M>(tile, x, sources, pitch, col, thread_index);
        bring_weights(weights_at, m, row, cols, col, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        product.run(inputs, weights, sums);
    }
}

/// One tile of a product. Outputs behind the last one are read as that one, and not stored.
template <uint M>
inline void tensor_tile(
    const device float* x, Matrix m, const device Product* p, device float* y, threadgroup half* tile, uint2 group, uint thread_index
) {
    const uint first_row = group.y * M;
    const uint first_out = group.x * TENSOR_OUTS;
    uint sources[M / TENSOR_STEP];
    for (uint b = 0; b < M / TENSOR_STEP; ++b) {
        const uint row = first_row + thread_index / TENSOR_RUNS + TENSOR_STEP * b;
        sources[b] = row < p->rows ? row : NONE;
    }
    const ulong mine = min(first_out + thread_index / 2, p->outs - 1);
    TensorProduct<int(M)> product;
    auto sums = product.template get_destination_cooperative_tensor<HalfTile, HalfTile, float>();
    multiply_tensors<M>(product, sums, x, sources, p->cols, m, mine, p->cols, tile, thread_index);
#pragma clang loop unroll(full)
    for (ushort i = 0; i < sums.get_capacity(); ++i) {
        if (sums.is_valid_element(i)) {
            const auto place = sums.get_multidimensional_index(i);
            const uint out = first_out + uint(place[0]);
            const uint row = first_row + uint(place[1]);
            if (row < p->rows && out < p->outs) {
                device float* to = y + ulong(row) * p->outs + out;
                to[0] = p->add != 0 ? to[0] + sums[i] : sums[i];
            }
        }
    }
}

/// A product, 64 rows a tile.
[[max_total_threads_per_threadgroup(128)]]
kernel void matmul_tensor(
    const device float* x [[buffer(0)]],
    const device uchar* codes [[buffer(1)]],
    const device bfloat* scales [[buffer(2)]],
    const device bfloat* biases [[buffer(3)]],
    const device Product* product [[buffer(4)]],
    device float* y [[buffer(5)]],
    threadgroup half* tile [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    const Matrix m = {codes, scales, biases};
    tensor_tile<64>(x, m, product, y, tile, group, thread_index);
}

/// A product, 32 rows a tile: for so few that half of 64 would be zeros.
[[max_total_threads_per_threadgroup(128)]]
kernel void matmul_tensor_32(
    const device float* x [[buffer(0)]],
    const device uchar* codes [[buffer(1)]],
    const device bfloat* scales [[buffer(2)]],
    const device bfloat* biases [[buffer(3)]],
    const device Product* product [[buffer(4)]],
    device float* y [[buffer(5)]],
    threadgroup half* tile [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    const Matrix m = {codes, scales, biases};
    tensor_tile<32>(x, m, product, y, tile, group, thread_index);
}
