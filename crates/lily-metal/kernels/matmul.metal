// Many rows times one matrix: `norm_rows`, `matmul`, `matmul_16`, `matmul_router`, `matmul_router_32`, `matmul_few`.
//
// A tile is 64 outputs of 16 * BLOCKS rows. Its four SIMD-groups have a quarter of it each, as 8x8 matrices; inputs and
// dequantised weights come through threadgroup memory, TILE_COLS inputs at a time. All of it is f32, as in the kernels of one
// token: an Apple GPU multiplies f32 matrices as fast as f16 ones.

constant constexpr uint TILE_THREADS = 128;
constant constexpr uint TILE_OUTS = 64;
constant constexpr uint TILE_COLS = 32;
/// Numbers from one row of a tile to the next: four more than needed, so that rows begin in different banks.
constant constexpr uint TILE_STRIDE = TILE_COLS + 4;
/// 8x8 matrices beside each other that a SIMD-group has.
constant constexpr uint OUT_BLOCKS = 4;
/// Rows of `matmul_few`.
constant constexpr uint FEW = 8;
/// Inputs that a lane of it takes at a time: a word of codes. More would take more registers than 8 rows leave.
constant constexpr uint FEW_INPUTS = 8;

/// What is multiplied: y = W x for each of `rows` rows of `cols` inputs; y has `outs` values a row. With `add`, what is in y is added.
struct Product {
    uint rows;
    uint cols;
    uint outs;
    uint add;
};

/// h = norm(x), row by row, a SIMD-group each; a lane takes 4 values at a time. Rows are multiples of 256 bytes.
[[max_total_threads_per_threadgroup(128)]]
kernel void norm_rows(
    const device float* x [[buffer(0)]],
    const device float* gains [[buffer(1)]],
    const device uint* rows [[buffer(2)]],
    device float* h [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint row = group * 4 + simdgroup;
    if (row >= rows[0]) {
        return;
    }
    const device float4* in = (const device float4*)(x + row * HIDDEN);
    const device float4* gain = (const device float4*)gains;
    device float4* out = (device float4*)(h + row * HIDDEN);
    float squares = 0.0f;
    for (uint i = lane; i < HIDDEN / 4; i += LANES) {
        const float4 four = in[i];
        squares += four.x * four.x + four.y * four.y + four.z * four.z + four.w * four.w;
    }
    const float factor = norm_factor(squares, HIDDEN);
    for (uint i = lane; i < HIDDEN / 4; i += LANES) {
        const float4 by = gain[i];
        float4 four = in[i];
        four.x = four.x * factor * by.x;
        four.y = four.y * factor * by.y;
        four.z = four.z * factor * by.z;
        four.w = four.w * factor * by.w;
        out[i] = four;
    }
}

/// Values of 16 inputs from `at` on.
template <uint BITS> inline void dequantise(Matrix m, ulong at, threadgroup float* to) {
    const float scale = float(m.scales[at / GROUP]);
    const float bias = float(m.biases[at / GROUP]);
    const device uint* words = (const device uint*)(m.codes + at * BITS / 8);
    constexpr uint CODES = 32 / BITS;
    for (uint i = 0; i < INPUTS / CODES; ++i) {
        half codes[CODES];
        codes_of<BITS>(words[i], codes);
        for (uint j = 0; j < CODES; ++j) {
            to[i * CODES + j] = scale * float(codes[j]) + bias;
        }
    }
}

template <> inline void dequantise<16>(Matrix m, ulong at, threadgroup float* to) {
    const device bfloat* values = (const device bfloat*)m.codes + at;
    for (uint i = 0; i < INPUTS; ++i) {
        to[i] = float(values[i]);
    }
}

/// Adds the products of a tile to `sums`. A thread brings 4 inputs of rows `thread_index / 8 + 16 * b`, which are `sources[b]` of x,
/// `pitch` apart, or zeros where there is none; and 16 weights of row `row` of m.
template <uint BLOCKS, uint BITS>
inline void multiply_tile(
    thread simdgroup_float8x8* sums, const device float* x, const thread uint* sources, uint pitch, Matrix m, ulong row, uint cols,
    threadgroup float* tile, uint thread_index, uint simdgroup
) {
    threadgroup float* inputs = tile;
    threadgroup float* weights = tile + 16 * BLOCKS * TILE_STRIDE;
    threadgroup float* my_inputs = inputs + thread_index / 8 * TILE_STRIDE + thread_index % 8 * 4;
    threadgroup float* my_weights = weights + thread_index / 2 * TILE_STRIDE + thread_index % 2 * INPUTS;
    for (uint col = 0; col < cols; col += TILE_COLS) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint b = 0; b < BLOCKS; ++b) {
            const ulong from = ulong(sources[b]) * pitch + col + thread_index % 8 * 4;
            for (uint i = 0; i < 4; ++i) {
                my_inputs[16 * b * TILE_STRIDE + i] = sources[b] == NONE ? 0.0f : x[from + i];
            }
        }
        dequantise<BITS>(m, row * cols + col + thread_index % 2 * INPUTS, my_weights);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint k = 0; k < TILE_COLS; k += 8) {
            simdgroup_float8x8 in[BLOCKS];
            for (uint b = 0; b < BLOCKS; ++b) {
                simdgroup_load(in[b], inputs + (simdgroup / 2 * BLOCKS + b) * 8 * TILE_STRIDE + k, TILE_STRIDE);
            }
            for (uint o = 0; o < OUT_BLOCKS; ++o) {
                simdgroup_float8x8 w;
                const threadgroup float* from = weights + (simdgroup % 2 * OUT_BLOCKS + o) * 8 * TILE_STRIDE + k;
                simdgroup_load(w, from, TILE_STRIDE, ulong2(0, 0), true);
                for (uint b = 0; b < BLOCKS; ++b) {
                    simdgroup_multiply_accumulate(sums[b * OUT_BLOCKS + o], in[b], w, sums[b * OUT_BLOCKS + o]);
                }
            }
        }
    }
}

/// Leaves the sums of a tile in threadgroup memory, `[16 * BLOCKS, TILE_OUTS]`, for all threads.
template <uint BLOCKS> inline void gather_tile(thread simdgroup_float8x8* sums, threadgroup float* tile, uint simdgroup) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint b = 0; b < BLOCKS; ++b) {
        for (uint o = 0; o < OUT_BLOCKS; ++o) {
            const uint at = (simdgroup / 2 * BLOCKS + b) * 8 * TILE_OUTS + (simdgroup % 2 * OUT_BLOCKS + o) * 8;
            simdgroup_store(sums[b * OUT_BLOCKS + o], tile + at, TILE_OUTS);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

/// One tile of a product. Outputs behind the last one are read as that one, and not stored.
template <uint BLOCKS, uint BITS>
inline void product_tile(
    const device float* x, Matrix m, const device Product* p, device float* y, threadgroup float* tile, uint2 group,
    uint thread_index, uint simdgroup
) {
    const uint first_row = group.y * 16 * BLOCKS;
    const uint first_out = group.x * TILE_OUTS;
    uint sources[BLOCKS];
    for (uint b = 0; b < BLOCKS; ++b) {
        const uint row = first_row + thread_index / 8 + 16 * b;
        sources[b] = row < p->rows ? row : NONE;
    }
    simdgroup_float8x8 sums[BLOCKS * OUT_BLOCKS];
    for (uint i = 0; i < BLOCKS * OUT_BLOCKS; ++i) {
        sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    const ulong mine = min(first_out + thread_index / 2, p->outs - 1);
    multiply_tile<BLOCKS, BITS>(sums, x, sources, p->cols, m, mine, p->cols, tile, thread_index, simdgroup);
    gather_tile<BLOCKS>(sums, tile, simdgroup);
    for (uint i = thread_index; i < 16 * BLOCKS * TILE_OUTS; i += TILE_THREADS) {
        const uint row = first_row + i / TILE_OUTS;
        const uint out = first_out + i % TILE_OUTS;
        if (row < p->rows && out < p->outs) {
            device float* to = y + ulong(row) * p->outs + out;
            to[0] = p->add != 0 ? to[0] + tile[i] : tile[i];
        }
    }
}

/// A product, 64 rows a tile.
[[max_total_threads_per_threadgroup(128)]]
kernel void matmul(
    const device float* x [[buffer(0)]],
    const device uchar* codes [[buffer(1)]],
    const device bfloat* scales [[buffer(2)]],
    const device bfloat* biases [[buffer(3)]],
    const device Product* product [[buffer(4)]],
    device float* y [[buffer(5)]],
    threadgroup float* tile [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]
) {
    const Matrix m = {codes, scales, biases};
    product_tile<4, MATRIX_BITS>(x, m, product, y, tile, group, thread_index, simdgroup);
}

/// A product, 16 rows a tile: for so few that most of 64 would be zeros.
[[max_total_threads_per_threadgroup(128)]]
kernel void matmul_16(
    const device float* x [[buffer(0)]],
    const device uchar* codes [[buffer(1)]],
    const device bfloat* scales [[buffer(2)]],
    const device bfloat* biases [[buffer(3)]],
    const device Product* product [[buffer(4)]],
    device float* y [[buffer(5)]],
    threadgroup float* tile [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]
) {
    const Matrix m = {codes, scales, biases};
    product_tile<1, MATRIX_BITS>(x, m, product, y, tile, group, thread_index, simdgroup);
}

/// A product with a router's matrix, 16 rows a tile: there are few outputs.
[[max_total_threads_per_threadgroup(128)]]
kernel void matmul_router(
    const device float* x [[buffer(0)]],
    const device uchar* codes [[buffer(1)]],
    const device bfloat* scales [[buffer(2)]],
    const device bfloat* biases [[buffer(3)]],
    const device Product* product [[buffer(4)]],
    device float* y [[buffer(5)]],
    threadgroup float* tile [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]
) {
    const Matrix m = {codes, scales, biases};
    product_tile<1, ROUTER_BITS>(x, m, product, y, tile, group, thread_index, simdgroup);
}

/// A product with a router's matrix, 32 rows a tile: the fewer of its weights a product has to itself, the
/// more of the time goes to threadgroup memory.
[[max_total_threads_per_threadgroup(128)]]
kernel void matmul_router_32(
    const device float* x [[buffer(0)]],
    const device uchar* codes [[buffer(1)]],
    const device bfloat* scales [[buffer(2)]],
    const device bfloat* biases [[buffer(3)]],
    const device Product* product [[buffer(4)]],
    device float* y [[buffer(5)]],
    threadgroup float* tile [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]
) {
    const Matrix m = {codes, scales, biases};
    product_tile<2, ROUTER_BITS>(x, m, product, y, tile, group, thread_index, simdgroup);
}

/// Values of FEW_INPUTS inputs from `at` on.
template <uint BITS> inline void few_values(Matrix m, ulong at, thread float* to) {
    const uint word = *(const device uint*)(m.codes + at / 2);
    const float scale = float(m.scales[at / GROUP]);
    const float bias = float(m.biases[at / GROUP]);
    half codes[FEW_INPUTS];
    codes_of<BITS>(word, codes);
    for (uint i = 0; i < FEW_INPUTS; ++i) {
        to[i] = scale * float(codes[i]) + bias;
    }
}

template <> inline void few_values<16>(Matrix m, ulong at, thread float* to) {
    const device bfloat* values = (const device bfloat*)m.codes + at;
    for (uint i = 0; i < FEW_INPUTS; ++i) {
        to[i] = float(values[i]);
    }
}

/// As `matmul`, of at most FEW rows and a multiple of ROWS outputs: a SIMD-group takes the codes of ROWS outputs apart once, and
/// multiplies all rows with them.
[[max_total_threads_per_threadgroup(128)]]
kernel void matmul_few(
    const device float* x [[buffer(0)]],
    const device uchar* codes [[buffer(1)]],
    const device bfloat* scales [[buffer(2)]],
    const device bfloat* biases [[buffer(3)]],
    const device Product* product [[buffer(4)]],
    device float* y [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint out = (group * PRODUCT_SIMDGROUPS + simdgroup) * ROWS;
    const uint rows = product->rows;
    const uint cols = product->cols;
    if (out >= product->outs) {
        return;
    }
    const Matrix m = {codes, scales, biases};
    float sums[FEW][ROWS] = {{0.0f}};
    for (uint col = lane * FEW_INPUTS; col < cols; col += LANES * FEW_INPUTS) {
        float values[ROWS][FEW_INPUTS];
        for (uint r = 0; r < ROWS; ++r) {
            few_values<MATRIX_BITS>(m, ulong(out + r) * cols + col, values[r]);
        }
        for (uint t = 0; t < FEW; ++t) {
            if (t < rows) {
                const device float4* fours = (const device float4*)(x + t * cols + col);
                for (uint i = 0; i < FEW_INPUTS / 4; ++i) {
                    const float4 four = fours[i];
                    for (uint r = 0; r < ROWS; ++r) {
                        const thread float* by = values[r] + 4 * i;
                        sums[t][r] += four.x * by[0] + four.y * by[1] + four.z * by[2] + four.w * by[3];
                    }
                }
            }
        }
    }
    for (uint t = 0; t < FEW; ++t) {
        if (t < rows) {
            for (uint r = 0; r < ROWS; ++r) {
                const float sum = simd_sum(sums[t][r]);
                if (lane == r) {
                    device float* to = y + ulong(t) * product->outs + out + r;
                    to[0] = product->add != 0 ? to[0] + sum : sum;
                }
            }
        }
    }
}
