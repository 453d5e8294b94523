// A gated attention mixer of one token: `project_attention`, `attend`, `combine`, `out_attention`. That of several is in
// `attend_rows.metal`.
//
// The cache of a layer is `[page, PAGE, K/V head, HEAD_DIM]` for keys, normed and rotated, and the same for values, of type KV.
// `pages` has the number of the page of every PAGE positions of a sequence; a page is whole blocks.

constant constexpr uint QUERY_WIDTH = HEADS * HEAD_DIM;
constant constexpr uint KV_WIDTH = KV_HEADS * HEAD_DIM;
/// Query heads that share a K/V head.
constant constexpr uint SHARED_BY = HEADS / KV_HEADS;
/// Query heads that a SIMD-group has in registers.
constant constexpr uint HELD = SHARED_BY < 4 ? SHARED_BY : 4;
constant constexpr uint SETS = SHARED_BY / HELD;
constant constexpr uint ATTEND_SIMDGROUPS = 8;
/// Positions of a block: what `attend_rows` takes at a time, one a lane.
constant constexpr uint POSITIONS = LANES;
/// Positions that a threadgroup has in hand at once.
constant constexpr uint STREAMS = ATTEND_SIMDGROUPS / SETS;
/// Dimensions of a lane.
constant constexpr uint DIMS = HEAD_DIM / LANES;
constant constexpr uint HALF_ROTARY = ROTARY_DIM / 2;
constant constexpr float LOWEST = -1e30f;

/// How a step's tokens of one sequence are attended: their number, and into how many parts, at most, positions are divided.
struct Chunk {
    uint rows;
    uint parts;
};

/// Norm, then the projections query|gate (by head), k and v.
[[max_total_threads_per_threadgroup(128)]]
kernel void project_attention(
    const device float* x [[buffer(0)]],
    const device float* gains [[buffer(1)]],
    const device uchar* q_codes [[buffer(2)]],
    const device bfloat* q_scales [[buffer(3)]],
    const device bfloat* q_biases [[buffer(4)]],
    const device uchar* k_codes [[buffer(5)]],
    const device bfloat* k_scales [[buffer(6)]],
    const device bfloat* k_biases [[buffer(7)]],
    const device uchar* v_codes [[buffer(8)]],
    const device bfloat* v_scales [[buffer(9)]],
    const device bfloat* v_biases [[buffer(10)]],
    device float* queries [[buffer(11)]],
    device float* new_keys [[buffer(12)]],
    device float* new_values [[buffer(13)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    uint row = (group * PRODUCT_SIMDGROUPS + simdgroup) * ROWS;
    if (row >= 2 * QUERY_WIDTH + 2 * KV_WIDTH) {
        return;
    }
    device float* out = queries;
    Matrix m = {q_codes, q_scales, q_biases};
    if (row >= 2 * QUERY_WIDTH + KV_WIDTH) {
        row -= 2 * QUERY_WIDTH + KV_WIDTH;
        m = {v_codes, v_scales, v_biases};
        out = new_values;
    } else if (row >= 2 * QUERY_WIDTH) {
        row -= 2 * QUERY_WIDTH;
        m = {k_codes, k_scales, k_biases};
        out = new_keys;
    }
    float sums[ROWS];
    normed_product(sums, x, gains, m, row, ROWS, lane);
    if (lane == 0) {
        for (uint r = 0; r < ROWS; ++r) {
            out[row + r] = sums[r];
        }
    }
}

/// Row of the cache that a position has.
inline ulong cache_row(const device uint* pages, uint position) {
    return ulong(pages[position / PAGE]) * PAGE + position % PAGE;
}

/// Positions of a part, when `count` positions are attended to in at most `parts` parts: whole blocks, two or more.
inline uint part_length(uint count, uint parts) {
    return max(((count + parts - 1) / parts + POSITIONS - 1) / POSITIONS, 2u) * POSITIONS;
}

/// Cosine and sine of each rotated pair at a position. `turns`: by how much of a full turn a pair moves a position, in units of
/// 2^-64: a position times that, cut to 64 bits, is the angle, exact at any position.
inline void turn_by(const device ulong* turns, uint position, threadgroup float* turn, uint thread_index) {
    for (uint i = thread_index; i < HALF_ROTARY; i += LANES * ATTEND_SIMDGROUPS) {
        // The upper half of the fraction, as a signed one: an angle from -pi to pi.
        const int fraction = int(uint((turns[i] * position) >> 32));
        const float angle = float(fraction) * (M_PI_F / 2147483648.0f);
        turn[2 * i] = precise::cos(angle);
        turn[2 * i + 1] = precise::sin(angle);
    }
}

/// Norms of the query heads of a K/V head and, behind them, of its new key.
inline void norm_heads_and_key(
    const device float* queries, const device float* new_keys, const device float* q_gains, const device float* k_gains,
    threadgroup float* heads, uint kv_head, uint simdgroup, uint lane
) {
    for (uint h = simdgroup; h <= SHARED_BY; h += ATTEND_SIMDGROUPS) {
        const bool query = h < SHARED_BY;
        const device float* from = query ? queries + (kv_head * SHARED_BY + h) * 2 * HEAD_DIM : new_keys + kv_head * HEAD_DIM;
        const device float* gains = query ? q_gains : k_gains;
        float squares = 0.0f;
        for (uint i = lane; i < HEAD_DIM; i += LANES) {
            squares += from[i] * from[i];
        }
        const float factor = norm_factor(squares, HEAD_DIM);
        for (uint i = lane; i < HEAD_DIM; i += LANES) {
            heads[h * HEAD_DIM + i] = from[i] * factor * gains[i];
        }
    }
}

/// Dimension `i` of a normed head behind the rotation; `turn` has cosine and sine of each pair.
inline float rotated(const threadgroup float* head, const threadgroup float* turn, uint i) {
    if (i >= ROTARY_DIM) {
        return head[i];
    }
    const uint pair = i % HALF_ROTARY;
    const float cosine = turn[2 * pair];
    const float sine = turn[2 * pair + 1];
    const float low = head[pair];
    const float high = head[pair + HALF_ROTARY];
    return i < HALF_ROTARY ? low * cosine - high * sine : high * cosine + low * sine;
}

/// Norms and rotation of the query heads of one K/V head and of the new key, which is appended to the cache; then attention
/// over one part of the positions. Query heads of a K/V head read its keys and values together.
[[max_total_threads_per_threadgroup(256)]]
kernel void attend(
    const device float* queries [[buffer(0)]],
    const device float* new_keys [[buffer(1)]],
    const device float* new_values [[buffer(2)]],
    const device float* q_gains [[buffer(3)]],
    const device float* k_gains [[buffer(4)]],
    const device ulong* turns [[buffer(5)]],
    const device uint* position [[buffer(6)]],
    device KV* keys [[buffer(7)]],
    device KV* values [[buffer(8)]],
    device float* parts [[buffer(9)]],
    device float* weights [[buffer(10)]],
    const device uint* pages [[buffer(11)]],
    threadgroup float* heads [[threadgroup(0)]],
    threadgroup float* turn [[threadgroup(1)]],
    threadgroup float* merged [[threadgroup(2)]],
    threadgroup float* merged_weights [[threadgroup(3)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint kv_head = group.y;
    const uint newest = position[0];
    const uint length = part_length(newest + 1, PARTS);
    const uint first = group.x * length;
    if (first > newest) {
        return;
    }
    const uint end = min(first + length, newest + 1);

    turn_by(turns, newest, turn, thread_index);
    norm_heads_and_key(queries, new_keys, q_gains, k_gains, heads, kv_head, simdgroup, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const uint stream = simdgroup / SETS;
    const uint held = simdgroup % SETS * HELD;
    float q[HELD][DIMS];
    float o[HELD][DIMS];
    float top[HELD];
    float total[HELD];
    for (uint h = 0; h < HELD; ++h) {
        top[h] = LOWEST;
        total[h] = 0.0f;
        for (uint i = 0; i < DIMS; ++i) {
            q[h][i] = rotated(heads + (held + h) * HEAD_DIM, turn, lane * DIMS + i) * rsqrt(float(HEAD_DIM));
            o[h][i] = 0.0f;
        }
    }
    for (uint t = first + stream; t < end; t += STREAMS) {
        const ulong at = (cache_row(pages, t) * KV_HEADS + kv_head) * HEAD_DIM + lane * DIMS;
        KV key[DIMS];
        KV value[DIMS];
        for (uint i = 0; i < DIMS; ++i) {
            if (t < newest) {
                key[i] = keys[at + i];
                value[i] = values[at + i];
            } else {
                const uint dim = lane * DIMS + i;
                key[i] = KV(rotated(heads + SHARED_BY * HEAD_DIM, turn, dim));
                value[i] = KV(new_values[kv_head * HEAD_DIM + dim]);
                if (held == 0) {
                    keys[at + i] = key[i];
                    values[at + i] = value[i];
                }
            }
        }
        for (uint h = 0; h < HELD; ++h) {
            float score = 0.0f;
            for (uint i = 0; i < DIMS; ++i) {
                score += q[h][i] * float(key[i]);
            }
            score = simd_sum(score);
            const float now = max(top[h], score);
            const float kept = exp(top[h] - now);
            const float weight = exp(score - now);
            top[h] = now;
            total[h] = total[h] * kept + weight;
            for (uint i = 0; i < DIMS; ++i) {
                o[h][i] = o[h][i] * kept + weight * float(value[i]);
            }
        }
    }

    // One head of each set at a time, so that a threadgroup's memory suffices.
    for (uint h = 0; h < HELD; ++h) {
        for (uint i = 0; i < DIMS; ++i) {
            merged[simdgroup * HEAD_DIM + lane * DIMS + i] = o[h][i];
        }
        if (lane == 0) {
            merged_weights[2 * simdgroup] = top[h];
            merged_weights[2 * simdgroup + 1] = total[h];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = thread_index; i < SETS * HEAD_DIM; i += LANES * ATTEND_SIMDGROUPS) {
            const uint set = i / HEAD_DIM;
            const uint dim = i % HEAD_DIM;
            float highest = LOWEST;
            for (uint s = set; s < ATTEND_SIMDGROUPS; s += SETS) {
                highest = max(highest, merged_weights[2 * s]);
            }
            float sum = 0.0f;
            float weight = 0.0f;
            for (uint s = set; s < ATTEND_SIMDGROUPS; s += SETS) {
                const float factor = exp(merged_weights[2 * s] - highest);
                sum += factor * merged[s * HEAD_DIM + dim];
                weight += factor * merged_weights[2 * s + 1];
            }
            const uint part = (kv_head * SHARED_BY + set * HELD + h) * PARTS + group.x;
            parts[part * HEAD_DIM + dim] = sum;
            if (dim == 0) {
                weights[2 * part] = highest;
                weights[2 * part + 1] = weight;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

/// Merges the parts of a query head of a token and applies the output gate.
template <class To>
inline void merge_parts(
    const device float* queries, const device float* parts, const device float* weights, const device uint* position,
    const device Chunk* chunk, device To* attended, uint2 group, uint thread_index
) {
    const uint count = position[0] + chunk->rows;
    const uint length = part_length(count, chunk->parts);
    const uint used = (count + length - 1) / length;
    const uint head = group.y * HEADS + group.x;
    const device float* mine = parts + ulong(head) * chunk->parts * HEAD_DIM;
    const device float* of_part = weights + 2 * ulong(head) * chunk->parts;
    float highest = LOWEST;
    for (uint p = 0; p < used; ++p) {
        highest = max(highest, of_part[2 * p]);
    }
    float total = 0.0f;
    for (uint p = 0; p < used; ++p) {
        total += exp(of_part[2 * p] - highest) * of_part[2 * p + 1];
    }
    for (uint i = thread_index; i < HEAD_DIM; i += 256) {
        float sum = 0.0f;
        for (uint p = 0; p < used; ++p) {
            sum += exp(of_part[2 * p] - highest) * mine[p * HEAD_DIM + i];
        }
        const float gate = queries[ulong(2 * head + 1) * HEAD_DIM + i];
        attended[ulong(head) * HEAD_DIM + i] = To(sum / total * sigmoid(gate));
    }
}

[[max_total_threads_per_threadgroup(256)]]
kernel void combine(
    const device float* queries [[buffer(0)]],
    const device float* parts [[buffer(1)]],
    const device float* weights [[buffer(2)]],
    const device uint* position [[buffer(3)]],
    const device Chunk* chunk [[buffer(4)]],
    device float* attended [[buffer(5)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    merge_parts(queries, parts, weights, position, chunk, attended, group, thread_index);
}

/// The output projection and the residual: x += W y.
[[max_total_threads_per_threadgroup(128)]]
kernel void out_attention(
    const device float* attended [[buffer(0)]],
    const device uchar* codes [[buffer(1)]],
    const device bfloat* scales [[buffer(2)]],
    const device bfloat* biases [[buffer(3)]],
    device float* x [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint row = (group * PRODUCT_SIMDGROUPS + simdgroup) * ROWS;
    if (row >= HIDDEN) {
        return;
    }
    const Matrix m = {codes, scales, biases};
    float sums[ROWS] = {0.0f};
    for (uint col = lane * INPUTS; col < QUERY_WIDTH; col += STRIDE) {
        const Inputs in = plain_inputs(attended, col);
        multiply<MATRIX_BITS, ROWS>(sums, in, m, row, ROWS, QUERY_WIDTH, col);
    }
    for (uint r = 0; r < ROWS; ++r) {
        const float sum = simd_sum(sums[r]);
        if (lane == r) {
            x[row + r] += sum;
        }
    }
}
