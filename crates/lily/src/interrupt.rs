//! Ctrl-C: the first asks for a clean stop, a second one ends the process at once.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::Notify;

/// What a shell reports for a process ended by Ctrl-C.
pub const EXIT_CODE: u8 = 130;

/// The command was stopped by Ctrl-C.
#[derive(Debug)]
pub struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Hears Ctrl-C.
pub struct Interrupts(Arc<State>);

#[derive(Default)]
struct State {
    pending: AtomicBool,
    heard: Notify,
}

impl Interrupts {
    /// Starts to listen, in place of the system's own handling.
    pub fn listen() -> io::Result<Self> {
        #[cfg(unix)]
        let mut signals = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?;
        #[cfg(windows)]
        let mut signals = tokio::signal::windows::ctrl_c()?;
        let state = Arc::new(State::default());
        let listener = Arc::clone(&state);
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                if listener.pending.swap(true, Ordering::SeqCst) {
                    std::process::exit(EXIT_CODE.into());
                }
                listener.heard.notify_one();
            }
        });
        Ok(Self(state))
    }

    /// Resolves at a first Ctrl-C; one that came before is not lost.
    pub async fn first(&self) {
        self.0.heard.notified().await;
    }

    /// Whether a Ctrl-C was heard and not forgotten.
    pub fn is_pending(&self) -> bool {
        self.0.pending.load(Ordering::SeqCst)
    }

    /// The stop is dealt with: the next Ctrl-C is a first one again.
    pub fn forget(&self) {
        self.0.pending.store(false, Ordering::SeqCst);
    }
}

/// Resolves when the system asks the process to end (`kill`, `docker stop`).
pub async fn terminated() -> io::Result<()> {
    #[cfg(unix)]
    {
        let mut signals = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        signals.recv().await;
        Ok(())
    }
    #[cfg(not(unix))]
    std::future::pending().await
}
