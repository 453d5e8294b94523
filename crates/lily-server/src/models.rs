//! `GET /v1/models`.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::app::ServerState;

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: [Model<'a>; 1],
}

#[derive(Serialize)]
struct Model<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// Tokens of prompt and answer together; clients look for it under either name.
    context_length: u32,
    max_model_len: u32,
}

pub(crate) async fn list(State(state): State<Arc<ServerState>>) -> Response {
    let context = state.engine.status().context;
    let model = Model {
        id: &state.model,
        object: "model",
        created: state.created,
        owned_by: "lily",
        context_length: context,
        max_model_len: context,
    };
    Json(List { object: "list", data: [model] }).into_response()
}
