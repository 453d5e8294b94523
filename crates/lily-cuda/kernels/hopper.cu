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
// Into the L2 cache only, to stay there until it is read.
__device__ __forceinline__ void bulk_prefetch(const void* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from), "r"(bytes), "l"(policy) : "memory");
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

// --- products of warpgroups ---

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WARPGROUPS 1
#else
#define HAS_WARPGROUPS 0
#endif

#if HAS_WARPGROUPS
// A warpgroup gives back what it has of registers beyond N a thread, or takes more once they are free. All its warps call it.
template <int N> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
// Starts a warpgroup's products of a tile a warp, whose codes are `a`, with a record; c is what they are when they have ended.
__device__ __forceinline__ void start_products(int (&c)[8], const u32 (&a)[8], u64 first, u64 second) {
    asm volatile("{.reg .pred p;\n"
                 "setp.ne.u32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k32.s32.u8.s8 {%0,%1,%2,%3,"
                 "%4,%5,%6,%7}, {%8,%9,%10,%11}, %16, p;\n"
                 "setp.eq.u32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k32.s32.u8.s8 {%0,%1,%2,%3,"
                 "%4,%5,%6,%7}, {%12,%13,%14,%15}, %17, p;}"
                 : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]), "=r"(c[4]), "=r"(c[5]), "=r"(c[6]), "=r"(c[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "l"(first), "l"(second)
                 : "memory");
}
__device__ __forceinline__ void start_products(int (&c)[16], const u32 (&a)[8], u64 first, u64 second) {
    asm volatile("{.reg .pred p;\n"
                 "setp.ne.u32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                 "{%16,%17,%18,%19}, %24, p;\n"
                 "setp.eq.u32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                 "{%20,%21,%22,%23}, %25, p;}"
                 : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]), "=r"(c[4]), "=r"(c[5]), "=r"(c[6]), "=r"(c[7]), "=r"(c[8]),
                   "=r"(c[9]), "=r"(c[10]), "=r"(c[11]), "=r"(c[12]), "=r"(c[13]), "=r"(c[14]), "=r"(c[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "l"(first), "l"(second)
                 : "memory");
}
__device__ __forceinline__ void start_products(int (&c)[32], const u32 (&a)[8], u64 first, u64 second) {
    asm volatile("{.reg .pred p;\n"
                 "setp.ne.u32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %40, p;\n"
                 "setp.eq.u32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.s32.u8.s8 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                 "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%36,%37,%38,%39}, %41, p;}"
                 : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3]), "=r"(c[4]), "=r"(c[5]), "=r"(c[6]), "=r"(c[7]), "=r"(c[8]),
                   "=r"(c[9]), "=r"(c[10]), "=r"(c[11]), "=r"(c[12]), "=r"(c[13]), "=r"(c[14]), "=r"(c[15]), "=r"(c[16]),
                   "=r"(c[17]), "=r"(c[18]), "=r"(c[19]), "=r"(c[20]), "=r"(c[21]), "=r"(c[22]), "=r"(c[23]), "=r"(c[24]),
                   "=r"(c[25]), "=r"(c[26]), "=r"(c[27]), "=r"(c[28]), "=r"(c[29]), "=r"(c[30]), "=r"(c[31])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), "l"(first), "l"(second)
                 : "memory");
}
// Registers are written before products that read them, and products that were started before are one group.
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until only AFTER groups are still on their way; c is one of those that have ended.
template <int AFTER, int T> __device__ __forceinline__ void await_products(int (&c)[T]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(AFTER) : "memory");
#pragma unroll
    for (int i = 0; i < T; i++) asm volatile("" : "+r"(c[i])::"memory");  // not read before
}
#endif
