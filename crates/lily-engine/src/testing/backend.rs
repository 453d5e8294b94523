//! A backend without a model. It keeps the contract of [`Backend`] and refuses calls that break it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use lily_model::backend::{
    Backend, BackendError, Batch, Limits, Output, Progress, Rows, Segment, SegmentError, SeqId, SnapshotId,
    StepOutput, Ticket, Tokens, Want,
};
use lily_model::sample::{Logprobs, Sampled, sample};

use super::text::END_OF_TURN;

/// What happens when a token of a scripted reply is due.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// It is this one.
    Token(u32),
    /// The device takes this long over the step; then the next act follows.
    Pause(Duration),
    /// The model computes a value that is not finite.
    NonFinite,
    /// The device fails.
    Fail(String),
    /// The backend panics.
    Panic(String),
}

/// The tokens of a text (see [`tokens`](super::tokens)) as acts. A script that ends is followed by
/// [`END_OF_TURN`]. Tokens that a mask forbids are passed over; when none is left, the first allowed one comes.
pub fn say(text: &str) -> Vec<Act> {
    super::tokens(text).into_iter().map(Act::Token).collect()
}

/// What a backend was made to do.
#[derive(Clone, Debug, Default)]
pub struct Audit {
    /// Sequences that were created, with their capacities.
    pub created: Vec<(SeqId, u32)>,
    /// Of these, the ones that began at a snapshot, with its position.
    pub resumed: Vec<(SeqId, u32)>,
    /// Sequences that were freed.
    pub freed: Vec<SeqId>,
    /// Positions of the snapshots that were taken.
    pub snapshots: Vec<u32>,
    /// Bytes of state that are reserved.
    pub held: u64,
    /// The segments of every step: sequence, number of tokens, whether a token was sampled.
    pub steps: Vec<Vec<(SeqId, u32, bool)>>,
    /// The seeds that tokens were sampled with.
    pub seeds: HashSet<u64>,
}

type Script = Box<dyn FnMut(&[u32]) -> Vec<Act> + Send>;

/// A backend that replays scripts, or samples from made-up logits. Both see all tokens of a sequence, wherever
/// it was resumed.
pub struct FakeBackend {
    limits: Limits,
    /// `None`: samples.
    script: Option<Script>,
    step_time: Duration,
    steps_in_flight: usize,
    /// Bytes of a sequence's or a snapshot's recurrent state.
    recurrent_bytes: u64,
    /// Sequences and snapshots that there are places for, however many bytes are free.
    slots: usize,
    /// Whether K/V that several sequences and snapshots hold is charged once.
    charges_once: bool,
    /// A sequence that reads this token is broken from there on.
    poison: Option<u32>,
    sequences: HashMap<SeqId, Sequence>,
    snapshots: HashMap<SnapshotId, Sequence>,
    ids: u64,
    pending: VecDeque<Step>,
    audit: Arc<Mutex<Audit>>,
}

/// A sequence, or a frozen copy of one.
#[derive(Clone, Debug, Default)]
struct Sequence {
    capacity: u32,
    tokens: Vec<u32>,
    /// The K/V of each token: two sequences share it where they have the same number.
    cells: Vec<u64>,
    acts: Option<VecDeque<Act>>,
    last: Option<u32>,
    lost: Option<SegmentError>,
}

/// A step that was enqueued.
#[derive(Debug, Default)]
struct Step {
    ticket: u64,
    output: StepOutput,
    pause: Duration,
    failure: Option<String>,
    panic: Option<String>,
}

impl FakeBackend {
    /// A backend whose reply to a prompt is what `script` says.
    pub fn scripted(limits: Limits, script: impl FnMut(&[u32]) -> Vec<Act> + Send + 'static) -> Self {
        Self { script: Some(Box::new(script)), ..Self::sampling(limits) }
    }

    /// A backend that samples with a request's parameters; the logits are a hash of the tokens so far.
    pub fn sampling(limits: Limits) -> Self {
        Self {
            limits,
            script: None,
            step_time: Duration::ZERO,
            steps_in_flight: 1,
            recurrent_bytes: 0,
            slots: usize::MAX,
            charges_once: false,
            poison: None,
            sequences: HashMap::new(),
            snapshots: HashMap::new(),
            ids: 0,
            pending: VecDeque::new(),
            audit: Arc::default(),
        }
    }

    /// Every step takes this long.
    pub fn with_step_time(self, step_time: Duration) -> Self {
        Self { step_time, ..self }
    }

    /// So many steps may be enqueued before one is waited for.
    pub fn with_steps_in_flight(self, steps_in_flight: usize) -> Self {
        Self { steps_in_flight, ..self }
    }

    /// A sequence's and a snapshot's recurrent state takes so many bytes.
    pub fn with_recurrent_bytes(self, recurrent_bytes: u64) -> Self {
        Self { recurrent_bytes, ..self }
    }

    /// There are places for so many sequences and snapshots, however many bytes are free.
    pub fn with_slots(self, slots: usize) -> Self {
        Self { slots, ..self }
    }

    /// K/V that several sequences and snapshots hold is charged once. Otherwise each is charged as if it shared
    /// nothing.
    pub fn charging_shared_state_once(self) -> Self {
        Self { charges_once: true, ..self }
    }

    /// Reading this token makes the state of a sequence not finite.
    pub fn with_poison(self, token: u32) -> Self {
        Self { poison: Some(token), ..self }
    }

    /// What the backend is made to do, while it does it.
    pub fn audit(&self) -> Arc<Mutex<Audit>> {
        Arc::clone(&self.audit)
    }

    fn log(&self) -> MutexGuard<'_, Audit> {
        self.audit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are reserved.
    fn held(&self) -> u64 {
        let all = || self.sequences.values().chain(self.snapshots.values());
        if !self.charges_once {
            return all().map(|sequence| self.state_bytes(sequence.capacity)).sum();
        }
        let recurrent = all().count() as u64 * self.recurrent_bytes;
        let written: HashSet<u64> = all().flat_map(|sequence| &sequence.cells).copied().collect();
        let unwritten: u64 = all().map(|sequence| sequence.unwritten()).sum();
        recurrent + written.len() as u64 + unwritten
    }

    /// Whether there is room for one more sequence or snapshot.
    fn check_room(&self, sequence: &Sequence) -> Result<(), BackendError> {
        let shared = if self.charges_once { sequence.tokens.len() as u64 } else { 0 };
        let is_full = self.sequences.len() + self.snapshots.len() >= self.slots;
        let (capacity, available) = (sequence.capacity, if is_full { 0 } else { self.free_bytes() });
        let needed = self.state_bytes(capacity) - shared;
        if is_full || needed > available {
            return Err(BackendError::OutOfMemory { capacity, needed, available });
        }
        Ok(())
    }

    /// Takes in a sequence that there is room for.
    fn add(&mut self, sequence: Sequence) -> SeqId {
        let (seq, capacity) = (SeqId(self.ids), sequence.capacity);
        self.ids += 1;
        self.sequences.insert(seq, sequence);
        let held = self.held();
        let mut log = self.log();
        log.created.push((seq, capacity));
        log.held = held;
        seq
    }

    fn check(&self, batch: &Batch) -> Result<(), BackendError> {
        let invalid = |what: &str| Err(BackendError::InvalidBatch(what.to_owned()));
        if batch.segments.is_empty() {
            return invalid("no segments");
        }
        if self.pending.len() >= self.steps_in_flight {
            return invalid("too many steps in flight");
        }
        batch.check(&self.limits, |seq| {
            let s = self.sequences.get(&seq)?;
            let sampled = s.last.is_some() || s.lost.is_some();
            Some(Progress { len: s.tokens.len(), capacity: s.capacity as usize, sampled })
        })
    }

    /// Runs one segment; `step` takes what happens to the step as a whole.
    fn advance(&mut self, segment: &Segment, step: &mut Step) -> Result<Output, SegmentError> {
        let Some(sequence) = self.sequences.get_mut(&segment.seq) else { return Ok(Output::Nothing) };
        match &segment.tokens {
            Tokens::Ids(ids) => sequence.tokens.extend_from_slice(ids),
            Tokens::LastSampled => sequence.tokens.push(sequence.last.take().unwrap_or_default()),
        }
        let written = sequence.tokens.len() - sequence.cells.len();
        sequence.cells.extend(self.ids..self.ids + written as u64);
        self.ids += written as u64;
        let poisoned = sequence.tokens.iter().position(|token| self.poison == Some(*token));
        if let (None, Some(position)) = (&sequence.lost, poisoned) {
            sequence.lost = Some(SegmentError::NonFinite { position: position as u32 });
        }
        if let Some(lost) = &sequence.lost {
            return Err(lost.clone());
        }
        let params = match &segment.want {
            Want::Sample(params) => params,
            Want::Nothing => return Ok(Output::Nothing),
            Want::Logits(rows) => {
                let (all, vocab) = (&sequence.tokens, self.limits.vocab_size);
                let rows = if *rows == Rows::All { written } else { 1 };
                let ends = all.len() + 1 - rows..=all.len();
                return Ok(Output::Logits(ends.flat_map(|end| logits(&all[..end], vocab)).collect()));
            }
        };
        let sampled = match &mut self.script {
            None => {
                let mut logits = logits(&sequence.tokens, self.limits.vocab_size);
                sample(&mut logits, &sequence.tokens, params)
            }
            Some(script) => {
                let acts = sequence.acts.get_or_insert_with(|| script(&sequence.tokens).into());
                let allowed = |token: u32| params.allows(token);
                let token = loop {
                    match acts.pop_front() {
                        None if allowed(END_OF_TURN) => break END_OF_TURN,
                        None => {
                            break (0..self.limits.vocab_size)
                                .find(|&token| allowed(token))
                                .unwrap_or_default();
                        }
                        Some(Act::Token(token)) if allowed(token) => break token,
                        Some(Act::Token(_)) => {}
                        Some(Act::Pause(time)) => step.pause += time,
                        Some(Act::Fail(message)) => step.failure = Some(message),
                        Some(Act::Panic(message)) => step.panic = Some(message),
                        Some(Act::NonFinite) => {
                            let position = sequence.tokens.len() as u32 - 1;
                            let lost = SegmentError::NonFinite { position };
                            sequence.lost = Some(lost.clone());
                            return Err(lost);
                        }
                    }
                };
                let logprobs = params.logprobs.map(|n| Logprobs {
                    token: -0.5,
                    top: (0..n).map(|i| (token + i, -0.5 - i as f32)).collect(),
                });
                Sampled { token, logprobs }
            }
        };
        sequence.last = Some(sampled.token);
        Ok(Output::Sampled(sampled))
    }
}

impl Sequence {
    /// Tokens that there is room for.
    fn unwritten(&self) -> u64 {
        u64::from(self.capacity) - self.tokens.len() as u64
    }
}

/// Logits that depend on all tokens and nothing else.
fn logits(tokens: &[u32], vocab_size: u32) -> Vec<f32> {
    let mix = |hash: u64, value: u32| {
        let hash = (hash ^ u64::from(value)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        hash ^ (hash >> 29)
    };
    let context = tokens.iter().fold(0, |hash, &token| mix(hash, token));
    (0..vocab_size).map(|token| (mix(mix(context, token), 1) % 1000) as f32 / 100.0).collect()
}

fn unknown(seq: SeqId) -> BackendError {
    BackendError::Unknown { kind: "sequence", id: seq.0 }
}

fn unknown_snapshot(snapshot: SnapshotId) -> BackendError {
    BackendError::Unknown { kind: "snapshot", id: snapshot.0 }
}

impl Backend for FakeBackend {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn create(&mut self, capacity: u32) -> Result<SeqId, BackendError> {
        let sequence = Sequence { capacity, ..Sequence::default() };
        self.check_room(&sequence)?;
        Ok(self.add(sequence))
    }

    fn resume(&mut self, snapshot: SnapshotId, capacity: u32) -> Result<SeqId, BackendError> {
        let frozen = self.snapshots.get(&snapshot).ok_or_else(|| unknown_snapshot(snapshot))?;
        let position = frozen.tokens.len() as u32;
        let sequence = Sequence { capacity: capacity.max(position), ..frozen.clone() };
        self.check_room(&sequence)?;
        let seq = self.add(sequence);
        self.log().resumed.push((seq, position));
        Ok(seq)
    }

    fn free(&mut self, seq: SeqId) -> Result<(), BackendError> {
        self.sequences.remove(&seq).ok_or_else(|| unknown(seq))?;
        let held = self.held();
        let mut log = self.log();
        log.freed.push(seq);
        log.held = held;
        Ok(())
    }

    fn snapshot(&mut self, seq: SeqId) -> Result<SnapshotId, BackendError> {
        let sequence = self.sequences.get(&seq).ok_or_else(|| unknown(seq))?;
        // What is still to be said is the sequence's own.
        let (acts, last, capacity) = (None, None, sequence.tokens.len() as u32);
        let frozen = Sequence { capacity, acts, last, ..sequence.clone() };
        self.check_room(&frozen)?;
        let id = SnapshotId(self.ids);
        self.ids += 1;
        self.snapshots.insert(id, frozen);
        let held = self.held();
        let mut log = self.log();
        log.snapshots.push(capacity);
        log.held = held;
        drop(log);
        Ok(id)
    }

    fn forget(&mut self, snapshot: SnapshotId) -> Result<(), BackendError> {
        self.snapshots.remove(&snapshot).ok_or_else(|| unknown_snapshot(snapshot))?;
        self.log().held = self.held();
        Ok(())
    }

    fn export(&self, snapshot: SnapshotId) -> Result<Vec<u8>, BackendError> {
        Err(unknown_snapshot(snapshot))
    }

    fn import(&mut self, _bytes: &[u8]) -> Result<SnapshotId, BackendError> {
        Err(BackendError::InvalidSnapshot("the fake backend reads none".to_owned()))
    }

    /// One byte for each token, and the recurrent state.
    fn state_bytes(&self, capacity: u32) -> u64 {
        self.recurrent_bytes + u64::from(capacity)
    }

    fn free_bytes(&self) -> u64 {
        self.limits.state_budget - self.held()
    }

    fn steps_in_flight(&self) -> usize {
        self.steps_in_flight
    }

    fn forward(&mut self, batch: &Batch) -> Result<Ticket, BackendError> {
        self.check(batch)?;
        let mut step = Step { ticket: self.ids, pause: self.step_time, ..Step::default() };
        self.ids += 1;
        let mut record = Vec::new();
        for segment in &batch.segments {
            let count = segment.tokens.count() as u32;
            let params = if let Want::Sample(params) = &segment.want { Some(params) } else { None };
            self.log().seeds.extend(params.map(|params| params.seed));
            record.push((segment.seq, count, params.is_some()));
            let output = self.advance(segment, &mut step);
            step.output.push(output);
        }
        self.log().steps.push(record);
        let ticket = Ticket(step.ticket);
        self.pending.push_back(step);
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput, BackendError> {
        if self.pending.front().is_none_or(|step| step.ticket != ticket.0) {
            return Err(BackendError::Unknown { kind: "ticket", id: ticket.0 });
        }
        let step = self.pending.pop_front().unwrap_or_default();
        thread::sleep(step.pause);
        if let Some(message) = step.panic {
            panic!("{message}");
        }
        match step.failure {
            Some(message) => Err(BackendError::Device(message)),
            None => Ok(step.output),
        }
    }
}
