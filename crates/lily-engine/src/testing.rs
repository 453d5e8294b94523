//! What tests of the engine, and of everything above it, need instead of a model: [`FakeBackend`], which
//! says what it is told to, and a small tokenizer to say it with. Behind the feature `testing`.

mod backend;
mod text;

use std::sync::Arc;

use lily_model::backend::Limits;

use crate::request::{Request, Sampling};
use crate::scheduler::Options;

pub use backend::{Act, Audit, FakeBackend, say};
pub use text::{END_OF_TURN, tokenizer, tokens};

/// Limits that fit every small test: a context of 4,096 tokens and memory for four times as many.
pub fn limits() -> Limits {
    Limits {
        name: "fake".to_owned(),
        vocab_size: 300,
        context: 4096,
        max_batch_tokens: 64,
        max_segments: 16,
        state_budget: 4 * 4096,
    }
}

/// Settings that go with [`limits`]; without a cache.
pub fn options() -> Options {
    Options {
        max_sequences: 8,
        max_queue: 32,
        prefill_chunk: 16,
        shared_prefill_chunk: 16,
        cache_bytes: 0,
        snapshot_interval: 100,
        eos: vec![END_OF_TURN],
    }
}

/// The most likely token, always.
pub fn greedy() -> Sampling {
    Sampling {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Arc::new([]),
        seed: None,
        logprobs: None,
    }
}

/// A request for raw text without limits.
pub fn request(prompt: Vec<u32>) -> Request {
    Request::raw(prompt, greedy())
}
