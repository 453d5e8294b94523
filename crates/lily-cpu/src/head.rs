//! Final norm, lm_head and sampling, for the rows that are wanted.

use lily_model::backend::{Batch, Output, Rows, SegmentError, StepOutput, Want};
use lily_model::sample::{first_non_finite, sample};
use lily_model::weights::Weights;

use smallvec::SmallVec;

use crate::forward::Step;
use crate::matmul::product;
use crate::state::Sequence;

/// What each segment asked for. `x` is the residual stream behind the last layer, `[tokens, hidden]`; a
/// sampled token is kept in its sequence.
pub fn forward(
    step: &Step<'_>,
    w: &Weights,
    batch: &Batch,
    x: &[f32],
    sequences: &mut [Sequence],
) -> StepOutput {
    let (hidden, vocab) = (step.config.hidden_size, step.config.vocab_size);
    let counts: SmallVec<[usize; 4]> =
        batch.segments.iter().zip(step.rows).map(|(segment, rows)| wanted(&segment.want, rows.len)).collect();
    let mut selected = step.device.buffers.floats(counts.iter().sum::<usize>() * hidden);
    let mut rest = &mut selected[..];
    for (rows, count) in step.rows.iter().zip(&counts) {
        let end = rows.first + rows.len;
        let (mine, others) = rest.split_at_mut(count * hidden);
        mine.copy_from_slice(&x[(end - count) * hidden..end * hidden]);
        rest = others;
    }
    let mut logits = product(step.device, &w.lm_head, &step.norm(&selected, &w.norm));
    let mut rest = &mut logits[..];
    let mut outputs = Vec::with_capacity(sequences.len());
    for (i, sequence) in sequences.iter_mut().enumerate() {
        let (mine, others) = rest.split_at_mut(counts[i] * vocab);
        rest = others;
        let rows = step.rows[i];
        let broken = broken_position(&x[rows.range(hidden)], hidden, rows.start)
            .or_else(|| broken_position(mine, vocab, rows.start + rows.len - counts[i]));
        outputs.push(match broken {
            Some(position) => Err(SegmentError::NonFinite { position }),
            None => Ok(output(&batch.segments[i].want, mine, sequence)),
        });
    }
    outputs
}

/// Rows of logits that a segment of `len` tokens wants: its last ones.
fn wanted(want: &Want, len: usize) -> usize {
    match want {
        Want::Nothing => 0,
        Want::Logits(Rows::All) => len,
        Want::Logits(Rows::Last) | Want::Sample(_) => 1,
    }
}

/// Position of the first row with a value that is not finite; rows start at position `start`.
fn broken_position(rows: &[f32], width: usize, start: usize) -> Option<u32> {
    first_non_finite(rows).map(|i| (start + i as usize / width) as u32)
}

fn output(want: &Want, logits: &mut [f32], sequence: &mut Sequence) -> Output {
    match want {
        Want::Nothing => Output::Nothing,
        Want::Logits(_) => Output::Logits(logits.to_vec()),
        Want::Sample(params) => {
            let sampled = sample(logits, &sequence.tokens, params);
            sequence.sampled = Some(sampled.token);
            Output::Sampled(sampled)
        }
    }
}
