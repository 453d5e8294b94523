//! `lily eval`: how well the model predicts a text.

use std::fs;
use std::io::{self, Write};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use lily_model::load::Model;
use serde_json::json;

use crate::args::{Eval, Global, UsageError};
use crate::device::{self, Size};
use crate::logits::{by_backend, rows_at_once};
use crate::progress;
use crate::session::context;
use crate::source::Source;

/// Sums over the scored tokens.
#[derive(Default)]
struct Score {
    tokens: u64,
    /// Bytes of text that the scored tokens stand for.
    bytes: u64,
    /// Negative log-likelihood, nats.
    nll: f64,
    /// Tokens that the model held the most likely ones.
    top_1: u64,
}

/// Runs the command.
pub fn eval(args: &Eval, global: &Global) -> Result<()> {
    let source = Source::new(global)?;
    let window = context(Some(args.window), &source.config()?)? as usize;
    let bytes = fs::read(&args.text).with_context(|| args.text.display().to_string())?;
    let text =
        String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8 text", args.text.display()))?;
    let model = source.load()?;
    let mut ids = model.tokenizer.encode_text(&text);
    ids.truncate(args.max_tokens.unwrap_or(usize::MAX));
    if ids.len() < 2 {
        let problem = format!("{} holds {} tokens: at least 2 are needed", args.text.display(), ids.len());
        bail!(UsageError(problem));
    }
    let chunk = rows_at_once(model.config.vocab_size);
    let size = Size { context: window as u32, sequences: 1, snapshot_bytes: 0, chunk: Some(chunk as u32) };
    let mut backend = device::open(global, &model.config, &model.weights, size)?;
    let bar = progress::counted(ids.len() as u64, "evaluating", "tokens");
    let (start, mut score) = (Instant::now(), Score::default());
    for window in ids.chunks(window) {
        // The first token of a window has nothing to be predicted from, and the last one nothing to predict.
        let mut targets = window[1..].iter();
        by_backend(&mut *backend, window, chunk, &mut |rows| {
            rows.chunks_exact(model.config.vocab_size).zip(&mut targets).for_each(|(row, &id)| {
                score.add(row, id, &model);
            });
            bar.inc((rows.len() / model.config.vocab_size) as u64);
            Ok(())
        })?;
    }
    bar.finish_and_clear();
    score.print(args.json, &source.name, start.elapsed().as_secs_f64())?;
    Ok(())
}

impl Score {
    fn add(&mut self, logits: &[f32], id: u32, model: &Model) {
        let best = lily_model::sample::argmax(logits);
        let max = f64::from(logits[best as usize]);
        let sum: f64 = logits.iter().map(|&x| (f64::from(x) - max).exp()).sum();
        self.nll += max + sum.ln() - f64::from(logits[id as usize]);
        self.tokens += 1;
        self.bytes += model.tokenizer.token_bytes(id).len() as u64;
        self.top_1 += u64::from(best == id);
    }

    fn print(&self, as_json: bool, model: &str, seconds: f64) -> io::Result<()> {
        let mut out = io::stdout().lock();
        let tokens = self.tokens as f64;
        let nll = self.nll / tokens;
        let bits_per_byte = self.nll / std::f64::consts::LN_2 / self.bytes as f64;
        let accuracy = self.top_1 as f64 / tokens;
        if as_json {
            let result = json!({
                "model": model, "tokens": self.tokens, "bytes": self.bytes, "nll_per_token": nll,
                "perplexity": nll.exp(), "bits_per_byte": bits_per_byte, "top_1": accuracy, "seconds": seconds,
            });
            return writeln!(out, "{result:#}");
        }
        writeln!(out, "{} tokens, {} bytes of text, {seconds:.1} s", self.tokens, self.bytes)?;
        writeln!(out, "negative log-likelihood  {nll:.4} nats a token (perplexity {:.3})", nll.exp())?;
        writeln!(out, "bits per byte            {bits_per_byte:.4}")?;
        writeln!(out, "most likely token right  {:.1} %", 100.0 * accuracy)
    }
}
