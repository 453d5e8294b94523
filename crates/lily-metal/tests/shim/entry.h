// What the entry points need that the tests write for the kernels' signatures.
#pragma once

namespace shim {
struct Pointer {
    void* address;
    template <class T> operator T*() const { return static_cast<T*>(address); }
};
struct Group {
    uint x, y;
    operator uint() const { return x; }
    operator uint2() const { return {x, y}; }
};
Pointer buffer(uint index);
Pointer threadgroup_memory(uint index);
Group threadgroup_position_in_grid();
uint thread_index_in_threadgroup();
uint simdgroup_index_in_threadgroup();
inline uint thread_index_in_simdgroup() { return lane(); }

/// Adds a kernel to those that can be launched.
struct Kernel {
    const char* name;
    void (*entry)();
    Kernel* next;
    Kernel(const char* name, void (*entry)());
};
}  // namespace shim
