// --- the warp that copies ---

// One copy into a slot of the ring; a slot may take several. Every lane plans one, and they are made in the order of lanes.
struct Copy {
    const u8* from;
    u32 bytes;
    u32 offset;  // in the slot
    u32 filled;  // bytes of the whole slot, if this is its first copy and not 0
    bool first, last;
};

struct Producer {
    Shared& s;
    Ring ring;
    u32 lane, ahead;

    // Makes the copies of the first `n` lanes. A slot must be free, and no more than `most` copies on their way: they would delay
    // the packets, which pass through the same queues.
    __device__ __forceinline__ void make(const Copy& c, u32 n, u32 most) {
        const u32 lasts = __ballot_sync(FULL, c.last);
#pragma unroll 1
        for (u32 i = 0; i < n; i++) {
            if (lane == i) {
                u64* full = &s.full[ring.slot];
                // Each lane waits itself: racecheck does not carry another's wait through __syncwarp.
                if (ring.round) barrier_wait(&s.empty[ring.slot], (ring.round - 1) & 1);
                if (c.first) {
                    const bool wraps = ring.slot < most;
                    if (!wraps || ring.round) barrier_wait(full + (wraps ? RING : 0) - most, (ring.round - wraps) & 1);
                    barrier_expect(full, c.filled);
                }
                if (c.bytes) bulk_copy(s.slots[ring.slot] + c.offset, c.from, c.bytes, full);
            }
            __syncwarp();  // in order: copies of one slot follow the one that claims it
            if (lasts >> i & 1) ring.next();
        }
    }
    // Makes the copies of the first `n` lanes at once, each into a slot of its own.
    __device__ __forceinline__ void make_at_once(const u8* from, u32 bytes, u32 n) {
        const u32 at = ring.slot + lane, slot = at % RING, round = ring.round + at / RING;
        if (lane < n) {
            if (round) barrier_wait(&s.empty[slot], (round - 1) & 1);
            barrier_expect(&s.full[slot], bytes);
            bulk_copy(s.slots[slot], from, bytes, &s.full[slot]);
        }
        __syncwarp();
        ring.slot += n;
        if (ring.slot >= RING) {
            ring.slot -= RING;
            ring.round++;
        }
    }
    // Piece `i` of row blocks of a matrix, each of `strip` bytes in pieces of `piece` bytes.
    static __device__ __forceinline__ Copy rows(const u8* tiles, Span span, u32 strip, u32 piece, u32 i) {
        const u32 per = (strip + piece - 1) / piece, at = i % per * piece, bytes = min(piece, strip - at);
        return Copy{tiles + (u64)(span.begin + i / per) * strip + at, bytes, 0, bytes, true, true};
    }
    static __device__ __forceinline__ u32 pieces(Span span, u32 strip, u32 piece) {
        return (span.end - span.begin) * ((strip + piece - 1) / piece);
    }
    // Row blocks of a matrix.
    __device__ __forceinline__ void fetch_rows(const u8* tiles, Span span, u32 strip, u32 piece) {
        const u32 n = pieces(span, strip, piece);
#pragma unroll 1
        for (u32 i = 0; i < n; i += 32) make(rows(tiles, span, strip, piece, i + lane), min(32u, n - i), ahead);
    }
    // Keys and values that this block attends to, but for the token's own.
    __device__ __forceinline__ void fetch_keys(const Token& t, const Layer& w, u32 slot, u32 position) {
        constexpr u32 PER = PAGE / KEYS_PER_SLOT;
        const u16* cache = t.cache + w.index * 2 * KV_HEADS * PAGE_VALUES;
#pragma unroll 1
        for (u32 item = blockIdx.x; item < used_splits(position) * KV_HEADS; item += gridDim.x) {
            const Keys keys = keys_of(position, item / KV_HEADS);
            // All pages but the last of a sequence take 2 PER slots.
            const u32 n = 2 * ((keys.end - keys.begin - 1) * PER + slots_of(position, keys.end - 1));
#pragma unroll 1
            for (u32 i = 0; i < n; i += 32) {
                const u32 page = min(keys.begin + (i + lane) / (2 * PER), keys.end - 1), of = slots_of(position, page);
                const u32 at = i + lane - (page - keys.begin) * 2 * PER, value = at / of, first = at % of * KEYS_PER_SLOT;
                const u64 number = __ldcg(t.pages + (u64)slot * t.most_pages + page);
                const u16* from = cache + number * t.page_stride + (u64)(value * KV_HEADS + item % KV_HEADS) * PAGE_VALUES + first * HEAD_DIM;
                const u32 bytes = min((u32)KEYS_PER_SLOT, position - (page * PAGE + first)) * KEY_BYTES;
                make(Copy{(const u8*)from, bytes, 0, bytes, true, true}, min(32u, n - i), ahead);
            }
        }
    }
    // Waits for the router's logits.
    __device__ __forceinline__ void receive_logits(const Token& t, u32 epoch) {
        constexpr int N = (ROUTER_ROWS + 31) / 32;
        const u64* from[N];
        float logits[N];
#pragma unroll
        for (u32 i = 0; i < N; i++) from[i] = t.packets + AT_ROUTER + min(i * 32 + lane, (u32)ROUTER_ROWS - 1);
        receive<N>(from, epoch, logits);
#pragma unroll
        for (u32 i = 0; i < N; i++)
            if (i * 32 + lane < ROUTER_ROWS) s.logits[i * 32 + lane] = logits[i];
        __syncwarp();
    }
    // Chooses experts, for all who use them, and fetches their rows.
    __device__ __forceinline__ void fetch_experts(const Layer& w, float* weights) {
        u32 keys[LANE_KEYS], index;
        float value;
#pragma unroll
        for (int i = 0; i < LANE_KEYS; i++)
            keys[i] = i < LANE_EXPERTS && lane * LANE_EXPERTS + i < EXPERTS ? order_key(s.logits[lane * LANE_EXPERTS + i]) : 0u;
        top_k_of_keys(keys, lane, s.candidates, index, value);
        const Span routed = s.shares[ROUTED_SHARE], own = s.shares[X_SHARE];
        constexpr u32 STRIP = HIDDEN_TILES * 576;
        const u32 unit = min(routed.begin + lane, (u32)TOP_K * GATE_UP_BLOCKS - 1), expert = __shfl_sync(FULL, index, unit / GATE_UP_BLOCKS);
        // No more than there are slots: src/token.rs sees to it.
        make_at_once(w.gate_up + ((u64)expert * GATE_UP_BLOCKS + unit % GATE_UP_BLOCKS) * STRIP, STRIP, routed.end - routed.begin);
        const float weight = top_k_weight(value, lane);
        if (lane < TOP_K) weights[lane] = weight;
        if (lane == TOP_K) weights[lane] = sigmoid(s.logits[EXPERTS]);
        __syncwarp();
        // Down: the shared expert's rows, then the chosen ones', several to a slot.
        const u32 k = lane - 1, chosen = __shfl_sync(FULL, index, min(k, (u32)TOP_K - 1)), of = k % EXPERTS_PER_SLOT;
#pragma unroll 1
        for (u32 i = own.begin; i < own.end; i++) {
            Copy c{w.shared_down + (u64)i * SHARED_STRIP, SHARED_STRIP, 0, SHARED_STRIP, true, true};
            if (lane > 0)
                c = Copy{w.down + ((u64)chosen * HIDDEN_BLOCKS + i) * EXPERT_STRIP, EXPERT_STRIP, of * EXPERT_STRIP,
                         min((u32)EXPERTS_PER_SLOT, TOP_K - (k - of)) * EXPERT_STRIP, of == 0, of == EXPERTS_PER_SLOT - 1 || k == TOP_K - 1};
            make(c, 1 + TOP_K, RING);
        }
    }
    __device__ __forceinline__ void run(const Token& t) {
        constexpr u32 Q4_PIECE = SLOT_BYTES / 576 * 576, Q8_PIECE = SLOT_BYTES / 1088 * 1088;
        constexpr u32 IN = HIDDEN_TILES * 576, ROUTER = HIDDEN_TILES * 1088;
        u32 slot = 0, position = 0, epoch = 0;
        const Span own = s.shares[X_SHARE];
#pragma unroll 1
        for (u32 l = 0; l < t.n_layers; l++) {
            const Layer& w = s.layers[l];
#pragma unroll 1
            for (u32 part = 0; part < 4; part++) {
                if (part == 1 && w.attention) fetch_keys(t, w, slot, position);
                const u8* from = part == 0 ? w.input : part == 1 ? w.output : part == 2 ? w.router : w.shared_gate_up;
                const Span span = part == 0   ? s.shares[w.attention ? ATTENTION_SHARE : GDN_SHARE]
                                  : part == 1 ? own
                                  : part == 2 ? s.shares[ROUTER_SHARE]
                                              : s.shares[COMMON_SHARE];
                const u32 strip = part == 1 ? (w.attention ? QUERY_TILES : VALUE_TILES) * 576 : part == 2 ? ROUTER : IN;
                fetch_rows(from, span, strip, part == 2 ? Q8_PIECE : Q4_PIECE);
                if (l == 0 && part == 0) {
                    wait_for_inputs();
                    slot = t.segments[0].slot;
                    position = t.rows[0].position;
                    epoch = __ldcg(t.epoch);
                }
            }
            receive_logits(t, ++epoch);
            fetch_experts(w, s.weights[l & 1]);
        }
        fetch_rows(t.head, s.shares[VOCAB_SHARE], IN, Q4_PIECE);
    }
};

