// Attention of several tokens of one sequence, with the tensor operations of Metal 4: `attend_tensor`, which does what `attend_rows`
// does with twice as many rows a tile. Queries, weights, keys and values are bf16, as the cache is.
//
// A block is a page. For each a tile multiplies 2 x 32 x 64 x HEAD_DIM numbers, 2.10 MFLOP if that is 256: 2,048 clocks of a core. It
// reads 64 KB of keys and values for it, straight from the cache. Sums are multiplied only where a larger score was found: that is rare
// behind many positions, and a product with 1 is none.

/// Rows of a tile, and its tokens.
constant constexpr uint TENSOR_ROWS = 32;
constant constexpr uint TENSOR_TOKENS = TENSOR_ROWS / SHARED_BY;
/// Rows whose weights a SIMD-group makes.
constant constexpr uint TENSOR_SHARE = TENSOR_ROWS / TILE_SIMDGROUPS;
/// Positions of a page that a lane has.
constant constexpr uint HELD_POSITIONS = PAGE / LANES;

/// Queries or weights in threadgroup memory; a block of keys or values in the cache.
typedef tensor<threadgroup KV, dextents<int, 2>, tensor_inline> RowTile;
typedef tensor<device KV, dextents<int, 2>, tensor_inline> BlockTile;

/// Queries [TENSOR_ROWS, HEAD_DIM] times keys [PAGE, HEAD_DIM], transposed.
typedef mpp::tensor_ops::matmul2d<
    mpp::tensor_ops::matmul2d_descriptor(
        int(TENSOR_ROWS), int(PAGE), int(HEAD_DIM), false, true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply
    ),
    execution_simdgroups<4>>
    ScoreProduct;
/// Weights [TENSOR_ROWS, PAGE] times values [PAGE, HEAD_DIM], added to what is there.
typedef mpp::tensor_ops::matmul2d<
    mpp::tensor_ops::matmul2d_descriptor(
        int(TENSOR_ROWS), int(HEAD_DIM), int(PAGE), false, false, false,
        mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate
    ),
    execution_simdgroups<4>>
    ValueProduct;

inline RowTile row_tile(threadgroup KV* at, uint columns) {
    return RowTile(at, dextents<int, 2>(int(columns), int(TENSOR_ROWS)), array<int, 2>{1, int(columns)});
}

/// What is there is only read; but matmul2d takes no pointers to constants.
inline BlockTile block_tile(const device KV* at) {
    return BlockTile((device KV*)at, dextents<int, 2>(int(HEAD_DIM), int(PAGE)), array<int, 2>{1, int(KV_WIDTH)});
}

[[max_total_threads_per_threadgroup(128)]]
kernel void attend_tensor(
    const device KV* q [[buffer(0)]],
    const device uint* position [[buffer(1)]],
    const device Tiles* tiles [[buffer(2)]],
    const device KV* keys [[buffer(3)]],
    const device KV* values [[buffer(4)]],
    device float* parts [[buffer(5)]],
    device float* weights [[buffer(6)]],
    const device uint* pages [[buffer(7)]],
    threadgroup KV* tile [[threadgroup(0)]],
    threadgroup float* scores [[threadgroup(1)]],
    threadgroup KV* shares [[threadgroup(2)]],
    threadgroup float* kept [[threadgroup(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint kv_head = group.y;
    const uint first_token = (tiles->first + group.z) * TENSOR_TOKENS;
    const uint tokens = min(TENSOR_TOKENS, tiles->rows - first_token);
    const uint start = position[0] + first_token;
    const uint length = part_length(position[0] + tiles->rows, tiles->parts);
    // A part may begin and end within a page.
    const uint first = group.x * length;
    const uint end = min(first + length, start + tokens);
    // Where rows of the tile are among those of heads.
    const ulong heads = ulong(first_token) * HEADS + kv_head * SHARED_BY;

    for (uint i = thread_index; i < TENSOR_ROWS * HEAD_DIM; i += LANES * TILE_SIMDGROUPS) {
        const uint token = i / HEAD_DIM / SHARED_BY;
        const ulong head = heads + token * HEADS + i / HEAD_DIM % SHARED_BY;
        tile[i] = token < tokens ? q[head * HEAD_DIM + i % HEAD_DIM] : KV(0.0f);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float top[TENSOR_SHARE];
    float total[TENSOR_SHARE];
    for (uint i = 0; i < TENSOR_SHARE; ++i) {
        top[i] = LOWEST;
        total[i] = 0.0f;
    }
    ScoreProduct score_product;
    ValueProduct value_product;
    RowTile queries = row_tile(tile, HEAD_DIM);
    RowTile weighted = row_tile(shares, PAGE);
    auto out = value_product.get_destination_cooperative_tensor<RowTile, BlockTile, float>();
    clear_sums(out);
    for (uint block = first / PAGE * PAGE; block < end; block += PAGE) {
        const ulong cached = (cache_row(pages, block) * KV_HEADS + kv_head) * HEAD_DIM;
        BlockTile block_keys = block_tile(keys + cached);
        BlockTile block_values = block_tile(values + cached);
        auto score = score_product.get_destination_cooperative_tensor<RowTile, BlockTile, float>();
        score_product.run(queries, block_keys, score);
#pragma clang loop unroll(full)
        for (ushort i = 0; i < score.get_capacity(); ++i) {
            if (score.is_valid_element(i)) {
                const auto place = score.get_multidimensional_index(i);
                scores[uint(place[1]) * PAGE + uint(place[0])] = score[i];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        bool raised = false;
        for (uint i = 0; i < TENSOR_SHARE; ++i) {
            const uint r = simdgroup * TENSOR_SHARE + i;
            const uint behind = min(end, start + r / SHARED_BY + 1);
            float mine[HELD_POSITIONS];
            float now = top[i];
            for (uint j = 0; j < HELD_POSITIONS; ++j) {
                const uint at = block + j * LANES + lane;
                mine[j] = at >= first && at < behind ? scores[r * PAGE + j * LANES + lane] : LOWEST;
                now = max(now, mine[j]);
            }
            now = simd_max(now);
            float sum = 0.0f;
            for (uint j = 0; j < HELD_POSITIONS; ++j) {
                const uint at = block + j * LANES + lane;
                const float share = at >= first && at < behind ? exp(mine[j] - now) : 0.0f;
                shares[r * PAGE + j * LANES + lane] = KV(share);
                sum += share;
            }
            const float factor = exp(top[i] - now);
            total[i] = total[i] * factor + simd_sum(sum);
            raised = raised || now > top[i];
            top[i] = now;
            if (lane == 0) {
                kept[r] = factor;
            }
        }
        if (lane == 0) {
            kept[TENSOR_ROWS + simdgroup] = raised ? 1.0f : 0.0f;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float any = 0.0f;
        for (uint i = 0; i < TILE_SIMDGROUPS; ++i) {
            any += kept[TENSOR_ROWS + i];
        }
        if (any > 0.0f) {
#pragma clang loop unroll(full)
            for (ushort i = 0; i < out.get_capacity(); ++i) {
                if (out.is_valid_element(i)) {
                    out[i] *= kept[uint(out.get_multidimensional_index(i)[1])];
                }
            }
        }
        value_product.run(weighted, block_values, out);
    }

#pragma clang loop unroll(full)
    for (ushort i = 0; i < out.get_capacity(); ++i) {
        if (out.is_valid_element(i)) {
            const auto place = out.get_multidimensional_index(i);
            const uint token = uint(place[1]) / SHARED_BY;
            if (token < tokens) {
                const ulong head = heads + token * HEADS + uint(place[1]) % SHARED_BY;
                parts[(head * tiles->parts + group.x) * HEAD_DIM + uint(place[0])] = out[i];
            }
        }
    }
    for (uint i = 0; i < TENSOR_SHARE; ++i) {
        const uint r = simdgroup * TENSOR_SHARE + i;
        const uint token = r / SHARED_BY;
        if (lane == 0 && token < tokens) {
            const ulong part = (heads + token * HEADS + r % SHARED_BY) * tiles->parts + group.x;
            weights[2 * part] = top[i];
            weights[2 * part + 1] = total[i];
        }
    }
}
