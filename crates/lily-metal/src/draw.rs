//! What the kernels of `sample.metal` are told of a draw.

use lily_model::sample::{MOST_BIASES, SampleParams};

/// Words of a `Draw`.
pub const WORDS: usize = 16;
/// Words of a `Change`.
pub const CHANGE_WORDS: usize = 4;

/// Logits of which the first is known: `DRAW_GROUP` of `sample.metal`.
pub const GROUP: usize = 32;
/// Words of a `Best`, one for each of them.
pub const BEST_WORDS: usize = 3;

/// Changes that a draw may need, in a sequence of so many tokens.
pub fn most_changes(vocab: usize, capacity: usize) -> usize {
    vocab.min(capacity + MOST_BIASES)
}

/// Words of a mask.
pub fn mask_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

/// A draw as the kernels read it.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// A `Draw`.
    pub words: [u32; WORDS],
    /// `Change`s.
    pub changes: Vec<u32>,
    /// The mask, [`mask_words`] words; empty: there is none.
    pub mask: Vec<u32>,
}

impl Draw {
    /// The draw of the token that follows `history`, and behind that one token more, if it is `owed`: the host does not know
    /// which.
    pub fn new(params: &SampleParams, history: &[u32], owed: bool, vocab: usize) -> Self {
        let position = history.len() + usize::from(owed);
        // Whether the owed token is one that was generated.
        let more = u32::from(history.len() >= params.generated_from as usize);
        let mut all = params.changes(history);
        all.retain(|change| (change.token as usize) < vocab);
        let changes = all.iter().flat_map(|change| {
            let penalties = [change.generated, change.generated + more].map(|n| params.penalty(n).to_bits());
            [2 * change.token + u32::from(change.seen), change.bias.to_bits(), penalties[0], penalties[1]]
        });
        let mut mask = params.mask.as_ref().map_or_else(Vec::new, |mask| mask.to_vec());
        if params.mask.is_some() {
            // What a short mask does not reach is forbidden.
            mask.resize(mask_words(vocab), 0);
        }
        let filters = params.top_k > 0 || params.top_p < 1.0 || params.min_p > 0.0;
        let (temperature, kind) = match (params.temperature > 0.0, filters) {
            (false, _) => (1.0, 0),
            (true, false) => (params.temperature, 1),
            (true, true) => (params.temperature, 2),
        };
        // Of a share of nothing one token is left.
        let top_p = (f64::from(params.top_p) * 2f64.powi(64)) as u64;
        let top_p = if params.top_p < 1.0 { top_p.max(1) } else { 0 };
        // All tokens that lie so much below the most likely one are together less likely than what top-p leaves out.
        let beyond = (vocab as f32 / (1.0 - params.top_p)).ln() + 0.1;
        let words = [
            temperature.to_bits(),
            params.repetition_penalty.to_bits(),
            params.penalty(more).to_bits(),
            params.min_p.ln().to_bits(),
            kind,
            params.top_k,
            top_p as u32,
            (top_p >> 32) as u32,
            params.seed as u32,
            (params.seed >> 32) as u32,
            position as u32,
            all.len() as u32,
            u32::from(owed),
            u32::from(params.mask.is_some()),
            beyond.to_bits(),
            0,
        ];
        Self { words, changes: changes.collect(), mask }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_draw_is_told_as_the_kernels_read_it() {
        let params = SampleParams {
            temperature: 0.5,
            top_k: 20,
            top_p: 0.75,
            min_p: 0.5,
            repetition_penalty: 2.0,
            presence_penalty: 1.0,
            frequency_penalty: 0.5,
            generated_from: 1,
            logit_bias: Arc::new([(9, -3.0)]),
            mask: Some(Arc::new([7])),
            seed: 5 << 32 | 6,
            ..SampleParams::greedy()
        };
        let f = |x: f32| x.to_bits();
        let draw = Draw::new(&params, &[4, 8, 8], true, 70);
        let least = f(0.5f32.ln());
        assert_eq!(draw.words[..8], [f(0.5), f(2.0), f(1.5), least, 2, 20, 0, 0xc000_0000]);
        assert_eq!(draw.words[8..14], [6, 5, 4, 3, 1, 1]);
        // e^-beyond of each of 70 tokens is less than the quarter that is left out.
        let beyond = f32::from_bits(draw.words[14]);
        assert!((0.2..0.25).contains(&(70.0 * (-beyond).exp())), "{beyond}");
        let changes = [[9, 0, 0, f(1.5)], [17, 0, f(2.0), f(2.5)], [18, f(-3.0), 0, f(1.5)]];
        assert_eq!(draw.changes, changes.as_flattened());
        assert_eq!(draw.mask, [7, 0, 0]);
    }

    #[test]
    fn kinds_are_the_largest_any_and_those_kept() {
        let kind = |params: SampleParams| Draw::new(&params, &[], false, 64).words[4];
        let any = SampleParams { temperature: 1.0, ..SampleParams::greedy() };
        assert_eq!(kind(SampleParams { top_k: 3, ..SampleParams::greedy() }), 0);
        assert_eq!(kind(any.clone()), 1);
        assert_eq!(kind(SampleParams { top_k: 3, ..any.clone() }), 2);
        assert_eq!(kind(SampleParams { top_p: 0.9, ..any.clone() }), 2);
        assert_eq!(kind(SampleParams { min_p: 0.1, ..any }), 2);
    }
}
