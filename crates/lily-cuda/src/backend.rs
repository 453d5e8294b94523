//! [`Backend`] on a GPU: `forward` enqueues a step and returns, `wait` waits for its end.

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::PathBuf;

use lily_model::backend::{
    Backend, BackendError, Batch, Limits, Output, SegmentError, SeqId, SnapshotId, StepOutput, Ticket,
    Tokens, Want,
};
use lily_model::config::Config;
use lily_model::sample::{SampleParams, Sampled, sample};
use lily_model::weights::Weights;

use crate::driver::{Context, DriverError, Event, Graph, Pinned};
use crate::forward::{Buffers, Device, GroupSizes, flash_shared};
use crate::kernels::Kernels;
use crate::state::{PAGE, Sequence, State};
use crate::step::{self, Layout, MAX_SEGMENTS, NONE, Plan};
use crate::weights::{DeviceWeights, Random};
use crate::{LoadError, check_shapes, cluster, decode, export};

/// Steps that may be enqueued before the oldest is waited for.
const IN_FLIGHT: usize = 2;

/// Settings of the backend.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which device.
    pub device: usize,
    /// Longest sequence, tokens.
    pub context: u32,
    /// Sequences of full length that the pages hold; there are twice as many slots, for as many snapshots.
    pub max_sequences: u32,
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
            max_batch_tokens: 256,
            cache: None,
            fast_decode: true,
            graphs: true,
        }
    }
}

/// Where weights come from.
enum Source<'a> {
    Checkpoint(&'a Weights),
    Random(u32),
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
    sizes: decode::Sizes,
    fast: bool,
    graphs: Option<HashMap<usize, Graph>>,
    limits: Limits,
    fingerprint: u32,
    sequences: HashMap<SeqId, Sequence>,
    snapshots: HashMap<SnapshotId, Sequence>,
    next_id: u64,
    flights: Vec<Flight>,
    next_flight: usize,
    pending: VecDeque<Pending>,
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
        check_shapes(&config)?;
        let context = Context::open(options.device)?;
        let (needed, available) = (flash_shared(&config), context.shared_memory);
        if needed > available {
            let (head_dim, device) = (config.attention.head_dim, context.name.clone());
            return Err(LoadError::SharedMemory { head_dim, needed, device, available });
        }
        let sizes = decode::Sizes::new(&config, context.multiprocessors);
        let mut shared = vec![("flash", needed)];
        let group_sizes = GroupSizes::new(&config);
        let dynamic = sizes.shared().into_iter().chain(group_sizes.shared());
        shared.extend(dynamic.filter(|(_, bytes)| *bytes + (40 << 10) <= context.shared_memory));
        shared.extend(cluster::shared(&context));
        let kernels = Kernels::load(&context, &config, options.cache.as_deref(), &shared)?;
        let weights = match source {
            Source::Checkpoint(weights) => DeviceWeights::upload(&context, &config, weights)?,
            Source::Random(seed) => {
                Random { context: &context, kernels: &kernels, seed: *seed }.weights(&config)?
            }
        };
        let layout =
            Layout { rows: options.max_batch_tokens as usize, mask_words: config.vocab_size.div_ceil(32) };
        let length = (options.context as usize).next_multiple_of(PAGE);
        let sequences = options.max_sequences as usize;
        let state = State::new(&context, &config, length, 2 * sequences, sequences)?;
        let buffers = Buffers::new(&context, &config, &layout, length)?;
        let fingerprint = match source {
            Source::Checkpoint(weights) => export::fingerprint(&config, weights),
            Source::Random(seed) => *seed,
        };
        let flight = |_| -> Result<Flight, DriverError> {
            Ok(Flight {
                step: Pinned::new(&context, layout.bytes())?,
                results: Pinned::new(&context, 8 * MAX_SEGMENTS)?,
                done: Event::new(&context)?,
            })
        };
        let flights = (0..IN_FLIGHT).map(flight).collect::<Result<_, _>>()?;
        let fast = options.fast_decode && decode::supported(&weights, &sizes, &context);
        let limits = Limits {
            name: format!(
                "cuda:{} ({}, compute capability {}.{})",
                options.device,
                context.name,
                context.capability / 10,
                context.capability % 10
            ),
            vocab_size: config.vocab_size as u32,
            context: options.context,
            max_batch_tokens: options.max_batch_tokens,
            max_segments: MAX_SEGMENTS as u32,
            state_budget: state.budget(),
        };
        tracing::info!(
            "{}: weights {} bytes, state {} bytes, decode kernels {}",
            limits.name,
            weights.bytes(),
            limits.state_budget,
            if fast { "on" } else { "off" }
        );
        let grouped = options.fast_decode && group_sizes.fit(&context);
        let clusters = if options.fast_decode { cluster::Clusters::new(&context, &kernels)? } else { None };
        let device = Device {
            grouped,
            clusters,
            context,
            config,
            kernels,
            weights,
            buffers,
            state,
            layout,
            probe: None,
            omit: Vec::new(),
        };
        device.rotary_table(length)?;
        Ok(Self {
            device,
            sizes,
            fast,
            graphs: options.graphs.then(HashMap::new),
            limits,
            fingerprint,
            sequences: HashMap::new(),
            snapshots: HashMap::new(),
            next_id: 0,
            flights,
            next_flight: 0,
            pending: VecDeque::new(),
        })
    }

    /// The device, for profiles.
    pub fn device(&mut self) -> &mut Device {
        &mut self.device
    }

    /// Leaves kernels out of every step from now on, for profiles: what steps compute means nothing any more.
    pub fn omit(&mut self, kernels: &[&str]) {
        self.device.omit = kernels.iter().map(|k| (*k).to_owned()).collect();
        if let Some(graphs) = &mut self.graphs {
            graphs.clear();
        }
    }

    /// Whether single tokens are decoded by the kernels made for that.
    pub fn decodes_fast(&self) -> bool {
        self.fast
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn sequence(&self, id: SeqId) -> Result<&Sequence, BackendError> {
        self.sequences.get(&id).ok_or(BackendError::Unknown { kind: "sequence", id: id.0 })
    }

    fn snapshot_state(&self, id: SnapshotId) -> Result<&Sequence, BackendError> {
        self.snapshots.get(&id).ok_or(BackendError::Unknown { kind: "snapshot", id: id.0 })
    }

    /// Refuses what the context or the free memory can't hold; `pages`: those that must be fresh.
    fn check_room(&self, capacity: u32, pages: usize) -> Result<(), BackendError> {
        let context = self.limits.context;
        if capacity > context {
            return Err(BackendError::TooLong { capacity, context });
        }
        if !self.device.state.fits(pages) {
            let needed = self.device.state.sizes.sequence(pages * PAGE);
            return Err(BackendError::OutOfMemory { capacity, needed, available: self.free_bytes() });
        }
        Ok(())
    }

    fn add_sequence(&mut self, sequence: Sequence) -> SeqId {
        let id = SeqId(self.new_id());
        self.sequences.insert(id, sequence);
        id
    }

    /// Checks every rule of a batch before anything changes. Returns the token ids of each segment, none for the token
    /// that was sampled.
    fn check(&self, batch: &Batch) -> Result<Vec<Vec<u32>>, BackendError> {
        let invalid = |problem: String| Err(BackendError::InvalidBatch(problem));
        if batch.segments.len() > MAX_SEGMENTS {
            let n = batch.segments.len();
            return invalid(format!("{n} segments in a step, the most is {MAX_SEGMENTS}"));
        }
        let mut seen = HashSet::new();
        let mut inputs = Vec::with_capacity(batch.segments.len());
        let (mut tokens, mut biases) = (0, 0);
        for segment in &batch.segments {
            let (id, sequence) = (segment.seq.0, self.sequence(segment.seq)?);
            if !seen.insert(segment.seq) {
                return invalid(format!("sequence {id} has two segments"));
            }
            let ids = match (&segment.tokens, sequence.sampled) {
                (Tokens::Ids(ids), _) if ids.is_empty() => {
                    return invalid(format!("sequence {id} has a segment without tokens"));
                }
                (Tokens::Ids(ids), _) => ids.clone(),
                (Tokens::LastSampled, true) => Vec::new(),
                (Tokens::LastSampled, false) => {
                    return invalid(format!("sequence {id} has sampled nothing yet"));
                }
            };
            let (len, start, rows) = (sequence.len, segment.start, ids.len().max(1));
            if start as usize != len {
                return invalid(format!("sequence {id} continues at {start}, but has {len} tokens"));
            }
            if len + rows > sequence.capacity {
                let (end, capacity) = (len + rows, sequence.capacity);
                return invalid(format!("sequence {id} would have {end} tokens, its capacity is {capacity}"));
            }
            if let Some(token) = ids.iter().find(|&&t| t >= self.limits.vocab_size) {
                let vocab = self.limits.vocab_size;
                return invalid(format!("sequence {id} has token {token}, the vocabulary has {vocab}"));
            }
            if let Want::Sample(p) = &segment.want {
                biases += p.logit_bias.len();
            }
            tokens += rows;
            inputs.push(ids);
        }
        let most = self.limits.max_batch_tokens;
        if tokens > most as usize {
            return invalid(format!("{tokens} tokens in a step, the most is {most}"));
        }
        let most = self.device.layout.most_biases();
        if biases > most {
            return invalid(format!("{biases} logit biases in a step, the most is {most}"));
        }
        Ok(inputs)
    }

    /// Enqueues a checked step into flight `flight`.
    fn enqueue(&mut self, batch: &Batch, inputs: &[Vec<u32>], flight: usize) -> Result<Plan, BackendError> {
        let layout = self.device.layout;
        // `check` has seen every sequence.
        let sequences: Vec<&Sequence> =
            batch.segments.iter().filter_map(|s| self.sequences.get(&s.seq)).collect();
        let buffer = self.flights[flight].step.as_mut_slice();
        let plan = step::write(buffer, &layout, batch, inputs, &sequences);
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
        let (device, sizes) = (&self.device, &self.sizes);
        let fast = self.fast && plan.rows == 1;
        let kernels = || if fast { device.decode_one(sizes) } else { device.step(plan) };
        let Some(graphs) = self.graphs.as_mut().filter(|_| plan.decode && device.probe.is_none()) else {
            return kernels();
        };
        if let Some(graph) = graphs.get(&plan.rows) {
            return graph.launch();
        }
        let graph = device.context.capture(kernels)?;
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
            let len = if let Tokens::Ids(ids) = &segment.tokens { ids.len() } else { 1 };
            let rows = step::wanted(&segment.want, len);
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
                let logprobs = params.logprobs.map(|n| {
                    // The host's own definition, on the device's logits.
                    let reported = SampleParams { logprobs: Some(n), ..SampleParams::greedy() };
                    let best = sample(&mut asked.logits.clone(), &[], &reported);
                    let mut logprobs =
                        best.logprobs.unwrap_or(lily_model::sample::Logprobs { token: 0.0, top: Vec::new() });
                    let of = |token: u32| asked.logits[token as usize];
                    logprobs.token += of(token) - of(best.token);
                    logprobs
                });
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
        self.check_room(capacity, (capacity as usize).div_ceil(PAGE))?;
        self.device.context.enter()?;
        let sequence = self.device.state.create(capacity as usize)?;
        Ok(self.add_sequence(sequence))
    }

    fn resume(&mut self, snapshot: SnapshotId, capacity: u32) -> Result<SeqId, BackendError> {
        let from = self.snapshot_state(snapshot)?.clone();
        let capacity = capacity.max(from.len as u32);
        self.check_room(capacity, State::own_pages(&from, capacity as usize, false))?;
        self.device.context.enter()?;
        let sequence = self.device.state.copy(&from, capacity as usize, false)?;
        Ok(self.add_sequence(sequence))
    }

    fn free(&mut self, seq: SeqId) -> Result<(), BackendError> {
        self.sequence(seq)?;
        if let Some(sequence) = self.sequences.remove(&seq) {
            self.device.state.release(sequence);
        }
        Ok(())
    }

    /// Takes a slot, and no page: those are shared.
    fn snapshot(&mut self, seq: SeqId) -> Result<SnapshotId, BackendError> {
        let from = self.sequence(seq)?.clone();
        self.check_room(from.len as u32, 0)?;
        self.device.context.enter()?;
        let copy = self.device.state.copy(&from, from.len, true)?;
        let id = SnapshotId(self.new_id());
        self.snapshots.insert(id, copy);
        Ok(id)
    }

    fn forget(&mut self, snapshot: SnapshotId) -> Result<(), BackendError> {
        self.snapshot_state(snapshot)?;
        if let Some(sequence) = self.snapshots.remove(&snapshot) {
            self.device.state.release(sequence);
        }
        Ok(())
    }

    fn export(&self, snapshot: SnapshotId) -> Result<Vec<u8>, BackendError> {
        self.device.context.enter()?;
        Ok(export::to_bytes(&self.device.state, self.fingerprint, self.snapshot_state(snapshot)?)?)
    }

    fn import(&mut self, bytes: &[u8]) -> Result<SnapshotId, BackendError> {
        let header = export::read_header(&self.device.state.sizes, self.fingerprint, bytes)
            .map_err(BackendError::InvalidSnapshot)?;
        self.check_room(header.len as u32, header.len.div_ceil(PAGE))?;
        self.device.context.enter()?;
        let sequence = export::restore(&mut self.device.state, &header, bytes)?;
        let id = SnapshotId(self.new_id());
        self.snapshots.insert(id, sequence);
        Ok(id)
    }

    fn state_bytes(&self, capacity: u32) -> u64 {
        self.device.state.sizes.sequence(capacity as usize)
    }

    /// Bytes of the largest sequence that could be created now.
    fn free_bytes(&self) -> u64 {
        self.device.state.available()
    }

    fn steps_in_flight(&self) -> usize {
        IN_FLIGHT
    }

    fn forward(&mut self, batch: &Batch) -> Result<Ticket, BackendError> {
        let inputs = self.check(batch)?;
        self.device.context.enter()?;
        let flight = self.next_flight;
        if let Some(pending) = self.pending.iter_mut().find(|p| p.flight == flight && p.results.is_none()) {
            pending.results = Some(Self::harvest(&self.flights, pending)?);
        }
        let mut segments = Vec::new();
        if !inputs.is_empty() {
            let plan = self.enqueue(batch, &inputs, flight)?;
            segments = self.fetch_logits(batch, &plan)?;
        }
        for (segment, ids) in batch.segments.iter().zip(&inputs) {
            if let Some(sequence) = self.sequences.get_mut(&segment.seq) {
                sequence.len += ids.len().max(1);
                sequence.parity = 1 - sequence.parity;
                sequence.sampled = matches!(segment.want, Want::Sample(_));
            }
        }
        self.next_flight = (flight + 1) % self.flights.len();
        let ticket = self.new_id();
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
