//! A token's result does not depend on what stands beside it: chunks, batches and snapshots change nothing,
//! to the bit.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{Goldens, Model, assert_close, demo, feed, load, rows, run, segment, step};
use lily_cpu::reference::{Reference, State};
use lily_cpu::tap::no_tap;
use lily_cpu::{CpuBackend, Options};
use lily_model::backend::{Backend, Output, Rows, SeqId, Want};
use proptest::prelude::*;

fn prompt(n: usize) -> Vec<u32> {
    let ids = Goldens::open("goldens.safetensors").ids("prompt.300");
    (0..n).map(|i| ids[i % ids.len()]).collect()
}

fn fresh(model: &Model, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut backend = model.backend();
    let seq = backend.create(ids.len() as u32).unwrap();
    feed(&mut backend, seq, 0, ids)
}

fn feed_in_chunks(backend: &mut CpuBackend, seq: SeqId, ids: &[u32], chunk: usize) -> Vec<Vec<f32>> {
    let chunks = ids.chunks(chunk).enumerate();
    chunks.flat_map(|(i, ids)| feed(backend, seq, i * chunk, ids)).collect()
}

#[test]
fn a_prompt_in_chunks_of_any_size_equals_the_whole() {
    for form in ["dense", "q4", "q4-int8"] {
        let model = load(form);
        let ids = prompt(150);
        let whole = fresh(&model, &ids);
        let mut backend = model.backend();
        for chunk in 1..=70 {
            let seq = backend.create(150).unwrap();
            assert!(feed_in_chunks(&mut backend, seq, &ids, chunk) == whole, "{form}, chunks of {chunk}");
            backend.free(seq).unwrap();
        }
    }
}

#[test]
fn decode_after_prefill_equals_one_long_prefill() {
    let ids = prompt(300);
    for (form, split) in
        ["q4", "q4-int8"].into_iter().flat_map(|form| [1, 63, 64, 65, 299].map(|n| (form, n)))
    {
        let model = load(form);
        let whole = fresh(&model, &ids);
        let mut backend = model.backend();
        let seq = backend.create(300).unwrap();
        let mut got = feed(&mut backend, seq, 0, &ids[..split]);
        for i in split..300 {
            got.extend(feed(&mut backend, seq, i, &ids[i..=i]));
        }
        assert!(got == whole, "{form}, split at {split}");
    }
}

/// Attention over more than 1,024 positions is a sum of parts: shared out to threads for a few tokens, one behind the
/// other for many. Both give the same, and what the reference gives.
#[test]
fn a_long_context_is_the_same_read_at_once_and_token_by_token() {
    const TOKENS: usize = 1100;
    let ids = prompt(TOKENS);
    for form in ["q4", "q4-int8"] {
        let model = load(form);
        let mut backend = model.backend_with(Options {
            threads: Some(2),
            context: 2048,
            max_batch_tokens: 2048,
            exact: model.exact,
            ..Options::default()
        });
        let (a, b) = (backend.create(TOKENS as u32).unwrap(), backend.create(TOKENS as u32).unwrap());
        let whole = feed(&mut backend, a, 0, &ids);
        feed(&mut backend, b, 0, &ids[..TOKENS - 20]);
        for i in TOKENS - 20..TOKENS {
            assert!(feed(&mut backend, b, i, &ids[i..=i])[0] == whole[i], "{form}, token {i}");
        }
        if model.exact {
            let reference = Reference { config: &model.config, weights: &model.weights };
            let mut state = State::default();
            let hidden = ids.iter().map(|&id| reference.step(id, &mut state, &mut no_tap)).last().unwrap();
            assert_close("the last of a long prompt", &whole[TOKENS - 1], &reference.logits(&hidden));
        }
    }
}

#[test]
fn sequences_in_a_batch_equal_each_alone() {
    for form in ["dense", "q4", "q4-int8"] {
        let model = load(form);
        let prompts = [1, 3, 64, 300].map(|n| prompt(n + 7)[7..].to_vec());
        let mut backend = model.backend();
        let seqs = [(); 4].map(|()| backend.create(301).unwrap());
        let segments = seqs.iter().zip(&prompts).map(|(s, p)| segment(*s, 0, p, Want::Logits(Rows::All)));
        let together = step(&mut backend, segments.collect());
        let vocab = backend.limits().vocab_size;
        for (got, ids) in together.into_iter().zip(&prompts) {
            assert!(rows(got.unwrap(), vocab) == fresh(&model, ids), "{form}, {} tokens", ids.len());
        }
        // And one decode step of all four.
        let segments =
            seqs.iter().zip(&prompts).map(|(s, p)| segment(*s, p.len(), &[5], Want::Logits(Rows::Last)));
        let together = step(&mut backend, segments.collect());
        for (got, ids) in together.into_iter().zip(&prompts) {
            let alone = fresh(&model, &[ids.as_slice(), &[5]].concat());
            assert!(
                rows(got.unwrap(), vocab)[..] == alone[ids.len()..],
                "{form}, decode after {}",
                ids.len()
            );
        }
    }
}

#[test]
fn an_exported_snapshot_resumes_in_another_process() {
    let model = load("q4-int8");
    let ids = prompt(100);
    let whole = fresh(&model, &ids);
    let mut first = model.backend();
    let seq = first.create(70).unwrap();
    feed(&mut first, seq, 0, &ids[..70]);
    let snapshot = first.snapshot(seq).unwrap();
    let bytes = first.export(snapshot).unwrap();
    let mut second = model.backend();
    let imported = second.import(&bytes).unwrap();
    let seq = second.resume(imported, 100).unwrap();
    assert!(feed(&mut second, seq, 70, &ids[70..])[..] == whole[70..]);

    for (at, words) in [(3, "format version"), (40, "checksum"), (bytes.len() - 1, "checksum")] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        let e = second.import(&damaged).unwrap_err().to_string();
        assert!(e.contains(words), "{e}");
    }
    assert!(second.import(&bytes[..bytes.len() - 1]).is_err());
    for other in ["dense", "q4"] {
        let e = load(other).backend().import(&bytes).unwrap_err().to_string();
        assert!(e.contains("another model, or to another precision"), "{e}");
    }
}

/// A conversation that goes on from its prefix's snapshot says what a fresh one says, at the trained model's
/// production head sizes, and as often as the snapshot is used.
#[test]
fn a_reused_prefix_continues_as_a_fresh_prompt_does() {
    let model = demo(false);
    let ids: Vec<u32> = (0..200).map(|i| 300 + i * 37 % 5000).collect();
    let mut backend = model.backend();
    let fresh = backend.create(232).unwrap();
    let expected = run(&ids, |start, ids| feed(&mut backend, fresh, start, ids)).tokens;
    let prefix = backend.create(150).unwrap();
    feed(&mut backend, prefix, 0, &ids[..150]);
    let snapshot = backend.snapshot(prefix).unwrap();
    backend.free(prefix).unwrap();
    for _ in 0..2 {
        let seq = backend.resume(snapshot, 232).unwrap();
        let got = run(&ids[150..], |start, ids| feed(&mut backend, seq, 150 + start, ids)).tokens;
        assert_eq!(got, expected);
        backend.free(seq).unwrap();
    }
}

/// What a test may do with a sequence or a snapshot.
#[derive(Clone, Debug)]
enum Action {
    Feed(usize, usize),
    Snapshot(usize),
    Resume(usize),
    Free(usize),
    Forget(usize),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => (0usize..4, 1usize..40).prop_map(|(s, n)| Action::Feed(s, n)),
        2 => (0usize..4).prop_map(Action::Snapshot),
        2 => (0usize..4).prop_map(Action::Resume),
        1 => (0usize..4).prop_map(Action::Free),
        1 => (0usize..4).prop_map(Action::Forget),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever is cut, resumed, shared and freed, a sequence's logits are those of a fresh prefill of its
    /// tokens, and in the end all memory is free again.
    #[test]
    fn resumed_sequences_equal_fresh_ones(actions in prop::collection::vec(action(), 1..30), salt in 0u32..300) {
        let model = load(if salt % 2 == 0 { "q4" } else { "q4-int8" });
        let mut backend = model.backend();
        let budget = backend.free_bytes();
        let (mut live, mut frozen) = (vec![(backend.create(300).unwrap(), Vec::new())], Vec::new());
        for (i, action) in actions.into_iter().enumerate() {
            match action {
                Action::Feed(s, n) if !live.is_empty() => {
                    let s = s % live.len();
                    let (seq, tokens): &mut (SeqId, Vec<u32>) = &mut live[s];
                    let ids: Vec<u32> = (0..n.min(300 - tokens.len()) as u32).map(|t| (t * 31 + i as u32 * 7 + salt) % 352).collect();
                    if ids.is_empty() { continue }
                    let got = feed(&mut backend, *seq, tokens.len(), &ids);
                    tokens.extend(ids);
                    prop_assert!(got.last() == fresh(&model, tokens).last());
                }
                Action::Snapshot(s) if !live.is_empty() => {
                    let (seq, tokens) = &live[s % live.len()];
                    if let Ok(snapshot) = backend.snapshot(*seq) { frozen.push((snapshot, tokens.clone())) }
                }
                Action::Resume(s) if !frozen.is_empty() => {
                    let (snapshot, tokens) = &frozen[s % frozen.len()];
                    if let Ok(seq) = backend.resume(*snapshot, 300) { live.push((seq, tokens.clone())) }
                }
                Action::Free(s) if !live.is_empty() => backend.free(live.swap_remove(s % live.len()).0).unwrap(),
                Action::Forget(s) if !frozen.is_empty() => {
                    backend.forget(frozen.swap_remove(s % frozen.len()).0).unwrap();
                }
                _ => {}
            }
        }
        live.iter().for_each(|(seq, _)| backend.free(*seq).unwrap());
        frozen.iter().for_each(|(snapshot, _)| backend.forget(*snapshot).unwrap());
        prop_assert_eq!(backend.free_bytes(), budget);
    }
}

/// The same seed gives the same tokens alone and beside others, through tokens that never leave the backend.
#[test]
fn sampling_is_the_same_alone_and_in_a_batch() {
    use lily_model::backend::{Batch, Segment, Tokens};
    use lily_model::sample::SampleParams;
    let model = load("q4");
    let sample = |seeds: &[u64]| -> Vec<Vec<u32>> {
        let mut backend = model.backend();
        let seqs: Vec<SeqId> = seeds.iter().map(|_| backend.create(64).unwrap()).collect();
        let mut texts = vec![Vec::new(); seeds.len()];
        for i in 0..30u32 {
            let segment = |(seq, &seed): (&SeqId, &u64)| Segment {
                seq: *seq,
                start: if i == 0 { 0 } else { 2 + i },
                tokens: if i == 0 { Tokens::Ids(vec![1, 2, seed as u32]) } else { Tokens::LastSampled },
                want: Want::Sample(SampleParams { temperature: 1.0, seed, ..SampleParams::greedy() }.into()),
            };
            let segments = seqs.iter().zip(seeds).map(segment).collect();
            let ticket = backend.forward(&Batch { segments }).unwrap();
            for (text, out) in texts.iter_mut().zip(backend.wait(ticket).unwrap()) {
                match out.unwrap() {
                    Output::Sampled(s) => text.push(s.token),
                    other => panic!("{other:?}"),
                }
            }
        }
        texts
    };
    let together = sample(&[11, 12, 13]);
    assert_ne!(together[0], together[1]);
    for (i, seed) in [11, 12, 13].into_iter().enumerate() {
        assert_eq!(sample(&[seed])[0], together[i]);
    }
}
