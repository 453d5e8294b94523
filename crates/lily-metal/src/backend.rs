//! [`Backend`] on a [`Device`]: `forward` hands over a step and returns, `wait` waits for its end.
//!
//! A step leaves the tokens that it draws where the next one reads them, so that one does not wait for the other.

mod results;

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use lily_model::backend::{
    Backend, BackendError, Batch, Limits, Progress, Rows, Segment, SeqId, SnapshotId, StepOutput, Ticket,
    Tokens, Want,
};
use lily_model::config::Config;
use lily_model::pool::{Lease, PAGE};
use lily_model::sample::SampleParams;
use lily_model::states::States;
use lily_model::weights::Weights;

use crate::device::{Device, DeviceError, Place, Submission};
use crate::draw::Draw;
use crate::load::{self, Flight, IN_FLIGHT, Loaded, MAX_SEGMENTS};
use crate::plan::Features;
use crate::program::{Bound, Run};
use crate::steps::Shape;
use crate::{LoadError, Options, export, plan};

/// Rows of logits that a step keeps at once.
const LOGIT_ROWS: usize = MAX_SEGMENTS;

/// The token that a sequence sampled last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Last {
    /// None: its last step sampled nothing.
    Nothing,
    /// This one.
    Known(u32),
    /// One that is not waited for yet; the device has it there.
    Pending(Place),
}

/// A sequence or a snapshot.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    /// Its slot and its pages.
    pub lease: Lease,
    /// Tokens fed so far.
    pub len: usize,
    /// Most tokens.
    pub capacity: usize,
    /// All tokens fed, but for the one that is owed.
    pub tokens: Vec<u32>,
    /// Where the device had a token that was fed before the host knew it.
    pub owed: Option<Place>,
    /// The token that was sampled last.
    pub last: Last,
}

/// A step that was handed over.
struct Pending {
    ticket: u64,
    flight: usize,
    step: Enqueued,
    /// Once it was waited for.
    outputs: Option<StepOutput>,
}

/// What was handed over of a step.
#[derive(Default)]
struct Enqueued {
    asked: Vec<Asked>,
    /// What is to be waited for.
    submissions: Vec<Submission>,
    /// Why the rest of it could not be handed over.
    failed: Option<String>,
}

/// Tokens of a segment that are run together.
struct Part {
    /// Which, of the batch.
    segment: usize,
    /// The first of its rows among those of the step.
    row: usize,
    position: u32,
    count: usize,
    want: plan::Want,
}

/// A segment of a pending step.
struct Asked {
    seq: SeqId,
    want: Want,
    /// Position of its first token.
    start: u32,
    /// Its rows among those of the step.
    rows: Range<usize>,
    /// Rows of logits in the flight that it has yet to read; the last one is its last token's.
    logit_rows: Range<usize>,
    /// Those that were read.
    logits: Vec<f32>,
}

/// The model on a GPU.
pub struct MetalBackend<D: Device> {
    device: D,
    config: Config,
    loaded: Loaded,
    limits: Limits,
    fingerprint: u32,
    states: States<Sequence>,
    next_flight: usize,
    pending: VecDeque<Pending>,
    last_submission: Option<Submission>,
}

impl From<DeviceError> for BackendError {
    fn from(e: DeviceError) -> Self {
        Self::Device(e.to_string())
    }
}

impl<D: Device> MetalBackend<D> {
    /// Compiles the kernels for the model, gives its weights their places and makes all memory.
    pub fn new(
        mut device: D,
        config: Config,
        weights: &Weights,
        options: &Options,
    ) -> Result<Self, LoadError> {
        let loaded = load::load(&mut device, &config, weights, options)?;
        let limits = Limits {
            name: format!("metal ({})", device.info().name),
            vocab_size: config.vocab_size as u32,
            context: options.context,
            max_batch_tokens: options.max_batch_tokens,
            max_segments: (MAX_SEGMENTS as u32).min(options.max_batch_tokens),
            state_budget: loaded.pool.budget(loaded.state.sizes()),
        };
        let fingerprint = weights.fingerprint(&config, &format!(" {:?}", options.kv));
        Ok(Self {
            device,
            config,
            loaded,
            limits,
            fingerprint,
            states: States::default(),
            next_flight: 0,
            pending: VecDeque::new(),
            last_submission: None,
        })
    }

    /// The device.
    pub fn device(&mut self) -> &mut D {
        &mut self.device
    }

    /// Which kernels it runs.
    pub fn features(&self) -> Features {
        self.loaded.features
    }

    /// Bytes a second that the device reads and writes when it copies.
    pub fn copy_bandwidth(&mut self) -> Result<f64, DeviceError> {
        const COPIES: usize = 8;
        let bytes = 256 << 20;
        let from = Place { buffer: self.device.allocate(bytes, "measuring bandwidth")?, offset: 0 };
        let to = Place { buffer: self.device.allocate(bytes, "measuring bandwidth")?, offset: 0 };
        // Not zeros: memory may be faster with them.
        self.device.write(from, &vec![0xa5; bytes]);
        let mut fastest = f64::INFINITY;
        for _ in 0..5 {
            let start = Instant::now();
            let submission =
                self.device.submit(&mut |encoder| (0..COPIES).for_each(|_| encoder.copy(from, to, bytes)))?;
            let ended = self.device.wait(submission);
            self.device.retire(submission);
            ended?;
            fastest = fastest.min(start.elapsed().as_secs_f64());
        }
        Ok((2 * COPIES * bytes) as f64 / fastest)
    }

    /// Refuses what the context or the free memory can't hold; `pages`: those that must be fresh.
    fn check_room(&self, capacity: usize, pages: usize) -> Result<(), BackendError> {
        let Loaded { pool, state, .. } = &self.loaded;
        pool.check_room(state.sizes(), &self.limits, capacity, pages)
    }

    /// Takes a slot and pages, `shared` and fresh ones; [`Self::check_room`] must have said yes.
    fn take(&mut self, capacity: usize, shared: &[u32]) -> Result<Lease, BackendError> {
        let missing = || BackendError::Device("no free slot or page".to_owned());
        self.loaded.pool.take(capacity, shared).ok_or_else(missing)
    }

    /// Waits for work on state. If that failed nobody could say whose state is right.
    fn finish_transfer(&mut self, submission: Submission) -> Result<(), BackendError> {
        self.last_submission = Some(submission);
        Ok(self.device.wait(submission)?)
    }

    /// Waits until the device works on nothing. What it did is asked for elsewhere.
    fn drain(&self) {
        if let Some(submission) = self.last_submission {
            let _ = self.device.wait(submission);
        }
    }

    /// How the token behind a segment is drawn: the largest logit, if none is wanted.
    fn draw(&self, segment: &Segment, sequence: &Sequence) -> Draw {
        let vocab = self.config.vocab_size;
        let params = match &segment.want {
            Want::Sample(params) if !params.takes_largest() => params,
            _ => return Draw::new(&SampleParams::greedy(), &[], false, vocab),
        };
        // Only one token can be unknown: what was sampled before the step in flight is.
        let mut history = sequence.tokens.clone();
        match (&segment.tokens, sequence.last) {
            (Tokens::Ids(ids), _) => history.extend_from_slice(ids),
            (Tokens::LastSampled, Last::Known(token)) => history.push(token),
            (Tokens::LastSampled, _) => return Draw::new(params, &history, true, vocab),
        }
        Draw::new(params, &history, false, vocab)
    }

    /// Writes what the host knows of a step into its flight: tokens, positions, page tables, draws.
    fn write_inputs(&mut self, batch: &Batch, pieces: &[Vec<Part>], flight: &Flight) {
        let bytes = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
        let mut row = 0;
        for (i, segment) in batch.segments.iter().enumerate() {
            let Ok(sequence) = self.states.sequence(segment.seq) else { continue };
            let count = segment.tokens.count();
            let pages = &sequence.lease.pages[..(sequence.len + count).div_ceil(PAGE)];
            match (&segment.tokens, sequence.last) {
                (Tokens::Ids(ids), _) => self.device.write(flight.token(row), &bytes(ids)),
                (Tokens::LastSampled, Last::Known(token)) => {
                    self.device.write(flight.token(row), &bytes(&[token]));
                }
                // The device has it.
                (Tokens::LastSampled, _) => {}
            }
            self.device.write(flight.table(i), &bytes(pages));
            let draw = self.draw(segment, sequence);
            for (place, words) in flight.draw(i).into_iter().zip([&draw.words[..], &draw.changes, &draw.mask])
            {
                self.device.write(place, &bytes(words));
            }
            row += count;
        }
        for part in pieces.iter().flatten() {
            self.device.write(flight.position(part.row), &part.position.to_le_bytes());
        }
    }

    /// Hands a step over. If it can't be from somewhere on, what runs already is to be waited for, and fails.
    fn enqueue(
        &mut self,
        batch: &Batch,
        pieces: Vec<Vec<Part>>,
        flight: &Flight,
    ) -> Result<Enqueued, BackendError> {
        let mut step = Enqueued { asked: asked(batch), ..Enqueued::default() };
        match self.enqueue_pieces(batch, pieces, flight, &mut step) {
            Err(why) if step.submissions.is_empty() => return Err(BackendError::Device(why)),
            outcome => step.failed = outcome.err(),
        }
        Ok(step)
    }

    /// Hands the pieces of a step over. What it can't keep of logits it waits for and reads on the way.
    fn enqueue_pieces(
        &mut self,
        batch: &Batch,
        pieces: Vec<Vec<Part>>,
        flight: &Flight,
        step: &mut Enqueued,
    ) -> Result<(), String> {
        let mut logit_row = 0;
        let mut pieces: VecDeque<Vec<Part>> = pieces.into();
        while let Some(piece) = pieces.pop_front() {
            let shape: Shape = piece.iter().map(|part| (part.count, part.want)).collect();
            let rows: usize = piece.iter().map(|part| part.want.rows(part.count)).sum();
            if logit_row + rows > LOGIT_ROWS {
                // Whether it went well is asked again when the step is waited for.
                step.submissions.last().map(|&s| self.device.wait(s));
                let with_logits = step.asked.iter_mut().filter(|a| needs_logits(&a.want));
                with_logits.for_each(|a| self.read_logits(a, flight));
                logit_row = 0;
            }
            let run = self.run(batch, &piece, logit_row, flight);
            let Loaded { steps, state, .. } = &mut self.loaded;
            let program = steps.program(&self.device, state, &shape);
            let Some(program) = program.map_err(|e| e.to_string())? else {
                // Each segment for itself: there is memory for that.
                let parts = piece.into_iter().map(|part| vec![part]);
                parts.rev().for_each(|part| pieces.push_front(part));
                continue;
            };
            let positions: Vec<usize> = piece.iter().map(|part| part.position as usize).collect();
            for slices in program.command_buffers(&positions) {
                let submission = self.device.submit(&mut |encoder| program.encode(encoder, &run, &slices));
                let submission = submission.map_err(|e| e.to_string())?;
                step.submissions.push(submission);
                self.last_submission = Some(submission);
            }
            for part in piece {
                let (count, rows) = (part.want.rows(part.count), &mut step.asked[part.segment].logit_rows);
                let begin = if rows.start == rows.end { logit_row } else { rows.start };
                *rows = begin..logit_row + count;
                logit_row += count;
            }
        }
        Ok(())
    }

    /// Where everything is that a piece of a step touches.
    fn run(&self, batch: &Batch, piece: &[Part], logit_row: usize, flight: &Flight) -> Run {
        let bound = |part: &Part| {
            let segment = &batch.segments[part.segment];
            let sequence = self.states.sequence(segment.seq).ok();
            let tokens = match (&segment.tokens, sequence.map(|s| s.last)) {
                (Tokens::LastSampled, Some(Last::Pending(place))) => place,
                _ => flight.token(part.row),
            };
            Bound {
                tokens,
                next: flight.next(part.segment),
                position: flight.position(part.row),
                pages: flight.table(part.segment),
                draw: flight.draw(part.segment),
                broken: flight.broken(part.segment),
                slot: sequence.map_or(0, |s| s.lease.slot),
            }
        };
        let first = piece.first().map_or(0, |part| part.row);
        Run {
            segments: piece.iter().map(bound).collect(),
            x: flight.x(first),
            logits: flight.logits(logit_row),
        }
    }

    /// Tells a sequence what a step that was handed over does with it.
    fn advance(&mut self, segment: &Segment, next: Option<Place>) {
        let Ok(sequence) = self.states.sequence_mut(segment.seq) else { return };
        sequence.len += segment.tokens.count();
        match (&segment.tokens, sequence.last) {
            (Tokens::Ids(ids), _) => sequence.tokens.extend_from_slice(ids),
            (Tokens::LastSampled, Last::Known(token)) => sequence.tokens.push(token),
            (Tokens::LastSampled, Last::Pending(place)) => sequence.owed = Some(place),
            (Tokens::LastSampled, Last::Nothing) => {}
        }
        sequence.last = next.map_or(Last::Nothing, Last::Pending);
    }
}

/// Whether the host needs the logits of a segment.
fn needs_logits(want: &Want) -> bool {
    match want {
        Want::Nothing => false,
        Want::Logits(_) => true,
        Want::Sample(params) => params.logprobs.is_some(),
    }
}

/// As the plan says it.
fn planned(want: &Want) -> plan::Want {
    match want {
        Want::Nothing => plan::Want::Nothing,
        Want::Logits(Rows::Last) | Want::Sample(_) => plan::Want::Last,
        Want::Logits(Rows::All) => plan::Want::All,
    }
}

/// What the segments of a step want, before it ran.
fn asked(batch: &Batch) -> Vec<Asked> {
    let mut row = 0;
    let asked = |segment: &Segment| {
        let rows = row..row + segment.tokens.count();
        row = rows.end;
        let (seq, want, start) = (segment.seq, segment.want.clone(), segment.start);
        Asked { seq, want, start, rows, logit_rows: 0..0, logits: Vec::new() }
    };
    batch.segments.iter().map(asked).collect()
}

/// Divides a step: as one piece if all rows of logits can be kept at once, else segment by segment, and those that want too many
/// of them cut.
fn pieces(batch: &Batch) -> Vec<Vec<Part>> {
    let (mut parts, mut row) = (Vec::new(), 0);
    for (i, segment) in batch.segments.iter().enumerate() {
        let (count, want) = (segment.tokens.count(), planned(&segment.want));
        let most = if want == plan::Want::All { LOGIT_ROWS } else { count };
        for first in (0..count).step_by(most.max(1)) {
            let part = (count - first).min(most);
            let position = segment.start + first as u32;
            parts.push(Part { segment: i, row: row + first, position, count: part, want });
        }
        row += count;
    }
    let rows: usize = parts.iter().map(|part| part.want.rows(part.count)).sum();
    if parts.is_empty() {
        Vec::new()
    } else if parts.len() == batch.segments.len() && rows <= LOGIT_ROWS {
        vec![parts]
    } else {
        parts.into_iter().map(|part| vec![part]).collect()
    }
}

impl<D: Device> Backend for MetalBackend<D> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn create(&mut self, capacity: u32) -> Result<SeqId, BackendError> {
        let capacity = capacity as usize;
        self.check_room(capacity, capacity.div_ceil(PAGE))?;
        let lease = self.take(capacity, &[])?;
        let (state, slot) = (&self.loaded.state, lease.slot);
        let submission = self.device.submit(&mut |encoder| state.clear(encoder, slot))?;
        self.finish_transfer(submission)?;
        let (tokens, last) = (Vec::new(), Last::Nothing);
        Ok(self.states.add_sequence(Sequence { lease, len: 0, capacity, tokens, owed: None, last }))
    }

    fn resume(&mut self, snapshot: SnapshotId, capacity: u32) -> Result<SeqId, BackendError> {
        let from = self.states.snapshot(snapshot)?.clone();
        let capacity = (capacity as usize).max(from.len);
        let (full, written) = (from.len / PAGE, from.len % PAGE);
        self.check_room(capacity, capacity.div_ceil(PAGE) - full)?;
        let lease = self.take(capacity, &from.lease.pages[..full])?;
        let (state, slot) = (&self.loaded.state, lease.slot);
        // The page that is written next is its own.
        let pages = (written > 0).then(|| (from.lease.pages[full], lease.pages[full]));
        let submission = self.device.submit(&mut |encoder| {
            state.copy_slot(encoder, from.lease.slot, slot);
            if let Some((from, page)) = pages {
                state.copy_page(encoder, from, page, written);
            }
        })?;
        self.finish_transfer(submission)?;
        Ok(self.states.add_sequence(Sequence { lease, capacity, ..from }))
    }

    fn free(&mut self, seq: SeqId) -> Result<(), BackendError> {
        self.states.sequence(seq)?;
        self.settle(seq);
        self.loaded.pool.release(self.states.remove_sequence(seq)?.lease);
        Ok(())
    }

    /// Takes a slot, and no page: those are shared.
    fn snapshot(&mut self, seq: SeqId) -> Result<SnapshotId, BackendError> {
        self.states.sequence(seq)?;
        self.settle(seq);
        let from = self.states.sequence(seq)?.clone();
        self.check_room(from.len, 0)?;
        let lease = self.take(from.len, &from.lease.pages[..from.len.div_ceil(PAGE)])?;
        let (state, slot) = (&self.loaded.state, lease.slot);
        let submission =
            self.device.submit(&mut |encoder| state.copy_slot(encoder, from.lease.slot, slot))?;
        self.finish_transfer(submission)?;
        Ok(self.states.add_snapshot(Sequence { lease, capacity: from.len, ..from }))
    }

    fn forget(&mut self, snapshot: SnapshotId) -> Result<(), BackendError> {
        self.loaded.pool.release(self.states.remove_snapshot(snapshot)?.lease);
        Ok(())
    }

    fn export(&self, snapshot: SnapshotId) -> Result<Vec<u8>, BackendError> {
        let sequence = self.states.snapshot(snapshot)?;
        self.drain();
        Ok(export::to_bytes(&self.device, &self.loaded.state, self.fingerprint, sequence))
    }

    fn import(&mut self, bytes: &[u8]) -> Result<SnapshotId, BackendError> {
        let (state, context) = (&self.loaded.state, self.limits.context);
        let header = export::read_header(state, self.fingerprint, context, bytes)
            .map_err(BackendError::InvalidSnapshot)?;
        let len = header.tokens.len();
        self.check_room(len, len.div_ceil(PAGE))?;
        let lease = self.take(len, &[])?;
        let last = header.sampled.map_or(Last::Nothing, Last::Known);
        let sequence = Sequence { lease, len, capacity: len, tokens: header.tokens, owed: None, last };
        self.drain();
        export::restore(&mut self.device, &self.loaded.state, &sequence, bytes);
        Ok(self.states.add_snapshot(sequence))
    }

    fn state_bytes(&self, capacity: u32) -> u64 {
        self.loaded.state.sizes().sequence(capacity as usize)
    }

    fn free_bytes(&self) -> u64 {
        self.loaded.pool.free_bytes(self.loaded.state.sizes())
    }

    fn steps_in_flight(&self) -> usize {
        IN_FLIGHT
    }

    fn forward(&mut self, batch: &Batch) -> Result<Ticket, BackendError> {
        batch.check(&self.limits, |seq| {
            let s = self.states.sequence(seq).ok()?;
            Some(Progress { len: s.len, capacity: s.capacity, sampled: s.last != Last::Nothing })
        })?;
        let index = self.next_flight;
        if let Some(last) = self.pending.iter().rposition(|p| p.flight == index && p.outputs.is_none()) {
            self.harvest_to(last);
        }
        let flight = self.loaded.flights[index];
        let pieces = pieces(batch);
        self.write_inputs(batch, &pieces, &flight);
        let step = self.enqueue(batch, pieces, &flight)?;
        for (i, segment) in batch.segments.iter().enumerate() {
            let draws = matches!(segment.want, Want::Sample(_));
            self.advance(segment, draws.then(|| flight.next(i)));
        }
        self.next_flight = (index + 1) % IN_FLIGHT;
        let ticket = self.states.new_id();
        self.pending.push_back(Pending { ticket, flight: index, step, outputs: None });
        Ok(Ticket(ticket))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput, BackendError> {
        match self.pending.front() {
            Some(oldest) if oldest.ticket == ticket.0 => {}
            _ => return Err(BackendError::Unknown { kind: "ticket", id: ticket.0 }),
        }
        self.harvest_to(0);
        Ok(self.pending.pop_front().and_then(|pending| pending.outputs).unwrap_or_default())
    }
}

impl<D: Device> Drop for MetalBackend<D> {
    /// The device may not work on memory that is gone.
    fn drop(&mut self) {
        self.drain();
    }
}
