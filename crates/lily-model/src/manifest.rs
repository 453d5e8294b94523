//! Every module of the model with its shape, in one list: what a checkpoint must hold, what `synth` writes,
//! and what is counted when bytes are.

use crate::config::{Affine, Config, GdnConfig, LayerKind};

/// A module of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Module {
    /// Name inside the text model, in MLX form without prefix: `layers.0.mlp.gate`, `lm_head`.
    pub name: String,
    /// What it is.
    pub kind: ModuleKind,
    /// The part of the model that it is counted under.
    pub part: Part,
}

/// Shapes of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModuleKind {
    /// `y = W x`, W `[rows, cols]`; quantised if the config says so.
    Matrix {
        /// Outputs.
        rows: usize,
        /// Inputs.
        cols: usize,
    },
    /// One matrix per expert, `[experts, rows, cols]`.
    Experts {
        /// Matrices.
        experts: usize,
        /// Outputs of each.
        rows: usize,
        /// Inputs of each.
        cols: usize,
    },
    /// Gain of an RMS norm that Hugging Face files store less one.
    Norm(usize),
    /// A vector that both layouts store alike, with `.weight` behind its name.
    Gain(usize),
    /// A vector that both layouts store alike, under its bare name.
    Vector(usize),
    /// Depthwise convolution: `[channels, taps, 1]` in MLX files, `[channels, 1, taps]` in Hugging Face ones.
    Conv {
        /// Channels.
        channels: usize,
        /// Taps; the last one meets the newest input.
        taps: usize,
    },
}

/// Parts of the model that bytes are counted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Token embedding; one row is read per token.
    Embedding,
    /// Gated DeltaNet mixers.
    Gdn,
    /// Gated attention mixers.
    Attention,
    /// Routers, their shared expert, and the layers' second norms.
    Moe,
    /// Routed experts; `experts_per_token` of them are read per token.
    Experts,
    /// Final norm and lm_head.
    Head,
}

impl Part {
    /// Name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Gdn => "gated delta net",
            Self::Attention => "attention",
            Self::Moe => "router and shared expert",
            Self::Experts => "routed experts",
            Self::Head => "lm_head",
        }
    }
}

/// All modules in the order of the model.
pub fn modules(c: &Config) -> Vec<Module> {
    let mut list = List(Vec::new());
    let (h, v) = (c.hidden_size, c.vocab_size);
    list.matrix("embed_tokens", v, h, Part::Embedding);
    for (i, kind) in c.layers.iter().enumerate() {
        list.layer(c, &format!("layers.{i}."), *kind);
    }
    list.add("norm", ModuleKind::Norm(h), Part::Head);
    if !c.tie_word_embeddings {
        list.matrix("lm_head", v, h, Part::Head);
    }
    list.0
}

struct List(Vec<Module>);

impl List {
    fn add(&mut self, name: impl Into<String>, kind: ModuleKind, part: Part) {
        self.0.push(Module { name: name.into(), kind, part });
    }

    fn matrix(&mut self, name: impl Into<String>, rows: usize, cols: usize, part: Part) {
        self.add(name, ModuleKind::Matrix { rows, cols }, part);
    }

    fn layer(&mut self, c: &Config, layer: &str, kind: LayerKind) {
        let h = c.hidden_size;
        let mixer = if kind == LayerKind::Gdn { Part::Gdn } else { Part::Attention };
        self.add(format!("{layer}input_layernorm"), ModuleKind::Norm(h), mixer);
        match kind {
            LayerKind::Gdn => self.gdn(&c.gdn, h, &format!("{layer}linear_attn.")),
            LayerKind::Attention => self.attention(c, &format!("{layer}self_attn.")),
        }
        self.add(format!("{layer}post_attention_layernorm"), ModuleKind::Norm(h), Part::Moe);
        self.moe(c, &format!("{layer}mlp."));
    }

    fn gdn(&mut self, g: &GdnConfig, h: usize, p: &str) {
        use ModuleKind::{Conv, Gain, Vector};
        let part = Part::Gdn;
        self.matrix(format!("{p}in_proj_qkv"), g.conv_channels(), h, part);
        self.matrix(format!("{p}in_proj_z"), g.value_width(), h, part);
        self.matrix(format!("{p}in_proj_b"), g.value_heads, h, part);
        self.matrix(format!("{p}in_proj_a"), g.value_heads, h, part);
        self.add(format!("{p}conv1d"), Conv { channels: g.conv_channels(), taps: g.conv_kernel }, part);
        self.add(format!("{p}A_log"), Vector(g.value_heads), part);
        self.add(format!("{p}dt_bias"), Vector(g.value_heads), part);
        self.add(format!("{p}norm"), Gain(g.value_dim), part);
        self.matrix(format!("{p}out_proj"), h, g.value_width(), part);
    }

    fn attention(&mut self, c: &Config, p: &str) {
        let (a, h) = (&c.attention, c.hidden_size);
        let part = Part::Attention;
        self.matrix(format!("{p}q_proj"), 2 * a.query_width(), h, part);
        self.matrix(format!("{p}k_proj"), a.kv_width(), h, part);
        self.matrix(format!("{p}v_proj"), a.kv_width(), h, part);
        self.matrix(format!("{p}o_proj"), h, a.query_width(), part);
        self.add(format!("{p}q_norm"), ModuleKind::Norm(a.head_dim), part);
        self.add(format!("{p}k_norm"), ModuleKind::Norm(a.head_dim), part);
    }

    fn moe(&mut self, c: &Config, p: &str) {
        let (m, h) = (&c.moe, c.hidden_size);
        self.matrix(format!("{p}gate"), m.experts, h, Part::Moe);
        for (name, rows, cols) in [
            ("gate_proj", m.expert_width, h),
            ("up_proj", m.expert_width, h),
            ("down_proj", h, m.expert_width),
        ] {
            let kind = ModuleKind::Experts { experts: m.experts, rows, cols };
            self.add(format!("{p}switch_mlp.{name}"), kind, Part::Experts);
        }
        self.matrix(format!("{p}shared_expert.gate_proj"), m.shared_width, h, Part::Moe);
        self.matrix(format!("{p}shared_expert.up_proj"), m.shared_width, h, Part::Moe);
        self.matrix(format!("{p}shared_expert.down_proj"), h, m.shared_width, Part::Moe);
        self.matrix(format!("{p}shared_expert_gate"), 1, h, Part::Moe);
    }
}

/// Path of a module in an MLX checkpoint.
pub fn mlx_path(name: &str) -> String {
    if name == "lm_head" { format!("language_model.{name}") } else { format!("language_model.model.{name}") }
}

impl Module {
    /// Quantisation of the module in an MLX checkpoint of this config.
    pub fn affine(&self, config: &Config) -> Option<Affine> {
        match self.kind {
            ModuleKind::Matrix { .. } | ModuleKind::Experts { .. } => {
                config.quantization.as_ref().and_then(|q| q.of(&mlx_path(&self.name)))
            }
            _ => None,
        }
    }

    /// Values in the module.
    pub fn elements(&self) -> u64 {
        let n = |a: usize, b: usize| a as u64 * b as u64;
        match self.kind {
            ModuleKind::Matrix { rows, cols } => n(rows, cols),
            ModuleKind::Experts { experts, rows, cols } => experts as u64 * n(rows, cols),
            ModuleKind::Norm(len) | ModuleKind::Gain(len) | ModuleKind::Vector(len) => len as u64,
            ModuleKind::Conv { channels, taps } => n(channels, taps),
        }
    }

    /// Bytes in an MLX checkpoint of this config: codes with a bf16 scale and bias per group, all else bf16.
    pub fn bytes(&self, config: &Config) -> u64 {
        match self.affine(config) {
            Some(Affine { bits, group_size }) => {
                self.elements() * bits as u64 / 8 + self.elements() / group_size as u64 * 4
            }
            None => self.elements() * 2,
        }
    }
}
