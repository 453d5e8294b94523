//! [`Backend`] on the CPU. A step is computed inside [`Backend::forward`]; `wait` hands out its results.

use std::collections::VecDeque;
use std::sync::Arc;

use lily_model::backend::{
    Backend, BackendError, Batch, Limits, Progress, Segment, SeqId, SnapshotId, StepOutput, Ticket, Tokens,
};
use lily_model::config::Config;
use lily_model::states::States;
use lily_model::weights::Weights;

use smallvec::SmallVec;

use crate::device::{Device, Isa, ThreadError};
use crate::export;
use crate::forward::{self, Workspace};
use crate::head;
use crate::state::{self, Kind, Ledger, Sequence};
use crate::tap::{Tap, no_tap};

/// Settings of the backend.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads; `None`: one per core that the process may use.
    pub threads: Option<usize>,
    /// Longest sequence, tokens.
    pub context: u32,
    /// Sequences of full length that the state budget holds.
    pub max_sequences: u32,
    /// Bytes of the state budget beside them, for snapshots.
    pub snapshot_bytes: u64,
    /// Most tokens in one step; activations take about 0.3 MB a token at the real model's width.
    pub max_batch_tokens: u32,
    /// Instructions to use.
    pub isa: Isa,
    /// Computes with f32 activations and an f32 cache instead of int8 and bf16: slower, for verification.
    pub exact: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            threads: None,
            context: 4096,
            max_sequences: 4,
            snapshot_bytes: 0,
            max_batch_tokens: 512,
            isa: Isa::detect(),
            exact: false,
        }
    }
}

/// The model on the CPU.
pub struct CpuBackend {
    config: Config,
    weights: Arc<Weights>,
    device: Device,
    kind: Kind,
    workspace: Workspace,
    limits: Limits,
    states: States<Sequence>,
    held: Ledger,
    finished: VecDeque<(Ticket, StepOutput)>,
}

impl CpuBackend {
    /// Starts the threads; weights are shared, not copied.
    pub fn new(config: Config, weights: Arc<Weights>, options: &Options) -> Result<Self, ThreadError> {
        let device = Device::new(options.threads, options.isa, options.exact)?;
        let kind = cache_kind(options.exact);
        let limits = Limits {
            name: device.name(),
            vocab_size: config.vocab_size as u32,
            context: options.context,
            max_batch_tokens: options.max_batch_tokens,
            max_segments: options.max_batch_tokens,
            state_budget: u64::from(options.max_sequences)
                * state::bytes(&config, kind, options.context as usize)
                + options.snapshot_bytes,
        };
        Ok(Self {
            config,
            weights,
            device,
            kind,
            workspace: Workspace::default(),
            limits,
            states: States::default(),
            held: Ledger::default(),
            finished: VecDeque::new(),
        })
    }

    /// [`Backend::forward`] with a look at the insides. `tap` sees the step's tokens segment by segment.
    pub fn forward_tapped(&mut self, batch: &Batch, tap: Tap<'_>) -> Result<Ticket, BackendError> {
        let inputs = self.check(batch)?;
        let ids: Vec<SeqId> = batch.segments.iter().map(|s| s.seq).collect();
        // Taken out for the step, so that each can be borrowed on its own; `check` has seen them all.
        let mut sequences: Vec<Sequence> =
            ids.iter().filter_map(|&id| self.states.remove_sequence(id).ok()).collect();
        let output = self.step(batch, &inputs, &mut sequences, tap);
        ids.into_iter().zip(sequences).for_each(|(id, sequence)| self.states.put_back(id, sequence));
        let id = self.states.new_id();
        self.finished.push_back((Ticket(id), output));
        Ok(Ticket(id))
    }

    /// Checks that state for `capacity` tokens may be had, of which the first `shared` are in a snapshot or sequence.
    fn check_room(&self, capacity: usize, shared: usize) -> Result<(), BackendError> {
        self.limits.check_length(capacity)?;
        let needed = state::bytes_beside(&self.config, self.kind, capacity, shared);
        let available = self.free_bytes();
        if needed > available {
            return Err(BackendError::OutOfMemory { capacity: capacity as u32, needed, available });
        }
        Ok(())
    }

    /// Checks a batch before anything changes. Returns the token ids of each segment.
    fn check(&self, batch: &Batch) -> Result<SmallVec<[SmallVec<[u32; 1]>; 4]>, BackendError> {
        batch.check(&self.limits, |seq| {
            let s = self.states.sequence(seq).ok()?;
            Some(Progress { len: s.tokens.len(), capacity: s.capacity, sampled: s.sampled.is_some() })
        })?;
        let ids = |segment: &Segment| match &segment.tokens {
            Tokens::Ids(ids) => SmallVec::from_slice(ids),
            Tokens::LastSampled => {
                self.states.sequence(segment.seq).ok().and_then(|s| s.sampled).into_iter().collect()
            }
        };
        Ok(batch.segments.iter().map(ids).collect())
    }

    fn step(
        &mut self,
        batch: &Batch,
        inputs: &[SmallVec<[u32; 1]>],
        sequences: &mut [Sequence],
        tap: Tap<'_>,
    ) -> StepOutput {
        if inputs.is_empty() {
            return Vec::new();
        }
        let segments = sequences.iter().zip(inputs).map(|(s, ids)| (s.tokens.len(), ids.len()));
        let (step, routes) = self.workspace.step(&self.config, &self.device, segments);
        let tokens: SmallVec<[u32; 32]> = inputs.iter().flatten().copied().collect();
        let x = forward::layers(&step, &self.weights, &tokens, sequences, routes, tap);
        for (sequence, ids) in sequences.iter_mut().zip(inputs) {
            sequence.tokens.extend_from_slice(ids);
            sequence.sampled = None;
        }
        head::forward(&step, &self.weights, batch, &x, sequences)
    }
}

/// What K/V is kept as.
fn cache_kind(exact: bool) -> Kind {
    if exact { Kind::F32 } else { Kind::Bf16 }
}

/// Bytes of state that a sequence of `capacity` tokens holds.
pub fn state_bytes(config: &Config, exact: bool, capacity: usize) -> u64 {
    state::bytes(config, cache_kind(exact), capacity)
}

impl Backend for CpuBackend {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn create(&mut self, capacity: u32) -> Result<SeqId, BackendError> {
        self.check_room(capacity as usize, 0)?;
        Ok(self.states.add_sequence(Sequence::new(&self.config, self.kind, &self.held, capacity as usize)))
    }

    fn resume(&mut self, snapshot: SnapshotId, capacity: u32) -> Result<SeqId, BackendError> {
        let frozen = self.states.snapshot(snapshot)?;
        let read = frozen.tokens.len();
        let capacity = (capacity as usize).max(read);
        self.check_room(capacity, read)?;
        let mut sequence = frozen.clone();
        sequence.grow(&self.config, self.kind, capacity);
        Ok(self.states.add_sequence(sequence))
    }

    fn free(&mut self, seq: SeqId) -> Result<(), BackendError> {
        self.states.remove_sequence(seq).map(drop)
    }

    fn snapshot(&mut self, seq: SeqId) -> Result<SnapshotId, BackendError> {
        let read = self.states.sequence(seq)?.tokens.len();
        self.check_room(read, read)?;
        let frozen = self.states.sequence(seq)?.freeze();
        Ok(self.states.add_snapshot(frozen))
    }

    fn forget(&mut self, snapshot: SnapshotId) -> Result<(), BackendError> {
        self.states.remove_snapshot(snapshot).map(drop)
    }

    fn export(&self, snapshot: SnapshotId) -> Result<Vec<u8>, BackendError> {
        Ok(export::to_bytes(&self.config, self.kind, &self.weights, self.states.snapshot(snapshot)?))
    }

    fn import(&mut self, bytes: &[u8]) -> Result<SnapshotId, BackendError> {
        let found = export::length(&self.config, self.kind, &self.weights, bytes);
        self.check_room(found.map_err(BackendError::InvalidSnapshot)?, 0)?;
        let read = export::from_bytes(&self.config, self.kind, &self.weights, &self.held, bytes);
        let frozen = read.map_err(BackendError::InvalidSnapshot)?;
        Ok(self.states.add_snapshot(frozen))
    }

    fn state_bytes(&self, capacity: u32) -> u64 {
        state::bytes(&self.config, self.kind, capacity as usize)
    }

    fn free_bytes(&self) -> u64 {
        self.limits.state_budget.saturating_sub(self.held.held())
    }

    fn forward(&mut self, batch: &Batch) -> Result<Ticket, BackendError> {
        self.forward_tapped(batch, &mut no_tap)
    }

    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput, BackendError> {
        match self.finished.front() {
            Some((oldest, _)) if *oldest == ticket => {}
            _ => return Err(BackendError::Unknown { kind: "ticket", id: ticket.0 }),
        }
        Ok(self.finished.pop_front().map(|(_, output)| output).unwrap_or_default())
    }
}
