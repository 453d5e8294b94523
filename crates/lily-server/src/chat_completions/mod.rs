//! `POST /v1/chat/completions`.

mod request;
mod response;
mod stream;
mod tools;

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use lily_engine::chat::chat_request;
use lily_engine::request::Request;
use tokio::task::spawn_blocking;
use tracing::Span;

use self::request::ChatCompletionRequest;
use self::response::{ChatCompletion, FullChoice, Head, Reply};
use crate::app::{ServerState, unix_time};
use crate::body::{JsonBytes, parse_object};
use crate::error::ApiError;
use crate::trace::random_id;

/// The server's build, as far as it can change an answer.
const FINGERPRINT: &str = concat!("lily-", env!("CARGO_PKG_VERSION"));

pub(crate) async fn create(
    State(state): State<Arc<ServerState>>,
    JsonBytes(body): JsonBytes,
) -> Result<Response, ApiError> {
    let prepared = {
        let (state, span) = (Arc::clone(&state), Span::current());
        // Megabytes of text take a while to become tokens: not on a thread that other connections wait for.
        spawn_blocking(move || span.in_scope(|| prepare(&state, &body))).await
    };
    let prepared = prepared.map_err(|error| {
        ApiError::internal(format!("the request could not be prepared, please report it: {error}"))
    })?;
    let Prepared { request, stream, include_usage } = prepared?;

    let logprobs = request.sampling.logprobs.is_some();
    let generation = state.engine.submit(request)?;
    let mut reply = Reply::new(generation, Arc::clone(&state.tokenizer), logprobs);
    let head = Head {
        id: random_id("chatcmpl-"),
        object: if stream { "chat.completion.chunk" } else { "chat.completion" },
        created: unix_time(),
        model: state.model.clone(),
        system_fingerprint: FINGERPRINT,
    };
    if stream {
        return Ok(stream::response(head, reply, include_usage, state.limits.keep_alive));
    }
    let mut choice = FullChoice::default();
    loop {
        let (piece, usage) = reply.next().await?;
        choice.add(piece);
        if let Some(usage) = usage {
            return Ok(Json(ChatCompletion { head, choices: [choice], usage }).into_response());
        }
    }
}

struct Prepared {
    request: Request,
    stream: bool,
    include_usage: bool,
}

/// From bytes to tokens.
fn prepare(state: &ServerState, body: &[u8]) -> Result<Prepared, ApiError> {
    let parsed = ChatCompletionRequest::parse(&parse_object(body)?, &state.defaults)?;
    let ChatCompletionRequest {
        chat,
        sampling,
        max_tokens,
        stop,
        ignore_eos,
        cache_prompt,
        stream,
        include_usage,
    } = parsed;
    let request = chat_request(&chat, &state.template, &state.tokenizer, sampling)?;
    let request = Request { max_tokens, stop, ignore_eos, cache_prompt, ..request };
    Ok(Prepared { request, stream, include_usage })
}
