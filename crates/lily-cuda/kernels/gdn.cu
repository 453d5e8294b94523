// Gated DeltaNet between its two projections: docs/model-spec.md, section 3.
//
// Few sequences: a block has 32 columns of a value head of one, in registers; a warp has an eighth of the state's rows, a lane a column of
// them. Many: a block of four warps has a whole head, whose state comes to shared memory in the background; a warp has 32 columns, a lane
// four columns of a quarter of the rows. So what heads have in common is done once, and as many blocks run as there is shared memory for.
// A state is then written every few tokens only: what the others add to it is kept aside, and added anew by each that reads it.
// Many rows of a sequence: gdn_chunk.cu, which comes behind this file.

extern __shared__ __align__(128) u8 shared[];

#define CHANNELS (2 * KEY_HEADS * DK + VALUE_HEADS * DV)
#define PROJECTED (CHANNELS + VALUE_HEADS * DV + 2 * VALUE_HEADS)  // q k v | z | b | a
#define PAST (TAPS - 1)
#define KEY_THREADS 128  // that have channels of q and k
#define KEY_WARPS (KEY_THREADS / 32)
#define PER_THREAD ((DK + KEY_THREADS - 1) / KEY_THREADS)
#define ROWS (DK / WARPS)  // check_shapes in src/lib.rs: it divides

// One channel of the convolution over the last inputs and the new one, then SiLU; the window moves on.
struct Channel {
    float past[PAST];
    float taps[TAPS];
    u32 index;
    bool active;
    __device__ __forceinline__ void load_taps(u32 channel, bool is_active, const float* weights) {
        index = channel;
        active = is_active;
        if (!active) return;
#pragma unroll
        for (int j = 0; j < TAPS; j++) taps[j] = __ldg(weights + channel * TAPS + j);
    }
    // The window before row `row` of a segment whose projected rows are these.
    __device__ __forceinline__ void load_past(u32 row, const float* conv, const float* projected) {
        if (!active) return;
#pragma unroll
        for (u32 j = 0; j < PAST; j++)
            past[j] = __ldcg(row + j < PAST ? conv + (u64)(row + j) * CHANNELS + index : projected + (u64)(row + j - PAST) * PROJECTED + index);
    }
    __device__ __forceinline__ void load(u32 channel, bool is_active, const float* conv, const float* weights) {
        load_taps(channel, is_active, weights);
        load_past(0, conv, nullptr);
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

// A head's four values a lane as columns, times its 1 / rms. squares: sums of squares of 32 readouts.
__device__ __forceinline__ void put_head(u32 row, u32 head, float (&v)[4], const float (&squares)[4], const Columns& to, u32 lane) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) sum += squares[i];
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

// What one token does to all states of a layer: by rows, how much of what is there stays, and what each key adds to a column.
struct __align__(16) Update {
    float k[KEY_HEADS * DK], step[VALUE_HEADS * DV], alpha[(VALUE_HEADS + 3) / 4 * 4];
};

// Everything that the kernels take. Value heads of a segment follow each other.
struct Delta {
    const Segment* segments;
    const float *projected, *conv_weights, *a_log, *dt_bias, *norm;  // projected: [rows, PROJECTED]
    float* states;  // per slot [VALUE_HEADS, DK, DV]
    u64 state_stride;
    float* convs;  // per slot 2 x [PAST, CHANNELS], of which `parity` is read and the other written
    u64 conv_stride;
    float* gated;    // [rows, VALUE_HEADS * DV]: the readout times norm gain and SiLU(z) but not 1 / rms
    float* squares;  // [rows, VALUE_HEADS, VALUE_SPLIT], for that
    Columns to;      // or, of whole heads, all of it as columns
    Update* updates;  // per slot PENDING of them: what is not in its states yet. Of whole heads
    u64 update_stride;
    __device__ __forceinline__ float* state(const Segment& segment, u32 head) const {
        return states + segment.slot * state_stride + (u64)head * (DK * DV);
    }
    __device__ __forceinline__ Update* log(const Segment& segment) const { return updates + segment.slot * update_stride; }
    __device__ __forceinline__ float* conv(const Segment& segment, u32 parity) const {
        return convs + segment.slot * conv_stride + parity * (u64)(PAST * CHANNELS);
    }
};

// Columns of a value head of a segment.
struct Item {
    Segment segment;
    u32 head, part;
};

// Where a key's value of a row of the state is: each quarter of them begins four banks behind the one before it.
__device__ __forceinline__ constexpr u32 key_place(u32 row) { return row + row / (DK / 4) * 4; }

// What a row of a segment brings to a head.
template <int COLUMNS> struct __align__(16) Inputs {
    float q[DK + 16], k[DK + 16];
    float values[COLUMNS], gates[COLUMNS];  // v, and SiLU(z)
    float sums[3][KEY_WARPS];               // parts of q q, k k and q k
    float alpha, beta;
    __device__ __forceinline__ Gates head_gates() const {
        float n[3];
#pragma unroll
        for (int i = 0; i < 3; i++) n[i] = (sums[i][0] + sums[i][1]) + (sums[i][2] + sums[i][3]);
        return Gates{delta_q_scale(n[0]), delta_k_scale(n[1]), alpha, beta, n[2]};
    }
};

// A thread that makes inputs: it has channels of q and k, of v, or of all three (TOGETHER).
template <int COLUMNS, bool TOGETHER> struct Maker {
    const Delta& d;
    u32 tid, column;  // column: of v
    bool has_keys, has_value;
    Channel q[PER_THREAD], k[PER_THREAD], v;
    float rate, bias;  // of the decay
    // What the projection has for this thread in the next row: inputs of its channels, and of the gates.
    float next_q[PER_THREAD], next_k[PER_THREAD], next_v, z, a, b;
    __device__ __forceinline__ Maker(const Delta& d, u32 tid)
        : d(d), tid(tid), column(TOGETHER ? tid : tid - KEY_THREADS), has_keys(TOGETHER || tid < KEY_THREADS), has_value(column < COLUMNS) {}
    // Asks for what an item needs besides its rows. It was written by earlier steps or never, so it may come before the wait.
    __device__ __forceinline__ void load(const Item& item) {
        const float* conv = d.conv(item.segment, item.segment.parity);
        const u32 key = item.head / (VALUE_HEADS / KEY_HEADS) * DK + tid;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            const bool is = has_keys && tid + i * KEY_THREADS < DK;
            q[i].load(key + i * KEY_THREADS, is, conv, d.conv_weights);
            k[i].load(KEY_HEADS * DK + key + i * KEY_THREADS, is, conv, d.conv_weights);
        }
        v.load(2 * KEY_HEADS * DK + item.head * DV + item.part * COLUMNS + column, has_value, conv, d.conv_weights);
        rate = __ldg(d.a_log + item.head);
        bias = __ldg(d.dt_bias + item.head);
    }
    // Asks for a row.
    __device__ __forceinline__ void load_row(const Item& item, u32 row) {
        const float* from = d.projected + (u64)row * PROJECTED;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            if (!q[i].active) continue;
            next_q[i] = __ldcg(from + q[i].index);
            next_k[i] = __ldcg(from + k[i].index);
        }
        if (!has_value) return;
        next_v = __ldcg(from + v.index);
        from += CHANNELS;
        z = __ldcg(from + item.head * DV + item.part * COLUMNS + column);
        from += VALUE_HEADS * DV + item.head;
        b = __ldcg(from);
        a = __ldcg(from + VALUE_HEADS);
    }
    // Where the next step finds the last inputs.
    __device__ __forceinline__ void store(const Item& item) const {
        float* conv = d.conv(item.segment, 1 - item.segment.parity);
        v.store(conv);
        // Those that share channels of q and k would write the same: one of them does.
        if (item.part != 0 || item.head % (VALUE_HEADS / KEY_HEADS) != 0) return;
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            q[i].store(conv);
            k[i].store(conv);
        }
    }
    // Convolution and gates of the row that was asked for.
    __device__ __forceinline__ void make(Inputs<COLUMNS>& row) {
        if (has_keys) {
            float sums[3] = {0, 0, 0};
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++) {
                if (!q[i].active) continue;
                const float x = q[i].step(next_q[i]), y = k[i].step(next_k[i]);
                row.q[key_place(tid + i * KEY_THREADS)] = x;
                row.k[key_place(tid + i * KEY_THREADS)] = y;
                sums[0] = fmaf(x, x, sums[0]);
                sums[1] = fmaf(y, y, sums[1]);
                sums[2] = fmaf(x, y, sums[2]);
            }
#pragma unroll
            for (int i = 0; i < 3; i++) {
                sums[i] = warp_sum(sums[i]);
                if (tid % 32 == 0) row.sums[i][tid / 32] = sums[i];
            }
        }
        if (!has_value) return;
        row.values[column] = v.step(next_v);
        row.gates[column] = silu(z);
        if (column == 0) {
            row.alpha = delta_alpha(delta_softplus(a, bias), -expf(rate));
            row.beta = sigmoid(b);
        }
    }
};

// Grid: 32 columns of a head each.
extern "C" __global__ void __launch_bounds__(THREADS, 2) delta_1(Delta d) {
    __shared__ Inputs<32> rows[2];  // take turns: warps may be a row apart
    __shared__ float parts[2][WARPS][32];  // of S^T k and S^T q
    launch_dependents();
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x / VALUE_SPLIT;
    const Item item{d.segments[head / VALUE_HEADS], head % VALUE_HEADS, blockIdx.x % VALUE_SPLIT};
    const Segment& segment = item.segment;
    float* home = d.state(segment, item.head) + warp * ROWS * DV + item.part * 32 + lane;
    float state[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) state[i] = __ldcg(home + i * DV);
    Maker<32, false> maker(d, threadIdx.x);
    maker.load(item);
    const float gain = __ldg(d.norm + item.part * 32 + lane);
    wait_for_inputs();
    maker.load_row(item, segment.first);
#pragma unroll 1
    for (u32 r = 0; r < segment.rows; r++) {
        Inputs<32>& row = rows[r & 1];
        maker.make(row);
        if (r + 1 < segment.rows) maker.load_row(item, segment.first + r + 1);
        __syncthreads();
        // S^T k and S^T q of the state before its decay.
        const float *q = row.q + key_place(warp * ROWS), *k = row.k + key_place(warp * ROWS);
        float sk = 0, sq = 0, o, step;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            sk = fmaf(state[i], k[i], sk);
            sq = fmaf(state[i], q[i], sq);
        }
        parts[0][warp][lane] = sk;
        parts[1][warp][lane] = sq;
        __syncthreads();
        const Gates g = row.head_gates();
        sk = sum_of<WARPS>([&](int w) { return parts[0][w][lane]; });
        sq = sum_of<WARPS>([&](int w) { return parts[1][w][lane]; });
        delta_column(g, sk, sq, row.values[lane], o, step);
#pragma unroll
        for (int i = 0; i < ROWS; i++) state[i] = delta_state(g.alpha, state[i], k[i], step);
        if (warp != 0) continue;
        const u32 at = (segment.first + r) * VALUE_HEADS + item.head;
        d.gated[(u64)at * DV + item.part * 32 + lane] = o * gain * row.gates[lane];
        const float square = warp_sum(__fmul_rn(o, o));
        if (lane == 0) d.squares[(u64)at * VALUE_SPLIT + item.part] = square;
    }
    maker.store(item);
#pragma unroll
    for (int i = 0; i < ROWS; i++) home[i * DV] = state[i];
}

// A whole head's shared memory.
struct __align__(128) Head {
    float state[DK * DV];
    Inputs<128> row;
    float keys[PENDING][DK + 16];  // of updates that are not in the state yet
    float gains[128];
    float out[128], squares[4];  // the row's readouts times gain and gate, and sums of the squares of 32 readouts
};

// Four consecutive values.
__device__ __forceinline__ void read4(const float* p, float (&out)[4]) {
    const float4 v = *(const float4*)p;
    out[0] = v.x; out[1] = v.y; out[2] = v.z; out[3] = v.w;
}
__device__ __forceinline__ void write4(float* p, const float (&in)[4]) { *(float4*)p = make_float4(in[0], in[1], in[2], in[3]); }
// Those of keys, of which an eighth need not lie at a multiple of 16 bytes.
template <int N> __device__ __forceinline__ void read_keys(const float* p, float (&out)[N]) {
    if constexpr (N == 4) read4(p, out);
    else out[0] = p[0];
}
constexpr int KEYS = ROWS % 4 == 0 ? 4 : 1;  // that are read together

// The sum of squares of 32 columns, of which each of eight lanes has four: as `warp_sum` adds them up where every lane has one.
__device__ __forceinline__ float square_sum(const float (&o)[4]) {
    float x[4];
#pragma unroll
    for (int c = 0; c < 4; c++) x[c] = __fmul_rn(o[c], o[c]);
#pragma unroll
    for (int n = 4; n; n >>= 1)
#pragma unroll
        for (int c = 0; c < 4; c++) x[c] += __shfl_xor_sync(FULL, x[c], n);
    return (x[0] + x[2]) + (x[1] + x[3]);
}

// Updates of a head that are not in its state yet: what a thread needs of them beside their keys.
struct Pending {
    u32 count;
    float step[PENDING][4], alpha[PENDING], k[PENDING][PER_THREAD];  // k: for `put_keys`
    // Asks for them. They were written by earlier steps, so it may come before the wait.
    __device__ __forceinline__ void load(const Delta& d, const Item& item, u32 tid, u32 column) {
        const Update* log = d.log(item.segment);
        count = item.segment.pending;
#pragma unroll
        for (u32 p = 0; p < PENDING; p++) {
            if (p >= count) break;
            const float4 v = __ldcg((const float4*)(log[p].step + item.head * DV + column));
            step[p][0] = v.x; step[p][1] = v.y; step[p][2] = v.z; step[p][3] = v.w;
            alpha[p] = __ldcg(log[p].alpha + item.head);
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++)
                if (tid + i * KEY_THREADS < DK) k[p][i] = __ldcg(log[p].k + item.head / (VALUE_HEADS / KEY_HEADS) * DK + tid + i * KEY_THREADS);
        }
    }
    // Leaves keys for all threads.
    __device__ __forceinline__ void put_keys(float (&keys)[PENDING][DK + 16], u32 tid) const {
#pragma unroll
        for (u32 p = 0; p < PENDING; p++) {
            if (p >= count) break;
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++)
                if (tid + i * KEY_THREADS < DK) keys[p][key_place(tid + i * KEY_THREADS)] = k[p][i];
        }
    }
    // Adds them to four columns of rows from `at` of the keys on.
    __device__ __forceinline__ void replay(const float (&keys)[PENDING][DK + 16], u32 at, float (&s)[KEYS][4]) const {
#pragma unroll
        for (u32 p = 0; p < PENDING; p++) {
            if (p >= count) break;
            float k[KEYS];
            read_keys(keys[p] + at, k);
#pragma unroll
            for (int j = 0; j < KEYS; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) s[j][c] = delta_state(alpha[p], s[j][c], k[j], step[p][c]);
        }
    }
};

// A thread of a whole head: columns `column` to `column` + 3 of a quarter of a state's rows.
struct Worker {
    u32 tid, lane, quarter, column;
    __device__ __forceinline__ explicit Worker(u32 tid) : tid(tid), lane(tid % 32), quarter(lane / 8), column(tid / 32 * 32 + lane % 8 * 4) {}
    // Asks for this thread's part of a state.
    __device__ __forceinline__ void bring(const float* from, float* state) const {
#pragma unroll 8
        for (u32 i = quarter * 2 * ROWS; i < (quarter + 1) * 2 * ROWS; i++) copy16(state + i * DV + column, from + i * DV + column, true);
    }
    // What a row reads out and what each key adds to the state, of the state before its decay. Updates that are not in it are added
    // first, and stay in it if `keep`.
    __device__ __forceinline__ void read(Head& head, const Gates& g, const Pending& pending, bool keep, float (&o)[4], float (&step)[4]) const {
        float sk[2][4] = {}, sq[2][4] = {};  // of the two eighths of the rows
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < ROWS; i += KEYS) {
                const u32 first = (quarter * 2 + h) * ROWS + i;
                float k[KEYS], q[KEYS], s[KEYS][4];
                read_keys(head.row.k + first + quarter * 4, k);
                read_keys(head.row.q + first + quarter * 4, q);
#pragma unroll
                for (int j = 0; j < KEYS; j++) read4(head.state + (first + j) * DV + column, s[j]);
                pending.replay(head.keys, first + quarter * 4, s);
#pragma unroll
                for (int j = 0; j < KEYS; j++) {
                    if (keep) write4(head.state + (first + j) * DV + column, s[j]);
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        sk[h][c] = fmaf(s[j][c], k[j], sk[h][c]);
                        sq[h][c] = fmaf(s[j][c], q[j], sq[h][c]);
                    }
                }
            }
        float v[4];
        read4(head.row.values + column, v);
        // The tree of `sum_of`.
#pragma unroll
        for (int c = 0; c < 4; c++) {
            float k = sk[0][c] + sk[1][c], q = sq[0][c] + sq[1][c];
#pragma unroll
            for (int n = 8; n <= 16; n *= 2) {
                k += __shfl_xor_sync(FULL, k, n);
                q += __shfl_xor_sync(FULL, q, n);
            }
            delta_column(g, k, q, v[c], o[c], step[c]);
        }
    }
    // The state behind the row, which may go elsewhere.
    __device__ __forceinline__ void update(const Inputs<128>& row, float alpha, const float (&step)[4], const float* state, float* to) const {
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < ROWS; i += KEYS) {
                const u32 first = (quarter * 2 + h) * ROWS + i;
                float k[KEYS];
                read_keys(row.k + first + quarter * 4, k);
#pragma unroll
                for (int j = 0; j < KEYS; j++) {
                    const u32 at = (first + j) * DV + column;
                    float s[4];
                    read4(state + at, s);
#pragma unroll
                    for (int c = 0; c < 4; c++) s[c] = delta_state(alpha, s[c], k[j], step[c]);
                    write4(to + at, s);
                }
            }
    }
    // Keeps what a row does to the state aside.
    __device__ __forceinline__ void defer(const Inputs<128>& row, u32 head, float alpha, const float (&step)[4], Update& to) const {
        if (quarter == 0) write4(to.step + head * DV + column, step);
        if (tid == 0) to.alpha[head] = alpha;
        if (head % (VALUE_HEADS / KEY_HEADS) != 0) return;
        for (u32 i = tid; i < DK; i += KEY_THREADS) to.k[head / (VALUE_HEADS / KEY_HEADS) * DK + i] = row.k[key_place(i)];
    }
    // Leaves readouts for `put`.
    __device__ __forceinline__ void leave(Head& head, const float (&o)[4]) const {
        float out[4], gain[4], gate[4];
        read4(head.gains + column, gain);
        read4(head.row.gates + column, gate);
#pragma unroll
        for (int c = 0; c < 4; c++) out[c] = o[c] * gain[c] * gate[c];
        const float square = square_sum(o);
        if (quarter == 0) write4(head.out + column, out);
        if (lane == 0) head.squares[column / 32] = square;
    }
};

// A head's readouts of a row, by one warp.
__device__ __forceinline__ void put(const Delta& d, u32 row, u32 head, const Head& made, u32 lane) {
    float out[4];
    read4(made.out + lane * 4, out);
    if (d.to.records) {
        put_head(row, head, out, made.squares, d.to, lane);
        return;
    }
    const u64 at = (u64)row * VALUE_HEADS + head;
    write4(d.gated + at * DV + lane * 4, out);
    if (lane < VALUE_SPLIT) d.squares[at * VALUE_SPLIT + lane] = made.squares[lane];
}

// Grid: whole heads, of 128 columns.
extern "C" __global__ void __launch_bounds__(KEY_THREADS, 3) delta_4(Delta d) {
#if DV == 128
    Head& own = *(Head*)(u8*)shared;
    launch_dependents();
    const u32 warp = threadIdx.x / 32;
    const Item item{d.segments[blockIdx.x / VALUE_HEADS], blockIdx.x % VALUE_HEADS, 0};
    const Segment& segment = item.segment;
    if (segment.rows >= CHUNK_ROWS) {  // of gdn_chunk.cu
        wait_for_inputs();
        return;
    }
    float* home = d.state(segment, item.head);
    const Worker worker(threadIdx.x);
    Pending pending;
    pending.load(d, item, worker.tid, worker.column);  // first: what comes behind the state comes late
    worker.bring(home, own.state);
    Maker<128, true> maker(d, threadIdx.x);
    maker.load(item);
    own.gains[threadIdx.x] = __ldg(d.norm + threadIdx.x);
    pending.put_keys(own.keys, worker.tid);
    wait_for_inputs();
    maker.load_row(item, segment.first);
#pragma unroll 1
    for (u32 r = 0; r < segment.rows; r++) {
        const bool last = r + 1 == segment.rows;
        maker.make(own.row);
        if (!last) maker.load_row(item, segment.first + r + 1);
        __syncthreads();
        const Gates g = own.row.head_gates();
        if (r == 0) await_copies();
        float o[4], step[4];
        worker.read(own, g, pending, pending.count && !segment.defers, o, step);
        if (segment.defers) {
            worker.defer(own.row, item.head, g.alpha, step, d.log(segment)[pending.count]);
        } else {
            // As a number: else there would be a branch for each store.
            worker.update(own.row, g.alpha, step, own.state, (float*)(last ? (u64)home : (u64)own.state));
            pending.count = 0;
        }
        worker.leave(own, o);
        __syncthreads();
        if (warp == r % KEY_WARPS) put(d, segment.first + r, item.head, own, worker.lane);
    }
    maker.store(item);
#endif
}

// Writes the updates of a slot that are not in its states yet, for whatever reads states and knows nothing of them.
// Grid: value heads of all Gated DeltaNet layers; a thread has a column.
extern "C" __global__ void settle(float* states, const Update* updates, u32 pending) {
    const u32 layer = blockIdx.x / VALUE_HEADS, head = blockIdx.x % VALUE_HEADS;
    float* column = states + (u64)blockIdx.x * (DK * DV) + threadIdx.x;
    const Update* log = updates + layer * PENDING;
    float step[PENDING], alpha[PENDING];
#pragma unroll
    for (u32 p = 0; p < PENDING; p++) {
        if (p >= pending) break;
        step[p] = __ldcg(log[p].step + head * DV + threadIdx.x);
        alpha[p] = __ldcg(log[p].alpha + head);
    }
#pragma unroll 8
    for (u32 i = 0; i < DK; i++) {
        float s = __ldcg(column + i * DV);
#pragma unroll
        for (u32 p = 0; p < PENDING; p++) {
            if (p >= pending) break;
            s = delta_state(alpha[p], s, __ldcg(log[p].k + head / (VALUE_HEADS / KEY_HEADS) * DK + i), step[p]);
        }
        column[i * DV] = s;
    }
    // The next kernels may ask for states before they wait for this one's end, but not before its blocks have ended.
    __threadfence();
}
