// `lm_head` and `finish`: the final norm, logits, and the largest of them. Where `matmul` has made the logits, `best` finds the
// largest; where none are wanted, `advance` is all.

constant constexpr uint HEAD_SIMDGROUPS = 8;
constant constexpr uint HEAD_ROWS = HEAD_SIMDGROUPS * ROWS;
constant constexpr uint HEAD_GROUPS = (VOCAB + HEAD_ROWS - 1) / HEAD_ROWS;
constant constexpr uint FINISH_SIMDGROUPS = 32;

/// A logit and its token. NaN stands for any that is not finite.
struct Best {
    float logit;
    uint token;
};

/// Whether `a` comes before `b`: what is not finite first, then the larger logit, of equal ones the smaller token.
inline bool before(Best a, Best b) {
    if (isnan(a.logit) || isnan(b.logit)) {
        return isnan(a.logit) && (!isnan(b.logit) || a.token < b.token);
    }
    return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

/// The first of all lanes', on every lane.
inline Best first_of_lanes(Best mine) {
    for (ushort step = LANES / 2; step > 0; step /= 2) {
        const Best other = {simd_shuffle_xor(mine.logit, step), simd_shuffle_xor(mine.token, step)};
        if (before(other, mine)) {
            mine = other;
        }
    }
    return mine;
}

/// Norm, logits, and the first of each threadgroup's.
[[max_total_threads_per_threadgroup(256)]]
kernel void lm_head(
    const device float* x [[buffer(0)]],
    const device float* gains [[buffer(1)]],
    const device uchar* codes [[buffer(2)]],
    const device bfloat* scales [[buffer(3)]],
    const device bfloat* biases [[buffer(4)]],
    device float* logits [[buffer(5)]],
    device float* best_logits [[buffer(6)]],
    device uint* best_tokens [[buffer(7)]],
    threadgroup float* group_logits [[threadgroup(0)]],
    threadgroup uint* group_tokens [[threadgroup(1)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint row = (group * HEAD_SIMDGROUPS + simdgroup) * ROWS;
    Best best = {-INFINITY, NONE};
    if (row < VOCAB) {
        const Matrix m = {codes, scales, biases};
        float sums[ROWS];
        normed_product_q4(sums, x, gains, m, row, ROWS, lane);
        for (uint r = 0; r < ROWS; ++r) {
            const Best mine = {isfinite(sums[r]) ? sums[r] : NAN, row + r};
            if (before(mine, best)) {
                best = mine;
            }
            if (lane == r) {
                logits[row + r] = sums[r];
            }
        }
    }
    if (lane == 0) {
        group_logits[simdgroup] = best.logit;
        group_tokens[simdgroup] = best.token;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0) {
        Best mine = {-INFINITY, NONE};
        if (lane < HEAD_SIMDGROUPS) {
            mine = {group_logits[lane], group_tokens[lane]};
        }
        mine = first_of_lanes(mine);
        if (lane == 0) {
            best_logits[group] = mine.logit;
            best_tokens[group] = mine.token;
        }
    }
}

/// The first of each HEAD_ROWS logits, a SIMD-group each.
[[max_total_threads_per_threadgroup(256)]]
kernel void best(
    const device float* logits [[buffer(0)]],
    device float* best_logits [[buffer(1)]],
    device uint* best_tokens [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint block = group * HEAD_SIMDGROUPS + simdgroup;
    if (block >= HEAD_GROUPS) {
        return;
    }
    const uint token = block * HEAD_ROWS + lane;
    Best mine = {-INFINITY, NONE};
    if (token < VOCAB) {
        mine = {isfinite(logits[token]) ? logits[token] : NAN, token};
    }
    mine = first_of_lanes(mine);
    if (lane == 0) {
        best_logits[block] = mine.logit;
        best_tokens[block] = mine.token;
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

/// The first of all: the next step's token, unless a logit is not finite; then `broken` is set and the token kept. Moves on
/// by the step's tokens.
[[max_total_threads_per_threadgroup(1024)]]
kernel void finish(
    const device float* best_logits [[buffer(0)]],
    const device uint* best_tokens [[buffer(1)]],
    const device uint* rows [[buffer(2)]],
    device uint* token [[buffer(3)]],
    device uint* position [[buffer(4)]],
    device uint* broken [[buffer(5)]],
    threadgroup float* group_logits [[threadgroup(0)]],
    threadgroup uint* group_tokens [[threadgroup(1)]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    Best best = {-INFINITY, NONE};
    for (uint i = thread_index; i < HEAD_GROUPS; i += LANES * FINISH_SIMDGROUPS) {
        const Best other = {best_logits[i], best_tokens[i]};
        if (before(other, best)) {
            best = other;
        }
    }
    best = first_of_lanes(best);
    if (lane == 0) {
        group_logits[simdgroup] = best.logit;
        group_tokens[simdgroup] = best.token;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0) {
        best = {group_logits[lane], group_tokens[lane]};
        best = first_of_lanes(best);
        if (lane == 0) {
            const bool finite = isfinite(best.logit);
            broken[0] = finite ? 0 : 1;
            if (finite) {
                token[0] = best.token;
            }
            position[0] += rows[0];
        }
    }
}
