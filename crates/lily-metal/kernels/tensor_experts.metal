// Tiles of pairs, as in `experts.metal`, with the tensor operations of Metal 4: `gather_pairs`, `gate_up_tensor`, `down_tensor`. Inputs
// and weights are rounded to half, sums are f32. Inputs and `middle` are in the order of the sorted pairs, so that the rows of a tile
// are beside each other and the operations read them straight from memory.

/// Outputs of a tile of `gate_up_tensor`: as many of gate as of up.
constant constexpr uint TENSOR_PAIR_OUTS = TENSOR_OUTS / 2;

/// Inputs of the sorted pairs, a SIMD-group each.
[[max_total_threads_per_threadgroup(128)]]
kernel void gather_pairs(
    const device half* h [[buffer(0)]],
    const device uint* order [[buffer(1)]],
    const device uint* rows [[buffer(2)]],
    device half* sorted [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const ulong place = group * 4 + simdgroup;
    if (place >= rows[0] * SLOTS) {
        return;
    }
    const device uint4* from = (const device uint4*)(h + ulong(order[place] / SLOTS) * HIDDEN);
    device uint4* to = (device uint4*)(sorted + place * HIDDEN);
    for (uint i = lane; i < HIDDEN / TENSOR_RUN; i += LANES) {
        to[i] = from[i];
    }
}

/// Gate and up of a tile, TENSOR_PAIR_OUTS of each: `middle = weight * silu(gate h) * (up h)`, rounded to half.
[[max_total_threads_per_threadgroup(128)]]
kernel void gate_up_tensor(
    const device half* sorted [[buffer(0)]],
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
    device half* middle [[buffer(16)]],
    threadgroup half* tile [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    const uint expert = tiles[group.y].expert;
    const bool shared = expert == EXPERTS;
    const uint first_out = group.x * TENSOR_PAIR_OUTS;
    if (expert == NONE || first_out >= (shared ? SHARED_WIDTH : EXPERT_WIDTH)) {
        return;
    }
    const uint count = tiles[group.y].count;
    const device uint* pairs = order + tiles[group.y].first;
    Matrix gate = {gate_codes, gate_scales, gate_biases};
    Matrix up = {up_codes, up_scales, up_biases};
    if (shared) {
        gate = {shared_gate_codes, shared_gate_scales, shared_gate_biases};
        up = {shared_up_codes, shared_up_scales, shared_up_biases};
    }
    const ulong row = (shared ? 0 : ulong(expert) * EXPERT_WIDTH) + first_out;
    gate = matrix_from<MATRIX_BITS>(gate, row * HIDDEN);
    up = matrix_from<MATRIX_BITS>(up, row * HIDDEN);
    const device half* from = sorted + ulong(tiles[group.y].first) * HIDDEN;
    HalfTile weights = half_tile(tile, TENSOR_OUTS);
    TensorProduct<int(PAIR_ROWS)> product;
    auto sums = product.get_destination_cooperative_tensor<HalfRows, HalfTile, float>();
    clear_sums(sums);
    for (uint col = 0; col < HIDDEN; col += TENSOR_COLS) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        bring_weights<TENSOR_PAIR_OUTS>(tile, gate, TENSOR_PAIR_OUTS, HIDDEN, col, thread_index);
        bring_weights<TENSOR_PAIR_OUTS>(
            tile + TENSOR_PAIR_OUTS * TENSOR_COLS, up, TENSOR_PAIR_OUTS, HIDDEN, col, thread_index
        );
        threadgroup_barrier(mem_flags::mem_threadgroup);
        HalfRows inputs = half_rows(from + col, PAIR_ROWS, HIDDEN);
        product.run(inputs, weights, sums);
    }
    // A gate and its up may be different threads', so they meet in threadgroup memory.
    threadgroup float* all = (threadgroup float*)tile;
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
    for (ushort i = 0; i < sums.get_capacity(); ++i) {
        if (sums.is_valid_element(i)) {
            const auto place = sums.get_multidimensional_index(i);
            all[uint(place[1]) * TENSOR_OUTS + uint(place[0])] = sums[i];
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = thread_index; i < count * TENSOR_PAIR_OUTS; i += TILE_THREADS) {
        const uint r = i / TENSOR_PAIR_OUTS;
        const uint out = i % TENSOR_PAIR_OUTS;
        const float gated = all[r * TENSOR_OUTS + out];
        const float upped = all[r * TENSOR_OUTS + TENSOR_PAIR_OUTS + out];
        const ulong to = ulong(tiles[group.y].first + r) * MIDDLE + first_out + out;
        middle[to] = half(shares[pairs[r]] * silu(gated) * upped);
    }
}

/// Down of a tile, whose weights are in `middle` already: `spread[pair] = down middle[pair]`.
[[max_total_threads_per_threadgroup(128)]]
kernel void down_tensor(
    const device half* middle [[buffer(0)]],
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
    Matrix m = {codes, scales, biases};
    if (shared) {
        m = {shared_codes, shared_scales, shared_biases};
    }
    const uint cols = shared ? SHARED_WIDTH : EXPERT_WIDTH;
    const Matrix from = matrix_from<MATRIX_BITS>(m, ((shared ? 0 : ulong(expert) * HIDDEN) + first_out) * cols);
    const device half* inputs = middle + ulong(tiles[group.y].first) * MIDDLE;
    TensorProduct<int(PAIR_ROWS)> product;
    auto sums = product.get_destination_cooperative_tensor<HalfRows, HalfTile, float>();
    multiply_tensors<PAIR_ROWS>(product, sums, inputs, MIDDLE, from, HIDDEN - first_out, cols, tile, thread_index);
#pragma clang loop unroll(full)
    for (ushort i = 0; i < sums.get_capacity(); ++i) {
        if (sums.is_valid_element(i)) {
            const auto place = sums.get_multidimensional_index(i);
            const uint out = first_out + uint(place[0]);
            const uint r = uint(place[1]);
            if (r < count && out < HIDDEN) {
                spread[ulong(pairs[r]) * HIDDEN + out] = sums[i];
            }
        }
    }
}
