// What CUDA C++, kernels/ptx.cu and kernels/hopper.cu give a kernel, for a kernel that is compiled as C++ and run by runtime.cpp. Comes before
// kernels/common.cu in the place of those two files.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define __CUDA_ARCH__ 900
#ifndef HAS_WARPGROUPS
#define HAS_WARPGROUPS 1  // runtime.cpp is for both
#endif
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) alignas(n)

struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// --- what runtime.cpp does ---

namespace emu {
constexpr u32 LANES = 32;

struct Index { u32 x, y, z; };
Index thread_index();
Index block_index();
Index grid_size();

/// The block's variable in shared memory that lies `at` its beginning.
void* shared_memory(u32 at);
/// Room for a variable in the shared memory of every block.
u32 place(u32 bytes);
u8* dynamic_shared_memory();

/// Ends the launch with an error.
[[noreturn]] void fail(const char* problem);

enum Operation { SYNC, SHUFFLE, BALLOT, MAXIMUM, SUM, PRODUCT };
struct Words { u32 word[6]; };
/// Waits for all lanes of the warp, which must be at the same operation; what each has brought, until the next.
const Words* exchange(Operation operation, const Words& mine);
/// Other threads run.
void spin();

/// Hardware barriers of a block.
void barrier(u32 index, u32 threads, bool waits);
/// All threads of the block.
u32 block_threads();

template <class To, class From> To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

template <class T> T shuffle(const T& value, u32 lane) {
    Words mine{};
    static_assert(sizeof value <= sizeof mine, "");
    memcpy(&mine, &value, sizeof value);
    T out;
    memcpy(&out, &exchange(SHUFFLE, mine)[lane % LANES], sizeof out);
    return out;
}

/// What `__shared__ T x` becomes: the N-th of a file.
template <class T, int N> T& shared_variable() {
    static const u32 at = place(sizeof(T));
    return *static_cast<T*>(shared_memory(at));
}
/// What `extern __shared__ u8 x[]` becomes.
struct Dynamic {
    operator u8*() const { return dynamic_shared_memory(); }
};
template <class T> using Type = T;

/// Calls a kernel with its arguments, each at the next multiple of eight bytes.
template <class T> T argument(const u8*& at) {
    T out;
    memcpy(&out, at, sizeof out);
    at += (sizeof out + 7) / 8 * 8;
    return out;
}
template <class... A> void call(void (*kernel)(A...), const u8* at) {
    struct Caller {
        void (*kernel)(A...);
        // In braces arguments are read in their order.
        Caller(void (*kernel)(A...), A... a) { kernel(a...); }
    };
    Caller{kernel, argument<A>(at)...};
}
struct Kernel {
    const char* name;
    void (*run)(const u8* arguments);
};
/// Of the file, closed by one without a name.
extern const Kernel kernels[];
}  // namespace emu

#define threadIdx (emu::thread_index())
#define blockIdx (emu::block_index())
#define gridDim (emu::grid_size())

// --- CUDA's functions ---

inline float __uint_as_float(u32 x) { return emu::bits<float>(x); }
inline u32 __float_as_uint(float x) { return emu::bits<u32>(x); }
inline float __int_as_float(int x) { return emu::bits<float>(x); }
// Compiled with -ffp-contract=off.
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const u64 bytes = (u64)b << 32 | a;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return out;
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (int8_t)((u32)a >> 8 * i) * (int8_t)((u32)b >> 8 * i);
    return c;
}
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

// One thread runs at a time.
template <class T> T atomicAdd(T* p, T x) { const T was = *p; *p += x; return was; }
inline u32 atomicAdd(u32* p, int x) { return atomicAdd(p, (u32)x); }
inline u32 atomicOr(u32* p, u32 x) { const u32 was = *p; *p |= x; return was; }
inline u32 atomicExch(u32* p, u32 x) { const u32 was = *p; *p = x; return was; }

inline void __syncthreads() { emu::barrier(0, emu::block_threads(), true); }
inline void __syncwarp() { emu::exchange(emu::SYNC, {}); }
template <class T> T __shfl_sync(u32, T x, u32 lane) { return emu::shuffle(x, lane); }
template <class T> T __shfl_xor_sync(u32, T x, u32 mask) { return emu::shuffle(x, threadIdx.x % emu::LANES ^ mask); }
template <class T> T __shfl_up_sync(u32, T x, u32 by) {
    const u32 lane = threadIdx.x % emu::LANES;
    return emu::shuffle(x, lane >= by ? lane - by : lane);
}
inline u32 __ballot_sync(u32, bool is) {
    const emu::Words* all = emu::exchange(emu::BALLOT, {{is}});
    u32 out = 0;
    for (u32 i = 0; i < emu::LANES; i++) out |= all[i].word[0] << i;
    return out;
}
inline u32 __reduce_max_sync(u32, u32 x) {
    const emu::Words* all = emu::exchange(emu::MAXIMUM, {{x}});
    u32 out = 0;
    for (u32 i = 0; i < emu::LANES; i++) out = max(out, all[i].word[0]);
    return out;
}
inline u32 __reduce_add_sync(u32, u32 x) {
    const emu::Words* all = emu::exchange(emu::SUM, {{x}});
    u32 out = 0;
    for (u32 i = 0; i < emu::LANES; i++) out += all[i].word[0];
    return out;
}

// --- ptx.cu ---

u32 shared_address(const void* p);
inline u32 bf16_bits(float x) {
    const u32 bits = __float_as_uint(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline float max_magnitude(float a, float b) {
    a = fabsf(a);
    b = fabsf(b);
    return a != a || b != b ? NAN : a < b ? b : a;
}
inline float reciprocal(float x) { return 1.0f / x; }

// Unsigned by signed bytes, m16n8k32: a word of A has inputs 4 t .. 4 t + 3 of row g, then of row g + 8, then both from input 16 on; one
// of B those of column g (g = lane / 4, t = lane % 4). C: columns 2 t and 2 t + 1 of row g, then of row g + 8.
inline void mma(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const emu::Words* all = emu::exchange(emu::PRODUCT, {{a0, a1, a2, a3, b0, b1}});
    const u32 g = threadIdx.x % emu::LANES / 4, t = threadIdx.x % 4;
    for (u32 i = 0; i < 4; i++)
        for (u32 half = 0; half < 2; half++)
            for (u32 k = 0; k < 4; k++) {
                const u32 a = all[g * 4 + k].word[half * 2 + i / 2], b = all[(t * 2 + i % 2) * 4 + k].word[4 + half];
                for (u32 byte = 0; byte < 32; byte += 8) c[i] += (int)(u8)(a >> byte) * (int8_t)(b >> byte);
            }
}
// No kernel that is run here has products of bf16.
inline void mma(float (&)[4], u32, u32, u32, u32, u32, u32) { emu::fail("a product of bf16"); }

inline void __threadfence() {}  // memory is one
inline void launch_dependents() {}
inline void wait_for_inputs() {}

void copy16(void* to, const void* from, bool real);
void await_copies();
void commit_copies();
namespace emu {
void await_groups(u32 after);
}
template <int AFTER> void await_groups() { emu::await_groups(AFTER); }

template <int N> void named_sync(u32 barrier) { emu::barrier(barrier, N, true); }
template <int N> void named_arrive(u32 barrier) { emu::barrier(barrier, N, false); }

inline u32 load_relaxed(const u32* p) { return *p; }
inline uint4 load_relaxed(const uint4* p) { return *p; }
inline u32 load_acquire(const u32* p) {
    emu::spin();
    return *p;
}
inline void add_release(u32* p, u32 n) { *p += n; }

// --- hopper.cu ---

void barrier_init(u64* bar, u32 count);
inline void barrier_fence() {}
void barrier_expect(u64* bar, u32 bytes);
void barrier_expect_more(u64* bar, u32 bytes);
void barrier_arrive(u64* bar);
void barrier_wait(u64* bar, u32 parity);
inline void proxy_fence() {}
inline void whole_proxy_fence() {}
namespace emu {
void bulk_copy(void* to, const void* from, u32 bytes, u64* bar);
}
template <bool ONCE = true> void bulk_copy(void* to, const void* from, u32 bytes, u64* bar) { emu::bulk_copy(to, from, bytes, bar); }
void bulk_prefetch(const void* from, u32 bytes);

namespace emu {
void cluster_arrive();
}
u32 cluster_rank();
template <bool RELEASES = true> void cluster_arrive() { emu::cluster_arrive(); }
void cluster_wait();
u32 peer_address(u32 address, u32 rank);
void store_peer(u32 address, float x);
void send_peer(u32 address, float x, u32 bar);
void send_peer(u32 address, const float4& x, u32 bar);

#if HAS_WARPGROUPS
// wgmma of unsigned by signed bytes, m64nNk32: a warp has 16 of the 64 rows, in registers and with results as `mma` has them; all have B
// in shared memory, blocks of 8 columns by 16 bytes, as a descriptor says: begin, way to the next 16 inputs, to the next 8 columns.
namespace emu {
void start_products(int* c, u32 n, const Words* first, const Words* second, u64 b_first, u64 b_second);
void await_products(u32 after);
}
template <int N> void give_registers() {}
template <int N> void take_registers() {}
inline void begin_products() {}
template <int N> void start_products(int (&c)[N], const u32 (&a)[8], u64 first, u64 second) {
    emu::Words halves[2][emu::LANES];
    for (u32 half = 0; half < 2; half++) {
        const emu::Words* all = emu::exchange(emu::PRODUCT, {{a[half * 4], a[half * 4 + 1], a[half * 4 + 2], a[half * 4 + 3]}});
        memcpy(halves[half], all, sizeof halves[half]);
    }
    emu::start_products(c, N, halves[0], halves[1], first, second);
}
void commit_products();
template <int AFTER, int N> void await_products(int (&)[N]) { emu::await_products(AFTER); }
#endif
