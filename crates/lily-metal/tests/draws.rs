//! Tokens that the kernels draw are those that lily-model's sampler draws.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::draws::{Drawer, Left, logits};
use common::model::folder;
use common::{ORDERS, Order};
use fastrand::Rng;
use lily_metal::plan::KvType;
use lily_metal::selftest::Drawn;
use lily_metal::source;
use lily_model::config::Config;
use lily_model::sample::{SampleParams, sample};

fn drawer(vocab: usize) -> Drawer {
    let nano = std::fs::read(folder("tests/data/nano/mlx-4bit/config.json")).unwrap();
    let config = Config { vocab_size: vocab, ..Config::from_json(&nano).unwrap() };
    Drawer::new(&config, &source::source(&config, KvType::F32))
}

fn check(vocab: usize, count: usize, seed: u64) {
    let tokens = drawer(vocab).check(count, seed);
    assert!(tokens.len() > count / 4, "these draws say nothing: {tokens:?}");
}

#[test]
fn draws_are_the_samplers() {
    check(2000, 400, 1);
}

/// A vocabulary that no group of tokens ends with, and one of fewer tokens than a group has.
#[test]
fn draws_are_the_samplers_in_vocabularies_of_any_size() {
    check(1028, 48, 2);
    check(20, 48, 3);
}

#[test]
fn draws_are_the_samplers_in_the_real_models_vocabulary() {
    check(248_320, 16, 4);
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
