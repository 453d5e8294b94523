//! Snapshots, memory, draws and faults on the device.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::sync::Arc;

use common::random::Numbers;
use common::{device, feed, fresh, load, options, segment, step, tokens};
use lily_cuda::Options;
use lily_model::backend::{
    Backend, BackendError, Batch, Output, Rows, Segment, SegmentError, Ticket, Tokens, Want,
};
use lily_model::sample::{SampleParams, sample};

#[test]
fn snapshots_are_shared_resumed_and_survive_their_sequence() {
    if !device() {
        return;
    }
    let model = load("q4");
    let mut backend = model.backend();
    let free = backend.free_bytes();
    let ids = tokens(150, model.config.vocab_size);
    let seq = backend.create(200).unwrap();
    let mut whole = feed(&mut backend, seq, 0, &ids[..70]);
    let snapshot = backend.snapshot(seq).unwrap();
    // The sequence goes on in the page that the snapshot shares, and is then freed and its memory used again.
    whole.extend(feed(&mut backend, seq, 70, &ids[70..]));
    let other = backend.resume(snapshot, 200).unwrap();
    feed(&mut backend, other, 70, &tokens(60, 300));
    backend.free(seq).unwrap();
    for _ in 0..2 {
        let resumed = backend.resume(snapshot, 200).unwrap();
        assert!(feed(&mut backend, resumed, 70, &ids[70..])[..] == whole[70..]);
        backend.free(resumed).unwrap();
    }
    backend.free(other).unwrap();
    backend.forget(snapshot).unwrap();
    assert_eq!(backend.free_bytes(), free);
}

#[test]
fn an_exported_snapshot_resumes_in_another_backend() {
    if !device() {
        return;
    }
    let model = load("q4");
    let ids = tokens(100, model.config.vocab_size);
    let mut first = model.backend();
    let seq = first.create(100).unwrap();
    feed(&mut first, seq, 0, &ids[..70]);
    let snapshot = first.snapshot(seq).unwrap();
    let rest = feed(&mut first, seq, 70, &ids[70..]);
    let bytes = first.export(snapshot).unwrap();
    let mut second = model.backend();
    let imported = second.import(&bytes).unwrap();
    let seq = second.resume(imported, 100).unwrap();
    assert!(feed(&mut second, seq, 70, &ids[70..]) == rest);
    for (at, words) in [(3, "format version"), (40, "checksum"), (bytes.len() - 1, "checksum")] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        let e = second.import(&damaged).unwrap_err().to_string();
        assert!(e.contains(words), "{e}");
    }
    let e = load("dense").backend().import(&bytes).unwrap_err().to_string();
    assert!(e.contains("another model"), "{e}");
}

#[test]
fn memory_is_reserved_up_front_and_refused_with_numbers() {
    if !device() {
        return;
    }
    let options = Options { context: 128, max_sequences: 2, snapshot_bytes: 0, ..options() };
    let mut backend = load("q4").backend_with(&options);
    let (a, _b) = (backend.create(128).unwrap(), backend.create(128).unwrap());
    assert_eq!(backend.free_bytes(), 0);
    let needed = backend.state_bytes(1);
    assert_eq!(backend.create(1), Err(BackendError::OutOfMemory { capacity: 1, needed, available: 0 }));
    assert!(matches!(backend.snapshot(a), Err(BackendError::OutOfMemory { .. })));
    backend.free(a).unwrap();
    assert_eq!(backend.create(129), Err(BackendError::TooLong { capacity: 129, context: 128 }));
    assert!(backend.create(1).is_ok());
}

#[test]
fn an_invalid_batch_is_refused_and_changes_nothing() {
    if !device() {
        return;
    }
    let mut backend = load("q4").backend();
    let a = backend.create(8).unwrap();
    feed(&mut backend, a, 0, &[1, 2]);
    // Each rule has its test in lily-model; here, what this backend knows of its sequences.
    let ids = |start, ids: &[u32]| vec![segment(a, start, ids, Want::Nothing)];
    let last = vec![Segment { seq: a, start: 2, tokens: Tokens::LastSampled, want: Want::Nothing }];
    let cases = [
        (ids(0, &[3]), "continues at 0, but has 2 tokens"),
        (ids(2, &[1; 7]), "would have 9 tokens, its capacity is 8"),
        (ids(2, &[384]), "token 384, the vocabulary has 384"),
        (last, "has sampled nothing yet"),
    ];
    for (segments, words) in cases {
        let e = backend.forward(&Batch { segments }).unwrap_err().to_string();
        assert!(e.contains(words), "{e:?} should say {words:?}");
    }
    assert!(backend.wait(Ticket(99)).is_err());
    let got = feed(&mut backend, a, 2, &[3]);
    assert!(got[0] == fresh(&mut backend, &[1, 2, 3])[2]);
}

/// Draws on the device are those of lily-model from the same logits.
#[test]
fn draws_equal_the_hosts() {
    if !device() {
        return;
    }
    let model = load("demo");
    let vocab = model.config.vocab_size;
    let mut backend = model.backend();
    let mut n = Numbers(9);
    let mut differ = Vec::new();
    for case in 0..200 {
        let ids: Vec<u32> = (0..1 + n.next() % 40).map(|_| (n.next() % vocab as u64) as u32).collect();
        let pick = |n: &mut Numbers, of: &[f32]| of[n.next() as usize % of.len()];
        let mask: Vec<u32> = (0..vocab.div_ceil(32)).map(|_| n.next() as u32).collect();
        let params = SampleParams {
            temperature: pick(&mut n, &[0.0, 0.3, 1.0, 2.0]),
            top_k: [0, 1, 5, 20, 2000, 100_000][n.next() as usize % 6],
            top_p: pick(&mut n, &[1.0, 0.95, 0.5, 0.0]),
            min_p: pick(&mut n, &[0.0, 0.0, 0.05]),
            repetition_penalty: pick(&mut n, &[1.0, 1.3]),
            presence_penalty: pick(&mut n, &[0.0, 0.7]),
            frequency_penalty: pick(&mut n, &[0.0, 0.2]),
            generated_from: (ids.len() / 2) as u32,
            logit_bias: if n.next().is_multiple_of(3) {
                Arc::new([(7, 3.5), (8, -100.0)])
            } else {
                Arc::new([])
            },
            mask: n.next().is_multiple_of(3).then(|| mask.into()),
            seed: n.next(),
            logprobs: n.next().is_multiple_of(4).then_some(5),
        };
        let seqs = [backend.create(64).unwrap(), backend.create(64).unwrap()];
        let segments = vec![
            segment(seqs[0], 0, &ids, Want::Logits(Rows::Last)),
            segment(seqs[1], 0, &ids, Want::Sample(params.clone().into())),
        ];
        let mut outputs = step(&mut backend, segments);
        let (Ok(Output::Sampled(got)), Ok(Output::Logits(mut logits))) =
            (outputs.remove(1), outputs.remove(0))
        else {
            panic!("case {case}");
        };
        let expected = sample(&mut logits, &ids, &params);
        if got.token != expected.token {
            differ.push((case, params));
        } else if let (Some(a), Some(b)) = (got.logprobs, expected.logprobs) {
            assert!((a.token - b.token).abs() < 1e-4 && a.top == b.top, "{a:?} {b:?}");
        }
        seqs.into_iter().for_each(|s| backend.free(s).unwrap());
    }
    // Sums of probabilities in another order may move a token over the edge of top-p.
    println!("{} of 200 draws differ", differ.len());
    assert!(differ.len() <= 1, "{differ:?}");
}

#[test]
fn a_value_that_is_not_finite_fails_its_segment_and_no_other() {
    if !device() {
        return;
    }
    let mut model = load("q4");
    // The gain makes channel 0 infinite where it is not 0: everywhere.
    model.weights.layers[1].post_attention_norm[0] = f32::INFINITY;
    let mut backend = model.backend();
    let a = backend.create(8).unwrap();
    let outputs = step(&mut backend, vec![segment(a, 0, &[1, 2], Want::Nothing)]);
    assert_eq!(outputs[0].as_ref().unwrap_err(), &SegmentError::NonFinite { position: 0 });

    let mut model = load("dense");
    nan_embedding(&mut model, 7);
    let mut backend = model.backend();
    let (a, b) = (backend.create(8).unwrap(), backend.create(8).unwrap());
    let outputs = step(
        &mut backend,
        vec![
            segment(a, 0, &[1, 2, 7, 3], Want::Sample(SampleParams::greedy().into())),
            segment(b, 0, &[1, 2], Want::Sample(SampleParams::greedy().into())),
        ],
    );
    assert_eq!(outputs[0].as_ref().unwrap_err(), &SegmentError::NonFinite { position: 2 });
    assert!(outputs[1].is_ok());
    backend.free(a).unwrap();
    // Its pages are used again, and what was in them does no harm.
    let again = backend.create(8).unwrap();
    let got = feed(&mut backend, again, 0, &[1, 2, 3]);
    assert!(got.iter().flatten().all(|x| x.is_finite()));
}

/// Makes the embedding of a token NaN.
fn nan_embedding(model: &mut common::Model, token: usize) {
    use lily_model::files::Bytes;
    use lily_model::matrix::{FloatType, Floats, Form};
    let hidden = model.config.hidden_size;
    let Form::Dense(floats) = &model.weights.embedding.form else {
        unreachable!("the fixture is unquantised")
    };
    let mut values = floats.to_vec();
    values[token * hidden] = f32::NAN;
    let data = values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    model.weights.embedding.form = Form::Dense(Floats { dtype: FloatType::F32, data: Bytes::new(data) });
}
