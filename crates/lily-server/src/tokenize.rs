//! `POST /tokenize` and `POST /detokenize`, in vLLM's form.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::json;

use crate::app::ServerState;
use crate::body::{JsonBytes, parse_object};
use crate::chat_completions::ChatCompletionRequest;
use crate::completions::parse_ids;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::blocking;

#[derive(Serialize)]
struct Tokens {
    count: usize,
    max_model_len: u32,
    tokens: Vec<u32>,
    token_strs: Option<Vec<String>>,
}

/// The tokens of a text (`prompt`), in which control tokens may be spelled out, or of a chat request (`messages`
/// and what goes with them).
pub(crate) async fn tokenize(
    State(state): State<Arc<ServerState>>,
    JsonBytes(body): JsonBytes,
) -> Result<Response, ApiError> {
    let tokens = blocking(&state, move |state| {
        let body = parse_object(&body)?;
        let mut fields = Fields::body(&body);
        let strings = fields.boolean("return_token_strs")?.unwrap_or(false);
        let tokens = match fields.string("prompt")? {
            Some(text) => {
                fields.settle(&[], &["add_special_tokens"])?;
                state.tokenizer.encode_with_control(text)
            }
            None if fields.any("messages").is_some() => {
                let request = ChatCompletionRequest::parse(&body, &state.defaults)?;
                request.turn.request(state)?.prompt
            }
            None => return Err(fields.missing("prompt")),
        };
        let strings =
            strings.then(|| tokens.iter().map(|&id| state.tokenizer.decode(&[id], false)).collect());
        let max_model_len = state.engine.status().context;
        Ok(Tokens { count: tokens.len(), max_model_len, tokens, token_strs: strings })
    })
    .await?;
    Ok(Json(tokens).into_response())
}

/// The text of tokens.
pub(crate) async fn detokenize(
    State(state): State<Arc<ServerState>>,
    JsonBytes(body): JsonBytes,
) -> Result<Response, ApiError> {
    let text = blocking(&state, move |state| {
        let body = parse_object(&body)?;
        let mut fields = Fields::body(&body);
        let items = fields.array("tokens")?.ok_or_else(|| fields.missing("tokens"))?;
        let ids = parse_ids("tokens", items)?;
        fields.settle(&[], &[])?;
        Ok(state.tokenizer.decode(&ids, false))
    })
    .await?;
    Ok(Json(json!({"prompt": text})).into_response())
}
