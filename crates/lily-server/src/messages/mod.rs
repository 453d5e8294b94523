//! Anthropic's API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

mod conversation;
mod error;
mod request;
mod response;
mod stream;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::json;

pub(crate) use self::error::in_anthropics_form;
use self::request::MessagesRequest;
use self::response::Message;
use crate::app::ServerState;
use crate::body::{JsonBytes, parse_object};
use crate::error::ApiError;
use crate::generation::blocking;
use crate::generation::replies::{Piece, Replies};

pub(crate) async fn create(
    State(state): State<Arc<ServerState>>,
    JsonBytes(body): JsonBytes,
) -> Result<Response, ApiError> {
    let (request, omits_thought, stream, warnings) = blocking(&state, move |state| {
        let request = MessagesRequest::parse(&parse_object(&body)?, &state.defaults)?;
        if request.turn.settings.max_tokens.is_none() {
            let problem = "required, but absent";
            return Err(ApiError::field("max_tokens", problem).with_code("missing_required_parameter"));
        }
        let MessagesRequest { turn, omits_thought, stream, warnings } = request;
        Ok((turn.request(state)?, omits_thought, stream, warnings))
    })
    .await?;
    let prompt_tokens = request.prompt.len();
    let replies = Replies::submit(&state, vec![request], 1, "messages")?;
    let message = Message::new(state.model.clone(), prompt_tokens, omits_thought);
    let response = if stream {
        stream::response(message, replies, state.limits.keep_alive)
    } else {
        whole(message, replies).await?
    };
    Ok(warnings.on(response))
}

async fn whole(mut message: Message, mut replies: Replies) -> Result<Response, ApiError> {
    while let Some(piece) = replies.next().await {
        match piece?.1 {
            Piece::PromptToken { .. } | Piece::Prefill(_) | Piece::Token { .. } => {}
            Piece::Delta(delta) => drop(message.add(delta)),
            Piece::End(finished) => drop(message.end(&finished)),
        }
    }
    Ok(Json(message.to_json()).into_response())
}

/// How many tokens the prompt of a request has.
pub(crate) async fn count_tokens(
    State(state): State<Arc<ServerState>>,
    JsonBytes(body): JsonBytes,
) -> Result<Response, ApiError> {
    let (count, warnings) = blocking(&state, move |state| {
        let request = MessagesRequest::parse(&parse_object(&body)?, &state.defaults)?;
        Ok((request.turn.request(state)?.prompt.len(), request.warnings))
    })
    .await?;
    Ok(warnings.on(Json(json!({"input_tokens": count})).into_response()))
}
