//! A streamed message: events with names.

use std::collections::VecDeque;
use std::time::Duration;

use axum::response::Response;
use axum::response::sse::Event;
use serde_json::json;
use tokio::time::{Instant, timeout_at};

use super::error::envelope;
use super::response::{Change, Message};
use crate::generation::replies::{Piece, Replies};
use crate::sse::{self, Source};

struct Events {
    message: Message,
    replies: Replies,
    /// To be sent.
    queue: VecDeque<Change>,
    keep_alive: Duration,
    ended: bool,
}

/// Answers with what becomes of `message` as it comes. An event `ping` goes out whenever nothing was sent for
/// `keep_alive`: clients of this API count those.
pub(super) fn response(message: Message, replies: Replies, keep_alive: Duration) -> Response {
    let queue = VecDeque::from([message.start(), ping()]);
    sse::plain(Events { message, replies, queue, keep_alive, ended: false })
}

fn ping() -> Change {
    ("ping", json!({"type": "ping"}))
}

impl Source for Events {
    async fn next(&mut self) -> Option<Result<Event, axum::Error>> {
        // Not every piece is told.
        let due = Instant::now() + self.keep_alive;
        while self.queue.is_empty() {
            if self.ended {
                return None;
            }
            let Ok(piece) = timeout_at(due, self.replies.next()).await else {
                self.queue.push_back(ping());
                break;
            };
            match piece {
                Some(Ok((_, Piece::Delta(delta)))) => self.queue.extend(self.message.add(delta)),
                Some(Ok((_, Piece::End(finished)))) => self.queue.extend(self.message.end(&finished)),
                Some(Ok((_, Piece::PromptToken { .. } | Piece::Prefill(_) | Piece::Token { .. }))) => {}
                Some(Err(error)) => {
                    self.ended = true;
                    self.replies.span.in_scope(|| error.log());
                    self.queue.push_back(("error", envelope(&error)));
                }
                None => self.ended = true,
            }
        }
        let (name, data) = self.queue.pop_front()?;
        Some(Event::default().event(name).json_data(data))
    }
}
