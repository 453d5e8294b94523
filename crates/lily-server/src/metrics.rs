//! `GET /metrics`, for Prometheus. The names are vLLM's where it has one, so that dashboards made for it work.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use lily_engine::request::Finished;
use lily_engine::scheduler::Status;
use prometheus::core::Collector;
use prometheus::{
    Error, Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry, TEXT_FORMAT,
    TextEncoder,
};

use crate::app::ServerState;
use crate::error::ApiError;
use crate::generation::replies::reason;

/// Seconds, for waiting and reading.
const WAITS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];

/// Seconds, for single tokens.
const TOKENS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0];

/// Seconds, for whole requests.
const REQUESTS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];

/// What is counted. Clones count together.
#[derive(Clone)]
pub struct Metrics {
    registry: Registry,
    running: Gauge,
    waiting: Gauge,
    state_use: Gauge,
    cache_bytes: Gauge,
    step_age: Gauge,
    prompt_tokens: IntCounter,
    cached_tokens: IntCounter,
    read_tokens: IntCounter,
    generated_tokens: IntCounter,
    finished: IntCounterVec,
    answers: IntCounterVec,
    first_token: Histogram,
    inter_token: Histogram,
    per_token: Histogram,
    whole: Histogram,
    queued: Histogram,
    prefill: Histogram,
    decode: Histogram,
}

/// Makes metrics and registers them.
struct Maker {
    registry: Registry,
    model: String,
}

impl Maker {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_label("model_name", &self.model)
    }

    fn add<C: Collector + Clone + 'static>(&self, made: Result<C, Error>) -> Result<C, Error> {
        let made = made?;
        self.registry.register(Box::new(made.clone()))?;
        Ok(made)
    }

    fn gauge(&self, name: &str, help: &str) -> Result<Gauge, Error> {
        self.add(Gauge::with_opts(self.opts(name, help)))
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter, Error> {
        self.add(IntCounter::with_opts(self.opts(name, help)))
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> Result<Histogram, Error> {
        let opts = HistogramOpts { common_opts: self.opts(name, help), buckets: buckets.to_vec() };
        self.add(Histogram::with_opts(opts))
    }
}

impl Metrics {
    /// Metrics of a model, all zero. Fails only if two have the same name.
    pub fn new(model: &str) -> Result<Self, Error> {
        let make = Maker { registry: Registry::new(), model: model.to_owned() };
        let finished = make.opts("vllm:request_success_total", "Answers that ended, by their reason.");
        let answers = Opts::new("http_requests_total", "Requests that were answered, by path and status.");
        Ok(Self {
            running: make.gauge("vllm:num_requests_running", "Requests that are read or answered.")?,
            waiting: make.gauge("vllm:num_requests_waiting", "Requests in the queue.")?,
            state_use: make.gauge(
                "vllm:kv_cache_usage_perc",
                "Part of the memory for state that is reserved; 1 is all.",
            )?,
            cache_bytes: make
                .gauge("lily:prefix_cache_bytes", "Bytes of state that the prefix cache holds on to.")?,
            step_age: make
                .gauge("lily:last_step_age_seconds", "Time since the last step of the engine ended.")?,
            prompt_tokens: make.counter("vllm:prompt_tokens_total", "Tokens of prompts.")?,
            cached_tokens: make
                .counter("vllm:prefix_cache_hits_total", "Tokens of prompts that were not read again.")?,
            read_tokens: make
                .counter("vllm:prefix_cache_queries_total", "Tokens of prompts that were looked for.")?,
            generated_tokens: make.counter("vllm:generation_tokens_total", "Tokens that were generated.")?,
            finished: make.add(IntCounterVec::new(finished, &["finished_reason"]))?,
            answers: make.add(IntCounterVec::new(answers, &["handler", "method", "status"]))?,
            first_token: make.histogram(
                "vllm:time_to_first_token_seconds",
                "From the request to its first token.",
                WAITS,
            )?,
            inter_token: make.histogram(
                "vllm:inter_token_latency_seconds",
                "Between two tokens of an answer; every pair counts, as it comes.",
                TOKENS,
            )?,
            per_token: make.histogram(
                "vllm:request_time_per_output_token_seconds",
                "Between two tokens of an answer, on average; every answer counts, when it has ended.",
                TOKENS,
            )?,
            whole: make.histogram(
                "vllm:e2e_request_latency_seconds",
                "From the request to its last token.",
                REQUESTS,
            )?,
            queued: make.histogram("vllm:request_queue_time_seconds", "In the queue.", WAITS)?,
            prefill: make.histogram(
                "vllm:request_prefill_time_seconds",
                "From the queue to the first token.",
                WAITS,
            )?,
            decode: make.histogram(
                "vllm:request_decode_time_seconds",
                "From the first token to the last.",
                REQUESTS,
            )?,
            registry: make.registry,
        })
    }

    /// An answer has ended.
    pub(crate) fn finished(&self, finished: &Finished) {
        let (usage, timing) = (&finished.usage, &finished.timing);
        self.prompt_tokens.inc_by(usage.prompt_tokens.into());
        self.read_tokens.inc_by(usage.prompt_tokens.into());
        self.cached_tokens.inc_by(usage.cached_tokens.into());
        self.generated_tokens.inc_by(usage.completion_tokens.into());
        self.finished.with_label_values(&[reason(finished.reason)]).inc();
        let seconds = |time: Duration| time.as_secs_f64();
        self.queued.observe(seconds(timing.queued));
        self.prefill.observe(seconds(timing.prefill));
        self.decode.observe(seconds(timing.decode));
        self.first_token.observe(seconds(timing.queued + timing.prefill));
        self.whole.observe(seconds(timing.queued + timing.prefill + timing.decode));
        if usage.completion_tokens > 1 {
            self.per_token.observe(seconds(timing.decode) / f64::from(usage.completion_tokens - 1));
        }
    }

    /// So much time lay between two tokens of an answer.
    pub(crate) fn inter_token(&self, time: Duration) {
        self.inter_token.observe(time.as_secs_f64());
    }

    /// A request was answered, at the route `path`.
    pub(crate) fn answered(&self, path: &str, method: &str, status: u16) {
        self.answers.with_label_values(&[path, method, &status.to_string()]).inc();
    }

    fn look(&self, status: &Status) {
        self.running.set(status.running as f64);
        self.waiting.set(status.waiting as f64);
        self.state_use.set(status.state_bytes as f64 / status.state_limit.max(1) as f64);
        self.cache_bytes.set(status.cache_bytes as f64);
        self.step_age.set(status.last_step_age.as_secs_f64());
    }
}

/// Counts an answer.
pub(crate) async fn count(State(state): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let method = request.method().clone();
    let response = next.run(request).await;
    let path = path.as_deref().unwrap_or("none");
    state.metrics.answered(path, method.as_str(), response.status().as_u16());
    response
}

pub(crate) async fn metrics(State(state): State<Arc<ServerState>>) -> Result<Response, ApiError> {
    state.metrics.look(&state.engine.status());
    let text = TextEncoder::new().encode_to_string(&state.metrics.registry.gather());
    let text = text.map_err(|error| ApiError::internal(format!("the metrics can't be written: {error}")))?;
    Ok(([(CONTENT_TYPE, TEXT_FORMAT)], text).into_response())
}
