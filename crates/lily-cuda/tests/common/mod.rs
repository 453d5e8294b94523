//! Models and helpers. `LILY_ROOT` names the repository where the tests run elsewhere than they were built.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(dead_code, reason = "each test file uses its own part")]

use std::collections::VecDeque;
use std::path::PathBuf;

use lily_cpu::reference::{Reference, State};
use lily_cpu::tap::no_tap;
use lily_cuda::driver::{Context, DriverError};
use lily_cuda::{CudaBackend, Options};
use lily_model::backend::{Backend, Batch, Output, Rows, Segment, SeqId, StepOutput, Tokens, Want};
use lily_model::checkpoint::Checkpoint;
use lily_model::config::Config;
use lily_model::files::ModelFiles;
use lily_model::sample::SampleParams;
use lily_model::weights::Weights;

pub mod random;

pub fn root() -> PathBuf {
    std::env::var_os("LILY_ROOT")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../.."), PathBuf::from)
}

/// Whether there is a device; says why not. A machine with a driver but a broken device fails the tests, and so does one without
/// a driver where tools/gpu/run runs them.
pub fn device() -> bool {
    match Context::open(0) {
        Ok(_) => true,
        Err(e @ DriverError::NoDriver) if std::env::var_os("LILY_TEST_DEVICE").is_none() => {
            println!("skipped: {e}");
            false
        }
        Err(e) => panic!("{e}"),
    }
}

pub struct Model {
    pub config: Config,
    pub weights: Weights,
}

/// The fixture's two forms (`dense`, `q4`) and the demonstration model (`demo`).
pub fn load(form: &str) -> Model {
    let folder = match form {
        "dense" => "tests/data/nano/hf",
        "q4" => "tests/data/nano/mlx-4bit",
        _ => "models/demo",
    };
    let files = ModelFiles::folder(root().join(folder)).unwrap();
    let config = Config::from_json(&files.open("config.json").unwrap()).unwrap();
    let weights = Weights::load(&Checkpoint::open(&files).unwrap(), &config).unwrap();
    Model { config, weights }
}

pub fn options() -> Options {
    Options {
        context: 1024,
        max_batch_tokens: 512,
        max_sequences: 8,
        snapshot_bytes: 64 << 20,
        cache: std::env::var_os("LILY_CUDA_CACHE").map(PathBuf::from),
        ..Options::default()
    }
}

impl Model {
    pub fn backend(&self) -> CudaBackend {
        self.backend_with(&options())
    }

    pub fn backend_with(&self, options: &Options) -> CudaBackend {
        CudaBackend::new(self.config.clone(), &self.weights, options).unwrap()
    }

    /// Logits of every position by the plain f32 reference.
    pub fn reference(&self, ids: &[u32]) -> Vec<Vec<f32>> {
        let reference = Reference { config: &self.config, weights: &self.weights };
        let mut state = State::default();
        ids.iter().map(|id| reference.logits(&reference.step(*id, &mut state, &mut no_tap))).collect()
    }
}

pub fn segment(seq: SeqId, start: usize, ids: &[u32], want: Want) -> Segment {
    Segment { seq, start: start as u32, tokens: Tokens::Ids(ids.to_vec()), want }
}

pub fn step(backend: &mut CudaBackend, segments: Vec<Segment>) -> StepOutput {
    let ticket = backend.forward(&Batch { segments }).unwrap();
    backend.wait(ticket).unwrap()
}

pub fn rows(output: Output, vocab: u32) -> Vec<Vec<f32>> {
    match output {
        Output::Logits(logits) => logits.chunks_exact(vocab as usize).map(<[f32]>::to_vec).collect(),
        other => panic!("expected logits, got {other:?}"),
    }
}

/// Feeds tokens at the end of a sequence; logits of all of them.
pub fn feed(backend: &mut CudaBackend, seq: SeqId, start: usize, ids: &[u32]) -> Vec<Vec<f32>> {
    let most = backend.limits().max_batch_tokens as usize;
    let vocab = backend.limits().vocab_size;
    let mut out = Vec::new();
    for (i, ids) in ids.chunks(most).enumerate() {
        let all = vec![segment(seq, start + i * most, ids, Want::Logits(Rows::All))];
        out.extend(rows(step(backend, all).remove(0).unwrap(), vocab));
    }
    out
}

/// Logits of a prompt in a sequence of its own.
pub fn fresh(backend: &mut CudaBackend, ids: &[u32]) -> Vec<Vec<f32>> {
    let seq = backend.create(ids.len() as u32).unwrap();
    let logits = feed(backend, seq, 0, ids);
    backend.free(seq).unwrap();
    logits
}

/// Reads prompts side by side and writes `n` greedy tokens behind each, through tokens that never leave the device and with two
/// steps in flight.
pub fn greedy(backend: &mut CudaBackend, prompts: &[Vec<u32>], n: usize) -> Vec<Vec<u32>> {
    let capacity = |p: &Vec<u32>| (p.len() + n) as u32;
    let seqs: Vec<_> = prompts.iter().map(|p| backend.create(capacity(p)).unwrap()).collect();
    let mut texts = vec![Vec::new(); prompts.len()];
    let mut tickets = VecDeque::new();
    for i in 0..=n {
        if i < n {
            let segment = |(seq, p): (&SeqId, &Vec<u32>)| Segment {
                seq: *seq,
                start: if i == 0 { 0 } else { (p.len() + i - 1) as u32 },
                tokens: if i == 0 { Tokens::Ids(p.clone()) } else { Tokens::LastSampled },
                want: Want::Sample(SampleParams::greedy().into()),
            };
            let segments = seqs.iter().zip(prompts).map(segment).collect();
            tickets.push_back(backend.forward(&Batch { segments }).unwrap());
        }
        if i >= 1 {
            let outputs = backend.wait(tickets.pop_front().unwrap()).unwrap();
            for (text, out) in texts.iter_mut().zip(outputs) {
                match out.unwrap() {
                    Output::Sampled(s) => text.push(s.token),
                    other => panic!("{other:?}"),
                }
            }
        }
    }
    seqs.into_iter().for_each(|s| backend.free(s).unwrap());
    texts
}

/// A thousand greedy tokens behind each of eight prompts, and behind two of these alone: they must be the same.
pub fn assert_batch_changes_nothing(backend: &mut CudaBackend) {
    let vocab = backend.limits().vocab_size as usize;
    let prompts: Vec<Vec<u32>> = (0..8).map(|i| tokens(20 + i, vocab)[i..].to_vec()).collect();
    let together = greedy(backend, &prompts, 1001);
    for (i, prompt) in prompts.iter().enumerate().take(2) {
        let alone = greedy(backend, std::slice::from_ref(prompt), 1001).remove(0);
        let same = alone.iter().zip(&together[i]).take_while(|(a, b)| a == b).count();
        println!("sequence {i}: the first {same} of 1001 tokens are equal");
        assert_eq!(same, 1001);
    }
}

/// `|a - b| / |b|` over all rows, and the largest difference. NaN where either has one.
pub fn distance(a: &[Vec<f32>], b: &[Vec<f32>]) -> (f64, f64) {
    assert_eq!(a.len(), b.len());
    let (mut difference, mut norm, mut worst) = (0.0, 0.0, 0.0f64);
    for (a, b) in a.iter().flatten().zip(b.iter().flatten()) {
        let d = f64::from(*a) - f64::from(*b);
        difference += d * d;
        norm += f64::from(*b) * f64::from(*b);
        worst = if d.is_nan() || worst.is_nan() { f64::NAN } else { worst.max(d.abs()) };
    }
    ((difference / norm).sqrt(), worst)
}

pub fn assert_close(what: &str, got: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f64) {
    let (relative, worst) = distance(got, expected);
    println!("{what}: relative distance {relative:.1e}, largest difference {worst:.1e}");
    assert!(relative < tolerance, "{what}: {relative:e} is not below {tolerance:e}");
}

pub fn tokens(n: usize, vocab: usize) -> Vec<u32> {
    (0..n as u64).map(|i| ((i * 2_654_435_761 % (1 << 32)) % vocab as u64) as u32).collect()
}
