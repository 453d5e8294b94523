//! Traces for an OpenTelemetry collector: a span for each request, below it one for each of its answers, and below that
//! the time it spent in the queue, until its first token, and from there to its last.
//!
//! Spans are made when their times are known, with the times that the engine measured, so they are made by hand and
//! not from those of the log. Names are OpenTelemetry's for HTTP and for generative AI.

mod answers;
mod collector;

use std::time::Duration;

use axum::extract::{MatchedPath, Request};
use axum::http::{StatusCode, Uri};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{SpanKind, Status, TraceContextExt, Tracer, TracerProvider};
use opentelemetry::{Context, Key, KeyValue};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use tokio::runtime::Handle;

pub(crate) use self::answers::AnswerSpans;
use self::collector::Collector;
use crate::trace::REQUEST_ID;

/// Where a collector takes traces, behind its endpoint.
const PATH: &str = "/v1/traces";

/// The name under which the server shows, unless the environment has another.
const NAME: &str = "lily";

/// Why a span failed, in a word.
const ERROR_TYPE: &str = "error.type";

/// Time that the last spans get to reach the collector.
const LAST_SPANS: Duration = Duration::from_secs(2);

/// Traces can't be sent.
#[derive(Debug, thiserror::Error)]
pub enum TracesError {
    /// The endpoint is no URL that can be used.
    #[error(
        "expected http://HOST:PORT, found {0:?}: a collector on this machine can pass traces on over https"
    )]
    Endpoint(String),
    /// The exporter refused its settings.
    #[error("the traces can't be exported: {0}")]
    Exporter(#[from] ExporterBuildError),
}

/// Makes spans and sends them, in batches, from a thread of its own.
#[derive(Debug)]
pub struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    /// Of the URLs of requests.
    scheme: &'static str,
}

impl Traces {
    /// Sends to a collector by OTLP over HTTP, in its binary form: to `endpoint` with `/v1/traces` behind it. Whether
    /// anybody answers there shows in the log later. `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`,
    /// `OTEL_TRACES_SAMPLER`, `OTEL_BSP_*` and `OTEL_EXPORTER_OTLP_HEADERS` mean what they mean everywhere. `tls`: the
    /// server's connections are encrypted. `runtime` must outlive the traces.
    pub fn start(endpoint: &str, tls: bool, runtime: Handle) -> Result<Self, TracesError> {
        let url = format!("{}{PATH}", endpoint.trim_end_matches('/'));
        let uri = url.parse::<Uri>().ok().filter(|uri| uri.scheme_str() == Some("http"));
        if uri.is_none() {
            return Err(TracesError::Endpoint(endpoint.to_owned()));
        }
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(Collector::new(runtime))
            .with_endpoint(url)
            .build()?;
        let provider =
            SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource()).build();
        let tracer = provider.tracer(NAME);
        Ok(Self { provider, tracer, scheme: if tls { "https" } else { "http" } })
    }

    /// Sends what is left. Blocks for a moment, so not to be called from where answers are made.
    pub fn shutdown(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(LAST_SPANS) {
            tracing::warn!(%error, "the last traces did not reach the collector");
        }
    }

    /// Begins the span of a request, below the client's if it names one (`traceparent`). It ends when the last clone of
    /// the context is dropped.
    pub(crate) fn begin(&self, request: &Request, id: &str) -> Context {
        let parent = TraceContextPropagator::new().extract(&HeaderExtractor(request.headers()));
        let method = request.method().as_str().to_owned();
        let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
        let name = route.as_ref().map_or(method.clone(), |route| format!("{method} {route}"));
        let mut attributes = vec![
            KeyValue::new("http.request.method", method),
            KeyValue::new("url.path", request.uri().path().to_owned()),
            KeyValue::new("url.scheme", self.scheme),
            KeyValue::new(format!("http.response.header.{REQUEST_ID}"), list(vec![id.to_owned()])),
        ];
        attributes.extend(route.map(|route| KeyValue::new("http.route", route)));
        let span = self.tracer.span_builder(name).with_kind(SpanKind::Server).with_attributes(attributes);
        let span = span.start_with_context(&self.tracer, &parent);
        parent.with_span(span)
    }
}

/// The head of the answer is there.
pub(crate) fn answered(context: &Context, status: StatusCode) {
    let span = context.span();
    span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status.as_u16())));
    if status.is_server_error() {
        span.set_attribute(KeyValue::new(ERROR_TYPE, status.as_str().to_owned()));
        span.set_status(Status::error(""));
    }
}

/// What the server is, as the environment says.
fn resource() -> Resource {
    let found = Resource::builder().build();
    let name = found.get(&Key::from_static_str("service.name"));
    match name.is_none_or(|name| name.as_str().starts_with("unknown_service")) {
        true => Resource::builder().with_service_name(NAME).build(),
        false => found,
    }
}

/// An attribute that is a list of texts.
fn list(texts: Vec<String>) -> opentelemetry::Value {
    opentelemetry::Value::Array(opentelemetry::Array::String(texts.into_iter().map(Into::into).collect()))
}
