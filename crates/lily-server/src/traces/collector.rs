//! The way to the collector: one POST for a batch of spans. hyper is here already; the exporter's own clients would bring
//! thirty more crates, or HTTP/2.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use axum::http::Uri;
use axum::http::header::{HOST, HeaderValue};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::time::timeout;

/// Longest time that a batch may take. (OpenTelemetry's own default.)
const PATIENCE: Duration = Duration::from_secs(10);

/// Longest answer, bytes: it only says which spans were refused.
const LONGEST: usize = 1 << 20;

/// A client of a collector.
#[derive(Debug)]
pub(super) struct Collector {
    runtime: Handle,
    /// The last batch failed, and the log has it.
    failing: AtomicBool,
}

impl Collector {
    pub fn new(runtime: Handle) -> Self {
        Self { runtime, failing: AtomicBool::new(false) }
    }

    /// Tells the log once when batches begin to fail, and once when they arrive again.
    fn tell(&self, problem: Option<String>) {
        let was_failing = self.failing.swap(problem.is_some(), Ordering::Relaxed);
        match problem {
            Some(problem) if !was_failing => {
                tracing::warn!(problem, "traces do not reach the collector: they are dropped until they do");
            }
            None if was_failing => tracing::info!("traces reach the collector again"),
            _ => {}
        }
    }
}

#[async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        // Called from the exporter's thread, where nothing drives a socket.
        let answer = match self.runtime.spawn(async { timeout(PATIENCE, send(request)).await }).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(format!("no answer within {PATIENCE:?}").into()),
            Err(error) => Err(error.into()),
        };
        self.tell(match &answer {
            Ok(answer) if answer.status().is_success() => None,
            Ok(answer) => Some(format!("status {}", answer.status())),
            Err(error) => Some(error.to_string()),
        });
        answer
    }
}

/// Sends a request on a connection of its own: there is one every few seconds.
async fn send(mut request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let uri = std::mem::take(request.uri_mut());
    let authority = uri.authority().ok_or("the endpoint has no host")?;
    let host = authority.host().trim_matches(['[', ']']);
    let stream = TcpStream::connect((host, authority.port_u16().unwrap_or(80))).await?;
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await?;
    // Ends with the answer, or with the sender.
    tokio::spawn(async {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "connection to the collector ended");
        }
    });
    request.headers_mut().insert(HOST, HeaderValue::from_str(authority.as_str())?);
    *request.uri_mut() = uri.path_and_query().map_or(Ok(Uri::default()), |path| path.as_str().parse())?;
    let (head, body) = sender.send_request(request.map(Full::new)).await?.into_parts();
    let body = Limited::new(body, LONGEST).collect().await?.to_bytes();
    Ok(Response::from_parts(head, body))
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    use axum::Router;
    use axum::routing::post;
    use tokio::net::TcpListener;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[tokio::test]
    async fn the_log_is_told_once_that_batches_fail_and_once_that_they_arrive() {
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
        let _guard = tracing::subscriber::set_default(subscriber);
        let count =
            |text: &str| String::from_utf8(lines.0.lock().unwrap().clone()).unwrap().matches(text).count();

        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let collector = Collector::new(Handle::current());
        let send = || async {
            let request = Request::post(format!("http://{address}/v1/traces?a=b"));
            collector.send_bytes(request.body(Bytes::from_static(b"spans")).unwrap()).await
        };
        drop(listener);
        assert!(send().await.is_err() && send().await.is_err());
        assert_eq!((count("do not reach"), count("again")), (1, 0));
        let echo = async |uri: Uri, body: String| format!("{uri} {body}");
        let listener = TcpListener::bind(address).await.unwrap();
        tokio::spawn(axum::serve(listener, Router::new().route("/v1/traces", post(echo))).into_future());
        assert_eq!(send().await.unwrap().body(), "/v1/traces?a=b spans");
        assert!(send().await.is_ok());
        assert_eq!((count("do not reach"), count("again")), (1, 1));
    }
}
