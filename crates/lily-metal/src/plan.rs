//! What a decode step launches, as plain data: a host has only to encode it.
//!
//! A step reads a token and a position from device memory, advances the state of one sequence by that token, and leaves the
//! logits, the token of the largest one as the next step's, and the next position. So the same list serves every step.

use lily_model::config::{Affine, Config, LayerKind};
use lily_model::manifest::{Module, ModuleKind, modules};

use crate::launches::Builder;

/// Parts that the positions of a sequence are divided into for attention, at most; each is 64 positions or more.
pub const PARTS: usize = 32;

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

/// What a buffer holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Contents {
    /// Codes of a quantised matrix, or of the matrices of all experts one behind the other, as in an MLX checkpoint. Named as in
    /// [`lily_model::manifest`]. Aligned to 4 bytes.
    Codes(String),
    /// Its scales, bf16.
    Scales(String),
    /// Its biases, bf16.
    Biases(String),
    /// A vector, f32, whatever the checkpoint has it in.
    Vector(String),
    /// [`crate::rope::turns`].
    Turns,
    /// The token to read, u32; the step leaves the next one.
    Token,
    /// How many tokens of the sequence came before, u32; the step adds one.
    Position,
    /// u32: 1 if a logit of the step is not finite, else 0.
    Broken,
    /// f32, `[vocab]`.
    Logits,
    /// State of a layer. All zeros at the start of a sequence.
    State(usize, State),
    /// Values on the way from one launch to another; all layers use the same.
    Scratch(&'static str),
}

/// State of a layer of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Gated DeltaNet: inputs of the convolution, f32 `[taps, channels]`. Those of position p are in row p % taps.
    Conv,
    /// Gated DeltaNet: f32 `[value_heads, key_dim, value_dim]`.
    Recurrent,
    /// Attention: normed and rotated keys, `[capacity, kv_heads, head_dim]`.
    Keys,
    /// Attention: values, `[capacity, kv_heads, head_dim]`.
    Values,
}

/// Memory that launches are bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// What is in it.
    pub contents: Contents,
    /// Its length.
    pub bytes: usize,
}

/// How a kernel uses a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It only reads.
    Read,
    /// It only writes.
    Write,
    /// Both, but no thread reads what another one writes.
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
    /// Bytes of weights and state that are moved to or from memory. Scratch and vocabulary-sized results count as nothing:
    /// they stay in the caches.
    pub bytes: u64,
    /// What is added for each position that came before.
    pub bytes_per_position: u64,
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
}

/// What a decode step launches, in order.
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

    /// Index of the buffer with these contents.
    pub fn buffer(&self, contents: &Contents) -> Option<usize> {
        self.buffers.iter().position(|b| b.contents == *contents)
    }
}

/// The kernels aren't written for this model.
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
        "the Metal kernels can't run this model: {module} is {found}, expected {expected} bits in groups of 64; use --device cpu"
    )]
    Form {
        /// Its path.
        module: String,
        /// How it is stored.
        found: String,
        /// Bits of its codes.
        expected: usize,
    },
}

/// Plans a decode step of one sequence of at most `capacity` tokens: at position `capacity` the step must not run, and a token must be
/// in the vocabulary; the kernels check neither.
pub fn plan(config: &Config, capacity: usize, kv: KvType) -> Result<Plan, PlanError> {
    check_shapes(config)?;
    let modules = modules(config);
    modules.iter().try_for_each(|module| check_form(config, module))?;
    let mut builder = Builder::new(config, modules, capacity, kv);
    builder.embed();
    for (layer, kind) in config.layers.iter().enumerate() {
        match kind {
            LayerKind::Gdn => builder.gdn(layer),
            LayerKind::Attention => builder.attention(layer),
        }
        builder.moe(layer);
    }
    builder.head();
    Ok(builder.finish())
}

/// Refuses shapes that the kernels aren't written for.
fn check_shapes(c: &Config) -> Result<(), PlanError> {
    let (g, a, m) = (&c.gdn, &c.attention, &c.moe);
    let multiple = |n: usize, of: usize| n > 0 && n.is_multiple_of(of);
    let shared_by = a.heads / a.kv_heads;
    let checks = [
        ("hidden_size", c.hidden_size, multiple(c.hidden_size, 64), "a multiple of 64"),
        ("vocab_size", c.vocab_size, multiple(c.vocab_size, 4), "a multiple of 4"),
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

/// Refuses matrices that aren't quantised as the published 4-bit model's are.
fn check_form(config: &Config, module: &Module) -> Result<(), PlanError> {
    if !matches!(module.kind, ModuleKind::Matrix { .. } | ModuleKind::Experts { .. }) {
        return Ok(());
    }
    let router = module.name.ends_with(".mlp.gate") || module.name.ends_with(".shared_expert_gate");
    let expected = if router { 8 } else { 4 };
    match module.affine(config) {
        Some(Affine { bits, group_size: 64 }) if bits == expected => Ok(()),
        other => {
            let found = match other {
                Some(Affine { bits, group_size }) => format!("{bits} bits in groups of {group_size}"),
                None => "not quantised".to_owned(),
            };
            Err(PlanError::Form { module: module.name.clone(), found, expected })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use lily_model::footprint::Footprint;
    use lily_model::presets::CONFIG_35B_A3B;

    use super::*;

    fn real() -> (Config, Plan) {
        let config = Config::from_json(CONFIG_35B_A3B).unwrap();
        let plan = plan(&config, 4096, KvType::Bf16).unwrap();
        (config, plan)
    }

    #[test]
    fn a_token_of_the_real_model_takes_at_most_270_kernels_and_stages() {
        let (_, plan) = real();
        assert_eq!((plan.launches.len(), plan.stages()), (253, 253));
    }

    #[test]
    fn a_token_moves_little_more_than_it_must() {
        let (config, plan) = real();
        let f = Footprint::new(&config);
        let least = f.read_per_token() + 2 * 4 * (f.recurrent_values + f.conv_values);
        let ratio = plan.bytes() as f64 / least as f64;
        println!("{} bytes, {ratio:.4} times what must be", plan.bytes());
        assert!((1.0..1.05).contains(&ratio), "{ratio}");
        assert_eq!(plan.bytes_per_position(), 2 * f.kv_values_per_token);
    }

    /// What a launch touches conflicts with another's if one of them writes it.
    fn conflict(a: &Launch, b: &Launch) -> bool {
        let of = |l: &Launch, f: fn(Access) -> bool| -> HashSet<usize> {
            l.bindings.iter().filter(|b| f(b.access)).map(|b| b.buffer).collect()
        };
        let any: fn(Access) -> bool = |_| true;
        !of(a, Access::writes).is_disjoint(&of(b, any)) || !of(a, any).is_disjoint(&of(b, Access::writes))
    }

    #[test]
    fn stages_follow_from_reads_and_writes() {
        let (_, plan) = real();
        for (i, launch) in plan.launches.iter().enumerate() {
            let before = plan.launches[..i].iter().filter(|other| conflict(other, launch));
            let needed = before.map(|other| other.stage + 1).max().unwrap_or(1);
            assert_eq!(launch.stage, needed, "launch {i}, {}", launch.kernel);
        }
    }

    #[test]
    fn everything_that_is_read_was_written_or_is_there_from_the_start() {
        let (_, plan) = real();
        let mut written = HashSet::new();
        for launch in &plan.launches {
            for b in launch.bindings.iter().filter(|b| b.access.reads()) {
                let contents = &plan.buffers[b.buffer].contents;
                let must = matches!(contents, Contents::Scratch(_) | Contents::Logits | Contents::Broken);
                assert!(!must || written.contains(&b.buffer), "{} reads {contents:?}", launch.kernel);
            }
            written.extend(launch.bindings.iter().filter(|b| b.access.writes()).map(|b| b.buffer));
        }
        let weights = |c: &Contents| {
            matches!(c, Contents::Codes(_) | Contents::Scales(_) | Contents::Biases(_) | Contents::Vector(_))
        };
        assert!(written.iter().all(|&b| !weights(&plan.buffers[b].contents)), "weights are written");
    }

    #[test]
    fn launches_keep_to_the_limits_of_the_device() {
        let (_, plan) = real();
        for l in &plan.launches {
            assert!(l.threads.is_multiple_of(LANES) && l.threads <= MOST_THREADS, "{}", l.kernel);
            assert!(l.threadgroup_memory.iter().sum::<usize>() <= THREADGROUP_MEMORY, "{}", l.kernel);
            let aligned = |n: &usize| n.is_multiple_of(THREADGROUP_MEMORY_ALIGNMENT);
            assert!(l.threadgroup_memory.iter().all(aligned), "{}", l.kernel);
            assert!(l.bindings.len() <= MOST_BUFFERS, "{}", l.kernel);
            let buffers: HashSet<_> = l.bindings.iter().map(|b| b.buffer).collect();
            assert_eq!(buffers.len(), l.bindings.len(), "{} has a buffer twice", l.kernel);
        }
    }

    #[test]
    fn every_weight_is_used() {
        let (config, plan) = real();
        for module in modules(&config) {
            let name = module.name.clone();
            let found =
                [Contents::Codes(name.clone()), Contents::Vector(name)].map(|c| plan.buffer(&c).is_some());
            assert!(found.contains(&true), "{}", module.name);
        }
        // Codes, scales and biases as in the file; vectors as f32 instead of bf16.
        let vectors = plan.buffers.iter().filter(|b| matches!(b.contents, Contents::Vector(_)));
        let vectors: usize = vectors.map(|b| b.bytes).sum();
        let matrices = plan
            .buffers
            .iter()
            .filter(|b| matches!(b.contents, Contents::Codes(_) | Contents::Scales(_) | Contents::Biases(_)));
        let matrices: usize = matrices.map(|b| b.bytes).sum();
        assert_eq!((matrices + vectors / 2) as u64, Footprint::new(&config).stored());
    }

    #[test]
    fn models_that_the_kernels_are_not_written_for_are_refused() {
        let refused = |change: fn(&mut Config)| {
            let mut config = Config::from_json(CONFIG_35B_A3B).unwrap();
            change(&mut config);
            plan(&config, 64, KvType::Bf16).unwrap_err().to_string()
        };
        let e = refused(|c| c.attention.head_dim = 80);
        assert!(
            e.contains("head_dim is 80, expected a multiple of 32, at most 256; use --device cpu"),
            "{e}"
        );
        let e = refused(|c| c.attention.kv_heads = 3);
        assert!(e.contains("query heads per K/V head is 5, expected at most 4, or 8 or 16"), "{e}");
        let e = refused(|c| c.quantization = None);
        assert!(e.contains("is not quantised, expected "), "{e}");
        let e = refused(|c| {
            if let Some(q) = &mut c.quantization {
                q.overrides.clear();
            }
        });
        assert!(e.contains("is 4 bits in groups of 64, expected 8 bits in groups of 64"), "{e}");
    }
}
