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
    const uint code = uint(codes[at / 2]) >> (4 * (i % 2)) & 15;
    x[group.y * HIDDEN + i] = float(scales[at / GROUP]) * float(code) + float(biases[at / GROUP]);
}
