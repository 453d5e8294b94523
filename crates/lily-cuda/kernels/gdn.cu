// Gated DeltaNet between its two projections: docs/model-spec.md, section 3.
//
// A block works on 32 C of a value head's columns of one sequence. Its eight warps have an eighth of the state's rows each, a lane C
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

// C consecutive values with a sum.
template <int C> struct Some {
    float v[C];
};
template <int C> __device__ __forceinline__ Some<C> operator+(Some<C> a, const Some<C>& b) {
#pragma unroll
    for (int c = 0; c < C; c++) a.v[c] += b.v[c];
    return a;
}
template <int C> __device__ __forceinline__ void sum_of_parts(const float (*parts)[32 * C], int lane, float (&out)[C]) {
    const Some<C> sum = sum_of<WARPS>([&](int k) {
        Some<C> part;
        read_some<C>(&parts[k][lane * C], part.v);
        return part;
    });
#pragma unroll
    for (int c = 0; c < C; c++) out[c] = sum.v[c];
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

// What the kernels of the delta rule take. projected: [rows, PROJECTED]. states: per slot [VALUE_HEADS, DK, DV]; convs: per slot
// 2 x [PAST, CHANNELS], of which `parity` is read and the other written. gated: [rows, VALUE_HEADS * DV], the readout times norm gain
// and SiLU(z) but not 1 / rms; squares: [rows, VALUE_HEADS, VALUE_SPLIT], for that. As columns instead, if those are wanted and blocks
// have whole heads.
struct Delta {
    const Segment* segments;
    const float *projected, *conv_weights, *a_log, *dt_bias, *norm;
    float* states;
    u64 state_stride;
    float* convs;
    u64 conv_stride;
    float *gated, *squares;
    Columns to;
};

// 32 C columns of a head, for one sequence after the other: `rows` counts tokens over all of them.
template <int C> struct DeltaBlock {
    static constexpr int COLUMNS = 32 * C;
    struct Shared {
        __align__(16) float q[2][WARPS * ROWS], k[2][WARPS * ROWS], values[2][COLUMNS], gates[2][COLUMNS], gains[COLUMNS];
        float sums[2][3][KEY_WARPS];
        __align__(16) float columns[2][2][WARPS][COLUMNS];
    };
    Shared& b;
    const Delta& d;
    u32 tid, warp, lane, rows;
    Segment segment;
    u32 head, part, key_head;
    // Channels of q and k, or (in `first[0]`) one of v.
    Channel first[PER_THREAD], second[PER_THREAD];
    float rate, bias;
    bool has_keys;

    // Of the state, this thread's rows begin here, each DV values behind the other.
    __device__ __forceinline__ u32 place() const { return warp * ROWS * DV + part * COLUMNS + lane * C; }
    __device__ __forceinline__ float* state() const { return d.states + segment.slot * d.state_stride + (u64)head * (DK * DV); }
    __device__ __forceinline__ bool has_row(int i) const { return DK % WARPS == 0 || warp * ROWS + i < DK; }
    __device__ __forceinline__ void load_rows(const float* from, float (&s)[ROWS][C]) const {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
#pragma unroll
            for (int c = 0; c < C; c++) s[i][c] = 0;
            if (has_row(i)) load_some<C>(from + (u64)i * DV, s[i]);
        }
    }
    __device__ __forceinline__ void store_rows(float* to, const float (&s)[ROWS][C]) const {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (has_row(i)) store_some<C>(to + (u64)i * DV, s[i]);
    }
    // Everything but the state and the inputs of a segment: all was written by earlier steps or never.
    __device__ __forceinline__ void begin(u32 index, u32 item) {
        segment = d.segments[index];
        head = item / (DV / COLUMNS);
        part = item % (DV / COLUMNS);
        key_head = head / (VALUE_HEADS / KEY_HEADS);
        const float* conv_in = d.convs + segment.slot * d.conv_stride + segment.parity * (u64)(PAST * CHANNELS);
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const u32 n = has_keys ? tid + i * KEY_THREADS : tid - KEY_THREADS;
            const bool value = !has_keys && i == 0 && n < COLUMNS, key = has_keys && n < DK;
            first[i].load(has_keys ? key_head * DK + n : 2 * KEY_HEADS * DK + head * DV + part * COLUMNS + n, key || value, conv_in, d.conv_weights);
            second[i].load(KEY_HEADS * DK + key_head * DK + n, key, conv_in, d.conv_weights);
        }
        rate = -expf(__ldg(d.a_log + head));
        bias = __ldg(d.dt_bias + head);
        if (tid < COLUMNS) b.gains[tid] = __ldg(d.norm + part * COLUMNS + tid);
        if (DK % WARPS != 0 && tid < WARPS * ROWS - DK) b.q[0][DK + tid] = b.q[1][DK + tid] = b.k[0][DK + tid] = b.k[1][DK + tid] = 0;
    }
    // The window of the convolution for the next step.
    __device__ __forceinline__ void end() const {
        float* conv_out = d.convs + segment.slot * d.conv_stride + (1 - segment.parity) * (u64)(PAST * CHANNELS);
        // Blocks that share channels of q and k would write the same: one of them does.
        const bool writes_keys = part == 0 && head % (VALUE_HEADS / KEY_HEADS) == 0;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            if (has_keys ? writes_keys : i == 0) first[i].store(conv_out);
            if (has_keys && writes_keys) second[i].store(conv_out);
        }
    }
    // A token.
    __device__ __forceinline__ void step(u64 row, float (&s)[ROWS][C]) {
        const float* u = d.projected + row * PROJECTED;
        const u32 buffer = rows++ & 1;
        const float beta = __ldcg(u + CHANNELS + VALUE_HEADS * DV + head);
        const float decay = __ldcg(u + CHANNELS + VALUE_HEADS * DV + VALUE_HEADS + head);
        if (has_keys) {
            float qq = 0, kk = 0, qk = 0;
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) {
                if (!first[i].active) continue;
                const float x = first[i].step(__ldcg(u + first[i].index)), y = second[i].step(__ldcg(u + second[i].index));
                b.q[buffer][tid + i * KEY_THREADS] = x;
                b.k[buffer][tid + i * KEY_THREADS] = y;
                qq = fmaf(x, x, qq);
                kk = fmaf(y, y, kk);
                qk = fmaf(x, y, qk);
            }
            qq = warp_sum(qq);
            kk = warp_sum(kk);
            qk = warp_sum(qk);
            if (lane == 0) {
                b.sums[buffer][0][warp] = qq;
                b.sums[buffer][1][warp] = kk;
                b.sums[buffer][2][warp] = qk;
            }
        } else if (first[0].active) {
            const float z = __ldcg(u + CHANNELS + head * DV + part * COLUMNS + tid - KEY_THREADS);
            b.values[buffer][tid - KEY_THREADS] = first[0].step(__ldcg(u + first[0].index));
            b.gates[buffer][tid - KEY_THREADS] = silu(z);
        }
        __syncthreads();
        float n[3];
#pragma unroll
        for (int i = 0; i < 3; i++) n[i] = (b.sums[buffer][i][0] + b.sums[buffer][i][1]) + (b.sums[buffer][i][2] + b.sums[buffer][i][3]);
        const Gates g = delta_gates(n[0], n[1], n[2], decay, beta, rate, bias);
        // S^T k and S^T q of the state before its decay.
        float sk[C], sq[C];
#pragma unroll
        for (int c = 0; c < C; c++) sk[c] = sq[c] = 0;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float ki = b.k[buffer][warp * ROWS + i], qi = b.q[buffer][warp * ROWS + i];
#pragma unroll
            for (int c = 0; c < C; c++) {
                sk[c] = fmaf(s[i][c], ki, sk[c]);
                sq[c] = fmaf(s[i][c], qi, sq[c]);
            }
        }
        store_some<C>(&b.columns[buffer][0][warp][lane * C], sk);
        store_some<C>(&b.columns[buffer][1][warp][lane * C], sq);
        __syncthreads();
        float v[C], o[C], add[C];
        sum_of_parts<C>(b.columns[buffer][0], lane, sk);
        read_some<C>(&b.values[buffer][lane * C], v);
        asm volatile("" ::: "memory");  // registers do not suffice for both sums' parts at a time
        sum_of_parts<C>(b.columns[buffer][1], lane, sq);
#pragma unroll
        for (int c = 0; c < C; c++) delta_column(g, sk[c], sq[c], v[c], o[c], add[c]);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float ki = b.k[buffer][warp * ROWS + i];
#pragma unroll
            for (int c = 0; c < C; c++) s[i][c] = delta_state(g.alpha, s[i][c], ki, add[c]);
        }
        if (warp == 0) put(row, buffer, o);
    }
    // What is read out, by one warp.
    __device__ __forceinline__ void put(u64 row, u32 buffer, const float (&o)[C]) {
        float out[C], square[C], gain[C], gate[C];
        read_some<C>(&b.gains[lane * C], gain);
        read_some<C>(&b.gates[buffer][lane * C], gate);
#pragma unroll
        for (int c = 0; c < C; c++) {
            out[c] = o[c] * gain[c] * gate[c];
            square[c] = __fmul_rn(o[c], o[c]);
        }
        const float sum = sum_of_columns<C>(square);
        if constexpr (COLUMNS == DV && C == 4) {
            if (d.to.records) {
                put_head(row, head, out, sum, d.to, lane);
                return;
            }
        }
        const u32 column = part * COLUMNS + lane * C;
        store_some<C>(d.gated + row * (VALUE_HEADS * DV) + head * DV + column, out);
        if (lane % (32 / C) == 0) d.squares[(row * VALUE_HEADS + head) * VALUE_SPLIT + column / 32] = sum;
    }
};

template <int C> __device__ __forceinline__ DeltaBlock<C> delta_block(typename DeltaBlock<C>::Shared& shared, const Delta& d) {
    const u32 tid = threadIdx.x;
    return DeltaBlock<C>{shared, d, tid, tid / 32, tid % 32, 0, {}, 0, 0, 0, {}, {}, 0, 0, tid / 32 < KEY_WARPS};
}

// A block 32 columns of a head of a sequence. Grid: (VALUE_HEADS * DV / 32, segments).
extern "C" __global__ void __launch_bounds__(THREADS, 2) delta_1(const __grid_constant__ Delta d) {
    __shared__ DeltaBlock<1>::Shared shared_block;
    DeltaBlock<1> block = delta_block<1>(shared_block, d);
    launch_dependents();
    block.begin(blockIdx.y, blockIdx.x);
    float s[ROWS][1];
    block.load_rows(block.state() + block.place(), s);
    wait_for_inputs();
    for (u32 r = 0; r < block.segment.rows; r++) block.step(block.segment.first + r, s);
    block.store_rows(block.state() + block.place(), s);
    block.end();
}

// Whole heads of many sequences: blocks take one after the other, whose states are brought to shared memory and back while others are
// at work. Grid: any number of blocks. Needs compute capability 9.0.
#define WHOLE (DV % 128 == 0 ? 4 : 1)
#define STATES 3  // in shared memory
extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_many(const __grid_constant__ Delta d, u32 segments) {
    extern __shared__ __align__(128) u8 shared[];
    __shared__ DeltaBlock<WHOLE>::Shared shared_block;
    __shared__ u64 full[STATES];
    constexpr u32 BYTES = DK * DV * 4, PARTS = DV / (32 * WHOLE);
    DeltaBlock<WHOLE> block = delta_block<WHOLE>(shared_block, d);
    const u32 all = segments * VALUE_HEADS;
    auto place_of = [&](u32 item) { return d.states + d.segments[item / VALUE_HEADS].slot * d.state_stride + (u64)(item % VALUE_HEADS) * (DK * DV); };
    auto fetch = [&](u32 i) {  // by one thread: this block's i-th
        const u32 item = blockIdx.x + i * gridDim.x;
        if (item >= all) return;
        barrier_expect(&full[i % STATES], BYTES);
        bulk_copy(shared + i % STATES * BYTES, place_of(item), BYTES, &full[i % STATES]);
    };
    if (block.tid == 0) {
        for (u32 i = 0; i < STATES; i++) barrier_init(&full[i], 1);
        barrier_fence();
        for (u32 i = 0; i < STATES; i++) fetch(i);
    }
    __syncthreads();
    launch_dependents();
    u32 i = 0;
#pragma unroll 1
    for (u32 item = blockIdx.x; item < all; item += gridDim.x, i++) {
        float* state = (float*)(shared + i % STATES * BYTES);
#pragma unroll 1
        for (u32 part = 0; part < PARTS; part++) {
            block.begin(item / VALUE_HEADS, item % VALUE_HEADS * PARTS + part);
            if (i == 0 && part == 0) wait_for_inputs();
            if (part == 0) barrier_wait(&full[i % STATES], i / STATES & 1);
            float s[ROWS][WHOLE];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
#pragma unroll
                for (int c = 0; c < WHOLE; c++) s[r][c] = 0;
                if (block.has_row(r)) read_some<WHOLE>(state + block.place() + r * DV, s[r]);
            }
            for (u32 r = 0; r < block.segment.rows; r++) block.step(block.segment.first + r, s);
            block.store_rows(state + block.place(), s);
            block.end();
            if (PARTS > 1) __syncthreads();  // the gains are those of a part
        }
        proxy_fence();
        __syncthreads();
        if (block.tid == 0) {
            bulk_store(block.state(), state, BYTES);
            // The one before has left its place, which the next but one gets.
            bulk_stores_read<1>();
            if (i > 0) fetch(i - 1 + STATES);
        }
    }
    if (block.tid == 0) bulk_stores_done();
}
