//! The server on a real socket, over an engine whose model follows a script.

#![allow(clippy::unwrap_used, reason = "a helper that fails must fail its test")]

mod bad_input;
mod calls;
mod chat;
mod completions;
mod disconnect;
mod fields;
mod fixture;
mod guards;
mod held;
mod http;
mod lifecycle;
mod messages;
mod patience;
mod responses;
mod several;
mod tls;
mod traces;
