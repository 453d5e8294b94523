//! `GET /health`: what the engine is really doing.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::app::ServerState;
use crate::error::without_paths;

#[derive(Serialize)]
struct Health<'a> {
    /// `ok` or `stopped`.
    status: &'static str,
    /// Why the engine stopped.
    reason: Option<String>,
    model: &'a str,
    context_length: u32,
    running: usize,
    waiting: usize,
    /// Sequences that the device holds for requests.
    sequences: usize,
    /// Bytes of state that are reserved, for these and for the prefix cache.
    state_bytes: u64,
    steps: u64,
    /// With requests running, a growing age means that the device does not answer.
    last_step_age_ms: u128,
    prefix_cache: PrefixCache,
}

#[derive(Serialize)]
struct PrefixCache {
    snapshots: usize,
    /// Of state.
    bytes: u64,
    limit_bytes: u64,
}

pub(crate) async fn health(State(state): State<Arc<ServerState>>) -> Response {
    let engine = state.engine.status();
    let code = if engine.stopped.is_some() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    let health = Health {
        status: if engine.stopped.is_some() { "stopped" } else { "ok" },
        reason: engine.stopped.as_deref().map(without_paths),
        model: &state.model,
        context_length: engine.context,
        running: engine.running,
        waiting: engine.waiting,
        sequences: engine.sequences,
        state_bytes: engine.state_bytes,
        steps: engine.steps,
        last_step_age_ms: engine.last_step_age.as_millis(),
        prefix_cache: PrefixCache {
            snapshots: engine.cache_snapshots,
            bytes: engine.cache_bytes,
            limit_bytes: engine.cache_limit,
        },
    };
    (code, Json(health)).into_response()
}
