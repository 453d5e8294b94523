//! Waits for steps and reads what they left.

use lily_model::backend::{Output, SegmentError, SeqId, StepOutput, Want};
use lily_model::sample::{Sampled, first_non_finite, logprobs};

use super::{Asked, Enqueued, Last, MetalBackend, Pending, needs_logits};
use crate::device::{Device, Place};
use crate::load::Flight;

impl<D: Device> MetalBackend<D> {
    /// Reads the results of the pending steps up to the last one that works on a sequence.
    pub(super) fn settle(&mut self, seq: SeqId) {
        let is_of = |p: &Pending| p.outputs.is_none() && p.step.asked.iter().any(|a| a.seq == seq);
        if let Some(last) = self.pending.iter().rposition(is_of) {
            self.harvest_to(last);
        }
    }

    /// Reads the results of the pending steps up to this one.
    pub(super) fn harvest_to(&mut self, last: usize) {
        for i in 0..=last {
            if self.pending[i].outputs.is_none() {
                let outputs = self.harvest(i);
                self.pending[i].outputs = Some(outputs);
            }
        }
    }

    /// Waits for a pending step, whose predecessors were harvested, and reads its results.
    fn harvest(&mut self, index: usize) -> StepOutput {
        let pending = &mut self.pending[index];
        let Enqueued { asked, submissions, failed } = std::mem::take(&mut pending.step);
        let flight = self.loaded.flights[pending.flight];
        // All of them: what ran behind one that failed used the same memory.
        let ended = submissions.iter().map(|&s| self.device.wait(s)).fold(Ok(()), Result::and);
        if let Some(&last) = submissions.last() {
            self.device.retire(last);
        }
        let outcome = ended.map_err(|e| e.to_string()).and(failed.map_or(Ok(()), Err));
        let outcome = outcome.map_err(SegmentError::Device);
        asked.into_iter().enumerate().map(|(i, asked)| self.output(i, asked, &flight, &outcome)).collect()
    }

    /// The result of a segment, of which its sequence learns too.
    fn output(
        &mut self,
        segment: usize,
        mut asked: Asked,
        flight: &Flight,
        outcome: &Result<(), SegmentError>,
    ) -> Result<Output, SegmentError> {
        outcome.clone()?;
        self.check_finite(&asked, flight)?;
        if needs_logits(&asked.want) {
            self.read_logits(&mut asked, flight);
        }
        let vocab = self.config.vocab_size;
        if let Some(at) = first_non_finite(&asked.logits) {
            // One row, or one for each token.
            let first = if asked.logits.len() == vocab { asked.rows.len() - 1 } else { 0 };
            return Err(SegmentError::NonFinite {
                position: asked.start + (first + at as usize / vocab) as u32,
            });
        }
        let params = match asked.want {
            Want::Nothing => return Ok(Output::Nothing),
            Want::Logits(_) => return Ok(Output::Logits(asked.logits)),
            Want::Sample(params) => params,
        };
        if self.word(flight.broken(segment)) != 0 {
            return Err(SegmentError::NonFinite { position: asked.start + asked.rows.len() as u32 - 1 });
        }
        let token = self.word(flight.next(segment));
        let logprobs = params.logprobs.map(|n| logprobs(&asked.logits, token, n));
        let sampled = Sampled { token, logprobs };
        self.learn(asked.seq, flight.next(segment), sampled.token);
        Ok(Output::Sampled(sampled))
    }

    /// Tells a sequence which token was sampled at a place.
    fn learn(&mut self, seq: SeqId, place: Place, token: u32) {
        let Ok(sequence) = self.states.sequence_mut(seq) else { return };
        if sequence.owed == Some(place) {
            sequence.owed = None;
            sequence.tokens.push(token);
        }
        if sequence.last == Last::Pending(place) {
            sequence.last = Last::Known(token);
        }
    }

    /// Finds the first token behind which the residual stream is not finite: the state is lost from there on.
    fn check_finite(&self, asked: &Asked, flight: &Flight) -> Result<(), SegmentError> {
        let mut x = vec![0; 4 * self.config.hidden_size];
        for row in asked.rows.clone() {
            self.device.read(flight.x(row), &mut x);
            if x.as_chunks::<4>().0.iter().any(|b| !f32::from_le_bytes(*b).is_finite()) {
                let position = asked.start + (row - asked.rows.start) as u32;
                return Err(SegmentError::NonFinite { position });
            }
        }
        Ok(())
    }

    /// Moves the rows of logits that a segment has in a flight to the host.
    pub(super) fn read_logits(&self, asked: &mut Asked, flight: &Flight) {
        let mut bytes = vec![0; 4 * self.config.vocab_size];
        for row in std::mem::take(&mut asked.logit_rows) {
            self.device.read(flight.logits(row), &mut bytes);
            asked.logits.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
        }
    }

    fn word(&self, at: Place) -> u32 {
        let mut bytes = [0; 4];
        self.device.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }
}
