//! The launches of each block: those of a step of one token, and those that steps of more tokens share with it.

use std::ops::Range;

use crate::builder::{Builder, F32};
use crate::draw;
use crate::plan::{Access, Binding, Contents, LANES, PARTS, State};

/// Rows that a SIMD-group multiplies: `ROWS` of `common.metal`.
pub const ROWS: usize = 4;
/// Rows of a threadgroup that multiplies: `PRODUCT_SIMDGROUPS` times that.
pub const PRODUCT_ROWS: usize = 4 * ROWS;
const PRODUCT_THREADS: usize = 4 * LANES;
/// Rows of a threadgroup of `router` that makes logits: `PRODUCT_SIMDGROUPS * ROUTER_ROWS` of `moe.metal`.
const ROUTER_BLOCK: usize = 8;
/// SIMD-groups of `lm_head`: `HEAD_SIMDGROUPS` of `head.metal`.
pub const HEAD_SIMDGROUPS: usize = 8;
/// SIMD-groups of `finish`.
const FINISH_SIMDGROUPS: usize = 32;
/// SIMD-groups of `delta`, `attend` and `append`.
pub const MIXER_SIMDGROUPS: usize = 8;

impl Builder<'_> {
    /// A launch that multiplies `rows` rows of a matrix with each token.
    fn product(&mut self, kernel: &'static str, rows: usize, tokens: usize, bindings: Vec<Binding>) {
        let grid = [rows.div_ceil(PRODUCT_ROWS), tokens, 1];
        self.launch(kernel, grid, PRODUCT_THREADS, Vec::new(), bindings);
    }

    /// Token embedding of a segment.
    pub fn embed(&mut self, segment: usize) {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let rows = self.rows(segment);
        let bindings = self
            .bind()
            .tokens(segment, Access::Read)
            .rows_of("embed_tokens", rows.len(), vocab, 0)
            .x(&rows, Access::Write)
            .list;
        self.launch("embed", [hidden.div_ceil(256), rows.len(), 1], 256, Vec::new(), bindings);
    }

    /// Gated DeltaNet mixer of a layer, of one token.
    pub fn gdn(&mut self, layer: usize) {
        let (hidden, g) = (self.config.hidden_size, &self.config.gdn);
        let (channels, value_width) = (g.conv_channels(), g.value_width());
        let name = |module: &str| format!("layers.{layer}.linear_attn.{module}");
        let one = 0..1;
        let bindings = self
            .bind()
            .x(&one, Access::Read)
            .vector(&format!("layers.{layer}.input_layernorm"))
            .matrix(&name("in_proj_qkv"), 1)
            .matrix(&name("in_proj_z"), 1)
            .matrix(&name("in_proj_b"), 1)
            .matrix(&name("in_proj_a"), 1)
            .scratch("qkv", channels, &one, Access::Write)
            .scratch("z", value_width, &one, Access::Write)
            .scratch("b", g.value_heads, &one, Access::Write)
            .scratch("a", g.value_heads, &one, Access::Write)
            .list;
        self.product("project_gdn", channels + value_width + 2 * g.value_heads, 1, bindings);

        self.delta(0, layer);

        let bindings = self
            .bind()
            .scratch("gated", value_width, &one, Access::Read)
            .scratch("squares", g.value_width() / LANES, &one, Access::Read)
            .matrix(&name("out_proj"), 1)
            .x(&one, Access::ReadWrite)
            .list;
        self.product("out_gdn", hidden, 1, bindings);
    }

    /// The delta rule over the tokens of a segment.
    pub fn delta(&mut self, segment: usize, layer: usize) {
        let g = &self.config.gdn;
        let (channels, value_width, column_blocks) =
            (g.conv_channels(), g.value_width(), g.value_dim / LANES);
        let name = |module: &str| format!("layers.{layer}.linear_attn.{module}");
        let rows = self.rows(segment);
        // Of the ring, all rows but the one of the first new token are read; that one is written, if it is the only one.
        let moved = channels * (g.conv_kernel - 1);
        let written = if rows.len() == 1 { channels } else { 0 };
        let bindings = self
            .bind()
            .scratch("qkv", channels, &rows, Access::Read)
            .vector(&name("conv1d"))
            .scratch("z", value_width, &rows, Access::Read)
            .scratch("b", g.value_heads, &rows, Access::Read)
            .scratch("a", g.value_heads, &rows, Access::Read)
            .vector(&name("A_log"))
            .vector(&name("dt_bias"))
            .vector(&name("norm"))
            .position(segment, Access::Read)
            .numbers(&[rows.len()])
            .conv(segment, layer, Access::ReadWrite, moved + written)
            .recurrent(segment, layer, Access::ReadWrite)
            .scratch("gated", value_width, &rows, Access::Write)
            .scratch("squares", g.value_heads * column_blocks, &rows, Access::Write)
            .list;
        let memory = vec![4 * g.key_dim * F32, 2 * MIXER_SIMDGROUPS * LANES * F32];
        let grid = [column_blocks, g.value_heads, 1];
        self.launch("delta", grid, MIXER_SIMDGROUPS * LANES, memory, bindings);
    }

    /// Gated attention mixer of a layer, of one token.
    pub fn attention(&mut self, layer: usize) {
        let (hidden, a) = (self.config.hidden_size, &self.config.attention);
        let (query_width, kv_width) = (a.query_width(), a.kv_width());
        let name = |module: &str| format!("layers.{layer}.self_attn.{module}");
        let one = 0..1;
        let bindings = self
            .bind()
            .x(&one, Access::Read)
            .vector(&format!("layers.{layer}.input_layernorm"))
            .matrix(&name("q_proj"), 1)
            .matrix(&name("k_proj"), 1)
            .matrix(&name("v_proj"), 1)
            .scratch("queries", 2 * query_width, &one, Access::Write)
            .scratch("new_keys", kv_width, &one, Access::Write)
            .scratch("new_values", kv_width, &one, Access::Write)
            .list;
        self.product("project_attention", 2 * (query_width + kv_width), 1, bindings);

        self.attend(0, layer);
        self.combine(0);

        let bindings = self
            .bind()
            .scratch("attended", query_width, &one, Access::Read)
            .matrix(&name("o_proj"), 1)
            .x(&one, Access::ReadWrite)
            .list;
        self.product("out_attention", hidden, 1, bindings);
    }

    /// Attention of the one token of a segment.
    pub fn attend(&mut self, segment: usize, layer: usize) {
        let a = &self.config.attention;
        let (d, rows) = (a.head_dim, self.rows(segment));
        let bindings = self
            .bind()
            .heads(segment, layer, &rows)
            .cache(segment, layer, State::Keys, true, true)
            .cache(segment, layer, State::Values, true, true)
            .parts(segment, Access::Write)
            .pages(segment)
            .list;
        let memory =
            [(a.heads / a.kv_heads + 1) * d, a.rotary_dim, MIXER_SIMDGROUPS * d, 2 * MIXER_SIMDGROUPS];
        let memory = memory.map(|n| n.next_multiple_of(4) * F32).to_vec();
        self.launch("attend", [PARTS, a.kv_heads, 1], MIXER_SIMDGROUPS * LANES, memory, bindings);
    }

    /// Merges the parts of a segment's attention.
    pub fn combine(&mut self, segment: usize) {
        let a = &self.config.attention;
        let (rows, parts) = (self.rows(segment), self.parts(segment));
        let bindings = self
            .bind()
            .scratch("queries", 2 * a.query_width(), &rows, Access::Read)
            .parts(segment, Access::Read)
            .position(segment, Access::Read)
            .numbers(&[rows.len(), parts]);
        // As the output projection of all rows of the step wants it.
        let (kernel, bindings) = match bindings.builder.with_tensors(bindings.builder.all_rows().len()) {
            true => ("combine_half", bindings.halves("attended_half", a.query_width(), &rows, Access::Write)),
            false => ("combine", bindings.scratch("attended", a.query_width(), &rows, Access::Write)),
        };
        let list = bindings.list;
        self.launch(kernel, [a.heads, rows.len(), 1], 256, Vec::new(), list);
    }

    /// Mixture of experts of a layer, for some of the step's tokens, token by token.
    pub fn moe(&mut self, layer: usize, x: &Range<usize>) {
        let (hidden, m) = (self.config.hidden_size, &self.config.moe);
        let (slots, width) = (m.experts_per_token + 1, m.expert_width.max(m.shared_width));
        let name = |module: &str| format!("layers.{layer}.mlp.{module}");
        let norm = format!("layers.{layer}.post_attention_layernorm");
        let (tokens, rows) = (x.len(), 0..x.len());
        let chosen = tokens * m.experts_per_token;

        let bindings = self
            .bind()
            .x(x, Access::Read)
            .vector(&norm)
            .matrix(&name("gate"), tokens)
            .matrix(&name("shared_expert_gate"), tokens)
            .matrix(&name("shared_expert.gate_proj"), tokens)
            .matrix(&name("shared_expert.up_proj"), tokens)
            .scratch("router_logits", m.experts + 1, &rows, Access::Write)
            .scratch("middle", slots * width, &rows, Access::Write)
            .list;
        let blocks = m.experts / ROUTER_BLOCK + 1 + m.shared_width.div_ceil(PRODUCT_ROWS);
        self.launch("router", [blocks, tokens, 1], PRODUCT_THREADS, Vec::new(), bindings);

        let bindings = self
            .bind()
            .x(x, Access::Read)
            .vector(&norm)
            .scratch("router_logits", m.experts + 1, &rows, Access::Read)
            .experts(&name("switch_mlp.gate_proj"), tokens, chosen)
            .experts(&name("switch_mlp.up_proj"), tokens, chosen)
            .scratch("middle", slots * width, &rows, Access::Write)
            .scratch("chosen", m.experts_per_token, &rows, Access::Write)
            .list;
        let blocks = m.expert_width.div_ceil(PRODUCT_ROWS);
        self.launch("gate_up", [blocks, slots - 1, tokens], PRODUCT_THREADS, vec![16, 16], bindings);

        let bindings = self
            .bind()
            .scratch("middle", slots * width, &rows, Access::Read)
            .scratch("chosen", m.experts_per_token, &rows, Access::Read)
            .experts(&name("switch_mlp.down_proj"), tokens, chosen)
            .matrix(&name("shared_expert.down_proj"), tokens)
            .scratch("router_logits", m.experts + 1, &rows, Access::Read)
            .x(x, Access::ReadWrite)
            .list;
        self.product("down", hidden, tokens, bindings);
    }

    /// Name of the matrix that makes logits.
    pub fn head_matrix(&self) -> &'static str {
        if self.config.tie_word_embeddings { "embed_tokens" } else { "lm_head" }
    }

    /// Final norm, logits, the next token, of one token.
    pub fn head(&mut self) {
        let (vocab, matrix, groups) = (self.config.vocab_size, self.head_matrix(), self.draw_groups());
        let bindings = self
            .bind()
            .x(&(0..1), Access::Read)
            .vector("norm")
            .matrix(matrix, 1)
            .part(Contents::Logits, 0..vocab * F32, Access::Write)
            .candidates(0)
            .list;
        let memory = vec![draw::GROUP * F32];
        self.launch("lm_head", [groups, 1, 1], HEAD_SIMDGROUPS * LANES, memory, bindings);
        self.next(0);
    }

    /// The next token of a segment.
    pub fn next(&mut self, segment: usize) {
        let (vocab, tokens) = (self.config.vocab_size, self.segments[segment].tokens);
        let bindings = self
            .bind()
            .best(segment, Access::Read)
            .scratch("adjusted", vocab, &(segment..segment + 1), Access::Read)
            .draw(segment)
            .numbers(&[tokens])
            .tokens(segment, Access::ReadWrite)
            .position(segment, Access::ReadWrite)
            .small_of(segment, Contents::Broken, 4, Access::Write)
            .list;
        // Two candidates of each SIMD-group; 256 sums of 64 bits; three of their results.
        let candidates = 2 * FINISH_SIMDGROUPS * F32;
        let memory = vec![candidates, candidates, candidates, 256 * 2 * F32, 4 * 2 * F32];
        self.launch("finish", [1, 1, 1], FINISH_SIMDGROUPS * LANES, memory, bindings);
    }
}
