//! `lily bench`: tokens a second.
//!
//! Prefill is the prompt's tokens over the time to the first token; decode is greedy, over the tokens after
//! it, none of which visits the host in between. A run of the same shape warms up first.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail};
use lily_model::backend::{Backend, Batch, Segment, SeqId, Tokens, Want};
use lily_model::load::load_weights;
use lily_model::sample::SampleParams;
use serde_json::{Value, json};

use crate::args::{Bench, Global, UsageError};
use crate::device::{self, Size};
use crate::progress;
use crate::session::{PREFILL_CHUNK, context};
use crate::source::Source;

/// Seconds of one run.
struct Times {
    prefill: f64,
    decode: f64,
}

/// What the runs of one prompt length gave.
struct Measured {
    prompt_tokens: u32,
    /// Tokens a second, a run each, sorted.
    prefill: Vec<f64>,
    decode: Vec<f64>,
}

/// Runs the command.
pub fn bench(args: &Bench, global: &Global) -> Result<()> {
    let source = Source::new(global)?;
    let config = source.config()?;
    let longest = args.prompt_tokens.iter().max().copied().unwrap_or(1);
    let tokens = longest.saturating_add(args.decode_tokens);
    if let Err(e) = context(Some(tokens), &config) {
        bail!(UsageError(format!("{longest} tokens of prompt and {} more: {e}", args.decode_tokens)));
    }
    source.announce();
    let weights = Arc::new(load_weights(&source.files, &config)?);
    let size = Size { context: tokens, sequences: 1, batch_tokens: PREFILL_CHUNK };
    let mut backend = device::open(global, &config, &weights, size)?;
    let bar = progress::counted(
        args.prompt_tokens.len() as u64 * (1 + u64::from(args.repeat)),
        "measuring",
        "runs",
    );
    let mut results = Vec::new();
    for &prompt_tokens in &args.prompt_tokens {
        results.push(measure(&mut *backend, prompt_tokens, args, &mut || bar.inc(1))?);
    }
    bar.finish_and_clear();
    print(&results, &backend.limits().name, &source.name, args)?;
    Ok(())
}

fn measure(backend: &mut dyn Backend, prompt: u32, args: &Bench, done: &mut dyn FnMut()) -> Result<Measured> {
    let mut measured = Measured { prompt_tokens: prompt, prefill: Vec::new(), decode: Vec::new() };
    for i in 0..=args.repeat {
        let times = run(backend, prompt, args.decode_tokens)?;
        done();
        if i > 0 {
            measured.prefill.push(f64::from(prompt) / times.prefill);
            measured.decode.push(f64::from(args.decode_tokens) / times.decode);
        }
    }
    measured.prefill.sort_by(f64::total_cmp);
    measured.decode.sort_by(f64::total_cmp);
    Ok(measured)
}

/// One prompt of fixed pseudo-random ids and its greedy continuation.
fn run(backend: &mut dyn Backend, prompt: u32, decode: u32) -> Result<Times> {
    let vocab = backend.limits().vocab_size;
    let ids: Vec<u32> = (0..prompt).map(|i| i.wrapping_mul(2_654_435_761) % vocab).collect();
    let seq = backend.create(prompt + decode)?;
    let start = Instant::now();
    let chunks = ids.chunks(PREFILL_CHUNK as usize);
    for (i, chunk) in chunks.enumerate() {
        let first = i as u32 * PREFILL_CHUNK;
        let is_last = first as usize + chunk.len() == ids.len();
        let want = if is_last { Want::Sample(SampleParams::greedy().into()) } else { Want::Nothing };
        step(backend, seq, first, Tokens::Ids(chunk.to_vec()), want)?;
    }
    let prefill = start.elapsed().as_secs_f64();
    let start = Instant::now();
    for i in 0..decode {
        step(backend, seq, prompt + i, Tokens::LastSampled, Want::Sample(SampleParams::greedy().into()))?;
    }
    let decode = start.elapsed().as_secs_f64();
    backend.free(seq)?;
    Ok(Times { prefill, decode })
}

fn step(backend: &mut dyn Backend, seq: SeqId, start: u32, tokens: Tokens, want: Want) -> Result<()> {
    let ticket = backend.forward(&Batch { segments: vec![Segment { seq, start, tokens, want }] })?;
    for output in backend.wait(ticket)? {
        output?;
    }
    Ok(())
}

/// The middle of sorted values, or of the two in the middle.
fn median(sorted: &[f64]) -> f64 {
    let n = sorted.len();
    (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0
}

fn print(results: &[Measured], device: &str, model: &str, args: &Bench) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if args.json {
        let row = |m: &Measured| {
            json!({
                "prompt_tokens": m.prompt_tokens,
                "decode_tokens": args.decode_tokens,
                "prefill_tokens_per_s": median(&m.prefill),
                "decode_tokens_per_s": median(&m.decode),
                "prefill_tokens_per_s_runs": m.prefill,
                "decode_tokens_per_s_runs": m.decode,
            })
        };
        let results: Value = results.iter().map(row).collect();
        return writeln!(out, "{:#}", json!({"model": model, "device": device, "results": results}));
    }
    writeln!(out, "{model} on {device}, {} runs: median (lowest to highest), tokens a second", args.repeat)?;
    for m in results {
        let spread = |sorted: &[f64]| {
            format!("{:.1} ({:.1} to {:.1})", median(sorted), sorted[0], sorted[sorted.len() - 1])
        };
        let (prefill, decode) = (spread(&m.prefill), spread(&m.decode));
        writeln!(out, "prompt {:>6}   prefill {prefill:<28} decode {decode}", m.prompt_tokens)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        assert_eq!(median(&[1.0, 2.0, 9.0]), 2.0);
        assert_eq!(median(&[1.0, 2.0, 4.0, 9.0]), 3.0);
        assert_eq!(median(&[5.0]), 5.0);
    }
}
