//! What is asked of the engine and what it answers.

use std::sync::Arc;
use std::time::Duration;

use lily_model::backend::SegmentError;
use lily_model::sample::Logprobs;

use crate::constraint::Constraint;
use crate::output::Delta;

/// One generation.
#[derive(Clone, Debug)]
pub struct Request {
    /// Token ids of the whole prompt; at least one.
    pub prompt: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Report log-probabilities of the prompt's tokens, and of this many alternatives to each. The prompt is then
    /// read in full, whatever the prefix cache has of it.
    pub prompt_logprobs: Option<u32>,
    /// Most tokens to generate; `None`: to the end of the context. 0 only with `prompt_logprobs`.
    pub max_tokens: Option<u32>,
    /// Strings that end the answer; they are cut off. Matched on the answer's text, never inside a thought or a
    /// tool call; [`StopMatcher`](crate::stop::StopMatcher) has the rule.
    pub stop: Vec<String>,
    /// How the output is read.
    pub format: OutputFormat,
    /// Generate on past the model's end-of-turn tokens.
    pub ignore_eos: bool,
    /// Lengths of beginnings of the prompt that other prompts may share: their states are kept in the prefix
    /// cache. They need not be in order, and those that leave nothing of the prompt to read are passed over;
    /// empty: all but the last token.
    pub boundaries: Vec<u32>,
    /// Use the prefix cache; otherwise nothing is taken from it and nothing added.
    pub cache_prompt: bool,
    /// What the reply is held to; comes from [`Engine::compile`](crate::scheduler::Engine::compile).
    pub constraint: Option<Constraint>,
    /// Most tokens of the thought, its closing tag included; at least 1. When so many but one have come, the next
    /// one is the closing tag. Means nothing where the reply does not begin with a thought.
    pub thinking_budget: Option<u32>,
}

impl Request {
    /// A request for raw text after a prompt, without limits.
    pub fn raw(prompt: Vec<u32>, sampling: Sampling) -> Self {
        Self {
            prompt,
            sampling,
            prompt_logprobs: None,
            max_tokens: None,
            stop: Vec::new(),
            format: OutputFormat::Raw,
            ignore_eos: false,
            boundaries: Vec::new(),
            cache_prompt: true,
            constraint: None,
            thinking_budget: None,
        }
    }
}

/// Sampling parameters as a request gives them. See [`lily_model::sample::SampleParams`] for their meaning.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "documented at SampleParams")]
pub struct Sampling {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub logit_bias: Arc<[(u32, f32)]>,
    /// `None`: a seed of the engine's own choice, different for every request.
    pub seed: Option<u64>,
    /// Report log-probabilities of every token and of this many alternatives.
    pub logprobs: Option<u32>,
}

/// How the generated text is read.
#[derive(Clone, Debug)]
pub enum OutputFormat {
    /// All of it is the answer, whatever it contains.
    Raw,
    /// A turn of a chat.
    Chat {
        /// The prompt ends inside an open `<think>` block, so the output starts as a thought.
        starts_in_thought: bool,
        /// The tools that may be called; empty: tool-call markup is text.
        tools: Arc<[Tool]>,
        /// The reply ends with its first tool call.
        single_call: bool,
    },
}

/// A tool that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Function name.
    pub name: String,
    /// JSON schema of the arguments, as the client gave it (an object schema or null).
    pub parameters: serde_json::Value,
}

/// What a generation reports, in order: `Started`, then `PromptToken`/`Prefill`, then `InterToken`/`Token`/`Delta`/`Call`
/// mixed, then one `Finished` or `Failed`. A request that never leaves the queue reports `Failed` alone.
#[derive(Clone, Debug)]
pub enum Event {
    /// The request left the queue.
    Started,
    /// So many of the prompt's tokens are read.
    Prefill {
        /// Tokens of the prompt in the model's state.
        done: u32,
        /// Tokens of the prompt.
        total: u32,
        /// Of these, tokens that came from the prefix cache.
        cached: u32,
    },
    /// A token of the prompt, in order (only sent when log-probabilities of the prompt were asked for).
    PromptToken {
        /// Its id.
        id: u32,
        /// Its log-probabilities; `None` for the first: nothing predicts it.
        logprobs: Option<Logprobs>,
    },
    /// The time between the last two tokens generated, the end-of-turn token included.
    InterToken(Duration),
    /// A token was generated (only sent when log-probabilities were asked for). The token that ends the turn is
    /// reported in raw output alone: it is no part of a message.
    Token {
        /// Its id.
        id: u32,
        /// Its log-probabilities.
        logprobs: Logprobs,
        /// It belongs to the thought, as its closing tag does.
        in_thought: bool,
    },
    /// A piece of output.
    Delta(Delta),
    /// A tool call is complete; all of its pieces came before.
    Call(SampledCall),
    /// The end.
    Finished(Finished),
    /// The generation failed; nothing follows.
    Failed(RequestError),
}

/// A tool call as the model wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SampledCall {
    /// As in [`Delta::ToolCall`].
    pub id: String,
    /// What was sampled between `<tool_call>` and `</tool_call>`; no control tokens.
    pub tokens: Vec<u32>,
}

/// How a generation ended and what it took.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Why it ended.
    pub reason: FinishReason,
    /// The stop string that was met, if one was.
    pub stop: Option<String>,
    /// Tokens.
    pub usage: Usage,
    /// Times.
    pub timing: Timing,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its turn, or a stop string was met.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
    /// The model ended its turn with at least one tool call.
    ToolCalls,
}

/// Token counts of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated, the end-of-turn token included.
    pub completion_tokens: u32,
    /// Of these, tokens of the thought, its closing tag included.
    pub reasoning_tokens: u32,
    /// Tokens of the prompt that were not read again.
    pub cached_tokens: u32,
}

/// Times of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timing {
    /// From submission to the first step that worked on it.
    pub queued: Duration,
    /// From there to the first generated token, or to the end if there is none.
    pub prefill: Duration,
    /// From the first generated token to the last.
    pub decode: Duration,
}

/// A request that was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// There is nothing to continue.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// Prompt and context, in tokens. Never cut silently.
    #[error(
        "the prompt has {prompt} tokens, but the context is {context} tokens and at least one must be left for the answer: shorten the prompt or raise --ctx-size"
    )]
    ContextExceeded {
        /// Tokens of the prompt.
        prompt: u32,
        /// Tokens of the context.
        context: u32,
    },
    /// The queue is full; try again later.
    #[error("{waiting} requests are waiting already: try again in a moment")]
    QueueFull {
        /// Requests in the queue.
        waiting: usize,
    },
    /// The request can never be served within the memory budget.
    #[error(
        "a sequence of {tokens} tokens needs {needed} bytes of state, the budget is {budget}: lower --ctx-size or max_tokens"
    )]
    TooLarge {
        /// Prompt plus the most that may be generated.
        tokens: u32,
        /// Bytes needed.
        needed: u64,
        /// Bytes there are.
        budget: u64,
    },
    /// A parameter is out of range; names it.
    #[error("{parameter}: {problem}")]
    InvalidParameter {
        /// Name of the parameter, as in the API.
        parameter: &'static str,
        /// Expected and found.
        problem: String,
    },
    /// The engine is shutting down or its device failed.
    #[error("the engine has stopped: {0}")]
    Stopped(String),
}

/// A request that was accepted and failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    /// The model's output can't be used.
    #[error(transparent)]
    Model(#[from] SegmentError),
    /// The device failed, or has no memory for the request.
    #[error("the request could not be completed: {0}")]
    Device(String),
    /// The grammar that the reply is held to can't be followed further.
    #[error("the grammar can't be followed: {0}")]
    Constraint(String),
    /// The engine was shut down.
    #[error("the engine was shut down before the answer was complete")]
    Shutdown,
}
