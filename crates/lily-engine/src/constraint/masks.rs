//! Masks of the next token, computed beside the device.
//!
//! A mask takes from some microseconds to some milliseconds. One thread computes them, so that a step of the
//! device for other sequences need not wait for one that takes long.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread;
use std::time::Instant;

use llguidance::Matcher;

/// Where masks are asked for. The thread ends when the last of these is gone.
#[derive(Clone)]
pub(crate) struct Masks {
    work: Sender<Work>,
}

struct Work {
    matcher: Box<Matcher>,
    tokens: Vec<u32>,
    done: SyncSender<Result<Masked, String>>,
}

/// A matcher, and the tokens that it allows next.
pub(crate) struct Masked {
    pub matcher: Box<Matcher>,
    pub mask: Arc<[u32]>,
}

/// A mask that was asked for.
pub(crate) type Pending = Receiver<Result<Masked, String>>;

impl Masks {
    /// Starts the thread; fails if the system refuses it.
    pub fn start() -> std::io::Result<Self> {
        let (work, queue) = channel::<Work>();
        thread::Builder::new().name("lily-masks".to_owned()).spawn(move || {
            for Work { mut matcher, tokens, done } in queue {
                let mask = advance(&mut matcher, &tokens);
                // Nobody waits any more for a request that has ended.
                let _ = done.send(mask.map(|mask| Masked { matcher, mask }));
            }
        })?;
        Ok(Self { work })
    }

    /// Asks for the mask behind `tokens`.
    pub fn ask(&self, matcher: Box<Matcher>, tokens: Vec<u32>) -> Pending {
        let (done, pending) = sync_channel(1);
        // If the thread has ended, `done` is dropped with the work, which the receiver notices.
        let _ = self.work.send(Work { matcher, tokens, done });
        pending
    }
}

/// Waits for a mask; `None`: it is not there at the deadline.
pub(crate) fn wait(pending: &Pending, deadline: Option<Instant>) -> Option<Result<Masked, String>> {
    let gone = || Err("the thread that computes masks has ended: please report it".to_owned());
    match deadline {
        None => Some(pending.recv().unwrap_or_else(|_| gone())),
        Some(deadline) => match pending.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(done) => Some(done),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(gone()),
        },
    }
}

fn advance(matcher: &mut Matcher, tokens: &[u32]) -> Result<Arc<[u32]>, String> {
    let result = matcher.consume_tokens(tokens).and_then(|()| matcher.compute_mask_or_eos());
    match result {
        Ok(mask) if !mask.is_zero() => Ok(mask.as_slice().into()),
        Ok(_) => Err("the grammar has come to a place where no token can follow".to_owned()),
        Err(error) => Err(super::plain(&error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_mask_that_takes_long_is_not_waited_for_past_the_deadline() {
        let (done, pending) = sync_channel(1);
        let soon = || Some(Instant::now() + Duration::from_millis(5));
        assert!(wait(&pending, soon()).is_none());
        done.send(Err("broken".to_owned())).unwrap();
        assert_eq!(wait(&pending, soon()).unwrap().err().as_deref(), Some("broken"));
        drop(done);
        for deadline in [None, soon()] {
            assert!(wait(&pending, deadline).unwrap().is_err(), "the thread is gone");
        }
    }
}
