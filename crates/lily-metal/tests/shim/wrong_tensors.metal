// A kernel with a product of tensors that is right, and kernels that are wrong on purpose. All leave A A^T, of A [16, 16] in half.
#include <metal_stdlib>
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;

typedef tensor<threadgroup half, dextents<int, 2>, tensor_inline> HalfTile;
typedef mpp::tensor_ops::matmul2d<
    mpp::tensor_ops::matmul2d_descriptor(16, 16, 32, false, true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply),
    execution_simdgroups<2>>
    Square;
typedef mpp::tensor_ops::matmul2d<
    mpp::tensor_ops::matmul2d_descriptor(
        16, 16, 32, false, true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate
    ),
    execution_simdgroups<2>>
    AddedSquare;
typedef mpp::tensor_ops::matmul2d<
    mpp::tensor_ops::matmul2d_descriptor(16, 16, 32, false, true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply),
    execution_simdgroups<1>>
    SmallSquare;

/// [16, 32], rows `pitch` apart.
inline HalfTile tile_of(threadgroup half* at, int rows, int pitch) {
    return HalfTile(at, dextents<int, 2>(32, rows), array<int, 2>{1, pitch});
}

/// A, and behind its 16 columns zeros.
inline void bring(threadgroup half* to, const device float* from, uint i) {
    for (uint j = i; j < 512; j += 64) {
        to[j] = half(j % 32 < 16 ? from[j / 32 * 16 + j % 32] : 0.0f);
    }
}

template <class Sums> inline void store(thread Sums& sums, device float* out) {
    for (ushort i = 0; i < sums.get_capacity(); ++i) {
        if (sums.is_valid_element(i)) {
            const auto place = sums.get_multidimensional_index(i);
            out[uint(place[1]) * 16 + uint(place[0])] = sums[i];
        }
    }
}

[[max_total_threads_per_threadgroup(64)]]
kernel void square(
    device float* out [[buffer(0)]],
    threadgroup half* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    bring(shared, out, i);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    HalfTile a = tile_of(shared, 16, 32);
    Square product;
    auto sums = product.get_destination_cooperative_tensor<HalfTile, HalfTile, float>();
    product.run(a, a, sums);
    store(sums, out);
}

[[max_total_threads_per_threadgroup(64)]]
kernel void square_without_barrier(
    device float* out [[buffer(0)]],
    threadgroup half* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    bring(shared, out, i);
    HalfTile a = tile_of(shared, 16, 32);
    Square product;
    auto sums = product.get_destination_cooperative_tensor<HalfTile, HalfTile, float>();
    product.run(a, a, sums);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    store(sums, out);
}

/// The matrix is overwritten before all have multiplied with it.
[[max_total_threads_per_threadgroup(64)]]
kernel void square_overwritten(
    device float* out [[buffer(0)]],
    threadgroup half* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    bring(shared, out, i);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    HalfTile a = tile_of(shared, 16, 32);
    Square product;
    auto sums = product.get_destination_cooperative_tensor<HalfTile, HalfTile, float>();
    product.run(a, a, sums);
    for (uint j = i; j < 512; j += 64) {
        shared[j] = half(0.0f);
    }
    store(sums, out);
}

/// What is added to was never set.
[[max_total_threads_per_threadgroup(64)]]
kernel void square_of_nothing(
    device float* out [[buffer(0)]],
    threadgroup half* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    bring(shared, out, i);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    HalfTile a = tile_of(shared, 16, 32);
    AddedSquare product;
    auto sums = product.get_destination_cooperative_tensor<HalfTile, HalfTile, float>();
    product.run(a, a, sums);
    store(sums, out);
}

/// Places that hold no element are stored too.
[[max_total_threads_per_threadgroup(64)]]
kernel void square_of_everything(
    device float* out [[buffer(0)]],
    threadgroup half* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    bring(shared, out, i);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    HalfTile a = tile_of(shared, 16, 32);
    Square product;
    auto sums = product.get_destination_cooperative_tensor<HalfTile, HalfTile, float>();
    product.run(a, a, sums);
    for (ushort j = 0; j < sums.get_capacity(); ++j) {
        const auto place = sums.get_multidimensional_index(j);
        out[uint(place[1]) * 16 + uint(place[0])] = sums[j];
    }
}

[[max_total_threads_per_threadgroup(64)]]
kernel void square_by_some(
    device float* out [[buffer(0)]],
    threadgroup half* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    bring(shared, out, i);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    HalfTile a = tile_of(shared, 16, 32);
    Square product;
    auto sums = product.get_destination_cooperative_tensor<HalfTile, HalfTile, float>();
    if (i < 63) {
        product.run(a, a, sums);
    }
    store(sums, out);
}

[[max_total_threads_per_threadgroup(64)]]
kernel void square_by_too_few(
    device float* out [[buffer(0)]],
    threadgroup half* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    bring(shared, out, i);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    HalfTile a = tile_of(shared, 16, 32);
    SmallSquare product;
    auto sums = product.get_destination_cooperative_tensor<HalfTile, HalfTile, float>();
    product.run(a, a, sums);
    store(sums, out);
}

[[max_total_threads_per_threadgroup(64)]]
kernel void square_of_another_shape(
    device float* out [[buffer(0)]],
    threadgroup half* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    bring(shared, out, i);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    HalfTile a = tile_of(shared, 15, 32);
    Square product;
    auto sums = product.get_destination_cooperative_tensor<HalfTile, HalfTile, float>();
    product.run(a, a, sums);
    store(sums, out);
}

[[max_total_threads_per_threadgroup(64)]]
kernel void square_of_overlapping_rows(
    device float* out [[buffer(0)]],
    threadgroup half* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    bring(shared, out, i);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    HalfTile a = tile_of(shared, 16, 16);
    Square product;
    auto sums = product.get_destination_cooperative_tensor<HalfTile, HalfTile, float>();
    product.run(a, a, sums);
    store(sums, out);
}

[[max_total_threads_per_threadgroup(64)]]
kernel void square_of_odd_places(
    device float* out [[buffer(0)]],
    threadgroup half* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    bring(shared, out, i);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    HalfTile a = tile_of(shared + 8, 16, 32);
    Square product;
    auto sums = product.get_destination_cooperative_tensor<HalfTile, HalfTile, float>();
    product.run(a, a, sums);
    store(sums, out);
}

/// Each of 256 numbers, rounded to half and back.
[[max_total_threads_per_threadgroup(64)]]
kernel void round_to_half(
    device float* out [[buffer(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    for (uint j = i; j < 256; j += 64) {
        out[j] = float(half(out[j]));
    }
}
