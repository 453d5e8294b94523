//! Where kernels have their edges: experts that all or none choose, scales at the ends of what floats hold, positions around
//! pages, memory that does not suffice.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::random::{Stored, config, model, one_expert, real_attention, scale_rows, whole_heads, zeros};
use common::{Model, assert_close, device, feed, fresh, options, rows, segment, step, tokens};
use lily_cpu::reference::{Reference, State};
use lily_cpu::tap::no_tap;
use lily_cuda::driver::DriverError;
use lily_cuda::{CudaBackend, LoadError, Options};
use lily_model::backend::{Backend, Output, Rows, SeqId, Want};
use lily_model::config::LayerKind::{Attention, Gdn};
use lily_model::sample::SampleParams;
use lily_model::weights::{Expert, Mixer};

/// Products have inputs of 16 bits, whose errors odd scales make larger than in `model.rs`; keys and values of the cache have 8.
const EXACT: f64 = 1e-3;
const CACHED: f64 = 2e-2;

/// Logits of all positions, read at once but for the last three tokens, which are decoded one by one.
fn read_and_decode(backend: &mut CudaBackend, ids: &[u32]) -> Vec<Vec<f32>> {
    let seq = backend.create(ids.len() as u32).unwrap();
    let (first, last) = ids.split_at(ids.len() - 3);
    let mut out = feed(backend, seq, 0, first);
    for (i, id) in last.iter().enumerate() {
        out.extend(feed(backend, seq, first.len() + i, std::slice::from_ref(id)));
    }
    backend.free(seq).unwrap();
    out
}

fn assert_equals_reference(what: &str, model: &Model, n: usize, tolerance: f64) {
    let ids = tokens(n, model.config.vocab_size);
    let got = read_and_decode(&mut model.backend(), &ids);
    assert_close(what, &got, &model.reference(&ids), tolerance);
}

/// Equal logits of the router are a tie, which the first experts win: with one expert a token, all tokens go to expert 0 and
/// the others are not used; with five, to the first five.
#[test]
fn all_tokens_may_choose_the_same_experts() {
    if !device() {
        return;
    }
    for config in [one_expert(&[Gdn, Gdn]), config(&[Gdn, Gdn])] {
        let experts_per_token = config.moe.experts_per_token;
        for stored in [Stored::Quantised, Stored::Mixed] {
            let mut model = model(config.clone(), 11, stored);
            for layer in &mut model.weights.layers {
                layer.moe.router = zeros(model.config.moe.experts, model.config.hidden_size, 8);
            }
            for n in [4, 20, 70] {
                let what = format!("{stored:?}, {experts_per_token} experts, {n} tokens");
                assert_equals_reference(&what, &model, n, EXACT);
            }
        }
    }
}

/// Experts that nobody chooses may hold anything.
#[test]
fn experts_that_are_not_chosen_do_not_matter() {
    if !device() {
        return;
    }
    let mut model = model(config(&[Gdn, Gdn]), 12, Stored::Quantised);
    for layer in &mut model.weights.layers {
        let moe = &mut layer.moe;
        moe.router = zeros(model.config.moe.experts, model.config.hidden_size, 8);
        for Expert { gate, up, down } in &mut moe.experts[5..] {
            for m in [gate, up, down] {
                let rows = m.rows;
                scale_rows(m, 0..rows, f32::INFINITY);
            }
        }
    }
    assert_equals_reference("experts of infinite weights", &model, 70, EXACT);
}

/// A residual stream of 2^40 or 2^-20, and experts that add 2^30 to it: norms bring all back.
#[test]
fn extreme_scales_equal_the_reference() {
    if !device() {
        return;
    }
    for (embedding, down, lm_head) in [(40, 0, 0), (-20, 0, 0), (0, 30, 0), (0, -30, 20), (20, 25, -20)] {
        let mut model = model(config(&[Gdn, Gdn]), 13, Stored::Quantised);
        let scale = |m: &mut lily_model::matrix::Matrix, exponent: i32| {
            let rows = m.rows;
            scale_rows(m, 0..rows, 2f32.powi(exponent));
        };
        scale(&mut model.weights.embedding, embedding);
        scale(&mut model.weights.lm_head, lm_head);
        for layer in &mut model.weights.layers {
            let moe = &mut layer.moe;
            moe.experts.iter_mut().chain([&mut moe.shared]).for_each(|e| scale(&mut e.down, down));
        }
        let what = format!("embedding 2^{embedding}, down 2^{down}, lm_head 2^{lm_head}");
        assert_equals_reference(&what, &model, 40, EXACT);
    }
}

/// The readout of a recurrent state beyond 65,504, the largest number of f16.
#[test]
fn a_recurrent_state_may_exceed_16_bits() {
    if !device() {
        return;
    }
    let mut model = model(config(&[Gdn, Gdn]), 14, Stored::Quantised);
    let gdn = model.config.gdn.clone();
    let values = gdn.conv_channels() - gdn.value_width()..gdn.conv_channels();
    for layer in &mut model.weights.layers {
        let Mixer::Gdn(w) = &mut layer.mixer else { unreachable!("both layers are Gated DeltaNet") };
        scale_rows(&mut w.in_proj_qkv, values.clone(), 2f32.powi(24));
    }
    let ids = tokens(70, model.config.vocab_size);
    let reference = Reference { config: &model.config, weights: &model.weights };
    let mut state = State::default();
    ids.iter().for_each(|id| drop(reference.step(*id, &mut state, &mut no_tap)));
    let largest = state.layer(1).unwrap().recurrent.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    assert!(largest > 1e6, "{largest}");
    assert_equals_reference("values of 2^24", &model, 70, EXACT);
}

/// Every position around the edges of the first three pages, decoded alone behind a prompt that ends there.
#[test]
fn positions_at_page_edges_equal_the_reference() {
    if !device() {
        return;
    }
    for stored in [Stored::Quantised, Stored::Mixed] {
        let model = model(config(&[Attention, Gdn]), 15, stored);
        let ids = tokens(200, model.config.vocab_size);
        let expected = model.reference(&ids);
        let mut backend = model.backend();
        for n in [1, 2, 61, 62, 63, 64, 65, 126, 127, 128, 129, 190, 191, 192, 193] {
            let got = read_and_decode(&mut backend, &ids[..n + 3]);
            assert_close(&format!("{stored:?}, {n} tokens and 3"), &got, &expected[..n + 3], CACHED);
        }
    }
}

/// Small, and of every kind of step: what the sanitizers are run on.
#[test]
fn a_small_model_in_all_kinds_of_steps() {
    if !device() {
        return;
    }
    for (config, stored, fast_decode) in [
        (config(&[Gdn, Attention]), Stored::Quantised, true),
        (config(&[Gdn, Attention]), Stored::Quantised, false),
        (config(&[Gdn, Attention]), Stored::Mixed, true),
        (whole_heads(&[Gdn, Attention]), Stored::Quantised, true),
        // Its projections have outputs enough for the kernels of chunks.
        (real_attention(&[Gdn, Attention]), Stored::Quantised, true),
    ] {
        let model = model(config, 16, stored);
        let mut backend = model.backend_with(&Options { fast_decode, ..options() });
        let ids = tokens(72, model.config.vocab_size);
        let expected = model.reference(&ids);
        let got = read_and_decode(&mut backend, &ids);
        assert_close(&format!("{stored:?}, decode kernels {fast_decode}"), &got, &expected, CACHED);
        // Two sequences decode side by side, one of them resumed; with draws of both kinds.
        let a = backend.create(80).unwrap();
        feed(&mut backend, a, 0, &ids[..66]);
        let snapshot = backend.snapshot(a).unwrap();
        let b = backend.resume(snapshot, 80).unwrap();
        let drawn = SampleParams {
            temperature: 0.7,
            top_k: 20,
            top_p: 0.9,
            presence_penalty: 0.5,
            ..SampleParams::greedy()
        };
        let outputs = step(
            &mut backend,
            vec![
                segment(a, 66, &ids[66..67], Want::Sample(SampleParams::greedy().into())),
                segment(b, 66, &ids[66..67], Want::Sample(drawn.into())),
            ],
        );
        assert!(outputs.iter().all(|out| matches!(out, Ok(Output::Sampled(_)))), "{outputs:?}");
        let again = fresh(&mut backend, &ids[..67]);
        let Ok(Output::Sampled(greedy)) = &outputs[0] else { panic!("{outputs:?}") };
        assert_eq!(greedy.token, lily_model::sample::argmax(&again[66]));
        let side_by_side = four_side_by_side(&mut backend, &ids);
        assert_close(&format!("{stored:?}, side by side"), &side_by_side, &expected[4..12], CACHED);
    }
}

/// Logits of tokens 4 to 11 of a sequence among four, the last two of them alone again.
fn four_side_by_side(backend: &mut CudaBackend, ids: &[u32]) -> Vec<Vec<f32>> {
    let seqs: Vec<SeqId> = (0..4).map(|_| backend.create(12).unwrap()).collect();
    for seq in &seqs {
        feed(backend, *seq, 0, &ids[..4]);
    }
    let mut logits = Vec::new();
    for i in 4..10 {
        let segments = seqs.iter().map(|seq| segment(*seq, i, &ids[i..=i], Want::Logits(Rows::All)));
        let output = step(backend, segments.collect()).remove(0).unwrap();
        logits.extend(rows(output, backend.limits().vocab_size));
    }
    logits.extend(feed(backend, seqs[0], 10, &ids[10..12]));
    seqs.into_iter().for_each(|seq| backend.free(seq).unwrap());
    logits
}

#[test]
fn too_little_device_memory_is_an_error_with_numbers() {
    if !device() {
        return;
    }
    let model = model(config(&[Attention, Gdn]), 17, Stored::Quantised);
    let hungry = Options { context: 262_144, max_sequences: 20_000, ..options() };
    let error = CudaBackend::new(model.config.clone(), &model.weights, &hungry).err().unwrap();
    println!("{error}");
    let LoadError::Driver(DriverError::OutOfMemory { needed, free, .. }) = error else { panic!("{error}") };
    assert!(needed > free, "{needed} bytes were refused with {free} free");
    // What was allocated before is given back, and the device still works.
    assert_equals_reference("afterwards", &model, 10, CACHED);
}
