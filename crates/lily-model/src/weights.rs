//! Every tensor of a checkpoint in its place. Loading is fail-closed: each tensor is used, or on the list of
//! names to skip, or the load is refused.

use std::collections::{BTreeMap, HashMap};

use safetensors::Dtype;
use tracing::info;

use crate::checkpoint::{Checkpoint, Tensor};
use crate::config::{Affine, Config, LayerKind};
use crate::manifest::{Module, ModuleKind, modules};
use crate::matrix::{FloatType, Floats, Form, Matrix};

/// Tensors that the text model doesn't use, by the beginning of their names.
const SKIPPED: [(&str, &str); 3] = [
    ("vision_tower.", "the vision tower (MLX names)"),
    ("model.visual.", "the vision tower (Hugging Face names)"),
    ("mtp.", "the multi-token-prediction head"),
];

/// Beginnings of the names of the text model's tensors, by writer; longer ones first.
const PREFIXES: [&str; 3] = ["language_model.model.", "model.language_model.", "model."];

/// All weights of the model. Vectors are f32 in memory, matrices stay in the mapped files.
#[derive(Debug)]
pub struct Weights {
    /// `[vocab, hidden]`.
    pub embedding: Matrix,
    /// In order.
    pub layers: Vec<Layer>,
    /// Gain of the final norm, `[hidden]`.
    pub norm: Vec<f32>,
    /// `[vocab, hidden]`.
    pub lm_head: Matrix,
}

/// One decoder layer.
#[derive(Debug)]
pub struct Layer {
    /// Gain of the norm before the mixer, `[hidden]`.
    pub input_norm: Vec<f32>,
    /// Mixes positions.
    pub mixer: Mixer,
    /// Gain of the norm before the mixture of experts, `[hidden]`.
    pub post_attention_norm: Vec<f32>,
    /// Mixes channels.
    pub moe: Moe,
}

/// The part of a layer that mixes positions.
#[derive(Debug)]
pub enum Mixer {
    /// Gated DeltaNet.
    Gdn(Gdn),
    /// Gated softmax attention.
    Attention(Attention),
}

/// Weights of a Gated DeltaNet mixer.
#[derive(Debug)]
pub struct Gdn {
    /// `[q | k | v, hidden]`.
    pub in_proj_qkv: Matrix,
    /// The output gate, `[value_heads * value_dim, hidden]`.
    pub in_proj_z: Matrix,
    /// The write strength, `[value_heads, hidden]`.
    pub in_proj_b: Matrix,
    /// The decay, `[value_heads, hidden]`.
    pub in_proj_a: Matrix,
    /// `[channels, taps]`, row-major; the last tap meets the newest input.
    pub conv: Vec<f32>,
    /// Logarithm of the decay rate, `[value_heads]`.
    pub a_log: Vec<f32>,
    /// Added to the decay before softplus, `[value_heads]`.
    pub dt_bias: Vec<f32>,
    /// Gain of the gated norm, `[value_dim]`, shared by the heads.
    pub norm: Vec<f32>,
    /// `[hidden, value_heads * value_dim]`.
    pub out_proj: Matrix,
}

/// Weights of a gated attention mixer.
#[derive(Debug)]
pub struct Attention {
    /// Per head: `head_dim` rows of query, then `head_dim` rows of gate.
    pub q_proj: Matrix,
    /// `[kv_heads * head_dim, hidden]`.
    pub k_proj: Matrix,
    /// `[kv_heads * head_dim, hidden]`.
    pub v_proj: Matrix,
    /// `[hidden, heads * head_dim]`.
    pub o_proj: Matrix,
    /// Gain of the norm of each query head, `[head_dim]`.
    pub q_norm: Vec<f32>,
    /// Gain of the norm of each key head, `[head_dim]`.
    pub k_norm: Vec<f32>,
}

/// Weights of a mixture of experts.
#[derive(Debug)]
pub struct Moe {
    /// `[experts, hidden]`.
    pub router: Matrix,
    /// Routed experts.
    pub experts: Vec<Expert>,
    /// The expert that every token uses.
    pub shared: Expert,
    /// `[1, hidden]`.
    pub shared_gate: Matrix,
}

/// One SwiGLU feed-forward network.
#[derive(Debug)]
pub struct Expert {
    /// `[width, hidden]`.
    pub gate: Matrix,
    /// `[width, hidden]`.
    pub up: Matrix,
    /// `[hidden, width]`.
    pub down: Matrix,
}

/// Why a checkpoint does not hold this model.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// A tensor is missing.
    #[error("tensor {name} is missing; expected it with shape {expected:?}")]
    Missing {
        /// Name, or names by which it could have gone.
        name: String,
        /// Its shape.
        expected: Vec<usize>,
    },
    /// A tensor that the model has no place for.
    #[error(
        "tensor {name} is not part of this model (and {others} more like it): the checkpoint is of another architecture or version"
    )]
    Unexpected {
        /// The first.
        name: String,
        /// How many more.
        others: usize,
    },
    /// Two tensors for one place.
    #[error("tensors {0} and {1} are the same part of the model: the checkpoint mixes two layouts")]
    Twice(String, String),
    /// A tensor has the wrong shape.
    #[error("tensor {name} has shape {found:?}, expected {expected:?}{why}")]
    Shape {
        /// Its name.
        name: String,
        /// By config.json.
        expected: Vec<usize>,
        /// By the file.
        found: Vec<usize>,
        /// How the expectation came about, if that helps.
        why: String,
    },
    /// A tensor has the wrong element type.
    #[error("tensor {name} holds {found:?}, expected {expected}")]
    Type {
        /// Its name.
        name: String,
        /// What could be used.
        expected: &'static str,
        /// By the file.
        found: Dtype,
    },
    /// Config and files disagree on whether a matrix is quantised.
    #[error("tensor {name}: {problem}")]
    Quantization {
        /// Its name.
        name: String,
        /// Expected and found.
        problem: String,
    },
}

impl Weights {
    /// Gives every tensor its place, and checks names, types and shapes before anything is read.
    pub fn load(checkpoint: &Checkpoint, config: &Config) -> Result<Self, WeightsError> {
        let mut loader = Loader::new(checkpoint, config)?;
        let mut parts = HashMap::new();
        for module in modules(config) {
            let loaded = loader.load(&module)?;
            parts.insert(module.name, loaded);
        }
        loader.finish()?;
        Ok(assemble(Parts(parts), config))
    }

    /// A number that tells models apart: their shapes, all gains of their norms, and what else `form` says of a backend's state.
    pub fn fingerprint(&self, config: &Config, form: &str) -> u32 {
        let mut crc = crc32fast::Hasher::new();
        crc.update(format!("{config:?}{form}").as_bytes());
        let gains = |l: &'_ Layer| [l.input_norm.clone(), l.post_attention_norm.clone()].concat();
        for x in self.layers.iter().flat_map(gains).chain(self.norm.clone()) {
            crc.update(&x.to_le_bytes());
        }
        crc.finalize()
    }
}

/// A module, found and checked but not read.
enum Loaded {
    /// Values, and what is added to each.
    Vector(Floats, f32),
    Matrices(Vec<Matrix>),
}

/// Which of the two ways to lay out tensors the files follow.
#[derive(Clone, Copy, PartialEq)]
enum Layout {
    /// Norm gains less one, conv `[C, 1, K]`, experts fused in `gate_up_proj`.
    HuggingFace,
    /// Norm gains as used, conv `[C, K, 1]`, experts under `switch_mlp`.
    Mlx,
}

/// Tensors of the text model by their name without prefix, less those already used.
struct Loader<'a> {
    config: &'a Config,
    layout: Layout,
    unused: BTreeMap<String, (&'a str, &'a Tensor)>,
}

impl<'a> Loader<'a> {
    fn new(checkpoint: &'a Checkpoint, config: &'a Config) -> Result<Self, WeightsError> {
        let mut unused = BTreeMap::<String, (&str, &Tensor)>::new();
        let mut skipped = [(0usize, 0usize); SKIPPED.len()];
        for (name, tensor) in checkpoint.iter() {
            if let Some(i) = SKIPPED.iter().position(|(prefix, _)| name.starts_with(prefix)) {
                skipped[i].0 += 1;
                skipped[i].1 += tensor.data.len();
                continue;
            }
            let key = PREFIXES.iter().find_map(|p| name.strip_prefix(p));
            let key = key.or_else(|| name.strip_prefix("language_model.")).unwrap_or(name);
            if let Some((other, _)) = unused.insert(key.to_owned(), (name, tensor)) {
                return Err(WeightsError::Twice(other.to_owned(), name.to_owned()));
            }
        }
        for ((prefix, what), (count, bytes)) in SKIPPED.iter().zip(skipped) {
            if count > 0 {
                info!("skipped {what}: {count} tensors {prefix}*, {bytes} bytes; only text is served");
            }
        }
        // The shape of a convolution is the one sign that no writer gets wrong; see docs/model-spec.md, section 5.
        let conv = unused.iter().find(|(key, _)| key.ends_with(".conv1d.weight"));
        let mlx = conv.is_some_and(|(_, (_, tensor))| tensor.shape.last() == Some(&1));
        Ok(Self { config, layout: if mlx { Layout::Mlx } else { Layout::HuggingFace }, unused })
    }

    /// Takes a tensor out of the unused ones.
    fn take(&mut self, key: &str, expected: &[usize]) -> Result<(&'a str, &'a Tensor), WeightsError> {
        let missing = || WeightsError::Missing { name: key.to_owned(), expected: expected.to_vec() };
        self.unused.remove(key).ok_or_else(missing)
    }

    fn load(&mut self, module: &Module) -> Result<Loaded, WeightsError> {
        let name = &module.name;
        let key = format!("{name}.weight");
        Ok(match module.kind {
            ModuleKind::Norm(len) => {
                let shift = if self.layout == Layout::HuggingFace { 1.0 } else { 0.0 };
                Loaded::Vector(self.vector(&key, &[len])?, shift)
            }
            ModuleKind::Gain(len) => Loaded::Vector(self.vector(&key, &[len])?, 0.0),
            ModuleKind::Vector(len) => Loaded::Vector(self.vector(name, &[len])?, 0.0),
            ModuleKind::Conv { channels, taps } => {
                let shape = match self.layout {
                    Layout::Mlx => [channels, taps, 1],
                    Layout::HuggingFace => [channels, 1, taps],
                };
                Loaded::Vector(self.vector(&key, &shape)?, 0.0)
            }
            ModuleKind::Matrix { rows, cols } => Loaded::Matrices(vec![self.matrix(&key, &[rows, cols])?]),
            ModuleKind::Experts { experts, rows, cols } => {
                Loaded::Matrices(self.experts(name, experts, rows, cols)?)
            }
        })
    }

    fn vector(&mut self, key: &str, expected: &[usize]) -> Result<Floats, WeightsError> {
        let (name, tensor) = self.take(key, expected)?;
        check_shape(name, tensor, expected, String::new)?;
        floats(name, tensor)
    }

    /// A matrix, or a stack of them as one matrix of `shape[0] * shape[1]` rows.
    fn matrix(&mut self, key: &str, shape: &[usize]) -> Result<Matrix, WeightsError> {
        let (&cols, outer) = shape.split_last().unwrap_or((&0, &[]));
        let (name, tensor) = self.take(key, shape)?;
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let affine = self.config.quantization.as_ref().and_then(|q| q.of(module));
        let base = key.strip_suffix(".weight").unwrap_or(key);
        let quantised = self.unused.contains_key(&format!("{base}.scales"));
        let form = match (affine, quantised) {
            (Some(affine), true) => self.affine(base, (name, tensor), affine, shape)?,
            (None, true) => {
                let problem = "has scales, but config.json says that it is not quantised".to_owned();
                return Err(WeightsError::Quantization { name: name.to_owned(), problem });
            }
            (_, false) if tensor.dtype == Dtype::U32 => {
                let problem = format!("holds codes (U32), but there is no {module}.scales to read them with");
                return Err(WeightsError::Quantization { name: name.to_owned(), problem });
            }
            (_, false) => {
                check_shape(name, tensor, shape, String::new)?;
                Form::Dense(floats(name, tensor)?)
            }
        };
        Ok(Matrix { rows: outer.iter().product(), cols, form })
    }

    fn affine(
        &mut self,
        base: &str,
        (name, tensor): (&str, &Tensor),
        affine: Affine,
        shape: &[usize],
    ) -> Result<Form, WeightsError> {
        let Affine { bits, group_size } = affine;
        let (&cols, outer) = shape.split_last().unwrap_or((&0, &[]));
        if !cols.is_multiple_of(group_size) {
            let problem = format!("its {cols} inputs are not a multiple of the group size {group_size}");
            return Err(WeightsError::Quantization { name: name.to_owned(), problem });
        }
        let with_last = |last: usize| [outer, &[last]].concat();
        let why =
            || format!(" ({cols} inputs at {bits} bits in groups of {group_size}, as config.json says)");
        if tensor.dtype != Dtype::U32 {
            let expected = "U32 (packed codes), since there are scales for it";
            return Err(WeightsError::Type { name: name.to_owned(), expected, found: tensor.dtype });
        }
        check_shape(name, tensor, &with_last(cols * bits / 32), why)?;
        let mut per_group = |what: &str| {
            let expected = with_last(cols / group_size);
            let (name, tensor) = self.take(&format!("{base}.{what}"), &expected)?;
            check_shape(name, tensor, &expected, why)?;
            floats(name, tensor)
        };
        let (scales, biases) = (per_group("scales")?, per_group("biases")?);
        Ok(Form::Affine { affine, codes: tensor.data.clone(), scales, biases })
    }

    /// One matrix per expert, from the layout that the files have.
    fn experts(
        &mut self,
        name: &str,
        n: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<Matrix>, WeightsError> {
        let split = |m: &Matrix, stride: usize, first: usize| -> Vec<Matrix> {
            (0..n).map(|e| m.slice_rows(e * stride + first..e * stride + first + rows)).collect()
        };
        let mlx_key = format!("{name}.weight");
        let Some((mlp, proj)) = name.split_once("switch_mlp.") else {
            return Err(WeightsError::Missing { name: name.to_owned(), expected: vec![n, rows, cols] });
        };
        let fused = match proj {
            "down_proj" => format!("{mlp}experts.down_proj"),
            _ => format!("{mlp}experts.gate_up_proj"),
        };
        if self.unused.contains_key(&mlx_key) {
            return Ok(split(&self.matrix(&mlx_key, &[n, rows, cols])?, rows, 0));
        }
        if !self.unused.contains_key(&fused) {
            let name = format!("{mlx_key} (or {fused})");
            return Err(WeightsError::Missing { name, expected: vec![n, rows, cols] });
        }
        match proj {
            "down_proj" => Ok(split(&self.matrix(&fused, &[n, rows, cols])?, rows, 0)),
            // Gate and up are one tensor: it stays until `up` has taken its half too.
            "gate_proj" => {
                let kept = self.unused.get(&fused).copied();
                let halves = self.matrix(&fused, &[n, 2 * rows, cols])?;
                self.unused.extend(kept.map(|tensor| (fused, tensor)));
                Ok(split(&halves, 2 * rows, 0))
            }
            _ => Ok(split(&self.matrix(&fused, &[n, 2 * rows, cols])?, 2 * rows, rows)),
        }
    }

    /// Refuses what has not been used.
    fn finish(self) -> Result<(), WeightsError> {
        match self.unused.values().next() {
            None => Ok(()),
            Some((name, _)) => {
                Err(WeightsError::Unexpected { name: (*name).to_owned(), others: self.unused.len() - 1 })
            }
        }
    }
}

fn check_shape(
    name: &str,
    tensor: &Tensor,
    expected: &[usize],
    why: impl Fn() -> String,
) -> Result<(), WeightsError> {
    if tensor.shape == expected {
        return Ok(());
    }
    let (expected, found) = (expected.to_vec(), tensor.shape.clone());
    Err(WeightsError::Shape { name: name.to_owned(), expected, found, why: why() })
}

fn floats(name: &str, tensor: &Tensor) -> Result<Floats, WeightsError> {
    let dtype = match tensor.dtype {
        Dtype::F32 => FloatType::F32,
        Dtype::F16 => FloatType::F16,
        Dtype::BF16 => FloatType::Bf16,
        found => {
            return Err(WeightsError::Type { name: name.to_owned(), expected: "BF16, F16 or F32", found });
        }
    };
    Ok(Floats { dtype, data: tensor.data.clone() })
}

/// Modules by name. Every name that [`modules`] lists is there, so taking one can't fail.
struct Parts(HashMap<String, Loaded>);

impl Parts {
    fn vector(&mut self, name: &str) -> Vec<f32> {
        match self.0.remove(name) {
            Some(Loaded::Vector(values, shift)) => values.to_vec().into_iter().map(|x| x + shift).collect(),
            _ => unreachable!("{name} is a vector in the manifest"),
        }
    }

    fn matrices(&mut self, name: &str) -> Vec<Matrix> {
        match self.0.remove(name) {
            Some(Loaded::Matrices(m)) => m,
            _ => unreachable!("{name} is a matrix in the manifest"),
        }
    }

    fn matrix(&mut self, name: &str) -> Matrix {
        self.matrices(name).swap_remove(0)
    }
}

fn assemble(mut p: Parts, config: &Config) -> Weights {
    let layers =
        config.layers.iter().enumerate().map(|(i, kind)| layer(&mut p, &format!("layers.{i}."), *kind));
    let layers = layers.collect();
    let embedding = p.matrix("embed_tokens");
    let lm_head = if config.tie_word_embeddings { embedding.clone() } else { p.matrix("lm_head") };
    Weights { embedding, layers, norm: p.vector("norm"), lm_head }
}

fn layer(p: &mut Parts, layer: &str, kind: LayerKind) -> Layer {
    let mixer = match kind {
        LayerKind::Gdn => Mixer::Gdn(gdn(p, &format!("{layer}linear_attn."))),
        LayerKind::Attention => Mixer::Attention(attention(p, &format!("{layer}self_attn."))),
    };
    Layer {
        input_norm: p.vector(&format!("{layer}input_layernorm")),
        mixer,
        post_attention_norm: p.vector(&format!("{layer}post_attention_layernorm")),
        moe: moe(p, &format!("{layer}mlp.")),
    }
}

fn gdn(p: &mut Parts, at: &str) -> Gdn {
    Gdn {
        in_proj_qkv: p.matrix(&format!("{at}in_proj_qkv")),
        in_proj_z: p.matrix(&format!("{at}in_proj_z")),
        in_proj_b: p.matrix(&format!("{at}in_proj_b")),
        in_proj_a: p.matrix(&format!("{at}in_proj_a")),
        conv: p.vector(&format!("{at}conv1d")),
        a_log: p.vector(&format!("{at}A_log")),
        dt_bias: p.vector(&format!("{at}dt_bias")),
        norm: p.vector(&format!("{at}norm")),
        out_proj: p.matrix(&format!("{at}out_proj")),
    }
}

fn attention(p: &mut Parts, at: &str) -> Attention {
    Attention {
        q_proj: p.matrix(&format!("{at}q_proj")),
        k_proj: p.matrix(&format!("{at}k_proj")),
        v_proj: p.matrix(&format!("{at}v_proj")),
        o_proj: p.matrix(&format!("{at}o_proj")),
        q_norm: p.vector(&format!("{at}q_norm")),
        k_norm: p.vector(&format!("{at}k_norm")),
    }
}

fn moe(p: &mut Parts, at: &str) -> Moe {
    let mut stack = |name: &str| p.matrices(&format!("{at}switch_mlp.{name}")).into_iter();
    let (gates, ups, downs) = (stack("gate_proj"), stack("up_proj"), stack("down_proj"));
    let experts = gates.zip(ups).zip(downs).map(|((gate, up), down)| Expert { gate, up, down }).collect();
    Moe {
        router: p.matrix(&format!("{at}gate")),
        experts,
        shared: Expert {
            gate: p.matrix(&format!("{at}shared_expert.gate_proj")),
            up: p.matrix(&format!("{at}shared_expert.up_proj")),
            down: p.matrix(&format!("{at}shared_expert.down_proj")),
        },
        shared_gate: p.matrix(&format!("{at}shared_expert_gate")),
    }
}
