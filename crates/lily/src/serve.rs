//! `lily serve`: the OpenAI-compatible API.

use std::io::{self, Write};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use lily_server::app::{Limits, ServerState, unix_time};
use lily_server::metrics::Metrics;
use lily_server::serve::{bind, serve as run_server};
use lily_server::tls::Tls;
use lily_server::traces::Traces;
use tokio::net::TcpListener;
use tokio::runtime::Handle;

use crate::args::{Global, Serve, UsageError};
use crate::interrupt::{Interrupts, terminated};
use crate::session::{Session, default_sampling, runtime};

/// Runs the command.
pub fn serve(args: &Serve, global: &Global) -> Result<()> {
    let api_key = api_key(args)?;
    runtime()?.block_on(async {
        // Before the model: loading one takes time, finding a port in use does not.
        let listener = bind(&args.host, args.port).await?;
        if api_key.is_none() && !args.insecure && !listener.local_addr()?.ip().is_loopback() {
            bail!(UsageError(format!(
                "{} can be reached from other machines: set --api-key or LILY_API_KEY, or say --insecure to serve \
                 anybody",
                args.host
            )));
        }
        let tls = args.tls_cert.as_deref().zip(args.tls_key.as_deref());
        let tls = tls.map(|(cert, key)| Tls::load(cert, key)).transpose()?;
        let traces = traces(args, tls.is_some())?;
        let (context, chunk) = (args.context.ctx_size, args.reading.ubatch_size);
        let (sequences, cache) = (args.max_sequences, args.cache.bytes());
        let session =
            tokio::task::block_in_place(|| Session::start(global, context, chunk, sequences, cache))?;
        let served = serve_session(listener, session, api_key, tls, traces.clone(), args).await;
        if let Some(traces) = traces {
            tokio::task::block_in_place(|| traces.shutdown());
        }
        served
    })
}

fn api_key(args: &Serve) -> Result<Option<String>> {
    match &args.api_key {
        Some(key) if key.trim().is_empty() => {
            bail!(UsageError(
                "the API key is empty: give one, or leave out --api-key and LILY_API_KEY".into()
            ))
        }
        key => Ok(key.clone()),
    }
}

fn traces(args: &Serve, tls: bool) -> Result<Option<Arc<Traces>>> {
    let Some(endpoint) = args.otlp_endpoint.as_deref().filter(|endpoint| !endpoint.is_empty()) else {
        return Ok(None);
    };
    let traces = Traces::start(endpoint, tls, Handle::current());
    Ok(Some(Arc::new(traces.map_err(|error| UsageError(format!("--otlp-endpoint: {error}")))?)))
}

fn limits(args: &Serve) -> Limits {
    let seconds = |n: u64| (n > 0).then(|| Duration::from_secs(n));
    Limits {
        request_time: seconds(args.request_timeout),
        idle_time: seconds(args.idle_timeout),
        stall_time: seconds(args.stall_timeout),
        shutdown_time: Duration::from_secs(args.shutdown_timeout),
        ..Limits::default()
    }
}

async fn serve_session(
    listener: TcpListener,
    session: Session,
    api_key: Option<String>,
    tls: Option<Tls>,
    traces: Option<Arc<Traces>>,
    args: &Serve,
) -> Result<()> {
    let interrupts = Interrupts::listen()?;
    let state = ServerState {
        engine: session.engine,
        tokenizer: session.model.tokenizer,
        template: session.model.template,
        traces,
        calls: Arc::default(),
        metrics: Metrics::new(&session.name)?,
        model: session.name,
        defaults: default_sampling(&session.model.generation),
        api_key,
        hosts: args.allow_host.clone(),
        origins: args.cors_origin.clone(),
        tls,
        created: unix_time(),
        limits: limits(args),
    };
    let scheme = if state.tls.is_some() { "https" } else { "http" };
    let address = listener.local_addr()?;
    let host = match address.ip() {
        IpAddr::V6(ip) => format!("[{ip}]"),
        ip => ip.to_string(),
    };
    writeln!(io::stdout(), "listening on {scheme}://{host}:{}", address.port())?;
    let stop = async {
        tokio::select! {
            () = interrupts.first() => {}
            Ok(()) = terminated() => {}
        }
    };
    Ok(run_server(listener, Arc::new(state), stop).await?)
}
