// --- what the warps that compute have in common ---

struct Block {
    Shared& s;
    const Token& t;
    Ring ring;
    u32 tid, warp, lane, position;
    u32 slot_of, parity;  // of the sequence
    // Of this thread's logits.
    float best_value;
    u32 best_row, broken;
    // Which of `partial` and of `squares` is written next, or was last. They take turns: a warp that is one of the block's barriers ahead
    // of another does not write what that one still reads.
    u32 turn, norm;

    // Waits for this warp's share of an input and makes it into fragments: `count` tiles, of which `tile_of(j)` is the j-th, at most
    // 4 STEPS. Of values with a `gain` it is that of their norm, and the sum of squares is returned in every lane; with HEADS_TOO and
    // `normed` they are value heads, and each is multiplied by its 1 / rms. Does something else while packets are on their way.
    template <int STEPS, bool HEADS_TOO, class TileOf, class Meanwhile>
    __device__ __forceinline__ float take(const u64* packets, u32 count, TileOf tile_of, const float* gain, bool normed, u32 epoch,
                                          u8* fragments, Unit* units, Meanwhile meanwhile) {
        constexpr int HEAD_PAIRS = VALUE_SPLIT / 2;
        u32 tiles[STEPS];
        const u64* from[STEPS];
        Pair pairs[STEPS][4], heads[STEPS][HEAD_PAIRS];
        float gains[STEPS][8];
#pragma unroll
        for (u32 i = 0; i < STEPS; i++) {
            // Lanes that have nothing left take the first tile again.
            tiles[i] = tile_of(i * 4 + (lane >> 3) < count ? i * 4 + (lane >> 3) : 0);
            from[i] = packets + spread(tiles[i] * TILE_COLS + (lane & 7) * 8);
            if (gain) load8(gain + tiles[i] * TILE_COLS + (lane & 7) * 8, gains[i]);
        }
        // The first pair alone until it is there: all blocks read these packets, and would be in each other's way.
        bool there = false;
        for (u32 tries = 0; !there; tries++) {
            there = true;
#pragma unroll
            for (u32 i = 0; i < STEPS; i++) pairs[i][0].load(from[i]);
#pragma unroll
            for (u32 i = 0; i < STEPS; i++) there &= pairs[i][0].of(epoch);
            if (tries == PATIENCE) __trap();
        }
        __syncwarp();
        there = false;
        for (u32 tries = 0; !there; tries++) {
            there = true;
#pragma unroll
            for (u32 i = 0; i < STEPS; i++) {
#pragma unroll
                for (u32 k = 1; k < 4; k++) pairs[i][k].load(from[i] + 64 * k);
#pragma unroll
                for (u32 k = 0; k < HEAD_PAIRS; k++)
                    if (HEADS_TOO) heads[i][k].load(t.packets + AT_SQUARES + min(tiles[i] * TILE_COLS / DV, VALUE_HEADS - 1u) * VALUE_SPLIT + 2 * k);
            }
            if (tries == 0) meanwhile();
#pragma unroll
            for (u32 i = 0; i < STEPS; i++) {
#pragma unroll
                for (u32 k = 1; k < 4; k++) there &= pairs[i][k].of(epoch);
#pragma unroll
                for (u32 k = 0; k < HEAD_PAIRS; k++)
                    if (HEADS_TOO) there &= !normed || heads[i][k].of(epoch);
            }
            if (tries == PATIENCE) __trap();
        }
        __syncwarp();
        float total = 0;
#pragma unroll
        for (u32 i = 0; i < STEPS; i++) {
            const bool active = i * 4 + (lane >> 3) < count;
            float v[8], factors[8], factor = 1;
            if (HEADS_TOO && normed) {
                float square = 0;
#pragma unroll
                for (u32 k = 0; k < HEAD_PAIRS; k++) {
                    square += __uint_as_float((u32)heads[i][k].a);
                    square += __uint_as_float((u32)heads[i][k].b);
                }
                factor = rsqrtf(square / DV + EPS);
            }
#pragma unroll
            for (u32 k = 0; k < 8; k++) {
                const float x = active ? __uint_as_float((u32)(k % 2 ? pairs[i][k / 2].b : pairs[i][k / 2].a)) : 0.0f;
                total = fmaf(x, x, total);
                v[k] = x;
                factors[k] = gain ? gains[i][k] : factor;
            }
            split_place<true>(Place{tiles[i], 0, active}, v, factors, lane, fragments, units);
        }
        if (gain) total = warp_sum(total);
        __syncwarp();
        return total;
    }
    __device__ __forceinline__ float inverse_rms() const {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < WARPS; k++) sum += s.squares[norm][k];
        return rsqrtf(sum / HIDDEN + EPS);
    }

    __device__ __forceinline__ Fragment<Q4> fragment(const u8* fragments, u32 tile) const {
        if (lane < 8) return load_staged<true>(fragments + tile * FRAGMENT_BYTES<true>, lane);
        return Fragment<Q4>{make_uint4(0, 0, 0, 0)};
    }
    __device__ __forceinline__ Unit unit_of(const Unit* units, u32 tile) const { return (lane & 3) == 0 ? units[tile] : Unit{0, 0}; }

    __device__ __forceinline__ const u8* slot() {
        barrier_wait(&s.full[ring.slot], ring.round & 1);
        return s.slots[ring.slot];
    }
    __device__ __forceinline__ void release() {
        barrier_arrive(&s.empty[ring.slot]);  // by all lanes: racecheck does not follow one for its warp
        ring.next();
    }

    // This warp's tiles of a row that is split over warps, in registers if they are few.
    template <int K_TILES> struct Inputs {
        static constexpr u32 MOST = Share<K_TILES>::MOST;
        static constexpr bool KEPT = MOST <= 4;
        Fragment<Q4> f[KEPT ? MOST : 1];
        Unit unit[KEPT ? MOST : 1];
    };
    template <int K_TILES> __device__ __forceinline__ void load_inputs(Inputs<K_TILES>& x, const u8* fragments, const Unit* units) {
        if constexpr (Inputs<K_TILES>::KEPT) {
#pragma unroll
            for (u32 i = 0; i < Inputs<K_TILES>::MOST; i++) {
                const u32 tile = min(Share<K_TILES>(warp).first + i, (u32)K_TILES - 1);
                x.f[i] = fragment(fragments, tile);
                x.unit[i] = unit_of(units, tile);
            }
        }
    }
    // The next row block of the ring: this warp's share of its rows. Tiles in fours, so that their products overlap.
    template <int FORM, int K_TILES>
    __device__ __forceinline__ void multiply_rows(const Inputs<K_TILES>& x, const u8* fragments, const Unit* units, float (&total)[2]) {
        constexpr u32 PER = SLOT_BYTES / tile_bytes<FORM>(), MOST = Inputs<K_TILES>::MOST;
        // All of a warp's tiles are in one slot.
        constexpr bool WHOLE = Share<K_TILES>::EVEN && (PER % MOST == 0 || K_TILES <= PER);
        const Share<K_TILES> mine(warp);
#pragma unroll 1
        for (u32 from = 0; from < K_TILES; from += PER) {
            const u8* tiles = slot();
            if constexpr (WHOLE && Inputs<K_TILES>::KEPT) {
                if (mine.first - from < PER) {
                    const u8* p = tiles + (mine.first - from) * tile_bytes<FORM>();
#pragma unroll
                    for (u32 k = 0; k < MOST; k++) multiply_at<FORM>(p + k * tile_bytes<FORM>(), lane, x.f[k], x.unit[k], total);
                }
            } else {
                u32 tile = max(mine.first, from);
                const u32 until = min(mine.first + mine.count, from + PER);
#pragma unroll 1
                for (; tile + 4 <= until; tile += 4) {
#pragma unroll
                    for (u32 k = 0; k < 4; k++)
                        multiply_at<FORM>(tiles + (tile + k - from) * tile_bytes<FORM>(), lane, fragment(fragments, tile + k),
                                          unit_of(units, tile + k), total);
                }
                if constexpr (!WHOLE || MOST % 4 != 0) {
#pragma unroll 1
                    for (; tile < until; tile++)
                        multiply_at<FORM>(tiles + (tile - from) * tile_bytes<FORM>(), lane, fragment(fragments, tile), unit_of(units, tile), total);
                }
            }
            release();
        }
    }
    __device__ __forceinline__ void note(float* partial, u32 i, const float (&total)[2]) {
        if ((lane & 3) == 0) {
            partial[i * TILE_ROWS + (lane >> 2)] = total[0];
            partial[i * TILE_ROWS + (lane >> 2) + 8] = total[1];
        }
    }
    // The sum of the warps' parts of row `i` of those noted.
    __device__ __forceinline__ float joined(u32 i) const {
        return sum_of<WARPS>([&](int k) { return s.partial[turn][k][i]; });
    }
    // Adds to a row of x that this block owns and tells everybody.
    __device__ __forceinline__ void add(u32 mine, u32 row, float y, u32 at, u32 epoch) {
        const float x = s.residual[mine] + y;
        s.residual[mine] = x;
        send(t.packets + at + spread(row), x, epoch);
    }
};

