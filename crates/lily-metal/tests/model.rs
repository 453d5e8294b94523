//! Whole decode steps, as planned, against golden logits and the CPU's reference.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::machine::Machine;
use common::model::{Model, edge_shapes, folder};
use common::{Guard, ORDERS, Order};
use lily_cpu::reference::State;
use lily_cpu::tap::no_tap;
use lily_metal::plan::{Contents, KvType};
use lily_model::sample::argmax;

fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d.is_nan() { f32::NAN } else { m.max(d) })
}

/// Words of a golden tensor.
fn golden(name: &str) -> Vec<u32> {
    let bytes = std::fs::read(folder("tests/data/nano/goldens/goldens.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    tensors.tensor(name).unwrap().data().as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w)).collect()
}

fn nano() -> Model {
    Model::load(&folder("tests/data/nano/mlx-4bit"))
}

/// Feeds a prompt token by token, then each token that follows, `count` times. Gives the logits from the prompt's last token on.
fn greedy(machine: &mut Machine, prompt: &[u32], count: usize) -> (Vec<Vec<f32>>, Vec<u32>) {
    let (mut logits, mut tokens) = (Vec::new(), Vec::new());
    let mut last = (Vec::new(), 0);
    for &token in prompt {
        last = machine.step(token);
    }
    for _ in 0..count {
        assert_eq!(last.1, argmax(&last.0));
        tokens.push(last.1);
        logits.push(last.0);
        last = machine.step(last.1);
    }
    logits.push(last.0);
    (logits, tokens)
}

/// As [`greedy`], by the CPU's reference.
fn reference_greedy(model: &Model, prompt: &[u32], count: usize) -> (Vec<Vec<f32>>, Vec<u32>) {
    let (reference, mut state) = (model.reference(), State::default());
    let mut step = |token| reference.logits(&reference.step(token, &mut state, &mut no_tap));
    let mut last = prompt.iter().map(|&token| step(token)).last().unwrap();
    let (mut logits, mut tokens) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let token = argmax(&last);
        tokens.push(token);
        logits.push(std::mem::replace(&mut last, step(token)));
    }
    logits.push(last);
    (logits, tokens)
}

/// Largest difference from golden logits of a prompt of `n` tokens and 32 more; checks that the tokens are equal.
fn differ_from_goldens(machine: &mut Machine, n: usize) -> f32 {
    machine.clear();
    let (logits, tokens) = greedy(machine, &golden(&format!("prompt.{n}")), 32);
    assert_eq!(tokens, golden(&format!("decode.q4.{n}")), "prompt {n}");
    let compare = |reference: &str| {
        let rows = |what: &str| -> Vec<Vec<f32>> {
            let words = golden(&format!("q4.{reference}.{n}.{what}"));
            words.chunks_exact(384).map(|row| row.iter().map(|w| f32::from_bits(*w)).collect()).collect()
        };
        let (prefill, decode) = (rows("prefill"), rows("decode"));
        let got = logits[1..].iter().step_by(32 / decode.len()).zip(&decode);
        let all = got.chain([(&logits[0], prefill.last().unwrap())]);
        all.map(|(a, b)| max_difference(a, b)).fold(0.0, f32::max)
    };
    let d = ["hf", "mlx"].map(compare).into_iter().fold(0.0, f32::max);
    println!("prompt {n}: max difference {d:.1e}");
    d
}

#[test]
fn logits_and_greedy_tokens_equal_transformers_and_mlx() {
    let mut machine = nano().machine(128, KvType::F32, Guard::End);
    machine.order = Order::Random(1);
    let d = differ_from_goldens(&mut machine, 7);
    assert!(d < 1e-4, "{d:e}");
}

#[test]
#[ignore = "a minute: longer prompts, in every order"]
fn logits_and_greedy_tokens_equal_transformers_and_mlx_at_more_lengths() {
    let mut machine = nano().machine(400, KvType::F32, Guard::Start);
    for (n, order) in [1, 64, 300].into_iter().zip(ORDERS) {
        machine.order = order;
        let d = differ_from_goldens(&mut machine, n);
        assert!(d < 1e-4, "prompt {n}: {d:e}");
    }
}

#[test]
#[ignore = "a minute: shapes at the edges"]
fn other_shapes_say_what_the_reference_says() {
    for (name, model) in edge_shapes() {
        let mut machine = model.machine(64, KvType::F32, Guard::End);
        machine.order = Order::Backward;
        let (got, tokens) = greedy(&mut machine, &[1, 200, 3], 5);
        let (expected, expected_tokens) = reference_greedy(&model, &[1, 200, 3], 5);
        assert_eq!(tokens, expected_tokens, "{name}");
        let d = got.iter().zip(&expected).map(|(a, b)| max_difference(a, b)).fold(0.0, f32::max);
        // A tied head makes logits of ten times the size.
        let size = expected.iter().flatten().fold(0.0f32, |m, x| m.max(x.abs()));
        println!("{name}: max difference {d:.1e} of up to {size:.1}");
        assert!(d < 1e-5 * size, "{name}: {d:e} of {size}");
    }
}

#[test]
#[ignore = "half a minute: the demonstration model"]
fn the_demonstration_model_says_what_the_reference_says() {
    let model = Model::load(&folder("models/demo"));
    let prompt = [1, 2, 3, 4];
    let (expected, expected_tokens) = reference_greedy(&model, &prompt, 8);
    let (got, tokens) = greedy(&mut model.machine(64, KvType::F32, Guard::End), &prompt, 8);
    assert_eq!(tokens, expected_tokens);
    let d = got.iter().zip(&expected).map(|(a, b)| max_difference(a, b)).fold(0.0, f32::max);
    println!("max difference {d:.1e}");
    assert!(d < 1e-3, "{d:e}");
    // With the cache in bf16, as it is used: other logits, the same text.
    let (_, tokens) = greedy(&mut model.machine(64, KvType::Bf16, Guard::End), &prompt, 8);
    assert_eq!(tokens, expected_tokens);
}

#[test]
fn a_logit_that_is_not_finite_is_reported_and_no_token_is_chosen() {
    let mut machine = nano().machine(128, KvType::F32, Guard::End);
    machine.at(&Contents::Vector("norm".to_owned())).put([f32::NAN.to_bits()]);
    machine.at(&Contents::Token).put([5]);
    for launch in machine.plan.launches.clone() {
        machine.run_launch(&launch);
    }
    let words = [Contents::Broken, Contents::Token].map(|c| machine.at(&c).words());
    assert_eq!(words, [[1], [5]]);
}
