//! `lily bench`: tokens a second.
//!
//! Prefill is the prompt's tokens over the time to the first token; decode is greedy, over the tokens after
//! it, none of which visits the host in between. A run of the same shape warms up first.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use lily_model::backend::{Backend, Batch, Segment, SeqId, Tokens, Want};
use lily_model::load::load_weights;
use lily_model::sample::SampleParams;
use serde_json::{Value, json};

use crate::args::{Bench, Global, UsageError};
use crate::device::{self, Size};
use crate::progress;
use crate::session::{PREFILL_CHUNK, context};
use crate::source::Source;

mod floor;
mod probe;

use floor::{Machine, Work};

/// What is read before the tokens are written.
struct Prompt {
    /// `ids` or `text`.
    kind: &'static str,
    ids: Vec<u32>,
}

/// Seconds of one run.
struct Times {
    prefill: f64,
    decode: f64,
}

/// What the runs of one prompt gave.
struct Measured {
    kind: &'static str,
    prompt_tokens: u32,
    /// Tokens a second, a run each, sorted.
    prefill: Vec<f64>,
    decode: Vec<f64>,
}

/// What tokens take, and what that allows at most.
struct Bound {
    /// Multiply-adds or bytes.
    per_token: f64,
    tokens_per_s: f64,
}

/// What was measured on what.
struct Report<'a> {
    model: &'a str,
    device: &'a str,
    decode_tokens: u32,
    repeat: u32,
    results: &'a [Measured],
    work: &'a Work,
    machine: &'a Machine,
}

/// Runs the command.
pub fn bench(args: &Bench, global: &Global) -> Result<()> {
    if args.probe {
        return probe::probe(args.json, global);
    }
    let source = Source::new(global)?;
    let config = source.config()?;
    let longest = args.prompt_tokens.iter().max().copied().unwrap_or(1);
    let tokens = longest.saturating_add(args.decode_tokens);
    if let Err(e) = context(Some(tokens), &config) {
        bail!(UsageError(format!("{longest} tokens of prompt and {} more: {e}", args.decode_tokens)));
    }
    let vocab = u32::try_from(config.vocab_size)?;
    let mut prompts: Vec<Prompt> = args.prompt_tokens.iter().map(|&n| scattered(n, vocab)).collect();
    let weights = if let Some(file) = &args.text {
        let model = source.load()?;
        let ids = model.tokenizer.encode_text(&read_text(file)?);
        prompts.extend(beginnings(&ids, &args.prompt_tokens, file)?);
        model.weights
    } else {
        source.announce();
        Arc::new(load_weights(&source.files, &config)?)
    };
    // Before the backend has threads of its own that may still be awake.
    let machine = Machine::probe(probe::threads(global))?;
    let size = Size { context: tokens, sequences: 1, snapshot_bytes: 0, batch_tokens: PREFILL_CHUNK };
    let mut backend = device::open(global, &config, &weights, size)?;
    let runs = prompts.len() as u64 * (1 + u64::from(args.repeat));
    let bar = progress::counted(runs, "measuring", "runs");
    let mut results = Vec::new();
    for prompt in &prompts {
        results.push(measure(&mut *backend, prompt, args, &mut || bar.inc(1))?);
    }
    bar.finish_and_clear();
    let report = Report {
        model: &source.name,
        device: &backend.limits().name,
        decode_tokens: args.decode_tokens,
        repeat: args.repeat,
        results: &results,
        work: &Work::new(&config, global.cpu_exact),
        machine: &machine,
    };
    let mut out = io::stdout().lock();
    let written = if args.json { writeln!(out, "{:#}", report.json()) } else { report.write(&mut out) };
    Ok(written?)
}

/// Fixed pseudo-random ids.
fn scattered(tokens: u32, vocab: u32) -> Prompt {
    Prompt { kind: "ids", ids: (0..tokens).map(|i| i.wrapping_mul(2_654_435_761) % vocab).collect() }
}

fn read_text(file: &Path) -> Result<String> {
    let bytes = fs::read(file).with_context(|| file.display().to_string())?;
    String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8 text", file.display()))
}

/// The beginning of a text, in every length that is asked for.
fn beginnings(text: &[u32], lengths: &[u32], file: &Path) -> Result<Vec<Prompt>> {
    let beginning = |&n: &u32| match text.get(..n as usize) {
        Some(ids) => Ok(Prompt { kind: "text", ids: ids.to_vec() }),
        None => bail!(UsageError(format!(
            "{} has {} tokens, --prompt-tokens asks for {n}: take a longer text or fewer tokens",
            file.display(),
            text.len()
        ))),
    };
    lengths.iter().map(beginning).collect()
}

fn measure(
    backend: &mut dyn Backend,
    prompt: &Prompt,
    args: &Bench,
    done: &mut dyn FnMut(),
) -> Result<Measured> {
    let prompt_tokens = prompt.ids.len() as u32;
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    for i in 0..=args.repeat {
        let times = run(backend, &prompt.ids, args.decode_tokens)?;
        done();
        if i > 0 {
            prefill.push(f64::from(prompt_tokens) / times.prefill);
            decode.push(f64::from(args.decode_tokens) / times.decode);
        }
    }
    prefill.sort_by(f64::total_cmp);
    decode.sort_by(f64::total_cmp);
    Ok(Measured { kind: prompt.kind, prompt_tokens, prefill, decode })
}

/// One prompt and its greedy continuation.
fn run(backend: &mut dyn Backend, ids: &[u32], decode: u32) -> Result<Times> {
    let prompt = ids.len() as u32;
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

impl Report<'_> {
    /// What a token of the prompt takes and how many a second the processor's peak would allow.
    fn prefill_bound(&self, m: &Measured) -> Bound {
        let multiply_adds = self.work.prefill_multiply_adds(m.prompt_tokens);
        Bound {
            per_token: multiply_adds,
            tokens_per_s: self.machine.int8.multiply_adds_per_s / multiply_adds,
        }
    }

    /// Bytes that a decoded token moves and how many a second the memory's bandwidth would allow.
    fn decode_bound(&self, m: &Measured) -> Bound {
        let bytes = self.work.decode_bytes(m.prompt_tokens, self.decode_tokens);
        Bound { per_token: bytes, tokens_per_s: self.machine.read_bytes_per_s / bytes }
    }

    fn json(&self) -> Value {
        let row = |m: &Measured| {
            let (prefill, decode) = (self.prefill_bound(m), self.decode_bound(m));
            json!({
                "prompt": m.kind,
                "prompt_tokens": m.prompt_tokens,
                "decode_tokens": self.decode_tokens,
                "prefill_tokens_per_s": median(&m.prefill),
                "decode_tokens_per_s": median(&m.decode),
                "prefill_tokens_per_s_runs": m.prefill,
                "decode_tokens_per_s_runs": m.decode,
                "prefill_multiply_adds_per_token": prefill.per_token,
                "prefill_bound_tokens_per_s": prefill.tokens_per_s,
                "prefill_share_of_int8_peak": median(&m.prefill) / prefill.tokens_per_s,
                "decode_bytes_per_token": decode.per_token,
                "decode_bound_tokens_per_s": decode.tokens_per_s,
                "decode_share_of_bandwidth": median(&m.decode) / decode.tokens_per_s,
            })
        };
        let results: Value = self.results.iter().map(row).collect();
        json!({
            "model": self.model, "device": self.device, "machine": self.machine.json(), "results": results,
        })
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let machine = self.machine;
        let runs = self.repeat;
        writeln!(
            out,
            "{} on {}, {runs} runs: median (lowest to highest), tokens a second",
            self.model, self.device
        )?;
        writeln!(
            out,
            "this machine, {} threads: reads {:.1} GB/s, {:.0} G int8 multiply-adds/s ({})",
            machine.threads,
            machine.read_bytes_per_s / 1e9,
            machine.int8.multiply_adds_per_s / 1e9,
            machine.int8.instructions
        )?;
        for m in self.results {
            let spread = |sorted: &[f64]| {
                format!("{:.1} ({:.1} to {:.1})", median(sorted), sorted[0], sorted[sorted.len() - 1])
            };
            let (prefill, decode) = (spread(&m.prefill), spread(&m.decode));
            writeln!(
                out,
                "prompt {:>6} {:<4}   prefill {prefill:<28} decode {decode}",
                m.prompt_tokens, m.kind
            )?;
            let (prefill, decode) = (self.prefill_bound(m), self.decode_bound(m));
            let share = |bound: &Bound, speeds: &[f64]| {
                let reached = 100.0 * median(speeds) / bound.tokens_per_s;
                format!("{:.1}, {reached:.1} % reached", bound.tokens_per_s)
            };
            let (at_peak, at_bandwidth) = (share(&prefill, &m.prefill), share(&decode, &m.decode));
            writeln!(out, "  this machine's bound          {at_peak:<35} {at_bandwidth}")?;
            let multiply_adds = format!("{:.0} M multiply-adds", prefill.per_token / 1e6);
            writeln!(
                out,
                "  for a token                   {multiply_adds:<35} {:.0} MB",
                decode.per_token / 1e6
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        assert_eq!(median(&[1.0, 2.0, 9.0]), 2.0);
        assert_eq!(median(&[1.0, 2.0, 4.0, 9.0]), 3.0);
        assert_eq!(median(&[5.0]), 5.0);
    }

    #[test]
    fn scattered_ids_are_those_of_the_formula() {
        let expected: Vec<u32> =
            (0..5000u64).map(|i| ((i * 2_654_435_761) % (1 << 32) % 1000) as u32).collect();
        assert_eq!(scattered(5000, 1000).ids, expected);
    }

    #[test]
    fn a_text_that_is_too_short_is_refused() {
        let file = Path::new("short.txt");
        let prompts = beginnings(&[7, 8, 9], &[1, 3], file).unwrap();
        assert_eq!(prompts.iter().map(|p| p.ids.as_slice()).collect::<Vec<_>>(), [&[7][..], &[7, 8, 9]]);
        let e = beginnings(&[7, 8, 9], &[1, 4], file).err().unwrap();
        assert_eq!(
            e.to_string(),
            "short.txt has 3 tokens, --prompt-tokens asks for 4: take a longer text or fewer tokens"
        );
    }
}
