// `lm_head` and `finish`: the final norm, logits, and the draw. Where `matmul` has made the logits, `best` takes them from there; where
// none are wanted, `advance` is all.

constant constexpr uint HEAD_SIMDGROUPS = 8;
constant constexpr uint FINISH_SIMDGROUPS = DRAW_THREADS / LANES;

/// Norm, logits, and the first candidate of each threadgroup, whose logits are a group.
[[max_total_threads_per_threadgroup(256)]]
kernel void lm_head(
    const device float* x [[buffer(0)]],
    const device float* gains [[buffer(1)]],
    const device uchar* codes [[buffer(2)]],
    const device bfloat* scales [[buffer(3)]],
    const device bfloat* biases [[buffer(4)]],
    device float* logits [[buffer(5)]],
    const device Draw* draw [[buffer(6)]],
    const device Change* changes [[buffer(7)]],
    const device uint* mask [[buffer(8)]],
    const device uint* tokens [[buffer(9)]],
    device float* adjusted [[buffer(10)]],
    device Best* best [[buffer(11)]],
    threadgroup float* group_logits [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint row = group * DRAW_GROUP + simdgroup * ROWS;
    if (row < VOCAB) {
        const Matrix m = {codes, scales, biases};
        float sums[ROWS];
        normed_product(sums, x, gains, m, row, ROWS, lane);
        for (uint r = 0; r < ROWS; ++r) {
            if (lane == r) {
                logits[row + r] = sums[r];
                group_logits[simdgroup * ROWS + r] = sums[r];
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0) {
        const uint token = group * DRAW_GROUP + lane;
        Best mine = {-INFINITY, 0.0f, NONE};
        if (token < VOCAB) {
            mine = candidate(group_logits[lane], token, draw, changes, mask, tokens, adjusted);
        }
        mine = first_of_lanes(mine);
        if (lane == 0) {
            best[group].value = mine.value;
            best[group].rest = mine.rest;
            best[group].token = mine.token;
        }
    }
}

/// The first candidate of each group of logits, a SIMD-group each.
[[max_total_threads_per_threadgroup(256)]]
kernel void best(
    const device float* logits [[buffer(0)]],
    const device Draw* draw [[buffer(1)]],
    const device Change* changes [[buffer(2)]],
    const device uint* mask [[buffer(3)]],
    const device uint* tokens [[buffer(4)]],
    device float* adjusted [[buffer(5)]],
    device Best* best [[buffer(6)]],
    uint threadgroup_index [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint group = threadgroup_index * HEAD_SIMDGROUPS + simdgroup;
    if (group >= DRAW_GROUPS) {
        return;
    }
    const uint token = group * DRAW_GROUP + lane;
    Best mine = {-INFINITY, 0.0f, NONE};
    if (token < VOCAB) {
        mine = candidate(logits[token], token, draw, changes, mask, tokens, adjusted);
    }
    mine = first_of_lanes(mine);
    if (lane == 0) {
        best[group].value = mine.value;
        best[group].rest = mine.rest;
        best[group].token = mine.token;
    }
}

/// Moves on by a step's tokens.
[[max_total_threads_per_threadgroup(32)]]
kernel void advance(
    const device uint* rows [[buffer(0)]],
    device uint* position [[buffer(1)]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    if (thread_index == 0) {
        position[0] += rows[0];
    }
}

/// The next step's token: the first candidate of all, or of those that top-k, top-p and min-p keep. If a logit is not finite `broken`
/// is set and the token kept. Moves on by the step's tokens.
[[max_total_threads_per_threadgroup(1024)]]
kernel void finish(
    const device Best* best [[buffer(0)]],
    const device float* adjusted [[buffer(1)]],
    const device Draw* draw [[buffer(2)]],
    const device uint* rows [[buffer(3)]],
    device uint* token [[buffer(4)]],
    device uint* position [[buffer(5)]],
    device uint* broken [[buffer(6)]],
    threadgroup float* values [[threadgroup(0)]],
    threadgroup float* rests [[threadgroup(1)]],
    threadgroup uint* tokens [[threadgroup(2)]],
    threadgroup atomic_uint* sums [[threadgroup(3)]],
    threadgroup ulong* found [[threadgroup(4)]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    Best mine = {-INFINITY, 0.0f, NONE};
    for (uint g = thread_index; g < DRAW_GROUPS; g += DRAW_THREADS) {
        const Best other = {best[g].value, best[g].rest, best[g].token};
        if (before(other, mine)) {
            mine = other;
        }
    }
    Best first = first_of_threads(mine, values, rests, tokens, simdgroup, lane);
    const bool finite = !isnan(first.value);
    if (finite && draw->kind == DRAW_KEPT) {
        const Choice c = {best, adjusted, first.value};
        const float least = c.top + draw->least;
        ulong from = LOWEST_RANK;
        if (draw->top_k != 0) {
            // The first k tokens of all are no lower than the k-th of the groups' first ones.
            from = select<false, false>(c, from, draw->top_k, sums, found, thread_index, lane);
            from = select<true, false>(c, from, draw->top_k, sums, found, thread_index, lane);
        }
        const ulong share = (ulong(draw->top_p_high) << 32) + draw->top_p_low;
        if (share != 0) {
            const ulong wanted = product_above(mass(c, from, sums, thread_index, lane), share);
            const ulong lowest = rank(c.top - draw->beyond, NO_TOKEN);
            from = select<true, true>(c, from > lowest ? from : lowest, wanted, sums, found, thread_index, lane);
        }
        mine = {-INFINITY, 0.0f, 0};
        for (uint group = thread_index; group - lane < DRAW_GROUPS; group += DRAW_THREADS) {
            bool held = reaches(c, group, from) && best[group].value >= least;
            for (uint next = next_group(held, group); next != NONE; next = next_group(held, group)) {
                const uint t = next * DRAW_GROUP + lane;
                if (t < VOCAB && rank(adjusted[t], t) >= from && adjusted[t] >= least) {
                    const Best other = noisy(adjusted[t], draw, t);
                    if (before(other, mine)) {
                        mine = other;
                    }
                }
            }
        }
        // Beside what the last call may not have read yet.
        const uint next = FINISH_SIMDGROUPS;
        first = first_of_threads(mine, values + next, rests + next, tokens + next, simdgroup, lane);
    }
    if (thread_index == 0) {
        broken[0] = finite ? 0 : 1;
        if (finite) {
            token[0] = first.token;
        }
        position[0] += rows[0];
    }
}
