//! Following generations to their ends.

use std::future::poll_fn;
use std::task::{Context, Poll};

use lily_engine::output::Delta;
use lily_engine::request::{Event, FinishReason, Finished, Request, Usage};
use lily_engine::scheduler::Generation;
use lily_model::sample::Logprobs;
use tracing::Span;

use crate::app::ServerState;
use crate::error::ApiError;
use crate::metrics::Metrics;

/// What comes of an answer.
#[derive(Debug)]
pub(crate) enum Piece {
    /// A token of what follows.
    Token {
        id: u32,
        logprobs: Logprobs,
        /// It belongs to the thought.
        in_thought: bool,
    },
    /// Output.
    Delta(Delta),
    /// The end.
    End(Finished),
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
    metrics: Metrics,
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
        // Those submitted before one that is refused are cancelled by being dropped.
        let generations = requests.into_iter().map(submit).collect::<Result<_, _>>()?;
        let (metrics, span) = (state.metrics.clone(), Span::current());
        Ok(Self { generations, per_prompt, first: 0, usage: Usage::default(), metrics, span })
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
    pub async fn next(&mut self) -> Option<Result<(usize, Piece), ApiError>> {
        poll_fn(|context| self.poll(context)).await
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<(usize, Piece), ApiError>>> {
        let (n, first) = (self.generations.len(), self.first);
        for i in (0..n).map(|i| (first + i) % n) {
            while let Some(Some(generation)) = self.generations.get_mut(i) {
                let Poll::Ready(event) = generation.events.poll_recv(context) else { break };
                if let Some(result) = self.take(i, event) {
                    self.first = i + 1;
                    return Poll::Ready(Some(result.map(|piece| (i, piece))));
                }
            }
        }
        if self.generations.iter().all(Option::is_none) { Poll::Ready(None) } else { Poll::Pending }
    }

    fn take(&mut self, i: usize, event: Option<Event>) -> Option<Result<Piece, ApiError>> {
        match event {
            Some(Event::Started | Event::Prefill { .. }) => None,
            Some(Event::Token { id, logprobs, in_thought }) => {
                Some(Ok(Piece::Token { id, logprobs, in_thought }))
            }
            Some(Event::Delta(delta)) => Some(Ok(Piece::Delta(delta))),
            Some(Event::Finished(finished)) => {
                self.generations[i] = None;
                self.count(i, &finished);
                Some(Ok(Piece::End(finished)))
            }
            Some(Event::Failed(error)) => {
                self.generations.clear();
                Some(Err(error.into()))
            }
            None => {
                self.generations.clear();
                Some(Err(ApiError::internal("the engine ended before the answer")))
            }
        }
    }

    fn count(&mut self, i: usize, finished: &Finished) {
        self.metrics.finished(finished);
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

impl Drop for Replies {
    fn drop(&mut self) {
        if self.generations.iter().any(Option::is_some) {
            tracing::info!(parent: &self.span, "cancelled: the client has left");
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
