//! `POST /v1/chat/completions`.

mod request;
mod response;
mod stream;
mod tools;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};

pub(crate) use self::request::{ChatCompletionRequest, parse_include_usage, parse_return_progress};
pub(crate) use self::response::UsageReport;
use self::response::{ChatCompletion, Choices, FullChoice, Head};
use self::stream::Told;
use crate::app::{ServerState, unix_time};
use crate::body::{JsonBytes, parse_object};
use crate::error::ApiError;
use crate::generation::replies::Replies;
use crate::generation::{answers, blocking};
use crate::trace::random_id;

/// The server's build, as far as it can change an answer.
pub(crate) const FINGERPRINT: &str = concat!("lily-", env!("CARGO_PKG_VERSION"));

pub(crate) async fn create(
    State(state): State<Arc<ServerState>>,
    JsonBytes(body): JsonBytes,
) -> Result<Response, ApiError> {
    let (requests, stream, told, tagged) = blocking(&state, move |state| {
        let request = ChatCompletionRequest::parse(&parse_object(&body)?, &state.defaults)?;
        let ChatCompletionRequest { turn, n, stream, include_usage, return_progress, tagged } = request;
        Ok((answers(turn.request(state)?, n), stream, Told { include_usage, return_progress }, tagged))
    })
    .await?;
    let logprobs = requests.iter().any(|request| request.sampling.logprobs.is_some());
    let n = requests.len();
    let mut replies = Replies::submit(&state, requests, n, "messages")?;
    let mut choices = Choices::new(n, Arc::clone(&state.tokenizer), logprobs, tagged);
    let head = Head {
        id: random_id("chatcmpl-"),
        object: if stream { "chat.completion.chunk" } else { "chat.completion" },
        created: unix_time(),
        model: state.model.clone(),
        system_fingerprint: FINGERPRINT,
    };
    if stream {
        return Ok(stream::response(head, replies, choices, told, state.limits.keep_alive));
    }
    let mut full: Vec<FullChoice> = (0..n).map(FullChoice::new).collect();
    while let Some(piece) = replies.next().await {
        let (index, piece) = piece?;
        if let Some(choice) = choices.of(index, piece) {
            full[index].add(choice);
        }
    }
    let usage = replies.usage().into();
    Ok(Json(ChatCompletion { head, choices: full, usage }).into_response())
}
