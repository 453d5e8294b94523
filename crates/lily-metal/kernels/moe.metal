// The mixture of experts, token by token: `router`, `gate_up`, `down`. The shared expert is the last slot. For many tokens see
// `experts.metal`.

constant constexpr uint SLOTS = TOP_K + 1;
/// Values between gate/up and down, of one slot.
constant constexpr uint MIDDLE = EXPERT_WIDTH > SHARED_WIDTH ? EXPERT_WIDTH : SHARED_WIDTH;
/// Logits of a lane.
constant constexpr uint HELD_LOGITS = (EXPERTS + LANES - 1) / LANES;
/// Rows that a SIMD-group multiplies of the router: few, since everything waits for it, and little else is to be done meanwhile.
constant constexpr uint ROUTER_ROWS = 2;
/// Threadgroups of `router` that make logits. Those behind them have the shared expert.
constant constexpr uint ROUTER_GROUPS = EXPERTS / (ROUTER_ROWS * PRODUCT_SIMDGROUPS) + 1;

/// Norm, then `weight * silu(gate x) * (up x)` of ROWS rows of an expert; all lanes have the values.
inline void swiglu(
    thread float* values, const device float* x, const device float* gains, Matrix gate, Matrix up, ulong row, float weight, uint lane
) {
    float gates[ROWS] = {0.0f};
    float ups[ROWS] = {0.0f};
    float squares = 0.0f;
    for (uint col = lane * INPUTS; col < HIDDEN; col += STRIDE) {
        const Inputs in = gained_inputs(x, gains, col, squares);
        multiply<MATRIX_BITS, ROWS>(gates, in, gate, row, ROWS, HIDDEN, col);
        multiply<MATRIX_BITS, ROWS>(ups, in, up, row, ROWS, HIDDEN, col);
    }
    const float factor = norm_factor(squares, HIDDEN);
    for (uint r = 0; r < ROWS; ++r) {
        const float g = simd_sum(gates[r]) * factor;
        const float u = simd_sum(ups[r]) * factor;
        values[r] = weight * silu(g) * u;
    }
}

/// Norm, then the router's logits of ROUTER_ROWS experts from `row` on, or behind the last one the logit of the shared expert's gate.
inline void router_logits(
    const device float* x, const device float* gains, Matrix router, Matrix shared_gate, device float* logits, uint row, uint lane
) {
    if (row > EXPERTS) {
        return;
    }
    const bool shared = row == EXPERTS;
    const uint count = shared ? 1 : ROUTER_ROWS;
    Matrix m = router;
    if (shared) {
        m = shared_gate;
    }
    float squares = 0.0f;
    float sums[ROUTER_ROWS] = {0.0f};
    for (uint col = lane * INPUTS; col < HIDDEN; col += STRIDE) {
        const Inputs in = gained_inputs(x, gains, col, squares);
        multiply<ROUTER_BITS, ROUTER_ROWS>(sums, in, m, shared ? 0 : row, count, HIDDEN, col);
    }
    const float factor = norm_factor(squares, HIDDEN);
    for (uint r = 0; r < ROUTER_ROWS; ++r) {
        const float sum = simd_sum(sums[r]) * factor;
        if (lane == r && r < count) {
            logits[row + r] = sum;
        }
    }
}

/// Norm, then the router's logits, and behind them the one of the shared expert's gate. The shared expert waits for no choice, so its
/// gate and up are made here, where memory has little to do: the last slot of `middle`, without the weight.
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
    const device uchar* gate_codes [[buffer(8)]],
    const device bfloat* gate_scales [[buffer(9)]],
    const device bfloat* gate_biases [[buffer(10)]],
    const device uchar* up_codes [[buffer(11)]],
    const device bfloat* up_scales [[buffer(12)]],
    const device bfloat* up_biases [[buffer(13)]],
    device float* logits [[buffer(14)]],
    device float* middle [[buffer(15)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    x += group.y * HIDDEN;
    if (group.x < ROUTER_GROUPS) {
        const Matrix matrix = {codes, scales, biases};
        const Matrix shared_gate = {shared_codes, shared_scales, shared_biases};
        const uint row = (group.x * PRODUCT_SIMDGROUPS + simdgroup) * ROUTER_ROWS;
        router_logits(x, gains, matrix, shared_gate, logits + group.y * (EXPERTS + 1), row, lane);
        return;
    }
    const uint row = ((group.x - ROUTER_GROUPS) * PRODUCT_SIMDGROUPS + simdgroup) * ROWS;
    if (row >= SHARED_WIDTH) {
        return;
    }
    const Matrix gate = {gate_codes, gate_scales, gate_biases};
    const Matrix up = {up_codes, up_scales, up_biases};
    float values[ROWS];
    swiglu(values, x, gains, gate, up, row, 1.0f, lane);
    for (uint r = 0; r < ROWS; ++r) {
        if (lane == r) {
            middle[(group.y * SLOTS + TOP_K) * MIDDLE + row + r] = values[r];
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

/// Norm, then gate and up of the chosen experts: `middle[slot] = weight * silu(gate x) * (up x)`. Every threadgroup finds its
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
    device float* middle [[buffer(9)]],
    device uint* chosen [[buffer(10)]],
    threadgroup uint* expert_of_slot [[threadgroup(0)]],
    threadgroup float* weight_of_slot [[threadgroup(1)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    x += group.z * HIDDEN;
    logits += group.z * (EXPERTS + 1);
    middle += group.z * SLOTS * MIDDLE;
    chosen += group.z * TOP_K;
    const uint slot = group.y;
    if (simdgroup == 0) {
        float weight = 0.0f;
        const uint expert = choose(logits, slot, lane, weight);
        if (lane == 0) {
            expert_of_slot[0] = expert;
            weight_of_slot[0] = weight;
            if (group.x == 0) {
                chosen[slot] = expert;
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint row = (group.x * PRODUCT_SIMDGROUPS + simdgroup) * ROWS;
    if (row >= EXPERT_WIDTH) {
        return;
    }
    const Matrix gate = {gate_codes, gate_scales, gate_biases};
    const Matrix up = {up_codes, up_scales, up_biases};
    float values[ROWS];
    swiglu(values, x, gains, gate, up, ulong(expert_of_slot[0]) * EXPERT_WIDTH + row, weight_of_slot[0], lane);
    for (uint r = 0; r < ROWS; ++r) {
        if (lane == r) {
            middle[slot * MIDDLE + row + r] = values[r];
        }
    }
}

/// Down of the slots' experts, their sum, and the residual. The weights of the chosen ones are in `middle` already; that of the shared
/// one is not, as its gate's logit was made beside it.
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
    const device float* logits [[buffer(8)]],
    device float* x [[buffer(9)]],
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
            multiply<MATRIX_BITS, ROWS>(sums, in, routed, first, ROWS, EXPERT_WIDTH, col);
        }
    }
    const float weight = sigmoid(logits[group.y * (EXPERTS + 1) + EXPERTS]);
    for (uint col = lane * INPUTS; col < SHARED_WIDTH; col += STRIDE) {
        Inputs in = plain_inputs(middle + TOP_K * MIDDLE, col);
        scale_inputs(in, weight);
        multiply<MATRIX_BITS, ROWS>(sums, in, shared, row, ROWS, SHARED_WIDTH, col);
    }
    for (uint r = 0; r < ROWS; ++r) {
        const float sum = simd_sum(sums[r]);
        if (lane == r) {
            x[row + r] += sum;
        }
    }
}
