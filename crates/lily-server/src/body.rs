//! Reading request bodies: bounded in bytes and in time.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::{FromRequest, Request};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use futures_util::StreamExt;
use serde_json::{Map, Value};
use tokio::time::timeout;

use crate::app::{Limits, ServerState};
use crate::error::ApiError;

/// Bounds of what is read and thrown away of a refused request.
const DISCARD_BYTES: usize = 64 << 20;
const DISCARD_TIME: Duration = Duration::from_secs(5);

/// The bytes of a body that is declared to be JSON.
pub(crate) struct JsonBytes(pub Vec<u8>);

impl FromRequest<Arc<ServerState>> for JsonBytes {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Arc<ServerState>) -> Result<Self, ApiError> {
        let (parts, body) = request.into_parts();
        if let Err(error) = check_content_type(&parts.headers) {
            discard(body).await;
            return Err(error);
        }
        read(body, &state.limits).await.map(Self)
    }
}

/// Only what calls itself JSON is read as JSON: a web page can send any other type to a server on the same
/// machine without asking.
fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let found = headers.get(CONTENT_TYPE).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let essence = found.as_deref().map(|value| value.split(';').next().unwrap_or_default().trim());
    if essence.is_some_and(|essence| essence.eq_ignore_ascii_case("application/json")) {
        return Ok(());
    }
    let found = found.as_deref().unwrap_or("none");
    Err(ApiError::request(
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "unsupported_media_type",
        format!("the body must be sent with `Content-Type: application/json`, found {found}"),
    ))
}

async fn read(body: Body, limits: &Limits) -> Result<Vec<u8>, ApiError> {
    let mut stream = body.into_data_stream();
    match timeout(limits.body_time, collect(&mut stream, limits.body_bytes)).await {
        Ok(Ok(Some(bytes))) => Ok(bytes),
        Ok(Ok(None)) => {
            discard_stream(stream).await;
            Err(ApiError::request(
                StatusCode::PAYLOAD_TOO_LARGE,
                "request_too_large",
                format!("the body is longer than the limit of {} bytes", limits.body_bytes),
            ))
        }
        Ok(Err(error)) => Err(ApiError::request(
            StatusCode::BAD_REQUEST,
            "invalid_body",
            format!("the body could not be read: {error}"),
        )),
        Err(_) => Err(ApiError::request(
            StatusCode::REQUEST_TIMEOUT,
            "request_timeout",
            format!("the body did not arrive within {} s", limits.body_time.as_secs_f64()),
        )),
    }
}

/// The whole body, or `None` when it is longer than `limit`.
async fn collect(stream: &mut BodyDataStream, limit: usize) -> Result<Option<Vec<u8>>, axum::Error> {
    let mut bytes = Vec::new();
    while let Some(chunk) = stream.next().await {
        let chunk: Bytes = chunk?;
        if bytes.len() + chunk.len() > limit {
            return Ok(None);
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(Some(bytes))
}

/// Reads the rest of a body that will not be used. Without this the connection would be reset while the
/// client still sends, and the client would see that instead of the answer.
pub(crate) async fn discard(body: Body) {
    discard_stream(body.into_data_stream()).await;
}

async fn discard_stream(mut stream: BodyDataStream) {
    let rest = async {
        let mut seen = 0;
        while let Some(Ok(chunk)) = stream.next().await {
            seen += chunk.len();
            if seen > DISCARD_BYTES {
                break;
            }
        }
    };
    // A client that is slower than this is not worth waiting for: it gets the answer or the reset.
    let _ = timeout(DISCARD_TIME, rest).await;
}

/// The members of a JSON object.
pub(crate) fn parse_object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    let bad = |message| ApiError::request(StatusCode::BAD_REQUEST, "invalid_json", message);
    let text = std::str::from_utf8(bytes).map_err(|error| {
        bad(format!("the body is not valid UTF-8: byte {} does not fit", error.valid_up_to()))
    })?;
    match serde_json::from_str(text) {
        Ok(Value::Object(members)) => Ok(members),
        Ok(other) => {
            Err(bad(format!("the body must be a JSON object, found {}", crate::fields::quote(&other))))
        }
        Err(error) => Err(bad(format!("the body is not valid JSON: {error}"))),
    }
}
