//! Draws that the kernels are tested with, and what lily-model's sampler makes of them.

use std::sync::Arc;

use lily_model::sample::{SampleParams, sample};

use crate::draw::Draw;

/// How a segment's next token is drawn, and from what.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// How.
    pub params: SampleParams,
    /// Every token of the sequence, the step's too.
    pub history: Vec<u32>,
    /// The kernels take the last of them from the step's input, and not from the host.
    pub owed: bool,
}

impl Drawn {
    /// One of several kinds, by number: the largest logit, as it is and changed; any; those that a filter keeps, or all filters.
    /// `tokens`: those of the step, behind `position` others.
    pub fn random(
        kind: usize,
        position: usize,
        tokens: &[u32],
        vocab: usize,
        random: &mut fastrand::Rng,
    ) -> Self {
        let before = (0..position).map(|_| random.u32(0..vocab as u32));
        let history: Vec<u32> = before.chain(tokens.iter().copied()).collect();
        let mut biases: Vec<(u32, f32)> =
            (0..9).map(|_| (random.u32(0..vocab as u32), random.f32() * 4.0 - 2.0)).collect();
        // Of a token that is in the sequence, and one twice.
        biases.extend(history.last().map(|&token| (token, 0.25)));
        biases.push(biases[0]);
        let changed = SampleParams {
            repetition_penalty: 1.3,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            generated_from: (history.len() / 2) as u32,
            logit_bias: biases.into(),
            mask: Some(
                (0..vocab.div_ceil(32)).map(|_| random.u32(..) | random.u32(..)).collect::<Arc<[u32]>>(),
            ),
            seed: random.u64(..),
            ..SampleParams::greedy()
        };
        let plain = SampleParams { seed: random.u64(..), ..SampleParams::greedy() };
        let params = match kind % 8 {
            0 => plain,
            1 => changed,
            2 => SampleParams { temperature: 1.5, ..plain },
            3 => SampleParams { temperature: 0.7, ..changed },
            4 => SampleParams { temperature: 1.2, top_k: 20, ..plain },
            5 => SampleParams { temperature: 1.2, top_p: 0.8, ..plain },
            6 => SampleParams { temperature: 1.2, min_p: 0.02, ..plain },
            _ => SampleParams { temperature: 0.9, top_k: 40, top_p: 0.95, min_p: 0.01, ..changed },
        };
        Self { params, history, owed: tokens.len() == 1 }
    }

    /// As the kernels read it.
    pub fn draw(&self, vocab: usize) -> Draw {
        let known = self.history.len() - usize::from(self.owed);
        Draw::new(&self.params, &self.history[..known], self.owed, vocab)
    }

    /// The token that follows, by lily-model. `logits`: of the last token.
    pub fn token(&self, logits: &[f32]) -> u32 {
        sample(&mut logits.to_vec(), &self.history, &self.params).token
    }
}
