// What the entry points need that the tests write for the kernels' signatures.
#pragma once

namespace shim {
#if defined(SHIM_CHECK)
struct Buffer {
    template <class T> operator device T*() const;
    template <class T> operator constant T*() const;
};
struct ThreadgroupMemory {
    template <class T> operator threadgroup T*() const;
};
struct Group {
    operator uint() const;
    operator uint2() const;
    operator uint3() const;
};
Buffer buffer(uint index);
ThreadgroupMemory threadgroup_memory(uint index);
Group threadgroup_position_in_grid();
uint thread_index_in_threadgroup();
uint simdgroup_index_in_threadgroup();
#else
struct Pointer {
    void* address;
    template <class T> operator T*() const { return static_cast<T*>(address); }
};
struct Group {
    uint x, y, z;
    operator uint() const { return x; }
    operator uint2() const { return {x, y}; }
    operator uint3() const { return {x, y, z}; }
};
#ifdef __CUDACC__
extern __shared__ __align__(16) unsigned char shared_memory[];
inline Pointer buffer(void* address) { return {address}; }
/// Each threadgroup memory argument is a part of the block's shared memory.
inline Pointer threadgroup_memory(uint at) { return {shared_memory + at}; }
inline Group threadgroup_position_in_grid() { return {blockIdx.x, blockIdx.y, blockIdx.z}; }
inline uint thread_index_in_threadgroup() { return threadIdx.x; }
inline uint simdgroup_index_in_threadgroup() { return threadIdx.x / LANES; }
#else
Pointer buffer(uint index);
Pointer threadgroup_memory(uint index);
Group threadgroup_position_in_grid();
uint thread_index_in_threadgroup();
uint simdgroup_index_in_threadgroup();

/// Adds a kernel to those that can be launched.
struct Kernel {
    const char* name;
    void (*entry)();
    Kernel* next;
    Kernel(const char* name, void (*entry)());
};
#endif
#endif
inline uint thread_index_in_simdgroup() { return lane(); }
}  // namespace shim

#ifdef SHIM_CHECK
// Words of C++ that Metal lacks; and `static`, which would hide an address space.
#pragma GCC poison double long goto new delete try catch throw virtual typeid dynamic_cast thread_local register noexcept
#pragma GCC poison std asm static
// Of C++20, which is only taken for the sake of the tensor operations' header.
#if __cplusplus > 201703L
#pragma GCC poison concept requires consteval constinit co_await co_yield co_return char8_t
#endif
#endif
