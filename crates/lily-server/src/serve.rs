//! The router on a socket, from binding to the last answer.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::rt::{Read, Write};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;

use crate::app::{Limits, ServerState, router};

/// Where a server listens unless told otherwise: only this machine can reach it.
pub const DEFAULT_HOST: &str = "127.0.0.1";

/// The port unless told otherwise.
pub const DEFAULT_PORT: u16 = 8080;

/// Time that the last words of cancelled answers get to reach their clients, and that the engine gets beyond its own deadline.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Why a server can't run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Somebody else has the port.
    #[error(
        "port {port} on {host} is in use: stop the program that has it, or choose another with --port (0 takes a free one)"
    )]
    PortInUse {
        /// As given.
        host: String,
        /// As given.
        port: u16,
    },
    /// The system refused the address.
    #[error("can't listen on {host}:{port}: {source}")]
    Bind {
        /// As given.
        host: String,
        /// As given.
        port: u16,
        /// The system's words.
        source: io::Error,
    },
    /// The engine did not stop: its device does not answer.
    #[error("the engine did not stop within {0:?}: its device does not answer")]
    EngineStuck(Duration),
    /// The engine has work and finishes no step.
    #[error("the engine finished no step in {0:?}: its device does not answer")]
    Stalled(Duration),
}

/// Opens a socket. Port 0 takes a free one; ask the listener which.
pub async fn bind(host: &str, port: u16) -> Result<TcpListener, ServeError> {
    TcpListener::bind((host, port)).await.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => ServeError::PortInUse { host: host.to_owned(), port },
        _ => ServeError::Bind { host: host.to_owned(), port, source },
    })
}

/// Serves until `shutdown` resolves. Then no connection is accepted any more, running answers get
/// [`Limits::shutdown_time`](crate::app::Limits) to finish and are cancelled after it, and the engine is
/// stopped. If the engine stalls, its requests fail and the server ends. Dropping the future ends everything at once, except the engine's thread.
pub async fn serve(
    listener: TcpListener,
    state: Arc<ServerState>,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    // An address that can't be told is checked as the stricter one.
    let local = listener.local_addr().map_or(true, |address| address.ip().is_loopback());
    let router = router(Arc::clone(&state), local);
    // Dropping the sender tells all connections to end after their present answer.
    let (stop, stopped) = watch::channel(());
    let mut connections = JoinSet::new();
    let accepting = accept(listener, &mut connections, shutdown, |stream| {
        serve_stream(stream, router.clone(), Arc::clone(&state), stopped.clone())
    });
    let stalled = tokio::select! {
        () = accepting => None,
        limit = stall(&state) => Some(limit),
    };
    if let Some(limit) = stalled {
        let error = ServeError::Stalled(limit);
        state.engine.abandon(error.to_string());
        drop(stop);
        last_words(&mut connections).await;
        return Err(error);
    }

    let running = connections.len();
    tracing::info!(connections = running, "stopping: running answers may finish");
    drop(stop);
    let engine = stop_engine(&state);
    let engine = timeout(state.limits.shutdown_time + LAST_WORDS, engine).await;
    last_words(&mut connections).await;
    engine.map_err(|_| ServeError::EngineStuck(state.limits.shutdown_time + LAST_WORDS))
}

/// Lets connections end.
async fn last_words(connections: &mut JoinSet<()>) {
    let ended = async { while connections.join_next().await.is_some() {} };
    if timeout(LAST_WORDS, ended).await.is_err() {
        tracing::warn!(connections = connections.len(), "connections cut: their clients do not read");
    }
}

/// Resolves when the engine has had work for [`Limits::stall_time`] and finished no step.
async fn stall(state: &ServerState) -> Duration {
    let Some(limit) = state.limits.stall_time else { return pending().await };
    loop {
        sleep(limit / 8).await;
        let status = state.engine.status();
        if status.stalled >= limit && status.stopped.is_none() {
            let (stalled, running, waiting, steps) =
                (status.stalled, status.running, status.waiting, status.steps);
            tracing::error!(
                ?stalled,
                running,
                waiting,
                steps,
                "the device does not answer: the server gives up"
            );
            return limit;
        }
    }
}

/// Accepts connections until `shutdown` resolves. The listener is closed on return.
async fn accept<F: Future<Output = ()> + Send + 'static>(
    mut listener: TcpListener,
    connections: &mut JoinSet<()>,
    shutdown: impl Future<Output = ()>,
    handle: impl Fn(TcpStream) -> F,
) {
    let mut shutdown = pin!(shutdown);
    loop {
        let finished = async {
            match connections.join_next().await {
                Some(_) => {}
                None => pending().await,
            }
        };
        tokio::select! {
            () = &mut shutdown => return,
            // axum's accept waits out a lack of file descriptors; other faults belong to single connections.
            (stream, _) = Listener::accept(&mut listener) => { connections.spawn(handle(stream)); }
            () = finished => {}
        }
    }
}

async fn serve_stream(
    stream: TcpStream,
    router: Router,
    state: Arc<ServerState>,
    stopped: watch::Receiver<()>,
) {
    let limits = state.limits.clone();
    // Tokens are small: each must leave at once.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY could not be set");
    }
    // A client that takes nothing holds what is written for it, and its answer goes on for nobody.
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(limits.write_time));
    let stream = Box::pin(stream);
    let Some(tls) = &state.tls else {
        return serve_connection(TokioIo::new(stream), router, limits, stopped).await;
    };
    match timeout(limits.head_time, tls.0.accept(stream)).await {
        Ok(Ok(stream)) => serve_connection(TokioIo::new(stream), router, limits, stopped).await,
        Ok(Err(error)) => tracing::debug!(%error, "no TLS connection"),
        Err(_) => tracing::debug!("no TLS connection: the client does not go on"),
    }
}

async fn serve_connection(
    stream: impl Read + Write + Unpin + Send + 'static,
    router: Router,
    limits: Limits,
    mut stopped: watch::Receiver<()>,
) {
    let service = TowerToHyperService::new(router);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time)
        .max_buf_size(limits.head_bytes)
        .max_headers(limits.headers)
        .serve_connection(stream, service);
    let mut connection = pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        _ = stopped.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "connection ended");
    }
}

/// Stops the engine on a thread of its own: a device that hangs must not keep the process from ending.
async fn stop_engine(state: &Arc<ServerState>) {
    let (done, ended) = oneshot::channel::<Infallible>();
    let (engine, deadline) = (state.engine.clone(), state.limits.shutdown_time);
    std::thread::spawn(move || {
        engine.shutdown(deadline);
        drop(done);
    });
    // Resolves when the sender is dropped.
    let _ = ended.await;
}
