//! One thread owns the device; requests arrive over a channel.
//!
//! Requests are served in the order in which they came. One starts when there is a place for it and the backend
//! has reserved memory for all the tokens it may grow to, so that it can't fail half way for lack of it. Until
//! then it and all behind it wait. A step of the device is one batch: a token for every sequence that decodes,
//! and a chunk of the one prompt that is being read. A prompt begins where the prefix cache has a snapshot of it,
//! and leaves snapshots for later ones.

mod calls;
mod job;
mod sequence;
mod worker;

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lily_model::backend::{Backend, Limits};
use lily_model::tokenizer::Tokenizer;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;

use crate::constraint::masks::Masks;
use crate::constraint::{Compiler, Constraint, ConstraintError, Outline};
use crate::guide::Guide;
use crate::request::{Event, OutputFormat, Request, SubmitError};
use crate::validate;
use job::{Job, Place};
use worker::{Command, Worker};

/// The control token that ends a thought.
const CLOSE_THOUGHT: &str = "</think>";

/// How long [`Engine::shutdown`] waits past its deadline for the step that the device is working on.
const LAST_STEP: Duration = Duration::from_secs(10);

/// Settings of an engine.
#[derive(Clone, Debug)]
pub struct Options {
    /// Sequences worked on side by side; at least 1, at most what the backend's limits allow.
    pub max_sequences: usize,
    /// Requests that may wait for a place.
    pub max_queue: usize,
    /// Most tokens of a prompt that one step reads; at least 1.
    pub prefill_chunk: u32,
    /// As `prefill_chunk`, in a step that others write in: they wait for it to end.
    pub shared_prefill_chunk: u32,
    /// Bytes of state that the prefix cache may hold on to, as far as requests leave them; 0: there is no cache.
    pub cache_bytes: u64,
    /// Tokens between two snapshots of a long prompt; at least 1.
    pub snapshot_interval: u32,
    /// Token ids that end a turn.
    pub eos: Vec<u32>,
}

/// A handle on the engine's thread. Clones share it. When the last one is dropped, the thread ends after the
/// requests that it has.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    shared: Arc<Shared>,
    commands: Sender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    limits: Limits,
    max_open: usize,
    cache_limit: u64,
    /// Bytes of state of the capacities that can never be had, up to the context: the last of them first.
    too_large: Vec<u64>,
    next_seed: AtomicU64,
    compiler: Compiler,
    /// `None`: the system refused a thread for them.
    masks: Option<Masks>,
    /// Allows the closing tag of a thought alone.
    close_thought: Option<Arc<[u32]>>,
}

/// The events of one request. Dropping it cancels the request within one step.
#[derive(Debug)]
pub struct Generation {
    /// Events, in order.
    pub events: UnboundedReceiver<Event>,
}

/// What the engine is doing.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    /// Sequences in prefill or decode.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// Steps done since the start.
    pub steps: u64,
    /// Time since the last step ended, or since the start.
    pub last_step_age: Duration,
    /// Time for which there has been work and no step has ended; zero while there is no work.
    pub stalled: Duration,
    /// Why the engine stopped, if it did.
    pub stopped: Option<String>,
    /// Context limit, tokens.
    pub context: u32,
    /// Sequences that the backend holds for requests; one outlives its request until no step works on it.
    pub sequences: usize,
    /// Bytes of state that are reserved, for requests and for the cache.
    pub state_bytes: u64,
    /// The most that these may be.
    pub state_limit: u64,
    /// Snapshots in the prefix cache.
    pub cache_snapshots: usize,
    /// Bytes of state that they hold on to.
    pub cache_bytes: u64,
    /// The most that these may be.
    pub cache_limit: u64,
}

/// What the thread and the handles both see.
struct Shared {
    started: Instant,
    /// Requests that were accepted and have not ended.
    open: AtomicUsize,
    /// Of these, the ones that have left the queue.
    running: AtomicUsize,
    steps: AtomicU64,
    /// When the last step ended, milliseconds after `started`.
    last_step: AtomicU64,
    /// When the last step ended or work began, whichever was later, milliseconds after `started`.
    progress: AtomicU64,
    abandoned: watch::Sender<bool>,
    sequences: AtomicUsize,
    state_bytes: AtomicU64,
    cache_snapshots: AtomicUsize,
    cache_bytes: AtomicU64,
    stopped: OnceLock<Stopped>,
}

/// Why no request is served any more.
#[derive(Clone, Debug)]
enum Stopped {
    Shutdown,
    Failed(String),
}

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shutdown => f.write_str("it was shut down"),
            Self::Failed(message) => f.write_str(message),
        }
    }
}

impl Engine {
    /// Starts the thread.
    pub fn start(backend: Box<dyn Backend>, tokenizer: Arc<Tokenizer>, options: Options) -> Self {
        let limits = backend.limits().clone();
        let most = limits.max_segments.min(limits.max_batch_tokens).max(1) as usize;
        let max_sequences = options.max_sequences.clamp(1, most);
        let shared = Arc::new(Shared {
            started: Instant::now(),
            open: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            steps: AtomicU64::new(0),
            last_step: AtomicU64::new(0),
            progress: AtomicU64::new(0),
            abandoned: watch::Sender::new(false),
            sequences: AtomicUsize::new(0),
            state_bytes: AtomicU64::new(0),
            cache_snapshots: AtomicUsize::new(0),
            cache_bytes: AtomicU64::new(0),
            stopped: OnceLock::new(),
        });
        let too_large = (1..=limits.context)
            .rev()
            .map(|capacity| backend.state_bytes(capacity))
            .take_while(|&bytes| bytes > limits.state_budget)
            .collect();
        let (commands, receiver) = channel();
        let max_open = max_sequences.saturating_add(options.max_queue);
        let cache_limit = options.cache_bytes;
        let close_thought = tokenizer.control_id(CLOSE_THOUGHT).map(|id| only(id, limits.vocab_size));
        let compiler = Compiler::new(Arc::clone(&tokenizer), limits.vocab_size, options.eos.clone());
        let options = Options { max_sequences, ..options };
        let worker = Worker::new(backend, tokenizer, options, Arc::clone(&shared), receiver);
        let thread = thread::Builder::new().name("lily-engine".to_owned()).spawn(|| worker.work());
        let thread = match thread {
            Ok(thread) => Some(thread),
            Err(error) => {
                let message = format!("the system refused to start the engine's thread: {error}");
                let _ = shared.stopped.set(Stopped::Failed(message));
                None
            }
        };
        let next_seed = AtomicU64::new(fastrand::u64(..));
        let masks = Masks::start();
        if let Err(error) = &masks {
            let message = format!("the system refused to start the thread for masks: {error}");
            let _ = shared.stopped.set(Stopped::Failed(message));
        }
        let inner = Inner {
            shared,
            commands,
            thread: Mutex::new(thread),
            limits,
            max_open,
            cache_limit,
            too_large,
            next_seed,
            compiler,
            masks: masks.ok(),
            close_thought,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Compiles what the reply to a request is to be held to; `None`: it is not held to anything. `format` is the
    /// request's. Takes milliseconds, and the first time a second.
    pub fn compile(
        &self,
        outline: &Outline,
        format: &OutputFormat,
    ) -> Result<Option<Constraint>, ConstraintError> {
        let after_thought = matches!(format, OutputFormat::Chat { starts_in_thought: true, .. });
        self.inner.compiler.compile(outline, after_thought)
    }

    /// Checks a request and queues it.
    pub fn submit(&self, request: Request) -> Result<Generation, SubmitError> {
        let inner = &*self.inner;
        inner.check_running()?;
        validate::check(&request, &inner.limits)?;
        if request.thinking_budget.is_some() && inner.close_thought.is_none() {
            let problem = format!("this model's tokenizer has no {CLOSE_THOUGHT} to end a thought with");
            return Err(SubmitError::InvalidParameter { parameter: "thinking_budget", problem });
        }
        let capacity = inner.capacity(&request);
        let shortfall = inner.limits.context - capacity;
        if let Some(&needed) = inner.too_large.get(shortfall as usize) {
            let budget = inner.limits.state_budget;
            return Err(SubmitError::TooLarge { tokens: capacity, needed, budget });
        }
        inner.shared.work_begins();
        let place = inner.take_place()?;
        let seed = request.sampling.seed.unwrap_or_else(|| inner.new_seed());
        let (sender, events) = unbounded_channel();
        let guide = inner.guide(&request);
        let job = Job::new(request, capacity, seed, guide, sender, place);
        // Fails when the thread has ended since the check above.
        if inner.commands.send(Command::Run(Box::new(job))).is_err() {
            inner.check_running()?;
            return Err(SubmitError::Stopped("its thread has ended".to_owned()));
        }
        Ok(Generation { events })
    }

    /// Requests that may be open at once, running and waiting.
    pub fn places(&self) -> usize {
        self.inner.max_open
    }

    /// A snapshot of the engine's counters; never blocks on the device.
    pub fn status(&self) -> Status {
        let shared = &*self.inner.shared;
        let running = shared.running.load(Ordering::Relaxed);
        let last_step = Duration::from_millis(shared.last_step.load(Ordering::Relaxed));
        Status {
            running,
            waiting: shared.open.load(Ordering::Relaxed).saturating_sub(running),
            steps: shared.steps.load(Ordering::Relaxed),
            last_step_age: shared.started.elapsed().saturating_sub(last_step),
            stalled: shared.stalled(),
            stopped: shared.stopped.get().map(Stopped::to_string),
            context: self.inner.limits.context,
            sequences: shared.sequences.load(Ordering::Relaxed),
            state_bytes: shared.state_bytes.load(Ordering::Relaxed),
            state_limit: self.inner.limits.state_budget,
            cache_snapshots: shared.cache_snapshots.load(Ordering::Relaxed),
            cache_bytes: shared.cache_bytes.load(Ordering::Relaxed),
            cache_limit: self.inner.cache_limit,
        }
    }

    /// Gives up on a device that does not come back: no request is accepted any more, and [`Engine::abandoned`]
    /// resolves. The thread is left behind with the requests that it has.
    pub fn abandon(&self, reason: String) {
        let _ = self.inner.shared.stopped.set(Stopped::Failed(reason));
        self.inner.shared.abandoned.send_replace(true);
    }

    /// Resolves when the engine is given up, with the reason: no more events will come.
    pub fn abandoned(&self) -> impl Future<Output = String> + use<> {
        let shared = Arc::clone(&self.inner.shared);
        async move {
            // The sender is in `shared`, so it can't have gone.
            let _ = shared.abandoned.subscribe().wait_for(|abandoned| *abandoned).await;
            shared.stopped.get().map_or_else(String::new, Stopped::to_string)
        }
    }

    /// Stops: queued requests fail with `Shutdown`, running ones too unless they finish before the deadline.
    /// Returns when the thread has ended, or ten seconds after the deadline if the device does not come back
    /// from its last step by then.
    pub fn shutdown(&self, deadline: Duration) {
        let inner = &*self.inner;
        let _ = inner.shared.stopped.set(Stopped::Shutdown);
        let deadline = Instant::now().checked_add(deadline);
        // An error means that the thread has ended by itself.
        let _ = inner.commands.send(Command::Shutdown(deadline));
        let mut thread = inner.thread.lock().unwrap_or_else(PoisonError::into_inner);
        let give_up = deadline.and_then(|deadline| deadline.checked_add(LAST_STEP));
        while thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if give_up.is_some_and(|give_up| Instant::now() > give_up) {
                tracing::error!(
                    "the device does not come back from its last step: the engine is left behind"
                );
                return;
            }
            thread::sleep(Duration::from_millis(2));
        }
        if let Some(thread) = thread.take() {
            // A panic was reported where it was caught.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// A step ended.
    fn step_ended(&self) {
        let now = self.now();
        self.last_step.store(now, Ordering::Relaxed);
        self.progress.store(now, Ordering::SeqCst);
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// A request is about to be accepted. Called before it counts as open, lest its wait seem to have begun at the last
    /// step.
    fn work_begins(&self) {
        if self.open.load(Ordering::SeqCst) == 0 {
            self.progress.store(self.now(), Ordering::SeqCst);
        }
    }

    fn stalled(&self) -> Duration {
        if self.open.load(Ordering::SeqCst) == 0 {
            return Duration::ZERO;
        }
        let progress = Duration::from_millis(self.progress.load(Ordering::SeqCst));
        self.started.elapsed().saturating_sub(progress)
    }

    /// Milliseconds after `started`.
    fn now(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }
}

impl Inner {
    fn check_running(&self) -> Result<(), SubmitError> {
        match self.shared.stopped.get() {
            None => Ok(()),
            Some(reason) => Err(SubmitError::Stopped(reason.to_string())),
        }
    }

    /// Tokens that a valid request may grow to.
    fn capacity(&self, request: &Request) -> u32 {
        let context = self.limits.context;
        let prompt = request.prompt.len() as u32;
        request.max_tokens.map_or(context, |max| prompt.saturating_add(max).min(context))
    }

    /// What guides the reply to a valid request, if anything does.
    fn guide(&self, request: &Request) -> Option<Guide> {
        let budget = request.thinking_budget.zip(self.close_thought.clone());
        if budget.is_none() && request.constraint.is_none() {
            return None;
        }
        Some(Guide::new(request.constraint.clone(), budget, self.masks.clone()?))
    }

    fn take_place(&self) -> Result<Place, SubmitError> {
        let open = &self.shared.open;
        let more = |n: usize| (n < self.max_open).then_some(n + 1);
        match open.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more) {
            Ok(_) => Ok(Place::new(Arc::clone(&self.shared))),
            Err(n) => {
                let running = self.shared.running.load(Ordering::Relaxed);
                Err(SubmitError::QueueFull { waiting: n.saturating_sub(running) })
            }
        }
    }

    /// An odd step visits all 64-bit numbers before one comes again.
    fn new_seed(&self) -> u64 {
        self.next_seed.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed)
    }
}

/// The mask that allows one token.
fn only(id: u32, vocab_size: u32) -> Arc<[u32]> {
    let mut mask = vec![0; vocab_size.div_ceil(32) as usize];
    if let Some(word) = mask.get_mut(id as usize / 32) {
        *word = 1 << (id % 32);
    }
    mask.into()
}

#[cfg(test)]
mod tests;
