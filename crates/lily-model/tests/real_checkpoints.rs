//! The published checkpoints, by the names, types and shapes of all their tensors: files of the real size
//! with nothing in them.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "tests fail where they must")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use lily_model::checkpoint::Checkpoint;
use lily_model::config::{Config, LayerKind};
use lily_model::files::ModelFiles;
use lily_model::presets::CONFIG_35B_A3B;
use lily_model::synth::Synth;
use lily_model::weights::{Mixer, Weights};
use serde_json::{Map, Value, json};

mod data;

/// A line of a list of tensors.
struct Row {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: u64,
    shard: String,
}

fn rows(tsv: &str) -> Vec<Row> {
    let row = |line: &str| {
        let mut fields = line.split('\t').map(str::to_owned);
        let mut next = || fields.next().unwrap();
        let (name, dtype, shape, bytes) = (next(), next(), next(), next());
        Row {
            name,
            dtype,
            shape: shape.split('x').map(|n| n.parse().unwrap()).collect(),
            bytes: bytes.parse().unwrap(),
            shard: fields.next().unwrap_or("model.safetensors".to_owned()),
        }
    };
    tsv.lines().skip(1).map(row).collect()
}

/// Writes shards whose headers are real and whose data is a hole. Returns their size.
fn write_sparse(folder: &Path, rows: &[Row]) -> u64 {
    let shards: BTreeSet<&str> = rows.iter().map(|row| row.shard.as_str()).collect();
    let mut total = 0;
    for shard in shards {
        let (mut header, mut end) = (Map::new(), 0);
        for row in rows.iter().filter(|row| row.shard == shard) {
            let offsets = [end, end + row.bytes];
            end += row.bytes;
            let info = json!({"dtype": row.dtype, "shape": row.shape, "data_offsets": offsets});
            header.insert(row.name.clone(), info);
        }
        let header = Value::Object(header).to_string();
        let mut file = File::create(folder.join(shard)).unwrap();
        file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
        file.write_all(header.as_bytes()).unwrap();
        file.set_len(8 + header.len() as u64 + end).unwrap();
        total += end;
    }
    total
}

/// Bytes that the folder's files really take.
fn on_disk(folder: &Path) -> u64 {
    std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().metadata().unwrap().blocks() * 512).sum()
}

/// Bytes of mapped files that are in this process's memory.
#[cfg(target_os = "linux")]
fn resident_file_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssFile:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Opens a checkpoint of holes, and checks that nothing but headers and small tensors was read.
fn load(folder: &Path, config: &Config) -> (Weights, String) {
    let log = Log::default();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
    let weights = tracing::subscriber::with_default(subscriber, || {
        let checkpoint = Checkpoint::open(&ModelFiles::folder(folder).unwrap()).unwrap();
        Weights::load(&checkpoint, config).unwrap()
    });
    #[cfg(target_os = "linux")]
    assert!(resident_file_bytes() < 200 << 20, "{} bytes were read", resident_file_bytes());
    (weights, log.text())
}

/// What was logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl tracing_subscriber::fmt::MakeWriter<'_> for Log {
    type Writer = Self;
    fn make_writer(&self) -> Self {
        self.clone()
    }
}

#[track_caller]
fn assert_complete(weights: &Weights, config: &Config) {
    assert_eq!((weights.lm_head.rows, weights.lm_head.cols), (248_320, 2048));
    assert_eq!(weights.layers.len(), 40);
    for (layer, kind) in weights.layers.iter().zip(&config.layers) {
        assert_eq!(matches!(layer.mixer, Mixer::Gdn(_)), *kind == LayerKind::Gdn);
        assert_eq!(layer.moe.experts.len(), 256);
        let expert = &layer.moe.experts[255];
        assert_eq!(
            (expert.up.rows, expert.up.cols, expert.down.rows, expert.down.cols),
            (512, 2048, 2048, 512)
        );
    }
}

#[test]
fn the_mlx_checkpoint_is_accepted_by_its_headers() {
    let folder = tempfile::tempdir().unwrap();
    let rows = rows(&data::mlx_tensors());
    assert_eq!(rows.len(), 2090);
    assert_eq!(write_sparse(folder.path(), &rows), 20_401_929_952);
    std::fs::write(folder.path().join("model.safetensors.index.json"), data::mlx_index()).unwrap();
    assert!(on_disk(folder.path()) < 4 << 20);

    let config = Config::from_json(CONFIG_35B_A3B).unwrap();
    let (weights, log) = load(folder.path(), &config);
    assert_complete(&weights, &config);
    assert_eq!(weights.layers[0].moe.experts[255].up.bytes(), 512 * (2048 / 2 + 2 * 2 * 2048 / 64));
    let skipped: Vec<&str> = log.lines().filter(|line| line.contains("skipped")).collect();
    assert_eq!(skipped.len(), 1, "{log}");
    assert!(skipped[0].contains("333 tensors vision_tower.*"), "{log}");
}

#[test]
fn the_hugging_face_checkpoint_is_accepted_by_its_headers() {
    let folder = tempfile::tempdir().unwrap();
    let rows = rows(&data::hf_tensors());
    assert_eq!(rows.len(), 1045);
    assert_eq!(write_sparse(folder.path(), &rows), 71_903_645_408);
    assert!(on_disk(folder.path()) < 4 << 20);

    let mut config: Value = serde_json::from_slice(CONFIG_35B_A3B).unwrap();
    config.as_object_mut().unwrap().retain(|key, _| !key.starts_with("quantization"));
    let config = Config::from_json(config.to_string().as_bytes()).unwrap();
    let (weights, log) = load(folder.path(), &config);
    assert_complete(&weights, &config);
    let skipped: Vec<&str> = log.lines().filter(|line| line.contains("skipped")).collect();
    assert_eq!(skipped.len(), 2, "{log}");
    assert!(log.contains("333 tensors model.visual.*") && log.contains("19 tensors mtp.*"), "{log}");
}

/// What `synth` writes by the manifest is what the real files hold: no tensor more or less, same types, same
/// shapes.
#[test]
fn the_manifest_lists_the_text_tensors_of_the_mlx_checkpoint() {
    type Listed = BTreeMap<String, (String, Vec<usize>)>;
    let text = rows(&data::mlx_tensors()).into_iter().filter(|row| !row.name.starts_with("vision_tower."));
    let published: Listed = text.map(|row| (row.name, (row.dtype, row.shape))).collect();
    let synth = Synth::new(CONFIG_35B_A3B, 0).unwrap();
    let listed = synth.tensors().map(|(name, dtype, shape)| {
        let dtype = serde_json::to_value(dtype).unwrap().as_str().unwrap().to_owned();
        (name.to_owned(), (dtype, shape.to_vec()))
    });
    let listed: Listed = listed.collect();
    assert_eq!(published.len(), 1757);
    assert_eq!(listed, published);
}
