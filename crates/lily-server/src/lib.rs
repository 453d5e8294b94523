//! HTTP: OpenAI's API and Anthropic's over an engine.
//!
//! [`app::router`] is the API, [`serve::serve`] runs it on a socket until it is told to stop. Every answer that
//! is not a success is an [`error::ApiError`], in the form of its API. What each endpoint honours, ignores and
//! refuses is listed in `docs/api.md`.

pub mod app;
mod auth;
mod body;
mod chat_completions;
mod completions;
pub mod cors;
pub mod error;
mod fields;
mod generation;
mod health;
mod host;
mod messages;
pub mod metrics;
mod models;
mod openapi;
mod responses;
pub mod serve;
mod sse;
pub mod tls;
mod tokenize;
mod trace;
pub mod traces;
mod warnings;
