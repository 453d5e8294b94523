// Kernels with races, and right ones beside them.
#include <metal_stdlib>
using namespace metal;

/// Right: threads are parted by barriers, threadgroups by what they write; neighbours write bytes of one word.
[[max_total_threads_per_threadgroup(64)]]
kernel void parted(
    device uchar* out [[buffer(0)]],
    threadgroup bfloat* shared [[threadgroup(0)]],
    uint group [[threadgroup_position_in_grid]],
    uint i [[thread_index_in_threadgroup]]
) {
    for (uint round = 0; round < 3; ++round) {
        shared[i] = bfloat(float(i + round));
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const bfloat other = shared[(i + 33) % 64];
        out[group * 64 + i] = uchar(float(other));
        threadgroup_barrier(mem_flags::mem_device);
        const uchar next = out[group * 64 + (i + 1) % 64];
        threadgroup_barrier(mem_flags::mem_device);
        out[group * 64 + i] = uchar(next + 1);
    }
}

[[max_total_threads_per_threadgroup(64)]]
kernel void groups_write(
    device float* out [[buffer(0)]],
    uint group [[threadgroup_position_in_grid]],
    uint i [[thread_index_in_threadgroup]]
) {
    if (i == 7) {
        out[i] = float(group);
    }
}

/// The first threadgroup reads what the second writes.
[[max_total_threads_per_threadgroup(64)]]
kernel void group_reads(
    device float* out [[buffer(0)]],
    uint group [[threadgroup_position_in_grid]],
    uint i [[thread_index_in_threadgroup]]
) {
    if (group == 0 && i < 32) {
        out[32 + i] = out[i];
    } else if (i == 3) {
        out[i] = 1.0f;
    }
}

/// The second threadgroup reads what the first does, and writes it behind a barrier, which helps it alone.
[[max_total_threads_per_threadgroup(64)]]
kernel void group_writes_later(
    device float* out [[buffer(0)]],
    uint group [[threadgroup_position_in_grid]],
    uint i [[thread_index_in_threadgroup]]
) {
    const float sum = out[0] + out[1];
    threadgroup_barrier(mem_flags::mem_device);
    if (group == 1 && i == 5) {
        out[1] = sum;
    }
}

[[max_total_threads_per_threadgroup(64)]]
kernel void device_memory(
    device float* out [[buffer(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    out[i] = 1.0f;
    if (i == 40) {
        out[0] = out[i + 1];
    }
}

/// A helper's line is told, and who called it.
inline void put(threadgroup float* to, uint at) {
    to[at] = float(at);
}

/// What one thread reads another writes, without a barrier before the next round.
[[max_total_threads_per_threadgroup(64)]]
kernel void next_round(
    device float* out [[buffer(0)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    float sum = 0.0f;
    for (uint round = 0; round < 2; ++round) {
        put(shared, i);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sum += shared[63 - i];
    }
    out[i] = sum;
}

/// SIMD-group functions order no memory.
[[max_total_threads_per_threadgroup(64)]]
kernel void lanes(
    device float* out [[buffer(0)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    shared[i] = float(i);
    const float sum = simd_sum(float(i));
    out[i] = shared[i ^ 1] + sum;
}

/// All write the same, which is a race all the same.
[[max_total_threads_per_threadgroup(64)]]
kernel void same_value(
    device float* out [[buffer(0)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    shared[0] = 1.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = shared[0];
}

/// Bytes of a matrix that another SIMD-group writes.
[[max_total_threads_per_threadgroup(64)]]
kernel void matrices(
    device float* out [[buffer(0)]],
    threadgroup float* shared [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]
) {
    simdgroup_float8x8 a = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    if (simdgroup == 0) {
        simdgroup_store(a, shared, 8);
    } else {
        simdgroup_load(a, shared, 8);
        simdgroup_store(a, out, 8);
    }
}

/// Right: atomic additions are in nobody's way.
[[max_total_threads_per_threadgroup(64)]]
kernel void added(
    device uint* out [[buffer(0)]],
    threadgroup atomic_uint* sums [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    atomic_store_explicit(sums + i, 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(sums + i % 4, i, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    out[i] = atomic_load_explicit(sums + i, memory_order_relaxed);
}

/// What is loaded depends on who came before.
[[max_total_threads_per_threadgroup(64)]]
kernel void loaded_early(
    device uint* out [[buffer(0)]],
    threadgroup atomic_uint* sums [[threadgroup(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    if (i == 0) {
        atomic_store_explicit(sums, 0, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(sums, 1, memory_order_relaxed);
    out[i] = atomic_load_explicit(sums, memory_order_relaxed);
}
