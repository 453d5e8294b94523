//! A streamed answer: typed events, numbered.

use std::collections::VecDeque;
use std::time::Duration;

use axum::response::Response;
use axum::response::sse::Event;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};

use super::response::Answer;
use crate::generation::replies::{Piece, Replies};
use crate::sse::{self, Source};

const IN_PROGRESS: &str = "response.in_progress";

struct Events {
    answer: Answer,
    replies: Replies,
    /// To be sent.
    queue: VecDeque<Value>,
    /// Number of the next event.
    number: u64,
    keep_alive: Duration,
    ended: bool,
}

/// Answers with what becomes of `answer` as it comes. Whenever nothing was sent for `keep_alive`, the event that
/// tells of the beginning is sent again: clients of this API count events, not comments.
pub(super) fn response(answer: Answer, replies: Replies, keep_alive: Duration) -> Response {
    let queue = VecDeque::from([answer.event("response.created"), answer.event(IN_PROGRESS)]);
    sse::plain(Events { answer, replies, queue, number: 0, keep_alive, ended: false })
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
                self.queue.push_back(self.answer.event(IN_PROGRESS));
                break;
            };
            match piece {
                Some(Ok((_, Piece::PromptToken { .. }))) => {}
                Some(Ok((_, Piece::Token { id, logprobs, in_thought }))) => {
                    self.answer.token(id, &logprobs, in_thought);
                }
                Some(Ok((_, Piece::Prefill(_)))) => {}
                Some(Ok((_, Piece::Delta(delta)))) => self.queue.extend(self.answer.add(delta)),
                Some(Ok((_, Piece::End(finished)))) => self.queue.extend(self.answer.end(&finished)),
                Some(Err(error)) => {
                    self.ended = true;
                    self.replies.span.in_scope(|| error.log());
                    self.queue.push_back(self.answer.fail(&error));
                }
                None => self.ended = true,
            }
        }
        let mut event = self.queue.pop_front()?;
        event["sequence_number"] = self.number.into();
        self.number += 1;
        let name = event["type"].as_str().unwrap_or_default().to_owned();
        Some(Event::default().event(name).json_data(event))
    }
}
