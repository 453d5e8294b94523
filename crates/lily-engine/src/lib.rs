//! Requests become tokens, tokens become text.
//!
//! One thread owns the device and runs the [`scheduler`]: each step is one batch of all decoding sequences
//! plus at most one chunk of prefill; a prompt that starts like an earlier one resumes from a snapshot of it in
//! the prefix cache. What comes out of it is text ([`detokenize`]), already split into the
//! thought, the answer and tool calls ([`output`]), cut at stop strings ([`stop`]), never with half a
//! character in it. A request may hold its reply to a schema or a grammar ([`constraint`]).

mod cache;
pub mod chat;
pub mod constraint;
pub mod detokenize;
mod guide;
pub mod output;
mod reply;
pub mod request;
pub mod scheduler;
pub mod stop;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod validate;
