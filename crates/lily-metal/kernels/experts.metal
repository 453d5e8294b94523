// The mixture of experts for many tokens: `route`, `sort_pairs`, `gate_up_rows`, `down_rows`, `sum_slots`.
//
// A pair is a slot of a token: number `row * SLOTS + slot`. The shared expert is the last slot's, and expert EXPERTS. Pairs are
// sorted by expert, and cut into tiles of PAIR_ROWS pairs of one expert, which are then multiplied as in `matmul.metal`.

constant constexpr uint PAIR_BLOCKS = 2;
constant constexpr uint PAIR_ROWS = 16 * PAIR_BLOCKS;
/// Outputs of a tile of `gate_up_rows`: as many of gate as of up.
constant constexpr uint PAIR_OUTS = TILE_OUTS / 2;

/// A tile: its expert, or NONE if it isn't used; where its pairs begin in the sorted list, and how many they are.
struct Tile {
    uint expert;
    uint first;
    uint count;
};

/// Tokens, and how many tiles there is room for.
struct Sizes {
    uint rows;
    uint tiles;
};

/// The expert and the weight of each pair, a SIMD-group each.
[[max_total_threads_per_threadgroup(128)]]
kernel void route(
    const device float* logits [[buffer(0)]],
    const device float* shared_logits [[buffer(1)]],
    const device uint* rows [[buffer(2)]],
    device uint* chosen [[buffer(3)]],
    device float* shares [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint pair = group * 4 + simdgroup;
    if (pair >= rows[0] * SLOTS) {
        return;
    }
    logits += ulong(pair / SLOTS) * EXPERTS;
    uint expert = EXPERTS;
    float weight = 0.0f;
    if (pair % SLOTS == TOP_K) {
        weight = sigmoid(shared_logits[pair / SLOTS]);
    } else {
        expert = choose(logits, pair % SLOTS, lane, weight);
    }
    if (lane == 0) {
        chosen[pair] = expert;
        shares[pair] = weight;
    }
}

/// Where the tiles of an expert begin, before which there are so many pairs in order: behind the most tiles that those can need,
/// each expert's last one being nearly empty. So it depends on no other expert's tiles.
inline uint first_tile(uint expert, uint before) {
    return (before + (PAIR_ROWS - 1) * min(expert, before)) / PAIR_ROWS;
}

/// Sorts pairs by expert, those of one expert by number, so that the result is always the same; and lists the tiles. A SIMD-group
/// finds the pairs of one expert, 32 rows at a time.
[[max_total_threads_per_threadgroup(128)]]
kernel void sort_pairs(
    const device uint* chosen [[buffer(0)]],
    const device Sizes* sizes [[buffer(1)]],
    device uint* order [[buffer(2)]],
    device Tile* tiles [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint expert = group * 4 + simdgroup;
    if (expert > EXPERTS) {
        return;
    }
    uint before = 0;
    uint count = 0;
    for (uint row = lane; row < sizes->rows; row += LANES) {
        for (uint slot = 0; slot < SLOTS; ++slot) {
            const uint other = chosen[row * SLOTS + slot];
            before += other < expert ? 1 : 0;
            count += other == expert ? 1 : 0;
        }
    }
    before = simd_sum(before);
    const uint end = before + simd_sum(count);

    uint placed = before;
    for (uint first_row = 0; first_row < sizes->rows && placed < end; first_row += LANES) {
        const uint first_pair = (first_row + lane) * SLOTS;
        const uint slots = first_row + lane < sizes->rows ? SLOTS : 0;
        uint found = 0;
        for (uint slot = 0; slot < slots; ++slot) {
            found += chosen[first_pair + slot] == expert ? 1 : 0;
        }
        uint place = placed + simd_prefix_exclusive_sum(found);
        for (uint slot = 0; slot < slots; ++slot) {
            if (chosen[first_pair + slot] == expert) {
                order[place] = first_pair + slot;
                place += 1;
            }
        }
        placed += simd_sum(found);
    }

    const uint tile = first_tile(expert, before);
    const uint next_tile = expert == EXPERTS ? sizes->tiles : first_tile(expert + 1, end);
    for (uint t = tile + lane; t < next_tile; t += LANES) {
        const uint at = before + (t - tile) * PAIR_ROWS;
        tiles[t].expert = at < end ? expert : NONE;
        if (at < end) {
            tiles[t].first = at;
            tiles[t].count = min(PAIR_ROWS, end - at);
        }
    }
}

/// Gate and up of a tile: `middle[pair] = weight * silu(gate h) * (up h)`.
[[max_total_threads_per_threadgroup(128)]]
kernel void gate_up_rows(
    const device float* h [[buffer(0)]],
    const device float* shares [[buffer(1)]],
    const device uint* order [[buffer(2)]],
    const device Tile* tiles [[buffer(3)]],
    const device uchar* gate_codes [[buffer(4)]],
    const device bfloat* gate_scales [[buffer(5)]],
    const device bfloat* gate_biases [[buffer(6)]],
    const device uchar* up_codes [[buffer(7)]],
    const device bfloat* up_scales [[buffer(8)]],
    const device bfloat* up_biases [[buffer(9)]],
    const device uchar* shared_gate_codes [[buffer(10)]],
    const device bfloat* shared_gate_scales [[buffer(11)]],
    const device bfloat* shared_gate_biases [[buffer(12)]],
    const device uchar* shared_up_codes [[buffer(13)]],
    const device bfloat* shared_up_scales [[buffer(14)]],
    const device bfloat* shared_up_biases [[buffer(15)]],
    device float* middle [[buffer(16)]],
    threadgroup float* tile [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]
) {
    const uint expert = tiles[group.y].expert;
    const bool shared = expert == EXPERTS;
    const uint width = shared ? SHARED_WIDTH : EXPERT_WIDTH;
    const uint first_out = group.x * PAIR_OUTS;
    if (expert == NONE || first_out >= width) {
        return;
    }
    const uint count = tiles[group.y].count;
    const device uint* pairs = order + tiles[group.y].first;
    uint sources[PAIR_BLOCKS];
    for (uint b = 0; b < PAIR_BLOCKS; ++b) {
        const uint r = thread_index / 8 + 16 * b;
        sources[b] = r < count ? pairs[r] / SLOTS : NONE;
    }
    // The first half of a tile's weights is of gate, the second of up.
    const uint mine = thread_index / 2;
    Matrix m = {shared_gate_codes, shared_gate_scales, shared_gate_biases};
    if (shared && mine >= PAIR_OUTS) {
        m = {shared_up_codes, shared_up_scales, shared_up_biases};
    } else if (!shared && mine >= PAIR_OUTS) {
        m = {up_codes, up_scales, up_biases};
    } else if (!shared) {
        m = {gate_codes, gate_scales, gate_biases};
    }
    const ulong row = (shared ? 0 : ulong(expert) * EXPERT_WIDTH) + first_out + mine % PAIR_OUTS;
    simdgroup_float8x8 sums[PAIR_BLOCKS * OUT_BLOCKS];
    for (uint i = 0; i < PAIR_BLOCKS * OUT_BLOCKS; ++i) {
        sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    multiply_tile<PAIR_BLOCKS, MATRIX_BITS>(sums, h, sources, HIDDEN, m, row, HIDDEN, tile, thread_index, simdgroup);
    gather_tile<PAIR_BLOCKS>(sums, tile, simdgroup);
    for (uint i = thread_index; i < count * PAIR_OUTS; i += TILE_THREADS) {
        const uint r = i / PAIR_OUTS;
        const uint out = i % PAIR_OUTS;
        const float gate = tile[r * TILE_OUTS + out];
        const float up = tile[r * TILE_OUTS + PAIR_OUTS + out];
        middle[ulong(pairs[r]) * MIDDLE + first_out + out] = shares[pairs[r]] * silu(gate) * up;
    }
}

/// Down of a tile, whose weights are in `middle` already: `spread[pair] = down middle[pair]`.
[[max_total_threads_per_threadgroup(128)]]
kernel void down_rows(
    const device float* middle [[buffer(0)]],
    const device uint* order [[buffer(1)]],
    const device Tile* tiles [[buffer(2)]],
    const device uchar* codes [[buffer(3)]],
    const device bfloat* scales [[buffer(4)]],
    const device bfloat* biases [[buffer(5)]],
    const device uchar* shared_codes [[buffer(6)]],
    const device bfloat* shared_scales [[buffer(7)]],
    const device bfloat* shared_biases [[buffer(8)]],
    device float* spread [[buffer(9)]],
    threadgroup float* tile [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]
) {
    const uint expert = tiles[group.y].expert;
    if (expert == NONE) {
        return;
    }
    const bool shared = expert == EXPERTS;
    const uint first_out = group.x * TILE_OUTS;
    const uint count = tiles[group.y].count;
    const device uint* pairs = order + tiles[group.y].first;
    uint sources[PAIR_BLOCKS];
    for (uint b = 0; b < PAIR_BLOCKS; ++b) {
        const uint r = thread_index / 8 + 16 * b;
        sources[b] = r < count ? pairs[r] : NONE;
    }
    Matrix m = {codes, scales, biases};
    if (shared) {
        m = {shared_codes, shared_scales, shared_biases};
    }
    const ulong row = (shared ? 0 : ulong(expert) * HIDDEN) + first_out + thread_index / 2;
    const uint cols = shared ? SHARED_WIDTH : EXPERT_WIDTH;
    simdgroup_float8x8 sums[PAIR_BLOCKS * OUT_BLOCKS];
    for (uint i = 0; i < PAIR_BLOCKS * OUT_BLOCKS; ++i) {
        sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    multiply_tile<PAIR_BLOCKS, MATRIX_BITS>(sums, middle, sources, MIDDLE, m, row, cols, tile, thread_index, simdgroup);
    gather_tile<PAIR_BLOCKS>(sums, tile, simdgroup);
    for (uint i = thread_index; i < count * TILE_OUTS; i += TILE_THREADS) {
        spread[ulong(pairs[i / TILE_OUTS]) * HIDDEN + first_out + i % TILE_OUTS] = tile[i];
    }
}

/// The sum over a token's slots, in their order, and the residual. A thread makes one value.
[[max_total_threads_per_threadgroup(256)]]
kernel void sum_slots(
    const device float* spread [[buffer(0)]],
    device float* x [[buffer(1)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    const uint i = group.x * 256 + thread_index;
    if (i >= HIDDEN) {
        return;
    }
    float sum = 0.0f;
    for (uint slot = 0; slot < SLOTS; ++slot) {
        sum += spread[(ulong(group.y) * SLOTS + slot) * HIDDEN + i];
    }
    x[group.y * HIDDEN + i] += sum;
}
