// One token through all layers in one kernel, a block on each multiprocessor.
//
// Weights. The ninth warp of a block copies them into a ring of slots in shared memory, in the order in which the other eight
// use them and as far ahead as there is room: only the routed experts' have to wait, for the router.
//
// Activations. A value goes from block to block through L2 as a packet of eight bytes, the value and the number of its
// layer's epoch: the receiver reads until the epoch is right, so that there is neither a fence nor a barrier of the grid. Of
// the input of a product, a warp reads what its share of every row needs.
//
// Why no packet is overwritten too early: a block that owns rows of x sends them behind the out projection and behind down, and
// has read all of x and all that comes before by then; one that owns none sends rows of the other two products, which x behind
// them depends on, and reads nothing else. So whoever writes a buffer again, a layer later, has heard from everybody who
// read it.
//
// A token's sums are those of the general kernels, in their order: equal to the bit.

extern __shared__ __align__(128) u8 shared[];

#define CONSUMERS (WARPS * 32)   // threads that compute
#define TOKEN_THREADS (CONSUMERS + 128)  // and a group of warps of which one copies: registers are given by groups
#define SLOT_BYTES (32 * 576)    // a row block of 2,048 inputs
#define RING 9
#define PART (SLOTS > 8 ? SLOTS : 8)  // row blocks whose sums of warps fit
#define MOST_OWN 2               // row blocks of x that a block owns at most

#define GDN_CHANNELS (2 * KEY_HEADS * DK + VALUE_HEADS * DV)
#define GDN_ROWS (GDN_CHANNELS + VALUE_HEADS * DV + 2 * VALUE_HEADS)  // q k v | z | b | a
#define QUERY (HEADS * HEAD_DIM)
#define KV (KV_HEADS * HEAD_DIM)
#define ATTENTION_ROWS (2 * QUERY + 2 * KV)
#define BLOCKS_OF(rows) (((rows) + TILE_ROWS - 1) / TILE_ROWS)
#define VALUE_TILES (VALUE_HEADS * DV / TILE_COLS)
#define QUERY_TILES (QUERY / TILE_COLS)
#define PAIR_TILES (TOP_K * EXPERT_TILES + SHARED_TILES)  // behind gate/up: the chosen experts', then the shared one's
#define MAX2(a, b) ((a) > (b) ? (a) : (b))
#define WIDE_TILES MAX2(MAX2(VALUE_TILES, QUERY_TILES), PAIR_TILES)
#define PAST (TAPS - 1)
#define WINDOW (PAST + TAPS)  // of a channel: its last inputs and its taps
#define SPLITS 64  // as the host has it for steps of few rows
#define RATIO (HEADS / KV_HEADS)
#define PAGE_VALUES (PAGE * HEAD_DIM)
#define KEY_BYTES (HEAD_DIM * 2)
#define KEYS_PER_SLOT MIN2(PAGE, SLOT_BYTES / KEY_BYTES / 16 * 16)
#define MIN2(a, b) ((a) < (b) ? (a) : (b))
#define EXPERT_STRIP (EXPERT_TILES * 576)
#define SHARED_STRIP (SHARED_TILES * 576)
#define EXPERTS_PER_SLOT MIN2(TOP_K, SLOT_BYTES / EXPERT_STRIP)
#define TOGETHER (TOP_K % EXPERTS_PER_SLOT ? 1 : EXPERTS_PER_SLOT % 4 == 0 ? 4 : EXPERTS_PER_SLOT % 2 == 0 ? 2 : 1)  // slots whose products overlap
#define DELTA_ITEMS (VALUE_HEADS * VALUE_SPLIT)

// Packets, by what they carry.
#define ALIGN16(n) (((n) + 15) / 16 * 16)
#define ALIGN256(n) (((n) + 255) / 256 * 256)
#define AT_X 0                                                // x behind the layer before
#define AT_MID (AT_X + ALIGN256(HIDDEN))                      // x behind the mixer
#define AT_PROJECTED (AT_MID + ALIGN256(HIDDEN))
#define AT_MIXED (AT_PROJECTED + ALIGN16(MAX2(GDN_ROWS, ATTENTION_ROWS)))
#define AT_SQUARES (AT_MIXED + ALIGN256(WIDE_TILES * TILE_COLS))      // sums of squares of parts of value heads
#define AT_ROUTER (AT_SQUARES + ALIGN16(DELTA_ITEMS))
#define AT_MIDDLE (AT_ROUTER + ALIGN16(ROUTER_ROWS))
#define AT_PARTIAL (AT_MIDDLE + ALIGN256(PAIR_TILES * TILE_COLS))      // [HEADS, SPLITS, HEAD_DIM]
#define AT_STATS (AT_PARTIAL + HEADS * SPLITS * HEAD_DIM)     // [HEADS, SPLITS, (max, sum)]

// Addresses of a layer; src/token.rs writes them.
struct Layer {
    const u8 *input, *output, *router, *gate_up, *shared_gate_up, *down, *shared_down;
    const float *input_norm, *post_norm;
    const float* vectors[4];  // conv, a_log, dt_bias, norm; or q_norm, k_norm
    u64 index;                // among the layers of its kind
    u64 attention;
};

// What a token needs; src/token.rs writes it.
struct Token {
    const Segment* segments;
    const Row* rows;
    const Layer* layers;
    u64 n_layers;
    float* x;  // the embedding; in the end x behind the last layer
    const float* norm;
    const u8* head;
    float* logits;
    Best* best;
    float* states;
    u64 state_stride;
    float* convs;
    u64 conv_stride;
    u16* cache;
    u64 page_stride;
    const u32* pages;
    u64 most_pages;
    const float2* rotary;
    u64* packets;
    u32* epoch;
    u64 ahead;   // copies of weights that may be on their way at a time
};

struct Softmax {
    float max, sum;
};
struct Span {
    u32 begin, end;
};
// What a block has a share of: row blocks of 16 rows, or units of gate and up.
enum Shares { GDN_SHARE, ATTENTION_SHARE, X_SHARE, ROUTER_SHARE, COMMON_SHARE, ROUTED_SHARE, VOCAB_SHARE, SHARES };

struct Shared {
    u8 slots[RING][SLOT_BYTES];
    alignas(16) u8 input[HIDDEN_TILES * FRAGMENT_BYTES<true>];
    alignas(16) u8 wide[WIDE_TILES * FRAGMENT_BYTES<true>];
    union {
        alignas(16) u8 q_tile[16 * KEY_BYTES];
        alignas(16) float state[DK][32];  // of the block's columns of a value head, before this token
    };
    alignas(16) float gathered[MAX2(MAX2(WARPS * HEAD_DIM, SPLITS * 32), WINDOW * (2 * DK + 32))];  // a layer's convolution; or its heads, then splits
    float partial[2][WARPS][PART * TILE_ROWS];
    float router[WARPS][TILE_ROWS];
    Span shares[SHARES];
    float q[DK], k[DK];
    float columns[2][WARPS][32];
    float sums3[3][4], value[32], gate[32], gain[32], decay[2], rates[2];
    float expanded[SLOTS][TILE_ROWS];
    alignas(16) u16 fresh[2][HEAD_DIM];  // this token's key and value
    alignas(16) float gains[2 * HEAD_DIM + ROTARY];  // of query and key; cosines and sines of the position
    float raw_key[HEAD_DIM];
    u32 page;  // of the position
    Softmax softmaxes[SPLITS];
    float scales[SPLITS];
    Unit input_units[HIDDEN_TILES], wide_units[WIDE_TILES];
    alignas(16) float squares[2][WARPS];
    float logits[ROUTER_ROWS];
    u64 candidates[CANDIDATES + TOP_K];
    float residual[MOST_OWN * TILE_ROWS];
    float weights[2][SLOTS];
    u64 full[RING], empty[RING];
    Layer layers[1];  // of as many as there are
};
// For the host: bytes of shared memory, and number of packets.
extern "C" __device__ u32 token_sizes[2] = {sizeof(Shared), AT_STATS + HEADS * SPLITS * 2};

// --- synchronisation ---

__device__ __forceinline__ void consumer_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// --- packets ---

__device__ __forceinline__ void send(u64* to, float value, u32 epoch) {
    asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(__float_as_uint(value)), "r"(epoch) : "memory");
}
// A packet that does not come means that a block has failed: the launch must fail too, not hang.
#define PATIENCE (1u << 23)
// All packets are asked for at once, and again until all are there: one after another, each would take its way through L2.
template <int N> __device__ __forceinline__ void receive(const u64* const (&from)[N], u32 epoch, float (&values)[N]) {
    bool there = false;
    for (u32 tries = 0; !there; tries++) {
        u64 packets[N];
#pragma unroll
        for (int i = 0; i < N; i++) asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(packets[i]) : "l"(from[i]) : "memory");
        there = true;
#pragma unroll
        for (int i = 0; i < N; i++) {
            there &= (u32)(packets[i] >> 32) == epoch;
            values[i] = __uint_as_float((u32)packets[i]);
        }
        if (tries == PATIENCE) __trap();
    }
}
// Two packets, not looked at yet.
struct Pair {
    u64 a, b;
    __device__ __forceinline__ void load(const u64* p) {
        asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
    }
    __device__ __forceinline__ bool of(u32 epoch) const { return (u32)(a >> 32) == epoch && (u32)(b >> 32) == epoch; }
};

// --- who does what ---

__device__ __forceinline__ Span share_of(u32 which) {
    const u32 n = which == GDN_SHARE         ? BLOCKS_OF(GDN_ROWS)
                  : which == ATTENTION_SHARE ? BLOCKS_OF(ATTENTION_ROWS)
                  : which == X_SHARE         ? HIDDEN_BLOCKS
                  : which == ROUTER_SHARE    ? BLOCKS_OF(ROUTER_ROWS)
                  : which == COMMON_SHARE    ? SHARED_BLOCKS
                  : which == ROUTED_SHARE    ? TOP_K * GATE_UP_BLOCKS
                                             : BLOCKS_OF(VOCAB);
    return Span{blockIdx.x * n / gridDim.x, (blockIdx.x + 1) * n / gridDim.x};
}

// Where value `i` is among packets that an exchange reads: of 256 values, a lane has eight in a row, and lanes read pairs of
// them side by side.
__device__ __forceinline__ u32 spread(u32 i) { return i / 256 * 256 + i % 8 / 2 * 64 + i % 256 / 8 * 2 + i % 2; }

struct Ring {
    u32 slot, round;
    __device__ __forceinline__ void next() {
        if (++slot == RING) {
            slot = 0;
            round++;
        }
    }
};

// The keys that a split has in the cache, page by page; the token's own is not among them.
struct Keys {
    u32 begin, end;  // pages
};
__device__ __forceinline__ u32 pages_per_split(u32 position) { return (position / PAGE + SPLITS) / SPLITS; }
__device__ __forceinline__ u32 used_splits(u32 position) {
    const u32 per = pages_per_split(position);
    return (position / PAGE + per) / per;
}
__device__ __forceinline__ Keys keys_of(u32 position, u32 split) {
    const u32 pages = position / PAGE + 1, per = pages_per_split(position);
    return Keys{min(pages, split * per), min(pages, split * per + per)};
}
// Slots of K, and of V, that a page takes.
__device__ __forceinline__ u32 slots_of(u32 position, u32 page) {
    return (min((u32)PAGE, position - page * PAGE + 1) + KEYS_PER_SLOT - 1) / KEYS_PER_SLOT;
}

