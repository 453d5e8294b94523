/// x = the token's row of the embedding. A thread makes one value.
[[max_total_threads_per_threadgroup(256)]]
kernel void embed(
    const device uint* token [[buffer(0)]],
    const device uchar* codes [[buffer(1)]],
    const device bfloat* scales [[buffer(2)]],
    const device bfloat* biases [[buffer(3)]],
    device float* x [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    const uint i = group * 256 + thread_index;
    if (i >= HIDDEN) {
        return;
    }
    const ulong at = ulong(token[0]) * HIDDEN + i;
    const uint code = uint(codes[at / 2]) >> (4 * (i % 2)) & 15;
    x[i] = float(scales[at / GROUP]) * float(code) + float(biases[at / GROUP]);
}
