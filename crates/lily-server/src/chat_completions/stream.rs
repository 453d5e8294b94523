//! A streamed answer: server-sent events.

use std::time::Duration;

use axum::http::HeaderName;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;

use super::response::{Choice, Chunk, Head, Reply, UsageReport};

/// Tells reverse proxies to pass events on as they come.
const NO_BUFFERING: (HeaderName, &str) = (HeaderName::from_static("x-accel-buffering"), "no");

struct ChunkStream {
    head: Head,
    reply: Reply,
    include_usage: bool,
    next: Next,
}

/// What a stream sends next.
enum Next {
    Role,
    Piece,
    Usage(UsageReport),
    Done,
    Nothing,
}

/// Answers with the pieces of `reply` as they come. A comment line goes out whenever the stream was silent
/// for `keep_alive`, from a timer: a long prefill makes no progress to hang it on.
pub(super) fn response(head: Head, reply: Reply, include_usage: bool, keep_alive: Duration) -> Response {
    let chunks = ChunkStream { head, reply, include_usage, next: Next::Role };
    let events = stream::unfold(chunks, |mut chunks| async {
        let event = chunks.next().await?;
        Some((event, chunks))
    });
    let keep_alive = KeepAlive::new().interval(keep_alive).text("keep-alive");
    ([NO_BUFFERING], Sse::new(events).keep_alive(keep_alive)).into_response()
}

impl ChunkStream {
    async fn next(&mut self) -> Option<Result<Event, axum::Error>> {
        match self.next {
            Next::Role => {
                self.next = Next::Piece;
                Some(self.chunk(&[Choice::role()], None))
            }
            Next::Piece => match self.reply.next().await {
                Ok((piece, usage)) => {
                    if let Some(usage) = usage {
                        self.next = if self.include_usage { Next::Usage(usage) } else { Next::Done };
                    }
                    Some(self.chunk(&[piece], None))
                }
                Err(error) => {
                    self.next = Next::Nothing;
                    self.reply.span.in_scope(|| error.log());
                    Some(Event::default().json_data(error.envelope()))
                }
            },
            Next::Usage(usage) => {
                self.next = Next::Done;
                Some(self.chunk(&[], Some(usage)))
            }
            Next::Done => {
                self.next = Next::Nothing;
                Some(Ok(Event::default().data("[DONE]")))
            }
            Next::Nothing => None,
        }
    }

    fn chunk(&self, choices: &[Choice], usage: Option<UsageReport>) -> Result<Event, axum::Error> {
        let usage = self.include_usage.then_some(usage);
        Event::default().json_data(Chunk { head: &self.head, choices, usage })
    }
}
