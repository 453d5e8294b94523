//! Checkpoints that are damaged, incomplete or of another kind: each is refused, by name, with what was
//! expected and what was found.
#![allow(clippy::unwrap_used, reason = "tests fail where they must")]

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use lily_model::files::ModelFiles;
use lily_model::load::{Model, load_config, load_weights};
use lily_model::synth::Synth;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use tempfile::TempDir;

/// 8 layers of width 64, quantised as the real model.
const TINY: &[u8] = include_bytes!("../../../tests/data/nano/mlx-4bit/config.json");
const SHARD: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// A tensor in memory.
#[derive(Clone)]
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

type Tensors = BTreeMap<String, Tensor>;

/// A small random checkpoint in a folder of its own, to be spoilt.
struct Fixture(TempDir);

impl Fixture {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Synth::new(TINY, 7).unwrap().write(folder.path(), &[], &|_| ()).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Changes the tensors of the only shard, and the index with them.
    fn edit(self, change: impl FnOnce(&mut Tensors)) -> Self {
        let bytes = fs::read(self.path(SHARD)).unwrap();
        let read = |(name, view): (String, TensorView<'_>)| {
            let tensor =
                Tensor { dtype: view.dtype(), shape: view.shape().to_vec(), data: view.data().to_vec() };
            (name, tensor)
        };
        let mut tensors: Tensors =
            SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter().map(read).collect();
        change(&mut tensors);
        self.write_shard(SHARD, &tensors);
        self.write_index(tensors.keys().map(|name| (name.clone(), SHARD)).collect());
        self
    }

    fn write_shard(&self, shard: &str, tensors: &Tensors) {
        let views = tensors
            .iter()
            .map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.data).unwrap()));
        safetensors::serialize_to_file(views, None, &self.path(shard)).unwrap();
    }

    fn write_index(&self, map: BTreeMap<String, &str>) {
        fs::write(self.path(INDEX), json!({"weight_map": map}).to_string()).unwrap();
    }

    fn edit_config(self, change: impl FnOnce(&mut Value)) -> Self {
        let mut config: Value = serde_json::from_slice(&fs::read(self.path("config.json")).unwrap()).unwrap();
        change(&mut config);
        fs::write(self.path("config.json"), config.to_string()).unwrap();
        self
    }

    /// Splits the shard in two, at lm_head and the rest.
    fn in_two_shards(self) -> Self {
        let mut rest = Tensors::new();
        let fixture = self.edit(|tensors| rest = std::mem::take(tensors));
        let head = rest.split_off("language_model.model.");
        fs::remove_file(fixture.path(SHARD)).unwrap();
        fixture.write_shard("model-00001-of-00002.safetensors", &head);
        fixture.write_shard("model-00002-of-00002.safetensors", &rest);
        let first = head.keys().map(|name| (name.clone(), "model-00001-of-00002.safetensors"));
        let second = rest.keys().map(|name| (name.clone(), "model-00002-of-00002.safetensors"));
        fixture.write_index(first.chain(second).collect());
        fixture
    }

    /// What loading says.
    fn result(&self) -> Result<(), String> {
        let files = ModelFiles::folder(self.0.path()).unwrap();
        let load = || load_weights(&files, &load_config(&files)?).map(|_| ());
        load().map_err(|e| e.to_string())
    }

    #[track_caller]
    fn refused_with(&self, words: &[&str]) {
        let message = self.result().expect_err("it should be refused");
        for word in words {
            assert!(message.contains(word), "{message:?} should say {word:?}");
        }
    }
}

const GATE: &str = "language_model.model.layers.2.mlp.gate";

#[test]
fn the_unspoilt_checkpoint_loads() {
    Fixture::new().result().unwrap();
    Fixture::new().edit(|_| ()).result().unwrap();
    Fixture::new().in_two_shards().result().unwrap();
}

#[test]
fn a_missing_shard() {
    let fixture = Fixture::new().in_two_shards();
    fs::remove_file(fixture.path("model-00002-of-00002.safetensors")).unwrap();
    fixture.refused_with(&["model-00002-of-00002.safetensors is missing", "download it again"]);
}

#[test]
fn a_shard_cut_by_one_byte() {
    let fixture = Fixture::new();
    let length = fs::metadata(fixture.path(SHARD)).unwrap().len();
    fs::File::options().write(true).open(fixture.path(SHARD)).unwrap().set_len(length - 1).unwrap();
    fixture.refused_with(&[SHARD, "is said to lie at", "of the data, which has", "incomplete"]);
}

#[test]
fn a_header_of_two_to_the_sixty_bytes() {
    let fixture = Fixture::new();
    let mut bytes = fs::read(fixture.path(SHARD)).unwrap();
    bytes[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
    fs::write(fixture.path(SHARD), bytes).unwrap();
    fixture.refused_with(&[SHARD, "the header claims 1152921504606846976 bytes", "the file has"]);
}

#[test]
fn an_offset_outside_the_file() {
    let fixture = Fixture::new();
    let bytes = fs::read(fixture.path(SHARD)).unwrap();
    let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let offsets = &mut header["language_model.lm_head.weight"]["data_offsets"];
    offsets[1] = (1u64 << 50).into();
    let header = header.to_string();
    let spoilt = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &bytes[8 + length..]].concat();
    fs::write(fixture.path(SHARD), spoilt).unwrap();
    fixture.refused_with(&[
        SHARD,
        "tensor language_model.lm_head.weight",
        "1125899906842624 of the data, which has",
    ]);
}

#[test]
fn a_config_of_another_model() {
    Fixture::new()
        .edit_config(|c| c["model_type"] = "qwen3_next".into())
        .refused_with(&["config.json: `model_type` is \"qwen3_next\"", "expected \"qwen3_5_moe\""]);
}

#[test]
fn a_quantisation_that_is_not_affine() {
    Fixture::new()
        .edit_config(|c| c["quantization"]["mode"] = "mxfp4".into())
        .refused_with(&["config.json: `quantization.mode` is \"mxfp4\"", "expected \"affine\""]);
}

#[test]
fn bits_that_disagree_with_shapes() {
    Fixture::new().edit_config(|c| c["quantization"]["bits"] = 8.into()).refused_with(&[
        "tensor language_model.model.embed_tokens.weight has shape [384, 8], expected [384, 16]",
        "64 inputs at 8 bits in groups of 64, as config.json says",
    ]);
    Fixture::new()
        .edit_config(|c| _ = c["quantization"].as_object_mut().unwrap().remove(GATE))
        .refused_with(&[GATE, "has shape [8, 16], expected [8, 8]", "64 inputs at 4 bits"]);
}

#[test]
fn a_tensor_too_many() {
    let fixture = Fixture::new().edit(|t| {
        let extra = t[&format!("{GATE}.weight")].clone();
        t.insert("language_model.model.layers.8.mlp.gate.weight".to_owned(), extra);
    });
    fixture.refused_with(&[
        "*.safetensors: tensor language_model.model.layers.8.mlp.gate.weight is not part of this model",
    ]);
}

#[test]
fn a_tensor_missing() {
    for (name, shape) in [
        ("layers.0.linear_attn.conv1d.weight", "[256, 4, 1]"),
        ("layers.3.self_attn.q_norm.weight", "[64]"),
        ("layers.2.mlp.gate.biases", "[8, 1]"),
        ("layers.5.mlp.switch_mlp.up_proj.weight", "[8, 64, 64]"),
    ] {
        let fixture = Fixture::new().edit(|t| {
            t.remove(&format!("language_model.model.{name}")).unwrap();
        });
        fixture.refused_with(&[name, "is missing", shape]);
    }
}

#[test]
fn a_quantised_tensor_without_its_scales() {
    let fixture = Fixture::new().edit(|t| _ = t.remove(&format!("{GATE}.scales")));
    fixture
        .refused_with(&[&format!("tensor {GATE}.weight: holds codes (U32), but there is no {GATE}.scales")]);
}

#[test]
fn a_misshapen_tensor() {
    let fixture = Fixture::new().edit(|t| {
        let tensor = t.get_mut("language_model.model.layers.0.linear_attn.dt_bias").unwrap();
        tensor.shape = vec![2, 2];
    });
    fixture.refused_with(&["linear_attn.dt_bias has shape [2, 2], expected [4]"]);
}

#[test]
fn a_wrong_dtype() {
    let fixture = Fixture::new().edit(|t| {
        t.get_mut("language_model.model.norm.weight").unwrap().dtype = Dtype::I16;
    });
    fixture.refused_with(&["tensor language_model.model.norm.weight holds I16, expected BF16, F16 or F32"]);
    let fixture = Fixture::new().edit(|t| {
        t.get_mut(&format!("{GATE}.weight")).unwrap().dtype = Dtype::I32;
    });
    fixture.refused_with(&[&format!("tensor {GATE}.weight holds I32, expected U32")]);
}

#[test]
fn two_layouts_mixed() {
    let fixture = Fixture::new().edit(|t| {
        let twin = t[&format!("{GATE}.weight")].clone();
        t.insert("model.language_model.layers.2.mlp.gate.weight".to_owned(), twin);
    });
    fixture.refused_with(&[
        &format!("{GATE}.weight"),
        "model.language_model.layers.2.mlp.gate.weight",
        "mixes two layouts",
    ]);
    // Experts as Hugging Face stores them beside those of MLX.
    let fused = "model.language_model.layers.0.mlp.experts.down_proj";
    let fixture = Fixture::new().edit(|t| {
        let data = vec![0; 8 * 64 * 64 * 2];
        t.insert(fused.to_owned(), Tensor { dtype: Dtype::BF16, shape: vec![8, 64, 64], data });
    });
    fixture.refused_with(&[&format!("tensor {fused} is not part of this model")]);
}

#[test]
fn an_index_that_disagrees_with_its_shards() {
    let fixture = Fixture::new();
    let mut index: Value = serde_json::from_slice(&fs::read(fixture.path(INDEX)).unwrap()).unwrap();
    index["weight_map"]["language_model.extra.weight"] = SHARD.into();
    fs::write(fixture.path(INDEX), index.to_string()).unwrap();
    fixture.refused_with(&[
        INDEX,
        "says tensor language_model.extra.weight is in model.safetensors, which does not have it",
    ]);
}

#[test]
fn a_folder_without_weights_or_text() {
    let fixture = Fixture::new();
    let files = ModelFiles::folder(fixture.0.path()).unwrap();
    let load = || Model::load(&files, |_| ()).err().unwrap().to_string();
    assert!(load().contains("tokenizer.json is missing"), "{}", load());
    fs::remove_file(fixture.path(SHARD)).unwrap();
    fs::remove_file(fixture.path(INDEX)).unwrap();
    fixture.refused_with(&["holds neither model.safetensors.index.json nor model.safetensors"]);
    fs::remove_file(fixture.path("config.json")).unwrap();
    fixture.refused_with(&["config.json is missing"]);
}
