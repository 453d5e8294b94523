//! What a step launches, as plain data: a host has only to encode it.
//!
//! A step has a [`Segment`] for each sequence that it advances. It reads tokens and positions from device memory, advances the
//! states, and leaves the logits that are wanted, a token drawn from the last ones as the sequence's next, and the next position.
//! So the same list serves every step of the same segments.

use std::ops::Range;

use lily_model::config::{Affine, Config, LayerKind};
use lily_model::manifest::{Module, ModuleKind, modules};
pub use lily_model::pool::PAGE;

use crate::builder::Builder;

/// Parts that the positions of a sequence are divided into for attention, at most; each is 64 positions or more. With two K/V heads 80
/// threadgroups: as many for each of 8, 10, 16, 20, 40 or 80 cores.
pub const PARTS: usize = 40;

/// Of so many tokens of a sequence, one step at a time, the last writes the recurrent state; what the others would do to it waits in
/// a log, which the next steps replay. See docs/lab/metal.md for the count.
pub const SETTLE_EVERY: usize = 4;

/// Inputs that share a scale and a bias.
pub const GROUP: usize = 64;

/// Tokens of a step, at most: what 32-bit indices of activations allow, with room.
pub const MOST_TOKENS: usize = 1 << 16;

/// Threads of a SIMD-group, on every Apple GPU.
pub const LANES: usize = 32;

// Limits that Apple GPUs of families 7 (M1) to 10 (M5) have alike, by Apple's Metal feature set tables.

/// Threads of a threadgroup.
pub const MOST_THREADS: usize = 1024;

/// Buffers of a kernel, and as many threadgroup memory arguments.
pub const MOST_BUFFERS: usize = 31;

/// Bytes of threadgroup memory.
pub const THREADGROUP_MEMORY: usize = 32 * 1024;

/// Each length of it is a multiple of so many bytes.
pub const THREADGROUP_MEMORY_ALIGNMENT: usize = 16;

/// Number type of cached keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// bf16.
    Bf16,
    /// f32, twice the memory; for comparing with references in f32.
    F32,
}

impl KvType {
    /// Bytes of a number.
    pub fn size(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// The type's name in Metal.
    pub fn metal(self) -> &'static str {
        match self {
            Self::Bf16 => "bfloat",
            Self::F32 => "float",
        }
    }
}

/// What kernels are chosen by, once, at load. A type of cache stands for the kernels that every device has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Features {
    /// What K/V is kept as.
    pub kv: KvType,
    /// Matrices of many rows are multiplied by the tensor operations of Metal 4, and rounded to 16 bits for it.
    pub tensor: bool,
}

impl Features {
    /// What multiplies matrices of many rows, for people.
    pub fn path(self) -> &'static str {
        if self.tensor { "tensor operations (Metal 4)" } else { "simdgroup_matrix (Metal 3.1)" }
    }
}

impl From<KvType> for Features {
    fn from(kv: KvType) -> Self {
        Self { kv, tensor: false }
    }
}

/// What a buffer holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Contents {
    /// Codes of a quantised matrix, or of the matrices of all experts one behind the other, as in an MLX checkpoint; of a matrix that
    /// is not quantised, its values, bf16. Named as in [`lily_model::manifest`]. Aligned to 4 bytes, values to 2.
    Codes(String),
    /// Its scales, bf16.
    Scales(String),
    /// Its biases, bf16.
    Biases(String),
    /// Four bytes that nobody reads, in place of what a matrix that is not quantised lacks: its scales or its biases.
    Absent(String),
    /// A vector, f32, whatever the checkpoint has it in.
    Vector(String),
    /// [`crate::rope::turns`].
    Turns,
    /// Of a segment: the tokens to read, u32; the step leaves the next one in the first word, if logits are wanted.
    Token,
    /// Of a segment: how many tokens of the sequence came before, u32; the step adds its own.
    Position,
    /// Of a segment: the pages of its sequence, in order, u32 `[capacity / PAGE]`, rounded up. All layers use the same.
    Pages,
    /// Of a segment: [`crate::draw::Draw::words`], how the token behind its last one is drawn.
    Draw,
    /// Of a segment: [`crate::draw::Draw::changes`].
    Changes,
    /// Of a segment: [`crate::draw::Draw::mask`].
    Mask,
    /// Of a segment: u32, 1 if one of the last token's logits is not finite, else 0. Written if logits are wanted.
    Broken,
    /// f32, `[rows, vocab]`: those of the first segment, then those of the next one; see [`Want`].
    Logits,
    /// These words themselves. Nothing writes them, so a host may pass them along with the launch.
    Numbers(Vec<u32>),
    /// State of a layer of a segment's sequence. All zeros at the start of a sequence.
    State(usize, State),
    /// Values on the way from one launch to another; all layers use the same. Nothing is kept in it from step to step, so plans may
    /// share one, as long as the longest of theirs.
    Scratch(&'static str),
}

impl Contents {
    /// Whether these are values of the model.
    pub fn is_weight(&self) -> bool {
        matches!(self, Self::Codes(_) | Self::Scales(_) | Self::Biases(_) | Self::Vector(_))
    }

    /// Name for people.
    pub fn name(&self) -> String {
        match self {
            Self::Codes(module) => format!("codes of {module}"),
            Self::Scales(module) => format!("scales of {module}"),
            Self::Biases(module) => format!("biases of {module}"),
            Self::Vector(module) => module.clone(),
            Self::Scratch(name) => (*name).to_owned(),
            Self::State(layer, state) => format!("{state:?} of layer {layer}"),
            other => format!("{other:?}"),
        }
    }
}

/// State of a layer of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Gated DeltaNet: inputs of the convolution, f32 `[taps, channels]`. Those of position p are in row p % taps.
    Conv,
    /// Gated DeltaNet: f32 `[value_heads, key_dim, value_dim]`, without what is pending.
    Recurrent,
    /// Gated DeltaNet: what the pending tokens do to the recurrent state, f32 `[SETTLE_EVERY - 1, key_heads * key_dim + value_heads *
    /// value_dim + value_heads]`: normed keys, errors, decays. Behind the pending ones nobody reads.
    Log,
    /// Gated DeltaNet: how many tokens are pending, fewer than [`SETTLE_EVERY`], u32 `[value_heads, value_dim / LANES]`: the same number
    /// for each threadgroup.
    Pending,
    /// Attention: normed and rotated keys, `[pages, PAGE, kv_heads, head_dim]`; the plan counts the pages of one sequence. What is
    /// behind the last position is not kept.
    Keys,
    /// Attention: values, as the keys.
    Values,
}

/// Memory that launches are bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// What is in it.
    pub contents: Contents,
    /// Its length.
    pub bytes: usize,
    /// The segment that it belongs to: tokens, position, state. 0 for what all share.
    pub segment: usize,
}

/// How a kernel uses a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It only reads.
    Read,
    /// It only writes, or reads no more than what its own threadgroup has written.
    Write,
    /// Both, but no threadgroup reads what another one writes.
    ReadWrite,
}

impl Access {
    /// Whether it reads.
    pub fn reads(self) -> bool {
        self != Self::Write
    }
    /// Whether it writes.
    pub fn writes(self) -> bool {
        self != Self::Read
    }
}

/// A buffer at an index of a kernel's argument table: that of its place in [`Launch::bindings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Index into [`Plan::buffers`].
    pub buffer: usize,
    /// How it is used.
    pub access: Access,
    /// Bytes of weights and state that are moved to or from memory; where that is more in some steps than in others, the mean. Scratch
    /// and vocabulary-sized results count as nothing: they stay in the caches.
    pub bytes: u64,
    /// What is added for each position that came before.
    pub bytes_per_position: u64,
    /// Multiplications with what is in it, those of unused rows of tiles too: weights, keys, values or recurrent state. Of all else
    /// there are too few to count.
    pub multiply_adds: u64,
    /// What is added for each position that came before.
    pub multiply_adds_per_position: u64,
    /// Bytes into the buffer at which it is bound.
    pub offset: usize,
    /// Bytes from there on that the launch may touch.
    pub length: usize,
}

impl Binding {
    /// Bytes of the buffer that the launch may touch.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.length
    }
}

/// A kernel that a step launches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Its name in the library.
    pub kernel: &'static str,
    /// Threadgroups.
    pub grid: [usize; 3],
    /// Threads of a threadgroup.
    pub threads: usize,
    /// Bytes of each threadgroup memory argument, by index.
    pub threadgroup_memory: Vec<usize>,
    /// Buffers by index.
    pub bindings: Vec<Binding>,
    /// From 1. Launches of one stage may run together; a stage waits for all of the one before it, so an encoder needs a
    /// barrier wherever it rises, and nowhere else.
    pub stage: usize,
}

impl Launch {
    /// Bytes of weights and state that it moves at the start of a sequence.
    pub fn bytes(&self) -> u64 {
        self.bindings.iter().map(|b| b.bytes).sum()
    }

    /// What each position adds to that.
    pub fn bytes_per_position(&self) -> u64 {
        self.bindings.iter().map(|b| b.bytes_per_position).sum()
    }

    /// Multiplications of it at the start of a sequence.
    pub fn multiply_adds(&self) -> u64 {
        self.bindings.iter().map(|b| b.multiply_adds).sum()
    }

    /// What each position adds to that.
    pub fn multiply_adds_per_position(&self) -> u64 {
        self.bindings.iter().map(|b| b.multiply_adds_per_position).sum()
    }
}

/// What a step does with one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Segment {
    /// How many tokens are fed.
    pub tokens: usize,
    /// Most tokens that the sequence has room for.
    pub capacity: usize,
    /// Which logits are wanted.
    pub want: Want,
}

/// Which of a segment's tokens logits are wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Want {
    /// None: only the state advances.
    Nothing,
    /// The last one.
    Last,
    /// All.
    All,
}

impl Want {
    /// Rows of logits of a segment of so many tokens.
    pub fn rows(self, tokens: usize) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Last => 1,
            Self::All => tokens,
        }
    }
}

/// What a step launches, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// All memory.
    pub buffers: Vec<Buffer>,
    /// All launches.
    pub launches: Vec<Launch>,
}

impl Plan {
    /// Stages that wait for each other.
    pub fn stages(&self) -> usize {
        self.launches.iter().map(|l| l.stage).max().unwrap_or(0)
    }

    /// Bytes of weights and state that a step moves at the start of a sequence.
    pub fn bytes(&self) -> u64 {
        self.launches.iter().map(Launch::bytes).sum()
    }

    /// What each position adds to that.
    pub fn bytes_per_position(&self) -> u64 {
        self.launches.iter().map(Launch::bytes_per_position).sum()
    }

    /// Bytes of recurrent and convolution state that a step moves.
    pub fn state_bytes(&self) -> u64 {
        let of_state = |b: &&Binding| {
            let contents = &self.buffers[b.buffer].contents;
            matches!(contents, Contents::State(_, state) if !matches!(state, State::Keys | State::Values))
        };
        self.launches.iter().flat_map(|l| &l.bindings).filter(of_state).map(|b| b.bytes).sum()
    }

    /// The segment that a launch is of; 0 for what is of all.
    pub fn segment_of(&self, launch: &Launch) -> usize {
        launch.bindings.iter().map(|b| self.buffers[b.buffer].segment).max().unwrap_or(0)
    }

    /// Index of the buffer with these contents; of the first segment, if each has one.
    pub fn buffer(&self, contents: &Contents) -> Option<usize> {
        self.buffer_of(0, contents)
    }

    /// Index of a segment's buffer with these contents.
    pub fn buffer_of(&self, segment: usize, contents: &Contents) -> Option<usize> {
        self.buffers.iter().position(|b| b.segment == segment && b.contents == *contents)
    }
}

/// A step can't be planned: for most reasons, because the kernels aren't written for this model.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// A shape.
    #[error(
        "the Metal kernels can't run this model: {field} is {found}, expected {expected}; use --device cpu"
    )]
    Shape {
        /// Which.
        field: &'static str,
        /// Of the model.
        found: usize,
        /// What would do.
        expected: &'static str,
    },
    /// The form of a matrix.
    #[error(
        "the Metal kernels can't run this model: {module} is {found}, expected {expected}; use --device cpu"
    )]
    Form {
        /// Its path.
        module: String,
        /// How it is stored.
        found: String,
        /// How the first of its kind is stored.
        expected: String,
    },
    /// Segments that make no step.
    #[error("a step can't be planned: {0}")]
    Step(String),
}

/// Plans a decode step of one sequence of at most `capacity` tokens: see [`plan_step`].
pub fn plan(config: &Config, capacity: usize, features: impl Into<Features>) -> Result<Plan, PlanError> {
    plan_step(config, features, &[Segment { tokens: 1, capacity, want: Want::Last }])
}

/// Plans a step: one token of a sequence or of several, a draft, a chunk of a prompt, or all of it at once. A sequence must have room
/// for its tokens, and a token must be in the vocabulary; the kernels check neither.
pub fn plan_step(
    config: &Config,
    features: impl Into<Features>,
    segments: &[Segment],
) -> Result<Plan, PlanError> {
    check_shapes(config)?;
    check_segments(segments)?;
    let modules = modules(config);
    let bits = bits(config);
    modules.iter().try_for_each(|module| check_form(config, bits, module))?;
    let one = matches!(segments, [Segment { tokens: 1, want: Want::Last | Want::All, .. }]);
    let mut builder = Builder::new(config, modules, segments, features.into());
    (0..segments.len()).for_each(|segment| builder.embed(segment));
    for (layer, kind) in config.layers.iter().enumerate() {
        let rows = if layer + 1 < config.layers.len() { builder.all_rows() } else { builder.wanted_rows() };
        match (kind, one) {
            (LayerKind::Gdn, true) => builder.gdn(layer),
            (LayerKind::Gdn, false) => builder.gdn_rows(layer, !rows.is_empty()),
            (LayerKind::Attention, true) => builder.attention(layer),
            (LayerKind::Attention, false) => builder.attention_rows(layer, !rows.is_empty()),
        }
        builder.moe_rows(layer, rows);
    }
    if one {
        builder.head()
    } else {
        builder.head_rows()
    }
    Ok(builder.finish())
}

/// Refuses segments that make no step.
fn check_segments(segments: &[Segment]) -> Result<(), PlanError> {
    let problem = |text: String| Err(PlanError::Step(text));
    if segments.is_empty() {
        return problem("it has no segments, expected at least one".to_owned());
    }
    for (i, &Segment { tokens, capacity, .. }) in segments.iter().enumerate() {
        if tokens == 0 || tokens > capacity {
            return problem(format!(
                "segment {i} has {tokens} tokens, expected 1 to its capacity of {capacity}"
            ));
        }
    }
    let tokens: usize = segments.iter().map(|s| s.tokens).sum();
    if tokens > MOST_TOKENS {
        return problem(format!("it has {tokens} tokens, expected at most {MOST_TOKENS}"));
    }
    Ok(())
}

/// Refuses shapes that the kernels aren't written for.
fn check_shapes(c: &Config) -> Result<(), PlanError> {
    let (g, a, m) = (&c.gdn, &c.attention, &c.moe);
    let multiple = |n: usize, of: usize| n > 0 && n.is_multiple_of(of);
    let shared_by = a.heads / a.kv_heads;
    let checks = [
        ("hidden_size", c.hidden_size, multiple(c.hidden_size, 64), "a multiple of 64"),
        (
            "vocab_size",
            c.vocab_size,
            multiple(c.vocab_size, 4) && c.vocab_size <= 1 << 19,
            "a multiple of 4, at most 524288",
        ),
        ("linear_num_value_heads", g.value_heads, multiple(g.value_heads, 4), "a multiple of 4"),
        (
            "linear_key_head_dim",
            g.key_dim,
            multiple(g.key_dim, 8) && g.key_dim <= 256,
            "a multiple of 8, at most 256",
        ),
        ("linear_value_head_dim", g.value_dim, multiple(g.value_dim, 32), "a multiple of 32"),
        (
            "head_dim",
            a.head_dim,
            multiple(a.head_dim, 32) && a.head_dim <= 256,
            "a multiple of 32, at most 256",
        ),
        (
            "query heads per K/V head",
            shared_by,
            shared_by <= 4 || matches!(shared_by, 8 | 16),
            "at most 4, or 8 or 16",
        ),
        (
            "num_experts",
            m.experts,
            multiple(m.experts, 4) && m.experts <= 1024,
            "a multiple of 4, at most 1024",
        ),
        ("moe_intermediate_size", m.expert_width, multiple(m.expert_width, 64), "a multiple of 64"),
        ("shared_expert_intermediate_size", m.shared_width, multiple(m.shared_width, 64), "a multiple of 64"),
    ];
    match checks.into_iter().find(|(_, _, good, _)| !good) {
        Some((field, found, _, expected)) => Err(PlanError::Shape { field, found, expected }),
        None => Ok(()),
    }
}

/// Bits of codes, for which there are kernels of their own; 16: values of bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bits {
    /// Of all matrices but the routers'.
    pub matrices: usize,
    /// Of routers and of the gates of shared experts.
    pub routers: usize,
}

/// Those of a model, by its first matrices of either kind: 4 and 8, as the published 4-bit model has them, or bf16.
pub fn bits(config: &Config) -> Bits {
    let modules = modules(config);
    let quantised = |routers: bool| {
        let first = modules.iter().find(|m| is_matrix(m) && is_router(&m.name) == routers);
        first.is_some_and(|module| module.affine(config).is_some())
    };
    Bits { matrices: if quantised(false) { 4 } else { 16 }, routers: if quantised(true) { 8 } else { 16 } }
}

/// Whether a module is one of the small matrices that choose experts.
pub fn is_router(name: &str) -> bool {
    name.ends_with(".mlp.gate") || name.ends_with(".shared_expert_gate")
}

fn is_matrix(module: &Module) -> bool {
    matches!(module.kind, ModuleKind::Matrix { .. } | ModuleKind::Experts { .. })
}

/// Refuses matrices that aren't stored as the first ones are.
fn check_form(config: &Config, bits: Bits, module: &Module) -> Result<(), PlanError> {
    let expected = if is_router(&module.name) { bits.routers } else { bits.matrices };
    let affine = module.affine(config);
    let right = match affine {
        Some(Affine { bits, group_size }) => (bits, group_size) == (expected, GROUP),
        None => expected == 16,
    };
    if right || !is_matrix(module) {
        return Ok(());
    }
    let name = |bits, group_size| match bits {
        16 => "not quantised".to_owned(),
        bits => format!("{bits} bits in groups of {group_size}"),
    };
    let found = affine.map_or_else(|| name(16, 0), |affine| name(affine.bits, affine.group_size));
    Err(PlanError::Form { module: module.name.clone(), found, expected: name(expected, GROUP) })
}

#[cfg(test)]
mod count;
#[cfg(test)]
mod tests;
