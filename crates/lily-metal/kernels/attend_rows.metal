// Attention of several tokens of one sequence: `append`, `attend_rows`; `combine` merges.
//
// The query heads of a K/V head are packed: row r of a tile is head `r % SHARED_BY` of the tile's token `r / SHARED_BY`, so that a
// block of keys and values, once read, serves all of them. Queries and weights meet keys and values in the type of the cache;
// sums are f32.

/// Rows of a tile.
constant constexpr uint TILE_ROWS = 16;
constant constexpr uint TILE_TOKENS = TILE_ROWS / SHARED_BY;
constant constexpr uint TILE_SIMDGROUPS = 4;
/// 8x8 matrices on top of each other.
constant constexpr uint HEIGHT = TILE_ROWS / 8;
/// 8x8 matrices beside each other that a SIMD-group has of the output.
constant constexpr uint SLICE = HEAD_DIM / (8 * TILE_SIMDGROUPS);

/// Tokens, into how many parts their positions are divided, and the first tile of a launch, which may have some of them only.
struct Tiles {
    uint rows;
    uint parts;
    uint first;
};

/// Norms and rotation: queries go to `q`, `[rows, HEADS, HEAD_DIM]`, scaled; keys and values are appended to the cache. Threadgroups
/// behind the last row fill its page with zeros, so that `attend_rows` and `attend_tensor` never multiply with what was not written.
[[max_total_threads_per_threadgroup(256)]]
kernel void append(
    const device float* queries [[buffer(0)]],
    const device float* new_keys [[buffer(1)]],
    const device float* new_values [[buffer(2)]],
    const device float* q_gains [[buffer(3)]],
    const device float* k_gains [[buffer(4)]],
    const device ulong* turns [[buffer(5)]],
    const device uint* position [[buffer(6)]],
    const device uint* rows [[buffer(7)]],
    device KV* q [[buffer(8)]],
    device KV* keys [[buffer(9)]],
    device KV* values [[buffer(10)]],
    const device uint* pages [[buffer(11)]],
    threadgroup float* heads [[threadgroup(0)]],
    threadgroup float* turn [[threadgroup(1)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint kv_head = group.x;
    const uint row = group.y;
    const uint at = position[0] + row;
    const uint end = (position[0] + rows[0] + PAGE - 1) / PAGE * PAGE;
    if (at >= end) {
        return;
    }
    const ulong cached = (cache_row(pages, at) * KV_HEADS + kv_head) * HEAD_DIM;
    if (row >= rows[0]) {
        for (uint i = thread_index; i < HEAD_DIM; i += LANES * ATTEND_SIMDGROUPS) {
            keys[cached + i] = KV(0.0f);
            values[cached + i] = KV(0.0f);
        }
        return;
    }
    queries += ulong(row) * 2 * QUERY_WIDTH;
    turn_by(turns, at, turn, thread_index);
    norm_heads_and_key(queries, new_keys + row * KV_WIDTH, q_gains, k_gains, heads, kv_head, simdgroup, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    device KV* mine = q + ulong(row) * QUERY_WIDTH + kv_head * SHARED_BY * HEAD_DIM;
    for (uint i = thread_index; i < SHARED_BY * HEAD_DIM; i += LANES * ATTEND_SIMDGROUPS) {
        const float value = rotated(heads + i / HEAD_DIM * HEAD_DIM, turn, i % HEAD_DIM);
        mine[i] = KV(value * rsqrt(float(HEAD_DIM)));
    }
    append_new(heads, turn, new_values + row * KV_WIDTH, keys, values, cached, kv_head, thread_index);
}

/// Attention of a tile of tokens over one part of the positions, a block at a time, with a running maximum. SIMD-groups divide
/// the scores by position, the weights by row, and the output by dimension.
[[max_total_threads_per_threadgroup(128)]]
kernel void attend_rows(
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
    const uint first_token = (tiles->first + group.z) * TILE_TOKENS;
    const uint tokens = min(TILE_TOKENS, tiles->rows - first_token);
    const uint start = position[0] + first_token;
    const uint length = part_length(position[0] + tiles->rows, tiles->parts);
    const uint end = min((group.x + 1) * length, start + tokens);

    for (uint i = thread_index; i < TILE_ROWS * HEAD_DIM; i += LANES * TILE_SIMDGROUPS) {
        const uint r = i / HEAD_DIM;
        const uint token = r / SHARED_BY;
        const uint head = kv_head * SHARED_BY + r % SHARED_BY;
        const ulong from = (ulong(first_token + token) * HEADS + head) * HEAD_DIM + i % HEAD_DIM;
        tile[i] = token < tokens ? q[from] : KV(0.0f);
    }
    // Diagonal matrices.
    for (uint i = thread_index; i < HEIGHT * 64; i += LANES * TILE_SIMDGROUPS) {
        kept[i] = 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float top[TILE_ROWS / TILE_SIMDGROUPS];
    float total[TILE_ROWS / TILE_SIMDGROUPS];
    for (uint i = 0; i < TILE_ROWS / TILE_SIMDGROUPS; ++i) {
        top[i] = LOWEST;
        total[i] = 0.0f;
    }
    simdgroup_float8x8 out[HEIGHT * SLICE];
    for (uint i = 0; i < HEIGHT * SLICE; ++i) {
        out[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (uint block = group.x * length; block < end; block += POSITIONS) {
        const ulong cached = (cache_row(pages, block) * KV_HEADS + kv_head) * HEAD_DIM;
        const device KV* block_keys = keys + cached;
        const device KV* block_values = values + cached;
        simdgroup_float8x8 score[HEIGHT];
        for (uint b = 0; b < HEIGHT; ++b) {
            score[b] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
        for (uint i = 0; i < HEAD_DIM; i += 8) {
            simdgroup_matrix<KV, 8, 8> key;
            simdgroup_load(key, block_keys + simdgroup * 8 * KV_WIDTH + i, KV_WIDTH, ulong2(0, 0), true);
            for (uint b = 0; b < HEIGHT; ++b) {
                simdgroup_matrix<KV, 8, 8> query;
                simdgroup_load(query, tile + b * 8 * HEAD_DIM + i, HEAD_DIM);
                simdgroup_multiply_accumulate(score[b], query, key, score[b]);
            }
        }
        for (uint b = 0; b < HEIGHT; ++b) {
            simdgroup_store(score[b], scores + b * 8 * POSITIONS + simdgroup * 8, POSITIONS);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = 0; i < TILE_ROWS / TILE_SIMDGROUPS; ++i) {
            const uint r = simdgroup * (TILE_ROWS / TILE_SIMDGROUPS) + i;
            const bool visible = block + lane <= start + r / SHARED_BY;
            const float mine = visible ? scores[r * POSITIONS + lane] : LOWEST;
            const float now = max(top[i], simd_max(mine));
            const float share = visible ? exp(mine - now) : 0.0f;
            const float factor = exp(top[i] - now);
            total[i] = total[i] * factor + simd_sum(share);
            top[i] = now;
            shares[r * POSITIONS + lane] = KV(share);
            if (lane == 0) {
                kept[r / 8 * 64 + r % 8 * 9] = factor;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint b = 0; b < HEIGHT; ++b) {
            simdgroup_float8x8 factors;
            simdgroup_load(factors, kept + b * 64, 8);
            for (uint i = 0; i < SLICE; ++i) {
                simdgroup_multiply(out[b * SLICE + i], factors, out[b * SLICE + i]);
            }
        }
        for (uint t = 0; t < POSITIONS; t += 8) {
            simdgroup_matrix<KV, 8, 8> share[HEIGHT];
            for (uint b = 0; b < HEIGHT; ++b) {
                simdgroup_load(share[b], shares + b * 8 * POSITIONS + t, POSITIONS);
            }
            for (uint i = 0; i < SLICE; ++i) {
                simdgroup_matrix<KV, 8, 8> value;
                simdgroup_load(value, block_values + t * KV_WIDTH + (simdgroup * SLICE + i) * 8, KV_WIDTH);
                for (uint b = 0; b < HEIGHT; ++b) {
                    simdgroup_multiply_accumulate(out[b * SLICE + i], share[b], value, out[b * SLICE + i]);
                }
            }
        }
    }

    // No SIMD-group needs the queries any more: their memory takes eight rows of the output at a time.
    threadgroup float* rows = (threadgroup float*)tile;
    for (uint b = 0; b < HEIGHT; ++b) {
        for (uint i = 0; i < SLICE; ++i) {
            simdgroup_store(out[b * SLICE + i], rows + (simdgroup * SLICE + i) * 8, HEAD_DIM);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = thread_index; i < 8 * HEAD_DIM; i += LANES * TILE_SIMDGROUPS) {
            const uint r = b * 8 + i / HEAD_DIM;
            const uint token = r / SHARED_BY;
            if (token < tokens) {
                const ulong head = ulong(first_token + token) * HEADS + kv_head * SHARED_BY + r % SHARED_BY;
                parts[(head * tiles->parts + group.x) * HEAD_DIM + i % HEAD_DIM] = rows[i];
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (uint i = 0; i < TILE_ROWS / TILE_SIMDGROUPS; ++i) {
        const uint r = simdgroup * (TILE_ROWS / TILE_SIMDGROUPS) + i;
        const uint token = r / SHARED_BY;
        if (lane == 0 && token < tokens) {
            const ulong head = ulong(first_token + token) * HEADS + kv_head * SHARED_BY + r % SHARED_BY;
            weights[2 * (head * tiles->parts + group.x)] = top[i];
            weights[2 * (head * tiles->parts + group.x) + 1] = total[i];
        }
    }
}
