// One kernel that is right, and kernels that are wrong on purpose.
#include <metal_stdlib>
using namespace metal;

[[max_total_threads_per_threadgroup(64)]]
kernel void right(
    device float* out [[buffer(0)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]
) {
    const float sum = simd_sum(float(lane));
    shared[i] = 2.0f * float(i);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = shared[(i + 33) % 64] + sum;
}

[[max_total_threads_per_threadgroup(64)]]
kernel void missing_barrier(
    device float* out [[buffer(0)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    shared[i] = float(i);
    out[i] = shared[(i + 33) % 64];
}

[[max_total_threads_per_threadgroup(64)]]
kernel void not_written(
    device float* out [[buffer(0)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    if (i != 5) {
        shared[i] = 1.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = shared[i];
}

[[max_total_threads_per_threadgroup(64)]]
kernel void missed_barrier(
    device float* out [[buffer(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    if (i < 40) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    out[i] = 1.0f;
}

[[max_total_threads_per_threadgroup(64)]]
kernel void missed_sum(
    device float* out [[buffer(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    out[i] = i % 32 < 7 ? simd_sum(1.0f) : 0.0f;
}

[[max_total_threads_per_threadgroup(64)]]
kernel void mixed_functions(
    device float* out [[buffer(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    out[i] = i % 2 == 0 ? simd_sum(1.0f) : simd_max(1.0f);
}

[[max_total_threads_per_threadgroup(64)]]
kernel void behind_buffer(
    device float* out [[buffer(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    out[i + 1] = 1.0f;
}

[[max_total_threads_per_threadgroup(64)]]
kernel void before_buffer(
    device float* out [[buffer(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    device float* before = out + i;
    before[-1] = 1.0f;
}

[[max_total_threads_per_threadgroup(64)]]
kernel void behind_threadgroup_memory(
    device float* out [[buffer(0)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    shared[i + 1] = 1.0f;
    out[i] = shared[i + 1];
}

[[max_total_threads_per_threadgroup(64)]]
kernel void behind_array(
    device float* out [[buffer(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    float held[4] = {0.0f};
    for (uint j = 0; j <= i; ++j) {
        held[j] = float(j);
    }
    out[i] = held[i % 4];
}

[[max_total_threads_per_threadgroup(64)]]
kernel void round(
    device float* out [[buffer(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    out[i] = float(bfloat(out[i]));
}

/// Right: A A^T + 1 of a matrix in threadgroup memory, by the first SIMD-group.
[[max_total_threads_per_threadgroup(64)]]
kernel void product(
    device float* out [[buffer(0)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]
) {
    shared[i] = out[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (simdgroup == 0) {
        simdgroup_float8x8 a;
        simdgroup_float8x8 transposed;
        simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
        simdgroup_load(a, shared, 8);
        simdgroup_load(transposed, shared, 8, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(sum, a, transposed, sum);
        simdgroup_store(sum, out, 8);
    }
}

[[max_total_threads_per_threadgroup(64)]]
kernel void missed_product(
    device float* out [[buffer(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    if (i < 31) {
        simdgroup_multiply(sum, sum, sum);
    }
    if (i < 32) {
        simdgroup_store(sum, out, 8);
    }
}

/// A barrier is missing that shows only where one SIMD-group is further than the other.
[[max_total_threads_per_threadgroup(64)]]
kernel void runs_ahead(
    device float* out [[buffer(0)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    float sum = 0.0f;
    for (uint round = 0; round < 3; ++round) {
        shared[i] = float(round);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sum += simd_sum(simd_sum(shared[(i + 32) % 64]));
    }
    out[i] = sum;
}
