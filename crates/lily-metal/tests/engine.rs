//! The engine on this backend, as `lily` runs it on a Mac: requests side by side, and a prefix that is not read again.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::sync::Arc;

use common::device::ShimDevice;
use common::model::{Model, folder};
use lily_engine::output::Delta;
use lily_engine::request::{Event, Finished, Request, Sampling};
use lily_engine::scheduler::{Engine, Generation, Options};
use lily_engine::testing::greedy;
use lily_metal::{KvType, MetalBackend};
use lily_model::backend::Backend;
use lily_model::files::ModelFiles;
use lily_model::tokenizer::Tokenizer;

/// Words of a golden tensor.
fn golden(name: &str) -> Vec<u32> {
    let bytes = std::fs::read(folder("tests/data/nano/goldens/goldens.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    tensors.tensor(name).unwrap().data().as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w)).collect()
}

fn engine() -> Engine {
    let model = nano();
    let options = lily_metal::Options {
        context: 128,
        max_sequences: 2,
        snapshot_bytes: 4 << 20,
        max_batch_tokens: 64,
        kv: KvType::F32,
        aligned_copies: false,
        ..lily_metal::Options::default()
    };
    let backend = MetalBackend::new(ShimDevice::new(1 << 30), model.config, &model.weights, &options);
    start(Box::new(backend.unwrap()))
}

/// The CPU's, in f32 as the kernels.
fn cpu_engine() -> Engine {
    let model = nano();
    let options = lily_cpu::Options {
        threads: Some(1),
        context: 128,
        max_sequences: 2,
        snapshot_bytes: 4 << 20,
        max_batch_tokens: 64,
        exact: true,
        ..lily_cpu::Options::default()
    };
    let backend = lily_cpu::CpuBackend::new(model.config, Arc::new(model.weights), &options);
    start(Box::new(backend.unwrap()))
}

fn nano() -> Model {
    Model::load(&folder("tests/data/nano/mlx-4bit"))
}

fn start(backend: Box<dyn Backend>) -> Engine {
    let files = ModelFiles::folder(folder("tests/data/nano/mlx-4bit")).unwrap();
    let tokenizer = files.open("tokenizer.json").unwrap();
    let options = Options {
        max_sequences: 2,
        max_queue: 4,
        prefill_chunk: 32,
        shared_prefill_chunk: 16,
        cache_bytes: 4 << 20,
        snapshot_interval: 32,
        eos: vec![],
    };
    Engine::start(backend, Arc::new(Tokenizer::from_bytes(&tokenizer).unwrap()), options)
}

/// Tokens are reported with log-probabilities only.
fn request(prompt: Vec<u32>, tokens: u32, logprobs: Option<u32>) -> Request {
    let sampling = Sampling { logprobs, ..greedy() };
    Request { max_tokens: Some(tokens), ignore_eos: true, ..Request::raw(prompt, sampling) }
}

struct Reply {
    tokens: Vec<u32>,
    text: String,
    finished: Finished,
}

fn reply(mut generation: Generation) -> Reply {
    let (mut tokens, mut text) = (Vec::new(), String::new());
    loop {
        match generation.events.blocking_recv().expect("the engine stopped") {
            Event::Token { id, .. } => tokens.push(id),
            Event::Delta(Delta::Text(piece)) => text += &piece,
            Event::Finished(finished) => return Reply { tokens, text, finished },
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
}

#[test]
fn requests_say_what_the_goldens_say_and_go_on_from_the_cache() {
    let engine = engine();
    let (a, b) = (golden("prompt.7"), golden("prompt.64"));
    let (golden_a, golden_b) = (golden("decode.q4.7"), golden("decode.q4.64"));
    // Side by side, one of them with log-probabilities.
    let first = engine.submit(request(a.clone(), 16, Some(0))).unwrap();
    let second = engine.submit(request(b.clone(), 8, None)).unwrap();
    let (first, second) = (reply(first), reply(second));
    assert_eq!(first.tokens, golden_a[..16]);
    assert_eq!(first.finished.usage.completion_tokens, 16);
    let again = reply(engine.submit(request(a.clone(), 16, None)).unwrap());
    assert_eq!(again.text, first.text);
    assert_eq!(again.finished.usage.cached_tokens, 6);
    let told = reply(engine.submit(request(b.clone(), 8, Some(0))).unwrap());
    assert_eq!((&told.tokens[..], &told.text), (&golden_b[..8], &second.text));
    assert_eq!(told.finished.usage.cached_tokens, 63);
    // The next turn begins with the prompt and its reply, of which the last token was never fed.
    let next: Vec<u32> = a.iter().chain(&golden_a[..18]).copied().collect();
    let next = reply(engine.submit(request(next, 8, Some(0))).unwrap());
    assert_eq!(next.tokens, golden_a[18..26]);
    assert_eq!(next.finished.usage.cached_tokens, 7 + 15);
    engine.shutdown(std::time::Duration::ZERO);
}

/// The same seeds give the same texts on the CPU and by the kernels, with every way to draw.
#[test]
fn sampled_texts_are_those_of_the_cpu() {
    let (metal, cpu) = (engine(), cpu_engine());
    let any = Sampling { temperature: 1.0, logprobs: Some(2), ..greedy() };
    let ways = [
        any.clone(),
        Sampling { temperature: 0.6, top_k: 20, top_p: 0.95, ..any.clone() },
        Sampling { top_p: 0.9, presence_penalty: 1.5, ..any.clone() },
        Sampling { min_p: 0.05, repetition_penalty: 1.2, ..any.clone() },
        Sampling { frequency_penalty: 0.5, logit_bias: Arc::new([(5, 2.0), (9, -100.0)]), ..any },
    ];
    for (seed, way) in (1..).zip(ways) {
        let sampling = Sampling { seed: Some(seed), ..way };
        let request = |prompt: &str| Request {
            max_tokens: Some(12),
            ignore_eos: true,
            ..Request::raw(golden(prompt), sampling.clone())
        };
        // Side by side too.
        for engine_prompts in [&["prompt.7"][..], &["prompt.7", "prompt.64"]] {
            let texts = [&metal, &cpu].map(|engine| {
                let all: Vec<_> = engine_prompts.iter().map(|p| engine.submit(request(p)).unwrap()).collect();
                all.into_iter().map(|generation| reply(generation).tokens).collect::<Vec<_>>()
            });
            assert_eq!(texts[0], texts[1], "{sampling:?}");
        }
    }
    metal.shutdown(std::time::Duration::ZERO);
    cpu.shutdown(std::time::Duration::ZERO);
}
