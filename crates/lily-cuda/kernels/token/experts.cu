// --- mixture of experts ---

struct Experts : Attention {
    // What gate and up make: this warp's tiles of the chosen experts, then of the shared one.
    __device__ __forceinline__ void take_middle(u32 epoch) {
        const Share<EXPERT_TILES> mine(warp);
        const Share<SHARED_TILES> common(warp);
        const u32 routed = TOP_K * mine.count;
        constexpr int STEPS = (TOP_K * Share<EXPERT_TILES>::MOST + Share<SHARED_TILES>::MOST + 3) / 4;
        take<STEPS, false>(
            t.packets + AT_MIDDLE, routed + common.count,
            [&](u32 j) {
                const u32 tile = j < routed ? j / max(mine.count, 1u) * EXPERT_TILES + mine.first + j % max(mine.count, 1u)
                                            : TOP_K * EXPERT_TILES + common.first + j - routed;
                return min(tile, (u32)PAIR_TILES - 1);
            },
            nullptr, false, epoch, s.wide, s.wide_units, [] {});
    }


    __device__ __forceinline__ void router(u32 epoch) {
        const Span span = s.shares[ROUTER_SHARE];
        Inputs<HIDDEN_TILES> x;
        load_inputs<HIDDEN_TILES>(x, s.input, s.input_units);
#pragma unroll 1
        for (u32 i = span.begin; i < span.end; i++) {
            float total[2] = {0, 0};
            multiply_rows<Q8, HIDDEN_TILES>(x, s.input, s.input_units, total);
            if (i > span.begin) consumer_sync();  // the row block before is summed
            note(s.router[warp], 0, total);
            consumer_sync();
            const u32 row = i * TILE_ROWS + tid;
            if (tid < TILE_ROWS && row < ROUTER_ROWS) {
                const float v = sum_of<WARPS>([&](int k) { return s.router[k][tid]; });
                send(t.packets + AT_ROUTER + row, __fmul_rn(v, inverse_rms()), epoch);
            }
        }
    }
    // Down of G slots from `slot` on, whose inputs begin at tile `first`: this warp's share of their rows.
    template <int TILES, int G> __device__ __forceinline__ void down_rows(const u8* tiles, u32 first, u32 slot) {
        const Share<TILES> mine(warp);
        float total[G][2];
#pragma unroll
        for (u32 g = 0; g < G; g++) {
            total[g][0] = total[g][1] = 0;
#pragma unroll
            for (u32 k = 0; k < Share<TILES>::MOST; k++) {
                const u32 tile = first + g * TILES + mine.first + k;
                if (mine.has(k))
                    multiply_at<Q4>(tiles + (g * TILES + mine.first + k) * 576, lane, fragment(s.wide, tile), unit_of(s.wide_units, tile), total[g]);
            }
        }
#pragma unroll
        for (u32 g = 0; g < G; g++) note(s.partial[turn][warp], slot + g, total[g]);
    }
    // x += sum over slots of weight * down middle; the result goes to the next layer.
    __device__ __forceinline__ void down(const float* weights, Span own, u32 epoch) {
#pragma unroll 1
        for (u32 block = own.begin; block < own.end; block++) {
            down_rows<SHARED_TILES, 1>(slot(), TOP_K * EXPERT_TILES, TOP_K);
            release();
#pragma unroll 1
            for (u32 k = 0; k < TOP_K; k += EXPERTS_PER_SLOT) {
                const u8* tiles = slot();
#pragma unroll 1
                for (u32 e = k; e < min(k + EXPERTS_PER_SLOT, (u32)TOP_K); e += TOGETHER)
                    down_rows<EXPERT_TILES, TOGETHER>(tiles + (e - k) * EXPERT_STRIP, e * EXPERT_TILES, e);
                release();
            }
            consumer_sync();
            if (tid < SLOTS * TILE_ROWS) s.expanded[tid / TILE_ROWS][tid % TILE_ROWS] = joined(tid);
            turn ^= 1;
            consumer_sync();
            if (tid < TILE_ROWS) {
                float y = 0;
#pragma unroll
                for (int k = 0; k < SLOTS; k++) y = fmaf(weights[k], s.expanded[k][tid], y);
                add((block - own.begin) * TILE_ROWS + tid, block * TILE_ROWS + tid, y, AT_X, epoch);
            }
        }
    }
};

