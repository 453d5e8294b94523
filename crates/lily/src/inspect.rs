//! `lily inspect`: what a model is and takes, by its configuration alone.

use std::io::{self, Write};

use anyhow::Result;
use lily_model::config::{Config, LayerKind};
use lily_model::footprint::Footprint;
use lily_model::manifest::{ModuleKind, modules};
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::{Global, Inspect};
use crate::session::context;
use crate::source::Source;

/// Everything that is shown.
#[derive(Serialize)]
struct Report {
    model: String,
    shapes: Value,
    parameters: u64,
    weights: Weights,
    context: u32,
    /// How a sequence's state is held.
    state: Vec<State>,
}

#[derive(Serialize)]
struct Weights {
    bytes: u64,
    bytes_per_decoded_token: u64,
    parts: Vec<Part>,
}

#[derive(Serialize)]
struct Part {
    name: &'static str,
    parameters: u64,
    bytes: u64,
    bytes_per_decoded_token: u64,
}

/// State of one sequence, and what it adds to the weights.
#[derive(Serialize)]
struct State {
    held_by: &'static str,
    /// Recurrent and convolution state, however long the sequence is.
    fixed_bytes: u64,
    kv_bytes_per_token: u64,
    /// For a sequence as long as the context.
    bytes_at_context: u64,
    /// Weights and state of one sequence as long as the context.
    memory_bytes: u64,
    /// Weights, fixed state read and written, K/V of all earlier positions read.
    bytes_per_decoded_token_at_start: u64,
    bytes_per_decoded_token_at_context: u64,
}

/// Runs the command.
pub fn inspect(args: &Inspect, global: &Global) -> Result<()> {
    let (model, config) = match args.preset {
        Some(preset) => (preset.name().to_owned(), Config::from_json(preset.config_json())?),
        None => {
            let source = Source::new(global)?;
            (source.name.clone(), source.config()?)
        }
    };
    let report = report(model, &config, context(args.context.ctx_size, &config)?);
    let mut out = io::stdout().lock();
    if args.json {
        return Ok(writeln!(out, "{:#}", json!(report))?);
    }
    Ok(write_text(&mut out, &report)?)
}

fn report(model: String, config: &Config, context: u32) -> Report {
    let footprint = Footprint::new(config);
    let part = |p: &lily_model::footprint::PartBytes| Part {
        name: p.part.name(),
        parameters: p.parameters,
        bytes: p.stored,
        bytes_per_decoded_token: p.read_per_token,
    };
    let weights = Weights {
        bytes: footprint.stored(),
        bytes_per_decoded_token: footprint.read_per_token(),
        parts: footprint.parts.iter().map(part).collect(),
    };
    // What the CPU holds is asked of it, over a length that any page size divides.
    const LONG: u32 = 1 << 20;
    let cpu = |held_by, exact| {
        let bytes = |tokens: u32| lily_cpu::state_bytes(config, exact, tokens as usize);
        let kv = (bytes(LONG) - bytes(0)) / u64::from(LONG);
        state(held_by, bytes(0), kv, bytes(context), context, &weights)
    };
    let state = vec![cpu("cpu: bf16 K/V", false), cpu("cpu, --cpu-exact: f32 K/V", true)];
    Report { model, shapes: shapes(config), parameters: footprint.parameters(), weights, context, state }
}

fn state(
    held_by: &'static str,
    fixed: u64,
    kv_per_token: u64,
    at_context: u64,
    context: u32,
    weights: &Weights,
) -> State {
    let at_start = weights.bytes_per_decoded_token + 2 * fixed;
    State {
        held_by,
        fixed_bytes: fixed,
        kv_bytes_per_token: kv_per_token,
        bytes_at_context: at_context,
        memory_bytes: weights.bytes + at_context,
        bytes_per_decoded_token_at_start: at_start,
        bytes_per_decoded_token_at_context: at_start + kv_per_token * u64::from(context),
    }
}

fn shapes(config: &Config) -> Value {
    let (gdn, attention, moe) = (&config.gdn, &config.attention, &config.moe);
    let form = |q: &lily_model::config::Quantization| json!({"bits": q.default.bits, "group_size": q.default.group_size, "overrides": q.overrides.len()});
    let modules = modules(config);
    let quantised = modules.iter().filter(|m| m.affine(config).is_some()).count();
    let vectors = modules
        .iter()
        .filter(|m| !matches!(m.kind, ModuleKind::Matrix { .. } | ModuleKind::Experts { .. }))
        .count();
    json!({
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_context": config.max_context,
        "layers": config.layers.len(),
        "gdn_layers": config.count(LayerKind::Gdn),
        "attention_layers": config.count(LayerKind::Attention),
        "gdn": {
            "key_heads": gdn.key_heads,
            "value_heads": gdn.value_heads,
            "key_dim": gdn.key_dim,
            "value_dim": gdn.value_dim,
            "conv_kernel": gdn.conv_kernel,
        },
        "attention": {
            "heads": attention.heads,
            "kv_heads": attention.kv_heads,
            "head_dim": attention.head_dim,
            "rotary_dim": attention.rotary_dim,
            "rope_theta": attention.rope_theta,
        },
        "moe": {
            "experts": moe.experts,
            "experts_per_token": moe.experts_per_token,
            "expert_width": moe.expert_width,
            "shared_width": moe.shared_width,
        },
        "quantization": config.quantization.as_ref().map(form),
        "modules": {"all": modules.len(), "quantised": quantised, "vectors": vectors},
    })
}

fn write_text(out: &mut impl Write, report: &Report) -> io::Result<()> {
    writeln!(out, "{}: {} parameters", report.model, grouped(report.parameters))?;
    write_shapes(out, &report.shapes, "  ")?;
    writeln!(out, "\n{:<26}{:>18}{:>18}{:>24}", "weights", "parameters", "bytes", "read for a token")?;
    for part in &report.weights.parts {
        let (all, bytes, read) = (part.parameters, part.bytes, part.bytes_per_decoded_token);
        writeln!(out, "  {:<24}{:>18}{:>18}{:>24}", part.name, grouped(all), grouped(bytes), grouped(read))?;
    }
    let (bytes, read) = (report.weights.bytes, report.weights.bytes_per_decoded_token);
    writeln!(
        out,
        "  {:<24}{:>18}{:>18}{:>24}",
        "all",
        grouped(report.parameters),
        grouped(bytes),
        grouped(read)
    )?;
    for state in &report.state {
        let context = grouped(report.context.into());
        writeln!(out, "\nstate of a sequence ({})", state.held_by)?;
        let lines = [
            ("recurrent and convolution state".to_owned(), state.fixed_bytes),
            ("K/V per token".to_owned(), state.kv_bytes_per_token),
            (format!("all, at {context} tokens"), state.bytes_at_context),
            (format!("with the weights, at {context} tokens"), state.memory_bytes),
            ("moved for a token, at the start".to_owned(), state.bytes_per_decoded_token_at_start),
            (format!("moved for a token, at {context} tokens"), state.bytes_per_decoded_token_at_context),
        ];
        for (what, bytes) in lines {
            writeln!(out, "  {what:<44}{:>18} bytes", grouped(bytes))?;
        }
    }
    Ok(())
}

/// Objects as indented lines.
fn write_shapes(out: &mut impl Write, shapes: &Value, indent: &str) -> io::Result<()> {
    for (name, value) in shapes.as_object().into_iter().flatten() {
        match value.as_object() {
            None => writeln!(out, "{indent}{name} {value}")?,
            Some(inner) => {
                let inner: Vec<String> =
                    inner.iter().map(|(name, value)| format!("{name} {value}")).collect();
                writeln!(out, "{indent}{name}: {}", inner.join(", "))?;
            }
        }
    }
    Ok(())
}

/// Digits in groups of three.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let groups: Vec<&str> = digits
        .as_bytes()
        .rchunks(3)
        .rev()
        .map(|group| std::str::from_utf8(group).unwrap_or_default())
        .collect();
    groups.join(",")
}
