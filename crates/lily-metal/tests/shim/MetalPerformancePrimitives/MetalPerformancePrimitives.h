// Stands for Apple's header of the operations on tensors: matmul2d, with what is known of Apple's own asserts (macOS 26) and
// documentation, and narrower where that is not certain. Every thread computes the elements that it has from what the matrices hold at
// that time, so that a barrier that is missing before or behind it shows. Which elements a thread has is Apple's secret, so here it
// is none that anybody would guess, and some of a thread's places hold none.
#pragma once

namespace mpp {
namespace tensor_ops {
/// left [m, k] times right [k, n]; a transposed matrix lies in memory the other way.
struct matmul2d_descriptor {
    enum class mode { multiply, multiply_accumulate };
    int m, n, k;
    bool transpose_left, transpose_right, relaxed_precision;
    mode matmul_mode;
    constexpr matmul2d_descriptor(int m, int n, int k, bool transpose_left = false, bool transpose_right = false,
                                  bool relaxed_precision = false, mode matmul_mode = mode::multiply)
        : m(m), n(n), k(k), transpose_left(transpose_left), transpose_right(transpose_right),
          relaxed_precision(relaxed_precision), matmul_mode(matmul_mode) {}
};

/// A sum that the threads of a scope have together.
template <class Operation, class Left, class Right> struct cooperative_tensor {
    static constexpr uint M = Operation::description.m, N = Operation::description.n;
    static constexpr uint THREADS = Operation::scope::count * shim::LANES;
    // One more than needed.
    static constexpr uint CAPACITY = (M * N + THREADS - 1) / THREADS + 1;
    float mine[CAPACITY];

    cooperative_tensor() {
        for (uint i = 0; i < CAPACITY; ++i) mine[i] = NAN;
    }
    cooperative_tensor(const cooperative_tensor&) = delete;
    float& operator[](ushort i) { return mine[i]; }
    ushort get_capacity() const { return CAPACITY; }
    bool is_valid_element(ushort i) const { return place(i) < M * N; }
    /// Column, then row.
    metal::array<int, 2> get_multidimensional_index(ushort i) const {
        const uint at = place(i);
        // Far outside of everything, for a place that holds no element.
        return at < M * N ? metal::array<int, 2>{int(at / M), int(at % M)} : metal::array<int, 2>{1 << 20, 1 << 20};
    }

private:
    /// Number of an element, column by column; threads in reverse. Every other thread has its place without one at the beginning.
    static uint place(ushort i) {
        const uint thread_index = shim::scope_thread<Operation::scope::count>(), last = CAPACITY - 1;
        const uint skipped = thread_index % 2 == 0 ? last : 0;
        if (i == skipped) return M * N;
        return (i - (thread_index % 2)) * THREADS + (THREADS - 1 - thread_index);
    }
};

template <matmul2d_descriptor DESCRIPTION, class Scope> struct matmul2d {
    static constexpr matmul2d_descriptor description = DESCRIPTION;
    typedef Scope scope;
    // Apple: m or n, and k.
    static_assert(description.m % 16 == 0 && description.n % 16 == 0, "m and n must be multiples of 16");
    static_assert(description.k % 16 == 0, "k must be a multiple of 16");
    static_assert(!description.transpose_left && !description.relaxed_precision, "nobody has tried that here");

    template <class Left, class Right, class T> auto get_destination_cooperative_tensor() const {
        static_assert(shim::are_same<T, float>, "sums are float");
        typedef typename Left::value L;
        static_assert(shim::are_same<L, typename Right::value>, "both matrices are of one type");
        static_assert(shim::are_same<L, half> || shim::are_same<L, bfloat>, "of half or bfloat");
        return cooperative_tensor<matmul2d, Left, Right>();
    }

    /// Every thread of the scope must come here. That is no barrier.
    template <class Left, class Right>
    void run(thread Left& left, thread Right& right, thread cooperative_tensor<matmul2d, Left, Right>& sums) const
#ifdef SHIM_CHECK
        ;
#else
    {
        constexpr int K = description.k, N = description.n;
        constexpr bool turned = description.transpose_right, adds = description.matmul_mode == mode::multiply_accumulate;
        shim::take_part(Scope::count, uint(description.m * 5 + N * 3 + K));
        shim::check_matrix(left, K, description.m);
        shim::check_matrix(right, turned ? K : N, turned ? N : K);
        for (ushort i = 0; i < sums.get_capacity(); ++i) {
            if (!sums.is_valid_element(i)) continue;
            const metal::array<int, 2> at = sums.get_multidimensional_index(i);
            float sum = adds ? sums[i] : 0.0f;
            for (int j = 0; j < K; ++j) {
                const int there = turned ? at[0] * right.pitch + j : j * right.pitch + at[0];
                sum += float(left.data[at[1] * left.pitch + j]) * float(right.data[there]);
            }
            sums[i] = sum;
        }
    }
#endif

private:
    typedef matmul2d_descriptor::mode mode;
};
}  // namespace tensor_ops
}  // namespace mpp
