//! Random checkpoints: the names, shapes and types of an MLX conversion, with weights that keep the model
//! alive. For measuring speed and memory where the real files can't be had, and for tests.
//!
//! A tensor's bytes depend on the seed, its name and its shape, and on nothing else.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};

use half::bf16;
use safetensors::tensor::{SafeTensorError, View};
use safetensors::{Dtype, serialize_to_file};
use serde_json::json;

use crate::config::{Affine, Config, ConfigError};
use crate::manifest::{Module, ModuleKind, mlx_path, modules};

mod values;

use values::{Distribution, Stream};

/// Most bytes of tensors in a shard, as mlx-lm splits.
const SHARD_BYTES: u64 = 5 << 30;

/// A random checkpoint, planned but not written.
pub struct Synth<'a> {
    config_json: &'a [u8],
    seed: u64,
    /// Tensors of each shard.
    shards: Vec<Vec<Planned>>,
}

/// A tensor of the plan. Its values are made when it is written.
struct Planned {
    name: String,
    shape: Vec<usize>,
    values: Values,
}

/// What a tensor holds.
#[derive(Clone, Copy, Debug)]
enum Values {
    /// Codes of quantised weights: every bit at random.
    Codes,
    /// bf16 values.
    Floats(Distribution),
}

/// Why a random checkpoint can't be made.
#[derive(Debug, thiserror::Error)]
pub enum SynthError {
    /// The config is not one of this architecture.
    #[error("config.json: {0}")]
    Config(#[from] ConfigError),
    /// A row does not divide into groups.
    #[error(
        "{module} has {cols} inputs, which are not a multiple of the group size {group_size}: change the config's shapes or its quantization"
    )]
    Group {
        /// Path of the module.
        module: String,
        /// Inputs.
        cols: usize,
        /// Of the config.
        group_size: usize,
    },
    /// The folder has something in it.
    #[error("{0} is not empty: nothing is overwritten, choose another folder or empty it")]
    NotEmpty(PathBuf),
    /// The system refused; a disk may be full.
    #[error("{file}: {source}")]
    Io {
        /// Path of the file.
        file: String,
        /// The system's words.
        source: io::Error,
    },
}

impl<'a> Synth<'a> {
    /// Plans a checkpoint for the text of a `config.json`.
    pub fn new(config_json: &'a [u8], seed: u64) -> Result<Self, SynthError> {
        let config = Config::from_json(config_json)?;
        let mut shards = vec![Vec::new()];
        let mut filled = 0;
        for module in modules(&config) {
            for tensor in plan(&module, &config)? {
                let bytes = tensor.data_len() as u64;
                if filled + bytes > SHARD_BYTES && filled > 0 {
                    shards.push(Vec::new());
                    filled = 0;
                }
                filled += bytes;
                if let Some(shard) = shards.last_mut() {
                    shard.push(tensor);
                }
            }
        }
        Ok(Self { config_json, seed, shards })
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.shards.iter().flatten().map(|t| t.data_len() as u64).sum()
    }

    /// Name, type and shape of every tensor.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, Dtype, &[usize])> {
        self.shards.iter().flatten().map(|t| (t.name.as_str(), t.dtype(), t.shape.as_slice()))
    }

    /// Writes the checkpoint into `folder`, which must be empty or absent, together with `others` (tokenizer
    /// and the like: name and content). Holds one tensor in memory at a time. A shard appears under its name
    /// when it is whole, and the index comes last. `progress` hears the bytes of each tensor made.
    pub fn write(
        &self,
        folder: &Path,
        others: &[(&str, &[u8])],
        progress: &(dyn Fn(u64) + Sync),
    ) -> Result<(), SynthError> {
        let at = |file: &Path, source| SynthError::Io { file: file.display().to_string(), source };
        std::fs::create_dir_all(folder).map_err(|e| at(folder, e))?;
        if std::fs::read_dir(folder).map_err(|e| at(folder, e))?.next().is_some() {
            return Err(SynthError::NotEmpty(folder.to_owned()));
        }
        let write = |name: &str, content: &[u8]| {
            let path = folder.join(name);
            std::fs::write(&path, content).map_err(|e| at(&path, e))
        };
        write("config.json", self.config_json)?;
        for (name, content) in others {
            write(name, content)?;
        }
        let mut weight_map = BTreeMap::new();
        for (i, shard) in self.shards.iter().enumerate() {
            let name = self.shard_name(i);
            let path = folder.join(&name);
            let tensors = shard.iter().map(|t| (&t.name, Drawn { planned: t, seed: self.seed, progress }));
            let metadata = HashMap::from([("format".to_owned(), "mlx".to_owned())]);
            // Writes to a temporary file, and renames it at the end.
            serialize_to_file(tensors, Some(metadata), &path).map_err(|e| match e {
                SafeTensorError::IoError(source) => at(&path, source),
                other => at(&path, io::Error::other(other.to_string())),
            })?;
            // Temporary files can be read by their owner only; a model's files by whom new files can.
            let permissions = std::fs::metadata(folder.join("config.json")).map(|m| m.permissions());
            permissions.and_then(|p| std::fs::set_permissions(&path, p)).map_err(|e| at(&path, e))?;
            weight_map.extend(shard.iter().map(|t| (t.name.clone(), name.clone())));
        }
        let index = json!({"metadata": {"total_size": self.bytes()}, "weight_map": weight_map});
        write("model.safetensors.index.json", format!("{index:#}\n").as_bytes())
    }

    fn shard_name(&self, i: usize) -> String {
        match self.shards.len() {
            1 => "model.safetensors".to_owned(),
            n => format!("model-{:05}-of-{n:05}.safetensors", i + 1),
        }
    }
}

/// The tensors of a module.
fn plan(module: &Module, config: &Config) -> Result<Vec<Planned>, SynthError> {
    let path = mlx_path(&module.name);
    let one = |name: String, shape: &[usize], values| {
        Ok(vec![Planned { name, shape: shape.to_vec(), values: Values::Floats(values) }])
    };
    match module.kind {
        ModuleKind::Matrix { rows, cols } => matrix(module, &path, &[rows], cols, config),
        ModuleKind::Experts { experts, rows, cols } => matrix(module, &path, &[experts, rows], cols, config),
        ModuleKind::Norm(n) | ModuleKind::Gain(n) => {
            one(format!("{path}.weight"), &[n], Distribution::Normal { mean: 1.0, deviation: 0.2 })
        }
        ModuleKind::Vector(n) if path.ends_with("A_log") => {
            one(path, &[n], Distribution::LogUniform { low: 0.05, high: 4.0 })
        }
        // Decays from fast to slow, so that heads remember over different lengths.
        ModuleKind::Vector(n) => one(path, &[n], Distribution::InverseSoftplus { low: 0.002, high: 0.5 }),
        ModuleKind::Conv { channels, taps } => one(
            format!("{path}.weight"),
            &[channels, taps, 1],
            Distribution::Normal { mean: 0.0, deviation: (taps as f32).sqrt().recip() },
        ),
    }
}

fn matrix(
    module: &Module,
    path: &str,
    outer: &[usize],
    cols: usize,
    config: &Config,
) -> Result<Vec<Planned>, SynthError> {
    let deviation = deviation(&module.name, cols);
    let tensor = |suffix: &str, last: usize, values| Planned {
        name: format!("{path}.{suffix}"),
        shape: [outer, &[last]].concat(),
        values,
    };
    let Some(Affine { bits, group_size }) = module.affine(config) else {
        let values = Distribution::Normal { mean: 0.0, deviation };
        return Ok(vec![tensor("weight", cols, Values::Floats(values))]);
    };
    if !cols.is_multiple_of(group_size) {
        return Err(SynthError::Group { module: path.to_owned(), cols, group_size });
    }
    Ok(vec![
        tensor("weight", cols * bits / 32, Values::Codes),
        tensor("scales", cols / group_size, Values::Floats(Distribution::Scales { bits, deviation })),
        tensor("biases", cols / group_size, Values::Floats(Distribution::Biases { bits, deviation })),
    ])
}

/// Standard deviation of a matrix's weights. Inputs are about one in size, so a deviation of `1 / sqrt(inputs)`
/// keeps outputs there. What is added to the residual stream is kept below it: a random stack whose branches
/// are as large as its stream is chaotic. Routers and lm_head get enough spread to have opinions.
fn deviation(name: &str, inputs: usize) -> f32 {
    let gain = match name.rsplit('.').next() {
        Some("embed_tokens") => return 1.0,
        Some("lm_head") => 3.0,
        Some("gate") => 2.0,
        Some("shared_expert_gate") => 1.5,
        Some("in_proj_a") => 0.7,
        Some("o_proj" | "out_proj" | "down_proj") => 0.35,
        _ => 1.0,
    };
    gain / (inputs as f32).sqrt()
}

impl Planned {
    fn dtype(&self) -> Dtype {
        if matches!(self.values, Values::Codes) { Dtype::U32 } else { Dtype::BF16 }
    }

    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype().bitsize() / 8
    }

    fn draw(&self, seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; self.data_len()];
        // A scale and its bias are drawn from the same numbers, so their tensors share a stream.
        let module = self.name.strip_suffix(".biases").map(|m| format!("{m}.scales"));
        let stream = Stream::new(seed, module.as_deref().unwrap_or(&self.name));
        match self.values {
            Values::Codes => stream.fill_bits(&mut bytes),
            Values::Floats(distribution) => {
                for (i, out) in bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                    *out = bf16::from_f32(distribution.at(&stream, i as u64)).to_le_bytes();
                }
            }
        }
        bytes
    }
}

/// A planned tensor as the writer wants it: its bytes are made on demand.
struct Drawn<'a> {
    planned: &'a Planned,
    seed: u64,
    progress: &'a (dyn Fn(u64) + Sync),
}

impl View for Drawn<'_> {
    fn dtype(&self) -> Dtype {
        self.planned.dtype()
    }
    fn shape(&self) -> &[usize] {
        &self.planned.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.planned.draw(self.seed);
        (self.progress)(bytes.len() as u64);
        bytes.into()
    }
    fn data_len(&self) -> usize {
        self.planned.data_len()
    }
}

#[cfg(test)]
mod tests;
