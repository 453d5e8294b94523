//! [`Backend`] on a GPU: `forward` enqueues a step and returns, `wait` waits for its end.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;

use lily_model::backend::{
    Backend, BackendError, Batch, Limits, Output, Progress, SegmentError, SeqId, SnapshotId, StepOutput,
    Ticket, Want,
};
use lily_model::config::Config;
use lily_model::pool::PAGE;
use lily_model::sample::{Sampled, logprobs};
use lily_model::states::States;
use lily_model::weights::Weights;

use crate::device::Source;
use crate::driver::{Context, DriverError, Event, Graph, Pinned};
use crate::forward::Device;
use crate::gdn::PENDING;
use crate::state::{Sequence, State};
use crate::step::{self, MAX_SEGMENTS, NONE, Plan};
use crate::{LoadError, export};

/// Steps that may be enqueued before the oldest is waited for.
const IN_FLIGHT: usize = 2;

/// Settings of the backend.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which device.
    pub device: usize,
    /// Longest sequence, tokens.
    pub context: u32,
    /// Sequences of full length that there is memory for.
    pub max_sequences: u32,
    /// Bytes of state beside that, for snapshots.
    pub snapshot_bytes: u64,
    /// Most tokens in one step. Each takes 1.3 MB at the real model's shape, most of it its row of logits.
    pub max_batch_tokens: u32,
    /// Folder for compiled kernels; `None`: compile them at every load.
    pub cache: Option<PathBuf>,
    /// Use the kernels that bring weights by bulk copies where they fit; off for comparing with the others.
    pub fast_decode: bool,
    /// Record decode steps as graphs; off for profiles.
    pub graphs: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            device: 0,
            context: 4096,
            max_sequences: 4,
            snapshot_bytes: 0,
            max_batch_tokens: 256,
            cache: None,
            fast_decode: true,
            graphs: true,
        }
    }
}

/// Host memory of one step in flight.
struct Flight {
    step: Pinned,
    results: Pinned,
    done: Event,
}

/// A step that was enqueued.
struct Pending {
    ticket: u64,
    /// Which flight it has.
    flight: usize,
    segments: Vec<Asked>,
    /// Token and fault of each segment, once they were copied out of the flight.
    results: Option<Vec<[u32; 2]>>,
}

/// What a segment of a pending step wants.
struct Asked {
    want: Want,
    /// Its rows of logits, if the host needs them.
    logits: Vec<f32>,
}

/// The model on a GPU.
pub struct CudaBackend {
    device: Device,
    graphs: Option<HashMap<usize, Graph>>,
    limits: Limits,
    fingerprint: u32,
    states: States<Sequence>,
    flights: Vec<Flight>,
    next_flight: usize,
    pending: VecDeque<Pending>,
    /// Steps since one last wrote the states of all its sequences.
    since_written: usize,
}

impl From<DriverError> for BackendError {
    fn from(e: DriverError) -> Self {
        Self::Device(e.to_string())
    }
}

impl CudaBackend {
    /// Compiles the kernels for the model, uploads its weights and makes all buffers.
    pub fn new(config: Config, weights: &Weights, options: &Options) -> Result<Self, LoadError> {
        Self::load(config, &Source::Checkpoint(weights), options)
    }

    /// The same with random weights, made on the device: for measuring speed.
    pub fn random(config: Config, seed: u32, options: &Options) -> Result<Self, LoadError> {
        Self::load(config, &Source::Random(seed), options)
    }

    fn load(config: Config, source: &Source<'_>, options: &Options) -> Result<Self, LoadError> {
        let context = Context::open(options.device)?;
        let device = Device::load(context, config, source, options)?;
        let flight = |_| -> Result<Flight, DriverError> {
            Ok(Flight {
                step: Pinned::new(&device.context, device.layout.bytes())?,
                results: Pinned::new(&device.context, 8 * MAX_SEGMENTS)?,
                done: Event::new(&device.context)?,
            })
        };
        let flights = (0..IN_FLIGHT).map(flight).collect::<Result<_, _>>()?;
        let fingerprint = match source {
            Source::Checkpoint(weights) => weights.fingerprint(&device.config, ""),
            Source::Random(seed) => *seed,
        };
        let limits = Limits {
            name: format!("cuda:{} ({})", options.device, device.context.description()),
            vocab_size: device.config.vocab_size as u32,
            context: options.context,
            max_batch_tokens: options.max_batch_tokens,
            max_segments: MAX_SEGMENTS as u32,
            state_budget: device.state.pool.budget(&device.state.sizes.parts()),
        };
        tracing::info!(
            "{}: weights {} bytes, state {} bytes, decode kernel {}",
            limits.name,
            device.weights.bytes(),
            limits.state_budget,
            if device.token.is_some() { "on" } else { "off" }
        );
        Ok(Self {
            device,
            graphs: options.graphs.then(HashMap::new),
            limits,
            fingerprint,
            states: States::default(),
            flights,
            next_flight: 0,
            pending: VecDeque::new(),
            since_written: 0,
        })
    }

    /// The GPU.
    pub(crate) fn context(&self) -> &std::sync::Arc<Context> {
        &self.device.context
    }

    /// The device, for profiles.
    pub(crate) fn device(&mut self) -> &mut Device {
        &mut self.device
    }

    /// Whether single tokens are decoded by the kernel made for that.
    pub fn decodes_fast(&self) -> bool {
        self.device.token.is_some()
    }

    /// Refuses what the context or the free memory can't hold; `pages`: those that must be fresh.
    fn check_room(&self, capacity: usize, pages: usize) -> Result<(), BackendError> {
        let State { pool, sizes, .. } = &self.device.state;
        pool.check_room(&sizes.parts(), &self.limits, capacity, pages)
    }

    /// Checks a batch before anything changes.
    fn check(&self, batch: &Batch) -> Result<(), BackendError> {
        batch.check(&self.limits, |seq| {
            let s = self.states.sequence(seq).ok()?;
            Some(Progress { len: s.len, capacity: s.capacity, sampled: s.sampled })
        })
    }

    /// Enqueues a checked step into flight `flight`.
    fn enqueue(&mut self, batch: &Batch, flight: usize) -> Result<Plan, BackendError> {
        let layout = self.device.layout;
        let reads_logs = self.device.reads_logs(batch.segments.len());
        // All sequences write their states in the same step: few that do take a step nearly as long as all.
        let defer = reads_logs && self.since_written < PENDING;
        if !reads_logs {
            for segment in &batch.segments {
                self.device.settle(self.states.sequence_mut(segment.seq)?)?;
            }
        }
        // `check` has seen every sequence.
        let sequences: Vec<&Sequence> =
            batch.segments.iter().filter_map(|s| self.states.sequence(s.seq).ok()).collect();
        let buffer = self.flights[flight].step.as_mut_slice();
        let plan = step::write(buffer, &layout, batch, &sequences, defer);
        let (context, at) = (self.device.context.clone(), self.device.buffers.step.address());
        let buffer = self.flights[flight].step.as_slice();
        context.send(at, &buffer[..plan.head])?;
        for (begin, bytes) in
            [(layout.masks(), plan.masks * layout.mask_words * 4), (layout.biases(), plan.biases * 8)]
        {
            if bytes > 0 {
                context.send(at + begin as u64, &buffer[begin..begin + bytes])?;
            }
        }
        self.run(&plan)?;
        let results = &mut self.flights[flight].results.as_mut_slice()[..8 * plan.segments];
        context.receive(results, self.device.buffers.results.address())?;
        self.flights[flight].done.record()?;
        Ok(plan)
    }

    /// The kernels of a step: a graph that is there or is recorded now, or one by one.
    fn run(&mut self, plan: &Plan) -> Result<(), DriverError> {
        let device = &self.device;
        let Some(graphs) = self.graphs.as_mut().filter(|_| plan.decode) else {
            return device.enqueue(plan);
        };
        if let Some(graph) = graphs.get(&plan.rows) {
            return graph.launch();
        }
        let graph = device.context.capture(|| device.enqueue(plan))?;
        graph.launch()?;
        graphs.insert(plan.rows, graph);
        Ok(())
    }

    /// Rows of logits of a step that is enqueued, for segments that want more than a token: waits for them.
    fn fetch_logits(&self, batch: &Batch, plan: &Plan) -> Result<Vec<Asked>, BackendError> {
        let vocab = self.limits.vocab_size as usize;
        let mut row = 0;
        let mut asked = Vec::with_capacity(plan.segments);
        for segment in &batch.segments {
            let rows = step::wanted(&segment.want, segment.tokens.count());
            let needed = match &segment.want {
                Want::Nothing => false,
                Want::Logits(_) => true,
                Want::Sample(p) => p.logprobs.is_some(),
            };
            let mut bytes = vec![0u8; if needed { rows * vocab * 4 } else { 0 }];
            if needed {
                self.device.buffers.logits.read(row * vocab * 4, &mut bytes)?;
            }
            row += rows;
            let logits = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            asked.push(Asked { want: segment.want.clone(), logits });
        }
        Ok(asked)
    }

    /// Copies a step's results out of its flight, once it is done.
    fn harvest(flights: &[Flight], pending: &mut Pending) -> Result<Vec<[u32; 2]>, BackendError> {
        if let Some(results) = pending.results.take() {
            return Ok(results);
        }
        let flight = &flights[pending.flight];
        flight.done.wait()?;
        let words = flight.results.as_slice().as_chunks::<8>().0;
        let word = |b: &[u8; 8], i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        Ok(words[..pending.segments.len()].iter().map(|b| [word(b, 0), word(b, 4)]).collect())
    }

    fn output(asked: Asked, [token, broken]: [u32; 2]) -> Result<Output, SegmentError> {
        if broken != NONE {
            return Err(SegmentError::NonFinite { position: broken });
        }
        Ok(match asked.want {
            Want::Nothing => Output::Nothing,
            Want::Logits(_) => Output::Logits(asked.logits),
            Want::Sample(params) => {
                let logprobs = params.logprobs.map(|n| logprobs(&asked.logits, token, n));
                Output::Sampled(Sampled { token, logprobs })
            }
        })
    }
}

impl Backend for CudaBackend {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn create(&mut self, capacity: u32) -> Result<SeqId, BackendError> {
        let capacity = capacity as usize;
        self.check_room(capacity, capacity.div_ceil(PAGE))?;
        self.device.context.enter()?;
        let sequence = self.device.state.create(capacity)?;
        Ok(self.states.add_sequence(sequence))
    }

    fn resume(&mut self, snapshot: SnapshotId, capacity: u32) -> Result<SeqId, BackendError> {
        let from = self.states.snapshot(snapshot)?.clone();
        let capacity = (capacity as usize).max(from.len);
        self.check_room(capacity, State::own_pages(&from, capacity, false))?;
        self.device.context.enter()?;
        let sequence = self.device.state.copy(&from, capacity, false)?;
        Ok(self.states.add_sequence(sequence))
    }

    fn free(&mut self, seq: SeqId) -> Result<(), BackendError> {
        self.device.state.pool.release(self.states.remove_sequence(seq)?.lease);
        Ok(())
    }

    /// Takes a slot, and no page: those are shared.
    fn snapshot(&mut self, seq: SeqId) -> Result<SnapshotId, BackendError> {
        self.check_room(self.states.sequence(seq)?.len, 0)?;
        self.device.context.enter()?;
        let from = self.states.sequence_mut(seq)?;
        self.device.settle(from)?;
        let copy = self.device.state.copy(from, from.len, true)?;
        Ok(self.states.add_snapshot(copy))
    }

    fn forget(&mut self, snapshot: SnapshotId) -> Result<(), BackendError> {
        self.device.state.pool.release(self.states.remove_snapshot(snapshot)?.lease);
        Ok(())
    }

    fn export(&self, snapshot: SnapshotId) -> Result<Vec<u8>, BackendError> {
        self.device.context.enter()?;
        Ok(export::to_bytes(&self.device.state, self.fingerprint, self.states.snapshot(snapshot)?)?)
    }

    fn import(&mut self, bytes: &[u8]) -> Result<SnapshotId, BackendError> {
        let header = export::read_header(&self.device.state.sizes, self.fingerprint, bytes)
            .map_err(BackendError::InvalidSnapshot)?;
        self.check_room(header.len, header.len.div_ceil(PAGE))?;
        self.device.context.enter()?;
        let sequence = export::restore(&mut self.device.state, &header, bytes)?;
        Ok(self.states.add_snapshot(sequence))
    }

    fn state_bytes(&self, capacity: u32) -> u64 {
        self.device.state.sizes.parts().sequence(capacity as usize)
    }

    fn free_bytes(&self) -> u64 {
        let State { pool, sizes, .. } = &self.device.state;
        pool.free_bytes(&sizes.parts())
    }

    fn steps_in_flight(&self) -> usize {
        IN_FLIGHT
    }

    fn forward(&mut self, batch: &Batch) -> Result<Ticket, BackendError> {
        self.check(batch)?;
        self.device.context.enter()?;
        let flight = self.next_flight;
        if let Some(pending) = self.pending.iter_mut().find(|p| p.flight == flight && p.results.is_none()) {
            pending.results = Some(Self::harvest(&self.flights, pending)?);
        }
        let (mut plan, mut segments) = (Plan::default(), Vec::new());
        if !batch.segments.is_empty() {
            plan = self.enqueue(batch, flight)?;
            segments = self.fetch_logits(batch, &plan)?;
        }
        self.since_written = if plan.defer { self.since_written + 1 } else { 0 };
        for segment in &batch.segments {
            if let Ok(sequence) = self.states.sequence_mut(segment.seq) {
                let defers = step::defers(sequence, segment.tokens.count(), plan.defer);
                sequence.pending = if defers { sequence.pending + 1 } else { 0 };
                sequence.len += segment.tokens.count();
                sequence.parity = 1 - sequence.parity;
                sequence.sampled = matches!(segment.want, Want::Sample(_));
            }
        }
        self.next_flight = (flight + 1) % self.flights.len();
        let ticket = self.states.new_id();
        let results = segments.is_empty().then(Vec::new);
        self.pending.push_back(Pending { ticket, flight, segments, results });
        Ok(Ticket(ticket))
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput, BackendError> {
        match self.pending.front() {
            Some(oldest) if oldest.ticket == ticket.0 => {}
            _ => return Err(BackendError::Unknown { kind: "ticket", id: ticket.0 }),
        }
        self.device.context.enter()?;
        let Some(mut pending) = self.pending.pop_front() else { return Ok(Vec::new()) };
        let results = Self::harvest(&self.flights, &mut pending)?;
        Ok(pending.segments.into_iter().zip(results).map(|(asked, r)| Self::output(asked, r)).collect())
    }
}
