//! To which names a request may be addressed.
//!
//! A web page whose name was made to point at this machine (DNS rebinding) could read from a server that only this
//! machine can reach. But its requests carry its own name.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::HOST;
use axum::http::uri::Authority;
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::app::ServerState;
use crate::body;
use crate::error::ApiError;

/// Lets a request through that is addressed to this machine, or to a name that was allowed. One without a name
/// comes from no browser.
pub(crate) async fn check(State(state): State<Arc<ServerState>>, request: Request, next: Next) -> Response {
    let Some(host) = request.headers().get(HOST) else { return next.run(request).await };
    if is_allowed(host, &state.hosts) {
        return next.run(request).await;
    }
    let message = format!(
        "the request is addressed to {host:?}, which is no name of this machine: use localhost or 127.0.0.1, or start \
         the server with --allow-host"
    );
    body::discard(request.into_body()).await;
    ApiError::request(StatusCode::FORBIDDEN, "host_not_allowed", message).into_response()
}

fn is_allowed(host: &HeaderValue, allowed: &[String]) -> bool {
    let Some(authority) = host.to_str().ok().and_then(|host| host.parse::<Authority>().ok()) else {
        return false;
    };
    let host = authority.host().to_ascii_lowercase();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host == "localhost"
        || host.ends_with(".localhost")
        || address.is_ok_and(|address| address.is_loopback())
        || allowed.iter().any(|name| name.eq_ignore_ascii_case(&host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_machine_are_told_from_others() {
        let allowed = ["Lily.example".to_owned()];
        for (host, expected) in [
            ("localhost", true),
            ("LocalHost:8080", true),
            ("lily.localhost:1", true),
            ("127.0.0.1:8080", true),
            ("127.1.2.3", true),
            ("[::1]:8080", true),
            ("lily.example", true),
            ("evil.example:8080", false),
            ("localhost.evil.example", false),
            ("127.0.0.1.evil.example", false),
            ("10.0.0.1", false),
            ("[::2]", false),
            ("", false),
            ("a b", false),
        ] {
            assert_eq!(is_allowed(&HeaderValue::from_static(host), &allowed), expected, "{host}");
        }
    }
}
