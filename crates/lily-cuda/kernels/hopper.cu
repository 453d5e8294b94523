// What compute capability 9.0 adds: copies in the background with barriers that count their bytes, and clusters of blocks. Elsewhere
// these functions are empty, and no kernel that needs them is launched.

// --- bulk copies into shared memory ---

__device__ __forceinline__ void barrier_init(u64* bar, u32 count) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
#endif
}
__device__ __forceinline__ void barrier_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void barrier_expect(u64* bar, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
#endif
}
// The same without arriving.
__device__ __forceinline__ void barrier_expect_more(u64* bar, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void barrier_arrive(u64* bar) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
#endif
}
__device__ __forceinline__ void barrier_wait(u64* bar, u32 parity) {
#if __CUDA_ARCH__ >= 900
    u32 done = 0;
    while (!done)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(shared_address(bar)), "r"(parity) : "memory");
#endif
}
// Reads of and writes to shared memory so far come before bulk copies behind it.
__device__ __forceinline__ void proxy_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// The same, and for global memory too.
__device__ __forceinline__ void whole_proxy_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
// What is read ONCE a step, as weights are, is the first to leave the L2 cache, which holds what kernels pass on to each other.
template <bool ONCE = true> __device__ __forceinline__ void bulk_copy(void* to, const void* from, u32 bytes, u64* bar) {
#if __CUDA_ARCH__ >= 900
    u64 policy;
    if constexpr (ONCE) asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    else asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(bar)), "l"(policy) : "memory");
#endif
}
// Into the L2 cache only.
__device__ __forceinline__ void bulk_prefetch(const void* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// --- clusters of blocks ---

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
// The two halves of a barrier of all threads of a cluster; what was written before the first is seen behind the second, unless the
// barrier only says that threads have come so far.
template <bool RELEASES = true> __device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    if constexpr (RELEASES) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    else asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Address of block `rank`'s copy of a shared variable.
__device__ __forceinline__ u32 peer_address(u32 address, u32 rank) {
    u32 out = address;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
#endif
    return out;
}
__device__ __forceinline__ void store_peer(u32 address, float x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
#endif
}
// The same, and counts the bytes at that block's barrier: no fence is needed, which for `cluster_arrive` waits for all stores of
// the thread, also those to global memory.
__device__ __forceinline__ void send_peer(u32 address, float x, u32 bar) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(x), "r"(bar) : "memory");
#endif
}
__device__ __forceinline__ void send_peer(u32 address, const float4& x, u32 bar) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(bar) : "memory");
#endif
}
