//! A request id and log lines for every request.

use std::time::Instant;

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use tracing::Instrument;

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest id that is taken from a client, bytes.
const LONGEST_ID: usize = 128;

/// Opens the span that all log lines of a request carry, and answers with its id.
pub(crate) async fn trace(request: Request, next: Next) -> Response {
    let id = client_id(request.headers()).unwrap_or_else(|| random_id("req_"));
    let span = tracing::info_span!("request", id, method = %request.method(), path = request.uri().path());
    let start = Instant::now();
    let answer = async {
        let mut response = next.run(request).await;
        if let Ok(value) = HeaderValue::from_str(&id) {
            response.headers_mut().insert(REQUEST_ID, value);
        }
        let status = response.status().as_u16();
        tracing::debug!(status, elapsed_ms = start.elapsed().as_millis() as u64, "answered");
        response
    };
    answer.instrument(span).await
}

/// The client's own id, if it is fit for a log.
fn client_id(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(REQUEST_ID)?.to_str().ok()?;
    (1..=LONGEST_ID).contains(&value.len()).then(|| value.to_owned())
}

/// A prefix and 24 random letters and digits: unique, not secret.
pub(crate) fn random_id(prefix: &str) -> String {
    let tail = std::iter::repeat_with(fastrand::alphanumeric).take(24);
    prefix.chars().chain(tail).collect()
}
