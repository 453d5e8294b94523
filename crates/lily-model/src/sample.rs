//! How a token is drawn from a row of logits. This is part of the contract of a device: the same request
//! gives the same text on every backend, on its own or in a batch.
//!
//! Order, as in vLLM and transformers: logit bias, penalties, mask, temperature, top-k, top-p, min-p. The
//! draw is the Gumbel-max trick: the candidate with the largest `logit + gumbel(seed, position, token)`
//! wins. It needs no sum over the vocabulary, so its result does not depend on the order of additions, and
//! the random number of a token depends on nothing but the request's seed, the position and the token.

use std::cmp::Ordering;
use std::sync::Arc;

/// Biases of a request, at most: devices have room for so many.
pub const MOST_BIASES: usize = 2048;

/// Sampling of one token. Constant over a request, except `mask`.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleParams {
    /// Divides the logits; 0 means greedy.
    pub temperature: f32,
    /// Keep the `top_k` most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens whose probabilities sum to at least this; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of every token of the sequence so far; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of every token generated so far; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted once per occurrence among the tokens generated so far; 0 is off.
    pub frequency_penalty: f32,
    /// Position of the first generated token: what lies before it is the prompt.
    pub generated_from: u32,
    /// Added to the logits of single tokens; at most [`MOST_BIASES`].
    pub logit_bias: Arc<[(u32, f32)]>,
    /// A bit per token, lowest first; 0 forbids it, and at least one must be 1. `None` allows all.
    pub mask: Option<Arc<[u32]>>,
    /// Key of the random numbers.
    pub seed: u64,
    /// Report the log-probability of the token and of this many most likely ones.
    pub logprobs: Option<u32>,
}

impl SampleParams {
    /// Whether the mask allows a token.
    pub fn allows(&self, token: u32) -> bool {
        self.mask.as_ref().is_none_or(|mask| is_set(mask, token))
    }

    /// Whether the token is the largest logit, as the model computed it.
    pub fn takes_largest(&self) -> bool {
        self.temperature <= 0.0 && self.mask.is_none() && self.logit_bias.is_empty() && !self.penalises()
    }

    fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// What bias and penalties do to single tokens, by token. `history`: every token of the sequence so far.
    pub fn changes(&self, history: &[u32]) -> Vec<Change> {
        let bias = |&(token, bias): &(u32, f32)| Change { token, bias, seen: false, generated: 0 };
        let mut all: Vec<Change> = self.logit_bias.iter().map(bias).collect();
        // Of the prompt only that penalty knows.
        let first = if self.repetition_penalty == 1.0 { self.generated_from as usize } else { 0 };
        if self.penalises() {
            let seen = |(i, &token): (usize, &u32)| {
                let generated = u32::from(i >= self.generated_from as usize);
                Change { token, bias: 0.0, seen: true, generated }
            };
            all.extend(history.iter().enumerate().skip(first).map(seen));
        }
        // Stable, so that biases of one token are summed in their order.
        all.sort_by_key(|change| change.token);
        all.dedup_by(|change, first| {
            let same = change.token == first.token;
            if same {
                first.bias += change.bias;
                first.seen |= change.seen;
                first.generated += change.generated;
            }
            same
        });
        all
    }

    /// What presence and frequency take from the logit of a token that was generated so many times.
    pub fn penalty(&self, generated: u32) -> f32 {
        if generated == 0 { 0.0 } else { self.presence_penalty + self.frequency_penalty * generated as f32 }
    }

    /// The most likely token, nothing else.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            generated_from: 0,
            logit_bias: Arc::new([]),
            mask: None,
            seed: 0,
            logprobs: None,
        }
    }
}

/// What a request does to the logit of a token: bias, then penalties.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// Its id.
    pub token: u32,
    /// What is added: the sum of its biases.
    pub bias: f32,
    /// Whether it is in the sequence and there is a penalty for that.
    pub seen: bool,
    /// How often it was generated.
    pub generated: u32,
}

/// A token that was drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token: u32,
    /// Log-probabilities, if [`SampleParams::logprobs`] asked for them.
    pub logprobs: Option<Logprobs>,
}

/// Natural logarithms of probabilities under the model's own distribution (before bias, penalties and
/// temperature).
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// Of the drawn token.
    pub token: f32,
    /// The most likely tokens, falling.
    pub top: Vec<(u32, f32)>,
}

/// Index of the first logit that is NaN or infinite.
pub fn first_non_finite(logits: &[f32]) -> Option<u32> {
    logits.iter().position(|x| !x.is_finite()).map(|i| i as u32)
}

/// Index of the largest logit; the smallest index among equals. Logits must be finite and not empty.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, &x) in logits.iter().enumerate() {
        if x > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// Draws the token that follows `history`.
///
/// `logits`: one finite row over the vocabulary, changed in place. `history`: every token of the sequence
/// so far, the prompt's included; its length is the position that keys the random numbers.
pub fn sample(logits: &mut [f32], history: &[u32], params: &SampleParams) -> Sampled {
    let reported = params.logprobs.map(|n| Reported::new(logits, n as usize));
    adjust(logits, history, params);
    let token = if params.temperature <= 0.0 {
        argmax(logits)
    } else {
        draw(&candidates(logits, params), params.seed, history.len() as u64)
    };
    Sampled { token, logprobs: reported.map(|r| r.of(token)) }
}

/// Log-probabilities of a token, which must be one of the row's, and of the `n` most likely ones. `logits`: one
/// finite row over the vocabulary.
pub fn logprobs(logits: &[f32], token: u32, n: u32) -> Logprobs {
    Reported::new(logits, n as usize).of(token)
}

/// Log-probabilities, taken before the logits are adjusted.
struct Reported {
    logits: Vec<f32>,
    log_sum: f32,
    top: Vec<(u32, f32)>,
}

impl Reported {
    fn new(logits: &[f32], n: usize) -> Self {
        let max = logits[argmax(logits) as usize];
        let sum: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
        let log_sum = max + sum.ln() as f32;
        let mut order: Vec<(u32, f32)> = (0u32..).zip(logits.iter().copied()).collect();
        let n = n.min(order.len());
        if n > 0 && n < order.len() {
            order.select_nth_unstable_by(n - 1, most_likely_first);
        }
        order.truncate(n);
        order.sort_unstable_by(most_likely_first);
        let top = order.into_iter().map(|(i, x)| (i, x - log_sum)).collect();
        Self { logits: logits.to_vec(), log_sum, top }
    }

    fn of(self, token: u32) -> Logprobs {
        Logprobs { token: self.logits[token as usize] - self.log_sum, top: self.top }
    }
}

fn most_likely_first(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Bias, penalties and mask.
fn adjust(logits: &mut [f32], history: &[u32], p: &SampleParams) {
    for change in p.changes(history) {
        if let Some(x) = logits.get_mut(change.token as usize) {
            *x += change.bias;
            if change.seen && p.repetition_penalty != 1.0 {
                *x = if *x > 0.0 { *x / p.repetition_penalty } else { *x * p.repetition_penalty };
            }
            *x -= p.penalty(change.generated);
        }
    }
    if let Some(mask) = &p.mask {
        for (token, x) in (0u32..).zip(logits.iter_mut()) {
            if !is_set(mask, token) {
                *x = f32::NEG_INFINITY;
            }
        }
    }
}

/// The bit of a token; those that a short mask does not reach are 0.
fn is_set(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// Tokens that survive top-k, top-p and min-p, with their logits over the temperature.
fn candidates(logits: &[f32], p: &SampleParams) -> Vec<(u32, f32)> {
    let mut kept: Vec<(u32, f32)> = (0u32..)
        .zip(logits.iter())
        .filter(|(_, x)| **x > f32::NEG_INFINITY)
        .map(|(i, &x)| (i, x / p.temperature))
        .collect();
    let k = p.top_k as usize;
    if k > 0 && k < kept.len() {
        kept.select_nth_unstable_by(k - 1, most_likely_first);
        kept.truncate(k);
    }
    let max = kept.iter().fold(f32::NEG_INFINITY, |m, &(_, x)| m.max(x));
    if p.top_p < 1.0 {
        kept.sort_unstable_by(most_likely_first);
        let total: f64 = kept.iter().map(|&(_, x)| f64::from(x - max).exp()).sum();
        let mut sum = 0.0;
        let needed = kept.iter().position(|&(_, x)| {
            sum += f64::from(x - max).exp();
            sum >= f64::from(p.top_p) * total
        });
        kept.truncate(needed.map_or(kept.len(), |i| i + 1));
    }
    if p.min_p > 0.0 {
        let least = max + p.min_p.ln();
        kept.retain(|&(_, x)| x >= least);
    }
    kept
}

/// Gumbel-max: arg max over the candidates of `logit - ln(-ln u)`, the smallest token among equals.
fn draw(candidates: &[(u32, f32)], seed: u64, position: u64) -> u32 {
    let noisy = |&(token, logit): &(u32, f32)| {
        let gumbel = -(-uniform(seed, position, token).ln()).ln();
        (token, f64::from(logit) + gumbel)
    };
    let best = candidates.iter().map(noisy).max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)));
    best.map_or(0, |(token, _)| token)
}

/// A number in (0, 1) that depends on nothing but its three arguments.
pub fn uniform(seed: u64, position: u64, token: u32) -> f64 {
    let counter = [token / 4, 0, position as u32, (position >> 32) as u32];
    let word = philox4x32(counter, [seed as u32, (seed >> 32) as u32])[token as usize % 4];
    (f64::from(word) + 0.5) / 4_294_967_296.0
}

/// Philox4x32-10, a counter-based generator. Source: Salmon et al., "Parallel random numbers: as easy as
/// 1, 2, 3", SC 2011.
fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn params() -> SampleParams {
        SampleParams { temperature: 1.0, seed: 7, ..SampleParams::greedy() }
    }

    /// Known answers published with the Random123 library (`kat_vectors`).
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }

    #[test]
    fn frequencies_follow_the_distribution() {
        let probs = [0.5f32, 0.25, 0.15, 0.1];
        let mut counts = [0u32; 4];
        let n = 20_000;
        for position in 0..n {
            let mut logits = probs.map(f32::ln);
            let s = sample(
                &mut logits,
                &vec![0; position % 97],
                &SampleParams { seed: position as u64, ..params() },
            );
            counts[s.token as usize] += 1;
        }
        for (count, p) in counts.iter().zip(probs) {
            let got = *count as f32 / n as f32;
            assert!((got - p).abs() < 0.015, "{got} for {p}");
        }
    }

    #[test]
    fn filters_keep_what_they_say() {
        let kept = |p: SampleParams| {
            let logits = [0.5f32, 0.25, 0.15, 0.1].map(f32::ln);
            let mut ids: Vec<u32> = candidates(&logits, &p).iter().map(|c| c.0).collect();
            ids.sort_unstable();
            ids
        };
        assert_eq!(kept(SampleParams { top_k: 2, ..params() }), [0, 1]);
        assert_eq!(kept(SampleParams { top_p: 0.74, ..params() }), [0, 1]);
        assert_eq!(kept(SampleParams { top_p: 0.76, ..params() }), [0, 1, 2]);
        assert_eq!(kept(SampleParams { min_p: 0.29, ..params() }), [0, 1, 2]);
        assert_eq!(kept(SampleParams { top_p: 0.0, ..params() }), [0]);
    }

    #[test]
    fn penalties_bias_and_mask_act() {
        let base = SampleParams { generated_from: 1, ..SampleParams::greedy() };
        let pick = |p: &SampleParams, history: &[u32]| sample(&mut [2.0, 1.9, -1.0, 0.0], history, p).token;
        assert_eq!(pick(&base, &[0, 0]), 0);
        assert_eq!(pick(&SampleParams { presence_penalty: 0.2, ..base.clone() }, &[0, 0]), 1);
        assert_eq!(
            pick(&SampleParams { presence_penalty: 0.2, ..base.clone() }, &[0]),
            0,
            "prompt is exempt"
        );
        assert_eq!(pick(&SampleParams { frequency_penalty: 0.06, ..base.clone() }, &[3, 0]), 0);
        assert_eq!(pick(&SampleParams { frequency_penalty: 0.06, ..base.clone() }, &[3, 0, 0]), 1);
        assert_eq!(pick(&SampleParams { repetition_penalty: 1.1, ..base.clone() }, &[0]), 1);
        assert_eq!(pick(&SampleParams { logit_bias: Arc::new([(2, 100.0)]), ..base.clone() }, &[]), 2);
        assert_eq!(pick(&SampleParams { mask: Some(Arc::new([0b1000])), ..base }, &[]), 3);
    }

    #[test]
    fn a_token_has_one_change_however_often_it_is_named_or_seen() {
        let p = SampleParams {
            logit_bias: Arc::new([(7, 1.0), (3, 0.5), (7, 2.0)]),
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            generated_from: 2,
            ..params()
        };
        let history = [9, 3, 7, 9, 7];
        let change = |token, bias, seen, generated| Change { token, bias, seen, generated };
        let generated = [change(3, 0.5, false, 0), change(7, 3.0, true, 2), change(9, 0.0, true, 1)];
        assert_eq!(p.changes(&history), generated);
        assert_eq!([0, 1, 2].map(|n| p.penalty(n)), [0.0, 0.75, 1.0]);
        let all = SampleParams { repetition_penalty: 1.1, ..p }.changes(&history);
        assert_eq!(all, [change(3, 0.5, true, 0), generated[1], change(9, 0.0, true, 1)]);
        let none = SampleParams { generated_from: 0, ..SampleParams::greedy() };
        assert_eq!((none.changes(&history), none.takes_largest()), (vec![], true));
    }

    #[test]
    fn a_mask_allows_the_tokens_whose_bits_are_set() {
        assert!(params().allows(1000));
        let masked = SampleParams { mask: Some(Arc::new([0b1010, 1])), ..params() };
        let allowed: Vec<u32> = (0..100).filter(|&token| masked.allows(token)).collect();
        assert_eq!(allowed, [1, 3, 32]);
    }

    #[test]
    fn logprobs_are_of_the_unadjusted_distribution() {
        let p =
            SampleParams { logprobs: Some(2), logit_bias: Arc::new([(2, 100.0)]), ..SampleParams::greedy() };
        let mut logits = [0.5f32, 0.3, 0.2].map(f32::ln);
        let got = sample(&mut logits, &[], &p);
        let logprobs = got.logprobs.unwrap();
        assert_eq!(got.token, 2);
        assert!((logprobs.token - 0.2f32.ln()).abs() < 1e-6);
        assert_eq!(logprobs.top.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 1]);
    }

    proptest! {
        #[test]
        fn the_token_is_always_allowed(
            logits in prop::collection::vec(-20f32..20.0, 1..80),
            history in prop::collection::vec(0u32..90, 0..30),
            temperature in prop_oneof![Just(0.0), 0.01f32..3.0],
            top_k in 0u32..10, top_p in 0f32..1.0, min_p in 0f32..1.0, seed: u64, allowed: u32,
        ) {
            let mask: Arc<[u32]> = Arc::new([allowed | 1, 0, 0]);
            let p = SampleParams {
                temperature, top_k, top_p, min_p, seed, mask: Some(mask.clone()), ..SampleParams::greedy()
            };
            let first = sample(&mut logits.clone(), &history, &p);
            prop_assert!((first.token as usize) < logits.len().min(32));
            prop_assert!(mask[0] >> first.token & 1 == 1);
            prop_assert_eq!(first, sample(&mut logits.clone(), &history, &p));
        }
    }
}
