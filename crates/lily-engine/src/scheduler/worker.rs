//! The engine's thread.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use lily_model::backend::{
    Backend, BackendError, Batch, Output, Segment, SegmentError, SeqId, Ticket, Tokens, Want,
};
use lily_model::tokenizer::Tokenizer;

use super::job::Job;
use super::{Options, Shared, Stopped};
use crate::request::RequestError;

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
    closing: bool,
    deadline: Option<Instant>,
    options: Options,
    tokenizer: Arc<Tokenizer>,
    shared: Arc<Shared>,
    backend: Box<dyn Backend>,
}

/// A request that runs.
struct Sequence {
    seq: SeqId,
    /// `None` when the request has ended; then the sequence is freed as soon as no step works on it.
    job: Option<Box<Job>>,
    /// Tokens fed, over all steps that were enqueued.
    fed: u32,
    /// Tokens sampled, likewise.
    sampled: u32,
    /// Enqueued steps that work on it.
    in_flight: usize,
}

/// A step that was enqueued.
struct Step {
    ticket: Ticket,
    segments: Vec<Advance>,
}

/// What a segment of a step does for its sequence.
struct Advance {
    seq: SeqId,
    /// Tokens of the prompt read after it, if it reads any.
    prefilled: Option<u32>,
    samples: bool,
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
        for sequence in self.sequences.drain(..) {
            result = result.and(self.backend.free(sequence.seq));
            self.queue.extend(sequence.job);
        }
        result
    }

    fn run_steps(&mut self) -> Result<(), BackendError> {
        let depth = self.backend.steps_in_flight().max(1);
        while self.receive() {
            self.drop_cancelled();
            self.release()?;
            self.admit()?;
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

    /// Frees sequences whose requests have ended.
    fn release(&mut self) -> Result<(), BackendError> {
        let over = |sequence: &mut Sequence| sequence.job.is_none() && sequence.in_flight == 0;
        self.sequences.extract_if(.., over).try_for_each(|sequence| self.backend.free(sequence.seq))
    }

    /// Starts the next request, if there is room. One prompt is read at a time, so a request starts when the
    /// one before it decodes: earlier, it would only hold memory.
    fn admit(&mut self) -> Result<(), BackendError> {
        while self.sequences.len() < self.options.max_sequences
            && !self.sequences.iter().any(Sequence::is_reading)
            && let Some(mut job) = self.queue.pop_front()
        {
            match self.backend.create(job.capacity) {
                Ok(seq) => {
                    job.start();
                    let job = Some(job);
                    self.sequences.push(Sequence { seq, job, fed: 0, sampled: 0, in_flight: 0 });
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
        let chunk = self.options.prefill_chunk.min(left).max(1);
        if let Some((segment, advance)) = self.sequences.iter_mut().find_map(|s| s.prefill(chunk)) {
            batch.segments.push(segment);
            segments.push(advance);
        }
        if segments.is_empty() {
            return Ok(false);
        }
        let ticket = self.backend.forward(&batch)?;
        self.in_flight.push_back(Step { ticket, segments });
        Ok(true)
    }

    /// Waits for a step and hands out its results.
    fn complete(&mut self, step: Step) -> Result<(), BackendError> {
        let results = self.backend.wait(step.ticket)?;
        let elapsed = self.shared.started.elapsed().as_millis() as u64;
        self.shared.last_step.store(elapsed, Ordering::Relaxed);
        self.shared.steps.fetch_add(1, Ordering::Relaxed);
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
        let Some(sequence) = self.sequences.iter_mut().find(|s| s.seq == advance.seq) else { return Ok(()) };
        sequence.in_flight -= 1;
        let Some(job) = &mut sequence.job else { return Ok(()) };
        let output = match result {
            Ok(output) => output,
            Err(error) => {
                if let Some(job) = sequence.job.take() {
                    tracing::error!(%error, "a request failed");
                    job.fail(error.into());
                }
                return Ok(());
            }
        };
        if let Some(done) = advance.prefilled {
            job.prefilled(done);
        }
        match output {
            Output::Sampled(sampled) if advance.samples => {
                if job.token(sampled, &self.tokenizer, &self.options.eos) {
                    sequence.job = None;
                }
                Ok(())
            }
            Output::Nothing if !advance.samples => Ok(()),
            _ => Err(BackendError::Device("a result of another kind than was asked for".to_owned())),
        }
    }
}

impl Sequence {
    /// Whether a part of the prompt is still to be fed.
    fn is_reading(&self) -> bool {
        self.job.as_ref().is_some_and(|job| (self.fed as usize) < job.prompt.len())
    }

    /// The next token, if one is due.
    fn decode(&mut self) -> Option<(Segment, Advance)> {
        let job = self.job.as_ref()?;
        if self.is_reading() || self.sampled >= job.max_tokens() {
            return None;
        }
        let want = Want::Sample(Arc::clone(&job.params));
        Some(self.advance(1, Tokens::LastSampled, want, None))
    }

    /// The next chunk of the prompt, of so many tokens at most, if there is one.
    fn prefill(&mut self, chunk: u32) -> Option<(Segment, Advance)> {
        let job = self.job.as_ref()?;
        let rest = job.prompt.get(self.fed as usize..).filter(|rest| !rest.is_empty())?;
        let tokens = rest[..rest.len().min(chunk as usize)].to_vec();
        let count = tokens.len() as u32;
        let is_last = tokens.len() == rest.len();
        let want = if is_last { Want::Sample(Arc::clone(&job.params)) } else { Want::Nothing };
        Some(self.advance(count, Tokens::Ids(tokens), want, Some(self.fed + count)))
    }

    fn advance(
        &mut self,
        count: u32,
        tokens: Tokens,
        want: Want,
        prefilled: Option<u32>,
    ) -> (Segment, Advance) {
        let samples = matches!(want, Want::Sample(_));
        let segment = Segment { seq: self.seq, start: self.fed, tokens, want };
        self.fed += count;
        self.sampled += u32::from(samples);
        self.in_flight += 1;
        (segment, Advance { seq: self.seq, prefilled, samples })
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
