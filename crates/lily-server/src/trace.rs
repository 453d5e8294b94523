//! A request id and log lines for every request.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use opentelemetry::context::FutureExt;
use opentelemetry::trace::TraceContextExt;
use tracing::Instrument;
use tracing::field::{Empty, display};

use crate::traces::{Traces, answered};

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest id that is taken from a client, bytes.
const LONGEST_ID: usize = 128;

/// Opens the span that all log lines of a request carry, and that of its trace, and answers with its id.
pub(crate) async fn trace(
    State(traces): State<Option<Arc<Traces>>>,
    request: Request,
    next: Next,
) -> Response {
    let id = client_id(request.headers()).unwrap_or_else(|| random_id("req_"));
    let (method, path) = (request.method(), request.uri().path());
    let span = tracing::info_span!("request", id, %method, path, trace_id = Empty);
    let context = traces.map(|traces| traces.begin(&request, &id));
    if let Some(context) = &context {
        span.record("trace_id", display(context.span().span_context().trace_id()));
    }
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
    let answer = answer.instrument(span);
    let Some(context) = context else { return answer.await };
    let response = answer.with_context(context.clone()).await;
    answered(&context, response.status());
    response
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
