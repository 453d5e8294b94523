// Tiles of pairs, as in `experts.metal`, with the tensor operations of Metal 4: `gate_up_tensor`, `down_tensor`. Inputs and weights
// are rounded to half, sums are f32.

/// The rows of a tile that a thread brings, from the pairs that it is of; `slots`: pairs that have the same row.
inline void pair_sources(thread uint* sources, const device uint* pairs, uint count, uint slots, uint thread_index) {
    for (uint b = 0; b < PAIR_ROWS / TENSOR_STEP; ++b) {
        const uint r = thread_index / TENSOR_RUNS + TENSOR_STEP * b;
        sources[b] = r < count ? pairs[r] / slots : NONE;
    }
}

/// Gate and up of a tile, TENSOR_OUTS of each: `middle[pair] = weight * silu(gate h) * (up h)`.
[[max_total_threads_per_threadgroup(128)]]
kernel void gate_up_tensor(
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
    threadgroup half* tile [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    const uint expert = tiles[group.y].expert;
    const bool shared = expert == EXPERTS;
    const uint first_out = group.x * TENSOR_OUTS;
    if (expert == NONE || first_out >= (shared ? SHARED_WIDTH : EXPERT_WIDTH)) {
        return;
    }
    const uint count = tiles[group.y].count;
    const device uint* pairs = order + tiles[group.y].first;
    uint sources[PAIR_ROWS / TENSOR_STEP];
    pair_sources(sources, pairs, count, SLOTS, thread_index);
    Matrix gate = {gate_codes, gate_scales, gate_biases};
    Matrix up = {up_codes, up_scales, up_biases};
    if (shared) {
        gate = {shared_gate_codes, shared_gate_scales, shared_gate_biases};
        up = {shared_up_codes, shared_up_scales, shared_up_biases};
    }
    const ulong row = (shared ? 0 : ulong(expert) * EXPERT_WIDTH) + first_out + thread_index / 2;
    threadgroup half* gates_at = tile + PAIR_ROWS * TENSOR_COLS;
    threadgroup half* ups_at = gates_at + TENSOR_OUTS * TENSOR_COLS;
    HalfTile inputs = half_tile(tile, PAIR_ROWS);
    HalfTile gates = half_tile(gates_at, TENSOR_OUTS);
    HalfTile ups = half_tile(ups_at, TENSOR_OUTS);
    TensorProduct<int(PAIR_ROWS)> product;
    auto gated = product.get_destination_cooperative_tensor<HalfTile, HalfTile, float>();
    auto upped = product.get_destination_cooperative_tensor<HalfTile, HalfTile, float>();
    clear_sums(gated);
    clear_sums(upped);
    for (uint col = 0; col < HIDDEN; col += TENSOR_COLS) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        bring_inputs<PAIR_ROWS>(tile, h, sources, HIDDEN, col, thread_index);
        bring_weights(gates_at, gate, row, HIDDEN, col, thread_index);
        bring_weights(ups_at, up, row, HIDDEN, col, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        product.run(inputs, gates, gated);
        product.run(inputs, ups, upped);
    }
    // Both are of one operation and one type, so a thread has the same places of both.
#pragma clang loop unroll(full)
    for (ushort i = 0; i < gated.get_capacity(); ++i) {
        if (gated.is_valid_element(i)) {
            const auto place = gated.get_multidimensional_index(i);
            const uint r = uint(place[1]);
            if (r < count) {
                const uint pair = pairs[r];
                middle[ulong(pair) * MIDDLE + first_out + uint(place[0])] = shares[pair] * silu(gated[i]) * upped[i];
            }
        }
    }
}

/// Down of a tile, whose weights are in `middle` already: `spread[pair] = down middle[pair]`.
[[max_total_threads_per_threadgroup(128)]]
kernel void down_tensor(
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
    threadgroup half* tile [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    const uint expert = tiles[group.y].expert;
    if (expert == NONE) {
        return;
    }
    const bool shared = expert == EXPERTS;
    const uint first_out = group.x * TENSOR_OUTS;
    const uint count = tiles[group.y].count;
    const device uint* pairs = order + tiles[group.y].first;
    uint sources[PAIR_ROWS / TENSOR_STEP];
    pair_sources(sources, pairs, count, 1, thread_index);
    Matrix m = {codes, scales, biases};
    if (shared) {
        m = {shared_codes, shared_scales, shared_biases};
    }
    const ulong row = (shared ? 0 : ulong(expert) * HIDDEN) + first_out + thread_index / 2;
    const uint cols = shared ? SHARED_WIDTH : EXPERT_WIDTH;
    TensorProduct<int(PAIR_ROWS)> product;
    auto sums = product.get_destination_cooperative_tensor<HalfTile, HalfTile, float>();
    multiply_tensors<PAIR_ROWS>(product, sums, middle, sources, MIDDLE, m, row, cols, tile, thread_index);
#pragma clang loop unroll(full)
    for (ushort i = 0; i < sums.get_capacity(); ++i) {
        if (sums.is_valid_element(i)) {
            const auto place = sums.get_multidimensional_index(i);
            const uint r = uint(place[1]);
            if (r < count) {
                spread[ulong(pairs[r]) * HIDDEN + first_out + uint(place[0])] = sums[i];
            }
        }
    }
}
