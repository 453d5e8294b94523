// A Gated DeltaNet mixer: `project_gdn`, `delta`, `out_gdn` for one token; for several, `delta`, `keep_inputs` and `norm_heads`; for
// many, `delta_chunks.metal` instead of `delta`.

constant constexpr uint KEY_WIDTH = KEY_HEADS * KEY_DIM;
constant constexpr uint VALUE_WIDTH = VALUE_HEADS * VALUE_DIM;
constant constexpr uint CHANNELS = 2 * KEY_WIDTH + VALUE_WIDTH;
/// Columns of a head's state that a threadgroup of `delta` has: one a lane.
constant constexpr uint COLUMN_BLOCKS = VALUE_DIM / LANES;
constant constexpr uint DELTA_SIMDGROUPS = 8;
/// Rows of the state that a lane has in registers.
constant constexpr uint STATE_ROWS = KEY_DIM / DELTA_SIMDGROUPS;
/// Value heads that share a key head.
constant constexpr uint SHARED_KEYS = VALUE_HEADS / KEY_HEADS;
/// What the log has of a token that is pending, that is, not in the state yet: normed keys by key head, then errors by value head,
/// then their decays.
constant constexpr uint LOG_ERRORS = KEY_WIDTH;
constant constexpr uint LOG_DECAYS = LOG_ERRORS + VALUE_WIDTH;
constant constexpr uint LOG_ENTRY = LOG_DECAYS + VALUE_HEADS;
constant constexpr float L2_EPS = 1e-6f;

/// Norm, then the projections q|k|v, z, b and a.
[[max_total_threads_per_threadgroup(128)]]
kernel void project_gdn(
    const device float* x [[buffer(0)]],
    const device float* gains [[buffer(1)]],
    const device uchar* qkv_codes [[buffer(2)]],
    const device bfloat* qkv_scales [[buffer(3)]],
    const device bfloat* qkv_biases [[buffer(4)]],
    const device uchar* z_codes [[buffer(5)]],
    const device bfloat* z_scales [[buffer(6)]],
    const device bfloat* z_biases [[buffer(7)]],
    const device uchar* b_codes [[buffer(8)]],
    const device bfloat* b_scales [[buffer(9)]],
    const device bfloat* b_biases [[buffer(10)]],
    const device uchar* a_codes [[buffer(11)]],
    const device bfloat* a_scales [[buffer(12)]],
    const device bfloat* a_biases [[buffer(13)]],
    device float* qkv [[buffer(14)]],
    device float* z [[buffer(15)]],
    device float* b [[buffer(16)]],
    device float* a [[buffer(17)]],
    uint group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    uint row = (group * PRODUCT_SIMDGROUPS + simdgroup) * ROWS;
    Matrix m = {qkv_codes, qkv_scales, qkv_biases};
    device float* out = qkv;
    if (row >= CHANNELS + VALUE_WIDTH + 2 * VALUE_HEADS) {
        return;
    }
    if (row >= CHANNELS + VALUE_WIDTH + VALUE_HEADS) {
        row -= CHANNELS + VALUE_WIDTH + VALUE_HEADS;
        m = {a_codes, a_scales, a_biases};
        out = a;
    } else if (row >= CHANNELS + VALUE_WIDTH) {
        row -= CHANNELS + VALUE_WIDTH;
        m = {b_codes, b_scales, b_biases};
        out = b;
    } else if (row >= CHANNELS) {
        row -= CHANNELS;
        m = {z_codes, z_scales, z_biases};
        out = z;
    }
    float sums[ROWS];
    normed_product(sums, x, gains, m, row, ROWS, lane);
    if (lane == 0) {
        for (uint r = 0; r < ROWS; ++r) {
            out[row + r] = sums[r];
        }
    }
}

/// The convolution of a channel for row `row` of a step at `position`, then SiLU. Tap j meets the input of TAPS - 1 - j positions
/// before: one of the step's own rows, or one of the ring `conv`, whose row `p % TAPS` has those of position p.
inline float convolved(
    const device float* qkv, const device float* conv, const device float* taps, uint position, uint row, uint channel
) {
    float sum = 0.0f;
    for (uint j = 0; j < TAPS; ++j) {
        const uint next = row + 1 + j;
        const float in = next >= TAPS ? qkv[ulong(next - TAPS) * CHANNELS + channel]
                                      : conv[(position + next) % TAPS * CHANNELS + channel];
        sum += taps[channel * TAPS + j] * in;
    }
    return silu(sum);
}

/// What a token leaves of the state: alpha = exp(rate_factor * softplus(rate)).
inline float decay(float rate, float rate_factor) {
    // log(1 + e^rate) without overflow; where e^-|rate| is lost beside 1, it is the logarithm itself to the last bit but one.
    const float small = exp(-abs(rate));
    const float softplus = max(rate, 0.0f) + (small < 1e-4f ? small : log(1.0f + small));
    return exp(rate_factor * softplus);
}

/// What a token leaves of a value of the state. Fused by name, so that a replay rounds as the token itself did, however the compiler
/// sees either.
inline float updated(float s, float alpha, float key, float error) {
    return fma(alpha, s, key * error);
}

/// The updates of a head's pending tokens, in order, on STATE_ROWS values of a column of its state, from row `first` on.
inline void replay(thread float* s, const device float* log, uint pending, uint head, uint column, uint first) {
    for (uint token = 0; token < pending; ++token) {
        const device float* keys = log + token * LOG_ENTRY + head / SHARED_KEYS * KEY_DIM + first;
        const float error = log[token * LOG_ENTRY + LOG_ERRORS + head * VALUE_DIM + column];
        const float alpha = log[token * LOG_ENTRY + LOG_DECAYS + head];
        for (uint i = 0; i < STATE_ROWS; ++i) {
            s[i] = updated(s[i], alpha, keys[i], error);
        }
    }
}

/// Convolution, norms of q and k, gates, and the delta rule for 32 columns of one value head, row after row. With S the decayed
/// state, e = beta (v - S^T k), and the readout of S + k e^T is S^T q + (k . q) e: so S^T k and S^T q are summed in one pass. Writes
/// o times gain and gate, and the sum of squares of o, from which a later kernel norms.
///
/// The state is read once. It is written if SETTLE_EVERY tokens are pending with these; else they are put into the log.
[[max_total_threads_per_threadgroup(256)]]
kernel void delta(
    const device float* qkv [[buffer(0)]],
    const device float* taps [[buffer(1)]],
    const device float* z [[buffer(2)]],
    const device float* b [[buffer(3)]],
    const device float* a [[buffer(4)]],
    const device float* a_log [[buffer(5)]],
    const device float* dt_bias [[buffer(6)]],
    const device float* gains [[buffer(7)]],
    const device uint* position [[buffer(8)]],
    const device uint* rows [[buffer(9)]],
    device float* conv [[buffer(10)]],
    device float* state [[buffer(11)]],
    device float* log [[buffer(12)]],
    device uint* pending [[buffer(13)]],
    device float* gated [[buffer(14)]],
    device float* squares [[buffer(15)]],
    threadgroup float* both [[threadgroup(0)]],
    threadgroup float* sums [[threadgroup(1)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint head = group.y;
    const uint key_head = head / SHARED_KEYS;
    const uint column = group.x * LANES + lane;
    const uint v_channel = 2 * KEY_WIDTH + head * VALUE_DIM + column;
    const uint at = position[0];
    const float rate_factor = -exp(a_log[head]);
    // The same everywhere; each threadgroup has its own, which no other one writes.
    const uint before = pending[head * COLUMN_BLOCKS + group.x];
    const bool settles = before + rows[0] >= SETTLE_EVERY;

    float s[STATE_ROWS];
    device float* mine = state + (head * KEY_DIM + simdgroup * STATE_ROWS) * VALUE_DIM + column;
    for (uint i = 0; i < STATE_ROWS; ++i) {
        s[i] = mine[i * VALUE_DIM];
    }
    replay(s, log, before, head, column, simdgroup * STATE_ROWS);
    for (uint row = 0; row < rows[0]; ++row) {
        // In turn, so that the next row's can be written while this one's are read.
        threadgroup float* qk = both + row % 2 * 2 * KEY_DIM;
        for (uint i = thread_index; i < 2 * KEY_DIM; i += LANES * DELTA_SIMDGROUPS) {
            const uint channel = i / KEY_DIM * KEY_WIDTH + key_head * KEY_DIM + i % KEY_DIM;
            qk[i] = convolved(qkv, conv, taps, at, row, channel);
        }
        const float v = convolved(qkv, conv, taps, at, row, v_channel);
        threadgroup_barrier(mem_flags::mem_threadgroup);

        const threadgroup float* q = qk;
        const threadgroup float* k = qk + KEY_DIM;
        float q_q = 0.0f;
        float k_k = 0.0f;
        float q_k = 0.0f;
        for (uint i = lane; i < KEY_DIM; i += LANES) {
            q_q += q[i] * q[i];
            k_k += k[i] * k[i];
            q_k += q[i] * k[i];
        }
        const float q_factor = rsqrt(simd_sum(q_q) + L2_EPS) * rsqrt(float(KEY_DIM));
        const float k_factor = rsqrt(simd_sum(k_k) + L2_EPS);
        q_k = simd_sum(q_k) * q_factor * k_factor;

        float s_q = 0.0f;
        float s_k = 0.0f;
        for (uint i = 0; i < STATE_ROWS; ++i) {
            s_q += s[i] * q[simdgroup * STATE_ROWS + i];
            s_k += s[i] * k[simdgroup * STATE_ROWS + i];
        }
        sums[2 * simdgroup * LANES + lane] = s_q;
        sums[(2 * simdgroup + 1) * LANES + lane] = s_k;
        // Of device memory too: behind it `pending` is written, which all have read before.
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
        s_q = 0.0f;
        s_k = 0.0f;
        for (uint i = 0; i < DELTA_SIMDGROUPS; ++i) {
            s_q += sums[2 * i * LANES + lane];
            s_k += sums[(2 * i + 1) * LANES + lane];
        }

        const float alpha = decay(a[row * VALUE_HEADS + head] + dt_bias[head], rate_factor);
        const float error = sigmoid(b[row * VALUE_HEADS + head]) * (v - alpha * s_k * k_factor);
        if (settles || row + 1 < rows[0]) {
            for (uint i = 0; i < STATE_ROWS; ++i) {
                s[i] = updated(s[i], alpha, k[simdgroup * STATE_ROWS + i] * k_factor, error);
            }
        }
        if (!settles) {
            device float* entry = log + (before + row) * LOG_ENTRY;
            if (simdgroup == 0) {
                entry[LOG_ERRORS + head * VALUE_DIM + column] = error;
            }
            if (group.x == 0 && thread_index == 0) {
                entry[LOG_DECAYS + head] = alpha;
            }
            for (uint i = thread_index; i < KEY_DIM && group.x == 0 && head % SHARED_KEYS == 0; i += LANES * DELTA_SIMDGROUPS) {
                entry[key_head * KEY_DIM + i] = k[i] * k_factor;
            }
        }
        if (simdgroup == 0) {
            const float o = alpha * s_q * q_factor + q_k * error;
            const float total = simd_sum(o * o);
            const ulong to = ulong(row) * VALUE_WIDTH + head * VALUE_DIM + column;
            gated[to] = o * gains[column] * silu(z[to]);
            if (lane == 0) {
                squares[(row * VALUE_HEADS + head) * COLUMN_BLOCKS + group.x] = total;
            }
        }
    }
    if (settles) {
        for (uint i = 0; i < STATE_ROWS; ++i) {
            mine[i * VALUE_DIM] = s[i];
        }
    }
    if (thread_index == 0) {
        pending[head * COLUMN_BLOCKS + group.x] = settles ? 0 : before + rows[0];
    }
    // One token's row of the ring is read by no thread. Those of more are: `keep_inputs` writes them.
    if (rows[0] == 1) {
        device float* newest = conv + at % TAPS * CHANNELS;
        if (simdgroup == 0) {
            newest[v_channel] = qkv[v_channel];
        }
        for (uint i = thread_index; i < 2 * KEY_DIM && group.x == 0 && head % SHARED_KEYS == 0; i += LANES * DELTA_SIMDGROUPS) {
            const uint channel = i / KEY_DIM * KEY_WIDTH + key_head * KEY_DIM + i % KEY_DIM;
            newest[channel] = qkv[channel];
        }
    }
}

/// The last inputs of the convolution of a step of several tokens go into the ring. A thread has a channel.
[[max_total_threads_per_threadgroup(256)]]
kernel void keep_inputs(
    const device float* qkv [[buffer(0)]],
    const device uint* position [[buffer(1)]],
    const device uint* rows [[buffer(2)]],
    device float* conv [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    const uint channel = group * 256 + thread_index;
    if (channel >= CHANNELS) {
        return;
    }
    for (uint row = rows[0] - min(rows[0], TAPS); row < rows[0]; ++row) {
        conv[(position[0] + row) % TAPS * CHANNELS + channel] = qkv[ulong(row) * CHANNELS + channel];
    }
}

/// The factor of a head's norm, of the squares that `delta` left.
inline float head_factor(const device float* squares, uint head) {
    float total = 0.0f;
    for (uint i = 0; i < COLUMN_BLOCKS; ++i) {
        total += squares[head * COLUMN_BLOCKS + i];
    }
    return rsqrt(total / float(VALUE_DIM) + NORM_EPS);
}

/// The norm of each head, row by row.
[[max_total_threads_per_threadgroup(256)]]
kernel void norm_heads(
    const device float* squares [[buffer(0)]],
    device float* gated [[buffer(1)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    const uint i = group.x * 256 + thread_index;
    if (i < VALUE_WIDTH) {
        gated[ulong(group.y) * VALUE_WIDTH + i] *= head_factor(squares, group.y * VALUE_HEADS + i / VALUE_DIM);
    }
}

/// The norm of each head, the output projection, and the residual: x += W y.
[[max_total_threads_per_threadgroup(128)]]
kernel void out_gdn(
    const device float* gated [[buffer(0)]],
    const device float* squares [[buffer(1)]],
    const device uchar* codes [[buffer(2)]],
    const device bfloat* scales [[buffer(3)]],
    const device bfloat* biases [[buffer(4)]],
    device float* x [[buffer(5)]],
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
    for (uint col = lane * INPUTS; col < VALUE_WIDTH; col += STRIDE) {
        Inputs in = plain_inputs(gated, col);
        scale_inputs(in, head_factor(squares, col / VALUE_DIM));
        multiply<MATRIX_BITS, ROWS>(sums, in, m, row, ROWS, VALUE_WIDTH, col);
    }
    for (uint r = 0; r < ROWS; ++r) {
        const float sum = simd_sum(sums[r]);
        if (lane == r) {
            x[row + r] += sum;
        }
    }
}
