//! A streamed answer: server-sent events.

use std::time::Duration;

use axum::response::Response;
use axum::response::sse::Event;

use super::response::{Choice, Choices, Chunk, Head, UsageReport};
use crate::generation::replies::{Piece, Replies};
use crate::sse::{self, Source};

struct ChunkStream {
    head: Head,
    replies: Replies,
    choices: Choices,
    told: Told,
    next: Next,
}

/// What a stream tells beside the answers.
pub(super) struct Told {
    pub include_usage: bool,
    pub return_progress: bool,
}

/// What a stream sends next.
enum Next {
    /// Whose message answer so-and-so is.
    Role(usize),
    Piece,
    Done,
    Nothing,
}

/// Answers with the pieces of `replies` as they come.
pub(super) fn response(
    head: Head,
    replies: Replies,
    choices: Choices,
    told: Told,
    keep_alive: Duration,
) -> Response {
    let chunks = ChunkStream { head, replies, choices, told, next: Next::Role(0) };
    sse::with_comments(chunks, keep_alive)
}

impl Source for ChunkStream {
    async fn next(&mut self) -> Option<Result<Event, axum::Error>> {
        match self.next {
            Next::Role(index) => {
                self.next = if index + 1 < self.replies.len() { Next::Role(index + 1) } else { Next::Piece };
                Some(self.chunk(&[Choice::role(index)], None))
            }
            Next::Piece => self.piece().await,
            Next::Done => {
                self.next = Next::Nothing;
                Some(Ok(sse::done()))
            }
            Next::Nothing => None,
        }
    }
}

impl ChunkStream {
    async fn piece(&mut self) -> Option<Result<Event, axum::Error>> {
        loop {
            match self.replies.next().await {
                Some(Ok((index, Piece::Prefill(progress)))) => {
                    if self.told.return_progress {
                        let choices = [Choice::empty(index)];
                        let chunk = Chunk { prompt_progress: Some(progress), ..self.plain(&choices, None) };
                        return Some(Event::default().json_data(chunk));
                    }
                }
                Some(Ok((index, piece))) => {
                    if let Some(choice) = self.choices.of(index, piece) {
                        return Some(self.chunk(&[choice], None));
                    }
                }
                Some(Err(error)) => {
                    self.next = Next::Nothing;
                    self.replies.span.in_scope(|| error.log());
                    return Some(Event::default().json_data(error.envelope()));
                }
                None if self.told.include_usage => {
                    self.next = Next::Done;
                    return Some(self.chunk(&[], Some(self.replies.usage().into())));
                }
                None => {
                    self.next = Next::Nothing;
                    return Some(Ok(sse::done()));
                }
            }
        }
    }

    fn chunk(&self, choices: &[Choice], usage: Option<UsageReport>) -> Result<Event, axum::Error> {
        Event::default().json_data(self.plain(choices, usage))
    }

    fn plain<'a>(&'a self, choices: &'a [Choice], usage: Option<UsageReport>) -> Chunk<'a> {
        let usage = self.told.include_usage.then_some(usage);
        Chunk { head: &self.head, choices, usage, prompt_progress: None }
    }
}
