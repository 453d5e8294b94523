//! What a client is answered, and how it follows from the engine's events. Streamed or not, an answer is
//! made of the same [`Choice`]s: a stream sends them one by one, the other path adds them up.

use std::mem;
use std::sync::Arc;

use lily_engine::output;
use lily_engine::request::{Event, FinishReason, Finished, Usage};
use lily_engine::scheduler::Generation;
use lily_model::sample::Logprobs;
use lily_model::tokenizer::Tokenizer;
use serde::Serialize;
use tracing::Span;

use crate::error::ApiError;

/// What stands for the logarithm of 0 in OpenAI's API.
const LOG_ZERO: f32 = -9999.0;

/// The members that an answer and all chunks of a stream begin with.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Head {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub system_fingerprint: &'static str,
}

/// An answer that is not streamed.
#[derive(Debug, Serialize)]
pub(super) struct ChatCompletion {
    #[serde(flatten)]
    pub head: Head,
    pub choices: [FullChoice; 1],
    pub usage: UsageReport,
}

/// The answer of a [`ChatCompletion`]: the sum of [`Choice`]s.
#[derive(Debug, Default, Serialize)]
pub(super) struct FullChoice {
    index: u32,
    message: Message,
    logprobs: Option<LogprobList>,
    finish_reason: Option<&'static str>,
}

#[derive(Debug, Serialize)]
struct Message {
    role: &'static str,
    content: Option<String>,
    refusal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

impl Default for Message {
    fn default() -> Self {
        Self {
            role: "assistant",
            content: None,
            refusal: None,
            reasoning_content: None,
            tool_calls: Vec::new(),
        }
    }
}

/// A chunk of a stream.
#[derive(Debug, Serialize)]
pub(super) struct Chunk<'a> {
    #[serde(flatten)]
    pub head: &'a Head,
    pub choices: &'a [Choice],
    /// Absent unless asked for; then null in all chunks but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<UsageReport>>,
}

/// What one chunk adds to the answer.
#[derive(Debug, Default, Serialize)]
pub(super) struct Choice {
    index: u32,
    delta: Delta,
    logprobs: Option<LogprobList>,
    pub finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

/// A tool call, or in a chunk what is added to one.
#[derive(Debug, Serialize)]
struct ToolCall {
    /// Which call a chunk adds to.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: Function,
}

#[derive(Debug, Serialize)]
struct Function {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

#[derive(Debug, Default, Serialize)]
struct LogprobList {
    content: Vec<TokenLogprob>,
    /// Always null: the model has no separate channel for refusals.
    refusal: Option<Vec<TokenLogprob>>,
}

#[derive(Debug, Serialize)]
struct TokenLogprob {
    #[serde(flatten)]
    token: Candidate,
    top_logprobs: Vec<Candidate>,
}

#[derive(Debug, Serialize)]
struct Candidate {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct UsageReport {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct PromptDetails {
    cached_tokens: u32,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct CompletionDetails {
    reasoning_tokens: u32,
}

impl From<Usage> for UsageReport {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens: usage.cached_tokens },
            completion_tokens_details: CompletionDetails { reasoning_tokens: usage.reasoning_tokens },
        }
    }
}

impl From<output::Delta> for Delta {
    fn from(delta: output::Delta) -> Self {
        let call = |index, id: Option<String>, name, arguments| Self {
            tool_calls: vec![ToolCall {
                index: Some(index),
                kind: id.is_some().then_some("function"),
                id,
                function: Function { name, arguments },
            }],
            ..Self::default()
        };
        match delta {
            output::Delta::Reasoning(text) => Self { reasoning_content: Some(text), ..Self::default() },
            output::Delta::Text(text) => Self { content: Some(text), ..Self::default() },
            output::Delta::ToolCall { index, id, name } => call(index, Some(id), Some(name), String::new()),
            output::Delta::ToolArguments { index, fragment } => call(index, None, None, fragment),
        }
    }
}

impl Choice {
    /// The chunk that tells whose message follows, sent before anything is known of it.
    pub fn role() -> Self {
        Self { delta: Delta { role: Some("assistant"), ..Delta::default() }, ..Self::default() }
    }
}

impl FullChoice {
    /// Adds a piece.
    pub fn add(&mut self, piece: Choice) {
        self.message.add(piece.delta);
        if let Some(list) = piece.logprobs {
            self.logprobs.get_or_insert_default().content.extend(list.content);
        }
        self.finish_reason = piece.finish_reason;
    }
}

impl Message {
    fn add(&mut self, delta: Delta) {
        if let Some(text) = delta.content {
            self.content.get_or_insert_default().push_str(&text);
        }
        if let Some(text) = delta.reasoning_content {
            self.reasoning_content.get_or_insert_default().push_str(&text);
        }
        for mut call in delta.tool_calls {
            match self.tool_calls.last_mut() {
                Some(last) if call.id.is_none() => last.function.arguments.push_str(&call.function.arguments),
                _ => {
                    call.index = None;
                    self.tool_calls.push(call);
                }
            }
        }
    }
}

/// An answer as it comes. Dropping it cancels the generation.
pub(super) struct Reply {
    generation: Generation,
    tokenizer: Arc<Tokenizer>,
    /// Tokens whose text has not come yet; `None` unless asked for.
    tokens: Option<Vec<TokenLogprob>>,
    /// Log lines belong to the request even after the head of the answer is sent.
    pub span: Span,
    ended: bool,
}

impl Reply {
    pub fn new(generation: Generation, tokenizer: Arc<Tokenizer>, logprobs: bool) -> Self {
        let tokens = logprobs.then(Vec::new);
        Self { generation, tokenizer, tokens, span: Span::current(), ended: false }
    }

    /// The next piece, with the token counts if it is the last.
    pub async fn next(&mut self) -> Result<(Choice, Option<UsageReport>), ApiError> {
        loop {
            match self.generation.events.recv().await {
                Some(Event::Started | Event::Prefill { .. }) => {}
                Some(Event::Token { id, logprobs }) => {
                    let token = self.token(id, &logprobs);
                    self.tokens.get_or_insert_default().push(token);
                }
                Some(Event::Delta(delta)) => return Ok((self.piece(delta.into(), None), None)),
                Some(Event::Finished(finished)) => {
                    self.ended = true;
                    self.log(&finished);
                    let piece = self.piece(Delta::default(), Some(reason(finished.reason)));
                    return Ok((piece, Some(finished.usage.into())));
                }
                Some(Event::Failed(error)) => {
                    self.ended = true;
                    return Err(error.into());
                }
                None => {
                    self.ended = true;
                    return Err(ApiError::internal("the engine ended before the answer"));
                }
            }
        }
    }

    fn piece(&mut self, delta: Delta, finish_reason: Option<&'static str>) -> Choice {
        let logprobs =
            self.tokens.as_mut().map(|tokens| LogprobList { content: mem::take(tokens), refusal: None });
        Choice { index: 0, delta, logprobs, finish_reason }
    }

    fn token(&self, id: u32, logprobs: &Logprobs) -> TokenLogprob {
        let candidate = |id: u32, logprob: f32| {
            let bytes = self.tokenizer.token_bytes(id).to_vec();
            let token = String::from_utf8_lossy(&bytes).into_owned();
            Candidate { token, logprob: logprob.max(LOG_ZERO), bytes }
        };
        let top_logprobs = logprobs.top.iter().map(|&(id, logprob)| candidate(id, logprob)).collect();
        TokenLogprob { token: candidate(id, logprobs.token), top_logprobs }
    }

    fn log(&self, finished: &Finished) {
        tracing::info!(
            parent: &self.span,
            reason = reason(finished.reason),
            prompt_tokens = finished.usage.prompt_tokens,
            cached_tokens = finished.usage.cached_tokens,
            completion_tokens = finished.usage.completion_tokens,
            queued_ms = finished.timing.queued.as_millis() as u64,
            prefill_ms = finished.timing.prefill.as_millis() as u64,
            decode_ms = finished.timing.decode.as_millis() as u64,
            "finished"
        );
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.ended {
            tracing::info!(parent: &self.span, "cancelled: the client has left");
        }
    }
}

fn reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
    }
}
