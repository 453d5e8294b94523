// The delta rule of many rows of a sequence, behind gdn.cu. What does not depend on the state is made before, of all rows side by side, and
// behind it: so all that is done row after row is what must be.
//
// A warp has eight columns of a value head: a lane two columns of an eighth of the rows, in registers. It waits for nobody but every few
// rows, when all warps of a block bring the next ones' keys together. All sums and roundings are those of `delta_1`, in the same order.

#define SHARING (VALUE_HEADS / KEY_HEADS)  // value heads that share a key head
#define RUN 16    // rows of a block of `delta_inputs`
#define BATCH 4   // of which so many are asked for at a time
#define AHEAD 8   // rows that are brought together
#define CHUNK_WARPS 4

// An eighth of a key fills whole words of 16 bytes, an odd number of them: so lanes of different eighths read different banks.
constexpr u32 KEY_WORDS = (ROWS + 3) / 4, EIGHTH = (KEY_WORDS | 1) * 4;

// Behind convolution and SiLU, of a row: not normed yet.
struct __align__(16) Keys {
    float q[WARPS * EIGHTH], k[WARPS * EIGHTH];
    __device__ __forceinline__ static u32 place(u32 row) { return row / ROWS * EIGHTH + row % ROWS; }
};
struct __align__(16) Value {
    Factors factors;
    float v[DV];
};
struct Prepared {
    Keys keys[KEY_HEADS];
    Value values[VALUE_HEADS];
};

// What these kernels take besides: segments of at least `least` rows are theirs.
struct Chunk {
    const Row* table;    // rows of the step
    Prepared* prepared;  // [rows]
    u32 rows, least;
    __device__ __forceinline__ bool has(const Segment& segment) const { return segment.rows >= least; }
};

// A thread's channels of a key head and of the value heads that share it.
struct Preparer {
    static constexpr u32 COUNT = 2 * PER_THREAD + SHARING;
    u32 tid, key_head;
    Channel channels[COUNT];  // of q, of k, of each v
    __device__ __forceinline__ Preparer(u32 tid, u32 key_head, const float* weights) : tid(tid), key_head(key_head) {
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++) {
            const u32 row = tid + i * KEY_THREADS, channel = key_head * DK + row;
            channels[i].load_taps(channel, row < DK, weights);
            channels[PER_THREAD + i].load_taps(KEY_HEADS * DK + channel, row < DK, weights);
        }
#pragma unroll
        for (u32 i = 0; i < SHARING; i++)
            channels[2 * PER_THREAD + i].load_taps(2 * KEY_HEADS * DK + (key_head * SHARING + i) * DV + tid, true, weights);
    }
    // Asks for a row.
    __device__ __forceinline__ void load(const float* projected, float (&u)[COUNT]) const {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++)
            if (channels[i].active) u[i] = __ldcg(projected + channels[i].index);
    }
    // Makes a row, and this warp's parts of q q, k k and q k.
    __device__ __forceinline__ void make(const float (&u)[COUNT], Prepared& to, float (&parts)[3][KEY_WARPS]) {
        float sums[3] = {0, 0, 0};
        Keys& keys = to.keys[key_head];
#pragma unroll
        for (u32 i = 0; i < PER_THREAD; i++) {
            if (!channels[i].active) continue;
            const u32 place = Keys::place(tid + i * KEY_THREADS);
            const float x = channels[i].step(u[i]), y = channels[PER_THREAD + i].step(u[PER_THREAD + i]);
            keys.q[place] = x;
            keys.k[place] = y;
            sums[0] = fmaf(x, x, sums[0]);
            sums[1] = fmaf(y, y, sums[1]);
            sums[2] = fmaf(x, y, sums[2]);
        }
#pragma unroll
        for (u32 i = 0; i < SHARING; i++)
            to.values[key_head * SHARING + i].v[tid] = channels[2 * PER_THREAD + i].step(u[2 * PER_THREAD + i]);
#pragma unroll
        for (int i = 0; i < 3; i++) {
            sums[i] = warp_sum(sums[i]);
            if (tid % 32 == 0) parts[i][tid / 32] = sums[i];
        }
    }
};

// The factors of a row's value head, from the parts of the sums over its key head.
__device__ __forceinline__ Factors make_factors(const Delta& d, const float* projected, u32 head, const float (&parts)[3][KEY_WARPS]) {
    const float *of_b = projected + CHANNELS + VALUE_HEADS * DV + head, *of_a = of_b + VALUE_HEADS;
    float n[3];
#pragma unroll
    for (int i = 0; i < 3; i++) n[i] = (parts[i][0] + parts[i][1]) + (parts[i][2] + parts[i][3]);
    const float alpha = delta_alpha(delta_softplus(__ldcg(of_a), __ldg(d.dt_bias + head)), -expf(__ldg(d.a_log + head)));
    return delta_factors(Gates{delta_q_scale(n[0]), delta_k_scale(n[1]), alpha, sigmoid(__ldcg(of_b)), n[2]});
}

// Convolution, gates, and the windows that are left to the next step. Grid: key heads, runs of rows.
extern "C" __global__ void __launch_bounds__(KEY_THREADS) delta_inputs(Delta d, Chunk c) {
#if DV == 128
    __shared__ float parts[RUN][3][KEY_WARPS];
    launch_dependents();
    const u32 tid = threadIdx.x, first = blockIdx.y * RUN, end = min(first + RUN, c.rows);
    Preparer preparer(tid, blockIdx.x, d.conv_weights);
    wait_for_inputs();
    const auto projected = [&](u32 row) { return d.projected + (u64)row * PROJECTED; };
    const auto segment_of = [&](u32 row) -> const Segment& { return d.segments[c.table[row].segment]; };
#pragma unroll 1
    for (u32 row = first, stop; row < end; row = stop) {
        const Segment& segment = segment_of(row);
        const u32 behind = segment.first + segment.rows;
        stop = min(end, behind);
        if (!c.has(segment)) continue;
        for (Channel& channel : preparer.channels)
            channel.load_past(row - segment.first, d.conv(segment, segment.parity), projected(segment.first));
#pragma unroll 1
        for (; row < stop; row += BATCH) {
            float u[BATCH][Preparer::COUNT];
#pragma unroll
            for (u32 i = 0; i < BATCH; i++)
                if (row + i < stop) preparer.load(projected(row + i), u[i]);
#pragma unroll
            for (u32 i = 0; i < BATCH; i++)
                if (row + i < stop) preparer.make(u[i], c.prepared[row + i], parts[row + i - first]);
        }
        if (stop == behind)
            for (const Channel& channel : preparer.channels) channel.store(d.conv(segment, 1 - segment.parity));
    }
    __syncthreads();
    for (u32 i = tid; i < (end - first) * SHARING; i += KEY_THREADS) {
        const u32 row = first + i / SHARING, head = blockIdx.x * SHARING + i % SHARING;
        if (c.has(segment_of(row))) c.prepared[row].values[head].factors = make_factors(d, projected(row), head, parts[i / SHARING]);
    }
#endif
}

// What a row brings to a block's pair.
struct __align__(16) Brought {
    Keys keys;
    Factors factors;
    float v[32];
    // Asks for it, by a warp.
    __device__ __forceinline__ void bring(const Prepared& row, const Item& item, u32 lane) {
        const Value& value = row.values[item.head];
        const u8* from = (const u8*)&row.keys[item.head / SHARING];
#pragma unroll
        for (u32 i = lane * 16; i < sizeof(Keys); i += 32 * 16) copy16((u8*)&keys + i, from + i, true);
        if (lane < 8) copy16(v + lane * 4, value.v + item.part * 32 + lane * 4, true);
        else if (lane < 8 + sizeof(Factors) / 16) copy16((u8*)&factors + (lane - 8) * 16, (const u8*)&value.factors + (lane - 8) * 16, true);
    }
};

// A lane's two columns of an eighth of a head's state. What a row does to them is done when the next one is read: the state is decayed
// before, `before` times `step` is to be added to it.
struct Pair {
    float state[ROWS][2], before[KEY_WORDS * 4], step[2];
    // Of the row that comes.
    float k[KEY_WORDS * 4], q[KEY_WORDS * 4];
    float2 v;
    Factors factors;
    u32 eighth;
    __device__ __forceinline__ void load(const float* home) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float2 s = __ldcg((const float2*)(home + i * DV));
            state[i][0] = s.x;
            state[i][1] = s.y;
        }
    }
    // Adds updates that are not in the state yet.
    __device__ __forceinline__ void replay(const Update* log, u32 count, u32 head, u32 column) {
#pragma unroll 1
        for (u32 p = 0; p < count; p++) {
            const float2 by = __ldcg((const float2*)(log[p].step + head * DV + column));
            const float alpha = __ldcg(log[p].alpha + head), *keys = log[p].k + head / SHARING * DK + eighth * ROWS;
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                const float key = __ldcg(keys + i);
                state[i][0] = delta_state(alpha, state[i][0], key, by.x);
                state[i][1] = delta_state(alpha, state[i][1], key, by.y);
            }
        }
    }
    // Nothing is to be added: -0 leaves every number as it is, -0 too.
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (float& key : before) key = -0.0f;
        step[0] = step[1] = 0.0f;
    }
    // Asks for a row.
    __device__ __forceinline__ void load_row(const Brought& row, u32 column) {
        factors = row.factors;
        v = *(const float2*)(row.v + column);
#pragma unroll
        for (u32 i = 0; i < KEY_WORDS * 4; i += 4) {
            const float4 a = *(const float4*)(row.keys.k + eighth * EIGHTH + i), b = *(const float4*)(row.keys.q + eighth * EIGHTH + i);
            k[i] = a.x; k[i + 1] = a.y; k[i + 2] = a.z; k[i + 3] = a.w;
            q[i] = b.x; q[i + 1] = b.y; q[i + 2] = b.z; q[i + 3] = b.w;
        }
    }
    // The two halves of `delta_state`.
    __device__ __forceinline__ void decay(float alpha, int i) {
#pragma unroll
        for (int c = 0; c < 2; c++) state[i][c] = __fmul_rn(alpha, state[i][c]);
    }
    __device__ __forceinline__ void add(int i) {
#pragma unroll
        for (int c = 0; c < 2; c++) state[i][c] = fmaf(before[i], step[c], state[i][c]);
    }
    // The row that was asked for; asks for `next`. What it reads out: of the first column in even eighths, of the second in odd ones.
    __device__ __forceinline__ float row(const Brought& next, u32 column) {
        const Factors f = factors;
        const float2 value = v;
        float sk[2] = {}, sq[2] = {};
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            add(i);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                sk[c] = fmaf(state[i][c], k[i], sk[c]);
                sq[c] = fmaf(state[i][c], q[i], sq[c]);
            }
            decay(f.alpha, i);
            before[i] = k[i];
        }
        load_row(next, column);
        // The tree of `sum_of`. All lanes need S^T k, but one will do for S^T q.
        const bool odd = eighth & 1;
        float out = (odd ? sq[1] : sq[0]) + __shfl_xor_sync(FULL, odd ? sq[0] : sq[1], 4);
#pragma unroll
        for (int n = 4; n <= 16; n *= 2) {
#pragma unroll
            for (int c = 0; c < 2; c++) sk[c] += __shfl_xor_sync(FULL, sk[c], n);
            if (n > 4) out += __shfl_xor_sync(FULL, out, n);
        }
        const float error[2] = {delta_error(f, sk[0], value.x), delta_error(f, sk[1], value.y)};
        step[0] = delta_step(f, error[0]);
        step[1] = delta_step(f, error[1]);
        return delta_readout(f, out, odd ? error[1] : error[0]);
    }
    __device__ __forceinline__ void store(float* home) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            add(i);
            *(float2*)(home + i * DV) = float2{state[i][0], state[i][1]};
        }
    }
};

// Readouts as they are, and the state behind them. Grid: 32 columns of a head each.
// Four blocks: up to 128 registers. Without a bound the compiler spills for 8.0.
extern "C" __global__ void __launch_bounds__(32 * CHUNK_WARPS, 4) delta_chunk(Delta d, Chunk c) {
#if DV == 128
    Brought* rows = (Brought*)(u8*)shared;  // two times AHEAD, which take turns, and one
    launch_dependents();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x / VALUE_SPLIT;
    const Item item{d.segments[head / VALUE_HEADS], head % VALUE_HEADS, blockIdx.x % VALUE_SPLIT};
    const Segment& segment = item.segment;
    if (!c.has(segment)) {
        wait_for_inputs();
        return;
    }
    const u32 in_block = (warp * 4 + lane % 4) * 2, column = item.part * 32 + in_block;
    Pair pair;
    pair.eighth = lane / 4;
    float* home = d.state(segment, item.head) + pair.eighth * ROWS * DV + column;
    pair.load(home);
    pair.replay(d.log(segment), segment.pending, item.head, column);
    pair.begin();
    wait_for_inputs();
    const auto bring = [&](u32 begin) {
        for (u32 r = begin + warp; r < min(begin + AHEAD, segment.rows); r += CHUNK_WARPS)
            rows[r % (2 * AHEAD)].bring(c.prepared[segment.first + r], item, lane);
    };
    float* to = d.gated + ((u64)segment.first * VALUE_HEADS + item.head) * DV + column + pair.eighth % 2;
    bring(0);
#pragma unroll 1
    for (u32 begin = 0; begin < segment.rows; begin += AHEAD) {
        await_copies();
        __syncthreads();  // all have come, and all are through with those before them
        bring(begin + AHEAD);
        const Brought* row = rows + begin / AHEAD % 2 * AHEAD;
        const u32 count = min((u32)AHEAD, segment.rows - begin);
        pair.load_row(*row, in_block);
#pragma unroll 2
        for (u32 r = 0; r < count; r++) {
            // Behind the last one it asks for a row that nobody needs: not the next one, which is on its way.
            row = r + 1 < count ? row + 1 : rows + 2 * AHEAD;
            const float o = pair.row(*row, in_block);
            if (pair.eighth < 2) *to = o;
            to += VALUE_HEADS * DV;
        }
    }
    pair.store(home);
#endif
}

__device__ __forceinline__ void load4(const float* p, float (&out)[4]) {
    const float4 v = __ldcg((const float4*)p);
    out[0] = v.x; out[1] = v.y; out[2] = v.z; out[3] = v.w;
}

// What was read out, gated and normed. Grid: value heads by eight, rows; a warp has a head.
extern "C" __global__ void __launch_bounds__(THREADS) delta_outputs(Delta d, Chunk c) {
#if DV == 128
    launch_dependents();
    const u32 lane = threadIdx.x % 32, row = blockIdx.y, head = blockIdx.x * WARPS + threadIdx.x / 32;
    float gain[4], gate[4], o[4], squares[4];
    read4(d.norm + lane * 4, gain);
    wait_for_inputs();
    if (head >= VALUE_HEADS || !c.has(d.segments[c.table[row].segment])) return;
    const u64 at = (u64)row * VALUE_HEADS + head;
    float* out = d.gated + at * DV + lane * 4;
    load4(d.projected + (u64)row * PROJECTED + CHANNELS + head * DV + lane * 4, gate);
    load4(out, o);
    const float square = square_sum(o);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        squares[i] = __shfl_sync(FULL, square, i * 8);
        o[i] = o[i] * gain[i] * silu(gate[i]);
    }
    if (d.to.records) {
        put_head(row, head, o, squares, d.to, lane);
        return;
    }
    write4(out, o);
    if (lane % 8 == 0) d.squares[at * VALUE_SPLIT + lane / 8] = square;
#endif
}
