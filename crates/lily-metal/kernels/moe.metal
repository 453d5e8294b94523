// The mixture of experts, token by token: `router`, `gate_up`, `down`. The shared expert is the last slot. For many tokens see
// `experts.metal`.

constant constexpr uint SLOTS = TOP_K + 1;
/// Values between gate/up and down, of one slot.
constant constexpr uint MIDDLE = EXPERT_WIDTH > SHARED_WIDTH ? EXPERT_WIDTH : SHARED_WIDTH;
/// Logits of a lane.
constant constexpr uint HELD_LOGITS = (EXPERTS + LANES - 1) / LANES;

/// Norm, then the router's logits, and behind them the one of the shared expert's gate.
[[max_total_threads_per_threadgroup(128)]]
kernel void router(
    const device float* x [[buffer(0)]],
    const device float* gains [[buffer(1)]],
    const device uchar* codes [[buffer(2)]],
    const device bfloat* scales [[buffer(3)]],
    const device bfloat* biases [[buffer(4)]],
    const device uchar* shared_codes [[buffer(5)]],
    const device bfloat* shared_scales [[buffer(6)]],
    const device bfloat* shared_biases [[buffer(7)]],
    device float* logits [[buffer(8)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    x += group.y * HIDDEN;
    logits += group.y * (EXPERTS + 1);
    const uint row = (group.x * PRODUCT_SIMDGROUPS + simdgroup) * ROWS;
    if (row > EXPERTS) {
        return;
    }
    const bool shared = row == EXPERTS;
    Matrix m = {codes, scales, biases};
    if (shared) {
        m = {shared_codes, shared_scales, shared_biases};
    }
    const uint count = shared ? 1 : ROWS;
    float squares = 0.0f;
    float sums[ROWS] = {0.0f};
    for (uint col = lane * INPUTS; col < HIDDEN; col += STRIDE) {
        const Inputs in = gained_inputs(x, gains, col, squares);
        multiply<ROUTER_BITS>(sums, in, m, shared ? 0 : row, count, HIDDEN, col);
    }
    const float factor = norm_factor(squares, HIDDEN);
    for (uint r = 0; r < ROWS; ++r) {
        const float sum = simd_sum(sums[r]) * factor;
        if (lane == r && r < count) {
            logits[row + r] = sum;
        }
    }
}

/// The expert of a slot and its weight, from the router's logits: the largest first, of equal ones the smaller index. A
/// logit that is not finite makes every weight NaN. All lanes have the result.
inline uint choose(const device float* logits, uint slot, uint lane, thread float& weight) {
    float held[HELD_LOGITS];
    float poison = 0.0f;
    for (uint i = 0; i < HELD_LOGITS; ++i) {
        const uint expert = i * LANES + lane;
        held[i] = expert < EXPERTS ? logits[expert] : -INFINITY;
        poison += expert < EXPERTS ? held[i] * 0.0f : 0.0f;
    }
    poison = simd_sum(poison);
    uint taken = 0;
    uint chosen = 0;
    float highest = 0.0f;
    float mine = 0.0f;
    float total = 0.0f;
    for (uint round = 0; round < TOP_K; ++round) {
        float best = -INFINITY;
        uint index = NONE;
        for (uint i = 0; i < HELD_LOGITS; ++i) {
            const uint expert = i * LANES + lane;
            const bool free = expert < EXPERTS && (taken >> i & 1) == 0;
            if (free && (index == NONE || held[i] > best)) {
                // A NaN is taken for the lowest, so that there always is a choice.
                best = isnan(held[i]) ? -INFINITY : held[i];
                index = expert;
            }
        }
        const float score = simd_max(best);
        const uint winner = simd_min(best == score ? index : NONE);
        if (winner % LANES == lane) {
            taken |= 1u << (winner / LANES);
        }
        highest = round == 0 ? score : highest;
        const float p = exp(score - highest);
        total += p;
        chosen = round == slot ? winner : chosen;
        mine = round == slot ? p : mine;
    }
    weight = mine / total + poison;
    return chosen;
}

/// Norm, then gate and up of the slots' experts: `middle[slot] = weight * silu(gate x) * (up x)`. Every threadgroup finds its
/// slot's expert by itself. `chosen` gets the experts, for `down`.
[[max_total_threads_per_threadgroup(128)]]
kernel void gate_up(
    const device float* x [[buffer(0)]],
    const device float* gains [[buffer(1)]],
    const device float* logits [[buffer(2)]],
    const device uchar* gate_codes [[buffer(3)]],
    const device bfloat* gate_scales [[buffer(4)]],
    const device bfloat* gate_biases [[buffer(5)]],
    const device uchar* up_codes [[buffer(6)]],
    const device bfloat* up_scales [[buffer(7)]],
    const device bfloat* up_biases [[buffer(8)]],
    const device uchar* shared_gate_codes [[buffer(9)]],
    const device bfloat* shared_gate_scales [[buffer(10)]],
    const device bfloat* shared_gate_biases [[buffer(11)]],
    const device uchar* shared_up_codes [[buffer(12)]],
    const device bfloat* shared_up_scales [[buffer(13)]],
    const device bfloat* shared_up_biases [[buffer(14)]],
    device float* middle [[buffer(15)]],
    device uint* chosen [[buffer(16)]],
    threadgroup uint* expert_of_slot [[threadgroup(0)]],
    threadgroup float* weight_of_slot [[threadgroup(1)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    x += group.z * HIDDEN;
    logits += group.z * (EXPERTS + 1);
    middle += group.z * SLOTS * MIDDLE;
    chosen += group.z * TOP_K;
    const uint slot = group.y;
    const bool shared = slot == TOP_K;
    if (simdgroup == 0 && !shared) {
        float weight = 0.0f;
        const uint expert = choose(logits, slot, lane, weight);
        if (lane == 0) {
            expert_of_slot[0] = expert;
            weight_of_slot[0] = weight;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_index == 0 && group.x == 0 && !shared) {
        chosen[slot] = expert_of_slot[0];
    }
    const uint row = (group.x * PRODUCT_SIMDGROUPS + simdgroup) * ROWS;
    if (row >= (shared ? SHARED_WIDTH : EXPERT_WIDTH)) {
        return;
    }
    Matrix gate = {shared_gate_codes, shared_gate_scales, shared_gate_biases};
    Matrix up = {shared_up_codes, shared_up_scales, shared_up_biases};
    ulong matrix_row = row;
    float weight = 0.0f;
    if (shared) {
        weight = sigmoid(logits[EXPERTS]);
    } else {
        gate = {gate_codes, gate_scales, gate_biases};
        up = {up_codes, up_scales, up_biases};
        matrix_row += ulong(expert_of_slot[0]) * EXPERT_WIDTH;
        weight = weight_of_slot[0];
    }
    float gates[ROWS] = {0.0f};
    float ups[ROWS] = {0.0f};
    float squares = 0.0f;
    for (uint col = lane * INPUTS; col < HIDDEN; col += STRIDE) {
        const Inputs in = gained_inputs(x, gains, col, squares);
        multiply<MATRIX_BITS>(gates, in, gate, matrix_row, ROWS, HIDDEN, col);
        multiply<MATRIX_BITS>(ups, in, up, matrix_row, ROWS, HIDDEN, col);
    }
    const float factor = norm_factor(squares, HIDDEN);
    for (uint r = 0; r < ROWS; ++r) {
        const float g = simd_sum(gates[r]) * factor;
        const float u = simd_sum(ups[r]) * factor;
        if (lane == r) {
            middle[slot * MIDDLE + row + r] = weight * silu(g) * u;
        }
    }
}

/// Down of the slots' experts, whose weights are in `middle` already, their sum, and the residual.
[[max_total_threads_per_threadgroup(128)]]
kernel void down(
    const device float* middle [[buffer(0)]],
    const device uint* chosen [[buffer(1)]],
    const device uchar* codes [[buffer(2)]],
    const device bfloat* scales [[buffer(3)]],
    const device bfloat* biases [[buffer(4)]],
    const device uchar* shared_codes [[buffer(5)]],
    const device bfloat* shared_scales [[buffer(6)]],
    const device bfloat* shared_biases [[buffer(7)]],
    device float* x [[buffer(8)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    middle += group.y * SLOTS * MIDDLE;
    chosen += group.y * TOP_K;
    x += group.y * HIDDEN;
    const uint row = (group.x * PRODUCT_SIMDGROUPS + simdgroup) * ROWS;
    if (row >= HIDDEN) {
        return;
    }
    const Matrix routed = {codes, scales, biases};
    const Matrix shared = {shared_codes, shared_scales, shared_biases};
    float sums[ROWS] = {0.0f};
    for (uint slot = 0; slot < TOP_K; ++slot) {
        const ulong first = ulong(chosen[slot]) * HIDDEN + row;
        for (uint col = lane * INPUTS; col < EXPERT_WIDTH; col += STRIDE) {
            const Inputs in = plain_inputs(middle + slot * MIDDLE, col);
            multiply<MATRIX_BITS>(sums, in, routed, first, ROWS, EXPERT_WIDTH, col);
        }
    }
    for (uint col = lane * INPUTS; col < SHARED_WIDTH; col += STRIDE) {
        const Inputs in = plain_inputs(middle + TOP_K * MIDDLE, col);
        multiply<MATRIX_BITS>(sums, in, shared, row, ROWS, SHARED_WIDTH, col);
    }
    for (uint r = 0; r < ROWS; ++r) {
        const float sum = simd_sum(sums[r]);
        if (lane == r) {
            x[row + r] += sum;
        }
    }
}
