//! `lily bench`: tokens a second.
//!
//! Prefill is the prompt's tokens over the time to the first token; decode is greedy, over the tokens after
//! it, none of which visits the host in between. In a batch, sequences read one after another and write side by side;
//! speeds are those of all together. A run of the same shape warms up first.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use lily_cuda::CudaBackend;
use lily_cuda::profile::{Profile, TOKENS as PROFILED};
use lily_model::backend::{Backend, Batch, Segment, SeqId, Ticket, Tokens, Want};
use lily_model::config::Config;
use lily_model::load::load_weights;
use lily_model::sample::SampleParams;
use lily_model::weights::Weights;
use serde_json::{Value, json};

use crate::args::{Bench, DeviceChoice, Global, UsageError};
use crate::device::{self, Size};
use crate::progress;
use crate::session::context;
use crate::source::Source;

mod floor;
mod probe;
mod profile;

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
    batch: u32,
    /// Tokens a second, a run each, sorted.
    prefill: Vec<f64>,
    decode: Vec<f64>,
}

/// What tokens take, and what that allows at most, if that is known.
struct Bound {
    /// Multiply-adds or bytes.
    per_token: f64,
    tokens_per_s: Option<f64>,
}

/// Seed of `--synth`.
const SYNTH_SEED: u32 = 1;

/// What was measured on what.
struct Report<'a> {
    model: &'a str,
    device: &'a str,
    decode_tokens: u32,
    repeat: u32,
    results: &'a [Measured],
    /// Of each batch at each length, then of the last chunk of that length.
    profiles: &'a [Profile],
    work: &'a Work,
    /// Of a number of the K/V cache.
    kv_bytes: u64,
    machine: &'a Machine,
}

/// A backend, of a kind that can be profiled or not.
enum Opened {
    Other(Box<dyn Backend>),
    Cuda(Box<CudaBackend>),
}

impl Opened {
    fn backend(&mut self) -> &mut dyn Backend {
        match self {
            Self::Other(backend) => &mut **backend,
            Self::Cuda(backend) => &mut **backend,
        }
    }
}

/// Runs the command.
pub fn bench(args: &Bench, global: &Global) -> Result<()> {
    if args.probe {
        return probe::probe(args.json, global);
    }
    let gpu = match global.device {
        DeviceChoice::Cuda(device) => Some(device),
        _ => None,
    };
    let Subject { name, config, prompts, weights } = Subject::load(args, global)?;
    let sequences = args.batch.iter().max().copied().unwrap_or(1);
    let context = longest(args).saturating_add(decoded(args));
    let size = Size { context, sequences, snapshot_bytes: 0, chunk: args.reading.ubatch_size };
    let (mut opened, machine) = open(global, gpu, &config, weights, size)?;
    let chunk = device::chunk(opened.backend().limits(), sequences);
    let runs = (prompts.len() * args.batch.len()) as u64 * (1 + u64::from(args.repeat));
    let bar = progress::counted(runs, "measuring", "runs");
    let (mut results, mut profiles) = (Vec::new(), Vec::new());
    for prompt in &prompts {
        for &batch in &args.batch {
            results.push(measure(opened.backend(), prompt, batch, chunk, args, &mut || bar.inc(1))?);
            if let (true, Opened::Cuda(gpu)) = (args.profile, &mut opened) {
                profiles.push(gpu.profile(batch as usize, prompt.ids.len() as u32)?);
            }
        }
        if let (true, Opened::Cuda(gpu)) = (args.profile, &mut opened) {
            profiles.push(gpu.profile_chunk(chunk, prompt.ids.len() as u32)?);
        }
    }
    bar.finish_and_clear();
    let report = Report {
        model: &name,
        device: &opened.backend().limits().name.clone(),
        decode_tokens: args.decode_tokens,
        repeat: args.repeat,
        results: &results,
        profiles: &profiles,
        work: &Work::new(&config),
        kv_bytes: if global.cpu_exact { 4 } else { 2 },
        machine: &machine,
    };
    let mut out = io::stdout().lock();
    let written = if args.json { writeln!(out, "{:#}", report.json()) } else { report.write(&mut out) };
    Ok(written?)
}

/// Tokens of the longest prompt.
fn longest(args: &Bench) -> u32 {
    args.prompt_tokens.iter().max().copied().unwrap_or(1)
}

/// What is measured.
struct Subject {
    name: String,
    config: Config,
    prompts: Vec<Prompt>,
    /// `None`: the device makes some.
    weights: Option<Arc<Weights>>,
}

impl Subject {
    fn load(args: &Bench, global: &Global) -> Result<Self> {
        if let Some(preset) = args.synth {
            let config = Config::from_json(preset.config_json())?;
            let prompts = scattered_prompts(args, &config)?;
            return Ok(Self { name: preset.name().to_owned(), config, prompts, weights: None });
        }
        let source = Source::new(global)?;
        let config = source.config()?;
        let mut prompts = scattered_prompts(args, &config)?;
        let weights = if let Some(file) = &args.text {
            let model = source.load()?;
            let ids = model.tokenizer.encode_text(&read_text(file)?);
            prompts.extend(beginnings(&ids, &args.prompt_tokens, file)?);
            model.weights
        } else {
            source.announce();
            Arc::new(load_weights(&source.files, &config)?)
        };
        Ok(Self { name: source.name, config, prompts, weights: Some(weights) })
    }
}

/// Tokens behind the longest prompt that there must be room for.
fn decoded(args: &Bench) -> u32 {
    if args.profile { args.decode_tokens.max(PROFILED) } else { args.decode_tokens }
}

/// Prompts of all lengths, if the model takes them.
fn scattered_prompts(args: &Bench, config: &Config) -> Result<Vec<Prompt>> {
    let (longest, more) = (longest(args), decoded(args));
    if let Err(e) = context(Some(longest.saturating_add(more)), config) {
        bail!(UsageError(format!("{longest} tokens of prompt and {more} more: {e}")));
    }
    Ok(args.prompt_tokens.iter().map(|&n| scattered(n, config)).collect())
}

/// Opens the device, with random weights if there are none, and finds out how fast it can be.
fn open(
    global: &Global,
    gpu: Option<usize>,
    config: &Config,
    weights: Option<Arc<Weights>>,
    size: Size,
) -> Result<(Opened, Machine)> {
    let Some(device) = gpu else {
        let weights = weights.context("there are no weights")?;
        #[cfg(target_vendor = "apple")]
        if matches!(global.device, DeviceChoice::Metal | DeviceChoice::Auto) && !global.cpu_exact {
            match device::metal::backend(global, config, &weights, &size) {
                Ok(mut backend) => {
                    let machine = Machine::Gpu { copy_bytes_per_s: backend.copy_bandwidth()? };
                    return Ok((Opened::Other(Box::new(backend)), machine));
                }
                Err(error) if global.device == DeviceChoice::Metal => return Err(error),
                // The CPU is taken below, with a word of why.
                Err(_) => {}
            }
        }
        // Before the backend has threads of its own that may still be awake.
        let machine = Machine::probe(probe::threads(global))?;
        return Ok((Opened::Other(device::open(global, config, &weights, size)?), machine));
    };
    let options = device::cuda_options(device, &size);
    let backend = match weights {
        Some(weights) => CudaBackend::new(config.clone(), &weights, &options)?,
        None => CudaBackend::random(config.clone(), SYNTH_SEED, &options)?,
    };
    let machine = Machine::Gpu { copy_bytes_per_s: backend.copy_bandwidth()? };
    Ok((Opened::Cuda(Box::new(backend)), machine))
}

/// Fixed pseudo-random ids.
fn scattered(tokens: u32, config: &Config) -> Prompt {
    let vocab = config.vocab_size as u32;
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
    batch: u32,
    chunk: u32,
    args: &Bench,
    done: &mut dyn FnMut(),
) -> Result<Measured> {
    let prompt_tokens = prompt.ids.len() as u32;
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    for i in 0..=args.repeat {
        let times = run(backend, &prompt.ids, batch, chunk, args.decode_tokens)?;
        done();
        if i > 0 {
            prefill.push(f64::from(prompt_tokens * batch) / times.prefill);
            decode.push(f64::from(args.decode_tokens * batch) / times.decode);
        }
    }
    prefill.sort_by(f64::total_cmp);
    decode.sort_by(f64::total_cmp);
    Ok(Measured { kind: prompt.kind, prompt_tokens, batch, prefill, decode })
}

/// A prompt for each sequence, and their greedy continuations.
fn run(backend: &mut dyn Backend, ids: &[u32], batch: u32, chunk: u32, decode: u32) -> Result<Times> {
    let prompt = ids.len() as u32;
    let seqs = (0..batch).map(|_| backend.create(prompt + decode)).collect::<Result<Vec<_>, _>>()?;
    let start = Instant::now();
    for (i, seq) in (0..).zip(&seqs) {
        read(backend, *seq, ids, i, chunk)?;
    }
    let prefill = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let mut in_flight = VecDeque::new();
    for i in 0..decode {
        let segment = |seq: &SeqId| Segment {
            seq: *seq,
            start: prompt + i,
            tokens: Tokens::LastSampled,
            want: Want::Sample(SampleParams::greedy().into()),
        };
        in_flight.push_back(backend.forward(&Batch { segments: seqs.iter().map(segment).collect() })?);
        if in_flight.len() >= backend.steps_in_flight() {
            in_flight.pop_front().map_or(Ok(()), |ticket| finish(backend, ticket))?;
        }
    }
    in_flight.into_iter().try_for_each(|ticket| finish(backend, ticket))?;
    let decode = start.elapsed().as_secs_f64();
    seqs.into_iter().try_for_each(|seq| backend.free(seq))?;
    Ok(Times { prefill, decode })
}

/// Reads a prompt, `most` tokens a step, and draws a token. The prompt of the first sequence is `ids`, the others' have other tokens.
fn read(backend: &mut dyn Backend, seq: SeqId, ids: &[u32], sequence: u32, most: u32) -> Result<()> {
    let vocab = backend.limits().vocab_size;
    let ids: Vec<u32> = ids.iter().map(|id| id.wrapping_add(7919 * sequence) % vocab).collect();
    for (i, chunk) in ids.chunks(most as usize).enumerate() {
        let start = i as u32 * most;
        let is_last = start as usize + chunk.len() == ids.len();
        let want = if is_last { Want::Sample(SampleParams::greedy().into()) } else { Want::Nothing };
        let segment = Segment { seq, start, tokens: Tokens::Ids(chunk.to_vec()), want };
        let ticket = backend.forward(&Batch { segments: vec![segment] })?;
        finish(backend, ticket)?;
    }
    Ok(())
}

fn finish(backend: &mut dyn Backend, ticket: Ticket) -> Result<()> {
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
        let per_token = self.work.prefill_multiply_adds(m.prompt_tokens);
        Bound { per_token, tokens_per_s: self.machine.multiply_adds_per_s().map(|peak| peak / per_token) }
    }

    /// Bytes that a decoded token moves and how many a second the memory's bandwidth would allow.
    fn decode_bound(&self, m: &Measured) -> Bound {
        let bytes = self.work.decode_bytes(m.prompt_tokens, self.decode_tokens, m.batch, self.kv_bytes);
        Bound { per_token: bytes, tokens_per_s: Some(self.machine.bytes_per_s() / bytes) }
    }

    fn json(&self) -> Value {
        let row = |m: &Measured| {
            let (prefill, decode) = (self.prefill_bound(m), self.decode_bound(m));
            let share = |bound: &Bound, speeds: &[f64]| bound.tokens_per_s.map(|most| median(speeds) / most);
            json!({
                "prompt": m.kind,
                "prompt_tokens": m.prompt_tokens,
                "decode_tokens": self.decode_tokens,
                "batch": m.batch,
                "prefill_tokens_per_s": median(&m.prefill),
                "decode_tokens_per_s": median(&m.decode),
                "prefill_tokens_per_s_runs": m.prefill,
                "decode_tokens_per_s_runs": m.decode,
                "prefill_multiply_adds_per_token": prefill.per_token,
                "prefill_bound_tokens_per_s": prefill.tokens_per_s,
                "prefill_share_of_int8_peak": share(&prefill, &m.prefill),
                "decode_bytes_per_token": decode.per_token,
                "decode_bound_tokens_per_s": decode.tokens_per_s,
                "decode_share_of_bandwidth": share(&decode, &m.decode),
            })
        };
        let results: Value = self.results.iter().map(row).collect();
        let mut report = json!({
            "model": self.model, "device": self.device, "machine": self.machine.json(), "results": results,
        });
        if !self.profiles.is_empty() {
            report["profiles"] = self.profiles.iter().map(profile::json).collect();
        }
        report
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let runs = self.repeat;
        writeln!(
            out,
            "{} on {}, {runs} runs: median (lowest to highest), tokens a second",
            self.model, self.device
        )?;
        writeln!(out, "{}", self.machine.text())?;
        for m in self.results {
            let spread = |sorted: &[f64]| {
                format!("{:.1} ({:.1} to {:.1})", median(sorted), sorted[0], sorted[sorted.len() - 1])
            };
            let (prefill, decode) = (spread(&m.prefill), spread(&m.decode));
            let batch = if m.batch == 1 { String::new() } else { format!(" x {}", m.batch) };
            writeln!(
                out,
                "prompt {:>6} {:<4}{batch:<5}   prefill {prefill:<28} decode {decode}",
                m.prompt_tokens, m.kind
            )?;
            let (prefill, decode) = (self.prefill_bound(m), self.decode_bound(m));
            let share = |bound: &Bound, speeds: &[f64]| match bound.tokens_per_s {
                Some(most) => format!("{most:.1}, {:.1} % reached", 100.0 * median(speeds) / most),
                None => "not measured".to_owned(),
            };
            let (at_peak, at_bandwidth) = (share(&prefill, &m.prefill), share(&decode, &m.decode));
            writeln!(out, "  this machine's bound               {at_peak:<35} {at_bandwidth}")?;
            let multiply_adds = format!("{:.0} M multiply-adds", prefill.per_token / 1e6);
            writeln!(
                out,
                "  for a token                        {multiply_adds:<35} {:.0} MB",
                decode.per_token / 1e6
            )?;
        }
        self.profiles.iter().try_for_each(|profile| profile::write(out, profile))
    }
}

#[cfg(test)]
mod tests {
    use lily_model::presets::CONFIG_35B_A3B;

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
        let config = Config::from_json(CONFIG_35B_A3B).unwrap();
        assert_eq!(scattered(5000, &Config { vocab_size: 1000, ..config }).ids, expected);
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
