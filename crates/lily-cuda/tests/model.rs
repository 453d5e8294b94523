//! Whole models on the device against the plain f32 reference and the golden tokens.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::random::{Stored, config, model};
use common::{
    assert_batch_changes_nothing, assert_close, device, feed, fresh, load, options, root, rows, segment,
    step, tokens,
};
use lily_cuda::device::{chunk_launches, decode_launches, traffic};
use lily_cuda::driver::Context;
use lily_cuda::profile::Work;
use lily_cuda::{CudaBackend, Options};
use lily_model::backend::{Backend, Rows, Want};
use lily_model::config::Config;
use lily_model::config::LayerKind::{Attention, Gdn};
use lily_model::presets::CONFIG_35B_A3B;
use lily_model::sample::argmax;

/// Against f32 arithmetic. Products have inputs of 16 bits of mantissa.
const EXACT: f64 = 1e-4;
/// Where keys and values come from the cache, which has 8 bits of mantissa.
const CACHED: f64 = 2e-2;

#[test]
fn gated_delta_nets_equal_the_reference() {
    if !device() {
        return;
    }
    for (stored, seed) in [(Stored::Quantised, 1), (Stored::Mixed, 2), (Stored::Mixed, 3)] {
        let model = model(config(&[Gdn, Gdn]), seed, stored);
        let ids = tokens(70, model.config.vocab_size);
        let got = fresh(&mut model.backend(), &ids);
        assert_close(&format!("{stored:?} {seed}"), &got, &model.reference(&ids), EXACT);
    }
}

#[test]
fn attention_equals_the_reference() {
    if !device() {
        return;
    }
    for (stored, seed) in [(Stored::Quantised, 4), (Stored::Mixed, 5)] {
        let model = model(config(&[Attention, Attention]), seed, stored);
        for n in [1, 63, 64, 65, 200] {
            let ids = tokens(n, model.config.vocab_size);
            let got = fresh(&mut model.backend(), &ids);
            assert_close(&format!("{stored:?} {seed}, {n} tokens"), &got, &model.reference(&ids), CACHED);
        }
    }
}

#[test]
fn the_fixture_and_the_demonstration_model_equal_the_reference() {
    if !device() {
        return;
    }
    for form in ["dense", "q4", "demo"] {
        let model = load(form);
        let ids = tokens(130, model.config.vocab_size);
        let got = fresh(&mut model.backend(), &ids);
        assert_close(form, &got, &model.reference(&ids), CACHED);
    }
}

/// Golden greedy tokens of the fixture, of transformers and mlx-lm in f32. Keys and values in bf16 move logits of these
/// random models by more than their closest choices are apart: what differs must be such a choice.
#[test]
fn greedy_tokens_equal_the_goldens_but_for_close_choices() {
    if !device() {
        return;
    }
    let bytes = std::fs::read(root().join("tests/data/nano/goldens/goldens.safetensors")).unwrap();
    let goldens = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let ids = |name: &str| -> Vec<u32> {
        let data = goldens.tensor(name).unwrap().data().to_vec();
        data.as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w)).collect()
    };
    for form in ["dense", "q4"] {
        let model = load(form);
        let mut backend = model.backend();
        for n in [1, 7, 64, 300] {
            let (prompt, expected) = (ids(&format!("prompt.{n}")), ids(&format!("decode.{form}.{n}")));
            let all = [&prompt[..], &expected[..]].concat();
            let got = fresh(&mut backend, &all);
            let mut equal = 0;
            for (i, token) in expected.iter().enumerate() {
                let logits = &got[n - 1 + i];
                let best = argmax(logits);
                equal += usize::from(best == *token);
                let behind = logits[best as usize] - logits[*token as usize];
                assert!(behind < 0.1, "{form} {n}: token {i} is {best}, expected {token}, {behind} behind");
            }
            println!("{form}, prompt {n}: {equal} of {} greedy tokens equal", expected.len());
            assert!(equal * 10 >= expected.len() * 9, "{form} {n}");
        }
    }
}

/// The kernels for one token compute what the general ones do, to the bit.
#[test]
fn decoding_one_token_equals_the_general_kernels() {
    if !device() {
        return;
    }
    let models = [
        ("q4", load("q4")),
        ("demo", load("demo")),
        ("random", model(config(&[Gdn, Attention, Gdn]), 7, Stored::Quantised)),
    ];
    for (name, model) in models {
        let ids = tokens(150, model.config.vocab_size);
        let mut fast = model.backend();
        if !fast.decodes_fast() {
            println!("{name}: skipped, this device has no decode kernels");
            continue;
        }
        let mut general = model.backend_with(&Options { fast_decode: false, ..options() });
        let run = |backend: &mut lily_cuda::CudaBackend| -> Vec<Vec<f32>> {
            let seq = backend.create(200).unwrap();
            let mut out = feed(backend, seq, 0, &ids[..100]);
            out.extend((100..150).flat_map(|i| feed(backend, seq, i, &ids[i..=i])));
            out
        };
        let (a, b) = (run(&mut fast), run(&mut general));
        assert_close(name, &a, &b, 1e-6);
        assert!(a == b, "{name}: not equal to the bit");
    }
}

#[test]
fn a_prompt_in_chunks_equals_the_whole() {
    if !device() {
        return;
    }
    for form in ["dense", "q4", "demo"] {
        let model = load(form);
        let mut backend = model.backend();
        let ids = tokens(150, model.config.vocab_size);
        let whole = fresh(&mut backend, &ids);
        for chunk in [1, 2, 3, 4, 5, 7, 16, 17, 31, 33, 63, 64, 65, 100] {
            let seq = backend.create(150).unwrap();
            let got: Vec<_> = ids
                .chunks(chunk)
                .enumerate()
                .flat_map(|(i, ids)| feed(&mut backend, seq, i * chunk, ids))
                .collect();
            backend.free(seq).unwrap();
            // Attention sums in another order in chunks of 16 rows and more, so it rounds otherwise.
            assert_close(&format!("{form}, chunks of {chunk}"), &got, &whole, 1e-3);
        }
    }
}

#[test]
fn sequences_in_a_batch_equal_each_alone() {
    if !device() {
        return;
    }
    let model = load("demo");
    let vocab = model.config.vocab_size;
    let mut backend = model.backend();
    let prompts: Vec<Vec<u32>> = [1, 3, 64, 200].map(|n| tokens(n + 9, vocab)[9..].to_vec()).to_vec();
    let seqs: Vec<_> = prompts.iter().map(|_| backend.create(300).unwrap()).collect();
    let all = seqs.iter().zip(&prompts).map(|(s, p)| segment(*s, 0, p, Want::Logits(Rows::All)));
    let together = step(&mut backend, all.collect());
    for (got, ids) in together.into_iter().zip(&prompts) {
        let alone = fresh(&mut backend, ids);
        assert_close("prefill", &rows(got.unwrap(), vocab as u32), &alone, 1e-3);
    }
    let next = seqs.iter().zip(&prompts).map(|(s, p)| segment(*s, p.len(), &[5], Want::Logits(Rows::Last)));
    let together = step(&mut backend, next.collect());
    for (got, ids) in together.into_iter().zip(&prompts) {
        let alone = fresh(&mut backend, &[ids.as_slice(), &[5]].concat());
        assert_close("decode", &rows(got.unwrap(), vocab as u32), &alone[ids.len()..], 1e-3);
    }
}

#[test]
fn a_thousand_greedy_tokens_are_the_same_in_a_batch() {
    if !device() {
        return;
    }
    assert_batch_changes_nothing(&mut load("demo").backend_with(&Options { context: 1100, ..options() }));
}

/// The same at the real widths, with random weights made on the device.
#[test]
fn a_thousand_greedy_tokens_of_the_real_shape_are_the_same_in_a_batch() {
    if !device() {
        return;
    }
    let config = Config::from_json(CONFIG_35B_A3B).unwrap();
    let options = Options { context: 1100, ..options() };
    assert_batch_changes_nothing(&mut CudaBackend::random(config, 1, &options).unwrap());
}

/// A profile launches what `lily inspect` lists, and leaves the backend as it was.
#[test]
fn a_profile_has_every_kernel_of_a_step() {
    if !device() {
        return;
    }
    let model = load("demo");
    let mut backend = model.backend();
    let ids = tokens(30, model.config.vocab_size);
    let (before, free) = (fresh(&mut backend, &ids), backend.free_bytes());
    let gpu = Context::open(0).unwrap();
    // A prompt of 7 tokens is less than a chunk of 40.
    for (work, position) in
        [(Work::Decode(1), 20), (Work::Decode(3), 20), (Work::Chunk(40), 20), (Work::Chunk(7), 0)]
    {
        let (profile, launches, mean) = match work {
            Work::Decode(batch) => {
                let launches = decode_launches(model.config.clone(), &gpu, batch);
                (backend.profile(batch, position), launches, position)
            }
            Work::Chunk(tokens) => {
                let (n, launches) = (tokens as u32, chunk_launches(model.config.clone(), &gpu, tokens));
                let most = if position == 0 { 40 } else { n };
                (backend.profile_chunk(most, position + n), launches, position + n / 2)
            }
        };
        let (profile, launches) = (profile.unwrap(), launches.unwrap());
        assert_eq!((profile.work, profile.position), (work, position));
        assert_eq!(profile.kernels.iter().map(|k| k.launches).sum::<usize>(), launches.len());
        let moved = traffic(&launches);
        let bytes = profile.kernels.iter().map(|k| k.bytes).sum::<u64>();
        assert_eq!(bytes, moved.bytes + u64::from(mean) * moved.bytes_per_position);
        assert!(profile.step_us > 0.0 && profile.kernels.iter().all(|k| k.alone_us > 0.0), "{profile:?}");
        assert!(profile.copy_bytes_per_s > 1e10, "{profile:?}");
    }
    assert_eq!(backend.free_bytes(), free);
    assert!(fresh(&mut backend, &ids) == before);
}
