// --- attention: docs/model-spec.md, section 4 ---

struct Attention : DeltaRule {
    // 16-byte chunks of a row, turned by the row so that eight rows' chunks lie in different banks.
    static __device__ __forceinline__ u8* chunk(u8* tile, u32 row, u32 c) { return tile + row * KEY_BYTES + ((c ^ (row & 7)) * 16); }

    // Brings what an attention layer needs besides this token's projections.
    __device__ __forceinline__ void load_attention(const Layer& w) {
#pragma unroll 1
        for (u32 i = tid; i < 2 * HEAD_DIM + ROTARY; i += CONSUMERS) {
            const u32 head = i / HEAD_DIM;
            const float* from = head < 2 ? w.vectors[head] + i % HEAD_DIM : (const float*)(t.rotary + (u64)position * (ROTARY / 2)) + i - 2 * HEAD_DIM;
            copy4(s.gains + i, from);
        }
        if (tid == 0) copy4((float*)&s.page, (const float*)(t.pages + (u64)slot_of * t.most_pages + position / PAGE));
    }
    // Norm and rotation of a query (0) or key (1); afterwards `v[i]` is its value i * 32 + lane.
    __device__ __forceinline__ void rotate(float (&v)[HEAD_DIM / 32], u32 which) {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) squares += v[i] * v[i];
        const float scale = rsqrtf(warp_sum(squares) / HEAD_DIM + EPS);
        float* h = s.gathered + warp * HEAD_DIM;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) h[i * 32 + lane] = v[i] * scale * s.gains[which * HEAD_DIM + i * 32 + lane];
        __syncwarp();
        const float2* angles = (const float2*)(s.gains + 2 * HEAD_DIM);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; i++) v[i] = rotated(h, i * 32 + lane, angles);
        __syncwarp();
    }
    // The queries of a K/V head's heads, a warp each, hi in rows 0..7 and lo in rows 8..15 of the tile; and if the item is the `last`,
    // this token's key and value, into the cache and `fresh`.
    __device__ __forceinline__ void load_heads(const Layer& w, u32 kv_head, bool last, u32 epoch) {
        constexpr int N = HEAD_DIM / 32;
        const u64 *projected = t.packets + AT_PROJECTED, *from[N + 2];
        const u64* query = projected + 2 * (kv_head * RATIO + min(warp, (u32)RATIO - 1)) * HEAD_DIM + lane;
        const u64* key = projected + 2 * QUERY + kv_head * HEAD_DIM + min(tid, (u32)HEAD_DIM - 1);
        float got[N + 2], v[N];
#pragma unroll
        for (int i = 0; i < N; i++) from[i] = query + i * 32;
        from[N] = last ? key : query;
        from[N + 1] = last ? key + KV : query;
        receive<N + 2>(from, epoch, got);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = warp < RATIO ? got[i] : 0.0f;
        u8* cache = (u8*)(t.cache + w.index * 2 * KV_HEADS * PAGE_VALUES + s.page * t.page_stride + (u64)kv_head * PAGE_VALUES);
        const u32 row = position % PAGE;
        auto store = [&](u32 value, u32 d, u16 x) {
            *(u16*)(chunk(cache + value * KV_HEADS * PAGE_VALUES * 2, row, d / 8) + d % 8 * 2) = x;
            s.fresh[value][d] = x;
        };
        if (last && tid < HEAD_DIM) {
            s.raw_key[tid] = got[N];
            store(1, tid, (u16)pack_bf16(got[N + 1], 0));
        }
        if (last) consumer_sync();
        // A warp its query; then the first one the key.
#pragma unroll 1
        for (u32 which = 0; which < (last && warp == 0 ? 2 : 1); which++) {
#pragma unroll
            for (int i = 0; i < N; i++)
                if (which == 1) v[i] = s.raw_key[i * 32 + lane];
            rotate(v, which);
#pragma unroll
            for (int i = 0; i < N; i++) {
                const u32 d = i * 32 + lane;
                if (which == 1) {
                    store(0, d, (u16)pack_bf16(v[i], 0));
                    continue;
                }
                const float x = v[i] * rsqrtf((float)HEAD_DIM);
                const u32 high = pack_bf16(x, 0);
                *(u16*)(chunk(s.q_tile, warp, d / 8) + d % 8 * 2) = (u16)high;
                *(u16*)(chunk(s.q_tile, warp + 8, d / 8) + d % 8 * 2) = (u16)pack_bf16(x - bf16_low(high), 0);
            }
        }
    }
    // Puts this token's key and value into their slots, and zeros behind them: what lies there may be anything.
    __device__ __forceinline__ void complete_page(Ring at, u32 n) {
        const u32 row = position % PAGE, until = row / 16 * 16 + 16;
        constexpr u32 CHUNKS = HEAD_DIM / 8, PER = CONSUMERS / CHUNKS;
        const u32 c = tid % CHUNKS;
#pragma unroll 1
        for (u32 i = tid / CHUNKS; i < 2 * PER * ((until - row + PER - 1) / PER); i += PER) {
            const u32 value = i / PER % 2, key = row + i / (2 * PER) * PER + i % PER;
            if (key >= until) continue;
            u32 slot = at.slot + value * n + key / KEYS_PER_SLOT;
            slot = slot >= RING ? slot - RING : slot;
            const uint4 x = key == row ? *(const uint4*)&s.fresh[value][c * 8] : make_uint4(0, 0, 0, 0);
            *(uint4*)chunk(s.slots[slot], key % KEYS_PER_SLOT, c) = x;
        }
        consumer_sync();
    }

    static __device__ __forceinline__ void load_matrices(u32 (&r)[4], const u8* p) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
    }
    static __device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], const u8* p) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
    }
    // Warps w and w + 4 have the same 16 keys of each page and one half of the values' dimensions each.
    struct Attended {
        float o[HEAD_DIM / 16][4];
        float top, sum;
    };
    // 16 keys of a page, as in `flash` of attention.cu.
    __device__ __forceinline__ void attend_keys(Attended& a, u8* keys, u8* values, u32 row, u32 key0) {
        const u32 t4 = lane % 4;
        float c[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
#pragma unroll 4
        for (int ks = 0; ks < HEAD_DIM / 16; ks++) {
            u32 q[4], b[4];
            load_matrices(q, chunk(s.q_tile, lane % 16, ks * 2 + lane / 16));
            load_matrices(b, chunk(keys, row + lane / 16 * 8 + lane % 8, ks * 2 + lane / 8 % 2));
            mma(c[0], q[0], q[1], q[2], q[3], b[0], b[1]);
            mma(c[1], q[0], q[1], q[2], q[3], b[2], b[3]);
        }
        float score[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            score[i] = c[i / 2][i % 2] + c[i / 2][i % 2 + 2];
            if (key0 + i / 2 * 8 + t4 * 2 + i % 2 > position) score[i] = -INFINITY;
        }
        float high = fmaxf(fmaxf(score[0], score[1]), fmaxf(score[2], score[3]));
        high = fmaxf(high, __shfl_xor_sync(FULL, high, 1));
        high = fmaxf(high, __shfl_xor_sync(FULL, high, 2));
        const float before = a.top;
        a.top = fmaxf(a.top, high);
        const float shrink = before == a.top ? 1.0f : __expf(before - a.top);
        if (__any_sync(FULL, shrink != 1.0f)) {
            a.sum *= shrink;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 16; i++) {
                a.o[i][0] *= shrink; a.o[i][1] *= shrink; a.o[i][2] *= shrink; a.o[i][3] *= shrink;
            }
        }
        float p[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            p[i] = __expf(score[i] - a.top);
            a.sum += p[i];
        }
        const u32 h0 = pack_bf16(p[0], p[1]), h1 = pack_bf16(p[2], p[3]);
        const u32 l0 = pack_bf16(p[0] - bf16_low(h0), p[1] - bf16_high(h0)), l1 = pack_bf16(p[2] - bf16_low(h1), p[3] - bf16_high(h1));
#pragma unroll
        for (int d = 0; d < HEAD_DIM / 32; d++) {
            u32 b[4];
            load_matrices_transposed(b, chunk(values, row + lane % 16, warp / 4 * (HEAD_DIM / 16) + d * 2 + lane / 16));
            mma(a.o[2 * d], h0, l0, h1, l1, b[0], b[1]);
            mma(a.o[2 * d + 1], h0, l0, h1, l1, b[2], b[3]);
        }
    }
    // Joins the warps' parts of a split and sends them.
    __device__ __forceinline__ void send_split(Attended& a, u32 kv_head, u32 split, u32 quarters, u32 epoch) {
        const u32 g = lane / 4, t4 = lane % 4, quarter = warp % 4;
        a.sum += __shfl_xor_sync(FULL, a.sum, 1);
        a.sum += __shfl_xor_sync(FULL, a.sum, 2);
        if (warp < 4 && t4 == 0) s.softmaxes[warp * 8 + g] = Softmax{a.top, a.sum};
        consumer_sync();
        if (tid < 8) {
            float high = -INFINITY, total = 0;
            for (int w = 0; w < 4; w++) high = fmaxf(high, s.softmaxes[w * 8 + tid].max);
            for (int w = 0; w < 4; w++) {
                const Softmax part = s.softmaxes[w * 8 + tid];
                const float scale = part.sum == 0.0f ? 0.0f : __expf(part.max - high);  // 0: a warp without keys
                s.scales[w * 8 + tid] = scale;
                total = fmaf(part.sum, scale, total);
            }
            if (tid < RATIO) {
                u64* stats = t.packets + AT_STATS + ((kv_head * RATIO + tid) * SPLITS + split) * 2;
                send(stats, high, epoch);
                send(stats + 1, total, epoch);
            }
        }
        consumer_sync();
        // In turns, so that the sums have one order; those without keys have nothing to add.
#pragma unroll 1
        for (u32 w = 0; w < quarters; w++) {
            if (w == quarter) {
                const float scale = s.scales[w * 8 + g];
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 16; i++) {
                    float2* p = (float2*)(s.gathered + g * HEAD_DIM + warp / 4 * (HEAD_DIM / 2) + i * 8 + t4 * 2);
                    float2 v = w == 0 ? make_float2(0, 0) : *p;
                    v.x = fmaf(a.o[i][0] + a.o[i][2], scale, v.x);
                    v.y = fmaf(a.o[i][1] + a.o[i][3], scale, v.y);
                    *p = v;
                }
            }
            consumer_sync();
        }
#pragma unroll 4
        for (u32 i = tid; i < RATIO * HEAD_DIM; i += CONSUMERS) {
            const u32 head = kv_head * RATIO + i / HEAD_DIM;
            send(t.packets + AT_PARTIAL + (u64)(head * SPLITS + split) * HEAD_DIM + i % HEAD_DIM, s.gathered[i], epoch);
        }
    }
    __device__ __forceinline__ void flash(const Layer& w, u32 epoch) {
#pragma unroll 1
        for (u32 item = blockIdx.x; item < used_splits(position) * KV_HEADS; item += gridDim.x) {
            const u32 kv_head = item % KV_HEADS, split = item / KV_HEADS;
            const Keys keys = keys_of(position, split);
            asm volatile("cp.async.wait_all;" ::: "memory");
            consumer_sync();  // the item before is done with what this one writes
            load_heads(w, kv_head, keys.end == position / PAGE + 1, epoch);
            consumer_sync();
            Attended a;
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 16; i++) a.o[i][0] = a.o[i][1] = a.o[i][2] = a.o[i][3] = 0;
            a.top = -INFINITY;
            a.sum = 0;
#pragma unroll 1
            for (u32 page = keys.begin; page < keys.end; page++) {
                const u32 n = slots_of(position, page), key = warp % 4 * 16, key0 = page * PAGE + key;
                Ring at = ring;
#pragma unroll 1
                for (u32 i = 0; i < 2 * n; i++) {
                    barrier_wait(&s.full[at.slot], at.round & 1);
                    at.next();
                }
                const bool last = page == position / PAGE;
                if (last) complete_page(ring, n);
                if (key0 <= position) {
                    const u32 in = key / KEYS_PER_SLOT;
                    attend_keys(a, s.slots[(ring.slot + in) % RING], s.slots[(ring.slot + n + in) % RING], key % KEYS_PER_SLOT, key0);
                }
                if (last) proxy_fence();
#pragma unroll 1
                for (u32 i = 0; i < 2 * n; i++) release();
            }
            send_split(a, kv_head, split, min(4u, (position - keys.begin * PAGE) / 16 + 1), epoch);
        }
    }
    // Joins the splits and applies the output gate; 32 values of a head at a time.
    __device__ __forceinline__ void combine(u32 epoch) {
        const u32 used = used_splits(position);
#pragma unroll 1
        for (u32 unit = blockIdx.x; unit < QUERY / 32; unit += gridDim.x) {
            const u32 head = unit / (HEAD_DIM / 32), d = unit % (HEAD_DIM / 32) * 32 + lane;
            consumer_sync();  // whoever used `gathered` is done with it
            float gate = 0;
#pragma unroll 1
            for (u32 first = 0; first < used; first += SPLITS / 2) {
                // A lane that has no split left reads its first one again.
                constexpr int N = SPLITS / 2 / WARPS;
                const u64* from[N + 3];
                float got[N + 3] = {};
#pragma unroll
                for (int i = 0; i < N; i++) {
                    const u32 split = min(first + i * WARPS + warp, used - 1);
                    from[i] = t.packets + AT_PARTIAL + (u64)(head * SPLITS + split) * HEAD_DIM + d;
                }
                const u32 mine = min(first + (lane % N) * WARPS + warp, used - 1);
                from[N] = t.packets + AT_STATS + (head * SPLITS + mine) * 2;
                from[N + 1] = from[N] + 1;
                from[N + 2] = t.packets + AT_PROJECTED + (2 * head + 1) * HEAD_DIM + d;
                if (first + warp < used) receive<N + 3>(from, epoch, got);
                gate = got[N + 2];
                __syncwarp();
#pragma unroll
                for (int i = 0; i < N; i++)
                    if (first + i * WARPS + warp < used) s.gathered[(first + i * WARPS + warp) * 32 + lane] = got[i];
                if (lane < N && first + lane * WARPS + warp < used) s.softmaxes[mine] = Softmax{got[N], got[N + 1]};
            }
            consumer_sync();
            if (warp == 0) {
                float high = -INFINITY, total = 0, value = 0;
#pragma unroll 1
                for (u32 i = lane; i < used; i += 32) high = fmaxf(high, s.softmaxes[i].max);
#pragma unroll
                for (int o = 16; o; o >>= 1) high = fmaxf(high, __shfl_xor_sync(FULL, high, o));
#pragma unroll 1
                for (u32 i = lane; i < used; i += 32) s.scales[i] = __expf(s.softmaxes[i].max - high);
                __syncwarp();
#pragma unroll 4
                for (u32 i = 0; i < used; i++) {
                    total = fmaf(s.scales[i], s.softmaxes[i].sum, total);
                    value = fmaf(s.scales[i], s.gathered[i * 32 + lane], value);
                }
                send(t.packets + AT_MIXED + spread(head * HEAD_DIM + d), value / total * sigmoid(gate), epoch);
            }
        }
    }
};

