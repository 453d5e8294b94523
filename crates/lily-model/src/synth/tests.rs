use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::checkpoint::Checkpoint;
use crate::files::ModelFiles;
use crate::matrix::Matrix;
use crate::presets::CONFIG_35B_A3B;
use crate::weights::{Mixer, Weights};

/// 8 layers of width 64, quantised as the real model.
const TINY: &[u8] = include_bytes!("../../../../tests/data/nano/mlx-4bit/config.json");

fn written(config: &[u8], seed: u64) -> (tempfile::TempDir, Weights) {
    let folder = tempfile::tempdir().unwrap();
    Synth::new(config, seed).unwrap().write(folder.path(), &[], &|_| ()).unwrap();
    let checkpoint = Checkpoint::open(&ModelFiles::folder(folder.path()).unwrap()).unwrap();
    let weights = Weights::load(&checkpoint, &Config::from_json(config).unwrap()).unwrap();
    (folder, weights)
}

fn file(folder: &tempfile::TempDir) -> Vec<u8> {
    std::fs::read(folder.path().join("model.safetensors")).unwrap()
}

#[test]
fn the_same_seed_gives_the_same_bytes_and_another_does_not() {
    let (a, b, c) = (written(TINY, 7).0, written(TINY, 7).0, written(TINY, 8).0);
    assert!(file(&a) == file(&b));
    assert!(file(&a) != file(&c));
}

fn values(m: &Matrix) -> Vec<f32> {
    let mut row = vec![0.0; m.cols];
    (0..m.rows)
        .flat_map(|r| {
            m.read_row(r, &mut row);
            row.clone()
        })
        .collect()
}

#[track_caller]
fn assert_spread(m: &Matrix, expected: f32) {
    let v = values(m);
    let mean = v.iter().sum::<f32>() / v.len() as f32;
    let deviation = (v.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / v.len() as f32).sqrt();
    assert!(mean.abs() < 0.1 * expected, "mean {mean}");
    assert!((deviation / expected - 1.0).abs() < 0.1, "deviation {deviation}, expected {expected}");
}

#[test]
fn weights_are_as_large_as_their_inputs_ask() {
    let (_folder, w) = written(TINY, 7);
    assert_spread(&w.embedding, 1.0);
    assert_spread(&w.lm_head, 3.0 / 8.0);
    // The router has 8 bits, the experts have 4.
    assert_spread(&w.layers[0].moe.router, 2.0 / 8.0);
    assert_spread(&w.layers[0].moe.experts[3].up, 1.0 / 8.0);
    assert_spread(&w.layers[0].moe.experts[3].down, 0.35 / 8.0);
    let Mixer::Gdn(gdn) = &w.layers[0].mixer else { panic!("layer 0 is a GDN layer") };
    assert_spread(&gdn.out_proj, 0.35 / 128f32.sqrt());
    assert!(gdn.a_log.iter().all(|a| (0.049..4.01).contains(&a.exp())));
    assert!(gdn.dt_bias.iter().all(|b| (0.0019..0.51).contains(&b.exp().ln_1p())));
    assert!(gdn.norm.iter().all(|g| (0.2..1.8).contains(g)));
}

#[test]
fn unquantised_configs_are_written_too() {
    let mut config: serde_json::Value = serde_json::from_slice(TINY).unwrap();
    config.as_object_mut().unwrap().retain(|key, _| !key.starts_with("quantization"));
    let (_folder, w) = written(config.to_string().as_bytes(), 7);
    assert_spread(&w.layers[0].moe.experts[0].gate, 1.0 / 8.0);
}

#[test]
fn the_real_model_is_sharded_like_the_original() {
    let synth = Synth::new(CONFIG_35B_A3B, 0).unwrap();
    assert_eq!(synth.bytes(), 19_508_787_456);
    assert_eq!(synth.shards.len(), 4);
    assert_eq!(synth.shard_name(1), "model-00002-of-00004.safetensors");
    let size = |shard: &Vec<Planned>| shard.iter().map(Planned::data_len).sum::<usize>();
    assert!(synth.shards.iter().all(|s| size(s) as u64 <= SHARD_BYTES));
}

#[test]
fn progress_adds_up_and_other_files_are_there() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("new/model");
    let (synth, done) = (Synth::new(TINY, 7).unwrap(), AtomicU64::new(0));
    let add = |bytes| _ = done.fetch_add(bytes, Ordering::Relaxed);
    synth.write(&out, &[("tokenizer.json", b"{}")], &add).unwrap();
    assert_eq!(done.into_inner(), synth.bytes());
    let mut names: Vec<_> =
        std::fs::read_dir(&out).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let expected = ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"];
    assert_eq!(names, expected);
}

#[test]
fn nothing_is_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("precious.txt"), "x").unwrap();
    let e = Synth::new(TINY, 7).unwrap().write(folder.path(), &[], &|_| ()).unwrap_err();
    assert!(e.to_string().contains("is not empty: nothing is overwritten"), "{e}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

/// A disk that is full, a folder that can't be written: nothing that looks like a model is left.
#[test]
fn a_failed_write_leaves_nothing_that_looks_whole() {
    let folder = tempfile::tempdir().unwrap();
    // A folder has the name that the shard should get.
    let others: [(&str, &[u8]); 1] = [("tokenizer.json", b"{}")];
    let synth = Synth::new(TINY, 7).unwrap();
    let out = folder.path().join("out");
    let block = |_| {
        let _ = std::fs::create_dir(out.join("model.safetensors"));
    };
    let e = synth.write(&out, &others, &block).unwrap_err();
    assert!(e.to_string().contains("model.safetensors"), "{e}");
    assert!(Checkpoint::open(&ModelFiles::folder(&out).unwrap()).is_err());
    assert!(!out.join("model.safetensors.index.json").exists());
}

#[test]
fn rows_that_do_not_divide_into_groups_are_refused() {
    let mut config: serde_json::Value = serde_json::from_slice(TINY).unwrap();
    config["text_config"]["moe_intermediate_size"] = 96.into();
    let text = config.to_string();
    let e = Synth::new(text.as_bytes(), 7).err().unwrap().to_string();
    assert!(
        e.contains("switch_mlp.down_proj has 96 inputs, which are not a multiple of the group size 64"),
        "{e}"
    );
}
