//! Server-sent events, as all streams send them.

use std::future::Future;
use std::time::Duration;

use axum::http::HeaderName;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};

/// Tells reverse proxies to pass events on as they come.
const NO_BUFFERING: (HeaderName, &str) = (HeaderName::from_static("x-accel-buffering"), "no");

/// Where the events of a stream come from.
pub(crate) trait Source: Send + 'static {
    /// The next event; `None`: the stream is over.
    fn next(&mut self) -> impl Future<Output = Option<Result<Event, axum::Error>>> + Send;
}

/// A stream of events. A comment line goes out whenever nothing was sent for `keep_alive`, from a timer: a long
/// prefill makes no progress to hang it on.
pub(crate) fn with_comments(source: impl Source, keep_alive: Duration) -> Response {
    let comments = KeepAlive::new().interval(keep_alive).text("keep-alive");
    ([NO_BUFFERING], Sse::new(events(source)).keep_alive(comments)).into_response()
}

/// A stream of events whose source keeps the connection alive itself.
pub(crate) fn plain(source: impl Source) -> Response {
    ([NO_BUFFERING], Sse::new(events(source))).into_response()
}

/// The end of a stream of OpenAI's older APIs.
pub(crate) fn done() -> Event {
    Event::default().data("[DONE]")
}

fn events(source: impl Source) -> impl Stream<Item = Result<Event, axum::Error>> + Send + 'static {
    stream::unfold(source, |mut source| async {
        let event = source.next().await?;
        Some((event, source))
    })
}
