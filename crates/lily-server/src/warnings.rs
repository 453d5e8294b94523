//! What was passed over in a request, told in a header of the answer.

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;

const WARNING: HeaderName = HeaderName::from_static("x-lily-warning");

/// Parts of a request that were ignored though it may matter.
#[derive(Debug, Default)]
pub(crate) struct Warnings(Vec<String>);

impl Warnings {
    /// A field that was ignored, and why.
    pub fn ignored(&mut self, path: &str, why: &str) {
        let warning = format!("{path} ignored: {why}");
        tracing::info!(warning);
        self.0.push(warning);
    }

    /// The answer with one header for each.
    pub fn on(self, mut response: Response) -> Response {
        for warning in self.0 {
            // Headers are ASCII; what a client spelled otherwise is left out.
            let ascii: String = warning.chars().filter(|c| matches!(c, ' '..='~')).collect();
            if let Ok(value) = HeaderValue::from_str(&ascii) {
                response.headers_mut().append(WARNING, value);
            }
        }
        response
    }
}
