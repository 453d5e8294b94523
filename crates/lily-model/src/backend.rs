//! The contract between the engine and a device.
//!
//! One call, [`Backend::forward`], carries everything a step of the model sees: decode is many segments of
//! one token, prefill is one segment of many, a draft check is one segment of a few. `forward` enqueues and
//! returns at once on devices that can; [`Backend::wait`] delivers the results. A decode segment may ask
//! for [`Tokens::LastSampled`], so a sampled token never has to visit the host between two steps.

use std::collections::HashSet;
use std::sync::Arc;

use crate::sample::{MOST_BIASES, SampleParams, Sampled};

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

impl Tokens {
    /// How many.
    pub fn count(&self) -> usize {
        match self {
            Self::Ids(ids) => ids.len(),
            Self::LastSampled => 1,
        }
    }
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
        "the model computed a value that is not finite at position {position}: its weights are damaged, or this device's numbers are too small for it; check the files, or try --device cpu"
    )]
    NonFinite {
        /// The first position in the sequence at which it shows.
        position: u32,
    },
    /// The device gave up the step that the segment was in. Other sequences' state is as it was.
    #[error("the device failed: {0}")]
    Device(String),
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
        /// Bytes that a sequence could have: [`Backend::free_bytes`], or less on devices whose memory has parts that can't
        /// stand in for each other.
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

impl Limits {
    /// Refuses a sequence that is longer than the context: [`BackendError::TooLong`].
    pub fn check_length(&self, capacity: usize) -> Result<(), BackendError> {
        let context = self.context;
        match u32::try_from(capacity).unwrap_or(u32::MAX) {
            capacity if capacity > context => Err(BackendError::TooLong { capacity, context }),
            _ => Ok(()),
        }
    }
}

/// How far a sequence has come, for [`Batch::check`].
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Tokens fed so far.
    pub len: usize,
    /// Most tokens that memory is reserved for.
    pub capacity: usize,
    /// Whether its last step sampled a token.
    pub sampled: bool,
}

impl Batch {
    /// Checks every rule that holds for all backends, so that a batch is refused before anything changes. `progress`
    /// knows the backend's sequences.
    pub fn check(
        &self,
        limits: &Limits,
        progress: impl Fn(SeqId) -> Option<Progress>,
    ) -> Result<(), BackendError> {
        let invalid = |problem: String| Err(BackendError::InvalidBatch(problem));
        let (segments, most) = (self.segments.len(), limits.max_segments);
        if segments > most as usize {
            return invalid(format!("{segments} segments in a step, the most is {most}"));
        }
        let mut seen = HashSet::new();
        for segment in &self.segments {
            let (seq, id) = (segment.seq, segment.seq.0);
            let sequence = progress(seq).ok_or(BackendError::Unknown { kind: "sequence", id })?;
            if !seen.insert(seq) {
                return invalid(format!("sequence {id} has two segments"));
            }
            segment.check(limits, sequence).or_else(|problem| invalid(format!("sequence {id} {problem}")))?;
        }
        let tokens = self.segments.iter().map(|segment| segment.tokens.count()).sum::<usize>();
        let most = limits.max_batch_tokens;
        if tokens > most as usize {
            return invalid(format!("{tokens} tokens in a step, the most is {most}"));
        }
        Ok(())
    }
}

impl Segment {
    /// Says what is wrong with it.
    fn check(&self, limits: &Limits, sequence: Progress) -> Result<(), String> {
        let Progress { len, capacity, sampled } = sequence;
        let (start, end) = (self.start, len + self.tokens.count());
        if start as usize != len {
            return Err(format!("continues at {start}, but has {len} tokens"));
        }
        match &self.tokens {
            Tokens::LastSampled if !sampled => return Err("has sampled nothing yet".to_owned()),
            Tokens::Ids(ids) if ids.is_empty() => return Err("has a segment without tokens".to_owned()),
            Tokens::Ids(ids) => {
                let vocab = limits.vocab_size;
                if let Some(token) = ids.iter().find(|&&token| token >= vocab) {
                    return Err(format!("has token {token}, the vocabulary has {vocab}"));
                }
            }
            Tokens::LastSampled => {}
        }
        if end > capacity {
            return Err(format!("would have {end} tokens, its capacity is {capacity}"));
        }
        if let Want::Sample(params) = &self.want
            && params.logit_bias.len() > MOST_BIASES
        {
            let found = params.logit_bias.len();
            return Err(format!("has {found} logit biases, the most is {MOST_BIASES}"));
        }
        Ok(())
    }
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
    /// pages that several of them share may count once, until the last lets go. A device may have used up one kind of
    /// state, and refuse a sequence for it, while bytes of the other are free.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(seq: u64, start: u32, tokens: Tokens) -> Segment {
        Segment { seq: SeqId(seq), start, tokens, want: Want::Nothing }
    }

    fn ids(seq: u64, start: u32, ids: &[u32]) -> Segment {
        segment(seq, start, Tokens::Ids(ids.to_vec()))
    }

    /// Sequences 1 to 3 have two tokens and room for 8; 2 has sampled one more.
    fn check(segments: &[Segment]) -> Result<(), BackendError> {
        let limits = Limits {
            name: "test".to_owned(),
            vocab_size: 384,
            context: 8,
            max_batch_tokens: 9,
            max_segments: 2,
            state_budget: 0,
        };
        let progress = |SeqId(id): SeqId| {
            (1..=3).contains(&id).then_some(Progress { len: 2, capacity: 8, sampled: id == 2 })
        };
        Batch { segments: segments.to_vec() }.check(&limits, progress)
    }

    #[test]
    fn a_batch_that_keeps_the_rules_passes() {
        assert_eq!(check(&[]), Ok(()));
        assert_eq!(check(&[ids(1, 2, &[0, 1, 2, 3, 4, 383]), ids(2, 2, &[7, 7, 7])]), Ok(()));
        assert_eq!(check(&[segment(2, 2, Tokens::LastSampled), ids(3, 2, &[5])]), Ok(()));
    }

    #[test]
    fn a_batch_that_breaks_a_rule_is_refused_by_name() {
        let params = SampleParams { logit_bias: vec![(1, 0.5); 2049].into(), ..SampleParams::greedy() };
        let biased = Segment { want: Want::Sample(params.into()), ..ids(1, 2, &[3]) };
        let cases = [
            (vec![biased], "sequence 1 has 2049 logit biases, the most is 2048"),
            (vec![ids(1, 0, &[3])], "sequence 1 continues at 0, but has 2 tokens"),
            (vec![ids(1, 2, &[])], "sequence 1 has a segment without tokens"),
            (vec![ids(1, 2, &[1; 7])], "sequence 1 would have 9 tokens, its capacity is 8"),
            (vec![ids(3, 2, &[383, 384])], "sequence 3 has token 384, the vocabulary has 384"),
            (vec![segment(1, 2, Tokens::LastSampled)], "sequence 1 has sampled nothing yet"),
            (vec![ids(1, 2, &[1]), ids(1, 2, &[1])], "sequence 1 has two segments"),
            (vec![ids(1, 2, &[1; 5]), ids(2, 2, &[1; 5])], "10 tokens in a step, the most is 9"),
            (vec![ids(1, 2, &[1]), ids(2, 2, &[1]), ids(3, 2, &[1])], "3 segments in a step, the most is 2"),
        ];
        for (segments, problem) in cases {
            assert_eq!(check(&segments), Err(BackendError::InvalidBatch(problem.to_owned())));
        }
        assert_eq!(check(&[ids(4, 2, &[1])]), Err(BackendError::Unknown { kind: "sequence", id: 4 }));
    }
}
