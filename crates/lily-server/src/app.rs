//! What the server knows, and the routes.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::Request;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::{from_fn_with_state, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use lily_engine::chat::SampledCalls;
use lily_engine::request::Sampling;
use lily_engine::scheduler::Engine;
use lily_model::template::ChatTemplate;
use lily_model::tokenizer::Tokenizer;
use tower_http::catch_panic::CatchPanicLayer;

use crate::cors::{self, Origin};
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::tls::Tls;
use crate::traces::Traces;
use crate::{
    auth, body, chat_completions, completions, health, host, messages, metrics, models, openapi, responses,
    tokenize, trace,
};

/// Everything a request may need. Shared by all connections.
pub struct ServerState {
    /// Where tokens come from.
    pub engine: Engine,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The model's chat template.
    pub template: Arc<ChatTemplate>,
    /// Name under which the model is served.
    pub model: String,
    /// What a request gets for sampling fields it leaves out (generation_config.json).
    pub defaults: Sampling,
    /// What `Authorization: Bearer` must carry, if anything.
    pub api_key: Option<String>,
    /// Names beside those of this machine to which requests may be addressed, where only it can reach the server.
    pub hosts: Vec<String>,
    /// Web pages from elsewhere that may read answers; empty: none.
    pub origins: Vec<Origin>,
    /// What connections are encrypted with, if they are.
    pub tls: Option<Tls>,
    /// Tool calls as they were sampled: clients send them back.
    pub calls: Arc<SampledCalls>,
    /// What is counted.
    pub metrics: Metrics,
    /// What a collector is told of requests, if there is one.
    pub traces: Option<Arc<Traces>>,
    /// When the model was loaded, seconds since 1970.
    pub created: u64,
    /// Bounds.
    pub limits: Limits,
}

/// Bounds of the server.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Longest request body, bytes.
    pub body_bytes: usize,
    /// Longest time a body may take to arrive.
    pub body_time: Duration,
    /// Longest head of a request, bytes.
    pub head_bytes: usize,
    /// Most header lines of a request.
    pub headers: usize,
    /// Longest time the head of a request may take to arrive, counted from the end of the previous one.
    pub head_time: Duration,
    /// Longest time that a client may take nothing of an answer that waits for it.
    pub write_time: Duration,
    /// A stream that was silent for this long gets a comment line.
    pub keep_alive: Duration,
    /// Longest time from a request to the end of its answer.
    pub request_time: Option<Duration>,
    /// Longest time that a request which has left the queue may make no progress.
    pub idle_time: Option<Duration>,
    /// Longest time that the engine may finish no step while it has work; then the server gives up.
    pub stall_time: Option<Duration>,
    /// Time between two log lines about a prompt that is being read.
    pub progress_time: Duration,
    /// Time that running answers get to finish after the server was told to stop.
    pub shutdown_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // The longest context, 262,144 tokens, is about 1 MB of English text.
            body_bytes: 8 << 20,
            body_time: Duration::from_secs(30),
            // Keys, cookies and traces take a few hundred bytes each.
            head_bytes: 64 << 10,
            headers: 100,
            head_time: Duration::from_secs(30),
            write_time: Duration::from_secs(60),
            keep_alive: Duration::from_secs(15),
            request_time: None,
            idle_time: None,
            // A step of the largest chunk takes half a minute on a slow machine.
            stall_time: Some(Duration::from_secs(300)),
            progress_time: Duration::from_secs(5),
            shutdown_time: Duration::from_secs(10),
        }
    }
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The whole API. `local`: only this machine can reach it, so requests must be addressed to it.
pub fn router(state: Arc<ServerState>, local: bool) -> Router {
    let key = || from_fn_with_state(Arc::clone(&state), auth::require_key);
    let anthropic = Router::new()
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route_layer(key())
        .route_layer(map_response(messages::in_anthropics_form));
    let keyed = Router::new()
        .route("/v1/chat/completions", post(chat_completions::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/responses", post(responses::create))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/metrics", get(metrics::metrics))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route_layer(key());
    let routes = Router::new()
        .route("/health", get(health::health))
        .route("/openapi.json", get(openapi::document))
        .merge(keyed)
        .merge(anthropic)
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .with_state(Arc::clone(&state));
    let routes = match local {
        true => routes.layer(from_fn_with_state(Arc::clone(&state), host::check)),
        false => routes,
    };
    // Outside of the key: a browser asks without one whether it may send one.
    let routes = match state.origins.as_slice() {
        [] => routes,
        origins => routes.layer(cors::layer(origins)),
    };
    let traces = state.traces.clone();
    with_layers(routes.layer(from_fn_with_state(state, metrics::count)), traces)
}

/// What every request goes through, whatever answers it.
fn with_layers(routes: Router, traces: Option<Arc<Traces>>) -> Router {
    let panicked =
        |_| ApiError::internal("the server failed on this request: please report it").into_response();
    routes.layer(CatchPanicLayer::custom(panicked)).layer(from_fn_with_state(traces, trace::trace))
}

async fn not_found(method: Method, uri: Uri, request: Request) -> Response {
    body::discard(request.into_body()).await;
    let message = format!("there is no {method} {}: docs/api.md lists what there is", uri.path());
    ApiError::request(StatusCode::NOT_FOUND, "not_found", message).into_response()
}

async fn method_not_allowed(method: Method, uri: Uri, request: Request) -> Response {
    body::discard(request.into_body()).await;
    let message = format!("{} does not take {method}: the Allow header lists what it takes", uri.path());
    ApiError::request(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message).into_response()
}

#[cfg(test)]
mod tests {
    use axum::body::{Body, to_bytes};
    use hyper::service::Service;
    use hyper_util::service::TowerToHyperService;

    use super::*;

    #[tokio::test]
    async fn a_panic_is_an_error_of_its_request() {
        async fn broken() -> &'static str {
            panic!("broken")
        }
        let service = TowerToHyperService::new(with_layers(Router::new().route("/", get(broken)), None));
        let response = service.call(Request::new(Body::empty())).await.unwrap();
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert!(response.headers().contains_key("x-request-id"));
        let body = to_bytes(response.into_body(), 1000).await.unwrap();
        let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["error"]["code"], "internal_error");
    }
}
