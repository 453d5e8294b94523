//! Speed of decoding and reading on a synthetic model of the real shape, made in device memory.
//!
//! `bench [--batch 1,8,32] [--at 16,4096,32768] [--steps 200] [--prefill] [--profile] [--omit] [--only KERNELS] [--general] [--no-graphs]`
//!
//! `--prefill` also prints the speed of reading; `--profile` times every kernel alone, `--omit` steps without one kernel and
//! of it alone; `--general` decodes with the kernels for any number of tokens.

use std::error::Error;
use std::time::Instant;

use lily_cuda::{CudaBackend, Options};
use lily_model::backend::{Backend, Batch, Output, Segment, SeqId, Tokens, Want};
use lily_model::config::Config;
use lily_model::presets::CONFIG_35B_A3B;
use lily_model::sample::SampleParams;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Arguments {
    batch: Vec<usize>,
    at: Vec<u32>,
    steps: u32,
    prefill: bool,
    profile: bool,
    slow: bool,
    graphs: bool,
    omit: bool,
    only: Option<String>,
}

fn arguments() -> Result<Arguments> {
    let mut a = Arguments {
        batch: vec![1],
        at: vec![16],
        steps: 200,
        prefill: false,
        profile: false,
        slow: false,
        graphs: true,
        omit: false,
        only: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--batch" => {
                a.batch = value()?.split(',').map(str::parse).collect::<std::result::Result<_, _>>()?
            }
            "--at" => a.at = value()?.split(',').map(str::parse).collect::<std::result::Result<_, _>>()?,
            "--steps" => a.steps = value()?.parse()?,
            "--prefill" => a.prefill = true,
            "--profile" => a.profile = true,
            "--general" => a.slow = true,
            "--no-graphs" => a.graphs = false,
            "--omit" => a.omit = true,
            "--only" => a.only = Some(value()?),
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    Ok(a)
}

fn main() -> Result<()> {
    let a = arguments()?;
    let config = Config::from_json(CONFIG_35B_A3B)?;
    let longest = a.at.iter().max().copied().unwrap_or(0) + a.steps + 128;
    let options = Options {
        context: longest,
        max_sequences: a.batch.iter().max().copied().unwrap_or(1) as u32,
        max_batch_tokens: 512,
        cache: std::env::var_os("LILY_CUDA_CACHE").map(Into::into),
        fast_decode: !a.slow,
        graphs: a.graphs,
        ..Options::default()
    };
    let began = Instant::now();
    let mut backend = CudaBackend::random(config, 1, &options)?;
    println!(
        "{}, loaded in {:.1} s, fast {}",
        backend.limits().name,
        began.elapsed().as_secs_f32(),
        backend.decodes_fast()
    );
    if let Some(kernels) = &a.only {
        return only(&mut backend, kernels, &a);
    }
    for &batch in &a.batch {
        for &at in &a.at {
            decode(&mut backend, batch, at, &a)?;
        }
    }
    if a.omit {
        omit(&mut backend, &a)?;
    }
    Ok(())
}

/// Kernels of a step of one token, and of several.
const ONE: &[&str] = &[
    "project_q4",
    "delta_1",
    "out_gdn_q4",
    "append",
    "flash",
    "combine",
    "out_attention_q4",
    "project_q8",
    "gate_up_one_q4",
    "down_one_q4",
    "logits_q4",
    "finish",
    "embed_q4",
];
const SEVERAL: &[&str] = &[
    "product_q4_8",
    "product_q4_32",
    "product_q8_8",
    "delta_4",
    "append",
    "flash",
    "combine",
    "route",
    "gate_up_group_q4",
    "down_group_q4",
    "add_experts",
    "finish",
    "embed_q4",
];

/// A step of nothing but some kernels.
fn only(backend: &mut CudaBackend, kernels: &str, a: &Arguments) -> Result<()> {
    for &batch in &a.batch {
        let all = if batch == 1 { ONE } else { SEVERAL };
        let others: Vec<&str> =
            all.iter().copied().filter(|k| !kernels.split(',').any(|w| w == *k)).collect();
        backend.omit(&[]);
        if let Err(e) = decode(backend, batch, 16, a) {
            println!("  {e}");
        }
        backend.omit(&others);
        print!("only {kernels}: ");
        decode(backend, batch, 16, a)?;
    }
    Ok(())
}

/// What each decode kernel costs inside a step: the time of a step without it, and of it without all others.
fn omit(backend: &mut CudaBackend, a: &Arguments) -> Result<()> {
    for &batch in &a.batch {
        let all = if batch == 1 { ONE } else { SEVERAL };
        for kernel in all {
            let others: Vec<&str> = all.iter().copied().filter(|k| k != kernel).collect();
            for (kernels, word) in [(std::slice::from_ref(kernel), "without"), (&others[..], "only")] {
                backend.omit(kernels);
                print!("{word} {kernel}: ");
                if let Err(e) = decode(backend, batch, 16, a) {
                    println!("  {e}");
                }
            }
        }
    }
    Ok(())
}

fn ids(n: u32, vocab: u32, salt: u32) -> Vec<u32> {
    (0..n).map(|i| (i + salt).wrapping_mul(2_654_435_761) % vocab).collect()
}

/// Feeds prompts, then decodes greedily with two steps in flight.
fn decode(backend: &mut CudaBackend, batch: usize, at: u32, a: &Arguments) -> Result<()> {
    let seqs = (0..batch)
        .map(|_| backend.create(at + a.steps + 64))
        .collect::<std::result::Result<Vec<SeqId>, _>>()?;
    let result = decode_sequences(backend, &seqs, at, a);
    for seq in seqs {
        backend.free(seq)?;
    }
    result
}

fn decode_sequences(backend: &mut CudaBackend, seqs: &[SeqId], at: u32, a: &Arguments) -> Result<()> {
    let (vocab, batch) = (backend.limits().vocab_size, seqs.len());
    let greedy = Want::Sample(SampleParams::greedy().into());
    let began = Instant::now();
    for (i, seq) in seqs.iter().enumerate() {
        for start in (0..at).step_by(512) {
            let n = 512.min(at - start);
            let want = if start + n == at { greedy.clone() } else { Want::Nothing };
            let tokens = Tokens::Ids(ids(n, vocab, start + 7919 * i as u32));
            let ticket =
                backend.forward(&Batch { segments: vec![Segment { seq: *seq, start, tokens, want }] })?;
            for out in backend.wait(ticket)? {
                out?;
            }
        }
    }
    let read = began.elapsed().as_secs_f64();
    if a.prefill {
        println!("prefill of {at} x {batch}: {:.0} tok/s", f64::from(at) * batch as f64 / read);
    }
    let step = |backend: &mut CudaBackend, i: u32| -> Result<_> {
        let segment = |seq: &SeqId| Segment {
            seq: *seq,
            start: at + i,
            tokens: Tokens::LastSampled,
            want: greedy.clone(),
        };
        Ok(backend.forward(&Batch { segments: seqs.iter().map(segment).collect() })?)
    };
    let mut times = Vec::new();
    let mut distinct = std::collections::HashSet::new();
    let mut before = step(backend, 0)?;
    let mut last = Instant::now();
    for i in 1..a.steps {
        let next = step(backend, i)?;
        for out in backend.wait(before)? {
            if let Output::Sampled(s) = out? {
                distinct.insert(s.token);
            }
        }
        before = next;
        times.push(last.elapsed().as_secs_f64() * 1e6);
        last = Instant::now();
    }
    let _ = backend.wait(before)?;
    let mut times = times.split_off(times.len() / 8);
    times.sort_by(f64::total_cmp);
    let (median, low, high) = (times[times.len() / 2], times[times.len() / 20], times[times.len() * 19 / 20]);
    println!(
        "decode batch {batch} at {at}: {median:.0} us a step ({low:.0} to {high:.0}), {:.0} tok/s in sum, {} distinct tokens",
        1e6 * batch as f64 / median,
        distinct.len()
    );
    if a.profile {
        profile(backend, batch, |backend, i| step(backend, a.steps + i))?;
    }
    Ok(())
}

/// Single kernels, each waited for.
fn profile(
    backend: &mut CudaBackend,
    batch: usize,
    mut step: impl FnMut(&mut CudaBackend, u32) -> Result<lily_model::backend::Ticket>,
) -> Result<()> {
    const STEPS: u32 = 8;
    let device = backend.device();
    device.probe = Some(lily_cuda::profile::Probe::new(&device.context)?);
    for i in 0..STEPS {
        let ticket = step(backend, i)?;
        let _ = backend.wait(ticket)?;
    }
    let Some(probe) = backend.device().probe.take() else { return Ok(()) };
    println!("batch {batch}, kernels alone (events around each, so with about 6 us of launch):");
    for (name, n, us) in probe.result() {
        println!(
            "  {name:18} {:4} a step, {:7.2} us each, {:8.1} us a step",
            n / STEPS,
            us / n as f32,
            us / STEPS as f32
        );
    }
    Ok(())
}
