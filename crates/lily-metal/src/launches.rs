//! The launches of each block.

use std::collections::HashMap;

use lily_model::config::{Affine, Config};
use lily_model::manifest::Module;

use crate::plan::{Access, Binding, Buffer, Contents, KvType, LANES, Launch, PAGE, PARTS, Plan, State};

/// Rows that a SIMD-group multiplies: `ROWS` of `common.metal`.
const ROWS: usize = 4;
/// Rows of a threadgroup that multiplies: `PRODUCT_SIMDGROUPS` times that.
const PRODUCT_ROWS: usize = 4 * ROWS;
const PRODUCT_THREADS: usize = 4 * LANES;
/// SIMD-groups of `lm_head`: `HEAD_SIMDGROUPS` of `head.metal`.
const HEAD_SIMDGROUPS: usize = 8;
/// SIMD-groups of `finish`.
const FINISH_SIMDGROUPS: usize = 32;
/// SIMD-groups of `delta` and `attend`.
const MIXER_SIMDGROUPS: usize = 8;
/// Bytes of a number in threadgroup memory.
const F32: usize = 4;

/// A plan in the making.
pub struct Builder<'a> {
    config: &'a Config,
    modules: HashMap<String, Module>,
    capacity: usize,
    kv: KvType,
    plan: Plan,
    index: HashMap<Contents, usize>,
    /// Stages of the last launches that wrote and that read each buffer.
    written: Vec<usize>,
    read: Vec<usize>,
}

/// What a launch is bound to, in the order of its argument table.
struct Bindings<'b, 'a> {
    builder: &'b mut Builder<'a>,
    list: Vec<Binding>,
}

impl<'a> Builder<'a> {
    /// Nothing yet.
    pub fn new(config: &'a Config, modules: Vec<Module>, capacity: usize, kv: KvType) -> Self {
        let modules = modules.into_iter().map(|module| (module.name.clone(), module)).collect();
        let plan = Plan { buffers: Vec::new(), launches: Vec::new() };
        let index = HashMap::new();
        Self { config, modules, capacity, kv, plan, index, written: Vec::new(), read: Vec::new() }
    }

    /// The whole.
    pub fn finish(self) -> Plan {
        self.plan
    }

    fn buffer(&mut self, contents: Contents, bytes: usize) -> usize {
        if let Some(&buffer) = self.index.get(&contents) {
            // A scratch buffer is as large as its largest use.
            let known = &mut self.plan.buffers[buffer].bytes;
            *known = bytes.max(*known);
            return buffer;
        }
        self.plan.buffers.push(Buffer { contents: contents.clone(), bytes });
        self.written.push(0);
        self.read.push(0);
        let buffer = self.plan.buffers.len() - 1;
        self.index.insert(contents, buffer);
        buffer
    }

    fn bind(&mut self) -> Bindings<'_, 'a> {
        Bindings { builder: self, list: Vec::new() }
    }

    /// Adds a launch; its stage follows from what it reads and writes.
    fn launch(
        &mut self,
        kernel: &'static str,
        grid: [usize; 3],
        threads: usize,
        threadgroup_memory: Vec<usize>,
        bindings: Vec<Binding>,
    ) {
        let after = |b: &Binding| {
            let written = self.written[b.buffer];
            if b.access.writes() { written.max(self.read[b.buffer]) } else { written }
        };
        let stage = 1 + bindings.iter().map(after).max().unwrap_or(0);
        for b in &bindings {
            if b.access.reads() {
                self.read[b.buffer] = stage.max(self.read[b.buffer]);
            }
            if b.access.writes() {
                self.written[b.buffer] = stage;
            }
        }
        self.plan.launches.push(Launch { kernel, grid, threads, threadgroup_memory, bindings, stage });
    }

    /// A launch that multiplies `rows` rows.
    fn product(&mut self, kernel: &'static str, rows: usize, slots: usize, bindings: Vec<Binding>) {
        let memory = if slots > 1 { vec![16, 16] } else { Vec::new() };
        self.launch(kernel, [rows.div_ceil(PRODUCT_ROWS), slots, 1], PRODUCT_THREADS, memory, bindings);
    }

    /// Token embedding.
    pub fn embed(&mut self) {
        let (hidden, vocab) = (self.config.hidden_size, self.config.vocab_size);
        let bindings =
            self.bind().token(Access::Read).rows_of("embed_tokens", 1, vocab).x(Access::Write).list;
        self.launch("embed", [hidden.div_ceil(256), 1, 1], 256, Vec::new(), bindings);
    }

    /// Gated DeltaNet mixer of a layer.
    pub fn gdn(&mut self, layer: usize) {
        let (hidden, g) = (self.config.hidden_size, &self.config.gdn);
        let (channels, value_width) = (g.conv_channels(), g.value_width());
        let name = |module: &str| format!("layers.{layer}.linear_attn.{module}");
        let conv = Contents::State(layer, State::Conv);
        let conv_bytes = channels * g.conv_kernel * F32;
        let column_blocks = g.value_dim / LANES;

        let bindings = self
            .bind()
            .x(Access::Read)
            .vector(&format!("layers.{layer}.input_layernorm"))
            .matrix(&name("in_proj_qkv"))
            .matrix(&name("in_proj_z"))
            .matrix(&name("in_proj_b"))
            .matrix(&name("in_proj_a"))
            .position(Access::Read)
            .moved(conv.clone(), conv_bytes, Access::Write, channels * F32)
            .scratch("z", value_width, Access::Write)
            .scratch("b", g.value_heads, Access::Write)
            .scratch("a", g.value_heads, Access::Write)
            .list;
        self.product("project_gdn", channels + value_width + 2 * g.value_heads, 1, bindings);

        let state = g.state_len() * F32;
        let bindings = self
            .bind()
            .moved(conv, conv_bytes, Access::Read, conv_bytes)
            .vector(&name("conv1d"))
            .scratch("z", value_width, Access::Read)
            .scratch("b", g.value_heads, Access::Read)
            .scratch("a", g.value_heads, Access::Read)
            .vector(&name("A_log"))
            .vector(&name("dt_bias"))
            .vector(&name("norm"))
            .position(Access::Read)
            .moved(Contents::State(layer, State::Recurrent), state, Access::ReadWrite, 2 * state)
            .scratch("gated", value_width, Access::Write)
            .scratch("squares", g.value_heads * column_blocks, Access::Write)
            .list;
        let memory = vec![2 * g.key_dim * F32, 2 * MIXER_SIMDGROUPS * LANES * F32];
        let grid = [column_blocks, g.value_heads, 1];
        self.launch("delta", grid, MIXER_SIMDGROUPS * LANES, memory, bindings);

        let bindings = self
            .bind()
            .scratch("gated", value_width, Access::Read)
            .scratch("squares", g.value_heads * column_blocks, Access::Read)
            .matrix(&name("out_proj"))
            .x(Access::ReadWrite)
            .list;
        self.product("out_gdn", hidden, 1, bindings);
    }

    /// Gated attention mixer of a layer.
    pub fn attention(&mut self, layer: usize) {
        let (hidden, a) = (self.config.hidden_size, &self.config.attention);
        let (query_width, kv_width, d) = (a.query_width(), a.kv_width(), a.head_dim);
        let name = |module: &str| format!("layers.{layer}.self_attn.{module}");
        let rows = 2 * (query_width + kv_width);

        let bindings = self
            .bind()
            .x(Access::Read)
            .vector(&format!("layers.{layer}.input_layernorm"))
            .matrix(&name("q_proj"))
            .matrix(&name("k_proj"))
            .matrix(&name("v_proj"))
            .scratch("projected", rows, Access::Write)
            .list;
        self.product("project_attention", rows, 1, bindings);

        let bindings = self
            .bind()
            .scratch("projected", rows, Access::Read)
            .vector(&name("q_norm"))
            .vector(&name("k_norm"))
            .small(Contents::Turns, a.rotary_dim / 2 * 8, Access::Read)
            .position(Access::Read)
            .cache(layer, State::Keys)
            .cache(layer, State::Values)
            .scratch("parts", a.heads * PARTS * d, Access::Write)
            .scratch("weights", a.heads * PARTS * 2, Access::Write)
            .pages()
            .list;
        let memory = [
            (a.heads / a.kv_heads + 1) * d,
            a.rotary_dim.next_multiple_of(4),
            MIXER_SIMDGROUPS * d,
            2 * MIXER_SIMDGROUPS,
        ];
        let memory = memory.map(|n| n * F32).to_vec();
        self.launch("attend", [PARTS, a.kv_heads, 1], MIXER_SIMDGROUPS * LANES, memory, bindings);

        let bindings = self
            .bind()
            .scratch("projected", rows, Access::Read)
            .scratch("parts", a.heads * PARTS * d, Access::Read)
            .scratch("weights", a.heads * PARTS * 2, Access::Read)
            .position(Access::Read)
            .scratch("attended", query_width, Access::Write)
            .list;
        self.launch("combine", [a.heads, 1, 1], 256, Vec::new(), bindings);

        let bindings = self
            .bind()
            .scratch("attended", query_width, Access::Read)
            .matrix(&name("o_proj"))
            .x(Access::ReadWrite)
            .list;
        self.product("out_attention", hidden, 1, bindings);
    }

    /// Mixture of experts of a layer.
    pub fn moe(&mut self, layer: usize) {
        let (hidden, m) = (self.config.hidden_size, &self.config.moe);
        let (slots, width) = (m.experts_per_token + 1, m.expert_width.max(m.shared_width));
        let name = |module: &str| format!("layers.{layer}.mlp.{module}");
        let norm = format!("layers.{layer}.post_attention_layernorm");

        let bindings = self
            .bind()
            .x(Access::Read)
            .vector(&norm)
            .matrix(&name("gate"))
            .matrix(&name("shared_expert_gate"))
            .scratch("router_logits", m.experts + 1, Access::Write)
            .list;
        self.product("router", m.experts + 1, 1, bindings);

        let bindings = self
            .bind()
            .x(Access::Read)
            .vector(&norm)
            .scratch("router_logits", m.experts + 1, Access::Read)
            .experts(&name("switch_mlp.gate_proj"))
            .experts(&name("switch_mlp.up_proj"))
            .matrix(&name("shared_expert.gate_proj"))
            .matrix(&name("shared_expert.up_proj"))
            .scratch("middle", slots * width, Access::Write)
            .scratch("chosen", m.experts_per_token, Access::Write)
            .list;
        self.product("gate_up", width, slots, bindings);

        let bindings = self
            .bind()
            .scratch("middle", slots * width, Access::Read)
            .scratch("chosen", m.experts_per_token, Access::Read)
            .experts(&name("switch_mlp.down_proj"))
            .matrix(&name("shared_expert.down_proj"))
            .x(Access::ReadWrite)
            .list;
        self.product("down", hidden, 1, bindings);
    }

    /// Final norm, logits, the next token.
    pub fn head(&mut self) {
        let vocab = self.config.vocab_size;
        let matrix = if self.config.tie_word_embeddings { "embed_tokens" } else { "lm_head" };
        let groups = vocab.div_ceil(HEAD_SIMDGROUPS * ROWS);
        let bindings = self
            .bind()
            .x(Access::Read)
            .vector("norm")
            .matrix(matrix)
            .small(Contents::Logits, vocab * F32, Access::Write)
            .scratch("best_logits", groups, Access::Write)
            .scratch("best_tokens", groups, Access::Write)
            .list;
        let memory = vec![HEAD_SIMDGROUPS * F32; 2];
        self.launch("lm_head", [groups, 1, 1], HEAD_SIMDGROUPS * LANES, memory, bindings);

        let bindings = self
            .bind()
            .scratch("best_logits", groups, Access::Read)
            .scratch("best_tokens", groups, Access::Read)
            .token(Access::ReadWrite)
            .position(Access::ReadWrite)
            .small(Contents::Broken, 4, Access::Write)
            .list;
        let memory = vec![FINISH_SIMDGROUPS * F32; 2];
        self.launch("finish", [1, 1, 1], FINISH_SIMDGROUPS * LANES, memory, bindings);
    }
}

impl Bindings<'_, '_> {
    /// A buffer of which `moved` bytes go to or come from memory.
    fn moved(mut self, contents: Contents, bytes: usize, access: Access, moved: usize) -> Self {
        let buffer = self.builder.buffer(contents, bytes);
        self.list.push(Binding { buffer, access, bytes: moved as u64, bytes_per_position: 0 });
        self
    }

    /// A buffer that stays in the caches.
    fn small(self, contents: Contents, bytes: usize, access: Access) -> Self {
        self.moved(contents, bytes, access, 0)
    }

    /// Numbers of four bytes.
    fn scratch(self, name: &'static str, len: usize, access: Access) -> Self {
        self.small(Contents::Scratch(name), len * F32, access)
    }

    /// The residual stream.
    fn x(self, access: Access) -> Self {
        let len = self.builder.config.hidden_size;
        self.scratch("x", len, access)
    }

    fn token(self, access: Access) -> Self {
        self.small(Contents::Token, 4, access)
    }

    fn position(self, access: Access) -> Self {
        self.small(Contents::Position, 4, access)
    }

    /// Keys or values of a layer: one position is written, the earlier ones are read.
    fn cache(mut self, layer: usize, state: State) -> Self {
        let position = self.builder.config.attention.kv_width() * self.builder.kv.size();
        let positions = self.builder.capacity.next_multiple_of(PAGE);
        let buffer = self.builder.buffer(Contents::State(layer, state), positions * position);
        let position = position as u64;
        self.list.push(Binding {
            buffer,
            access: Access::ReadWrite,
            bytes: position,
            bytes_per_position: position,
        });
        self
    }

    /// The table of the sequence's pages.
    fn pages(self) -> Self {
        let pages = self.builder.capacity.div_ceil(PAGE);
        self.small(Contents::Pages, pages * 4, Access::Read)
    }

    /// Values of a module. A name that isn't one gives none, which the tests of the plan's sizes find.
    fn elements(&self, name: &str) -> usize {
        self.builder.modules.get(name).map_or(0, |module| module.elements() as usize)
    }

    fn vector(self, name: &str) -> Self {
        let bytes = self.elements(name) * F32;
        self.moved(Contents::Vector(name.to_owned()), bytes, Access::Read, bytes)
    }

    /// Codes, scales and biases of a matrix that is read in full.
    fn matrix(self, name: &str) -> Self {
        self.rows_of(name, 1, 1)
    }

    /// Those of all routed experts' matrices, of which the chosen ones are read.
    fn experts(self, name: &str) -> Self {
        let m = &self.builder.config.moe;
        let (read, of) = (m.experts_per_token, m.experts);
        self.rows_of(name, read, of)
    }

    /// Codes, scales and biases of a matrix of which `read` in `of` parts are read.
    fn rows_of(self, name: &str, read: usize, of: usize) -> Self {
        let affine = self.builder.modules.get(name).and_then(|module| module.affine(self.builder.config));
        let Affine { bits, group_size } = affine.unwrap_or(Affine { bits: 4, group_size: 64 });
        let (codes, scales) = (self.elements(name) * bits / 8, self.elements(name) / group_size * 2);
        let part = |bytes: usize| bytes / of * read;
        self.moved(Contents::Codes(name.to_owned()), codes, Access::Read, part(codes))
            .moved(Contents::Scales(name.to_owned()), scales, Access::Read, part(scales))
            .moved(Contents::Biases(name.to_owned()), scales, Access::Read, part(scales))
    }
}
