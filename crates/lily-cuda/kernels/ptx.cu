// Instructions that CUDA C++ has no functions for, on all architectures; what Hopper adds is in hopper.cu. tests/emulate/shim.h has the same
// functions for the CPU, so kernels that have no `asm` of their own run there too.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// (low half, high half) as bf16, rounded to nearest even.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 out;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
    return out;
}
// The larger of two magnitudes; NaN if one is.
__device__ __forceinline__ float max_magnitude(float a, float b) {
    float out;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(fabsf(a)), "f"(fabsf(b)));
    return out;
}
__device__ __forceinline__ float reciprocal(float x) {
    float out;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Unsigned by signed bytes.
__device__ __forceinline__ void mma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Programmatic dependent launch; before compute capability 9.0 kernels simply follow one another.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Sixteen bytes into shared memory, in the background; zeros if they are not `real`.
__device__ __forceinline__ void copy16(void* to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(real ? 16 : 0) : "memory");
}
// Waits for all of this thread.
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// This thread's copies since the last group are one.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until only AFTER groups of this thread are on their way.
template <int AFTER> __device__ __forceinline__ void await_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(AFTER) : "memory"); }

// The hardware's barriers, 0 of which is that of __syncthreads: the threads that come to one are N, those that arrive go on.
template <int N> __device__ __forceinline__ void named_sync(u32 barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(N) : "memory");
}
template <int N> __device__ __forceinline__ void named_arrive(u32 barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(N) : "memory");
}

// --- global memory that blocks of a launch tell each other by ---

__device__ __forceinline__ u32 load_relaxed(const u32* p) {
    u32 x;
    asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ uint4 load_relaxed(const uint4* p) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ u32 load_acquire(const u32* p) {
    u32 x;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ void add_release(u32* p, u32 n) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory");
}
