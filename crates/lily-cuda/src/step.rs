//! What the host tells the device about a step; `kernels/state.cu` and `kernels/head.cu` have the same structures.

use lily_model::backend::{Batch, Rows, Tokens, Want};
use lily_model::sample::{MOST_BIASES, SampleParams};

use crate::gdn::{CHUNK_ROWS, PENDING};
use crate::state::Sequence;

/// Not there.
pub const NONE: u32 = u32::MAX;

/// Most segments in a step.
pub const MAX_SEGMENTS: usize = 32;

const SEGMENT: usize = 40;
const DRAW: usize = 64;
const ROW: usize = 16;

/// Where the parts of a step lie in its buffer.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Rows that fit.
    pub rows: usize,
    /// Words of a token mask.
    pub mask_words: usize,
}

impl Layout {
    /// Offset of the draws; segments are at 0.
    pub fn draws(&self) -> usize {
        MAX_SEGMENTS * SEGMENT
    }
    /// Offset of the rows.
    pub fn row_table(&self) -> usize {
        self.draws() + MAX_SEGMENTS * DRAW
    }
    /// Bytes of a step of so many rows, but for masks and biases.
    pub fn head(&self, rows: usize) -> usize {
        self.row_table() + rows * ROW
    }
    /// Offset of the masks.
    pub fn masks(&self) -> usize {
        self.head(self.rows)
    }
    /// Offset of the biases.
    pub fn biases(&self) -> usize {
        self.masks() + MAX_SEGMENTS * self.mask_words * 4
    }
    /// Most biases of a step.
    pub fn most_biases(&self) -> usize {
        MAX_SEGMENTS * MOST_BIASES
    }
    /// Bytes of all.
    pub fn bytes(&self) -> usize {
        self.biases() + self.most_biases() * 8
    }
}

/// A step in numbers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Tokens.
    pub rows: usize,
    /// Segments.
    pub segments: usize,
    /// Segments of at least [`CHUNK_ROWS`] tokens.
    pub long: usize,
    /// Rows of logits.
    pub logits: usize,
    /// Every segment is one token and draws one: what graphs are recorded for.
    pub decode: bool,
    /// Updates of states may be left in logs.
    pub defer: bool,
    /// Bytes of the buffer up to the last row that is used.
    pub head: usize,
    /// Biases that were written.
    pub biases: usize,
    /// Masks that were written.
    pub masks: usize,
}

impl Plan {
    /// A step in which so many sequences decode a token each.
    pub fn decoding(sequences: usize) -> Self {
        Self { rows: sequences, segments: sequences, logits: sequences, decode: true, ..Self::default() }
    }

    /// A step that reads so many tokens of one prompt and wants nothing of them.
    pub fn reading(tokens: usize) -> Self {
        Self { rows: tokens, segments: 1, long: usize::from(tokens >= CHUNK_ROWS), ..Self::default() }
    }
}

/// Rows of logits that a segment of `len` tokens wants: its last ones.
pub fn wanted(want: &Want, len: usize) -> usize {
    match want {
        Want::Nothing => 0,
        Want::Logits(Rows::All) => len,
        Want::Logits(Rows::Last) | Want::Sample(_) => 1,
    }
}

/// Whether a segment of so many rows leaves its update in its sequence's log, in a step that may (`defer`).
pub fn defers(sequence: &Sequence, rows: usize, defer: bool) -> bool {
    defer && rows == 1 && (sequence.pending as usize) < PENDING
}

/// Writes a step into `out`; `sequences` are those of the batch's segments. `defer`: it may leave updates of states in logs.
pub fn write(out: &mut [u8], layout: &Layout, batch: &Batch, sequences: &[&Sequence], defer: bool) -> Plan {
    let mut plan = Plan { segments: batch.segments.len(), decode: true, defer, ..Plan::default() };
    let mut put = |at: usize, words: &[u32]| {
        for (i, w) in words.iter().enumerate() {
            out[at + 4 * i..at + 4 * i + 4].copy_from_slice(&w.to_le_bytes());
        }
    };
    for (i, (segment, sequence)) in batch.segments.iter().zip(sequences).enumerate() {
        let rows = segment.tokens.count();
        let want = wanted(&segment.want, rows);
        let (ids, source) = match &segment.tokens {
            Tokens::Ids(ids) => (&ids[..], NONE),
            Tokens::LastSampled => (&[][..], sequence.lease.slot),
        };
        let sample = matches!(segment.want, Want::Sample(_));
        plan.decode &= sample && rows == 1;
        let (first, start) = (plan.rows as u32, sequence.len as u32);
        put(
            i * SEGMENT,
            &[
                first,
                rows as u32,
                start,
                sequence.lease.slot,
                source,
                sequence.parity,
                want as u32,
                u32::from(sample),
                sequence.pending,
                u32::from(defers(sequence, rows, defer)),
            ],
        );
        for r in 0..rows {
            let logits = if r + want >= rows { (plan.logits + r + want - rows) as u32 } else { NONE };
            let token = ids.get(r).copied().unwrap_or(0);
            put(layout.row_table() + (plan.rows + r) * ROW, &[token, start + r as u32, i as u32, logits]);
        }
        plan.rows += rows;
        plan.long += usize::from(rows >= CHUNK_ROWS);
        plan.logits += want;
        if let Want::Sample(params) = &segment.want {
            let (bias, mask) = (plan.biases, plan.masks);
            for (token, value) in params.logit_bias.iter() {
                put(layout.biases() + plan.biases * 8, &[*token, value.to_bits()]);
                plan.biases += 1;
            }
            if let Some(words) = &params.mask {
                let at = layout.masks() + mask * layout.mask_words * 4;
                put(at, &words[..words.len().min(layout.mask_words)]);
                // What a short mask does not reach is forbidden.
                put(at + 4 * words.len(), &vec![0; layout.mask_words.saturating_sub(words.len())]);
                plan.masks += 1;
            }
            let mask = params.mask.as_ref().map(|_| (mask * layout.mask_words) as u32);
            put(layout.draws() + i * DRAW, &draw(params, bias as u32, mask));
        }
    }
    plan.head = layout.head(plan.rows);
    plan
}

fn draw(p: &SampleParams, bias: u32, mask: Option<u32>) -> [u32; 16] {
    [
        p.temperature.to_bits(),
        p.top_p.to_bits(),
        p.min_p.to_bits(),
        p.repetition_penalty.to_bits(),
        p.presence_penalty.to_bits(),
        p.frequency_penalty.to_bits(),
        p.top_k,
        p.generated_from,
        p.seed as u32,
        (p.seed >> 32) as u32,
        bias,
        p.logit_bias.len() as u32,
        mask.unwrap_or(NONE),
        u32::from(p.takes_largest()),
        0,
        0,
    ]
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use lily_model::backend::{Segment, SeqId, Tokens};
    use lily_model::pool::Lease;

    use super::*;

    fn sequence(slot: u32, len: usize) -> Sequence {
        Sequence {
            lease: Lease { slot, pages: vec![] },
            len,
            capacity: 99,
            parity: 1,
            sampled: true,
            pending: 2,
        }
    }

    #[test]
    fn a_step_is_written_as_the_kernels_read_it() {
        let params = SampleParams {
            mask: Some(Arc::new([7])),
            logit_bias: Arc::new([(3, 1.5)]),
            ..SampleParams::greedy()
        };
        let segment = |tokens: Tokens, start, want| Segment { seq: SeqId(1), start, tokens, want };
        let batch = Batch {
            segments: vec![
                segment(Tokens::Ids(vec![5, 6, 7]), 10, Want::Logits(Rows::All)),
                segment(Tokens::LastSampled, 64, Want::Sample(params.into())),
            ],
        };
        let layout = Layout { rows: 8, mask_words: 3 };
        let mut out = vec![0xaa; layout.bytes()];
        let (a, b) = (sequence(4, 10), sequence(2, 64));
        let plan = write(&mut out, &layout, &batch, &[&a, &b], true);
        assert_eq!((plan.rows, plan.segments, plan.logits, plan.decode), (4, 2, 4, false));
        let word = |at: usize| u32::from_le_bytes([out[at], out[at + 1], out[at + 2], out[at + 3]]);
        let words = |at: usize, n: usize| (0..n).map(|i| word(at + 4 * i)).collect::<Vec<_>>();
        assert_eq!(words(0, 10), [0, 3, 10, 4, NONE, 1, 3, 0, 2, 0]);
        assert_eq!(words(SEGMENT, 10), [3, 1, 64, 2, 2, 1, 1, 1, 2, 1]);
        assert_eq!(words(layout.row_table(), 4), [5, 10, 0, 0]);
        assert_eq!(words(layout.row_table() + 3 * ROW, 4), [0, 64, 1, 3]);
        assert_eq!(words(layout.draws() + DRAW + 40, 4), [0, 1, 0, 0]);
        assert_eq!(words(layout.masks(), 3), [7, 0, 0]);
        assert_eq!(words(layout.biases(), 2), [3, 1.5f32.to_bits()]);
    }

    /// What profiles and lists of launches are made of is what the backend would do.
    #[test]
    fn plans_without_a_batch_launch_what_such_batches_do() {
        let layout = Layout { rows: CHUNK_ROWS, mask_words: 3 };
        let (a, b) = (sequence(0, 1), sequence(1, 1));
        let segment = |tokens: Tokens, want| Segment { seq: SeqId(1), start: 1, tokens, want };
        let sampled = || segment(Tokens::LastSampled, Want::Sample(SampleParams::greedy().into()));
        let chunk = |rows| segment(Tokens::Ids(vec![1; rows]), Want::Nothing);
        for (segments, plan) in [
            (vec![sampled(), sampled()], Plan::decoding(2)),
            (vec![chunk(3)], Plan::reading(3)),
            (vec![chunk(CHUNK_ROWS)], Plan::reading(CHUNK_ROWS)),
        ] {
            let sequences = &[&a, &b][..segments.len()];
            let written = write(&mut vec![0; layout.bytes()], &layout, &Batch { segments }, sequences, false);
            assert_eq!(Plan { head: 0, ..written }, plan);
        }
    }

    #[test]
    fn only_single_tokens_that_draw_are_decoding() {
        let greedy = Want::Sample(SampleParams::greedy().into());
        let segment = |tokens: Tokens, want: &Want| Batch {
            segments: vec![Segment { seq: SeqId(1), start: 1, tokens, want: want.clone() }],
        };
        let layout = Layout { rows: 8, mask_words: 3 };
        let mut out = vec![0; layout.bytes()];
        let s = sequence(0, 1);
        let mut plan = |batch: &Batch| write(&mut out, &layout, batch, &[&s], false).decode;
        assert!(plan(&segment(Tokens::LastSampled, &greedy)));
        assert!(plan(&segment(Tokens::Ids(vec![1]), &greedy)));
        assert!(!plan(&segment(Tokens::Ids(vec![1, 2]), &greedy)));
        assert!(!plan(&segment(Tokens::Ids(vec![1]), &Want::Nothing)));
    }
}
