//! The API key.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::AUTHORIZATION;
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::ConstantTimeEq;

use crate::app::ServerState;
use crate::body;
use crate::error::ApiError;

/// Lets a request through if it carries the key, or if there is none.
pub(crate) async fn require_key(
    State(state): State<Arc<ServerState>>,
    request: Request,
    next: Next,
) -> Response {
    let Some(key) = &state.api_key else { return next.run(request).await };
    let message = match given(request.headers()) {
        // In constant time: how long the comparison takes must not tell how much of a guess was right.
        Some(given) if bool::from(given.ct_eq(key.as_bytes())) => return next.run(request).await,
        Some(_) => "the API key is not the one this server was started with",
        None => "this server needs an API key: send `Authorization: Bearer KEY` or `x-api-key: KEY`",
    };
    body::discard(request.into_body()).await;
    ApiError::request(StatusCode::UNAUTHORIZED, "invalid_api_key", message).into_response()
}

/// The key of a request: OpenAI's clients send it one way, Anthropic's the other.
fn given(headers: &HeaderMap) -> Option<&[u8]> {
    headers.get("x-api-key").map(|key| key.as_bytes()).or_else(|| bearer(headers))
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.as_bytes().split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token.trim_ascii())
}
