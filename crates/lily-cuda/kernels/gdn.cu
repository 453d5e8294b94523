// Gated DeltaNet between its two projections: docs/model-spec.md, section 3.
//
// A block has 32 C of a value head's columns of one sequence. Its eight warps have an eighth of the state's rows each, a lane C
// columns of them, in registers over all tokens of the segment.

#define CHANNELS (2 * KEY_HEADS * DK + VALUE_HEADS * DV)
#define PROJECTED (CHANNELS + VALUE_HEADS * DV + 2 * VALUE_HEADS)  // q k v | z | b | a
#define PAST (TAPS - 1)
#define KEY_WARPS 4  // warps that have channels of q and k, the others have those of v
#define KEY_THREADS (KEY_WARPS * 32)
#define PER_THREAD ((DK + KEY_THREADS - 1) / KEY_THREADS)
#define ROWS ((DK + WARPS - 1) / WARPS)

// One channel of the convolution over the last inputs and the new one, then SiLU; the window moves on.
struct Channel {
    float past[PAST];
    float taps[TAPS];
    u32 index;
    bool active;
    __device__ __forceinline__ void load(u32 channel, bool is_active, const float* conv, const float* weights) {
        index = channel;
        active = is_active;
        if (!active) return;
#pragma unroll
        for (int j = 0; j < PAST; j++) past[j] = __ldcg(conv + (u64)j * CHANNELS + channel);
#pragma unroll
        for (int j = 0; j < TAPS; j++) taps[j] = __ldg(weights + channel * TAPS + j);
    }
    __device__ __forceinline__ float step(float u) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < PAST; j++) sum = fmaf(taps[j], past[j], sum);
        sum = fmaf(taps[PAST], u, sum);
#pragma unroll
        for (int j = 0; j + 1 < PAST; j++) past[j] = past[j + 1];
        past[PAST - 1] = u;
        return silu(sum);
    }
    __device__ __forceinline__ void store(float* conv) const {
        if (!active) return;
#pragma unroll
        for (int j = 0; j < PAST; j++) conv[(u64)j * CHANNELS + index] = past[j];
    }
};

// C consecutive values, of which all or none are wanted.
template <int C> __device__ __forceinline__ void load_some(const float* p, float (&out)[C]) {
    if constexpr (C == 4) {
        const float4 v = __ldcg((const float4*)p);
        out[0] = v.x; out[1] = v.y; out[2] = v.z; out[3] = v.w;
    } else {
#pragma unroll
        for (int c = 0; c < C; c++) out[c] = __ldcg(p + c);
    }
}
template <int C> __device__ __forceinline__ void store_some(float* p, const float (&in)[C]) {
    if constexpr (C == 4) {
        *(float4*)p = make_float4(in[0], in[1], in[2], in[3]);
    } else {
#pragma unroll
        for (int c = 0; c < C; c++) p[c] = in[c];
    }
}
template <int C> __device__ __forceinline__ void read_some(const float* p, float (&out)[C]) {
    if constexpr (C == 4) {
        const float4 v = *(const float4*)p;
        out[0] = v.x; out[1] = v.y; out[2] = v.z; out[3] = v.w;
    } else {
#pragma unroll
        for (int c = 0; c < C; c++) out[c] = p[c];
    }
}

// The sum over 32 columns, of which each of 32 / C lanes has C: as `warp_sum` adds them up where every lane has one.
template <int C> __device__ __forceinline__ float sum_of_columns(const float (&in)[C]) {
    float x[C];
#pragma unroll
    for (int c = 0; c < C; c++) x[c] = in[c];
#pragma unroll
    for (int o = 16 / C; o; o >>= 1)
#pragma unroll
        for (int c = 0; c < C; c++) x[c] += __shfl_xor_sync(FULL, x[c], o);
#pragma unroll
    for (int o = C / 2; o; o >>= 1)
#pragma unroll
        for (int c = 0; c < o; c++) x[c] += x[c + o];
    return x[0];
}

// Sums of eight parts as `sum_of` makes them, in as few registers as there are.
template <int C> __device__ __forceinline__ void sum_of_parts(const float (*parts)[32 * C], int lane, float (&out)[C]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum[C], p[C];
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            float a[C];
            read_some<C>(&parts[half * 4 + pair * 2][lane * C], a);
            read_some<C>(&parts[half * 4 + pair * 2 + 1][lane * C], p);
#pragma unroll
            for (int c = 0; c < C; c++) sum[c] = pair == 0 ? a[c] + p[c] : sum[c] + (a[c] + p[c]);
        }
#pragma unroll
        for (int c = 0; c < C; c++) out[c] = half == 0 ? sum[c] : out[c] + sum[c];
    }
}

// A head's four values a lane as columns, times its 1 / rms. square: the sum of squares of the 32 values of this lane and seven others.
__device__ __forceinline__ void put_head(u32 row, u32 head, float (&v)[4], float square, const Columns& to, u32 lane) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) sum += __shfl_sync(FULL, square, i * 8);
    const float factor = rsqrtf(sum / DV + EPS);
    float most = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = __fmul_rn(v[i], factor);
        most = max_magnitude(most, v[i]);
    }
#pragma unroll
    for (int o = 1; o < 16; o <<= 1) most = max_magnitude(most, __shfl_xor_sync(FULL, most, o));
    const Scale scale(most);
    // Of eight inputs two lanes have four each: the first makes the even ones, the second the odd ones.
    const u32 odd = lane & 1;
    const float a = __shfl_xor_sync(FULL, odd ? v[0] : v[1], 1), b = __shfl_xor_sync(FULL, odd ? v[2] : v[3], 1);
    u32 high, low;
    int digits = 0;
    digits4(odd ? a : v[0], odd ? b : v[2], odd ? v[1] : a, odd ? v[3] : b, scale, high, low, digits);
#pragma unroll
    for (int o = 1; o < 16; o <<= 1) digits += __shfl_xor_sync(FULL, digits, o);
    const u32 tile = head * (DV / TILE_COLS) + lane / 16;
    to.store(row, tile, lane / 2 % 8, odd, high, low);
    if (lane % 16 == 0) to.store_unit(row, tile, Unit{scale.unit, __fmul_rn((float)digits, scale.unit)});
}

// projected: [rows, PROJECTED]. states: per slot [VALUE_HEADS, DK, DV]; convs: per slot 2 x [PAST, CHANNELS], of which `parity`
// is read and the other written. gated: [rows, VALUE_HEADS * DV], the readout times norm gain and SiLU(z) but not 1 / rms;
// squares: [rows, VALUE_HEADS, VALUE_SPLIT], for that. Or all of it as columns, if those are wanted of whole heads. Grid: (VALUE_HEADS * DV / (32 C), segments).
template <int C>
__device__ __forceinline__ void delta(const Segment* segments, const float* projected, const float* conv_weights, const float* a_log,
                                      const float* dt_bias, const float* norm, float* states, u64 state_stride, float* convs,
                                      u64 conv_stride, float* gated, float* squares, const Columns& to) {
    constexpr int COLUMNS = 32 * C;
    __shared__ __align__(16) float q[2][WARPS * ROWS], k[2][WARPS * ROWS], values[2][COLUMNS], gates[2][COLUMNS], gains[COLUMNS];
    __shared__ float sums[2][3][KEY_WARPS];
    __shared__ __align__(16) float columns[2][2][WARPS][COLUMNS];
    const Segment segment = segments[blockIdx.y];
    const u32 head = blockIdx.x / (DV / COLUMNS), part = blockIdx.x % (DV / COLUMNS), key_head = head / (VALUE_HEADS / KEY_HEADS);
    const u32 tid = threadIdx.x, warp = tid / 32, lane = tid % 32, column = part * COLUMNS + lane * C;
    launch_dependents();

    // All of this was written by earlier steps or never: it may come before the wait.
    float* state = states + segment.slot * state_stride + ((u64)head * DK + warp * ROWS) * DV + column;
    float s[ROWS][C];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
#pragma unroll
        for (int c = 0; c < C; c++) s[i][c] = 0;
        if (DK % WARPS == 0 || warp * ROWS + i < DK) load_some<C>(state + (u64)i * DV, s[i]);
    }
    const float* conv_in = convs + segment.slot * conv_stride + segment.parity * (u64)(PAST * CHANNELS);
    float* conv_out = convs + segment.slot * conv_stride + (1 - segment.parity) * (u64)(PAST * CHANNELS);
    // Channels of q and k, or (in `first[0]`) one of v.
    Channel first[PER_THREAD], second[PER_THREAD];
    const bool has_keys = warp < KEY_WARPS;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const u32 d = has_keys ? tid + i * KEY_THREADS : tid - KEY_THREADS;
        const bool value = !has_keys && i == 0 && d < COLUMNS, key = has_keys && d < DK;
        first[i].load(has_keys ? key_head * DK + d : 2 * KEY_HEADS * DK + head * DV + part * COLUMNS + d, key || value, conv_in, conv_weights);
        second[i].load(KEY_HEADS * DK + key_head * DK + d, key, conv_in, conv_weights);
    }
    const float rate = -expf(__ldg(a_log + head)), bias = __ldg(dt_bias + head);
    if (tid < COLUMNS) gains[tid] = __ldg(norm + part * COLUMNS + tid);
    if (DK % WARPS != 0 && tid < WARPS * ROWS - DK) q[0][DK + tid] = q[1][DK + tid] = k[0][DK + tid] = k[1][DK + tid] = 0;
    wait_for_inputs();

    for (u32 r = 0; r < segment.rows; r++) {
        const u64 row = segment.first + r;
        const float* u = projected + row * PROJECTED;
        const u32 buffer = r & 1;
        const float b = __ldcg(u + CHANNELS + VALUE_HEADS * DV + head);
        const float a = __ldcg(u + CHANNELS + VALUE_HEADS * DV + VALUE_HEADS + head);
        if (has_keys) {
            float qq = 0, kk = 0, qk = 0;
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) {
                if (!first[i].active) continue;
                const float x = first[i].step(__ldcg(u + first[i].index)), y = second[i].step(__ldcg(u + second[i].index));
                q[buffer][tid + i * KEY_THREADS] = x;
                k[buffer][tid + i * KEY_THREADS] = y;
                qq = fmaf(x, x, qq);
                kk = fmaf(y, y, kk);
                qk = fmaf(x, y, qk);
            }
            qq = warp_sum(qq);
            kk = warp_sum(kk);
            qk = warp_sum(qk);
            if (lane == 0) {
                sums[buffer][0][warp] = qq;
                sums[buffer][1][warp] = kk;
                sums[buffer][2][warp] = qk;
            }
        } else if (first[0].active) {
            const float z = __ldcg(u + CHANNELS + head * DV + part * COLUMNS + tid - KEY_THREADS);
            values[buffer][tid - KEY_THREADS] = first[0].step(__ldcg(u + first[0].index));
            gates[buffer][tid - KEY_THREADS] = silu(z);
        }
        __syncthreads();
        float n[3];
#pragma unroll
        for (int i = 0; i < 3; i++) n[i] = (sums[buffer][i][0] + sums[buffer][i][1]) + (sums[buffer][i][2] + sums[buffer][i][3]);
        const Gates g = delta_gates(n[0], n[1], n[2], a, b, rate, bias);
        // S^T k and S^T q of the state before its decay.
        float sk[C], sq[C];
#pragma unroll
        for (int c = 0; c < C; c++) sk[c] = sq[c] = 0;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float ki = k[buffer][warp * ROWS + i], qi = q[buffer][warp * ROWS + i];
#pragma unroll
            for (int c = 0; c < C; c++) {
                sk[c] = fmaf(s[i][c], ki, sk[c]);
                sq[c] = fmaf(s[i][c], qi, sq[c]);
            }
        }
        store_some<C>(&columns[buffer][0][warp][lane * C], sk);
        store_some<C>(&columns[buffer][1][warp][lane * C], sq);
        __syncthreads();
        float v[C], o[C], step[C];
        sum_of_parts<C>(columns[buffer][0], lane, sk);
        read_some<C>(&values[buffer][lane * C], v);
        compiler_fence();  // registers do not suffice for both sums' parts at a time
        sum_of_parts<C>(columns[buffer][1], lane, sq);
#pragma unroll
        for (int c = 0; c < C; c++) {
            delta_column(g, sk[c], sq[c], v[c], o[c], step[c]);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float ki = k[buffer][warp * ROWS + i];
#pragma unroll
            for (int c = 0; c < C; c++) s[i][c] = delta_state(g.alpha, s[i][c], ki, step[c]);
        }
        if (warp == 0) {
            float out[C], square[C], gain[C], gate[C];
            read_some<C>(&gains[lane * C], gain);
            read_some<C>(&gates[buffer][lane * C], gate);
#pragma unroll
            for (int c = 0; c < C; c++) {
                out[c] = o[c] * gain[c] * gate[c];
                square[c] = __fmul_rn(o[c], o[c]);
            }
            const float sum = sum_of_columns<C>(square);
#if __CUDA_ARCH__ >= 900  // only wide.cu takes columns
            if constexpr (COLUMNS == DV && C == 4) {
                if (to.records) {
                    put_head(row, head, out, sum, to, lane);
                    continue;
                }
            }
#endif
            store_some<C>(gated + row * (VALUE_HEADS * DV) + head * DV + column, out);
            if (lane % (32 / C) == 0) squares[(row * VALUE_HEADS + head) * VALUE_SPLIT + column / 32] = sum;
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if (DK % WARPS == 0 || warp * ROWS + i < DK) store_some<C>(state + (u64)i * DV, s[i]);
    // Blocks that share channels of q and k would write the same: one of them does.
    const bool writes_keys = part == 0 && head % (VALUE_HEADS / KEY_HEADS) == 0;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        if (has_keys ? writes_keys : i == 0) first[i].store(conv_out);
        if (has_keys && writes_keys) second[i].store(conv_out);
    }
}

#define DELTA(name, columns)                                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) name(                                                                 \
        const Segment* segments, const float* projected, const float* conv_weights, const float* a_log, const float* dt_bias,      \
        const float* norm, float* states, u64 state_stride, float* convs, u64 conv_stride, float* gated, float* squares, Columns to) { \
        delta<columns>(segments, projected, conv_weights, a_log, dt_bias, norm, states, state_stride, convs, conv_stride, gated, squares, to); \
    }
DELTA(delta_1, 1)
#if DV % 128 == 0
DELTA(delta_4, 4)
#else
DELTA(delta_4, 1)
#endif
