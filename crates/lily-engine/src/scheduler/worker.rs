//! The engine's thread.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use lily_model::backend::{Backend, BackendError, Batch, Output, SegmentError, SeqId, Ticket};
use lily_model::tokenizer::Tokenizer;

use super::job::Job;
use super::sequence::{Advance, Sequence};
use super::{Options, Shared, Stopped};
use crate::cache::Cache;
use crate::request::RequestError;

/// How long a step waits for the masks of some sequences while others could go on.
const MASK_PATIENCE: Duration = Duration::from_millis(2);

/// What the handles ask of the thread.
pub(super) enum Command {
    Run(Box<Job>),
    /// End when all running requests have, or at this time.
    Shutdown(Option<Instant>),
}

/// State of the thread. The backend comes last, so that it is dropped after all requests have ended.
pub(super) struct Worker {
    commands: Receiver<Command>,
    queue: VecDeque<Box<Job>>,
    sequences: Vec<Sequence>,
    in_flight: VecDeque<Step>,
    cache: Cache,
    closing: bool,
    deadline: Option<Instant>,
    options: Options,
    tokenizer: Arc<Tokenizer>,
    shared: Arc<Shared>,
    backend: Box<dyn Backend>,
}

/// A step that was enqueued.
struct Step {
    ticket: Ticket,
    segments: Vec<Advance>,
}

impl Worker {
    pub fn new(
        backend: Box<dyn Backend>,
        tokenizer: Arc<Tokenizer>,
        options: Options,
        shared: Arc<Shared>,
        commands: Receiver<Command>,
    ) -> Self {
        Self {
            commands,
            queue: VecDeque::new(),
            sequences: Vec::new(),
            in_flight: VecDeque::new(),
            cache: Cache::new(options.cache_bytes),
            closing: false,
            deadline: None,
            options,
            tokenizer,
            shared,
            backend,
        }
    }

    /// The thread, from start to end. Requests left over fail with the reason when `self` is dropped.
    pub fn work(mut self) {
        let reason = match catch_unwind(AssertUnwindSafe(|| self.run())) {
            Ok(Ok(())) => Stopped::Shutdown,
            Ok(Err(error)) => Stopped::Failed(error.to_string()),
            Err(panic) => Stopped::Failed(format!("the engine panicked: {}", message(&*panic))),
        };
        if let Stopped::Failed(message) = &reason {
            tracing::error!(message, "the engine has stopped");
        }
        let _ = self.shared.stopped.set(reason);
    }

    fn run(&mut self) -> Result<(), BackendError> {
        let mut result = self.run_steps();
        // On every way out but a panic the backend gets back all it gave.
        for sequence in std::mem::take(&mut self.sequences) {
            result = result.and(self.free(&sequence));
            self.queue.extend(sequence.job);
        }
        result.and(self.cache.clear(&mut *self.backend))
    }

    fn run_steps(&mut self) -> Result<(), BackendError> {
        let depth = self.backend.steps_in_flight().max(1);
        while self.receive() {
            self.drop_cancelled();
            self.release()?;
            self.admit()?;
            self.report_memory();
            self.wait_for_masks();
            let submitted = self.submit()?;
            if (!submitted || self.in_flight.len() >= depth)
                && let Some(step) = self.in_flight.pop_front()
            {
                self.complete(step)?;
            }
        }
        while let Some(step) = self.in_flight.pop_front() {
            self.backend.wait(step.ticket)?;
        }
        Ok(())
    }

    /// Takes what has arrived, waiting for it if there is nothing else to do. Gives whether to go on.
    fn receive(&mut self) -> bool {
        loop {
            let idle = self.queue.is_empty() && self.sequences.is_empty();
            if self.closing && (idle || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)) {
                return false;
            }
            let command = if idle {
                self.commands.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                self.commands.try_recv()
            };
            match command {
                // Dropped, it fails with `Shutdown`.
                Ok(Command::Run(_)) if self.closing => {}
                Ok(Command::Run(job)) => self.queue.push_back(job),
                Ok(Command::Shutdown(deadline)) => {
                    self.closing = true;
                    self.deadline = deadline;
                    self.queue.clear();
                }
                Err(TryRecvError::Disconnected) if idle => return false,
                Err(_) => return true,
            }
        }
    }

    /// Ends requests that nobody waits for.
    fn drop_cancelled(&mut self) {
        self.queue.retain(|job| !job.is_cancelled());
        for sequence in &mut self.sequences {
            sequence.job.take_if(|job| job.is_cancelled());
        }
    }

    /// Frees sequences whose requests have ended. What they have read stays in the cache, however they ended:
    /// a client that left may come back with the same prompt.
    fn release(&mut self) -> Result<(), BackendError> {
        while let Some(i) = self.sequences.iter().position(|s| s.is_over() && s.in_flight == 0) {
            self.keep(i)?;
            let sequence = self.sequences.remove(i);
            self.free(&sequence)?;
            self.cache.shrink(&mut *self.backend, &[], reserved(&self.sequences))?;
        }
        Ok(())
    }

    /// Adds the state that a sequence ends with to the cache.
    fn keep(&mut self, i: usize) -> Result<(), BackendError> {
        let (sequence, running) = (&self.sequences[i], reserved(&self.sequences));
        if !sequence.is_cached || sequence.broken {
            return Ok(());
        }
        let tokens = sequence.first(sequence.fed);
        // The next turn's prompt starts with this one's, but not always with the reply to it: templates leave
        // out old thoughts. So the prompt's snapshot does not go for that of the reply.
        let spare = &tokens[..self.cache.reach(sequence.prompt_fed())];
        let backend = &mut *self.backend;
        match self.cache.snapshot(backend, sequence.seq, tokens, spare, running)? {
            Some(snapshot) => self.cache.insert(backend, tokens, snapshot),
            None => Ok(()),
        }
    }

    fn free(&mut self, sequence: &Sequence) -> Result<(), BackendError> {
        let pending = sequence.pending.iter().try_for_each(|(_, snapshot)| self.backend.forget(*snapshot));
        pending.and(self.backend.free(sequence.seq))
    }

    /// Starts the next request, if there is room. One prompt is read at a time, so a request starts when the
    /// one before it decodes: earlier, it would only hold memory, and find less in the cache. For the same reason
    /// it waits for a sequence that a last step still works on: it may be the next turn of that conversation.
    fn admit(&mut self) -> Result<(), BackendError> {
        while self.sequences.len() < self.options.max_sequences
            && !self.sequences.iter().any(|s| s.is_reading() || s.is_over())
            && let Some(mut job) = self.queue.pop_front()
        {
            match self.open(&job) {
                Ok((seq, cached)) => {
                    job.start(cached);
                    let reserved = self.backend.state_bytes(job.capacity);
                    let interval = self.cache.is_on().then_some(self.options.snapshot_interval);
                    self.sequences.push(Sequence::new(seq, job, cached, reserved, interval));
                }
                Err(BackendError::OutOfMemory { .. }) if !self.sequences.is_empty() => {
                    self.queue.push_front(job);
                    return Ok(());
                }
                // It would wait for ever.
                Err(error @ BackendError::OutOfMemory { .. }) => {
                    job.fail(RequestError::Device(error.to_string()));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reserves a sequence for a request, which may cost snapshots; gives how much of the prompt it holds
    /// already.
    fn open(&mut self, job: &Job) -> Result<(SeqId, u32), BackendError> {
        let (capacity, needed) = (job.capacity, self.backend.state_bytes(job.capacity));
        let budget = self.backend.limits().state_budget;
        let available = budget.saturating_sub(reserved(&self.sequences));
        // Known beforehand, lest the cache be emptied for a request that does not start after all.
        if needed > available {
            return Err(BackendError::OutOfMemory { capacity, needed, available });
        }
        self.cache.open(&mut *self.backend, job.reusable(), capacity)
    }

    fn report_memory(&self) {
        let bytes = self.backend.limits().state_budget.saturating_sub(self.backend.free_bytes());
        self.shared.state_bytes.store(bytes, Ordering::Relaxed);
        self.shared.sequences.store(self.sequences.len(), Ordering::Relaxed);
        let bytes = Cache::bytes(&*self.backend, reserved(&self.sequences));
        self.shared.cache_bytes.store(bytes, Ordering::Relaxed);
        self.shared.cache_snapshots.store(self.cache.len(), Ordering::Relaxed);
    }

    /// Waits for the masks of tokens that are due: shortly if there is other work, else until one is there.
    fn wait_for_masks(&mut self) {
        let deadline = Instant::now() + MASK_PATIENCE;
        let is_ready = |s: &Sequence| s.job.as_ref().is_some_and(|job| job.is_ready());
        let mut others = !self.in_flight.is_empty()
            || self.sequences.iter().any(|s| is_ready(s) && (s.is_due() || s.is_reading()));
        for sequence in self.sequences.iter_mut().filter(|s| s.is_due() || s.is_reading()) {
            let Some(job) = &mut sequence.job else { continue };
            match job.wait(others.then_some(deadline)) {
                Ok(ready) => others |= ready,
                Err(error) => {
                    if let Some(job) = sequence.job.take() {
                        job.fail(error);
                    }
                }
            }
        }
    }

    /// Enqueues the next step; gives whether there was anything to do.
    fn submit(&mut self) -> Result<bool, BackendError> {
        let decoding = self.sequences.iter_mut().filter_map(Sequence::decode);
        let (mut batch, mut segments) = (Batch::default(), Vec::new());
        for (segment, advance) in decoding {
            batch.segments.push(segment);
            segments.push(advance);
        }
        // Places are bounded by the tokens of a batch: one is left for the prompt.
        let left = self.backend.limits().max_batch_tokens.saturating_sub(batch.segments.len() as u32);
        let Options { prefill_chunk, shared_prefill_chunk, .. } = self.options;
        let chunk = if segments.is_empty() { prefill_chunk } else { shared_prefill_chunk };
        let chunk = chunk.min(left).max(1);
        let prefill = self.sequences.iter_mut().enumerate().find_map(|(i, s)| Some((i, s.prefill(chunk)?)));
        let mut reader = None;
        if let Some((i, (segment, advance))) = prefill {
            batch.segments.push(segment);
            segments.push(advance);
            reader = Some(i);
        }
        if segments.is_empty() {
            return Ok(false);
        }
        let ticket = self.backend.forward(&batch)?;
        self.in_flight.push_back(Step { ticket, segments });
        reader.map_or(Ok(()), |i| self.snapshot_prompt(i))?;
        Ok(true)
    }

    /// Takes a snapshot of a sequence whose chunk was just enqueued, if it has come to a place for one.
    fn snapshot_prompt(&mut self, i: usize) -> Result<(), BackendError> {
        let running = reserved(&self.sequences);
        let sequence = &mut self.sequences[i];
        if !sequence.is_at_stop() {
            return Ok(());
        }
        let (seq, tokens) = (sequence.seq, sequence.first(sequence.fed));
        if let Some(snapshot) = self.cache.snapshot(&mut *self.backend, seq, tokens, &[], running)? {
            sequence.pending.push_back((sequence.fed, snapshot));
        }
        Ok(())
    }

    /// Waits for a step and hands out its results.
    fn complete(&mut self, step: Step) -> Result<(), BackendError> {
        let results = self.backend.wait(step.ticket)?;
        self.shared.step_ended();
        if results.len() != step.segments.len() {
            let (got, expected) = (results.len(), step.segments.len());
            return Err(BackendError::Device(format!("{got} results for {expected} segments")));
        }
        for (advance, result) in step.segments.into_iter().zip(results) {
            self.deliver(&advance, result)?;
        }
        Ok(())
    }

    fn deliver(
        &mut self,
        advance: &Advance,
        result: Result<Output, SegmentError>,
    ) -> Result<(), BackendError> {
        let Some(i) = self.sequences.iter().position(|s| s.seq == advance.seq) else { return Ok(()) };
        self.sequences[i].in_flight -= 1;
        let output = match result {
            Ok(output) => output,
            Err(error) => return self.fail(i, error),
        };
        if let Some(done) = advance.prefilled {
            self.insert_pending(i, done)?;
        }
        let vocab = self.backend.limits().vocab_size as usize;
        let sequence = &mut self.sequences[i];
        if let (Output::Logits(logits), Some(done)) = (&output, advance.prefilled) {
            sequence.score(logits, vocab, done);
        }
        if let Some(done) = advance.prefilled {
            sequence.job.take_if(|job| job.prefilled(done));
        }
        match output {
            Output::Sampled(sampled) if advance.samples => {
                sequence.push(sampled.token);
                sequence.job.take_if(|job| job.token(sampled, &self.tokenizer, &self.options.eos));
                Ok(())
            }
            Output::Logits(logits) if advance.rows > 0 && logits.len() == advance.rows as usize * vocab => {
                Ok(())
            }
            Output::Nothing if !advance.samples && advance.rows == 0 => Ok(()),
            _ => Err(BackendError::Device("a result of another kind than was asked for".to_owned())),
        }
    }

    /// Ends a request whose state is broken. Where it broke is not known, only where it showed.
    fn fail(&mut self, i: usize, error: SegmentError) -> Result<(), BackendError> {
        let sequence = &mut self.sequences[i];
        sequence.broken = true;
        if let Some(job) = sequence.job.take() {
            tracing::error!(%error, "a request failed");
            job.fail(error.into());
        }
        if !sequence.is_cached {
            return Ok(());
        }
        self.cache.distrust(&mut *self.backend, sequence.tokens())
    }

    /// The step that read the prompt up to here went well: so its snapshot is sound.
    fn insert_pending(&mut self, i: usize, position: u32) -> Result<(), BackendError> {
        let sequence = &mut self.sequences[i];
        match sequence.pending.pop_front_if(|(at, _)| *at == position && !sequence.broken) {
            Some((_, snapshot)) => self.cache.insert(&mut *self.backend, sequence.first(position), snapshot),
            None => Ok(()),
        }
    }
}

/// Bytes of state that are reserved for sequences.
fn reserved(sequences: &[Sequence]) -> u64 {
    sequences.iter().map(|sequence| sequence.reserved).sum()
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
