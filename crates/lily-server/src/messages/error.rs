//! Errors in Anthropic's form.

use axum::Json;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::error::ApiError;

/// `{"type": "error", "error": {"type", "message"}}`.
pub(super) fn envelope(error: &ApiError) -> Value {
    json!({"type": "error", "error": {"type": kind(error.status), "message": error.message}})
}

fn kind(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    }
}

/// Gives an answer that is an error the form of this API, wherever it arose.
pub(crate) async fn in_anthropics_form(response: Response) -> Response {
    let Some(error) = response.extensions().get::<ApiError>() else { return response };
    let body = Json(envelope(error)).into_response();
    let keep = |headers: &HeaderMap| {
        let own =
            headers.iter().filter(|(name, _)| !["content-length", "content-type"].contains(&name.as_str()));
        own.map(|(name, value)| (name.clone(), value.clone())).collect::<HeaderMap>()
    };
    (response.status(), keep(response.headers()), body).into_response()
}
