//! `POST /tokenize` and `POST /detokenize`, in vLLM's form.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use lily_engine::request::Sampling;
use serde::Serialize;
use serde_json::{Map, Value, json};

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

/// What is to become tokens.
enum Source {
    /// A text, in which control tokens may be spelled out.
    Text(String),
    /// A chat.
    Chat(Box<ChatCompletionRequest>),
}

/// A text (`prompt`), or a chat request (`messages` and what goes with them); and whether the texts of the tokens are
/// asked for too.
fn parse(body: &Map<String, Value>, defaults: &Sampling) -> Result<(Source, bool), ApiError> {
    let mut fields = Fields::body(body);
    let strings = fields.boolean("return_token_strs")?.unwrap_or(false);
    let source = match fields.string("prompt")? {
        Some(text) => {
            fields.settle(&[], &["add_special_tokens"])?;
            Source::Text(text.to_owned())
        }
        None if fields.any("messages").is_some() => {
            Source::Chat(Box::new(ChatCompletionRequest::parse(body, defaults)?))
        }
        None => return Err(fields.missing("prompt")),
    };
    Ok((source, strings))
}

pub(crate) async fn tokenize(
    State(state): State<Arc<ServerState>>,
    JsonBytes(body): JsonBytes,
) -> Result<Response, ApiError> {
    let tokens = blocking(&state, move |state| {
        let (source, strings) = parse(&parse_object(&body)?, &state.defaults)?;
        let tokens = match source {
            Source::Text(text) => state.tokenizer.encode_with_control(&text),
            Source::Chat(request) => request.turn.request(state)?.prompt,
        };
        let strings =
            strings.then(|| tokens.iter().map(|&id| state.tokenizer.decode(&[id], false)).collect());
        let max_model_len = state.engine.status().context;
        Ok(Tokens { count: tokens.len(), max_model_len, tokens, token_strs: strings })
    })
    .await?;
    Ok(Json(tokens).into_response())
}

/// Token ids.
fn parse_tokens(body: &Map<String, Value>) -> Result<Vec<u32>, ApiError> {
    let mut fields = Fields::body(body);
    let items = fields.array("tokens")?.ok_or_else(|| fields.missing("tokens"))?;
    let ids = parse_ids("tokens", items)?;
    fields.settle(&[], &[])?;
    Ok(ids)
}

/// The text of tokens.
pub(crate) async fn detokenize(
    State(state): State<Arc<ServerState>>,
    JsonBytes(body): JsonBytes,
) -> Result<Response, ApiError> {
    let text = blocking(&state, move |state| {
        let ids = parse_tokens(&parse_object(&body)?)?;
        Ok(state.tokenizer.decode(&ids, false))
    })
    .await?;
    Ok(Json(json!({"prompt": text})).into_response())
}

#[cfg(test)]
mod tests {
    use lily_engine::testing::greedy;

    use super::*;
    use crate::openapi::tests::{check_schema, forget};

    #[test]
    fn the_fields_are_documented() {
        forget();
        for body in [json!({"prompt": "x"}), json!({"messages": [{"role": "user", "content": "x"}]})] {
            assert!(parse(body.as_object().unwrap(), &greedy()).is_ok());
        }
        check_schema("TokenizeRequest");
        assert!(parse_tokens(json!({"tokens": [1]}).as_object().unwrap()).is_ok());
        check_schema("DetokenizeRequest");
    }
}
