//! The backend as it is on a Mac, on a device that runs the kernels on the CPU: what the engine asks of it.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::collections::VecDeque;
use std::sync::Arc;

use common::Order;
use common::device::ShimDevice;
use common::model::{Model, folder};
use lily_cpu::reference::State;
use lily_cpu::tap::no_tap;
use lily_metal::{KvType, LoadError, MetalBackend, Options};
use lily_model::backend::{
    Backend, BackendError, Batch, Output, Rows, Segment, SegmentError, SeqId, StepOutput, Ticket, Tokens,
    Want,
};
use lily_model::sample::{SampleParams, sample};

type Shim = MetalBackend<ShimDevice>;

fn nano() -> Model {
    Model::load(&folder("tests/data/nano/mlx-4bit"))
}

fn options() -> Options {
    Options {
        context: 320,
        max_batch_tokens: 64,
        max_sequences: 4,
        snapshot_bytes: 1 << 20,
        kv: KvType::F32,
        aligned_copies: false,
        ..Options::default()
    }
}

fn backend_with(model: &Model, options: &Options) -> Shim {
    let mut device = ShimDevice::new(1 << 30);
    device.order = Order::Random(3);
    MetalBackend::new(device, model.config.clone(), &model.weights, options).unwrap()
}

fn backend(model: &Model) -> Shim {
    backend_with(model, &options())
}

fn segment(seq: SeqId, start: usize, ids: &[u32], want: Want) -> Segment {
    Segment { seq, start: start as u32, tokens: Tokens::Ids(ids.to_vec()), want }
}

fn greedy() -> Want {
    Want::Sample(SampleParams::greedy().into())
}

fn step(backend: &mut Shim, segments: Vec<Segment>) -> StepOutput {
    let ticket = backend.forward(&Batch { segments }).unwrap();
    backend.wait(ticket).unwrap()
}

fn rows(output: Output, vocab: usize) -> Vec<Vec<f32>> {
    match output {
        Output::Logits(logits) => logits.chunks_exact(vocab).map(<[f32]>::to_vec).collect(),
        other => panic!("expected logits, got {other:?}"),
    }
}

fn token(output: Result<Output, SegmentError>) -> u32 {
    match output.unwrap() {
        Output::Sampled(sampled) => sampled.token,
        other => panic!("expected a token, got {other:?}"),
    }
}

/// Feeds tokens at the end of a sequence; logits of all of them.
fn feed(backend: &mut Shim, seq: SeqId, start: usize, ids: &[u32]) -> Vec<Vec<f32>> {
    let limits = backend.limits();
    let (vocab, most) = (limits.vocab_size as usize, limits.max_batch_tokens as usize);
    let mut out = Vec::new();
    for (i, ids) in ids.chunks(most).enumerate() {
        let all = segment(seq, start + i * most, ids, Want::Logits(Rows::All));
        out.extend(rows(step(backend, vec![all]).remove(0).unwrap(), vocab));
    }
    out
}

fn fresh(model: &Model, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut backend = backend(model);
    let seq = backend.create(ids.len() as u32).unwrap();
    feed(&mut backend, seq, 0, ids)
}

/// Logits of every position by the plain f32 reference.
fn reference(model: &Model, ids: &[u32]) -> Vec<Vec<f32>> {
    let (reference, mut state) = (model.reference(), State::default());
    ids.iter().map(|id| reference.logits(&reference.step(*id, &mut state, &mut no_tap))).collect()
}

fn assert_close(got: &[Vec<f32>], expected: &[Vec<f32>]) {
    assert_eq!(got.len(), expected.len());
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        for (a, b) in got.iter().zip(expected) {
            assert!((a - b).abs() < 1e-4, "row {i}: {a}, expected {b}");
        }
    }
}

/// Words of a golden tensor.
fn golden(name: &str) -> Vec<u32> {
    let bytes = std::fs::read(folder("tests/data/nano/goldens/goldens.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    tensors.tensor(name).unwrap().data().as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w)).collect()
}

/// Reads prompts side by side and writes `n` greedy tokens behind each, two steps in flight and no token seen by the host between.
fn write(backend: &mut Shim, prompts: &[Vec<u32>], n: usize) -> Vec<Vec<u32>> {
    let seqs: Vec<_> = prompts.iter().map(|p| backend.create((p.len() + n) as u32).unwrap()).collect();
    let mut texts = vec![Vec::new(); prompts.len()];
    let mut tickets = VecDeque::new();
    for i in 0..=n {
        if i < n {
            let segment = |(seq, p): (&SeqId, &Vec<u32>)| Segment {
                seq: *seq,
                start: if i == 0 { 0 } else { (p.len() + i - 1) as u32 },
                tokens: if i == 0 { Tokens::Ids(p.clone()) } else { Tokens::LastSampled },
                want: greedy(),
            };
            tickets.push_back(
                backend
                    .forward(&Batch { segments: seqs.iter().zip(prompts).map(segment).collect() })
                    .unwrap(),
            );
        }
        if i >= 1 {
            let outputs = backend.wait(tickets.pop_front().unwrap()).unwrap();
            texts.iter_mut().zip(outputs).for_each(|(text, out)| text.push(token(out)));
        }
    }
    seqs.into_iter().for_each(|s| backend.free(s).unwrap());
    texts
}

#[test]
fn golden_tokens_are_written_with_two_steps_in_flight() {
    let mut backend = backend(&nano());
    let prompts = [1, 7].map(|n| golden(&format!("prompt.{n}")));
    let texts = write(&mut backend, &prompts, 32);
    for (n, text) in [1, 7].into_iter().zip(texts) {
        assert_eq!(text, golden(&format!("decode.q4.{n}")), "prompt {n}");
    }
    assert!(backend.device().most_waiting >= 2, "steps wait for each other");
}

/// The original files of a model: nothing is quantised, and gate and up of an expert lie beside each other.
#[test]
fn golden_tokens_and_logits_of_a_model_in_bf16() {
    let model = Model::load(&folder("tests/data/nano/hf"));
    let mut backend = backend(&model);
    // What is whole in the file stays there.
    assert!(backend.device().mapped_bytes() > 0);
    let prompts = [1, 7].map(|n| golden(&format!("prompt.{n}")));
    for (n, text) in [1, 7].into_iter().zip(write(&mut backend, &prompts, 32)) {
        assert_eq!(text, golden(&format!("decode.dense.{n}")), "prompt {n}");
    }
    let seq = backend.create(7).unwrap();
    let got = feed(&mut backend, seq, 0, &prompts[1]);
    for reference in ["hf", "mlx"] {
        let words = golden(&format!("dense.{reference}.7.prefill"));
        let expected: Vec<Vec<f32>> =
            words.chunks_exact(384).map(|row| row.iter().map(|w| f32::from_bits(*w)).collect()).collect();
        assert_close(&got, &expected);
    }
}

/// The kernels read bf16 alone.
#[test]
fn matrices_of_other_floats_are_refused_by_name() {
    use lily_model::matrix::{FloatType, Form};
    let mut model = Model::load(&folder("tests/data/nano/hf"));
    let Form::Dense(values) = &mut model.weights.layers[2].moe.shared.down.form else { panic!("quantised") };
    values.dtype = FloatType::F16;
    let device = ShimDevice::new(1 << 30);
    let e = MetalBackend::new(device, model.config.clone(), &model.weights, &options()).err().unwrap();
    let words = "floats of layers.2.mlp.shared_expert.down_proj are F16, expected Bf16; use --device cpu";
    assert!(e.to_string().contains(words), "{e}");
}

#[test]
#[ignore = "a minute: longer prompts"]
fn golden_tokens_are_written_behind_longer_prompts() {
    let mut backend = backend_with(&nano(), &Options { context: 400, max_batch_tokens: 512, ..options() });
    for n in [64, 300] {
        let texts = write(&mut backend, &[golden(&format!("prompt.{n}"))], 32);
        assert_eq!(texts[0], golden(&format!("decode.q4.{n}")), "prompt {n}");
    }
}

/// More rows of logits than are kept at once, over the edge of a page, in segments of several sequences.
#[test]
fn logits_of_every_position_are_those_of_the_reference() {
    let model = nano();
    let ids = golden("prompt.300");
    let mut backend = backend_with(&model, &Options { max_batch_tokens: 128, ..options() });
    let (a, b) = (backend.create(80).unwrap(), backend.create(80).unwrap());
    let both = vec![
        segment(a, 0, &ids[..70], Want::Logits(Rows::All)),
        segment(b, 0, &ids[100..105], Want::Logits(Rows::Last)),
    ];
    let mut outputs = step(&mut backend, both).into_iter();
    let mut next = || rows(outputs.next().unwrap().unwrap(), model.config.vocab_size);
    assert_close(&next(), &reference(&model, &ids[..70]));
    assert_close(&next(), &reference(&model, &ids[100..105])[4..]);
}

/// Chunks whose logits nobody wants end with the state of the last layer, which is all there; beside one whose are.
#[test]
fn a_prompt_is_read_without_logits() {
    let model = nano();
    let ids = &golden("prompt.300")[..40];
    let mut backend = backend(&model);
    let (a, b) = (backend.create(40).unwrap(), backend.create(40).unwrap());
    step(&mut backend, vec![segment(a, 0, &ids[..20], Want::Nothing)]);
    step(&mut backend, vec![segment(a, 20, &ids[20..21], Want::Nothing)]);
    let last = Want::Logits(Rows::Last);
    let beside = vec![segment(b, 0, &ids[..3], last.clone()), segment(a, 21, &ids[21..33], Want::Nothing)];
    let output = step(&mut backend, beside).remove(0).unwrap();
    assert_close(&rows(output, model.config.vocab_size), &reference(&model, &ids[..3])[2..]);
    let output = step(&mut backend, vec![segment(a, 33, &ids[33..], last)]).remove(0).unwrap();
    assert_close(&rows(output, model.config.vocab_size), &reference(&model, ids)[39..]);
}

/// A folder with `nano`, in which tensors are aligned as other writers than MLX do it, or all of them are not.
fn nano_in_a_folder(is_aligned: bool) -> tempfile::TempDir {
    let out = tempfile::tempdir().unwrap();
    let from = folder("tests/data/nano/mlx-4bit");
    std::fs::copy(from.join("config.json"), out.path().join("config.json")).unwrap();
    let file = std::fs::read(from.join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let mut bytes = safetensors::serialize(tensors.tensors(), None).unwrap();
    if !is_aligned {
        // A header may end in spaces.
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) + 3;
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        bytes.splice(5 + length as usize..5 + length as usize, *b"   ");
    }
    std::fs::write(out.path().join("model.safetensors"), bytes).unwrap();
    out
}

/// Aligned copies in a folder, and what a backend of it has mapped and says.
fn copies_and_logits(folder: &std::path::Path, aligned_copies: bool) -> (Vec<String>, usize, Vec<Vec<f32>>) {
    let model = Model::load(folder);
    let mut backend = backend_with(&model, &Options { aligned_copies, ..options() });
    let seq = backend.create(3).unwrap();
    let logits = feed(&mut backend, seq, 0, &[1, 2, 3]);
    let names = std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".lily-aligned")).collect();
    names.sort();
    (names, backend.device().mapped_bytes(), logits)
}

#[test]
fn weights_stay_in_their_files_or_in_an_aligned_copy() {
    let expected = fresh(&nano(), &[1, 2, 3]);
    let size = |path: &std::path::Path| std::fs::metadata(path).unwrap().len() as usize;
    let aligned = nano_in_a_folder(true);
    let (copies, mapped, logits) = copies_and_logits(aligned.path(), true);
    assert_eq!((copies.len(), mapped), (0, size(&aligned.path().join("model.safetensors"))));
    assert!(logits == expected);

    let odd = nano_in_a_folder(false);
    let (copies, mapped, logits) = copies_and_logits(odd.path(), false);
    assert_eq!((copies.len(), mapped), (0, 0));
    assert!(logits == expected);
    let check = |count: usize| {
        let (copies, mapped, logits) = copies_and_logits(odd.path(), true);
        assert_eq!(copies.len(), count);
        assert!(logits == expected);
        (odd.path().join(copies.last().unwrap()), mapped)
    };
    let (copy, mapped) = check(1);
    assert_eq!(mapped, size(&copy));
    // It is found again, and one that is cut off is made anew.
    let made = std::fs::metadata(&copy).unwrap().modified().unwrap();
    check(1);
    assert_eq!(std::fs::metadata(&copy).unwrap().modified().unwrap(), made);
    std::fs::write(&copy, b"cut off").unwrap();
    check(1);
    // A file that changed gets another copy.
    let file = std::fs::File::options().write(true).open(odd.path().join("model.safetensors")).unwrap();
    file.set_modified(made + std::time::Duration::from_secs(9)).unwrap();
    check(2);
}

#[test]
fn weights_are_kept_resident_unless_told_otherwise() {
    let folder = nano_in_a_folder(true);
    for (residency, buffers) in [(true, 2), (false, 0)] {
        let mut backend = backend_with(&Model::load(folder.path()), &Options { residency, ..options() });
        // The file, and one allocation for the vectors.
        assert_eq!(backend.device().resident, buffers);
    }
}

/// Sequences side by side in one submission; and so many pieces of a few tokens that their attention takes more memory than there
/// is: then each for itself.
#[test]
fn sequences_in_a_step_are_what_they_are_alone() {
    let model = nano();
    let small = Options { context: 64, max_sequences: 32, snapshot_bytes: 0, ..options() };
    let mut backend = backend_with(&model, &small);
    let ids = golden("prompt.300");
    let prompts = |lengths: &[usize]| -> Vec<Vec<u32>> {
        lengths.iter().enumerate().map(|(i, n)| ids[3 * i..3 * i + n].to_vec()).collect()
    };
    for (lengths, submissions) in [(&[15, 1, 20, 2][..], 1), (&[2; 32], 32)] {
        let prompts = prompts(lengths);
        let seqs: Vec<SeqId> = prompts.iter().map(|p| backend.create(p.len() as u32).unwrap()).collect();
        let segments =
            seqs.iter().zip(&prompts).map(|(seq, p)| segment(*seq, 0, p, Want::Logits(Rows::Last)));
        let before = backend.device().submissions;
        let outputs = step(&mut backend, segments.collect());
        assert_eq!(backend.device().submissions - before, submissions);
        for (prompt, output) in prompts.iter().zip(outputs) {
            let got = rows(output.unwrap(), model.config.vocab_size);
            assert_close(&got, &reference(&model, prompt)[prompt.len() - 1..]);
        }
        seqs.into_iter().for_each(|seq| backend.free(seq).unwrap());
    }
}

#[test]
fn snapshots_are_shared_resumed_and_survive_their_sequence() {
    let model = nano();
    let mut backend = backend(&model);
    let free = backend.free_bytes();
    let ids = &golden("prompt.300")[..90];
    let seq = backend.create(100).unwrap();
    let mut whole = feed(&mut backend, seq, 0, &ids[..70]);
    let before = backend.free_bytes();
    let snapshot = backend.snapshot(seq).unwrap();
    // Its pages are those of the sequence.
    assert_eq!(before - backend.free_bytes(), backend.state_bytes(0));
    // The sequence goes on in the page that the snapshot shares, and is then freed and its memory used again.
    whole.extend(feed(&mut backend, seq, 70, &ids[70..]));
    let other = backend.resume(snapshot, 100).unwrap();
    feed(&mut backend, other, 70, &[5, 6, 7]);
    backend.free(seq).unwrap();
    for _ in 0..2 {
        let resumed = backend.resume(snapshot, 100).unwrap();
        assert!(feed(&mut backend, resumed, 70, &ids[70..])[..] == whole[70..]);
        backend.free(resumed).unwrap();
    }
    backend.free(other).unwrap();
    backend.forget(snapshot).unwrap();
    assert_eq!(backend.free_bytes(), free);
}

#[test]
fn an_exported_snapshot_resumes_in_another_backend() {
    let model = nano();
    let ids = &golden("prompt.300")[..75];
    let mut first = backend(&model);
    let seq = first.create(100).unwrap();
    feed(&mut first, seq, 0, &ids[..69]);
    let drawn = token(step(&mut first, vec![segment(seq, 69, &ids[69..70], greedy())]).remove(0));
    let snapshot = first.snapshot(seq).unwrap();
    let rest = feed(&mut first, seq, 70, &ids[70..]);
    let bytes = first.export(snapshot).unwrap();
    let mut second = backend(&model);
    let imported = second.import(&bytes).unwrap();
    let again = second.resume(imported, 100).unwrap();
    assert!(feed(&mut second, again, 70, &ids[70..]) == rest);
    // It knows the token that was drawn before.
    let again = second.resume(imported, 100).unwrap();
    let want = Want::Logits(Rows::Last);
    let last = step(&mut second, vec![Segment { seq: again, start: 70, tokens: Tokens::LastSampled, want }])
        .remove(0);
    let again = second.resume(imported, 100).unwrap();
    assert!(rows(last.unwrap(), model.config.vocab_size) == feed(&mut second, again, 70, &[drawn]));
    assert_eq!(second.export(imported).unwrap(), bytes);

    for (at, words) in [(3, "format version"), (40, "checksum"), (bytes.len() - 1, "checksum")] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1;
        let e = second.import(&damaged).unwrap_err().to_string();
        assert!(e.contains(words), "{e}");
    }
    let mut other = backend_with(&model, &Options { kv: KvType::Bf16, ..options() });
    let e = other.import(&bytes).unwrap_err().to_string();
    assert!(e.contains("another precision"), "{e}");
    let mut short = backend_with(&model, &Options { context: 64, ..options() });
    let e = short.import(&bytes).unwrap_err().to_string();
    assert!(e.contains("it has 70 tokens, the context is 64"), "{e}");
}

/// Wherever a sequence is cut: behind each number of tokens that its recurrent state lacks, beside another sequence.
#[test]
fn what_is_pending_is_in_snapshots_and_exports() {
    let model = nano();
    let ids = golden("prompt.300");
    let lengths = [17, 1, 1, 1, 1, 1, 2, 1, 16, 1, 1];
    // Steps of a sequence from one of them on, and the logits of each.
    let go_on = |backend: &mut Shim, seq: SeqId, steps: std::ops::Range<usize>| -> Vec<Vec<Vec<f32>>> {
        let mut step = |i: usize| {
            let start = lengths[..i].iter().sum();
            feed(backend, seq, start, &ids[start..start + lengths[i]])
        };
        steps.map(&mut step).collect()
    };
    let (mut alone, mut first, mut second) = (backend(&model), backend(&model), backend(&model));
    let whole = alone.create(60).unwrap();
    let expected = go_on(&mut alone, whole, 0..lengths.len());
    let (seq, other) = (first.create(60).unwrap(), first.create(60).unwrap());
    for cut in 1..lengths.len() - 3 {
        assert!(go_on(&mut first, seq, cut - 1..cut)[..] == expected[cut - 1..cut]);
        feed(&mut first, other, cut - 1, &ids[100 + cut..101 + cut]);
        let snapshot = first.snapshot(seq).unwrap();
        let imported = second.import(&first.export(snapshot).unwrap()).unwrap();
        for (backend, snapshot) in [(&mut first, snapshot), (&mut second, imported)] {
            let resumed = backend.resume(snapshot, 60).unwrap();
            assert!(go_on(backend, resumed, cut..cut + 3)[..] == expected[cut..cut + 3], "cut at {cut}");
            backend.free(resumed).unwrap();
            backend.forget(snapshot).unwrap();
        }
    }
}

#[test]
fn memory_is_reserved_up_front_and_refused_with_numbers() {
    let small = Options { context: 128, max_sequences: 2, snapshot_bytes: 0, ..options() };
    let mut backend = backend_with(&nano(), &small);
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
fn a_device_that_is_too_small_is_refused_at_load() {
    let model = nano();
    let load = |memory| {
        MetalBackend::new(ShimDevice::new(memory), model.config.clone(), &model.weights, &options()).err()
    };
    let e = load(1 << 20).unwrap();
    assert!(matches!(e, LoadError::Memory { available: 1_048_576, .. }), "{e}");
    assert!(e.to_string().contains("lower --ctx-size or --max-sequences"), "{e}");
}

#[test]
fn an_invalid_batch_is_refused_and_changes_nothing() {
    let model = nano();
    let mut backend = backend(&model);
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
    assert_eq!(step(&mut backend, vec![]).len(), 0);
    assert_close(&feed(&mut backend, a, 2, &[3]), &fresh(&model, &[1, 2, 3])[2..]);
}

/// Two steps in flight: the second one's penalties know of the token that the first has yet to draw.
#[test]
fn draws_are_those_of_the_model() {
    let model = nano();
    let mut backend = backend(&model);
    let params = SampleParams {
        temperature: 1.3,
        seed: 7,
        repetition_penalty: 1.2,
        frequency_penalty: 0.3,
        generated_from: 3,
        logit_bias: Arc::new([(9, 2.0)]),
        logprobs: Some(3),
        ..SampleParams::greedy()
    };
    let kept = SampleParams { top_k: 20, top_p: 0.95, logprobs: None, ..params.clone() };
    let kinds = [params, kept, SampleParams::greedy()];
    let seq = backend.create(40).unwrap();
    let (mut fed, mut tickets, mut drawn) = (vec![1, 2, 3], VecDeque::new(), Vec::new());
    for i in 0..12u32 {
        let tokens = if i == 0 { Tokens::Ids(fed.clone()) } else { Tokens::LastSampled };
        let want = Want::Sample(kinds[i as usize % 3].clone().into());
        let start = if i == 0 { 0 } else { 2 + i };
        tickets.push_back(
            backend.forward(&Batch { segments: vec![Segment { seq, start, tokens, want }] }).unwrap(),
        );
        if tickets.len() == 2 {
            drawn.extend(backend.wait(tickets.pop_front().unwrap()).unwrap());
        }
    }
    drawn.extend(tickets.into_iter().flat_map(|ticket| backend.wait(ticket).unwrap()));
    assert_eq!(drawn.len(), 12);
    for (i, output) in drawn.into_iter().enumerate() {
        let Output::Sampled(got) = output.unwrap() else { panic!("no token") };
        let mut logits = reference(&model, &fed).pop().unwrap();
        let expected = sample(&mut logits, &fed, &kinds[i % 3]);
        assert_eq!(got.token, expected.token, "token {i}");
        if let (Some(got), Some(expected)) = (&got.logprobs, &expected.logprobs) {
            assert!((got.token - expected.token).abs() < 1e-4);
        }
        assert_eq!(got.logprobs.is_some(), expected.logprobs.is_some());
        fed.push(got.token);
    }
    assert!(backend.device().most_waiting >= 2, "steps wait for each other");
}

#[test]
fn a_value_that_is_not_finite_fails_its_segment_and_no_other() {
    let mut model = nano();
    let mut damaged = nano();
    // The gain makes channel 0 infinite where it is not 0: everywhere.
    damaged.weights.layers[1].post_attention_norm[0] = f32::INFINITY;
    let mut backend = backend(&damaged);
    let a = backend.create(8).unwrap();
    let outputs = step(&mut backend, vec![segment(a, 0, &[1, 2], Want::Nothing)]);
    assert_eq!(outputs[0].as_ref().unwrap_err(), &SegmentError::NonFinite { position: 0 });

    // Of one token alone: its embedding has a scale of NaN.
    nan_embedding(&mut model, 7);
    let mut backend = backend_with(&model, &options());
    let (a, b) = (backend.create(8).unwrap(), backend.create(8).unwrap());
    let both = vec![segment(a, 0, &[1, 2, 7, 3], greedy()), segment(b, 0, &[1, 2], greedy())];
    let outputs = step(&mut backend, both);
    // Attention multiplies what is masked by zero, so the tokens read with it may be lost too.
    assert!(matches!(outputs[0], Err(SegmentError::NonFinite { position: 0..=2 })));
    assert!(outputs[1].is_ok());
    backend.free(a).unwrap();
    // Its slot and pages are used again, and what was in them does no harm.
    let again = backend.create(8).unwrap();
    assert!(feed(&mut backend, again, 0, &[1, 2, 3]).iter().flatten().all(|x| x.is_finite()));
}

/// Makes the embedding of a token NaN.
fn nan_embedding(model: &mut Model, token: usize) {
    use lily_model::files::Bytes;
    use lily_model::matrix::Form;
    let groups = model.config.hidden_size / 64;
    let Form::Affine { scales, .. } = &mut model.weights.embedding.form else { panic!("not quantised") };
    let mut data = scales.data.to_vec();
    data[2 * token * groups..2 * (token + 1) * groups].fill(0xff);
    scales.data = Bytes::new(data);
}

/// An error of the GPU is one of the requests that were in the step, and of no other.
#[test]
fn a_step_that_the_device_gives_up_fails_its_requests() {
    let model = nano();
    let mut backend = backend(&model);
    let (a, b) = (backend.create(40).unwrap(), backend.create(40).unwrap());
    let expected = fresh(&model, &[1, 2, 3, 4]);
    assert_close(&feed(&mut backend, a, 0, &[1, 2, 3]), &expected[..3]);
    backend.device().failing = Some(0);
    let outputs = step(&mut backend, vec![segment(b, 0, &[1; 20], greedy())]);
    let e = outputs[0].as_ref().unwrap_err();
    assert_eq!(e.to_string(), "the device failed: the GPU stopped its work: it fails on purpose");
    backend.free(b).unwrap();
    assert_close(&feed(&mut backend, a, 3, &[4]), &expected[3..]);
    // Behind it in the queue too.
    let b = backend.create(40).unwrap();
    backend.device().failing = Some(0);
    let first = backend.forward(&Batch { segments: vec![segment(b, 0, &[1, 2], greedy())] }).unwrap();
    let second = backend.forward(&Batch { segments: vec![segment(a, 4, &[5], greedy())] }).unwrap();
    assert!(matches!(backend.wait(first).unwrap()[0], Err(SegmentError::Device(_))));
    assert!(backend.wait(second).unwrap()[0].is_ok());
}
