//! Calls that break the contract, and weights that are broken.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::sync::Arc;

use common::{feed, load, segment, step};
use lily_cpu::Options;
use lily_model::backend::{
    Backend, BackendError, Batch, Output, Rows, Segment, SegmentError, SeqId, SnapshotId, Ticket, Tokens,
    Want,
};
use lily_model::files::Bytes;
use lily_model::matrix::{FloatType, Floats, Form};

#[test]
fn an_invalid_batch_is_refused_and_changes_nothing() {
    let mut backend = load("q4").backend();
    let a = backend.create(8).unwrap();
    feed(&mut backend, a, 0, &[1, 2]);
    // Each rule has its test in lily-model; here, what this backend knows of its sequences.
    let ids = |seq, start, ids: &[u32]| vec![segment(seq, start, ids, Want::Nothing)];
    let last = vec![Segment { seq: a, start: 2, tokens: Tokens::LastSampled, want: Want::Nothing }];
    let cases = [
        (ids(a, 0, &[3]), "sequence 1 continues at 0, but has 2 tokens"),
        (ids(a, 2, &[1; 7]), "sequence 1 would have 9 tokens, its capacity is 8"),
        (ids(a, 2, &[384]), "token 384, the vocabulary has 384"),
        (last, "has sampled nothing yet"),
    ];
    for (segments, words) in cases {
        let e = backend.forward(&Batch { segments }).unwrap_err().to_string();
        assert!(e.contains(words), "{e:?} should say {words:?}");
    }
    let unknown = BackendError::Unknown { kind: "sequence", id: 99 };
    assert_eq!(backend.forward(&Batch { segments: ids(SeqId(99), 0, &[1]) }).unwrap_err(), unknown);
    assert_eq!(backend.free(SeqId(99)).unwrap_err(), unknown);
    assert!(backend.resume(SnapshotId(99), 1).is_err() && backend.export(SnapshotId(99)).is_err());
    assert!(backend.wait(Ticket(99)).is_err());
    let mut fresh = load("q4").backend();
    let b = fresh.create(8).unwrap();
    assert_eq!(feed(&mut backend, a, 2, &[3])[0], feed(&mut fresh, b, 0, &[1, 2, 3])[2]);
}

#[test]
fn memory_is_reserved_up_front_and_refused_with_numbers() {
    let model = load("q4");
    let mut backend = model.backend_with(Options { context: 128, max_sequences: 2, ..Options::default() });
    let (a, _b) = (backend.create(128).unwrap(), backend.create(128).unwrap());
    assert_eq!(backend.free_bytes(), 0);
    let needed = backend.state_bytes(1);
    assert_eq!(backend.create(1), Err(BackendError::OutOfMemory { capacity: 1, needed, available: 0 }));
    backend.free(a).unwrap();
    assert_eq!(backend.create(129), Err(BackendError::TooLong { capacity: 129, context: 128 }));
    assert!(backend.create(1).is_ok());
}

#[test]
fn tickets_are_redeemed_in_order() {
    let mut backend = load("q4").backend();
    let (a, b) = (backend.create(8).unwrap(), backend.create(8).unwrap());
    let one = backend.forward(&Batch { segments: vec![segment(a, 0, &[1], Want::Nothing)] }).unwrap();
    let two =
        backend.forward(&Batch { segments: vec![segment(b, 0, &[1, 2], Want::Logits(Rows::Last))] }).unwrap();
    assert!(backend.wait(Ticket(two.0)).is_err());
    assert!(matches!(backend.wait(one).unwrap()[..], [Ok(Output::Nothing)]));
    assert!(matches!(backend.wait(two).unwrap()[..], [Ok(Output::Logits(_))]));
}

#[test]
fn a_nan_weight_fails_the_request_that_meets_it_and_no_other() {
    let mut model = load("dense");
    let weights = Arc::get_mut(&mut model.weights).unwrap();
    // Token 7's embedding is NaN: whoever uses it fails at its position.
    let mut values = match &weights.embedding.form {
        Form::Dense(floats) => floats.to_vec(),
        Form::Affine { .. } => unreachable!("the fixture is unquantised"),
    };
    values[7 * model.config.hidden_size] = f32::NAN;
    let data = values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    weights.embedding.form = Form::Dense(Floats { dtype: FloatType::F32, data: Bytes::new(data) });
    let mut backend = model.backend();
    let (a, b) = (backend.create(8).unwrap(), backend.create(8).unwrap());
    let outputs = step(
        &mut backend,
        vec![
            segment(a, 0, &[1, 2, 7, 3], Want::Logits(Rows::Last)),
            segment(b, 0, &[1, 2], Want::Logits(Rows::Last)),
        ],
    );
    assert_eq!(outputs[0].as_ref().unwrap_err(), &SegmentError::NonFinite { position: 2 });
    assert!(outputs[1].is_ok());
    backend.free(a).unwrap();
    let again = backend.create(8).unwrap();
    feed(&mut backend, again, 0, &[1, 2, 3]);
}

/// Infinite activations anywhere must end as an error too, also where nothing but state is wanted.
#[test]
fn an_overflow_is_noticed_in_a_chunk_without_output() {
    let mut model = load("q4");
    Arc::get_mut(&mut model.weights).unwrap().layers[1].post_attention_norm[0] = f32::INFINITY;
    let mut backend = model.backend();
    let a = backend.create(8).unwrap();
    let outputs = step(&mut backend, vec![segment(a, 0, &[1, 2], Want::Nothing)]);
    assert_eq!(outputs[0].as_ref().unwrap_err(), &SegmentError::NonFinite { position: 0 });
}

/// 130 tokens are two full pages and a part of one. What is shared counts once, until the last holder lets go.
#[test]
fn shared_pages_are_charged_once() {
    let mut backend = load("q4").backend();
    let budget = backend.free_bytes();
    let fixed = backend.state_bytes(0);
    let page = backend.state_bytes(64) - fixed;
    let seq = backend.create(192).unwrap();
    feed(&mut backend, seq, 0, &(0..130).collect::<Vec<u32>>());
    assert_eq!(budget - backend.free_bytes(), fixed + 3 * page);
    let snapshot = backend.snapshot(seq).unwrap();
    assert_eq!(budget - backend.free_bytes(), 2 * fixed + 4 * page);
    let other = backend.resume(snapshot, 256).unwrap();
    assert_eq!(budget - backend.free_bytes(), 3 * fixed + 6 * page);
    feed(&mut backend, other, 130, &[1, 2, 3]);
    feed(&mut backend, seq, 130, &[1, 2, 3]);
    assert_eq!(budget - backend.free_bytes(), 3 * fixed + 6 * page);
    backend.free(seq).unwrap();
    assert_eq!(budget - backend.free_bytes(), 2 * fixed + 5 * page);
    backend.forget(snapshot).unwrap();
    assert_eq!(budget - backend.free_bytes(), fixed + 4 * page);
    backend.free(other).unwrap();
    assert_eq!(backend.free_bytes(), budget);
}
