//! `POST /v1/completions`: raw text is continued.

mod request;
mod response;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::sse::Event;
use axum::response::{IntoResponse, Response};

pub(crate) use self::request::parse_ids;
use self::request::{CompletionRequest, Prepared};
use self::response::{Choice, Choices, Completion, Head};
use crate::app::{ServerState, unix_time};
use crate::body::{JsonBytes, parse_object};
use crate::chat_completions::{FINGERPRINT, UsageReport};
use crate::error::ApiError;
use crate::generation::blocking;
use crate::generation::replies::{Piece, Replies};
use crate::sse::{self, Source};
use crate::trace::random_id;

pub(crate) async fn create(
    State(state): State<Arc<ServerState>>,
    JsonBytes(body): JsonBytes,
) -> Result<Response, ApiError> {
    let prepared = blocking(&state, move |state| {
        CompletionRequest::parse(&parse_object(&body)?, &state.defaults)?.prepare(state)
    })
    .await?;
    let Prepared { requests, n, echoes, stream, include_usage, return_progress } = prepared;
    let choices = Choices::new(&requests, echoes, Arc::clone(&state.tokenizer));
    let replies = Replies::submit(&state, requests, n, "prompt")?;
    let head = Head {
        id: random_id("cmpl-"),
        object: "text_completion",
        created: unix_time(),
        model: state.model.clone(),
        system_fingerprint: FINGERPRINT,
    };
    if stream {
        let chunks = Chunks { head, replies, choices, include_usage, return_progress, ended: false };
        return Ok(sse::with_comments(chunks, state.limits.keep_alive));
    }
    whole(head, replies, choices).await
}

async fn whole(head: Head, mut replies: Replies, mut choices: Choices) -> Result<Response, ApiError> {
    let mut full: Vec<Choice> = (0..replies.len()).map(Choice::new).collect();
    while let Some(piece) = replies.next().await {
        let (index, piece) = piece?;
        if let Some(choice) = choices.of(index, piece) {
            full[index].add(choice);
        }
    }
    let usage = Some(Some(UsageReport::from(replies.usage())));
    Ok(Json(Completion { head: &head, choices: &full, usage, prompt_progress: None }).into_response())
}

/// The chunks of a streamed answer.
struct Chunks {
    head: Head,
    replies: Replies,
    choices: Choices,
    include_usage: bool,
    return_progress: bool,
    /// `[DONE]` is due, or was sent and nothing is left.
    ended: bool,
}

impl Source for Chunks {
    async fn next(&mut self) -> Option<Result<Event, axum::Error>> {
        loop {
            match self.replies.next().await {
                Some(Ok((index, Piece::Prefill(progress)))) => {
                    if self.return_progress {
                        let choices = [Choice::new(index)];
                        let chunk = self.completion(&choices, None);
                        let chunk = Completion { prompt_progress: Some(progress), ..chunk };
                        return Some(Event::default().json_data(chunk));
                    }
                }
                Some(Ok((index, piece))) => {
                    if let Some(choice) = self.choices.of(index, piece) {
                        return Some(self.chunk(&[choice], None));
                    }
                }
                Some(Err(error)) => {
                    self.ended = true;
                    self.include_usage = false;
                    self.replies.span.in_scope(|| error.log());
                    return Some(Event::default().json_data(error.envelope()));
                }
                None if self.include_usage => {
                    let usage = self.replies.usage().into();
                    let chunk = self.chunk(&[], Some(usage));
                    self.include_usage = false;
                    return Some(chunk);
                }
                None if !self.ended => {
                    self.ended = true;
                    return Some(Ok(sse::done()));
                }
                None => return None,
            }
        }
    }
}

impl Chunks {
    fn chunk(&self, choices: &[Choice], usage: Option<UsageReport>) -> Result<Event, axum::Error> {
        Event::default().json_data(self.completion(choices, usage))
    }

    fn completion<'a>(&'a self, choices: &'a [Choice], usage: Option<UsageReport>) -> Completion<'a> {
        let usage = self.include_usage.then_some(usage);
        Completion { head: &self.head, choices, usage, prompt_progress: None }
    }
}
