//! A request that runs: what its sequence has read, and what it is to do next.

use std::collections::VecDeque;

use lily_model::backend::{Rows, Segment, SeqId, SnapshotId, Tokens, Want};

use super::job::Job;

/// Most tokens of a chunk whose logits are all wanted: as f32, over 250,000 tokens, they take 64 MB.
const SCORED_CHUNK: u32 = 64;

/// A request that runs.
pub(super) struct Sequence {
    pub seq: SeqId,
    /// `None` when the request has ended; then the sequence is freed as soon as no step works on it.
    pub job: Option<Box<Job>>,
    /// Bytes of state that are reserved for it.
    pub reserved: u64,
    /// Tokens fed, over all steps that were enqueued.
    pub fed: u32,
    /// Enqueued steps that work on it.
    pub in_flight: usize,
    /// The model has failed on it, so its state is worth nothing.
    pub broken: bool,
    /// Whether the cache may learn from it.
    pub is_cached: bool,
    /// Snapshots taken behind steps that are still in flight, with their positions.
    pub pending: VecDeque<(u32, SnapshotId)>,
    /// The prompt, then every token sampled.
    tokens: Vec<u32>,
    prompt: u32,
    /// Positions in the prompt to take snapshots at, ascending. No chunk goes past one.
    stops: Vec<u32>,
    /// Tokens sampled, over all steps that were enqueued.
    sampled: u32,
}

/// What a segment of a step does for its sequence.
pub(super) struct Advance {
    pub seq: SeqId,
    /// Tokens of the prompt read after it, if it reads any.
    pub prefilled: Option<u32>,
    pub samples: bool,
    /// Rows of logits that it asks for, one for each of its tokens; 0: none.
    pub rows: u32,
}

impl Sequence {
    /// A sequence that holds the first `cached` tokens of the job's prompt. `interval` is the distance of
    /// snapshots in a long prompt; `None`: there is no cache.
    pub fn new(seq: SeqId, mut job: Box<Job>, cached: u32, reserved: u64, interval: Option<u32>) -> Self {
        let tokens = std::mem::take(&mut job.prompt);
        let prompt = tokens.len() as u32;
        let interval = interval.filter(|_| job.cache_prompt);
        let stops = interval.map_or_else(Vec::new, |interval| stops(&job.boundaries, prompt, interval));
        Self {
            seq,
            job: Some(job),
            reserved,
            fed: cached,
            in_flight: 0,
            broken: false,
            is_cached: interval.is_some(),
            pending: VecDeque::new(),
            tokens,
            prompt,
            stops,
            sampled: 0,
        }
    }

    /// Whether a part of the prompt is still to be fed.
    pub fn is_reading(&self) -> bool {
        self.job.is_some() && self.fed < self.prompt
    }

    /// Whether its request has ended.
    pub fn is_over(&self) -> bool {
        self.job.is_none()
    }

    /// All tokens known so far: the prompt and what was sampled.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The first `length` of these; none if there are fewer.
    pub fn first(&self, length: u32) -> &[u32] {
        self.tokens.get(..length as usize).unwrap_or_default()
    }

    /// What it has been fed of the prompt.
    pub fn prompt_fed(&self) -> &[u32] {
        self.first(self.fed.min(self.prompt))
    }

    /// A token was sampled.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Whether a snapshot is to be taken where the enqueued steps have brought it.
    pub fn is_at_stop(&self) -> bool {
        self.stops.binary_search(&self.fed).is_ok()
    }

    /// Whether its next token could be drawn, if it is known how.
    pub fn is_due(&self) -> bool {
        let due = |job: &Job| self.sampled < job.max_tokens() && !(job.is_guided() && self.in_flight > 0);
        !self.is_reading() && self.job.as_deref().is_some_and(due)
    }

    /// The next token, if one is due and it is known how to draw it.
    pub fn decode(&mut self) -> Option<(Segment, Advance)> {
        let job = self.job.as_ref().filter(|_| self.is_due())?;
        let want = Want::Sample(job.params()?);
        Some(self.advance(1, Tokens::LastSampled, want, None))
    }

    /// The next chunk of the prompt, of so many tokens at most, if there is one. Where the prompt's tokens are
    /// scored, the last one comes by itself: the others' logits predict the prompt, its own the answer.
    pub fn prefill(&mut self, chunk: u32) -> Option<(Segment, Advance)> {
        let job = self.job.as_ref().filter(|_| self.fed < self.prompt)?;
        let scored = job.scores_prompt() && self.fed + 1 < self.prompt;
        let (chunk, goal) =
            if scored { (chunk.min(SCORED_CHUNK), self.prompt - 1) } else { (chunk, self.prompt) };
        let stop = self.stops.iter().find(|&&stop| stop > self.fed).map_or(goal, |&stop| stop.min(goal));
        let end = self.fed.saturating_add(chunk).min(stop);
        let tokens = self.tokens.get(self.fed as usize..end as usize)?.to_vec();
        let want = if scored {
            Want::Logits(Rows::All)
        } else if end == self.prompt && job.max_tokens() > 0 {
            Want::Sample(job.params()?)
        } else {
            Want::Nothing
        };
        Some(self.advance(end - self.fed, Tokens::Ids(tokens), want, Some(end)))
    }

    /// Reports the tokens of the prompt that rows of logits over `vocab` tokens predict. The last row is that of the
    /// token before position `done`.
    pub fn score(&self, logits: &[f32], vocab: usize, done: u32) {
        let Some(job) = &self.job else { return };
        let rows = logits.chunks_exact(vocab);
        let first = (done as usize + 1).saturating_sub(rows.len());
        for (row, &id) in rows.zip(self.tokens.get(first..).unwrap_or_default()) {
            job.prompt_token(id, row);
        }
    }

    fn advance(
        &mut self,
        count: u32,
        tokens: Tokens,
        want: Want,
        prefilled: Option<u32>,
    ) -> (Segment, Advance) {
        let samples = matches!(want, Want::Sample(_));
        let rows = if matches!(want, Want::Logits(_)) { count } else { 0 };
        let segment = Segment { seq: self.seq, start: self.fed, tokens, want };
        self.fed += count;
        self.sampled += u32::from(samples);
        self.in_flight += 1;
        (segment, Advance { seq: self.seq, prefilled, samples, rows })
    }
}

/// Where snapshots of a prompt are taken: at its boundaries, or before its last token if it has none, and every
/// `interval` tokens. Never at its end: the last token must be fed to get the next one's logits.
fn stops(boundaries: &[u32], prompt: u32, interval: u32) -> Vec<u32> {
    let last = prompt.saturating_sub(1);
    let boundaries = if boundaries.is_empty() { &[last] } else { boundaries };
    let regular = (interval..prompt).step_by(interval.max(1) as usize);
    let mut stops: Vec<u32> = boundaries.iter().copied().chain(regular).collect();
    stops.retain(|stop| (1..prompt).contains(stop));
    stops.sort_unstable();
    stops.dedup();
    stops
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_lie_inside_the_prompt_in_order() {
        assert_eq!(stops(&[], 10, 100), [9]);
        assert!(stops(&[], 1, 100).is_empty());
        assert_eq!(stops(&[7, 3, 0, 10, 12, 7], 10, 4), [3, 4, 7, 8]);
        assert_eq!(stops(&[10], 10, 5), [5]);
    }
}
