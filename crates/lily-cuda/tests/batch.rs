//! Many sequences in a step, at the shape of the real model with random weights.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{device, options, rows, segment, step};
use lily_cuda::gdn::CHUNK_ROWS;
use lily_cuda::{CudaBackend, Options};
use lily_model::backend::{Backend, Batch, Output, Rows, Segment, SeqId, Tokens, Want};
use lily_model::config::{Config, LayerKind};
use lily_model::presets::CONFIG_35B_A3B;
use lily_model::sample::SampleParams;

/// Greedy tokens of prompts that are read and continued in the same steps.
fn run(backend: &mut CudaBackend, prompts: &[Vec<u32>], tokens: usize) -> Vec<Vec<u32>> {
    let seqs: Vec<SeqId> = prompts.iter().map(|_| backend.create(128).unwrap()).collect();
    let mut texts = vec![Vec::new(); prompts.len()];
    for i in 0..tokens {
        let segment = |(seq, prompt): (&SeqId, &Vec<u32>)| Segment {
            seq: *seq,
            start: if i == 0 { 0 } else { (prompt.len() + i - 1) as u32 },
            tokens: if i == 0 { Tokens::Ids(prompt.clone()) } else { Tokens::LastSampled },
            want: Want::Sample(SampleParams::greedy().into()),
        };
        let ticket = backend.forward(&Batch { segments: seqs.iter().zip(prompts).map(segment).collect() });
        for (text, out) in texts.iter_mut().zip(backend.wait(ticket.unwrap()).unwrap()) {
            match out.unwrap() {
                Output::Sampled(s) => text.push(s.token),
                other => panic!("{other:?}"),
            }
        }
    }
    seqs.into_iter().for_each(|s| backend.free(s).unwrap());
    texts
}

#[test]
fn greedy_tokens_at_the_real_shape_are_the_same_alone_and_among_others() {
    if !device() {
        return;
    }
    let config = Config::from_json(CONFIG_35B_A3B).unwrap();
    let vocab = config.vocab_size as u32;
    let options = Options { context: 128, max_sequences: 32, max_batch_tokens: 256, ..options() };
    let mut backend = CudaBackend::random(config, 1, &options).unwrap();
    let ids = |i: u32, n: u32| (0..n).map(|j| (i * 7919 + j).wrapping_mul(2_654_435_761) % vocab).collect();
    let prompts: Vec<Vec<u32>> = (0..32).map(|i| ids(i, 1 + i % 7)).collect();
    let all = run(&mut backend, &prompts, 50);
    let mut distinct: Vec<u32> = all.concat();
    distinct.sort_unstable();
    distinct.dedup();
    assert!(distinct.len() > 100, "{} distinct tokens: random weights are not that dull", distinct.len());
    for (name, some) in [("3", 5..8), ("8", 16..24), ("17", 10..27), ("alone", 0..1), ("alone", 31..32)] {
        let got = run(&mut backend, &prompts[some.clone()], 50);
        for (i, (got, expected)) in got.iter().zip(&all[some]).enumerate() {
            let same = got.iter().zip(expected).take_while(|(a, b)| a == b).count();
            println!("{name}, sequence {i}: the first {same} of 50 tokens are the same");
            assert_eq!(same, 50);
        }
    }
}

/// Logits behind the last token of each sequence's next ones, which it has from `at` on.
fn feed_all(backend: &mut CudaBackend, at: usize, all: &[(SeqId, &[u32])]) -> Vec<Vec<f32>> {
    let vocab = backend.limits().vocab_size;
    let segments = all.iter().map(|(seq, ids)| segment(*seq, at, ids, Want::Logits(Rows::Last))).collect();
    step(backend, segments).into_iter().flat_map(|output| rows(output.unwrap(), vocab)).collect()
}

/// In a step of four sequences or more a token's updates of the recurrent states may wait in a log. Whatever the sequences do next,
/// logits are to the bit those of the same tokens one by one.
#[test]
fn updates_that_wait_in_logs_are_seen_by_all_that_follows() {
    if !device() {
        return;
    }
    let config = Config::from_json(CONFIG_35B_A3B).unwrap();
    let vocab = config.vocab_size as u32;
    let options = Options { context: 64, max_sequences: 8, max_batch_tokens: 32, ..options() };
    let mut backend = CudaBackend::random(config, 1, &options).unwrap();
    let text = |i: u32| (0..20).map(|j| (i * 131 + j).wrapping_mul(2_654_435_761) % vocab).collect();
    let texts: Vec<Vec<u32>> = (0..5).map(text).collect();
    let alone = |ids: &Vec<u32>| {
        let seq = backend.create(20).unwrap();
        let logits = (0..ids.len()).map(|i| feed_all(&mut backend, i, &[(seq, &ids[i..=i])]).remove(0));
        let logits: Vec<Vec<f32>> = logits.collect();
        backend.free(seq).unwrap();
        logits
    };
    let expected: Vec<Vec<Vec<f32>>> = texts.iter().map(alone).collect();
    for tokens in 1..=6 {
        let seqs: Vec<SeqId> = texts.iter().map(|_| backend.create(20).unwrap()).collect();
        let feed = |backend: &mut CudaBackend, at: usize, n: usize, some: std::ops::Range<usize>| {
            let all: Vec<_> = some.clone().map(|i| (seqs[i], &texts[i][at..at + n])).collect();
            for (i, logits) in some.zip(feed_all(backend, at, &all)) {
                assert!(logits == expected[i][at + n - 1], "{tokens} tokens, sequence {i}, {n} from {at} on");
            }
        };
        (0..tokens).for_each(|i| feed(&mut backend, i, 1, 0..5));
        // Two tokens each, of which the first meets what waits.
        feed(&mut backend, tokens, 2, 0..5);
        let at = tokens + 2;
        (at..at + tokens).for_each(|i| feed(&mut backend, i, 1, 0..5));
        let at = at + tokens;
        let snapshot = backend.snapshot(seqs[0]).unwrap();
        let bytes = backend.export(snapshot).unwrap();
        feed(&mut backend, at, 1, 0..1);
        feed(&mut backend, at, 1, 1..3);
        feed(&mut backend, at, 3, 3..4);
        feed(&mut backend, at, 1, 4..5);
        backend.forget(snapshot).unwrap();
        let imported = backend.import(&bytes).unwrap();
        let resumed = backend.resume(imported, 20).unwrap();
        let logits = feed_all(&mut backend, at, &[(resumed, &texts[0][at..=at])]);
        assert!(logits[0] == expected[0][at], "{tokens} tokens, resumed");
        backend.forget(imported).unwrap();
        backend.free(resumed).unwrap();
        seqs.into_iter().for_each(|seq| backend.free(seq).unwrap());
    }
}

/// Long segments go through kernels of their own, alone or beside short ones, behind any number of updates that wait. Logits, and those
/// of the tokens that follow, are to the bit those of the same tokens one by one; but for attention, which rounds otherwise, so there is
/// none here.
#[test]
fn a_chunk_says_what_its_tokens_say_one_by_one() {
    if !device() {
        return;
    }
    let mut config = Config::from_json(CONFIG_35B_A3B).unwrap();
    config.layers = vec![LayerKind::Gdn; 4];
    let vocab = config.vocab_size as u32;
    let options = Options { context: 128, max_sequences: 8, max_batch_tokens: 96, ..options() };
    let mut backend = CudaBackend::random(config, 1, &options).unwrap();
    let text = |i: u32| (0..90).map(|j| (i * 131 + j).wrapping_mul(2_654_435_761) % vocab).collect();
    let texts: Vec<Vec<u32>> = (0..5).map(text).collect();
    let alone = |ids: &Vec<u32>| -> Vec<Vec<f32>> {
        let seq = backend.create(90).unwrap();
        let logits =
            (0..ids.len()).map(|i| feed_all(&mut backend, i, &[(seq, &ids[i..=i])]).remove(0)).collect();
        backend.free(seq).unwrap();
        logits
    };
    let expected: Vec<Vec<Vec<f32>>> = texts.iter().map(alone).collect();
    let (long, short) = (CHUNK_ROWS, CHUNK_ROWS - 1);
    for (waiting, lengths) in [
        (0, &[70][..]),
        (0, &[long, 1]),
        (2, &[1, 3, long + 7]),
        (1, &[long, 1, 33, 2, 1]),
        (2, &[1, long, short, 1]),
        (3, &[17, 1, 1, long, 2]),
        (3, &[long, long + 1, 24, 16]),
    ] {
        let seqs: Vec<SeqId> = texts.iter().map(|_| backend.create(90).unwrap()).collect();
        for i in 0..waiting {
            let all: Vec<_> = seqs.iter().zip(&texts).map(|(seq, ids)| (*seq, &ids[i..=i])).collect();
            feed_all(&mut backend, i, &all);
        }
        let chunks = seqs.iter().zip(&texts).zip(lengths);
        let all: Vec<_> = chunks.map(|((seq, ids), n)| (*seq, &ids[waiting..waiting + n])).collect();
        for (i, logits) in feed_all(&mut backend, waiting, &all).into_iter().enumerate() {
            let at = waiting + lengths[i];
            let same = logits == expected[i][at - 1];
            assert!(same, "{waiting} wait, {lengths:?}: sequence {i}");
            let next = feed_all(&mut backend, at, &[(seqs[i], &texts[i][at..=at])]);
            assert!(next[0] == expected[i][at], "{waiting} wait, {lengths:?}: behind sequence {i}");
        }
        seqs.into_iter().for_each(|seq| backend.free(seq).unwrap());
    }
}
