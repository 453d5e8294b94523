//! What was passed over in a request, told in a header of the answer.

use axum::http::{HeaderName, HeaderValue};
use axum::response::Response;

pub(crate) const WARNING: HeaderName = HeaderName::from_static("x-lily-warning");

/// Most headers of an answer: clients take a bounded number.
const MOST: usize = 16;

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
        let more = self.0.len().saturating_sub(MOST);
        let rest = (more > 0).then(|| format!("and {more} more: the server's log has them"));
        for warning in self.0.into_iter().take(MOST).chain(rest) {
            // Headers are ASCII; what a client spelled otherwise is left out.
            let ascii: String = warning.chars().filter(|c| matches!(c, ' '..='~')).collect();
            if let Ok(value) = HeaderValue::from_str(&ascii) {
                response.headers_mut().append(WARNING, value);
            }
        }
        response
    }
}
