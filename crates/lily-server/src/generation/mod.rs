//! What all endpoints that generate have in common: the fields that say how ([`settings`], [`thinking`]), the
//! forms that an answer can be held to ([`format`]), tools ([`tools`]), and following the engine ([`replies`]).

pub(crate) mod format;
pub(crate) mod logprobs;
pub(crate) mod replies;
pub(crate) mod settings;
pub(crate) mod thinking;
pub(crate) mod tools;
pub(crate) mod turn;

use std::sync::Arc;

use lily_engine::request::Request;
use tokio::task::spawn_blocking;
use tracing::Span;

use crate::app::ServerState;
use crate::error::ApiError;

/// Runs what takes long on a thread that no connection waits for: megabytes of text take a while to become
/// tokens, a grammar to be compiled.
pub(crate) async fn blocking<T: Send + 'static>(
    state: &Arc<ServerState>,
    work: impl FnOnce(&ServerState) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (state, span) = (Arc::clone(state), Span::current());
    let done = spawn_blocking(move || span.in_scope(|| work(&state))).await;
    done.map_err(|error| {
        ApiError::internal(format!("the request could not be prepared, please report it: {error}"))
    })?
}

/// `n` requests for answers to one prompt. All but the first start behind its prompt, if there is a prefix cache,
/// and each draws with a seed of its own.
pub(crate) fn answers(request: Request, n: u32) -> Vec<Request> {
    let mut request = request;
    if n > 1
        && let Some(last) = request.prompt.len().checked_sub(1)
    {
        request.boundaries.push(last as u32);
    }
    let answer = |i: u32| {
        let mut request = request.clone();
        request.sampling.seed = request.sampling.seed.map(|seed| seed_of(seed, i));
        request
    };
    (0..n).map(answer).collect()
}

/// The seed of answer `i`; the first one's is the request's. Any odd factor gives different seeds.
fn seed_of(seed: u64, i: u32) -> u64 {
    seed.wrapping_add(u64::from(i).wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

#[cfg(test)]
pub(crate) mod tests;
