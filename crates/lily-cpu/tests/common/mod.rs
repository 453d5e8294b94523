//! The `nano` fixture: a random model of the architecture and golden logits from independent programs.
//! `tests/data/nano/README.md` says how it was made.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(dead_code, reason = "each test file uses its own part")]

use std::path::PathBuf;
use std::sync::Arc;

use lily_cpu::{CpuBackend, Options};
use lily_model::backend::{Backend, Batch, Output, Rows, Segment, SeqId, StepOutput, Tokens, Want};
use lily_model::checkpoint::Checkpoint;
use lily_model::config::Config;
use lily_model::files::ModelFiles;
use lily_model::sample::argmax;
use lily_model::weights::Weights;

/// What both f32 paths must reach against every reference.
pub const TOLERANCE: f32 = 1e-4;

pub fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/nano")
}

/// Files of the fixture's two forms: `dense` (Hugging Face layout, bf16) and `q4` (MLX layout, 4 bit).
pub fn folder(form: &str) -> PathBuf {
    fixture().join(if form == "dense" { "hf" } else { "mlx-4bit" })
}

pub struct Model {
    pub config: Config,
    pub weights: Arc<Weights>,
    /// Whether its backends compute in f32, as the references do.
    pub exact: bool,
}

/// The fixture in one of its forms; `q4-int8` is `q4` with int8 activations and a bf16 cache.
pub fn load(form: &str) -> Model {
    let (form, exact) = form.strip_suffix("-int8").map_or((form, true), |form| (form, false));
    load_folder(folder(form), exact)
}

/// The trained demonstration model.
pub fn demo(exact: bool) -> Model {
    load_folder(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/demo"), exact)
}

fn load_folder(folder: PathBuf, exact: bool) -> Model {
    let files = ModelFiles::folder(folder).unwrap();
    let config = Config::from_json(&files.open("config.json").unwrap()).unwrap();
    let weights = Weights::load(&Checkpoint::open(&files).unwrap(), &config).unwrap();
    Model { config, weights: Arc::new(weights), exact }
}

impl Model {
    pub fn backend(&self) -> CpuBackend {
        self.backend_with(Options {
            threads: Some(2),
            context: 1024,
            max_batch_tokens: 1024,
            exact: self.exact,
            ..Options::default()
        })
    }

    pub fn backend_with(&self, options: Options) -> CpuBackend {
        CpuBackend::new(self.config.clone(), self.weights.clone(), &options).unwrap()
    }
}

/// Golden tensors by name.
pub struct Goldens(std::collections::HashMap<String, (Vec<usize>, Vec<u8>)>);

impl Goldens {
    pub fn open(file: &str) -> Self {
        let bytes = std::fs::read(fixture().join("goldens").join(file)).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        Self(tensors.iter().map(|(n, t)| (n.to_owned(), (t.shape().to_vec(), t.data().to_vec()))).collect())
    }

    fn words<T>(&self, name: &str, value: impl Fn([u8; 4]) -> T) -> Vec<T> {
        let (_, data) = self.0.get(name).unwrap_or_else(|| panic!("no golden {name}"));
        data.as_chunks::<4>().0.iter().map(|w| value(*w)).collect()
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        self.words(name, f32::from_le_bytes)
    }

    pub fn ids(&self, name: &str) -> Vec<u32> {
        self.words(name, u32::from_le_bytes)
    }

    /// Rows of a matrix.
    pub fn rows(&self, name: &str) -> Vec<Vec<f32>> {
        let width = *self.0[name].0.last().unwrap();
        self.f32(name).chunks_exact(width).map(<[f32]>::to_vec).collect()
    }
}

/// Feeds tokens at the end of a sequence; logits of all of them.
pub fn feed(backend: &mut CpuBackend, seq: SeqId, start: usize, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut outputs = step(backend, vec![segment(seq, start, ids, Want::Logits(Rows::All))]);
    rows(outputs.remove(0).unwrap(), backend.limits().vocab_size)
}

pub fn segment(seq: SeqId, start: usize, ids: &[u32], want: Want) -> Segment {
    Segment { seq, start: start as u32, tokens: Tokens::Ids(ids.to_vec()), want }
}

pub fn step(backend: &mut CpuBackend, segments: Vec<Segment>) -> StepOutput {
    let ticket = backend.forward(&Batch { segments }).unwrap();
    backend.wait(ticket).unwrap()
}

pub fn rows(output: Output, vocab: u32) -> Vec<Vec<f32>> {
    match output {
        Output::Logits(logits) => logits.chunks_exact(vocab as usize).map(<[f32]>::to_vec).collect(),
        other => panic!("expected logits, got {other:?}"),
    }
}

pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d.is_nan() { f32::NAN } else { m.max(d) })
}

pub fn assert_close(what: &str, got: &[f32], expected: &[f32]) -> f32 {
    let d = max_difference(got, expected);
    assert!(d < TOLERANCE, "{what}: max difference {d:e}");
    d
}

/// Prompt, then greedy tokens: logits of the prompt, logits behind each token, the tokens.
pub struct Run {
    pub prefill: Vec<Vec<f32>>,
    pub decode: Vec<Vec<f32>>,
    pub tokens: Vec<u32>,
}

/// Runs a prompt and 32 greedy steps through anything that maps (position, tokens) to logits.
pub fn run(prompt: &[u32], mut feed: impl FnMut(usize, &[u32]) -> Vec<Vec<f32>>) -> Run {
    let prefill = feed(0, prompt);
    let mut last = prefill.last().unwrap().clone();
    let (mut decode, mut tokens) = (Vec::new(), Vec::new());
    for i in 0..32 {
        tokens.push(argmax(&last));
        last = feed(prompt.len() + i, &tokens[i..]).remove(0);
        decode.push(last.clone());
    }
    Run { prefill, decode, tokens }
}
