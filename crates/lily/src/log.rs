//! Logs, on standard error.

use std::io::{self, IsTerminal};

use tracing_subscriber::EnvFilter;

use crate::args::LogFormat;

/// Environment variable with filters, which go before `-v`.
const VARIABLE: &str = "LILY_LOG";

/// Starts logging, in lines of text or of JSON. A server tells what it does; other commands only what is wrong, unless
/// asked for more.
pub fn start(verbose: u8, server: bool, format: LogFormat) {
    let level = match verbose + u8::from(server) {
        0 => "warn",
        1 => "info",
        2 => "debug",
        _ => "trace",
    };
    let own = EnvFilter::new(format!("warn,lily={level}"));
    let given = std::env::var(VARIABLE).ok().filter(|filters| !filters.is_empty());
    let (filter, problem) = match given.map(EnvFilter::try_new) {
        None => (own, None),
        Some(Ok(filter)) => (filter, None),
        Some(Err(problem)) => (own, Some(problem)),
    };
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal());
    match format {
        LogFormat::Text => lines.init(),
        LogFormat::Json => lines.json().with_span_list(false).init(),
    }
    if let Some(problem) = problem {
        tracing::warn!("{VARIABLE} is not used: {problem}");
    }
}
