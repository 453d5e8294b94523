//! The contract between the engine and a device.
//!
//! One call, [`Backend::forward`], carries everything a step of the model sees: decode is many segments of
//! one token, prefill is one segment of many, a draft check is one segment of a few. `forward` enqueues and
//! returns at once on devices that can; [`Backend::wait`] delivers the results. A decode segment may ask
//! for [`Tokens::LastSampled`], so a sampled token never has to visit the host between two steps.

use std::sync::Arc;

use crate::sample::{SampleParams, Sampled};

/// A sequence that a backend holds state for: pages of K/V and a slot of recurrent state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId(pub u64);

/// A frozen copy of a sequence's state at one position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SnapshotId(pub u64);

/// A step that was enqueued; redeem it once with [`Backend::wait`], in order.
#[derive(Debug, PartialEq, Eq, Hash)]
#[must_use = "a step that is never waited for keeps its results on the device"]
pub struct Ticket(pub u64);

/// One step of the model. A sequence appears in at most one segment.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The pieces of sequences that this step advances.
    pub segments: Vec<Segment>,
}

/// Tokens of one sequence, at consecutive positions.
#[derive(Clone, Debug)]
pub struct Segment {
    /// The sequence that is advanced.
    pub seq: SeqId,
    /// Position of the first token; always the sequence's present length (state can't be rewritten).
    pub start: u32,
    /// What is fed.
    pub tokens: Tokens,
    /// What is wanted back.
    pub want: Want,
}

/// The input of a segment.
#[derive(Clone, Debug)]
pub enum Tokens {
    /// Token ids from the host; at least one.
    Ids(Vec<u32>),
    /// The one token that the previous step of this sequence sampled; it stays on the device.
    LastSampled,
}

/// The output of a segment.
#[derive(Clone, Debug)]
pub enum Want {
    /// Only the state advances (a prefill chunk that is not the last).
    Nothing,
    /// Logits, f32.
    Logits(Rows),
    /// One token, sampled from the logits of the segment's last position.
    Sample(Arc<SampleParams>),
}

/// Which positions of a segment logits are wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// The last position only.
    Last,
    /// Every position.
    All,
}

/// Results of a step: one entry per segment of the batch, in its order.
pub type StepOutput = Vec<Result<Output, SegmentError>>;

/// What a segment asked for.
#[derive(Clone, Debug)]
pub enum Output {
    /// Answer to [`Want::Nothing`].
    Nothing,
    /// Answer to [`Want::Logits`]: f32, row-major `[rows, vocab_size]`.
    Logits(Vec<f32>),
    /// Answer to [`Want::Sample`].
    Sampled(Sampled),
}

/// A fault of one segment. The other segments of the step are unaffected; the sequence is lost and must be
/// freed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SegmentError {
    /// The model's state or a logit became NaN or infinite: broken weights or an overflow. Never sampled from.
    #[error(
        "the model computed a value that is not finite at position {position}: its weights are damaged, check the files"
    )]
    NonFinite {
        /// The first position in the sequence at which it shows.
        position: u32,
    },
}

/// A fault of a call. The backend's state is as it was before the call.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum BackendError {
    /// State for another sequence does not fit the budget given at load.
    #[error(
        "not enough memory for a sequence of {capacity} tokens: it needs {needed} bytes, {available} are free"
    )]
    OutOfMemory {
        /// Tokens asked for.
        capacity: u32,
        /// Bytes of K/V and recurrent state which that takes.
        needed: u64,
        /// Bytes of the budget not yet reserved.
        available: u64,
    },
    /// A sequence can't be longer than the context given at load.
    #[error("a sequence of {capacity} tokens does not fit the context of {context}: raise --ctx-size")]
    TooLong {
        /// Tokens asked for.
        capacity: u32,
        /// [`Limits::context`].
        context: u32,
    },
    /// The id was never given out, or was freed.
    #[error("unknown {kind} {id}")]
    Unknown {
        /// `sequence`, `snapshot` or `ticket`.
        kind: &'static str,
        /// The id.
        id: u64,
    },
    /// A batch that breaks a rule of [`Batch`] or [`Segment`]; says which.
    #[error("invalid batch: {0}")]
    InvalidBatch(String),
    /// Imported state that isn't this model's or is damaged.
    #[error("snapshot can't be imported: {0}")]
    InvalidSnapshot(String),
    /// The device itself failed; nothing computed since can be trusted.
    #[error("device error: {0}")]
    Device(String),
}

/// What the engine must know of a backend to plan its steps.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Device and path, for people: `cpu (avx2, 2 threads)`.
    pub name: String,
    /// Entries of a row of logits.
    pub vocab_size: u32,
    /// Longest sequence, tokens.
    pub context: u32,
    /// Most tokens in one step, over all segments.
    pub max_batch_tokens: u32,
    /// Most segments in one step.
    pub max_segments: u32,
    /// Bytes reserved for the state of sequences and snapshots, in all.
    pub state_budget: u64,
}

/// A device that holds the weights and the state of sequences.
///
/// One thread owns it. State of a sequence lives in K/V pages and in a slot of recurrent state;
/// [`Backend::snapshot`] freezes both at the present position (K/V pages are shared, not copied), and
/// [`Backend::resume`] starts a new sequence there: that is how a prefix is reused, a conversation
/// regenerated, and `n` answers branch from one prompt.
pub trait Backend: Send {
    /// Sizes fixed at load.
    fn limits(&self) -> &Limits;

    /// Starts an empty sequence and reserves memory for `capacity` tokens, so that it can't fail for lack of
    /// it half way.
    fn create(&mut self, capacity: u32) -> Result<SeqId, BackendError>;

    /// Starts a sequence at a snapshot's position, with memory for `capacity` tokens in all.
    fn resume(&mut self, snapshot: SnapshotId, capacity: u32) -> Result<SeqId, BackendError>;

    /// Ends a sequence and returns its memory.
    fn free(&mut self, seq: SeqId) -> Result<(), BackendError>;

    /// Freezes the state of a sequence at its present position, for [`Backend::resume`].
    fn snapshot(&mut self, seq: SeqId) -> Result<SnapshotId, BackendError>;

    /// Forgets a snapshot. Sequences resumed from it are unaffected.
    fn forget(&mut self, snapshot: SnapshotId) -> Result<(), BackendError>;

    /// A snapshot as bytes, for a cache on disk: tied to this model and format, with a checksum.
    fn export(&self, snapshot: SnapshotId) -> Result<Vec<u8>, BackendError>;

    /// The reverse of [`Backend::export`]; refuses bytes of another model or format, or damaged ones.
    fn import(&mut self, bytes: &[u8]) -> Result<SnapshotId, BackendError>;

    /// Bytes of state that a new sequence of `capacity` tokens reserves.
    fn state_bytes(&self, capacity: u32) -> u64;

    /// Bytes of the state budget that are not reserved. Recurrent state counts for each sequence and each snapshot, K/V
    /// pages that several of them share may count once, until the last lets go.
    fn free_bytes(&self) -> u64;

    /// Steps that may be enqueued before the oldest is waited for: 1, or more on devices where
    /// [`Backend::forward`] returns before the step is done.
    fn steps_in_flight(&self) -> usize {
        1
    }

    /// Enqueues a step. On an error nothing was enqueued and no state has changed.
    fn forward(&mut self, batch: &Batch) -> Result<Ticket, BackendError>;

    /// Results of the oldest step not yet waited for; `ticket` must be that step's.
    fn wait(&mut self, ticket: Ticket) -> Result<StepOutput, BackendError>;
}
