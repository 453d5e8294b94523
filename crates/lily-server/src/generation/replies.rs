//! Following generations to their ends.

use std::future::{pending, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::StatusCode;
use lily_engine::chat::SampledCalls;
use lily_engine::output::Delta;
use lily_engine::request::{Event, FinishReason, Finished, Request, RequestError, Usage};
use lily_engine::scheduler::{Engine, Generation};
use lily_model::sample::Logprobs;
use serde::Serialize;
use tokio::time::{Instant, sleep_until};
use tracing::Span;

use crate::app::{Limits, ServerState};
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::traces::AnswerSpans;

/// What comes of an answer.
#[derive(Debug)]
pub(crate) enum Piece {
    /// A token of the prompt; the first one has no log-probabilities.
    PromptToken { id: u32, logprobs: Option<Logprobs> },
    /// A token of what follows.
    Token {
        id: u32,
        logprobs: Logprobs,
        /// It belongs to the thought.
        in_thought: bool,
    },
    /// More of the prompt is read.
    Prefill(PromptProgress),
    /// Output.
    Delta(Delta),
    /// The end.
    End(Finished),
}

/// What comes next, and of which answer; `None`: all have ended.
pub(crate) type Next<P> = Option<Result<(usize, P), ApiError>>;

/// How far a prompt is read, in llama.cpp's form.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct PromptProgress {
    /// Tokens of the prompt.
    total: u32,
    /// Of these, tokens that came from the prefix cache.
    cache: u32,
    /// Tokens that are read, those of the cache included.
    processed: u32,
    /// Since the request left the queue.
    time_ms: u64,
}

/// The answers to one request as they come. Dropping it cancels those that have not ended.
pub(crate) struct Replies {
    /// So many for each prompt. `None`: it has ended.
    generations: Vec<Option<Generation>>,
    per_prompt: usize,
    /// Which is asked first for its next piece.
    first: usize,
    /// Of those that have ended.
    usage: Usage,
    engine: Engine,
    patience: Patience,
    /// When the first of them left the queue, and when a log line told of it or of the prompt.
    started: Option<Instant>,
    logged: Option<Instant>,
    progress_time: Duration,
    calls: Arc<SampledCalls>,
    metrics: Metrics,
    /// `None`: nobody asks for traces.
    spans: Option<AnswerSpans>,
    /// Log lines belong to the request even after the head of the answer is sent.
    pub span: Span,
}

impl Replies {
    /// Submits requests, of which `per_prompt` in a row have the same prompt, from the field `prompt`. More than can
    /// ever be open together are refused for good.
    pub fn submit(
        state: &ServerState,
        requests: Vec<Request>,
        per_prompt: usize,
        prompt: &str,
    ) -> Result<Self, ApiError> {
        let (found, places) = (requests.len(), state.engine.places());
        if found > places {
            let problem =
                format!("{found} answers are asked for in all, but only {places} requests can be open");
            return Err(ApiError::field("n", problem));
        }
        let submit =
            |request| state.engine.submit(request).map(Some).map_err(|error| ApiError::submit(error, prompt));
        let mut spans =
            state.traces.as_ref().map(|traces| AnswerSpans::begin(traces, &requests, &state.model));
        // Those submitted before one that is refused are cancelled by being dropped.
        let generations = requests.into_iter().map(submit).collect::<Result<_, ApiError>>();
        let generations = generations.inspect_err(|error| fail(&mut spans, error))?;
        Ok(Self {
            generations,
            per_prompt,
            first: 0,
            usage: Usage::default(),
            engine: state.engine.clone(),
            patience: Patience::new(&state.limits),
            started: None,
            logged: None,
            progress_time: state.limits.progress_time,
            calls: Arc::clone(&state.calls),
            metrics: state.metrics.clone(),
            spans,
            span: Span::current(),
        })
    }

    /// How many answers there are.
    pub fn len(&self) -> usize {
        self.generations.len()
    }

    /// Tokens of the answers that have ended. A prompt counts once, however many answers it has.
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// The next piece and whose it is; `None`: all have ended. May be dropped and asked again.
    pub async fn next(&mut self) -> Next<Piece> {
        let mut abandoned = pin!(self.engine.abandoned());
        loop {
            let patience = self.patience;
            let error = tokio::select! {
                biased;
                piece = poll_fn(|context| self.poll(context)) => match piece {
                    Some(Ok((_, None))) => continue,
                    Some(Ok((i, Some(piece)))) => return Some(Ok((i, piece))),
                    Some(Err(error)) => error,
                    None => return None,
                },
                reason = abandoned.as_mut() => RequestError::Device(reason).into(),
                error = patience.expired() => error,
            };
            self.generations.clear();
            fail(&mut self.spans, &error);
            return Some(Err(error));
        }
    }

    /// As [`Replies::next`]; without a piece it is a sign of progress alone.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Next<Option<Piece>>> {
        let (n, first) = (self.generations.len(), self.first);
        for i in (0..n).map(|i| (first + i) % n) {
            if let Some(Some(generation)) = self.generations.get_mut(i) {
                let Poll::Ready(event) = generation.events.poll_recv(context) else { continue };
                self.first = i + 1;
                self.patience.progress = Some(Instant::now());
                return Poll::Ready(Some(self.take(i, event).map(|piece| (i, piece))));
            }
        }
        if self.generations.iter().all(Option::is_none) { Poll::Ready(None) } else { Poll::Pending }
    }

    fn take(&mut self, i: usize, event: Option<Event>) -> Result<Option<Piece>, ApiError> {
        match event {
            Some(Event::Started) => {
                self.started.get_or_insert_with(Instant::now);
                Ok(None)
            }
            Some(Event::PromptToken { id, logprobs }) => Ok(Some(Piece::PromptToken { id, logprobs })),
            Some(Event::InterToken(time)) => {
                self.metrics.inter_token(time);
                Ok(None)
            }
            Some(Event::Prefill { done, total, cached }) => {
                Ok(Some(Piece::Prefill(self.prefill(i, done, total, cached))))
            }
            Some(Event::Token { id, logprobs, in_thought }) => {
                Ok(Some(Piece::Token { id, logprobs, in_thought }))
            }
            Some(Event::Delta(delta)) => Ok(Some(Piece::Delta(delta))),
            Some(Event::Call(call)) => {
                self.calls.remember(call);
                Ok(None)
            }
            Some(Event::Finished(finished)) => {
                self.generations[i] = None;
                self.count(i, &finished);
                Ok(Some(Piece::End(finished)))
            }
            Some(Event::Failed(error)) => Err(error.into()),
            None => Err(ApiError::internal("the engine ended before the answer")),
        }
    }

    /// Tells the log of a prompt that takes long.
    fn prefill(&mut self, i: usize, done: u32, total: u32, cached: u32) -> PromptProgress {
        let now = Instant::now();
        let started = *self.started.get_or_insert(now);
        let time_ms = (now - started).as_millis() as u64;
        if done < total && now - *self.logged.get_or_insert(started) >= self.progress_time {
            self.logged = Some(now);
            tracing::info!(parent: &self.span, answer = i, done, total, cached, time_ms, "reading the prompt");
        }
        PromptProgress { total, cache: cached, processed: done, time_ms }
    }

    fn count(&mut self, i: usize, finished: &Finished) {
        self.metrics.finished(finished);
        if let Some(spans) = &mut self.spans {
            spans.finished(i, finished);
        }
        let Usage { prompt_tokens, completion_tokens, reasoning_tokens, cached_tokens } = finished.usage;
        self.usage.completion_tokens += completion_tokens;
        self.usage.reasoning_tokens += reasoning_tokens;
        // The others find what the first one has read.
        if i.is_multiple_of(self.per_prompt) {
            self.usage.prompt_tokens += prompt_tokens;
            self.usage.cached_tokens += cached_tokens;
        }
        tracing::info!(
            parent: &self.span,
            answer = i,
            reason = reason(finished.reason),
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            queued_ms = finished.timing.queued.as_millis() as u64,
            prefill_ms = finished.timing.prefill.as_millis() as u64,
            decode_ms = finished.timing.decode.as_millis() as u64,
            "finished"
        );
    }
}

/// How long a request may take.
#[derive(Clone, Copy)]
struct Patience {
    /// The whole of it, and when it was submitted.
    request: Option<Duration>,
    submitted: Instant,
    /// Without progress, and when there was some; `None`: it waits in the queue.
    idle: Option<Duration>,
    progress: Option<Instant>,
}

impl Patience {
    fn new(limits: &Limits) -> Self {
        let (request, idle) = (limits.request_time, limits.idle_time);
        Self { request, submitted: Instant::now(), idle, progress: None }
    }

    /// Resolves when a limit is reached. A client that asked the same again would meet it again, so it is no error
    /// that clients try again after.
    async fn expired(self) -> ApiError {
        let end = |start: Option<Instant>, limit: Option<Duration>| start?.checked_add(limit?);
        let until = async |end: Option<Instant>| match end {
            Some(end) => sleep_until(end).await,
            None => pending().await,
        };
        let error = |what: &str, limit: Option<Duration>| {
            let message =
                format!("the request {what} {:?}, the limit of this server", limit.unwrap_or_default());
            ApiError::request(StatusCode::BAD_REQUEST, "time_limit_exceeded", message)
        };
        tokio::select! {
            () = until(end(Some(self.submitted), self.request)) => error("took longer than", self.request),
            () = until(end(self.progress, self.idle)) => error("made no progress for", self.idle),
        }
    }
}

fn fail(spans: &mut Option<AnswerSpans>, error: &ApiError) {
    if let Some(spans) = spans {
        spans.failed(error.code.unwrap_or("error"), &error.message);
    }
}

impl Drop for Replies {
    fn drop(&mut self) {
        if self.generations.iter().any(Option::is_some) {
            tracing::info!(parent: &self.span, "cancelled: the client has left");
            if let Some(spans) = &mut self.spans {
                spans.failed("cancelled", "the client has left");
            }
        }
    }
}

/// OpenAI's word for it.
pub(crate) fn reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
    }
}
