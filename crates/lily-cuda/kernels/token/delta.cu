// --- Gated DeltaNet: docs/model-spec.md, section 3 ---

struct DeltaRule : Block {
    // Brings what the delta rule needs besides this token's projections, for 32 columns of a value head.
    __device__ __forceinline__ void load_delta(const Layer& w, u32 item) {
        const u32 head = item / VALUE_SPLIT, column = item % VALUE_SPLIT * 32 + lane, key_head = head / (VALUE_HEADS / KEY_HEADS);
        const float* state = states(w, item);
#pragma unroll
        for (u32 i = tid; i < DK * 8; i += CONSUMERS) copy16(&s.state[i / 8][i % 8 * 4], state + (u64)(i / 8) * DV + i % 8 * 4);
        const float* conv = convs(w, parity);
        const u32 channels[3] = {key_head * DK + tid, KEY_HEADS * DK + key_head * DK + tid, 2 * KEY_HEADS * DK + head * DV + column};
#pragma unroll
        for (int c = 0; c < 3; c++) {
            if (c < 2 ? warp >= DK / 32 : warp != WARPS - 1) continue;
            float* to = window(c);
            const int stride = c < 2 ? DK : 32;
#pragma unroll
            for (int j = 0; j < PAST; j++) copy4(to + j * stride, conv + (u64)j * GDN_CHANNELS + channels[c]);
            const float* taps = w.vectors[0] + channels[c] * TAPS;
            if constexpr (TAPS == 4) {
                copy16(tap(c), taps);
            } else {
#pragma unroll
                for (int j = 0; j < TAPS; j++) copy4(tap(c) + j, taps + j);
            }
        }
        if (warp == WARPS - 2) {
            copy4(s.gain + lane, w.vectors[3] + column);
            if (lane < 2) copy4(s.rates + lane, w.vectors[1 + lane] + head);
        }
    }
    // The block's columns of a head's state, [DK, DV].
    __device__ __forceinline__ float* states(const Layer& w, u32 item) const {
        return t.states + w.index * (VALUE_HEADS * DK * DV) + slot_of * t.state_stride + (u64)(item / VALUE_SPLIT) * (DK * DV) + item % VALUE_SPLIT * 32;
    }
    __device__ __forceinline__ float* convs(const Layer& w, u32 which) const {
        return t.convs + w.index * (2 * PAST * GDN_CHANNELS) + slot_of * t.conv_stride + which * (u64)(PAST * GDN_CHANNELS);
    }
    // Of this thread's channel of q (0), k (1) or v (2): past inputs, DK or 32 floats apart, and taps.
    __device__ __forceinline__ float* window(int c) const {
        return s.gathered + (2 * DK + 32) * TAPS + c * (PAST * DK) + (c < 2 ? tid : lane);
    }
    __device__ __forceinline__ float* tap(int c) const { return s.gathered + (c * DK + (c < 2 ? tid : lane)) * TAPS; }
    static __device__ __forceinline__ void copy16(float* to, const float* from) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
    }
    static __device__ __forceinline__ void copy4(float* to, const float* from) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
    }
    // One channel of the convolution, then SiLU; the window moves on, into `next` if this thread is the one to store it.
    __device__ __forceinline__ float conv_step(int c, float u, float* next, bool stores) const {
        const float *at = window(c), *taps = tap(c);
        const int stride = c < 2 ? DK : 32;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < PAST; j++) {
            const float past = at[j * stride];
            sum = fmaf(taps[j], past, sum);
            if (j > 0 && stores) next[(u64)(j - 1) * GDN_CHANNELS] = past;
        }
        if (stores) next[(u64)(PAST - 1) * GDN_CHANNELS] = u;
        return silu(fmaf(taps[PAST], u, sum));
    }
    // As `delta` in gdn.cu.
    __device__ __forceinline__ void delta(const Layer& w, u32 item, u32 epoch) {
        const u32 head = item / VALUE_SPLIT, part = item % VALUE_SPLIT, column = part * 32 + lane;
        const u32 key_head = head / (VALUE_HEADS / KEY_HEADS);
        const u64* u = t.packets + AT_PROJECTED;
        const u32 channels[3] = {key_head * DK + min(tid, (u32)DK - 1), KEY_HEADS * DK + key_head * DK + min(tid, (u32)DK - 1),
                                 2 * KEY_HEADS * DK + head * DV + column};
        float* conv = convs(w, 1 - parity);
        // Blocks that share channels would write the same: one of them does.
        const bool stores = part == 0 && head % (VALUE_HEADS / KEY_HEADS) == 0;
        asm volatile("cp.async.wait_all;" ::: "memory");
        if (warp < DK / 32) {
            const u64* const from[2] = {u + channels[0], u + channels[1]};
            float in[2];
            receive<2>(from, epoch, in);
            __syncwarp();
            const float x = conv_step(0, in[0], conv + channels[0], stores), y = conv_step(1, in[1], conv + channels[1], stores);
            s.q[tid] = x;
            s.k[tid] = y;
            const float qq = warp_sum(__fmul_rn(x, x)), kk = warp_sum(__fmul_rn(y, y)), qk = warp_sum(__fmul_rn(x, y));
            if (lane == 0) {
                s.sums3[0][warp] = qq;
                s.sums3[1][warp] = kk;
                s.sums3[2][warp] = qk;
            }
        } else if (warp == WARPS - 1) {
            const u64* const from[2] = {u + channels[2], u + GDN_CHANNELS + head * DV + column};
            float in[2];
            receive<2>(from, epoch, in);
            __syncwarp();
            s.value[lane] = conv_step(2, in[0], conv + channels[2], true);
            s.gate[lane] = silu(in[1]);
        } else if (warp == WARPS - 2 && lane < 2) {
            const u64* const from[1] = {u + GDN_CHANNELS + VALUE_HEADS * DV + (1 - lane) * VALUE_HEADS + head};
            float in[1];
            receive<1>(from, epoch, in);
            s.decay[lane] = in[0];  // a, b
        }
        consumer_sync();
        float n[3];
#pragma unroll
        for (int i = 0; i < 3; i++) n[i] = (s.sums3[i][0] + s.sums3[i][1]) + (s.sums3[i][2] + s.sums3[i][3]);
        const Gates gates = delta_gates(n[0], n[1], n[2], s.decay[0], s.decay[1], -expf(s.rates[0]), s.rates[1]);
        float column_state[DK / WARPS], sk = 0, sq = 0;
#pragma unroll
        for (int i = 0; i < DK / WARPS; i++) {
            column_state[i] = s.state[warp * (DK / WARPS) + i][lane];
            sk = fmaf(column_state[i], s.k[warp * (DK / WARPS) + i], sk);
            sq = fmaf(column_state[i], s.q[warp * (DK / WARPS) + i], sq);
        }
        s.columns[0][warp][lane] = sk;
        s.columns[1][warp][lane] = sq;
        consumer_sync();
        float o, step;
        const float with_k = sum_of<WARPS>([&](int k) { return s.columns[0][k][lane]; });
        const float with_q = sum_of<WARPS>([&](int k) { return s.columns[1][k][lane]; });
        delta_column(gates, with_k, with_q, s.value[lane], o, step);
        if (warp == 0) {
            send(t.packets + AT_MIXED + spread(head * DV + column), o * s.gain[lane] * s.gate[lane], epoch);
            const float square = warp_sum(__fmul_rn(o, o));
            if (lane == 0) send(t.packets + AT_SQUARES + item, square, epoch);
        }
        float* state = states(w, item) + (u64)(warp * (DK / WARPS)) * DV + lane;
#pragma unroll
        for (int i = 0; i < DK / WARPS; i++)
            state[(u64)i * DV] = delta_state(gates.alpha, column_state[i], s.k[warp * (DK / WARPS) + i], step);
    }
};

