//! `lily inspect`: what a model is and takes, by its configuration alone.

use std::io::{self, Write};

use anyhow::Result;
use lily_cuda::device::{Launch, decode_launches, stages, traffic};
use lily_cuda::driver::{Context, DriverError};
use lily_metal::pace;
use lily_metal::plan::{Features, KvType, Plan, Segment, Want};
use lily_metal::state::Layout;
use lily_model::config::{Config, LayerKind};
use lily_model::footprint::Footprint;
use lily_model::manifest::{ModuleKind, modules};
use lily_model::pool::PAGE;
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::{DeviceChoice, Global, Inspect};
use crate::session::context;
use crate::source::Source;

/// Tokens of a chunk of a prompt that is shown.
const PROMPT_TOKENS: usize = 512;
/// An Apple GPU, and the bytes a second that its makers promise.
const M5_MAX: (&str, f64) = ("M5 Max", 614e9);

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
    /// With `--device cuda` or `--device metal`.
    #[serde(flatten)]
    step: Option<Step>,
    /// With `--device metal`.
    prompt_step: Option<PromptStep>,
}

/// What a Mac's GPU does to read a chunk of a prompt.
#[derive(Serialize)]
struct PromptStep {
    tokens: usize,
    /// What multiplies matrices of many rows.
    matrices: &'static str,
    kernels: usize,
    stages: u32,
    /// Weights and state, at the start of a sequence, if every token chooses other experts.
    bytes: u64,
    /// How many it is divided into at the start of a sequence, and at the end of the context.
    command_buffers: [usize; 2],
    launches: Vec<Launched>,
}

/// What a GPU does to decode a token, by the code that does it.
#[derive(Serialize)]
struct Step {
    /// Which GPU's shapes it is for.
    gpu: String,
    /// Whether Lily can use that GPU in this machine.
    gpu_is_here: bool,
    /// What people are told of that.
    #[serde(skip)]
    remark: &'static str,
    /// A GPU, and the bytes a second that its makers promise.
    #[serde(skip)]
    bandwidth: (&'static str, f64),
    kernels_per_token: usize,
    /// Stages that wait for each other; a kernel has one or more.
    stages_per_token: u32,
    /// Weights and state, at the start of a sequence.
    bytes_per_token: u64,
    bytes_per_token_at_context: u64,
    launches: Vec<Launched>,
}

#[derive(Serialize)]
struct Launched {
    /// Its first stage, and how many there are.
    stage: u32,
    stages: u32,
    kernel: &'static str,
    grid: [u32; 3],
    threads: u32,
    shared_bytes: u32,
    bytes: u64,
    bytes_per_position: u64,
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
    /// Recurrent and convolution state with its log, however long the sequence is.
    fixed_bytes: u64,
    kv_bytes_per_token: u64,
    /// For a sequence as long as the context.
    bytes_at_context: u64,
    /// Weights and state of one sequence as long as the context.
    memory_bytes: u64,
    /// Weights, what is read and written of fixed state, K/V of all earlier positions read.
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
    let mut report = report(model, &config, context(args.context.ctx_size, &config)?);
    match global.device {
        // `Args::check` knows that `auto` lists no GPU.
        DeviceChoice::Auto | DeviceChoice::Cpu => {}
        DeviceChoice::Cuda(index) => {
            report.state.push(gpu_state(&config, report.context, &report.weights));
            report.step = Some(step(config, index, report.context)?);
        }
        DeviceChoice::Metal => {
            let length = (report.context as usize).next_multiple_of(PAGE);
            let plan = lily_metal::plan(&config, length, KvType::Bf16)?;
            report.state.push(metal_state(&plan, length, report.context, &report.weights));
            report.step = Some(metal_step(&plan, report.context));
            let tensor = !global.metal_no_tensor && (args.metal_tensor || metal_has_tensors());
            report.prompt_step = Some(prompt_step(&config, length, tensor)?);
        }
    }
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
        state(held_by, bytes(0), 2 * bytes(0), kv, bytes(context), context, &weights)
    };
    let state = vec![cpu("cpu: bf16 K/V", false), cpu("cpu, --cpu-exact: f32 K/V", true)];
    let (shapes, parameters) = (shapes(config), footprint.parameters());
    Report { model, shapes, parameters, weights, context, state, step: None, prompt_step: None }
}

/// State of a sequence on a GPU.
fn gpu_state(config: &Config, context: u32, weights: &Weights) -> State {
    let sizes = lily_cuda::state::Sizes::new(config, context as usize);
    let kv = (sizes.page / PAGE) as u64;
    let at_context = sizes.parts().sequence(context as usize);
    // Of the two copies of the convolution's state one is read and the other written; tokens aren't touched.
    let moved = (2 * sizes.recurrent + sizes.conv) as u64;
    state("cuda: bf16 K/V", sizes.parts().slot as u64, moved, kv, at_context, context, weights)
}

/// The decode step on a GPU of this machine, or on the one that the kernels are tuned for.
fn step(config: Config, index: usize, context: u32) -> Result<Step> {
    let (gpu, gpu_is_here) = match Context::open(index) {
        Ok(gpu) => (gpu, true),
        Err(DriverError::NoDriver | DriverError::NoDevice { count: 0, .. }) => (Context::h200(), false),
        Err(error) => return Err(error.into()),
    };
    let launches = decode_launches(config, &gpu, 1)?;
    let moved = traffic(&launches);
    let launched = |l: &Launch| Launched {
        stage: l.stage,
        stages: l.stages,
        kernel: l.name,
        grid: l.grid,
        threads: l.threads,
        shared_bytes: l.shared,
        bytes: l.traffic.bytes,
        bytes_per_position: l.traffic.bytes_per_position,
    };
    Ok(Step {
        gpu: gpu.description(),
        gpu_is_here,
        remark: if gpu_is_here { "" } else { ", though none is here" },
        bandwidth: ("H200", 4.8e12),
        kernels_per_token: launches.len(),
        stages_per_token: stages(&launches),
        bytes_per_token: moved.bytes,
        bytes_per_token_at_context: moved.bytes + moved.bytes_per_position * u64::from(context),
        launches: launches.iter().map(launched).collect(),
    })
}

/// State of a sequence on an Apple GPU, by the plan of its decode step for `length` tokens.
fn metal_state(plan: &Plan, length: usize, context: u32, weights: &Weights) -> State {
    let sizes = Layout::new(plan, length).sizes;
    let fixed = sizes.slot as u64;
    let kv = (sizes.page / PAGE) as u64;
    let at_context = sizes.sequence(context as usize);
    state("metal: bf16 K/V", fixed, plan.state_bytes(), kv, at_context, context, weights)
}

fn metal_launched(l: &lily_metal::plan::Launch) -> Launched {
    Launched {
        stage: l.stage as u32,
        stages: 1,
        kernel: l.kernel,
        grid: l.grid.map(|n| n as u32),
        threads: l.threads as u32,
        shared_bytes: l.threadgroup_memory.iter().sum::<usize>() as u32,
        bytes: l.bytes(),
        bytes_per_position: l.bytes_per_position(),
    }
}

/// A chunk of a prompt on an Apple GPU, at the start of a sequence.
fn prompt_step(config: &Config, length: usize, tensor: bool) -> Result<PromptStep> {
    let features = Features { kv: KvType::Bf16, tensor };
    let tokens = PROMPT_TOKENS.min(length);
    let segment = Segment { tokens, capacity: length, want: Want::Last };
    let plan = lily_metal::plan_step(config, features, &[segment])?;
    let paces = plan.paces();
    let buffers = |position| pace::command_buffers(&paces, &[position], pace::LONGEST).len();
    Ok(PromptStep {
        tokens,
        matrices: features.path(),
        kernels: plan.launches.len(),
        stages: plan.stages() as u32,
        bytes: plan.bytes(),
        command_buffers: [0, length - tokens].map(buffers),
        launches: plan.launches.iter().map(metal_launched).collect(),
    })
}

/// The decode step on an Apple GPU, as planned.
fn metal_step(plan: &Plan, context: u32) -> Step {
    let here = metal_gpu();
    let gpu_is_here = here.is_some();
    Step {
        gpu: here.unwrap_or_else(|| "Apple, M1 or later".to_owned()),
        gpu_is_here,
        remark: if gpu_is_here { "" } else { ", though none is here" },
        bandwidth: M5_MAX,
        kernels_per_token: plan.launches.len(),
        stages_per_token: plan.stages() as u32,
        bytes_per_token: plan.bytes(),
        bytes_per_token_at_context: plan.bytes() + plan.bytes_per_position() * u64::from(context),
        launches: plan.launches.iter().map(metal_launched).collect(),
    }
}

/// Name of the GPU of this Mac.
fn metal_gpu() -> Option<String> {
    #[cfg(target_vendor = "apple")]
    return crate::device::metal::device()
        .ok()
        .map(|device| lily_metal::device::Device::info(&device).name.clone());
    #[cfg(not(target_vendor = "apple"))]
    None
}

/// Whether the GPU of this Mac has units for tensor operations.
fn metal_has_tensors() -> bool {
    #[cfg(target_vendor = "apple")]
    return crate::device::metal::device()
        .is_ok_and(|device| lily_metal::device::Device::info(&device).tensor);
    #[cfg(not(target_vendor = "apple"))]
    false
}

/// `moved`: what of the fixed state a token reads and writes.
fn state(
    held_by: &'static str,
    fixed: u64,
    moved: u64,
    kv_per_token: u64,
    at_context: u64,
    context: u32,
    weights: &Weights,
) -> State {
    let at_start = weights.bytes_per_decoded_token + moved;
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
    report.step.as_ref().map_or(Ok(()), |step| write_step(out, step, report.context))?;
    report.prompt_step.as_ref().map_or(Ok(()), |step| write_prompt_step(out, step))
}

fn write_prompt_step(out: &mut impl Write, step: &PromptStep) -> io::Result<()> {
    let PromptStep { tokens, matrices, kernels, stages, bytes, command_buffers, launches } = step;
    let [first, last] = command_buffers.map(|n| n as u64);
    writeln!(out, "\nreading {tokens} tokens of a prompt; matrices of many rows by {matrices}")?;
    let lines = [
        ("kernels", *kernels as u64),
        ("stages that wait for each other", (*stages).into()),
        ("bytes moved, at the start", *bytes),
        ("command buffers, at the start", first),
        ("command buffers, at the end of the context", last),
    ];
    for (what, n) in lines {
        writeln!(out, "  {what:<44}{:>18}", grouped(n))?;
    }
    write_kernels(out, launches, M5_MAX)
}

fn write_step(out: &mut impl Write, step: &Step, context: u32) -> io::Result<()> {
    writeln!(out, "\ndecoding a token on a GPU ({}{})", step.gpu, step.remark)?;
    let at_context = format!("bytes moved, at {} tokens", grouped(context.into()));
    let lines = [
        ("kernels", step.kernels_per_token as u64),
        ("stages that wait for each other", step.stages_per_token.into()),
        ("bytes moved, at the start", step.bytes_per_token),
        (&at_context, step.bytes_per_token_at_context),
    ];
    for (what, n) in lines {
        writeln!(out, "  {what:<44}{:>18}", grouped(n))?;
    }
    write_kernels(out, &step.launches, step.bandwidth)?;
    let columns = ("stage", "kernel", "blocks", "threads", "shared", "bytes", "a position");
    let (stage, kernel, blocks, threads, shared, bytes, position) = columns;
    writeln!(
        out,
        "\n  {stage:>7}  {kernel:<20}{blocks:>14}{threads:>9}{shared:>9}{bytes:>14}{position:>12}"
    )?;
    for l in &step.launches {
        let blocks = l.grid.map(|n| n.to_string()).join(" x ");
        let stage = if l.stages == 1 {
            l.stage.to_string()
        } else {
            format!("{}-{}", l.stage, l.stage + l.stages - 1)
        };
        let (kernel, threads, shared) = (l.kernel, l.threads, l.shared_bytes);
        let (bytes, position) = (grouped(l.bytes), grouped(l.bytes_per_position));
        writeln!(
            out,
            "  {stage:>7}  {kernel:<20}{blocks:>14}{threads:>9}{shared:>9}{bytes:>14}{position:>12}"
        )?;
    }
    Ok(())
}

/// What each kernel moves, all its launches together, at the start of a sequence.
fn write_kernels(
    out: &mut impl Write,
    launches: &[Launched],
    (gpu, bandwidth): (&str, f64),
) -> io::Result<()> {
    let mut kernels: Vec<(&str, u32, u32, u64)> = Vec::new();
    for l in launches {
        match kernels.iter_mut().find(|k| k.0 == l.kernel) {
            Some((_, count, shared, bytes)) => {
                *count += 1;
                *shared = l.shared_bytes.max(*shared);
                *bytes += l.bytes;
            }
            None => kernels.push((l.kernel, 1, l.shared_bytes, l.bytes)),
        }
    }
    let floor = format!("us at {:.0} GB/s ({gpu})", bandwidth / 1e9);
    writeln!(out, "\n  {:<20}{:>9}{:>9}{:>16}{floor:>26}", "kernel", "launches", "shared", "bytes")?;
    for (kernel, count, shared, bytes) in kernels {
        let floor = bytes as f64 / bandwidth * 1e6;
        writeln!(out, "  {kernel:<20}{count:>9}{shared:>9}{:>16}{floor:>26.1}", grouped(bytes))?;
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
