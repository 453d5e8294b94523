// Gated DeltaNet between its two projections: docs/model-spec.md, section 3.
//
// One block has 32 of a value head's columns of one sequence. Its 128 threads are 4 groups of 32 columns; a thread keeps
// DK / 4 rows of the state of its column in registers over all tokens of the segment.

#define CHANNELS (2 * KEY_HEADS * DK + VALUE_HEADS * DV)
#define PROJECTED (CHANNELS + VALUE_HEADS * DV + 2 * VALUE_HEADS)  // q k v | z | b | a
#define PAST (TAPS - 1)
#define GROUPS 4
#define ROWS (DK / GROUPS)
#define GDN_THREADS 128
#define L2_EPS 1e-6f
#define PER_THREAD ((DK + GDN_THREADS - 1) / GDN_THREADS)

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
        for (int j = 0; j < PAST; j++) sum += taps[j] * past[j];
        sum += taps[PAST] * u;
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

// Grid: (VALUE_HEADS * VALUE_SPLIT, segments). projected: [rows, PROJECTED]. states: per slot [VALUE_HEADS, DK, DV]; convs:
// per slot 2 x [PAST, CHANNELS], of which `parity` is read and the other written. gated: [rows, VALUE_HEADS * DV], the
// readout times norm gain and SiLU(z) but not 1 / rms; squares: [rows, VALUE_HEADS, VALUE_SPLIT], for that.
extern "C" __global__ void __launch_bounds__(GDN_THREADS, 4)
delta(const Segment* segments, const float* projected, const float* conv_weights, const float* a_log, const float* dt_bias,
      const float* norm, float* states, u64 state_stride, float* convs, u64 conv_stride, float* gated, float* squares) {
    __shared__ float q[2][DK], k[2][DK];
    __shared__ float sums[2][3][GROUPS];
    __shared__ float columns[2][2][GROUPS][32];
    const Segment segment = segments[blockIdx.y];
    const u32 head = blockIdx.x / VALUE_SPLIT, part = blockIdx.x % VALUE_SPLIT, key_head = head / (VALUE_HEADS / KEY_HEADS);
    const u32 tid = threadIdx.x, group = tid / 32, lane = tid % 32, column = part * 32 + lane;
    launch_dependents();

    // All of this was written by earlier steps or never: it may come before the wait.
    float* state = states + segment.slot * state_stride + ((u64)head * DK + group * ROWS) * DV + column;
    float s[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) s[i] = __ldcg(state + (u64)i * DV);
    const float* conv_in = convs + segment.slot * conv_stride + segment.parity * (u64)(PAST * CHANNELS);
    float* conv_out = convs + segment.slot * conv_stride + (1 - segment.parity) * (u64)(PAST * CHANNELS);
    Channel cq[PER_THREAD], ck[PER_THREAD], cv;
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++) {
        const u32 d = tid + i * GDN_THREADS;
        cq[i].load(key_head * DK + d, d < DK, conv_in, conv_weights);
        ck[i].load(KEY_HEADS * DK + key_head * DK + d, d < DK, conv_in, conv_weights);
    }
    // Every group computes the values of the block's columns, so that none has to pass them on.
    cv.load(2 * KEY_HEADS * DK + head * DV + column, true, conv_in, conv_weights);
    const float rate = -expf(__ldg(a_log + head)), bias = __ldg(dt_bias + head), gain = __ldg(norm + column);
    wait_for_inputs();

    for (u32 r = 0; r < segment.rows; r++) {
        const u64 row = segment.first + r;
        const float* u = projected + row * PROJECTED;
        const u32 buffer = r & 1;
        const float z = __ldcg(u + CHANNELS + head * DV + column);
        const float b = __ldcg(u + CHANNELS + VALUE_HEADS * DV + head);
        const float a = __ldcg(u + CHANNELS + VALUE_HEADS * DV + VALUE_HEADS + head);
        const float v = cv.step(__ldcg(u + cv.index));
        float qq = 0, kk = 0, qk = 0;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            if (!cq[i].active) continue;
            const float x = cq[i].step(__ldcg(u + cq[i].index)), y = ck[i].step(__ldcg(u + ck[i].index));
            q[buffer][tid + i * GDN_THREADS] = x;
            k[buffer][tid + i * GDN_THREADS] = y;
            qq += x * x;
            kk += y * y;
            qk += x * y;
        }
        qq = warp_sum(qq);
        kk = warp_sum(kk);
        qk = warp_sum(qk);
        if (lane == 0) {
            sums[buffer][0][group] = qq;
            sums[buffer][1][group] = kk;
            sums[buffer][2][group] = qk;
        }
        __syncthreads();
        float n[3];
#pragma unroll
        for (int i = 0; i < 3; i++) n[i] = (sums[buffer][i][0] + sums[buffer][i][1]) + (sums[buffer][i][2] + sums[buffer][i][3]);
        const float q_scale = rsqrtf(n[0] + L2_EPS) * rsqrtf((float)DK), k_scale = rsqrtf(n[1] + L2_EPS);
        const float sp = a + bias, alpha = expf(rate * (fmaxf(sp, 0.0f) + log1pf(expf(-fabsf(sp))))), beta = sigmoid(b);
        // S^T k and S^T q of the state before its decay.
        float sk = 0, sq = 0;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            sk += s[i] * k[buffer][group * ROWS + i];
            sq += s[i] * q[buffer][group * ROWS + i];
        }
        columns[buffer][0][group][lane] = sk;
        columns[buffer][1][group][lane] = sq;
        __syncthreads();
        sk = (columns[buffer][0][0][lane] + columns[buffer][0][1][lane]) + (columns[buffer][0][2][lane] + columns[buffer][0][3][lane]);
        sq = (columns[buffer][1][0][lane] + columns[buffer][1][1][lane]) + (columns[buffer][1][2][lane] + columns[buffer][1][3][lane]);
        // Error against the decayed state; the readout of the updated state is alpha S^T q + (k q) error.
        const float error = beta * (v - alpha * k_scale * sk);
        const float o = alpha * q_scale * sq + n[2] * q_scale * k_scale * error;
        const float step = k_scale * error;
#pragma unroll
        for (int i = 0; i < ROWS; i++) s[i] = alpha * s[i] + k[buffer][group * ROWS + i] * step;
        if (group == 0) {
            gated[row * (VALUE_HEADS * DV) + head * DV + column] = o * gain * silu(z);
            const float square = warp_sum(o * o);
            if (lane == 0) squares[(row * VALUE_HEADS + head) * VALUE_SPLIT + part] = square;
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) state[(u64)i * DV] = s[i];
    // Blocks that share channels would write the same: one of them does.
    if (part == 0 && head % (VALUE_HEADS / KEY_HEADS) == 0) {
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            cq[i].store(conv_out);
            ck[i].store(conv_out);
        }
    }
    if (group == 0) cv.store(conv_out);
}
