//! Errors as clients see them: OpenAI's envelope.

use axum::Json;
use axum::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use lily_engine::chat::ChatError;
use lily_engine::request::{RequestError, SubmitError};
use lily_model::template::TemplateError;
use serde::Serialize;

/// Seconds after which a client that met a full queue should try again. Answers take seconds: less would
/// only spin, more would leave a free place unused.
const RETRY_AFTER_SECONDS: u32 = 2;

/// Kinds of errors, by OpenAI's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorType {
    /// The request is at fault.
    InvalidRequestError,
    /// There are too many requests.
    RateLimitError,
    /// The server is at fault.
    ServerError,
}

/// A request that is not served, and why: status 4xx or 5xx with
/// `{"error": {"message", "type", "param", "code"}}`.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// Kind.
    pub kind: ErrorType,
    /// For people: what was expected, what was found, what to do.
    pub message: String,
    /// Path of the field at fault, such as `messages[2].content`.
    pub param: Option<String>,
    /// For programs.
    pub code: Option<&'static str>,
}

#[derive(Serialize)]
pub(crate) struct Envelope<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: ErrorType,
    param: Option<&'a str>,
    code: Option<&'static str>,
}

impl ApiError {
    /// A fault of the request as a whole.
    pub fn request(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let kind = match status {
            StatusCode::TOO_MANY_REQUESTS => ErrorType::RateLimitError,
            s if s.is_server_error() => ErrorType::ServerError,
            _ => ErrorType::InvalidRequestError,
        };
        Self { status, kind, message: message.into(), param: None, code: Some(code) }
    }

    /// A field that is wrong: 400. `problem` says what was expected and what was found.
    pub fn field(param: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let param = param.into();
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: ErrorType::InvalidRequestError,
            message: format!("{param}: {problem}"),
            param: Some(param),
            code: Some("invalid_value"),
        }
    }

    /// A field that is understood and can't be honoured: 400.
    pub fn unsupported(param: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        Self { code: Some("unsupported_value"), ..Self::field(param, problem) }
    }

    /// The same error with another code.
    pub fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// A fault of the server: 500.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::request(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// Writes the error to the log; the caller's span says whose it is.
    pub(crate) fn log(&self) {
        let (status, code) = (self.status.as_u16(), self.code);
        if self.status.is_server_error() {
            tracing::error!(status, code, "{self}");
        } else {
            tracing::info!(status, code, "{self}");
        }
    }

    pub(crate) fn envelope(&self) -> Envelope<'_> {
        let param = self.param.as_deref();
        Envelope { error: Inner { message: &self.message, kind: self.kind, param, code: self.code } }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.log();
        let mut response = (self.status, Json(self.envelope())).into_response();
        // For the endpoints whose errors have another form.
        response.extensions_mut().insert(self.clone());
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => {
                response.headers_mut().insert(RETRY_AFTER, RETRY_AFTER_SECONDS.into());
            }
            StatusCode::UNAUTHORIZED => {
                response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}

impl ApiError {
    /// A request that the engine does not take; `prompt` is the field that the prompt came from.
    pub(crate) fn submit(error: SubmitError, prompt: &str) -> Self {
        let message = error.to_string();
        let bad = |param: &str, code| Self {
            status: StatusCode::BAD_REQUEST,
            kind: ErrorType::InvalidRequestError,
            message: message.clone(),
            param: Some(param.to_owned()),
            code: Some(code),
        };
        match error {
            SubmitError::EmptyPrompt => bad(prompt, "empty_prompt"),
            SubmitError::ContextExceeded { .. } => bad(prompt, "context_length_exceeded"),
            SubmitError::TooLarge { .. } => bad("max_tokens", "insufficient_memory"),
            SubmitError::InvalidParameter { parameter, .. } => bad(parameter, "invalid_value"),
            SubmitError::QueueFull { .. } => {
                Self::request(StatusCode::TOO_MANY_REQUESTS, "queue_full", message)
            }
            SubmitError::Stopped(_) => {
                let message = without_paths(&message);
                Self::request(StatusCode::SERVICE_UNAVAILABLE, "engine_stopped", message)
            }
        }
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> Self {
        let (status, code) = match error {
            RequestError::Model(_) => (StatusCode::INTERNAL_SERVER_ERROR, "model_error"),
            RequestError::Device(_) => (StatusCode::INTERNAL_SERVER_ERROR, "device_error"),
            // What the client asked for can't be followed with what the model wrote.
            RequestError::Constraint(_) => (StatusCode::BAD_REQUEST, "constraint_failed"),
            RequestError::Shutdown => (StatusCode::SERVICE_UNAVAILABLE, "shutdown"),
        };
        Self::request(status, code, without_paths(&error.to_string()))
    }
}

/// A message of the system or of a device without the paths in it, which are nobody else's business; the log has them.
pub(crate) fn without_paths(message: &str) -> String {
    let is_end = |c: char| c.is_whitespace() || "\"'`()<>,;".contains(c);
    let word = |word: &str| {
        let path = word.trim_end_matches(is_end);
        let is_path = path.starts_with(['/', '~'])
            || path.contains(":\\")
            || path.contains("/./")
            || path.contains("../");
        if is_path && path.len() > 1 { format!("[path]{}", &word[path.len()..]) } else { word.to_owned() }
    };
    message.split_inclusive(is_end).map(word).collect()
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        let message = match &error {
            ChatError::Template(error) => {
                format!("the chat template can't render this conversation: {error}")
            }
            other => other.to_string(),
        };
        let code = match &error {
            ChatError::Message { .. } | ChatError::Tool { .. } => "invalid_value",
            ChatError::UnsupportedPart { .. } => "unsupported_content",
            ChatError::Template(TemplateError::Refused(_)) => "template_refused",
            ChatError::Template(_) => "template_failed",
        };
        Self {
            status: StatusCode::BAD_REQUEST,
            kind: ErrorType::InvalidRequestError,
            message,
            param: Some(error.param()),
            code: Some(code),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_left_out_of_messages() {
        for (message, expected) in [
            ("can't open /usr/lib/x.so: no such file", "can't open [path] no such file"),
            ("'/home/me/a b' is gone, (/tmp/x)", "'[path] b' is gone, ([path])"),
            ("C:\\models\\x is gone", "[path] is gone"),
            ("3/4 of a token, and / or", "3/4 of a token, and / or"),
        ] {
            assert_eq!(without_paths(message), expected);
        }
    }
}
