//! What a client is answered, and how it follows from the engine's events. Streamed or not, an answer is
//! made of the same [`Choice`]s: a stream sends them one by one, the other path adds them up.

use std::sync::Arc;
use std::{iter, mem};

use lily_engine::output;
use lily_engine::request::Usage;
use lily_model::tokenizer::Tokenizer;
use serde::Serialize;

use crate::generation::logprobs::TokenLogprob;
use crate::generation::replies::{Piece, PromptProgress, reason};

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
    pub choices: Vec<FullChoice>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_progress: Option<PromptProgress>,
}

/// What one chunk adds to the answer.
#[derive(Debug, Default, Serialize)]
pub(super) struct Choice {
    index: u32,
    delta: Delta,
    logprobs: Option<LogprobList>,
    finish_reason: Option<&'static str>,
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

#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct UsageReport {
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
    /// A chunk that adds nothing.
    pub fn empty(index: usize) -> Self {
        Self { index: index as u32, ..Self::default() }
    }

    /// The chunk that tells whose message follows, sent before anything is known of it.
    pub fn role(index: usize) -> Self {
        let delta = Delta { role: Some("assistant"), ..Delta::default() };
        Self { index: index as u32, delta, ..Self::default() }
    }
}

impl FullChoice {
    /// Before anything is known of answer `index`.
    pub fn new(index: usize) -> Self {
        Self { index: index as u32, ..Self::default() }
    }

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

/// Turns pieces of answers into [`Choice`]s.
pub(super) struct Choices {
    tokenizer: Arc<Tokenizer>,
    answers: Vec<Answer>,
}

/// An answer so far.
struct Answer {
    /// Tokens whose text has not come yet; `None` unless asked for.
    tokens: Option<Vec<TokenLogprob>>,
    tags: Tags,
}

/// Where an answer is whose thought is part of its content.
#[derive(Clone, Copy, PartialEq)]
enum Tags {
    /// It is not.
    Apart,
    Before,
    Inside,
    Behind,
}

impl Choices {
    /// For `n` answers, with log-probabilities or without. `tagged`: thoughts are part of the content.
    pub fn new(n: usize, tokenizer: Arc<Tokenizer>, logprobs: bool, tagged: bool) -> Self {
        let tags = if tagged { Tags::Before } else { Tags::Apart };
        let answer = || Answer { tokens: logprobs.then(Vec::new), tags };
        Self { tokenizer, answers: iter::repeat_with(answer).take(n).collect() }
    }

    /// What a piece of answer `index` adds to it, if anything yet.
    pub fn of(&mut self, index: usize, piece: Piece) -> Option<Choice> {
        let answer = &mut self.answers[index];
        let (delta, finish_reason) = match piece {
            Piece::PromptToken { .. } | Piece::Prefill(_) => return None,
            Piece::Token { id, logprobs, .. } => {
                let token = TokenLogprob::new(id, &logprobs, &self.tokenizer);
                answer.tokens.get_or_insert_default().push(token);
                return None;
            }
            Piece::Delta(delta) => (answer.tags.delta(delta), None),
            Piece::End(finished) => (Delta::default(), Some(reason(finished.reason))),
        };
        let tokens = answer.tokens.as_mut();
        let logprobs = tokens.map(|tokens| LogprobList { content: mem::take(tokens), refusal: None });
        Some(Choice { index: index as u32, delta, logprobs, finish_reason })
    }
}

impl Tags {
    /// A piece of output with the tags that stand before it.
    fn delta(&mut self, delta: output::Delta) -> Delta {
        match (*self, delta) {
            (Self::Before, output::Delta::Reasoning(text)) => {
                *self = Self::Inside;
                Delta { content: Some(format!("<think>\n{text}")), ..Delta::default() }
            }
            (Self::Inside, output::Delta::Reasoning(text)) => {
                Delta { content: Some(text), ..Delta::default() }
            }
            (Self::Inside, delta) => {
                *self = Self::Behind;
                let mut delta = Delta::from(delta);
                delta.content = Some(format!("\n</think>\n\n{}", delta.content.unwrap_or_default()));
                delta
            }
            (_, delta) => delta.into(),
        }
    }
}
