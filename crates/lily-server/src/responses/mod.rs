//! `POST /v1/responses`, without a memory: each request carries its whole conversation.

mod items;
mod request;
mod response;
mod stream;
mod tools;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};

use self::request::ResponsesRequest;
use self::response::Answer;
use crate::app::{ServerState, unix_time};
use crate::body::{JsonBytes, parse_object};
use crate::error::ApiError;
use crate::generation::blocking;
use crate::generation::replies::{Piece, Replies};

pub(crate) async fn create(
    State(state): State<Arc<ServerState>>,
    JsonBytes(body): JsonBytes,
) -> Result<Response, ApiError> {
    let (request, told, stream, warnings) = blocking(&state, move |state| {
        let request = ResponsesRequest::parse(&parse_object(&body)?, &state.defaults, &state.model)?;
        let ResponsesRequest { turn, told, stream, warnings } = request;
        Ok((turn.request(state)?, told, stream, warnings))
    })
    .await?;
    let replies = Replies::submit(&state, vec![request], 1, "input")?;
    let answer = Answer::new(told, unix_time(), Arc::clone(&state.tokenizer));
    let response = if stream {
        stream::response(answer, replies, state.limits.keep_alive)
    } else {
        whole(answer, replies).await?
    };
    Ok(warnings.on(response))
}

async fn whole(mut answer: Answer, mut replies: Replies) -> Result<Response, ApiError> {
    while let Some(piece) = replies.next().await {
        match piece?.1 {
            Piece::PromptToken { .. } | Piece::Prefill(_) => {}
            Piece::Token { id, logprobs, in_thought } => answer.token(id, &logprobs, in_thought),
            Piece::Delta(delta) => drop(answer.add(delta)),
            Piece::End(finished) => drop(answer.end(&finished)),
        }
    }
    Ok(Json(answer.to_json()).into_response())
}
