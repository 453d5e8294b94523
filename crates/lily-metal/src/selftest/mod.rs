//! Runs every kernel of a step on a device and compares what it leaves with the CPU's functions: what `lily doctor` does on the
//! machine of whoever has one, and a test on every machine.

mod draws;
mod expected;
mod report;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use lily_model::config::Config;
use lily_model::weights::Weights;

use crate::device::{Argument, Device, Dispatch, Place};
use crate::plan::{Binding, Contents, Features, KvType, Launch, PAGE, Plan, SETTLE_EVERY, State, Want};
use crate::{LoadError, load, source, steps, weights};
pub use draws::Drawn;
pub use expected::{Launched, is_half};
pub use report::Report;

/// What may differ, of the largest value: the order of sums, and another `exp`.
pub const TOLERANCE: f32 = 1e-4;
/// Of sums of numbers that were rounded to bf16.
const BF16_TOLERANCE: f32 = 1e-2;
/// Positions of a sequence, at most.
const CAPACITY: usize = 192;

/// Steps that between them launch every kernel, and draw in every way: of each sequence the position, the tokens, and what is wanted.
const STEPS: [&[(usize, usize, Want)]; 7] = [
    &[(0, 1, Want::Last)],
    &[(130, 1, Want::Last)],
    &[(62, 3, Want::All), (5, 1, Want::Nothing)],
    // Of the real model in two parts, of two pages each.
    &[(90, 100, Want::Last)],
    &[(130, 20, Want::Nothing), (0, 11, Want::All), (7, 1, Want::Last)],
    &[(9, 1, Want::Last)],
    &[(3, 1, Want::Last)],
];

/// How a kernel did.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Which.
    pub kernel: &'static str,
    /// Most threads of a threadgroup that the device allows it.
    pub max_threads: usize,
    /// Threads that it is launched with.
    pub threads: usize,
    /// Bytes of threadgroup memory.
    pub threadgroup_memory: usize,
    /// Launches that were checked.
    pub launches: usize,
    /// Largest difference, of the largest value.
    pub worst: f32,
    /// Time of the fastest launch, with what handing it over costs.
    pub fastest: Duration,
    /// What was wrong, in words; empty: nothing.
    pub faults: Vec<String>,
}

/// A step's memory, and what is launched on it.
struct Bench<'a> {
    device: &'a mut dyn Device,
    config: &'a Config,
    weights: &'a Weights,
    kv: KvType,
    /// Of weights and tables.
    fixed: HashMap<Contents, Place>,
    /// Draws so far.
    draws: usize,
}

/// A step with memory for everything that is not fixed.
struct Step {
    plan: Plan,
    arguments: Vec<Argument>,
    segments: Vec<Segment>,
}

/// A segment of a step.
struct Segment {
    /// Of its sequence, before the step.
    position: usize,
    tokens: Vec<u32>,
    want: Want,
    drawn: Drawn,
}

/// Tests all kernels that steps of this model launch, with the model's own weights and random state.
pub fn run(
    device: &mut dyn Device,
    config: &Config,
    weights: &Weights,
    features: impl Into<Features>,
) -> Result<Report, LoadError> {
    let features = features.into();
    run_source(device, config, weights, features, &source::source(config, features))
}

/// As [`run`], with kernels of another text: a test of the test.
pub fn run_source(
    device: &mut dyn Device,
    config: &Config,
    weights: &Weights,
    features: impl Into<Features>,
    source: &str,
) -> Result<Report, LoadError> {
    let features = features.into();
    let shape =
        |step: &&[(usize, usize, Want)]| step.iter().map(|&(_, n, want)| (n, want)).collect::<Vec<_>>();
    let plans = STEPS.iter().map(|step| steps::plan(config, features, CAPACITY, &shape(step)));
    let plans = plans.collect::<Result<Vec<Plan>, _>>()?;
    let info = device.info().clone();
    if let Err(error) = device.compile(source, features.into(), &load::kernels(&plans)) {
        return Ok(Report { info, features, compiled: Err(error.to_string()), outcomes: Vec::new() });
    }
    let mut outcomes = outcomes(device, &plans)?;
    let mut fixed = HashMap::new();
    if let Some(plan) = plans.first() {
        fixed = weights::place(device, weights, plan, false)?.places;
        fixed.insert(Contents::Turns, load::turns(device, config)?);
    }
    let mut bench = Bench { device, config, weights, kv: features.kv, fixed, draws: 0 };
    let mut random = fastrand::Rng::with_seed(3);
    for (plan, segments) in plans.into_iter().zip(STEPS) {
        let step = bench.prepare(plan, segments, &mut random)?;
        bench.run(&step, &mut outcomes);
    }
    Ok(Report { info, features, compiled: Ok(()), outcomes })
}

/// One for each kernel, in the order of the step.
fn outcomes(device: &dyn Device, plans: &[Plan]) -> Result<Vec<Outcome>, LoadError> {
    let mut out: Vec<Outcome> = Vec::new();
    for launch in plans.iter().flat_map(|plan| &plan.launches) {
        if out.iter().any(|outcome| outcome.kernel == launch.kernel) {
            continue;
        }
        let (_, pipeline) =
            device.kernel(launch.kernel).ok_or(LoadError::NoKernel { name: launch.kernel })?;
        let mut faults = Vec::new();
        if pipeline.max_threads < launch.threads || pipeline.lanes != crate::plan::LANES {
            faults.push(format!(
                "it may have {} threads, {} a SIMD-group; it needs {}, {}",
                pipeline.max_threads,
                pipeline.lanes,
                launch.threads,
                crate::plan::LANES
            ));
        }
        out.push(Outcome {
            kernel: launch.kernel,
            max_threads: pipeline.max_threads,
            threads: launch.threads,
            threadgroup_memory: launch.threadgroup_memory.iter().sum(),
            launches: 0,
            worst: 0.0,
            fastest: Duration::MAX,
            faults,
        });
    }
    Ok(out)
}

impl Bench<'_> {
    /// Makes memory for a step, with random tokens and state.
    fn prepare(
        &mut self,
        plan: Plan,
        segments: &[(usize, usize, Want)],
        random: &mut fastrand::Rng,
    ) -> Result<Step, LoadError> {
        let vocab = self.config.vocab_size;
        let mut segment = |&(position, count, want): &(usize, usize, Want)| {
            let tokens: Vec<u32> = (0..count).map(|_| random.u32(0..vocab as u32)).collect();
            let drawn = Drawn::random(self.draws, position, &tokens, vocab, random);
            self.draws += usize::from(want != Want::Nothing);
            Segment { position, tokens, want, drawn }
        };
        let segments: Vec<Segment> = segments.iter().map(&mut segment).collect();
        let mut arguments = Vec::new();
        for buffer in &plan.buffers {
            let missing = || LoadError::Missing { contents: buffer.contents.name() };
            if let Contents::Numbers(words) = &buffer.contents {
                arguments.push(Argument::words(words).ok_or_else(missing)?);
                continue;
            }
            if let Contents::Absent(_) = &buffer.contents {
                arguments.push(Argument::words(&[0]).ok_or_else(missing)?);
                continue;
            }
            let place = match self.fixed.get(&buffer.contents) {
                Some(&place) => place,
                None => Place { buffer: self.device.allocate(buffer.bytes, "the self-test")?, offset: 0 },
            };
            if let Some(segment) = segments.get(buffer.segment)
                && let Some(bytes) = self.at_first(&buffer.contents, buffer.bytes, segment, random)
            {
                self.device.write(place, &bytes);
            }
            arguments.push(Argument::Place(place));
        }
        Ok(Step { plan, arguments, segments })
    }

    /// What a buffer holds before the step, if that matters.
    fn at_first(
        &self,
        contents: &Contents,
        bytes: usize,
        segment: &Segment,
        random: &mut fastrand::Rng,
    ) -> Option<Vec<u8>> {
        let words = |words: Vec<u32>| words.into_iter().flat_map(u32::to_le_bytes).collect();
        let draw = || segment.drawn.draw(self.config.vocab_size);
        Some(match contents {
            Contents::Token => words(segment.tokens.clone()),
            Contents::Position => words(vec![segment.position as u32]),
            Contents::Draw => words(draw().words.to_vec()),
            Contents::Changes => words(draw().changes),
            Contents::Mask => words(draw().mask),
            // In reverse.
            Contents::Pages => words((0..bytes as u32 / 4).rev().collect()),
            Contents::State(_, State::Keys | State::Values) if self.kv == KvType::Bf16 => {
                (0..bytes / 2).flat_map(|_| bf16::from_f32(random.f32() * 2.0 - 1.0).to_le_bytes()).collect()
            }
            Contents::State(_, State::Pending) => {
                words(vec![(segment.position % SETTLE_EVERY) as u32; bytes / 4])
            }
            Contents::State(..) => (0..bytes / 4).flat_map(|_| (random.f32() - 0.5).to_le_bytes()).collect(),
            _ => return None,
        })
    }

    /// What the bound part of a buffer holds, as f32; of words, the bits.
    fn values(&self, step: &Step, binding: &Binding) -> Vec<f32> {
        let contents = &step.plan.buffers[binding.buffer].contents;
        let Argument::Place(place) = step.arguments[binding.buffer] else {
            return match contents {
                Contents::Numbers(words) => words.iter().copied().map(f32::from_bits).collect(),
                _ => Vec::new(),
            };
        };
        let mut bytes = vec![0; binding.length];
        self.device.read(place.after(binding.offset), &mut bytes);
        let halves = |bytes: &[u8]| -> Vec<f32> {
            bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
        };
        let floats = |bytes: &[u8]| -> Vec<f32> {
            bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
        };
        let is_bf16 = self.kv == KvType::Bf16;
        match contents {
            Contents::State(_, State::Keys | State::Values) => {
                // By position.
                let page = PAGE * self.config.attention.kv_width() * self.kv.size();
                let pages: Vec<u8> = bytes.chunks_exact(page).rev().flatten().copied().collect();
                if is_bf16 { halves(&pages) } else { floats(&pages) }
            }
            Contents::Scratch("q") if is_bf16 => halves(&bytes),
            _ if is_half(contents) => {
                bytes.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()
            }
            _ => floats(&bytes),
        }
    }

    /// Logits of a segment's last token.
    fn logits(&self, step: &Step, segment: usize) -> Option<Vec<f32>> {
        let rows = |s: &Segment| s.want.rows(s.tokens.len());
        let end: usize = step.segments[..=segment].iter().map(rows).sum();
        let Argument::Place(place) = step.arguments[step.plan.buffer(&Contents::Logits)?] else {
            return None;
        };
        let mut bytes = vec![0; 4 * self.config.vocab_size];
        self.device.read(place.after(end.checked_sub(1)? * bytes.len()), &mut bytes);
        Some(bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }

    /// Runs a step launch by launch and checks what each one leaves.
    fn run(&mut self, step: &Step, outcomes: &mut [Outcome]) {
        let (mut layer, mut prepared) = (0, HashMap::new());
        for launch in &step.plan.launches {
            let Some(outcome) = outcomes.iter_mut().find(|o| o.kernel == launch.kernel) else { continue };
            let contents = |b: &Binding| step.plan.buffers[b.buffer].contents.clone();
            let bound = launch.bindings.iter().filter(|b| !contents(b).is_weight());
            let mut before: HashMap<_, _> = bound.map(|b| (contents(b), self.values(step, b))).collect();
            // By their names alone.
            let weights = launch.bindings.iter().map(contents).filter(Contents::is_weight);
            before.extend(weights.map(|c| (c, Vec::new())));
            let segment = step.plan.segment_of(launch);
            if launch.kernel == "delta_chunks"
                && let Some(prepared) = prepared.remove(&segment)
            {
                // Together they do what is known of tokens one after another.
                let prepared: HashMap<Contents, Vec<f32>> = prepared;
                prepared
                    .into_iter()
                    .for_each(|(contents, values)| _ = before.entry(contents).or_insert(values));
            }
            let position =
                before.get(&Contents::Position).and_then(|p| p.first()).map_or(0, |p| p.to_bits() as usize);
            let (config, weights, kv) = (self.config, self.weights, self.kv);
            let launched = Launched { config, weights, layer, position, kv, before };
            match self.launch(step, launch) {
                Ok(time) => outcome.fastest = outcome.fastest.min(time),
                Err(error) => outcome.fault(position, layer, &error.to_string()),
            }
            self.check(step, launch, &launched, outcome);
            if launch.kernel == "prepare_chunks" {
                prepared.insert(segment, launched.before);
            }
            outcome.launches += 1;
            layer += usize::from(matches!(launch.kernel, "down" | "sum_slots"));
        }
    }

    fn launch(&mut self, step: &Step, launch: &Launch) -> Result<Duration, LoadError> {
        let (kernel, _) =
            self.device.kernel(launch.kernel).ok_or(LoadError::NoKernel { name: launch.kernel })?;
        let argument = |b: &Binding| match step.arguments[b.buffer] {
            Argument::Place(place) => Argument::Place(place.after(b.offset)),
            words => words,
        };
        let arguments: Vec<Argument> = launch.bindings.iter().map(argument).collect();
        let start = Instant::now();
        let submission = self.device.submit(&mut |encoder| {
            encoder.dispatch(&Dispatch {
                kernel,
                grid: launch.grid,
                threads: launch.threads,
                threadgroup_memory: &launch.threadgroup_memory,
                arguments: &arguments,
                barrier: false,
            });
        })?;
        let ended = self.device.wait(submission);
        self.device.retire(submission);
        ended?;
        Ok(start.elapsed())
    }

    fn check(&self, step: &Step, launch: &Launch, launched: &Launched<'_>, outcome: &mut Outcome) {
        let (position, layer) = (launched.position, launched.layer);
        let Some(expected) = launched.of(launch.kernel) else {
            return outcome.fault(position, layer, "there is nothing to compare it with");
        };
        let of = |wanted: &Contents| {
            let is = |b: &&Binding| step.plan.buffers[b.buffer].contents == *wanted;
            launch.bindings.iter().find(is).map_or_else(Vec::new, |b| self.values(step, b))
        };
        if matches!(launch.kernel, "finish" | "advance") {
            self.check_words(step, launch, launched, outcome, &of);
        }
        for (contents, mut expected) in expected {
            let mut got = of(&contents);
            let mut tolerance = TOLERANCE;
            let is_bf16 = self.kv == KvType::Bf16;
            match contents {
                Contents::Scratch("parts") => {
                    got = launched.merged(&got, &of(&Contents::Scratch("weights")));
                    if is_bf16 && matches!(launch.kernel, "attend_rows" | "attend_tensor") {
                        tolerance = BF16_TOLERANCE;
                    }
                }
                Contents::Scratch("chosen" | "order" | "tiles" | "best")
                | Contents::State(_, State::Pending) => {
                    // Words, which are compared as numbers.
                    let numbers = |x: Vec<f32>| x.into_iter().map(|e| e.to_bits() as f32).collect();
                    (got, expected) = (numbers(got), numbers(expected));
                    tolerance = 0.0;
                }
                // A value between two bf16 may fall either way.
                Contents::State(_, State::Keys | State::Values) | Contents::Scratch("q") if is_bf16 => {
                    tolerance = 1.0 / 128.0;
                }
                _ if is_half(&contents) => tolerance = 1.0 / 1024.0,
                _ => {}
            }
            outcome.compare(position, layer, &contents, &got, &expected, tolerance);
        }
    }

    /// Checks token, position and fault that a step leaves.
    fn check_words(
        &self,
        step: &Step,
        launch: &Launch,
        launched: &Launched<'_>,
        outcome: &mut Outcome,
        of: &dyn Fn(&Contents) -> Vec<f32>,
    ) {
        let word = |contents: &Contents| of(contents).first().map(|x| x.to_bits());
        let segment = step.plan.segment_of(launch);
        let rows = launched.before.keys().find_map(|c| match c {
            Contents::Numbers(words) => words.first().copied(),
            _ => None,
        });
        let Some(Segment { position, drawn, .. }) = step.segments.get(segment) else { return };
        let start = *position as u32;
        let mut pairs = vec![("position", word(&Contents::Position), rows.map(|rows| start + rows))];
        if launch.kernel == "finish" {
            let best = self.logits(step, segment).map(|logits| drawn.token(&logits));
            pairs.extend([
                ("token", word(&Contents::Token), best),
                ("fault", word(&Contents::Broken), Some(0)),
            ]);
        }
        for (name, got, expected) in pairs {
            if got != expected || got.is_none() {
                let text = format!("{name} is {got:?}, expected {expected:?}");
                outcome.fault(launched.position, launched.layer, &text);
            }
        }
    }
}

impl Outcome {
    /// Whether nothing was wrong.
    pub fn passed(&self) -> bool {
        self.faults.is_empty() && self.launches > 0
    }

    fn fault(&mut self, position: usize, layer: usize, text: &str) {
        self.faults.push(format!("position {position}, layer {layer}: {text}"));
    }

    /// Compares with what is expected. Where that is NaN, anything will do: nobody reads it.
    fn compare(
        &mut self,
        position: usize,
        layer: usize,
        contents: &Contents,
        got: &[f32],
        expected: &[f32],
        tolerance: f32,
    ) {
        let name = contents.name();
        if got.len() != expected.len() {
            let text = format!("{name} has {} values, expected {}", got.len(), expected.len());
            return self.fault(position, layer, &text);
        }
        let size = expected.iter().fold(0.0f32, |m, x| m.max(x.abs())).max(f32::MIN_POSITIVE);
        let (mut worst, mut at) = (0.0f32, 0);
        for (i, (a, b)) in got.iter().zip(expected).enumerate().filter(|(_, (_, b))| !b.is_nan()) {
            let difference = (a - b).abs() / size;
            if difference > worst || difference.is_nan() {
                (worst, at) = (if difference.is_nan() { f32::INFINITY } else { difference }, i);
            }
        }
        self.worst = self.worst.max(worst);
        if worst > tolerance {
            let text =
                format!("{name}[{at}] is {}, expected {} (largest value {size})", got[at], expected[at]);
            self.fault(position, layer, &text);
        }
    }
}
