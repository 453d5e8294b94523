//! The launches of each block of a step of several tokens. Matrices meet all tokens at once; what has a sequence's state is
//! launched for each segment, and launches of different segments run together.

use std::ops::Range;

use crate::builder::{Bindings, Builder, F16, F32, POSITIONS, TENSOR_ROWS};
use crate::launches::{HEAD_SIMDGROUPS, MIXER_SIMDGROUPS, PRODUCT_ROWS};
use crate::plan::{Access, Contents, Features, KvType, LANES, PAGE, PARTS, State, Want, is_router};

mod gdn;

pub use gdn::{CHUNK_MATRICES, DELTA_CHUNK};

/// Rows that `matmul_few` takes at most: `FEW` of `matmul.metal`. Of more tokens the experts are grouped.
const FEW: usize = 8;
/// Threads of `matmul` and its like: `TILE_THREADS` of `matmul.metal`.
const TILE_THREADS: usize = 128;
/// Outputs of a tile.
const TILE_OUTS: usize = 64;
/// Rows of a tile of `matmul`.
const TILE_ROWS: usize = 64;
/// Rows of a tile of `matmul_16` and `matmul_router`.
const SMALL_TILE_ROWS: usize = 16;
/// Rows of a tile of `matmul_router_32`.
const ROUTER_TILE_ROWS: usize = 32;
/// Up to so many rows, small tiles multiply less in all.
const SMALL: usize = 32;
/// Numbers of a row of inputs or weights in threadgroup memory: `TILE_STRIDE` of `matmul.metal`.
const TILE_STRIDE: usize = 36;
/// Outputs of the tensor operations' tiles, and inputs that they have at a time: as `tensor_matmul.metal` names them.
const TENSOR_OUTS: usize = 128;
const TENSOR_COLS: usize = 64;
/// Rows of a tile of `matmul_tensor_32`.
const SMALL_TENSOR_ROWS: usize = 32;
/// Pairs of token and slot in a tile: `PAIR_ROWS` of `experts.metal`.
const PAIR_ROWS: usize = 32;
/// Words of a `Tile` of `experts.metal`.
const TILE_WORDS: usize = 3;
/// Rows of a tile of `attend_rows`, and of `attend_tensor`; their SIMD-groups.
const ATTEND_ROWS: usize = 16;
const ATTEND_TENSOR_ROWS: usize = 32;
const ATTEND_SIMDGROUPS: usize = 4;
/// Where there are fewer threadgroups of `attend_rows`, positions are divided, so that there are about so many.
const ATTEND_GROUPS: usize = 128;

/// Threadgroup memory of a tile of so many rows: inputs and weights, then the outputs in the same place.
fn tile_memory(rows: usize) -> Vec<usize> {
    vec![((rows + TILE_OUTS) * TILE_STRIDE).max(rows * TILE_OUTS) * F32]
}

/// The same of tensor operations: weights alone, or afterwards the sums of `PAIR_ROWS` rows.
const TENSOR_MEMORY: usize = TENSOR_OUTS * TENSOR_COLS * F16;
const _: () = assert!(TENSOR_MEMORY >= PAIR_ROWS * TENSOR_OUTS * F32);

/// How the rows of a norm are wanted.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    /// As they are.
    Plain,
    /// Rounded to half, for tensor operations.
    Half,
    Both,
}

/// The scratch buffer of an input of products that is rounded to half.
fn half_of(name: &str) -> &'static str {
    match name {
        "gated" => "gated_half",
        "attended" => "attended_half",
        _ => "h_half",
    }
}

/// y = W x of rows of tokens, or y += W x.
struct Product<'n> {
    rows: usize,
    x: &'static str,
    cols: usize,
    matrix: &'n str,
    y: Contents,
    outs: usize,
    add: bool,
}

impl Bindings<'_, '_> {
    /// Sums and weights of the parts of a segment's attention.
    pub fn parts(self, segment: usize, access: Access) -> Self {
        let a = &self.builder.config.attention;
        let len = |s: usize| self.builder.segments[s].tokens * a.heads * self.builder.parts(s);
        let first = (0..segment).map(len).sum();
        let rows = first..first + len(segment);
        self.scratch("parts", a.head_dim, &rows, access).scratch("weights", 2, &rows, access)
    }

    /// What is between gate, up and down of so many pairs of token and slot: for tensor operations in half, in sorted order.
    fn middle(self, pairs: usize, width: usize, access: Access) -> Self {
        match self.builder.features.tensor {
            true => self.halves("middle_half", width, &(0..pairs), access),
            false => self.scratch("middle", width, &(0..pairs), access),
        }
    }
}

impl Builder<'_> {
    /// Into how many parts positions are divided for a segment's attention, at most.
    pub fn parts(&self, segment: usize) -> usize {
        if self.segments[segment].tokens == 1 {
            return PARTS;
        }
        (ATTEND_GROUPS / (self.attend_tiles(segment) * self.config.attention.kv_heads)).clamp(1, PARTS)
    }

    /// Whether a segment is attended with tensor operations: not a draft, which should round as its tokens do one by one. They take
    /// keys and values of 16 bits.
    fn attends_with_tensors(&self, segment: usize) -> bool {
        let Features { kv, tensor } = self.features;
        tensor && kv == KvType::Bf16 && self.segments[segment].tokens > FEW
    }

    /// Tiles of the tokens of a segment.
    fn attend_tiles(&self, segment: usize) -> usize {
        let a = &self.config.attention;
        let rows = if self.attends_with_tensors(segment) { ATTEND_TENSOR_ROWS } else { ATTEND_ROWS };
        self.segments[segment].tokens.div_ceil(rows / (a.heads / a.kv_heads))
    }

    /// Whether products of so many rows are tensor operations, but for the router's.
    pub fn with_tensors(&self, rows: usize) -> bool {
        self.features.tensor && rows > FEW
    }

    /// h = norm(x) of `count` rows from `first` on; in rows of h from `to` on.
    fn norm(&mut self, gains: &str, first: usize, count: usize, to: usize, form: Form) {
        let (hidden, rows) = (self.config.hidden_size, to..to + count);
        let mut bindings =
            self.bind().x(&(first..first + count), Access::Read).vector(gains).numbers(&[count]);
        if form != Form::Half {
            bindings = bindings.scratch("h", hidden, &rows, Access::Write);
        }
        if form != Form::Plain {
            bindings = bindings.halves("h_half", hidden, &rows, Access::Write);
        }
        let list = bindings.list;
        let kernel = match form {
            Form::Plain => "norm_rows",
            Form::Half => "norm_rows_half",
            Form::Both => "norm_rows_both",
        };
        self.launch(kernel, [count.div_ceil(4), 1, 1], 4 * LANES, Vec::new(), list);
    }

    /// The norm of all rows before a mixer's projections.
    fn norm_input(&mut self, layer: usize) {
        let rows = self.all_rows().len();
        let form = if self.with_tensors(rows) { Form::Half } else { Form::Plain };
        self.norm(&format!("layers.{layer}.input_layernorm"), 0, rows, 0, form);
    }

    fn matmul(&mut self, p: Product) {
        let tiles = |rows| (rows, tile_memory(rows));
        // The router's are f32 on every device: which experts are chosen must not depend on rounding.
        let tensors = self.with_tensors(p.rows) && !is_router(p.matrix);
        let (kernel, (tile, memory)) = match (is_router(p.matrix), p.rows, tensors) {
            (_, ..=FEW, _) => ("matmul_few", (p.rows, Vec::new())),
            (true, ..=SMALL, _) => ("matmul_router", tiles(SMALL_TILE_ROWS)),
            (true, ..) => ("matmul_router_32", tiles(ROUTER_TILE_ROWS)),
            (_, ..=SMALL, false) => ("matmul_16", tiles(SMALL_TILE_ROWS)),
            (_, _, false) => ("matmul", tiles(TILE_ROWS)),
            (_, ..=SMALL, true) => ("matmul_tensor_32", (SMALL_TENSOR_ROWS, vec![TENSOR_MEMORY])),
            (_, _, true) => ("matmul_tensor", (TENSOR_ROWS, vec![TENSOR_MEMORY])),
        };
        let access = if p.add { Access::ReadWrite } else { Access::Write };
        let bindings = match tensors {
            true => self.bind().halves(half_of(p.x), p.cols, &(0..p.rows), Access::Read),
            false => self.bind().scratch(p.x, p.cols, &(0..p.rows), Access::Read),
        };
        let bindings = bindings
            .matrix(p.matrix, p.rows.next_multiple_of(tile))
            .numbers(&[p.rows, p.cols, p.outs, usize::from(p.add)])
            .part(p.y, 0..p.rows * p.outs * F32, access)
            .list;
        let outs = match p.rows {
            ..=FEW => PRODUCT_ROWS,
            _ if tensors => TENSOR_OUTS,
            _ => TILE_OUTS,
        };
        let grid = [p.outs.div_ceil(outs), p.rows.div_ceil(tile), 1];
        self.launch(kernel, grid, TILE_THREADS, memory, bindings);
    }

    /// Products of h, `[rows, hidden]`, with matrices, into scratch buffers of their own: name, matrix, outputs.
    fn project(&mut self, rows: usize, products: &[(&'static str, String, usize)]) {
        for (name, matrix, outs) in products {
            self.matmul(Product {
                rows,
                x: "h",
                cols: self.config.hidden_size,
                matrix,
                y: Contents::Scratch(name),
                outs: *outs,
                add: false,
            });
        }
    }

    /// x += W y, of y `[rows, cols]`.
    fn add_product(&mut self, y: &'static str, cols: usize, matrix: &str) {
        let (rows, hidden) = (self.all_rows().len(), self.config.hidden_size);
        let y_of = Contents::Scratch("x");
        self.matmul(Product { rows, x: y, cols, matrix, y: y_of, outs: hidden, add: true });
    }

    /// Gated attention mixer of a layer; without `out` only its state is wanted.
    pub fn attention_rows(&mut self, layer: usize, out: bool) {
        let a = &self.config.attention;
        let (query_width, kv_width) = (a.query_width(), a.kv_width());
        let name = |module: &str| format!("layers.{layer}.self_attn.{module}");
        let rows = self.all_rows().len();
        self.norm_input(layer);
        self.project(
            rows,
            &[
                ("queries", name("q_proj"), 2 * query_width),
                ("new_keys", name("k_proj"), kv_width),
                ("new_values", name("v_proj"), kv_width),
            ],
        );
        for segment in 0..self.segments.len() {
            if self.segments[segment].tokens == 1 {
                self.attend(segment, layer);
            } else {
                self.append(segment, layer);
                if out {
                    self.attend_rows(segment, layer);
                }
            }
            if out {
                self.combine(segment);
            }
        }
        if out {
            self.add_product("attended", query_width, &name("o_proj"));
        }
    }

    /// Norms and rotation of a segment's queries and keys; keys and values go into the cache.
    fn append(&mut self, segment: usize, layer: usize) {
        let a = &self.config.attention;
        let (d, rows) = (a.head_dim, self.rows(segment));
        let bindings = self
            .bind()
            .heads(segment, layer, &rows)
            .numbers(&[rows.len()])
            .packed_queries(&rows, Access::Write)
            .cache(segment, layer, State::Keys, true, false)
            .cache(segment, layer, State::Values, true, false)
            .pages(segment)
            .list;
        let memory = [(a.heads / a.kv_heads + 1) * d, a.rotary_dim];
        let memory = memory.map(|n| n.next_multiple_of(4) * F32).to_vec();
        // The last page may go on behind the last token.
        let grid = [a.kv_heads, rows.len() + PAGE - 1, 1];
        self.launch("append", grid, MIXER_SIMDGROUPS * LANES, memory, bindings);
    }

    /// Attention of the tokens of a segment.
    fn attend_rows(&mut self, segment: usize, layer: usize) {
        let a = &self.config.attention;
        let (rows, parts, kv) = (self.rows(segment), self.parts(segment), self.features.kv.size());
        let bindings = self
            .bind()
            .packed_queries(&rows, Access::Read)
            .position(segment, Access::Read)
            .numbers(&[rows.len(), parts, 0])
            .cache(segment, layer, State::Keys, false, true)
            .cache(segment, layer, State::Values, false, true)
            .parts(segment, Access::Write)
            .pages(segment)
            .list;
        // Last, what each row's sums are multiplied with: as it is, and whether by anything but 1; or as diagonals of 8x8 matrices.
        let (kernel, tall, block, factors) = match self.attends_with_tensors(segment) {
            true => ("attend_tensor", ATTEND_TENSOR_ROWS, PAGE, ATTEND_TENSOR_ROWS + ATTEND_SIMDGROUPS),
            false => ("attend_rows", ATTEND_ROWS, POSITIONS, ATTEND_ROWS / 8 * 64),
        };
        let shares = tall * block;
        let memory = vec![tall * a.head_dim * kv, shares * F32, shares * kv, factors * F32];
        let grid = [parts, a.kv_heads, self.attend_tiles(segment)];
        self.launch(kernel, grid, ATTEND_SIMDGROUPS * LANES, memory, bindings);
    }

    /// Mixture of experts of a layer, for some of the step's tokens.
    pub fn moe_rows(&mut self, layer: usize, x: Range<usize>) {
        match x.len() {
            0 => return,
            1..=FEW => return self.moe(layer, &x),
            _ => {}
        }
        // Where they are in all buffers but the residual stream.
        let rows = 0..x.len();
        let (hidden, m) = (self.config.hidden_size, &self.config.moe);
        let name = |module: &str| format!("layers.{layer}.mlp.{module}");
        let form = if self.with_tensors(x.len()) { Form::Both } else { Form::Plain };
        self.norm(&format!("layers.{layer}.post_attention_layernorm"), x.start, x.len(), 0, form);
        self.project(
            rows.len(),
            &[("router_logits", name("gate"), m.experts), ("shared_logits", name("shared_expert_gate"), 1)],
        );
        self.sort(&rows);
        self.experts(layer, &rows);
        let bindings = self
            .bind()
            .scratch("spread", hidden * (m.experts_per_token + 1), &rows, Access::Read)
            .x(&x, Access::ReadWrite)
            .list;
        self.launch("sum_slots", [hidden.div_ceil(256), rows.len(), 1], 256, Vec::new(), bindings);
    }

    /// Tiles of pairs, at most: an expert's last one may have a single pair. As `first_tile` of `experts.metal` has it.
    fn most_tiles(&self, tokens: usize) -> usize {
        let m = &self.config.moe;
        let pairs = tokens * m.experts_per_token;
        (pairs + (PAIR_ROWS - 1) * m.experts.min(pairs)) / PAIR_ROWS + tokens.div_ceil(PAIR_ROWS)
    }

    /// Experts of each token, and pairs of token and slot by expert.
    fn sort(&mut self, rows: &Range<usize>) {
        let (m, most) = (&self.config.moe, self.most_tiles(rows.len()));
        let slots = m.experts_per_token + 1;
        let bindings = self
            .bind()
            .scratch("router_logits", m.experts, rows, Access::Read)
            .scratch("shared_logits", 1, rows, Access::Read)
            .numbers(&[rows.len()])
            .scratch("chosen", slots, rows, Access::Write)
            .scratch("shares", slots, rows, Access::Write)
            .list;
        self.launch("route", [(rows.len() * slots).div_ceil(4), 1, 1], 4 * LANES, Vec::new(), bindings);

        let bindings = self
            .bind()
            .scratch("chosen", slots, rows, Access::Read)
            .numbers(&[rows.len(), most])
            .scratch("order", slots, rows, Access::Write)
            .scratch("tiles", TILE_WORDS, &(0..most), Access::Write)
            .list;
        // A SIMD-group for each expert and the shared one.
        let grid = [(m.experts + 1).div_ceil(4), 1, 1];
        self.launch("sort_pairs", grid, 4 * LANES, Vec::new(), bindings);
    }

    /// Gate, up and down of all pairs. Those of the shared expert are counted among the others': they are in tiles like them.
    fn experts(&mut self, layer: usize, rows: &Range<usize>) {
        let (hidden, m) = (self.config.hidden_size, &self.config.moe);
        let (slots, width) = (m.experts_per_token + 1, m.expert_width.max(m.shared_width));
        let name = |module: &str| format!("layers.{layer}.mlp.{module}");
        let (most, tensor, pairs) = (self.most_tiles(rows.len()), self.features.tensor, slots * rows.len());
        if tensor {
            let bindings = self
                .bind()
                .halves("h_half", hidden, rows, Access::Read)
                .scratch("order", slots, rows, Access::Read)
                .numbers(&[rows.len()])
                .halves("sorted_half", hidden, &(0..pairs), Access::Write)
                .list;
            self.launch("gather_pairs", [pairs.div_ceil(4), 1, 1], 4 * LANES, Vec::new(), bindings);
        }
        let bindings = match tensor {
            true => self.bind().halves("sorted_half", hidden, &(0..pairs), Access::Read),
            false => self.bind().scratch("h", hidden, rows, Access::Read),
        };
        let bindings = bindings
            .scratch("shares", slots, rows, Access::Read)
            .scratch("order", slots, rows, Access::Read)
            .scratch("tiles", TILE_WORDS, &(0..most), Access::Read)
            .experts(&name("switch_mlp.gate_proj"), rows.len(), most * PAIR_ROWS)
            .experts(&name("switch_mlp.up_proj"), rows.len(), most * PAIR_ROWS)
            .matrix(&name("shared_expert.gate_proj"), 0)
            .matrix(&name("shared_expert.up_proj"), 0);
        let list = bindings.middle(pairs, width, Access::Write).list;
        // Half of the weights in hand are of gate, half of up.
        let (kernel, outs, memory) = match tensor {
            true => ("gate_up_tensor", TENSOR_OUTS / 2, vec![TENSOR_MEMORY]),
            false => ("gate_up_rows", TILE_OUTS / 2, tile_memory(PAIR_ROWS)),
        };
        self.launch(kernel, [width.div_ceil(outs), most, 1], TILE_THREADS, memory, list);

        let bindings = self
            .bind()
            .middle(pairs, width, Access::Read)
            .scratch("order", slots, rows, Access::Read)
            .scratch("tiles", TILE_WORDS, &(0..most), Access::Read)
            .experts(&name("switch_mlp.down_proj"), rows.len(), most * PAIR_ROWS)
            .matrix(&name("shared_expert.down_proj"), 0)
            .scratch("spread", hidden * slots, rows, Access::Write)
            .list;
        let (kernel, outs, memory) = match tensor {
            true => ("down_tensor", TENSOR_OUTS, vec![TENSOR_MEMORY]),
            false => ("down_rows", TILE_OUTS, tile_memory(PAIR_ROWS)),
        };
        self.launch(kernel, [hidden.div_ceil(outs), most, 1], TILE_THREADS, memory, bindings);
    }

    /// Final norm and logits of the rows that are wanted; next tokens and positions.
    pub fn head_rows(&mut self) {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let all: usize = self.segments.iter().map(|s| s.want.rows(s.tokens)).sum();
        let form = if self.with_tensors(all) { Form::Half } else { Form::Plain };
        let mut wanted = 0;
        let mut last = Vec::new();
        for segment in 0..self.segments.len() {
            let (rows, want) = (self.rows(segment), self.segments[segment].want);
            let count = want.rows(rows.len());
            if count > 0 {
                self.norm("norm", rows.end - count, count, wanted, form);
            }
            wanted += count;
            last.push(wanted);
        }
        if wanted > 0 {
            let matrix = self.head_matrix();
            let y = Contents::Logits;
            self.matmul(Product { rows: wanted, x: "h", cols: hidden, matrix, y, outs: vocab, add: false });
        }
        for (segment, end) in last.into_iter().enumerate() {
            if self.segments[segment].want == Want::Nothing {
                self.advance(segment);
            } else {
                self.best(segment, end - 1);
                self.next(segment);
            }
        }
    }

    /// The first candidate of each group of logits in a row of them.
    fn best(&mut self, segment: usize, row: usize) {
        let row_bytes = self.config.vocab_size * F32;
        let bindings = self
            .bind()
            .part(Contents::Logits, row * row_bytes..(row + 1) * row_bytes, Access::Read)
            .candidates(segment)
            .list;
        let grid = [self.draw_groups().div_ceil(HEAD_SIMDGROUPS), 1, 1];
        self.launch("best", grid, HEAD_SIMDGROUPS * LANES, Vec::new(), bindings);
    }

    /// Moves the position of a segment of which no logits are wanted.
    fn advance(&mut self, segment: usize) {
        let tokens = self.segments[segment].tokens;
        let bindings = self.bind().numbers(&[tokens]).position(segment, Access::ReadWrite).list;
        self.launch("advance", [1, 1, 1], LANES, Vec::new(), bindings);
    }
}
