//! Models for the machine, with the CPU's reference beside them.

use std::path::{Path, PathBuf};

use lily_cpu::reference::Reference;
use lily_metal::plan::{Contents, Features};
use lily_metal::source;
use lily_model::checkpoint::{Checkpoint, Tensor};
use lily_model::config::Config;
use lily_model::files::ModelFiles;
use lily_model::manifest::mlx_path;
use lily_model::weights::Weights;
use safetensors::Dtype;

use super::machine::Machine;
use super::{Guard, Kernels};

pub struct Model {
    pub config: Config,
    pub weights: Weights,
    checkpoint: Checkpoint,
}

/// A folder below the repository's, which `LILY_ROOT` names where the tests run elsewhere than they were built.
pub fn folder(path: &str) -> PathBuf {
    let root = std::env::var_os("LILY_ROOT").map(PathBuf::from);
    root.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")).join(path)
}

impl Model {
    /// A checkpoint in MLX form.
    pub fn load(folder: &Path) -> Self {
        let files = ModelFiles::folder(folder).unwrap();
        let config = Config::from_json(&files.open("config.json").unwrap()).unwrap();
        let checkpoint = Checkpoint::open(&files).unwrap();
        let weights = Weights::load(&checkpoint, &config).unwrap();
        Self { config, weights, checkpoint }
    }

    pub fn reference(&self) -> Reference<'_> {
        Reference { config: &self.config, weights: &self.weights }
    }

    /// The kernels for this model.
    pub fn machine(&self, features: impl Into<Features>, guard: Guard) -> Machine<'_> {
        let features = features.into();
        self.machine_of(&source::source(&self.config, features), features, guard)
    }

    /// As [`Self::machine`], with the kernels of a text.
    pub fn machine_of(&self, source: &str, features: impl Into<Features>, guard: Guard) -> Machine<'_> {
        Machine::new(self, Kernels::compile(source), features.into(), guard)
    }

    /// What a buffer that all sequences share holds; weights are taken from the files by name, as a host would map them.
    pub fn stored(&self, contents: &Contents) -> Vec<u8> {
        let tensor = |name: &str, suffix: &str| {
            let name = format!("{}{suffix}", mlx_path(name));
            self.checkpoint.get(&name).unwrap_or_else(|| panic!("no tensor {name}"))
        };
        match contents {
            Contents::Codes(name) => tensor(name, ".weight").data.to_vec(),
            Contents::Scales(name) => bf16(tensor(name, ".scales")),
            Contents::Biases(name) => bf16(tensor(name, ".biases")),
            Contents::Vector(name) => {
                let bare = name.ends_with("A_log") || name.ends_with("dt_bias");
                f32s(tensor(name, if bare { "" } else { ".weight" }))
            }
            Contents::Turns => {
                let a = &self.config.attention;
                let turns = lily_metal::rope::turns(a.rope_theta, a.rotary_dim);
                turns.iter().flat_map(|t| t.to_le_bytes()).collect()
            }
            other => panic!("{other:?} is not stored"),
        }
    }
}

fn bf16(tensor: &Tensor) -> Vec<u8> {
    assert_eq!(tensor.dtype, Dtype::BF16);
    tensor.data.to_vec()
}

fn f32s(tensor: &Tensor) -> Vec<u8> {
    match tensor.dtype {
        Dtype::F32 => tensor.data.to_vec(),
        // The upper half of an f32.
        Dtype::BF16 => tensor.data.as_chunks::<2>().0.iter().flat_map(|b| [0, 0, b[0], b[1]]).collect(),
        other => panic!("{other:?}"),
    }
}

/// A random model of four layers (three of Gated DeltaNet, one of attention) with shapes of its own; fields are those of
/// config.json.
pub fn random(fields: &[(&str, serde_json::Value)], seed: u64) -> Model {
    let nano = std::fs::read(folder("tests/data/nano/mlx-4bit/config.json")).unwrap();
    let config = lily_model::presets::first_layers(&nano, 4).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    for (name, value) in fields {
        config["text_config"][name] = value.clone();
    }
    // The file has it in two places.
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"].clone();
    synthesise(&config, seed)
}

/// As [`random`], with nano's shapes: nothing quantised, or all but the routers.
pub fn unquantised(all: bool, seed: u64) -> Model {
    let nano = std::fs::read(folder("tests/data/nano/mlx-4bit/config.json")).unwrap();
    let config = lily_model::presets::first_layers(&nano, 4).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let top = config.as_object_mut().unwrap();
    top.remove("quantization_config");
    if all {
        top.remove("quantization");
    } else {
        let forms = top["quantization"].as_object_mut().unwrap();
        forms.values_mut().filter(|form| form.is_object()).for_each(|form| *form = false.into());
    }
    synthesise(&config, seed)
}

fn synthesise(config: &serde_json::Value, seed: u64) -> Model {
    let text = config.to_string();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    lily_model::synth::Synth::new(text.as_bytes(), seed).unwrap().write(&out, &[], &|_| {}).unwrap();
    // The files stay mapped after their folder is gone.
    Model::load(&out)
}

/// Shapes at the edges of what the kernels take.
pub fn edge_shapes() -> Vec<(&'static str, Model)> {
    let few = [
        ("hidden_size", 192.into()),
        ("vocab_size", 388.into()),
        ("linear_num_key_heads", 1.into()),
        ("linear_num_value_heads", 4.into()),
        ("linear_key_head_dim", 40.into()),
        ("linear_value_head_dim", 64.into()),
        ("num_attention_heads", 8.into()),
        ("num_key_value_heads", 1.into()),
        ("head_dim", 96.into()),
        ("num_experts", 12.into()),
        ("num_experts_per_tok", 5.into()),
        ("moe_intermediate_size", 128.into()),
        ("shared_expert_intermediate_size", 192.into()),
    ];
    // Rows longer than what a SIMD-group takes at once; more experts than lanes; a tied head.
    let wide = [
        ("hidden_size", 576.into()),
        ("linear_num_key_heads", 8.into()),
        ("linear_num_value_heads", 8.into()),
        ("linear_key_head_dim", 128.into()),
        ("linear_value_head_dim", 128.into()),
        ("linear_conv_kernel_dim", 3.into()),
        ("num_attention_heads", 6.into()),
        ("num_key_value_heads", 2.into()),
        ("head_dim", 224.into()),
        ("num_experts", 40.into()),
        ("num_experts_per_tok", 8.into()),
        ("moe_intermediate_size", 576.into()),
        ("tie_word_embeddings", true.into()),
    ];
    // Many query heads a K/V head; every expert is chosen.
    let packed = [
        ("num_attention_heads", 16.into()),
        ("num_key_value_heads", 1.into()),
        ("head_dim", 256.into()),
        ("num_experts", 4.into()),
        ("num_experts_per_tok", 4.into()),
    ];
    // The real model's widths, with fewer experts and a small vocabulary.
    let real = [
        ("hidden_size", 2048.into()),
        ("linear_num_key_heads", 16.into()),
        ("linear_num_value_heads", 32.into()),
        ("linear_key_head_dim", 128.into()),
        ("linear_value_head_dim", 128.into()),
        ("num_attention_heads", 16.into()),
        ("num_key_value_heads", 2.into()),
        ("head_dim", 256.into()),
        ("num_experts", 36.into()),
        ("num_experts_per_tok", 8.into()),
        ("moe_intermediate_size", 512.into()),
        ("shared_expert_intermediate_size", 512.into()),
    ];
    let shapes: [(&str, &[_]); 4] = [("few", &few), ("wide", &wide), ("packed", &packed), ("real", &real)];
    (1..).zip(shapes).map(|(seed, (name, fields))| (name, random(fields, seed))).collect()
}
