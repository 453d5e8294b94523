// --- a token ---

struct Consumer : Experts {
    // x for products of HIDDEN inputs, times the gain of its norm; `inverse_rms` has the rest. Meanwhile loads what the delta rule
    // needs, if `has_delta`.
    __device__ __forceinline__ void take_x(u32 at, const float* gain, u32 epoch, bool has_delta, bool has_keys, const Layer& w) {
        const Share<HIDDEN_TILES> mine(warp);
        constexpr int STEPS = (Share<HIDDEN_TILES>::MOST + 3) / 4;
        const float total = take<STEPS, false>(
            t.packets + at, mine.count, [&](u32 j) { return min(mine.first + j, (u32)HIDDEN_TILES - 1); }, gain, false, epoch, s.input,
            s.input_units, [&] {
                if (has_delta) load_delta(w, blockIdx.x);
                if (has_keys) load_attention(w);
            });
        norm ^= 1;
        if (lane == 0) s.squares[norm][warp] = total;
    }
    // The mixer's result.
    template <int TILES> __device__ __forceinline__ void take_mixed(bool normed, u32 epoch) {
        const Share<TILES> mine(warp);
        constexpr int STEPS = (Share<TILES>::MOST + 3) / 4;
        take<STEPS, true>(
            t.packets + AT_MIXED, mine.count, [&](u32 j) { return min(mine.first + j, (u32)TILES - 1); }, nullptr, normed, epoch, s.wide,
            s.wide_units, [] {});
    }
    // x += W mixed, for the rows of x that this block owns.
    template <int K_TILES> __device__ __forceinline__ void out(Span own, u32 epoch) {
        Inputs<K_TILES> x;
        load_inputs<K_TILES>(x, s.wide, s.wide_units);
#pragma unroll 1
        for (u32 block = own.begin; block < own.end; block++) {
            float total[2] = {0, 0};
            multiply_rows<Q4, K_TILES>(x, s.wide, s.wide_units, total);
            note(s.partial[turn][warp], block - own.begin, total);
        }
        consumer_sync();
        if (tid < (own.end - own.begin) * TILE_ROWS) add(tid, own.begin * TILE_ROWS + tid, joined(tid), AT_MID, epoch);
        turn ^= 1;
    }

    // The three products that x is the input of.
    enum Product { PROJECT, GATE_UP, LOGITS };
    // What becomes of sum `i` of `n` row blocks from `base` on; of gate and up, half of the threads have both.
    __device__ __forceinline__ void finish(Product what, u32 base, u32 n, u32 rows, Span common, Span routed, u32 epoch) {
        if (what == GATE_UP) {
            if (tid >= n * 8) return;
            const u32 i = tid / 8, at = i * TILE_ROWS + tid % 8, n_common = common.end - common.begin;
            const float v = swiglu(joined(at), joined(at + 8), inverse_rms());
            const u32 unit = i < n_common ? common.begin + i : routed.begin + i - n_common;
            const u32 row = i < n_common ? TOP_K * EXPERT_WIDTH + unit * 8 : unit / GATE_UP_BLOCKS * EXPERT_WIDTH + unit % GATE_UP_BLOCKS * 8;
            send(t.packets + AT_MIDDLE + spread(row + tid % 8), v, epoch);
            return;
        }
        const u32 row = (common.begin + base) * TILE_ROWS + tid;
        if (tid >= n * TILE_ROWS || row >= rows) return;
        const float v = __fmul_rn(joined(tid), inverse_rms());
        if (what == PROJECT) {
            send(t.packets + AT_PROJECTED + row, v, epoch);
        } else {
            t.logits[row] = v;
            broken |= !isfinite(v);
            if (v > best_value) {
                best_value = v;
                best_row = row;
            }
        }
    }
    // Row blocks of `common`, and of the chosen experts `routed`.
    __device__ __forceinline__ void product(Product what, u32 rows, Span common, Span routed, u32 epoch) {
        Inputs<HIDDEN_TILES> x;
        load_inputs<HIDDEN_TILES>(x, s.input, s.input_units);
        const u32 count = common.end - common.begin + routed.end - routed.begin;
        u32 base = 0;
        // A barrier of the block in any case, for those that take turns.
#pragma unroll 1
        do {
            const u32 n = min((u32)PART, count - base);
#pragma unroll 1
            for (u32 i = 0; i < n; i++) {
                float total[2] = {0, 0};
                multiply_rows<Q4, HIDDEN_TILES>(x, s.input, s.input_units, total);
                note(s.partial[turn][warp], i, total);
            }
            consumer_sync();
            finish(what, base, n, rows, common, routed, epoch);
            turn ^= 1;
            base += PART;
        } while (base < count);
    }
    // This block's largest logit.
    __device__ __forceinline__ void note_best() {
        const u32 key = order_key(best_value), top = __reduce_max_sync(FULL, key);
        const u32 winner = __reduce_min_sync(FULL, key == top ? best_row : 0xffffffffu);
        broken = __any_sync(FULL, broken);
        Best* bests = (Best*)s.gathered;
        if (lane == 0) bests[warp] = Best{value_of_key(top), winner, broken, 0};
        consumer_sync();
        if (tid == 0) {
            Best b = bests[0];
            for (int k = 1; k < WARPS; k++) {
                if (bests[k].value > b.value || (bests[k].value == b.value && bests[k].row < b.row)) {
                    b.value = bests[k].value;
                    b.row = bests[k].row;
                }
                b.broken |= bests[k].broken;
            }
            t.best[blockIdx.x] = b;
        }
    }

    // A product that adds to the rows of x that this block owns: of the mixer's result, or of what the experts have in the middle.
    __device__ __forceinline__ void add_to_x(const Layer& w, bool moe, const float* weights, Span own, u32 epoch) {
        if (moe) {
            take_middle(epoch - 1);
            down(weights, own, epoch);
        } else if (VALUE_TILES == QUERY_TILES || !w.attention) {
            take_mixed<VALUE_TILES>(!w.attention, epoch);
            out<VALUE_TILES>(own, epoch);
        } else {
            take_mixed<QUERY_TILES>(false, epoch);
            out<QUERY_TILES>(own, epoch);
        }
    }

    __device__ __forceinline__ void run() {
        wait_for_inputs();
        slot_of = t.segments[0].slot;
        parity = t.segments[0].parity;
        position = t.rows[0].position;
        u32 epoch = __ldcg(t.epoch) + 1;
        const Span own = s.shares[X_SHARE], none{0, 0};
        const u32 owned = (own.end - own.begin) * TILE_ROWS, first = own.begin * TILE_ROWS;
        if (tid < owned) {
            s.residual[tid] = __ldcg(t.x + first + tid);
            send(t.packets + AT_X + spread(first + tid), s.residual[tid], epoch);
        }
        // A layer is two halves of the same form: x, a product, something between, and a product that adds to x.
#pragma unroll 1
        for (u32 half = 0;; half++) {
            const u32 l = half / 2;
            const bool moe = half & 1, end = l == t.n_layers;
            const Layer& w = s.layers[end ? 0 : l];
            const bool has_delta = !moe && !end && !w.attention && blockIdx.x < DELTA_ITEMS;
            const bool has_keys = !moe && !end && w.attention && blockIdx.x < used_splits(position) * KV_HEADS;
            take_x(moe ? AT_MID : AT_X, end ? t.norm : moe ? w.post_norm : w.input_norm, epoch, has_delta, has_keys, w);
            if (moe) {
                router(epoch);
                product(GATE_UP, 0, s.shares[COMMON_SHARE], s.shares[ROUTED_SHARE], epoch);
            } else {
                const u32 rows = end ? VOCAB : w.attention ? ATTENTION_ROWS : GDN_ROWS;
                product(end ? LOGITS : PROJECT, rows, s.shares[end ? VOCAB_SHARE : w.attention ? ATTENTION_SHARE : GDN_SHARE], none, epoch);
            }
            if (end) break;
            if (!moe && w.attention) {
                flash(w, epoch);
                combine(epoch);
            } else {
#pragma unroll 1
                for (u32 item = blockIdx.x; has_delta && item < DELTA_ITEMS; item += gridDim.x) {
                    if (item != blockIdx.x) {
                        consumer_sync();
                        load_delta(w, item);
                    }
                    delta(w, item, epoch);
                }
            }
            epoch += moe;
            if (owned > 0) add_to_x(w, moe, s.weights[l & 1], own, epoch);
            if (moe && l == t.n_layers - 1) {
                if (tid < owned) t.x[first + tid] = s.residual[tid];
                launch_dependents();
            }
        }
        note_best();
        // Everybody has read it: everybody has sent x behind the last layer.
        if (blockIdx.x == 0 && tid == 0) *t.epoch = epoch;
    }
};

// Only the code for this very architecture may give registers from warps that need few to others.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define STEERS_REGISTERS 1
#else
#define STEERS_REGISTERS 0
#endif

extern "C" __global__ void __launch_bounds__(TOKEN_THREADS, 1) token(const __grid_constant__ Token t) {
    Shared& s = *(Shared*)shared;
    const u32 tid = threadIdx.x, warp = __shfl_sync(FULL, tid / 32, 0), lane = tid % 32;  // the compiler sees that it is the same in a warp
    if (tid == 0) {
#pragma unroll 1
        for (u32 i = 0; i < RING; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], THREADS);
        }
        barrier_fence();
    }
    if (tid < SHARES) s.shares[tid] = share_of(tid);
    if (tid < 12) s.sums3[tid / 4][tid % 4] = 0;  // of warps that have no channel
#pragma unroll 1
    for (u32 i = tid; i < t.n_layers * (sizeof(Layer) / 8); i += TOKEN_THREADS) ((u64*)s.layers)[i] = __ldg((const u64*)t.layers + i);
    __syncthreads();
    if (warp >= WARPS) {
#if STEERS_REGISTERS
        asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
#endif
        if (warp == WARPS) Producer{s, Ring{0, 0}, lane, (u32)t.ahead}.run(t);
    } else {
#if STEERS_REGISTERS
        asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
#endif
        Consumer{s, t, Ring{0, 0}, tid, warp, lane, 0, 0, 0, -INFINITY, 0xffffffffu, 0, 0, 0}.run();
    }
}
