// Many rows times one matrix, with the tensor operations of Metal 4: `matmul_tensor`, `matmul_tensor_32`. They do what `matmul` and
// `matmul_16` do, but inputs and weights are rounded to half; sums are f32. What makes their inputs rounds them: `norm_rows_half`,
// `norm_rows_both`, `norm_heads_half`, `gate_heads_half`, `combine_half`.
//
// A tile is TENSOR_OUTS outputs of 32 or 64 rows, which the four SIMD-groups multiply together, a group of 64 inputs at a time. Inputs
// come straight from memory; behind the last row there is room for a tile, and what is read there meets no output that is stored.
// Dequantised weights come through threadgroup memory. Which sums a thread has is the GPU's secret: each is asked for its place.
//
// 64 rows are multiplied in 1,024 clocks (1,024 operations a clock and core); a thread takes 64 weights apart for it, some 230
// instructions, which other threadgroups' products hide.

constant constexpr uint TENSOR_OUTS = 128;
/// Inputs at a time.
constant constexpr uint TENSOR_COLS = GROUP;
/// Inputs beside each other that a thread brings, as halves of 16 bytes together: what a SIMD-group stores is 512 bytes in a row.
constant constexpr uint TENSOR_RUN = 8;
/// Threads that bring a row.
constant constexpr uint TENSOR_RUNS = TENSOR_COLS / TENSOR_RUN;
/// Rows that the threads bring at once.
constant constexpr uint TENSOR_STEP = TILE_THREADS / TENSOR_RUNS;

/// Inputs or weights in threadgroup memory, row by row; inputs in memory.
typedef tensor<threadgroup half, dextents<int, 2>, tensor_inline> HalfTile;
typedef tensor<device half, dextents<int, 2>, tensor_inline> HalfRows;

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

/// What is there is only read; but matmul2d takes no pointers to constants.
inline HalfRows half_rows(const device half* at, uint rows, uint pitch) {
    return HalfRows((device half*)at, dextents<int, 2>(int(TENSOR_COLS), int(rows)), array<int, 2>{1, int(pitch)});
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

/// Two numbers, rounded to half.
inline uint half_pair(float a, float b) {
    return as_type<uint>(half2(half(a), half(b)));
}

/// Eight numbers, rounded to half.
inline uint4 half_run(float4 a, float4 b) {
    uint4 run;
    run.x = half_pair(a.x, a.y);
    run.y = half_pair(a.z, a.w);
    run.z = half_pair(b.x, b.y);
    run.w = half_pair(b.z, b.w);
    return run;
}

/// Eight weights from `at` on, rounded to half.
///
/// What the codes are raised by is taken from the bias. That is exact, so that the weight is rounded as `dequantise` rounds it, unless
/// the bias is below a 32nd of the scale and not 0: then it may be off by 2^-14 of the scale.
inline uint4 half_weights(Matrix m, uint at) {
    if (MATRIX_BITS == 16) {
        const device bfloat* values = (const device bfloat*)m.codes + at;
        uint4 run;
        run.x = half_pair(float(values[0]), float(values[1]));
        run.y = half_pair(float(values[2]), float(values[3]));
        run.z = half_pair(float(values[4]), float(values[5]));
        run.w = half_pair(float(values[6]), float(values[7]));
        return run;
    }
    const float scale = float(m.scales[at / GROUP]);
    const float bias = float(m.biases[at / GROUP]);
    const float low = bias - 1024.0f * scale;
    const float high = bias - 64.0f * scale;
    half2 codes[4];
    raised_codes(*(const device uint*)(m.codes + at / 2), codes);
    uint4 run;
    run.x = half_pair(scale * float(codes[0].x) + low, scale * float(codes[1].x) + high);
    run.y = half_pair(scale * float(codes[2].x) + low, scale * float(codes[3].x) + high);
    run.z = half_pair(scale * float(codes[0].y) + low, scale * float(codes[1].y) + high);
    run.w = half_pair(scale * float(codes[2].y) + low, scale * float(codes[3].y) + high);
    return run;
}

/// Brings a group of weights, from input `col` on, of the first OUTS rows of m; of rows from `rows` on, those of the last one.
template <uint OUTS>
inline void bring_weights(threadgroup half* weights, Matrix m, uint rows, uint cols, uint col, uint thread_index) {
    const uint mine = thread_index % TENSOR_RUNS * TENSOR_RUN;
    for (uint r = thread_index / TENSOR_RUNS; r < OUTS; r += TENSOR_STEP) {
        const uint4 run = half_weights(m, min(r, rows - 1) * cols + col + mine);
        *(threadgroup uint4*)(weights + r * TENSOR_COLS + mine) = run;
    }
}

/// Products of M rows of x, `pitch` apart, with the first TENSOR_OUTS rows of m, of which there are `rows`.
template <uint M, class Sums>
inline void multiply_tensors(
    const thread TensorProduct<int(M)>& product, thread Sums& sums, const device half* x, uint pitch, Matrix m, uint rows, uint cols,
    threadgroup half* tile, uint thread_index
) {
    HalfTile weights = half_tile(tile, TENSOR_OUTS);
    clear_sums(sums);
    for (uint col = 0; col < cols; col += TENSOR_COLS) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        bring_weights<TENSOR_OUTS>(tile, m, rows, cols, col, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        HalfRows inputs = half_rows(x + col, M, pitch);
        product.run(inputs, weights, sums);
    }
}

/// One tile of a product. Outputs behind the last one are read as that one, and not stored.
template <uint M>
inline void tensor_tile(
    const device half* x, Matrix m, const device Product* p, device float* y, threadgroup half* tile, uint2 group, uint thread_index
) {
    const uint first_row = group.y * M;
    const uint first_out = group.x * TENSOR_OUTS;
    const device half* inputs = x + ulong(first_row) * p->cols;
    const Matrix from = matrix_from<MATRIX_BITS>(m, ulong(first_out) * p->cols);
    TensorProduct<int(M)> product;
    auto sums = product.template get_destination_cooperative_tensor<HalfRows, HalfTile, float>();
    multiply_tensors<M>(product, sums, inputs, p->cols, from, p->outs - first_out, p->cols, tile, thread_index);
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
    const device half* x [[buffer(0)]],
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
    const device half* x [[buffer(0)]],
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

/// h = norm(x) of a row, rounded to half; with PLAIN as it is too. A lane takes 8 values at a time.
template <bool PLAIN>
inline void norm_row(const device float* x, const device float* gains, device float* plain, device half* halves, uint lane) {
    const device float4* in = (const device float4*)x;
    const device float4* gain = (const device float4*)gains;
    float squares = 0.0f;
    for (uint i = lane; i < HIDDEN / 4; i += LANES) {
        const float4 four = in[i];
        squares += four.x * four.x + four.y * four.y + four.z * four.z + four.w * four.w;
    }
    const float factor = norm_factor(squares, HIDDEN);
    for (uint i = lane; i < HIDDEN / TENSOR_RUN; i += LANES) {
        float4 fours[2];
        for (uint j = 0; j < 2; ++j) {
            const float4 by = gain[2 * i + j];
            const float4 four = in[2 * i + j];
            fours[j].x = four.x * factor * by.x;
            fours[j].y = four.y * factor * by.y;
            fours[j].z = four.z * factor * by.z;
            fours[j].w = four.w * factor * by.w;
            if (PLAIN) {
                ((device float4*)plain)[2 * i + j] = fours[j];
            }
        }
        ((device uint4*)halves)[i] = half_run(fours[0], fours[1]);
    }
}

/// As `norm_rows`, rounded to half.
[[max_total_threads_per_threadgroup(128)]]
kernel void norm_rows_half(
    const device float* x [[buffer(0)]],
    const device float* gains [[buffer(1)]],
    const device uint* rows [[buffer(2)]],
    device half* halves [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const ulong row = group * 4 + simdgroup;
    if (row < rows[0]) {
        norm_row<false>(x + row * HIDDEN, gains, nullptr, halves + row * HIDDEN, lane);
    }
}

/// As `norm_rows`, and rounded to half too.
[[max_total_threads_per_threadgroup(128)]]
kernel void norm_rows_both(
    const device float* x [[buffer(0)]],
    const device float* gains [[buffer(1)]],
    const device uint* rows [[buffer(2)]],
    device float* h [[buffer(3)]],
    device half* halves [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const ulong row = group * 4 + simdgroup;
    if (row < rows[0]) {
        norm_row<true>(x + row * HIDDEN, gains, h + row * HIDDEN, halves + row * HIDDEN, lane);
    }
}

/// As `norm_heads`, rounded to half.
[[max_total_threads_per_threadgroup(256)]]
kernel void norm_heads_half(
    const device float* squares [[buffer(0)]],
    const device float* gated [[buffer(1)]],
    device half* halves [[buffer(2)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    const uint i = group.x * 256 + thread_index;
    if (i < VALUE_WIDTH) {
        const ulong at = ulong(group.y) * VALUE_WIDTH + i;
        halves[at] = half(gated[at] * head_factor(squares, group.y * VALUE_HEADS + i / VALUE_DIM));
    }
}

/// As `gate_heads`, rounded to half.
[[max_total_threads_per_threadgroup(256)]]
kernel void gate_heads_half(
    const device float* squares [[buffer(0)]],
    const device float* z [[buffer(1)]],
    const device float* gains [[buffer(2)]],
    const device float* gated [[buffer(3)]],
    device half* halves [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    const uint i = group.x * 256 + thread_index;
    if (i < VALUE_WIDTH) {
        halves[ulong(group.y) * VALUE_WIDTH + i] = half(gated_value(squares, z, gains, gated, group.y, i));
    }
}

/// As `combine`, rounded to half.
[[max_total_threads_per_threadgroup(256)]]
kernel void combine_half(
    const device float* queries [[buffer(0)]],
    const device float* parts [[buffer(1)]],
    const device float* weights [[buffer(2)]],
    const device uint* position [[buffer(3)]],
    const device Chunk* chunk [[buffer(4)]],
    device half* attended [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    merge_parts(queries, parts, weights, position, chunk, attended, group, thread_index, lane);
}
