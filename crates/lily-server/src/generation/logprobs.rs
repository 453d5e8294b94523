//! Log-probabilities in the form of chat completions and responses.

use lily_model::sample::Logprobs;
use lily_model::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::Value;

/// What stands for the logarithm of 0 in OpenAI's API.
pub(crate) const LOG_ZERO: f32 = -9999.0;

/// A number in as few digits as tell it from others: made an f64 first, it would have more.
pub(crate) fn short(x: f32) -> Value {
    x.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// A token of an answer.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TokenLogprob {
    #[serde(flatten)]
    token: Candidate,
    top_logprobs: Vec<Candidate>,
}

#[derive(Clone, Debug, Serialize)]
struct Candidate {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl TokenLogprob {
    pub fn new(id: u32, logprobs: &Logprobs, tokenizer: &Tokenizer) -> Self {
        let candidate = |id: u32, logprob: f32| {
            let bytes = tokenizer.token_bytes(id).to_vec();
            let token = String::from_utf8_lossy(&bytes).into_owned();
            Candidate { token, logprob: logprob.max(LOG_ZERO), bytes }
        };
        let top_logprobs = logprobs.top.iter().map(|&(id, logprob)| candidate(id, logprob)).collect();
        Self { token: candidate(id, logprobs.token), top_logprobs }
    }
}
