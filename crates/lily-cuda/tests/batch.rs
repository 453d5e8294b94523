//! Many sequences in a step, at the shape of the real model with random weights.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{device, options};
use lily_cuda::{CudaBackend, Options};
use lily_model::backend::{Backend, Batch, Output, Segment, SeqId, Tokens, Want};
use lily_model::config::Config;
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
