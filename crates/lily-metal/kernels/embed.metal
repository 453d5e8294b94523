/// Value `at` of a matrix.
template <uint BITS> inline float value_of(Matrix m, ulong at) {
    const uint code = uint(m.codes[at / 2]) >> (4 * (at % 2)) & 15;
    return float(m.scales[at / GROUP]) * float(code) + float(m.biases[at / GROUP]);
}

template <> inline float value_of<16>(Matrix m, ulong at) {
    return float(((const device bfloat*)m.codes)[at]);
}

/// x = the tokens' rows of the embedding. A thread makes one value.
[[max_total_threads_per_threadgroup(256)]]
kernel void embed(
    const device uint* tokens [[buffer(0)]],
    const device uchar* codes [[buffer(1)]],
    const device bfloat* scales [[buffer(2)]],
    const device bfloat* biases [[buffer(3)]],
    device float* x [[buffer(4)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    const uint i = group.x * 256 + thread_index;
    if (i >= HIDDEN) {
        return;
    }
    const ulong at = ulong(tokens[group.y]) * HIDDEN + i;
    const Matrix m = {codes, scales, biases};
    x[group.y * HIDDEN + i] = value_of<MATRIX_BITS>(m, at);
}
