//! `GET /openapi.json`: the API as an OpenAPI document. Tests hold it to the routes and to the fields that are read.

#[cfg(test)]
pub(crate) mod tests;

use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;

const DOCUMENT: &str = include_str!("document.json");

pub(crate) async fn document() -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], DOCUMENT)
}
