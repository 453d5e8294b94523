// The delta rule of many tokens of one sequence, DELTA_CHUNK of them at a time: `prepare_chunks`, `delta_chunks`, then `gate_heads`, so
// that the projection z, which that alone needs, may run beside the delta rule.
//
// With the state S before a chunk, decays alpha, strengths beta, and L_ij the product of alpha over tokens j + 1 to i, the
// recurrence of `delta` says of the chunk's tokens together, e_i being what token i adds to the state along its key:
//
//     e_i = beta_i (v_i - L_i S^T k_i - sum over j < i of L_ij (k_i . k_j) e_j)        L_i: the product up to i
//     o_i = L_i S^T q_i + sum over j <= i of L_ij (q_i . k_j) e_j
//     S  := L_last S + sum over i of L_last,i k_i e_i^T
//
// (the chunkwise form of Gated DeltaNet, arXiv 2412.06464). Tokens go in blocks of 8, matrices of 8 x 8. Within a
// block, (I + beta L K K^T) e = beta r is solved with the inverse T of that unit triangle; between blocks, in turn:
//
//     e = T beta (v + sum over earlier blocks of A e) - T beta L_i (K S),      A = -L (K K^T)
//     o = L_i (Q S) + sum over blocks up to this one of P e,                   P = L (Q K^T)
//
// L are products of decays, never quotients or exponentials of sums: where decays vanish, so do they, and nothing is divided by
// them. Entries of T are at most 1, as the delta rule's own factors are. Only the last part of this, in `delta_chunks`, waits
// for the state.

/// Rows and columns of a matrix, and its numbers.
constant constexpr uint DELTA_BLOCK = 8;
constant constexpr uint BLOCK_NUMBERS = DELTA_BLOCK * DELTA_BLOCK;
/// Blocks of tokens of a chunk.
constant constexpr uint CHUNK_BLOCKS = 4;
constant constexpr uint DELTA_CHUNK = CHUNK_BLOCKS * DELTA_BLOCK;
/// Pairs of blocks of which the second is not behind the first, and those of which it is before it.
constant constexpr uint BLOCK_PAIRS = CHUNK_BLOCKS * (CHUNK_BLOCKS + 1) / 2;
constant constexpr uint EARLIER_PAIRS = BLOCK_PAIRS - CHUNK_BLOCKS;
/// Blocks of a key.
constant constexpr uint KEY_BLOCKS = KEY_DIM / DELTA_BLOCK;
/// A chunk's matrices, by head: where those of a kind begin.
constant constexpr uint EARLIER = 0;                           // A, by pair
constant constexpr uint SOLVE = EARLIER + EARLIER_PAIRS;       // T beta, by block
constant constexpr uint SOLVE_OLD = SOLVE + CHUNK_BLOCKS;      // -T beta L_i, by block
constant constexpr uint ENTER = SOLVE_OLD + CHUNK_BLOCKS;      // L_i on the diagonal, by block
constant constexpr uint WITHIN = ENTER + CHUNK_BLOCKS;         // P, by pair
constant constexpr uint LEAVE = WITHIN + BLOCK_PAIRS;          // L_last,i on the diagonal, by block
constant constexpr uint KEEP = LEAVE + CHUNK_BLOCKS;           // L_last on the diagonal
constant constexpr uint CHUNK_MATRICES = KEEP + 1;

constant constexpr uint PREPARE_SIMDGROUPS = 8;
constant constexpr uint CHUNKS_SIMDGROUPS = LANES / DELTA_BLOCK;
/// Dimensions of a key that a lane has.
constant constexpr uint HELD_KEYS = (KEY_DIM + LANES - 1) / LANES;

/// Index of a pair of blocks, the second not behind the first.
inline uint block_pair(uint i, uint j) {
    return i * (i + 1) / 2 + j;
}

/// Index of a pair of blocks, the second before the first.
inline uint earlier_pair(uint i, uint j) {
    return i * (i - 1) / 2 + j;
}

/// Column `column` of what is known of a chunk before its state, of one value head; `kk` and `qk` are the products of keys, and
/// of queries with keys, by pair of blocks.
inline void chunk_column(
    const threadgroup float* kk, const threadgroup float* qk, const threadgroup float* alpha, const threadgroup float* beta,
    device float* matrices, uint column, uint blocks
) {
    const uint block = column / DELTA_BLOCK;
    const uint c = column % DELTA_BLOCK;
    float entered = 1.0f;
    for (uint row = 0; row <= column; ++row) {
        entered *= alpha[row];
    }
    // The block's own triangle, row by row. `held` has the column of T beta above the row, times the decay from there to it.
    float held[DELTA_BLOCK];
    float between = 1.0f;
    const threadgroup float* own_kk = kk + block_pair(block, block) * BLOCK_NUMBERS;
    const threadgroup float* own_qk = qk + block_pair(block, block) * BLOCK_NUMBERS;
    for (uint i = 0; i < DELTA_BLOCK; ++i) {
        const uint row = block * DELTA_BLOCK + i;
        float known = 0.0f;
        for (uint m = 0; m < i; ++m) {
            held[m] *= alpha[row];
            known += own_kk[i * DELTA_BLOCK + m] * held[m];
        }
        const float solved = i < c ? 0.0f : beta[row] * (i == c ? 1.0f : -known);
        held[i] = solved;
        between = i > c ? between * alpha[row] : 1.0f;
        const uint at = i * DELTA_BLOCK + c;
        matrices[(SOLVE + block) * BLOCK_NUMBERS + at] = solved;
        matrices[(SOLVE_OLD + block) * BLOCK_NUMBERS + at] = -solved * entered;
        matrices[(WITHIN + block_pair(block, block)) * BLOCK_NUMBERS + at] = i < c ? 0.0f : own_qk[at] * between;
    }
    for (uint i = block + 1; i < blocks; ++i) {
        for (uint r = 0; r < DELTA_BLOCK; ++r) {
            between *= alpha[i * DELTA_BLOCK + r];
            const uint at = r * DELTA_BLOCK + c;
            const uint product = block_pair(i, block) * BLOCK_NUMBERS + at;
            matrices[(EARLIER + earlier_pair(i, block)) * BLOCK_NUMBERS + at] = -kk[product] * between;
            matrices[WITHIN * BLOCK_NUMBERS + product] = qk[product] * between;
        }
    }
    for (uint i = 0; i < DELTA_BLOCK; ++i) {
        const uint at = i * DELTA_BLOCK + c;
        matrices[(ENTER + block) * BLOCK_NUMBERS + at] = i == c ? entered : 0.0f;
        matrices[(LEAVE + block) * BLOCK_NUMBERS + at] = i == c ? between : 0.0f;
        if (block == 0) {
            matrices[KEEP * BLOCK_NUMBERS + at] = i == c ? entered * between : 0.0f;
        }
    }
}

/// All of a chunk that does not depend on the state: convolved and normed keys and queries of a key head, as matrices of a block
/// of tokens and one of dimensions, one behind the other; and the matrices of its value heads. Behind the last token, up to the
/// end of its block, keys and queries are zeros and nothing decays.
[[max_total_threads_per_threadgroup(256)]]
kernel void prepare_chunks(
    const device float* qkv [[buffer(0)]],
    const device float* taps [[buffer(1)]],
    const device float* b [[buffer(2)]],
    const device float* a [[buffer(3)]],
    const device float* a_log [[buffer(4)]],
    const device float* dt_bias [[buffer(5)]],
    const device uint* position [[buffer(6)]],
    const device uint* rows [[buffer(7)]],
    const device float* conv [[buffer(8)]],
    device float* keys [[buffer(9)]],
    device float* queries [[buffer(10)]],
    device float* matrices [[buffer(11)]],
    threadgroup float* products [[threadgroup(0)]],
    threadgroup float* gates [[threadgroup(1)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint chunk = group.x;
    const uint key_head = group.y;
    const uint first = chunk * DELTA_CHUNK;
    const uint count = min(DELTA_CHUNK, rows[0] - first);
    const uint blocks = (count + DELTA_BLOCK - 1) / DELTA_BLOCK;
    const ulong head_numbers = (ulong(chunk) * KEY_HEADS + key_head) * DELTA_CHUNK * KEY_DIM;
    keys += head_numbers;
    queries += head_numbers;

    for (uint row = simdgroup; row < blocks * DELTA_BLOCK; row += PREPARE_SIMDGROUPS) {
        float q[HELD_KEYS];
        float k[HELD_KEYS];
        float q_q = 0.0f;
        float k_k = 0.0f;
        for (uint h = 0; h < HELD_KEYS; ++h) {
            const uint i = h * LANES + lane;
            const uint channel = key_head * KEY_DIM + i;
            const bool there = row < count && i < KEY_DIM;
            q[h] = there ? convolved(qkv, conv, taps, position[0], first + row, channel) : 0.0f;
            k[h] = there ? convolved(qkv, conv, taps, position[0], first + row, KEY_WIDTH + channel) : 0.0f;
            q_q += q[h] * q[h];
            k_k += k[h] * k[h];
        }
        const float q_factor = rsqrt(simd_sum(q_q) + L2_EPS) * rsqrt(float(KEY_DIM));
        const float k_factor = rsqrt(simd_sum(k_k) + L2_EPS);
        for (uint h = 0; h < HELD_KEYS; ++h) {
            const uint i = h * LANES + lane;
            const uint block = row / DELTA_BLOCK * KEY_BLOCKS + i / DELTA_BLOCK;
            const uint at = block * BLOCK_NUMBERS + row % DELTA_BLOCK * DELTA_BLOCK + i % DELTA_BLOCK;
            if (i < KEY_DIM) {
                keys[at] = k[h] * k_factor;
                queries[at] = q[h] * q_factor;
            }
        }
    }
    // alpha of all value heads of the key head, then beta.
    threadgroup float* strengths = gates + SHARED_KEYS * DELTA_CHUNK;
    for (uint i = thread_index; i < SHARED_KEYS * DELTA_CHUNK; i += LANES * PREPARE_SIMDGROUPS) {
        const uint head = key_head * SHARED_KEYS + i / DELTA_CHUNK;
        const uint row = i % DELTA_CHUNK;
        const uint at = (first + row) * VALUE_HEADS + head;
        gates[i] = row < count ? decay(a[at] + dt_bias[head], -exp(a_log[head])) : 1.0f;
        strengths[i] = row < count ? sigmoid(b[at]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_device);

    uint pair = 0;
    for (uint i = 0; i < blocks; ++i) {
        for (uint j = 0; j <= i; ++j) {
            if (pair % PREPARE_SIMDGROUPS == simdgroup) {
                simdgroup_float8x8 kk = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                simdgroup_float8x8 qk = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                for (uint d = 0; d < KEY_BLOCKS; ++d) {
                    simdgroup_float8x8 before;
                    simdgroup_float8x8 key;
                    simdgroup_float8x8 query;
                    simdgroup_load(before, keys + (j * KEY_BLOCKS + d) * BLOCK_NUMBERS, DELTA_BLOCK, ulong2(0, 0), true);
                    simdgroup_load(key, keys + (i * KEY_BLOCKS + d) * BLOCK_NUMBERS, DELTA_BLOCK);
                    simdgroup_load(query, queries + (i * KEY_BLOCKS + d) * BLOCK_NUMBERS, DELTA_BLOCK);
                    simdgroup_multiply_accumulate(kk, key, before, kk);
                    simdgroup_multiply_accumulate(qk, query, before, qk);
                }
                simdgroup_store(kk, products + pair * BLOCK_NUMBERS, DELTA_BLOCK);
                simdgroup_store(qk, products + (BLOCK_PAIRS + pair) * BLOCK_NUMBERS, DELTA_BLOCK);
            }
            pair += 1;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (uint i = thread_index; i < SHARED_KEYS * DELTA_CHUNK; i += LANES * PREPARE_SIMDGROUPS) {
        const uint head = key_head * SHARED_KEYS + i / DELTA_CHUNK;
        const uint column = i % DELTA_CHUNK;
        if (column < blocks * DELTA_BLOCK) {
            device float* own = matrices + (ulong(chunk) * VALUE_HEADS + head) * CHUNK_MATRICES * BLOCK_NUMBERS;
            const uint head_gates = i / DELTA_CHUNK * DELTA_CHUNK;
            chunk_column(
                products, products + BLOCK_PAIRS * BLOCK_NUMBERS, gates + head_gates, strengths + head_gates, own, column, blocks
            );
        }
    }
}

/// Writes the state of one value head's 32 columns with what was pending, and empties the log. For all threads of a threadgroup.
inline void settle(
    device float* state, const device float* log, device uint* pending, uint2 group, uint simdgroup, uint lane
) {
    device uint* own = pending + group.y * COLUMN_BLOCKS + group.x;
    const uint count = *own;
    const uint column = group.x * LANES + lane;
    for (uint first = simdgroup * STATE_ROWS; first < KEY_DIM && count > 0; first += CHUNKS_SIMDGROUPS * STATE_ROWS) {
        float s[STATE_ROWS];
        device float* mine = state + (group.y * KEY_DIM + first) * VALUE_DIM + column;
        for (uint i = 0; i < STATE_ROWS; ++i) {
            s[i] = mine[i * VALUE_DIM];
        }
        replay(s, log, count, group.y, column, first);
        for (uint i = 0; i < STATE_ROWS; ++i) {
            mine[i * VALUE_DIM] = s[i];
        }
    }
    threadgroup_barrier(mem_flags::mem_device);
    if (simdgroup == 0 && lane == 0) {
        *own = 0;
    }
}

/// The delta rule of one value head's 32 columns, chunk by chunk. A SIMD-group has 8 columns of the state as matrices. Leaves what
/// `delta` does, but for gain and gate, and writes the state.
[[max_total_threads_per_threadgroup(128)]]
kernel void delta_chunks(
    const device float* qkv [[buffer(0)]],
    const device float* taps [[buffer(1)]],
    const device uint* position [[buffer(2)]],
    const device uint* rows [[buffer(3)]],
    const device float* conv [[buffer(4)]],
    const device float* keys [[buffer(5)]],
    const device float* queries [[buffer(6)]],
    const device float* matrices [[buffer(7)]],
    device float* state [[buffer(8)]],
    const device float* log [[buffer(9)]],
    device uint* pending [[buffer(10)]],
    device float* outputs [[buffer(11)]],
    device float* squares [[buffer(12)]],
    threadgroup float* tile [[threadgroup(0)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const uint head = group.y;
    const uint key_head = head / SHARED_KEYS;
    const uint column = group.x * LANES + lane;
    settle(state, log, pending, group, simdgroup, lane);
    simdgroup_float8x8 s[KEY_BLOCKS];
    device float* mine = state + ulong(head) * KEY_DIM * VALUE_DIM + group.x * LANES + simdgroup * DELTA_BLOCK;
#pragma unroll
    for (uint d = 0; d < KEY_BLOCKS; ++d) {
        simdgroup_load(s[d], mine + d * DELTA_BLOCK * VALUE_DIM, VALUE_DIM);
    }
    for (uint first = 0; first < rows[0]; first += DELTA_CHUNK) {
        const uint count = min(DELTA_CHUNK, rows[0] - first);
        const uint blocks = (count + DELTA_BLOCK - 1) / DELTA_BLOCK;
        for (uint row = simdgroup; row < blocks * DELTA_BLOCK; row += CHUNKS_SIMDGROUPS) {
            const uint channel = 2 * KEY_WIDTH + head * VALUE_DIM + column;
            tile[row * LANES + lane] =
                row < count ? convolved(qkv, conv, taps, position[0], first + row, channel) : 0.0f;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);

        const ulong chunk = first / DELTA_CHUNK;
        const ulong head_numbers = (chunk * KEY_HEADS + key_head) * DELTA_CHUNK * KEY_DIM;
        const device float* own = matrices + (chunk * VALUE_HEADS + head) * CHUNK_MATRICES * BLOCK_NUMBERS;
        // Loops over what is in registers are unrolled, lest it be in memory.
        simdgroup_float8x8 added[CHUNK_BLOCKS];
#pragma unroll
        for (uint i = 0; i < CHUNK_BLOCKS; ++i) {
            if (i < blocks) {
                const device float* k = keys + head_numbers + i * KEY_BLOCKS * BLOCK_NUMBERS;
                const device float* q = queries + head_numbers + i * KEY_BLOCKS * BLOCK_NUMBERS;
                simdgroup_float8x8 known = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                simdgroup_float8x8 read = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                simdgroup_float8x8 m;
#pragma unroll
                for (uint d = 0; d < KEY_BLOCKS; ++d) {
                    simdgroup_load(m, k + d * BLOCK_NUMBERS, DELTA_BLOCK);
                    simdgroup_multiply_accumulate(known, m, s[d], known);
                    simdgroup_load(m, q + d * BLOCK_NUMBERS, DELTA_BLOCK);
                    simdgroup_multiply_accumulate(read, m, s[d], read);
                }
                threadgroup float* values = tile + i * DELTA_BLOCK * LANES + simdgroup * DELTA_BLOCK;
                simdgroup_float8x8 v;
                simdgroup_load(v, values, LANES);
#pragma unroll
                for (uint j = 0; j < i; ++j) {
                    simdgroup_load(m, own + (EARLIER + earlier_pair(i, j)) * BLOCK_NUMBERS, DELTA_BLOCK);
                    simdgroup_multiply_accumulate(v, m, added[j], v);
                }
                simdgroup_load(m, own + (SOLVE + i) * BLOCK_NUMBERS, DELTA_BLOCK);
                simdgroup_multiply(added[i], m, v);
                simdgroup_load(m, own + (SOLVE_OLD + i) * BLOCK_NUMBERS, DELTA_BLOCK);
                simdgroup_multiply_accumulate(added[i], m, known, added[i]);

                simdgroup_load(m, own + (ENTER + i) * BLOCK_NUMBERS, DELTA_BLOCK);
                simdgroup_multiply(v, m, read);
#pragma unroll
                for (uint j = 0; j <= i; ++j) {
                    simdgroup_load(m, own + (WITHIN + block_pair(i, j)) * BLOCK_NUMBERS, DELTA_BLOCK);
                    simdgroup_multiply_accumulate(v, m, added[j], v);
                }
                simdgroup_store(v, values, LANES);
            }
        }
#pragma unroll
        for (uint i = 0; i < CHUNK_BLOCKS; ++i) {
            if (i < blocks) {
                simdgroup_float8x8 m;
                simdgroup_load(m, own + (LEAVE + i) * BLOCK_NUMBERS, DELTA_BLOCK);
                simdgroup_multiply(added[i], m, added[i]);
            }
        }
        simdgroup_float8x8 kept;
        simdgroup_load(kept, own + KEEP * BLOCK_NUMBERS, DELTA_BLOCK);
#pragma unroll
        for (uint d = 0; d < KEY_BLOCKS; ++d) {
            simdgroup_multiply(s[d], kept, s[d]);
#pragma unroll
            for (uint i = 0; i < CHUNK_BLOCKS; ++i) {
                if (i < blocks) {
                    const device float* k = keys + head_numbers + (i * KEY_BLOCKS + d) * BLOCK_NUMBERS;
                    simdgroup_float8x8 m;
                    simdgroup_load(m, k, DELTA_BLOCK, ulong2(0, 0), true);
                    simdgroup_multiply_accumulate(s[d], m, added[i], s[d]);
                }
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // A thread writes the same places for the next chunk.
        for (uint row = simdgroup; row < count; row += CHUNKS_SIMDGROUPS) {
            const float o = tile[row * LANES + lane];
            const float total = simd_sum(o * o);
            outputs[(first + row) * VALUE_WIDTH + head * VALUE_DIM + column] = o;
            if (lane == 0) {
                squares[((first + row) * VALUE_HEADS + head) * COLUMN_BLOCKS + group.x] = total;
            }
        }
    }
#pragma unroll
    for (uint d = 0; d < KEY_BLOCKS; ++d) {
        simdgroup_store(s[d], mine + d * DELTA_BLOCK * VALUE_DIM, VALUE_DIM);
    }
}

/// Value `i` of a token's heads with gain, gate and norm. Rows are those of the launch.
inline float gated_value(
    const device float* squares, const device float* z, const device float* gains, const device float* read, ulong row, uint i
) {
    const ulong at = row * VALUE_WIDTH + i;
    return read[at] * gains[i % VALUE_DIM] * silu(z[at]) * head_factor(squares, uint(row) * VALUE_HEADS + i / VALUE_DIM);
}

/// Gain, gate and the norm of each head of what `delta_chunks` leaves.
[[max_total_threads_per_threadgroup(256)]]
kernel void gate_heads(
    const device float* squares [[buffer(0)]],
    const device float* z [[buffer(1)]],
    const device float* gains [[buffer(2)]],
    device float* gated [[buffer(3)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    const uint i = group.x * 256 + thread_index;
    if (i < VALUE_WIDTH) {
        gated[ulong(group.y) * VALUE_WIDTH + i] = gated_value(squares, z, gains, gated, group.y, i);
    }
}
