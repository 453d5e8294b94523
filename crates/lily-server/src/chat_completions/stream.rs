//! A streamed answer: server-sent events.

use std::time::Duration;

use axum::response::Response;
use axum::response::sse::Event;

use super::response::{Choice, Choices, Chunk, Head, UsageReport};
use crate::generation::replies::Replies;
use crate::sse::{self, Source};

struct ChunkStream {
    head: Head,
    replies: Replies,
    choices: Choices,
    include_usage: bool,
    next: Next,
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
    include_usage: bool,
    keep_alive: Duration,
) -> Response {
    let chunks = ChunkStream { head, replies, choices, include_usage, next: Next::Role(0) };
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
                None if self.include_usage => {
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
        let usage = self.include_usage.then_some(usage);
        Event::default().json_data(Chunk { head: &self.head, choices, usage })
    }
}
