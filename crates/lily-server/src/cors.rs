//! Which web pages may read answers (CORS): none, unless they are listed.

use std::str::FromStr;

use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderName, HeaderValue, Method, Uri};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::trace::REQUEST_ID;
use crate::warnings::WARNING;

/// Where web pages come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// Anywhere.
    Any,
    /// `SCHEME://HOST[:PORT]`.
    One(HeaderValue),
}

impl FromStr for Origin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const EXPECTED: &str = "expected * or an origin like https://app.example, without a path";
        if text == "*" {
            return Ok(Self::Any);
        }
        let uri: Uri = text.parse().map_err(|_| EXPECTED.to_owned())?;
        let origin = uri.scheme_str().zip(uri.authority()).map(|(scheme, host)| format!("{scheme}://{host}"));
        let header = HeaderValue::from_str(text).ok().filter(|_| origin.as_deref() == Some(text));
        header.map(Self::One).ok_or_else(|| EXPECTED.to_owned())
    }
}

/// Lets pages from these origins send requests and read the answers.
pub(crate) fn layer(origins: &[Origin]) -> CorsLayer {
    let listed = origins.iter().filter_map(|origin| match origin {
        Origin::Any => None,
        Origin::One(origin) => Some(origin.clone()),
    });
    let allowed = if origins.contains(&Origin::Any) { AllowOrigin::any() } else { AllowOrigin::list(listed) };
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        // Clients send headers of their own kinds; none of them means more here than its request.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([REQUEST_ID, WARNING, RETRY_AFTER] as [HeaderName; 3])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_told_from_addresses() {
        for text in ["https://app.example", "http://localhost:3000", "http://[::1]:3000", "app://page"] {
            assert_eq!(text.parse(), Ok(Origin::One(HeaderValue::from_static(text))), "{text}");
        }
        assert_eq!("*".parse(), Ok(Origin::Any));
        for text in
            ["", "app.example", "https://app.example/", "https://app.example/page", "https://*.example /"]
        {
            assert!(text.parse::<Origin>().is_err(), "{text}");
        }
    }
}
