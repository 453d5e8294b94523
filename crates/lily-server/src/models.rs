//! `GET /v1/models` and `GET /v1/models/ID`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::app::ServerState;
use crate::error::ApiError;

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
    /// What it can be asked for.
    capabilities: &'static [&'static str],
}

/// The same for every checkpoint of the family.
const CAPABILITIES: &[&str] =
    &["chat", "completion", "fill_in_the_middle", "reasoning", "structured_output", "tools"];

pub(crate) async fn list(State(state): State<Arc<ServerState>>) -> Response {
    Json(List { object: "list", data: [model(&state)] }).into_response()
}

pub(crate) async fn one(
    State(state): State<Arc<ServerState>>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    if id != state.model {
        let message = format!("there is no model {id:?}: this server has {:?}", state.model);
        return Err(ApiError::request(StatusCode::NOT_FOUND, "model_not_found", message));
    }
    Ok(Json(model(&state)).into_response())
}

fn model(state: &ServerState) -> Model<'_> {
    let context = state.engine.status().context;
    Model {
        id: &state.model,
        object: "model",
        created: state.created,
        owned_by: "lily",
        context_length: context,
        max_model_len: context,
        capabilities: CAPABILITIES,
    }
}
