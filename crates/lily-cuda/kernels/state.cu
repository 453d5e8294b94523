// What a step is made of. The host writes it before the step; see src/step.rs, which has the same layout.

// A piece of a sequence.
struct Segment {
    u32 first;    // its first row in the step
    u32 rows;
    u32 start;    // position of the first row
    u32 slot;     // of recurrent state, page table and sampled token
    u32 source;   // slot whose sampled token is the input, or NONE: the row's token
    u32 parity;   // which of the two conv states is read
    u32 want;     // rows of logits: the last `want` rows
    u32 sample;   // 1: a token is drawn from the last row
    u32 pending;  // updates that are not in its recurrent states yet, but in their log
    u32 defers;   // 1: this step's update goes there too, and the states are not written
};
#define NONE 0xffffffffu

// A token of the step.
struct Row {
    u32 token;
    u32 position;
    u32 segment;
    u32 logits;  // row of logits, or NONE
};

#define PAGE 64  // positions of a K/V page

// One block's largest logit.
struct Best {
    float value;
    u32 row;
    u32 broken;  // a logit is not finite
    u32 unused;
};

// Shapes of the mixture of experts.
#define SLOTS (TOP_K + 1)
#define ROUTER_ROWS (EXPERTS + 1)
#define MIDDLE ((EXPERT_WIDTH > SHARED_WIDTH ? EXPERT_WIDTH : SHARED_WIDTH) + TILE_COLS - 1) / TILE_COLS * TILE_COLS
#define GATE_UP_BLOCKS ((EXPERT_WIDTH + 7) / 8)
#define SHARED_BLOCKS ((SHARED_WIDTH + 7) / 8)
#define HIDDEN_TILES ((HIDDEN + TILE_COLS - 1) / TILE_COLS)
#define HIDDEN_BLOCKS ((HIDDEN + TILE_ROWS - 1) / TILE_ROWS)
#define EXPERT_TILES ((EXPERT_WIDTH + TILE_COLS - 1) / TILE_COLS)
#define SHARED_TILES ((SHARED_WIDTH + TILE_COLS - 1) / TILE_COLS)
#define MIDDLE_TILES ((MIDDLE) / TILE_COLS)

// Up to GROUP tokens of one expert; four where weights come by bulk copies.
struct Work {
    u32 expert;  // EXPERTS: the shared one
    u32 first;   // in the list of pairs
    u32 count;
    u32 unused;
};
#define GROUP 16
