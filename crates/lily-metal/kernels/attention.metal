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
/// Positions that a SIMD-group takes at a time, all of one page.
constant constexpr uint TAKEN = 4;
/// Their scores, by head, then position, of a number of heads that is a power of two. A lane has score `lane % SCORES`.
constant constexpr uint SCORES = (HELD == 3 ? 4 : HELD) * TAKEN;
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

/// Appends the new key, which `heads` has behind the query heads, and the new value to the cache, where it has `cached`.
inline void append_new(
    const threadgroup float* heads, const threadgroup float* turn, const device float* new_values, device KV* keys,
    device KV* values, ulong cached, uint kv_head, uint thread_index
) {
    for (uint i = thread_index; i < HEAD_DIM; i += LANES * ATTEND_SIMDGROUPS) {
        keys[cached + i] = KV(rotated(heads + SHARED_BY * HEAD_DIM, turn, i));
        values[cached + i] = KV(new_values[kv_head * HEAD_DIM + i]);
    }
}

/// Dimensions of a row of the cache that a lane has; of 16 bits, two a word, as they lie there.
template <class T> struct Row;
template <> struct Row<float> {
    float values[DIMS];
};
template <> struct Row<bfloat> {
    uint words[(DIMS + 1) / 2];
};

/// 16 bytes a load where lanes have multiples of that: rows are multiples of 64 bytes, from the beginning of a buffer on.
inline void load(const device float* from, thread Row<float>& row) {
    if (DIMS % 4 != 0) {
        for (uint i = 0; i < DIMS; ++i) {
            row.values[i] = from[i];
        }
        return;
    }
    const device float4* fours = (const device float4*)from;
    for (uint i = 0; i < DIMS / 4; ++i) {
        const float4 four = fours[i];
        row.values[4 * i] = four.x;
        row.values[4 * i + 1] = four.y;
        row.values[4 * i + 2] = four.z;
        row.values[4 * i + 3] = four.w;
    }
}

inline void load(const device bfloat* from, thread Row<bfloat>& row) {
    if (DIMS % 8 != 0) {
        for (uint i = 0; i < DIMS; ++i) {
            const uint half_word = as_type<ushort>(from[i]);
            row.words[i / 2] = i % 2 == 0 ? half_word : row.words[i / 2] | half_word << 16;
        }
        return;
    }
    const device uint4* fours = (const device uint4*)from;
    for (uint i = 0; i < DIMS / 8; ++i) {
        const uint4 four = fours[i];
        row.words[4 * i] = four.x;
        row.words[4 * i + 1] = four.y;
        row.words[4 * i + 2] = four.z;
        row.words[4 * i + 3] = four.w;
    }
}

inline float dimension(const thread Row<float>& row, uint i) {
    return row.values[i];
}

/// A bf16 is the upper half of a float.
inline float dimension(const thread Row<bfloat>& row, uint i) {
    const uint word = row.words[i / 2];
    return as_type<float>(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
}

/// What a SIMD-group has of its HELD query heads: of each lane's dimensions the query and the weighted sum of values; and of the
/// head of a lane's score the highest one, and the sum of the lane's weights. To be in registers, so what indexes it is unrolled.
struct Held {
    float q[HELD][DIMS];
    float o[HELD][DIMS];
    float top;
    float total;
};

/// Sums over a SIMD-group, all at once: that of the lane's score. At each step a lane keeps every other one, and gives the rest to the
/// lane that keeps those: 5 instructions for each where `simd_sum` takes 15. COUNT are left.
template <uint COUNT> inline float sum_of_lane(thread float* scores, uint lane);

template <> inline float sum_of_lane<1>(thread float* scores, uint) {
    float sum = scores[0];
    for (ushort step = SCORES; step < LANES; step *= 2) {
        sum += simd_shuffle_xor(sum, step);
    }
    return sum;
}

template <uint COUNT> inline float sum_of_lane(thread float* scores, uint lane) {
    constexpr uint STEP = SCORES / COUNT;
    const bool odd = (lane & STEP) != 0;
    for (uint i = 0; i < COUNT / 2; ++i) {
        const float kept = odd ? scores[2 * i + 1] : scores[2 * i];
        const float given = odd ? scores[2 * i] : scores[2 * i + 1];
        scores[i] = kept + simd_shuffle_xor(given, ushort(STEP));
    }
    return sum_of_lane<COUNT / 2>(scores, lane);
}

/// The lane's score: queries times keys.
inline float score_of_lane(const thread Held& held, const thread Row<KV>* key, uint lane) {
    float scores[SCORES] = {0.0f};
#pragma unroll
    for (uint t = 0; t < TAKEN; ++t) {
#pragma unroll
        for (uint i = 0; i < DIMS; ++i) {
            const float k = dimension(key[t], i);
            for (uint h = 0; h < HELD; ++h) {
                scores[h * TAKEN + t] = fma(held.q[h][i], k, scores[h * TAKEN + t]);
            }
        }
    }
    return sum_of_lane<SCORES>(scores, lane);
}

/// Takes the highest scores of the heads into account, of which one is a new one.
inline void raise(thread Held& held, float score) {
    float now = max(held.top, score);
    for (ushort step = 1; step < TAKEN; step *= 2) {
        now = max(now, simd_shuffle_xor(now, step));
    }
    const float kept = exp(held.top - now);
    held.top = now;
    held.total *= kept;
#pragma unroll
    for (uint h = 0; h < HELD; ++h) {
        const float factor = simd_broadcast(kept, ushort(h * TAKEN));
        for (uint i = 0; i < DIMS; ++i) {
            held.o[h][i] *= factor;
        }
    }
}

/// Attends to TAKEN positions. From `count` on they are the first one again, which is no higher score, and weigh nothing. Sums are
/// multiplied only where a higher score is found: rarely, behind many positions, and by 1 else.
inline void attend_to(
    thread Held& held, const thread Row<KV>* key, const thread Row<KV>* value, uint count, uint lane
) {
    const float score = score_of_lane(held, key, lane);
    if (simd_any(score > held.top)) {
        raise(held, score);
    }
    const float weight = lane % TAKEN < count ? exp(score - held.top) : 0.0f;
    held.total += weight;
#pragma unroll
    for (uint t = 0; t < TAKEN; ++t) {
        float weights[HELD];
        for (uint h = 0; h < HELD; ++h) {
            weights[h] = simd_broadcast(weight, ushort(h * TAKEN + t));
        }
#pragma unroll
        for (uint i = 0; i < DIMS; ++i) {
            const float v = dimension(value[t], i);
            for (uint h = 0; h < HELD; ++h) {
                held.o[h][i] = fma(weights[h], v, held.o[h][i]);
            }
        }
    }
}

/// Merges what the SIMD-groups have, one head of each set at a time, so that a threadgroup's memory suffices.
inline void merge_streams(
    thread Held& held, threadgroup float* merged, threadgroup float* merged_weights, device float* parts, device float* weights,
    uint2 group, uint thread_index, uint simdgroup, uint lane
) {
    for (ushort step = 1; step < TAKEN; step *= 2) {
        held.total += simd_shuffle_xor(held.total, step);
    }
#pragma unroll
    for (uint h = 0; h < HELD; ++h) {
        for (uint i = 0; i < DIMS; ++i) {
            merged[simdgroup * HEAD_DIM + lane * DIMS + i] = held.o[h][i];
        }
        if (lane == h * TAKEN) {
            merged_weights[2 * simdgroup] = held.top;
            merged_weights[2 * simdgroup + 1] = held.total;
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
                sum = fma(factor, merged[s * HEAD_DIM + dim], sum);
                weight = fma(factor, merged_weights[2 * s + 1], weight);
            }
            const uint part = (group.y * SHARED_BY + set * HELD + h) * PARTS + group.x;
            parts[part * HEAD_DIM + dim] = sum;
            if (dim == 0) {
                weights[2 * part] = highest;
                weights[2 * part + 1] = weight;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
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
    // It is read like the others: only its own part, the last one, has it.
    if (end > newest) {
        const ulong cached = (cache_row(pages, newest) * KV_HEADS + kv_head) * HEAD_DIM;
        append_new(heads, turn, new_values, keys, values, cached, kv_head, thread_index);
        threadgroup_barrier(mem_flags::mem_device);
    }

    Held held;
    held.top = LOWEST;
    held.total = 0.0f;
#pragma unroll
    for (uint h = 0; h < HELD; ++h) {
        const threadgroup float* head = heads + (simdgroup % SETS * HELD + h) * HEAD_DIM;
#pragma unroll
        for (uint i = 0; i < DIMS; ++i) {
            held.q[h][i] = rotated(head, turn, lane * DIMS + i) * rsqrt(float(HEAD_DIM));
            held.o[h][i] = 0.0f;
        }
    }
    for (uint at = first + simdgroup / SETS * TAKEN; at < end; at += STREAMS * TAKEN) {
        const ulong cached = (cache_row(pages, at) * KV_HEADS + kv_head) * HEAD_DIM + lane * DIMS;
        const uint count = end - at;
        Row<KV> key[TAKEN];
        Row<KV> value[TAKEN];
#pragma unroll
        for (uint t = 0; t < TAKEN; ++t) {
            // What is behind the last position was perhaps never written.
            const uint row = t < count ? t * KV_WIDTH : 0;
            load(keys + cached + row, key[t]);
            load(values + cached + row, value[t]);
        }
        attend_to(held, key, value, count, lane);
    }
    merge_streams(held, merged, merged_weights, parts, weights, group, thread_index, simdgroup, lane);
}

/// Parts whose values a thread of `combine` asks for at once.
constant constexpr uint MERGED = 8;

/// Merges the parts of a query head of a token and applies the output gate: a dimension each thread. Lanes have the factors of a
/// part each.
template <class To>
inline void merge_parts(
    const device float* queries, const device float* parts, const device float* weights, const device uint* position,
    const device Chunk* chunk, device To* attended, uint2 group, uint dim, uint lane
) {
    // Whole SIMD-groups.
    if (dim >= HEAD_DIM) {
        return;
    }
    const uint count = position[0] + chunk->rows;
    const uint length = part_length(count, chunk->parts);
    const uint used = (count + length - 1) / length;
    const uint head = group.y * HEADS + group.x;
    const device float* mine = parts + ulong(head) * chunk->parts * HEAD_DIM + dim;
    const device float* of_part = weights + 2 * ulong(head) * chunk->parts;
    float highest = LOWEST;
    for (uint p = lane; p < used; p += LANES) {
        highest = max(highest, of_part[2 * p]);
    }
    highest = simd_max(highest);
    float total = 0.0f;
    float sum = 0.0f;
    for (uint first = 0; first < used; first += LANES) {
        const uint own = first + lane;
        const float factor = own < used ? exp(of_part[2 * own] - highest) : 0.0f;
        total += own < used ? factor * of_part[2 * own + 1] : 0.0f;
        for (uint p = 0; p < min(LANES, used - first); p += MERGED) {
#pragma unroll
            for (uint i = 0; i < MERGED; ++i) {
                // Behind the last part, that one times 0.
                const float value = mine[min(first + p + i, used - 1) * HEAD_DIM];
                sum = fma(simd_broadcast(factor, ushort(p + i)), value, sum);
            }
        }
    }
    const float gate = queries[ulong(2 * head + 1) * HEAD_DIM + dim];
    attended[ulong(head) * HEAD_DIM + dim] = To(sum / simd_sum(total) * sigmoid(gate));
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
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    merge_parts(queries, parts, weights, position, chunk, attended, group, thread_index, lane);
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
