//! Tokens that the kernels draw are those that lily-model's sampler draws.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::draws::{Drawer, Left, VOCABULARIES, config, logits};
use common::{Guard, Kernels, ORDERS, Order, Shape};
use fastrand::Rng;
use lily_metal::draw::Draw;
use lily_metal::plan::KvType;
use lily_metal::selftest::Drawn;
use lily_metal::source;
use lily_model::sample::{SampleParams, sample, uniform};

fn drawer(vocab: usize) -> Drawer {
    assert!(VOCABULARIES.contains(&vocab));
    let config = config(vocab);
    Drawer::new(&config, &source::source(&config, KvType::F32))
}

fn check(vocab: usize, count: usize, seed: u64) {
    let tokens = drawer(vocab).check(count, seed);
    assert!(tokens.len() > count / 4, "these draws say nothing: {tokens:?}");
}

#[test]
fn draws_are_the_samplers() {
    check(2000, 200, 1);
}

/// A vocabulary that no group of tokens ends with, and one of fewer tokens than a group has.
#[test]
fn draws_are_the_samplers_in_vocabularies_of_any_size() {
    check(1028, 48, 2);
    check(20, 48, 3);
}

#[test]
fn draws_are_the_samplers_in_the_real_models_vocabulary() {
    check(248_320, 8, 4);
}

#[test]
#[ignore = "minutes: 200 draws from 248,320 tokens"]
fn two_hundred_draws_are_the_samplers_in_the_real_models_vocabulary() {
    check(248_320, 200, 5);
}

fn plain(params: SampleParams) -> Drawn {
    Drawn { params, history: vec![1, 2, 3], owed: false }
}

/// Filters at and beyond their ends; equal logits, of which the smaller tokens come first; logits and temperatures of any size.
#[test]
fn draws_are_the_samplers_at_the_edges() {
    let vocab = 2000;
    let (mut drawer, mut random) = (drawer(vocab), Rng::with_seed(6));
    let flat = vec![0.25; vocab];
    let steep: Vec<f32> = (0..vocab).map(|i| -(i as f32)).collect();
    let large: Vec<f32> = steep.iter().map(|x| x * 1e30).collect();
    let mut pair = vec![-90.0; vocab];
    (pair[7], pair[1900]) = (0.0, 0.0);
    let rows = [flat, steep, large, pair, logits(vocab, true, &mut random)];
    let any = SampleParams { temperature: 1.0, ..SampleParams::greedy() };
    let top_k =
        [1, 2, 31, 33, 64, 1999, 2000, 2001, u32::MAX].map(|top_k| SampleParams { top_k, ..any.clone() });
    let top_p =
        [0.0, 1e-30, 0.25, 0.5, 0.75, 0.999, 0.999_999_94].map(|top_p| SampleParams { top_p, ..any.clone() });
    let min_p = [1e-30, 0.5, 1.0].map(|min_p| SampleParams { min_p, ..any.clone() });
    let temperature =
        [1e-6, 1e-30, 0.01, 50.0, 1e30].map(|temperature| SampleParams { temperature, ..any.clone() });
    let one = SampleParams { mask: Some([0, 0, 1 << 9].into()), ..any.clone() };
    let both = SampleParams { top_k: 3, top_p: 0.5, ..any.clone() };
    let params = top_k.into_iter().chain(top_p).chain(min_p).chain(temperature).chain([one, both]);
    for (i, params) in params.enumerate() {
        for logits in &rows {
            let drawn = plain(SampleParams { seed: i as u64, ..params.clone() });
            let expected = drawn.token(logits);
            let got = drawer.draw(&drawn, logits, Order::Random(i as u16));
            assert_eq!(got, Left { token: expected, broken: false }, "{params:?} of {:?}", &logits[..3]);
        }
    }
}

/// Wherever it is, whether it is allowed or not, and however the token is drawn: nothing is drawn then.
#[test]
fn a_logit_that_is_not_finite_is_reported() {
    let vocab = 2000;
    let (mut drawer, mut random) = (drawer(vocab), Rng::with_seed(7));
    for (i, value) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().cycle().take(24).enumerate() {
        let drawn = Drawn::random(i, 5, &[9], vocab, &mut random);
        let mut logits = logits(vocab, false, &mut random);
        logits[random.usize(0..vocab)] = value;
        // The input stays where it was.
        assert_eq!(drawer.draw(&drawn, &logits, ORDERS[i % 3]), Left { token: 9, broken: true });
    }
}

/// How often each of a few tokens is drawn, from seed to seed: as often as the sampler does, to the count.
#[test]
fn frequencies_are_the_samplers() {
    let mut drawer = drawer(20);
    let logits: Vec<f32> = (0..20).map(|i| (i % 5) as f32).collect();
    let (mut got, mut expected) = ([0; 20], [0; 20]);
    for seed in 0..500 {
        let params = SampleParams { temperature: 1.0, seed, ..SampleParams::greedy() };
        let drawn = plain(params.clone());
        got[drawer.draw(&drawn, &logits, Order::Forward).token as usize] += 1;
        expected[sample(&mut logits.clone(), &drawn.history, &params).token as usize] += 1;
    }
    assert_eq!(got, expected);
}

/// Writes what the functions of a draw make of numbers.
const PROBE: &str = "
[[max_total_threads_per_threadgroup(1024)]]
kernel void probe(
    const device Draw* draw [[buffer(0)]],
    const device float* values [[buffer(1)]],
    device float* sums [[buffer(2)]],
    device ulong* exponentials [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]]
) {
    const uint i = group * 1024 + thread_index;
    const Best sum = noisy(values[i], draw, i);
    sums[2 * i] = sum.value;
    sums[2 * i + 1] = sum.rest;
    exponentials[i] = exp_minus(abs(values[i]));
}
";

/// Too little accuracy would not show in a few hundred draws.
#[test]
fn noise_and_exponentials_are_as_good_as_in_f64() {
    const COUNT: usize = 64 << 10;
    let config = config(20);
    let kernels = Kernels::compile(&(source::source(&config, KvType::F32) + PROBE));
    let mut random = Rng::with_seed(8);
    let params = SampleParams { temperature: 1.0, seed: random.u64(..), ..SampleParams::greedy() };
    let values: Vec<f32> = (0..COUNT).map(|i| (random.f32() - 0.5) * [60.0, 2.0, 1e-6][i % 3]).collect();
    let buffer = |bytes| kernels.allocate(bytes, Guard::End);
    let draw = Draw::new(&params, &[1, 2, 3], false, config.vocab_size);
    let values_of = |values: &[f32]| buffer(4 * COUNT).with(values.iter().map(|x| x.to_bits()));
    let mut memories =
        [buffer(64).with(draw.words), values_of(&values), buffer(8 * COUNT), buffer(8 * COUNT)];
    let shape = Shape { kernel: "probe", grid: [COUNT / 1024, 1, 1], threads: 1024, memory: &[] };
    let bound = [0, 1, 2, 3].map(|i| (i, 0));
    kernels.launch(shape, &mut memories, &bound, Order::Forward).unwrap();
    let (sums, exponentials) = (memories[2].floats(), memories[3].words());
    let offset = 6.0 * std::f64::consts::LN_2;
    let (mut worst_sum, mut worst_exponential) = (0.0f64, 0.0f64);
    for (i, &x) in values.iter().enumerate() {
        let gumbel = -(-uniform(params.seed, 3, i as u32).ln()).ln();
        let sum = f64::from(sums[2 * i]) + f64::from(sums[2 * i + 1]);
        worst_sum = worst_sum.max((sum - (f64::from(x) + gumbel + offset)).abs());
        let exponential = f64::from(exponentials[2 * i + 1]) * 2f64.powi(32) + f64::from(exponentials[2 * i]);
        let exact = (-f64::from(x.abs())).exp();
        worst_exponential = worst_exponential.max((exponential / 2f64.powi(44) - exact).abs());
    }
    println!("largest differences: {worst_sum:e}, {worst_exponential:e}");
    assert!(worst_sum < 1e-12 && worst_exponential < 2e-13, "{worst_sum:e}, {worst_exponential:e}");
}
