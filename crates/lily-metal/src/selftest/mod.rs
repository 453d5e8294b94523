//! Runs every kernel of a step on a device and compares what it leaves with the CPU's functions: what `lily doctor` does on the
//! machine of whoever has one, and a test on every machine.

mod expected;
mod report;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use half::bf16;
use lily_model::config::Config;
use lily_model::sample::argmax;
use lily_model::weights::Weights;

use crate::device::{Device, Dispatch, Place};
use crate::plan::{Contents, KvType, Launch, Plan, State, plan};
use crate::{LoadError, load, rope, source, weights};
use expected::Step;
pub use report::Report;

/// What may differ, of the largest value: the order of sums, and another `exp`.
pub const TOLERANCE: f32 = 1e-4;
/// Positions at which a step is run: the first two, and one with two parts of attention.
const POSITIONS: [u32; 3] = [0, 1, 130];
const CAPACITY: usize = 192;

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
    plan: Plan,
    places: Vec<Place>,
}

/// Tests all kernels that a decode step of this model launches, with the model's own weights and random state.
pub fn run(
    device: &mut dyn Device,
    config: &Config,
    weights: &Weights,
    kv: KvType,
) -> Result<Report, LoadError> {
    run_source(device, config, weights, kv, &source::source(config, kv))
}

/// As [`run`], with kernels of another text: a test of the test.
pub fn run_source(
    device: &mut dyn Device,
    config: &Config,
    weights: &Weights,
    kv: KvType,
    source: &str,
) -> Result<Report, LoadError> {
    let plan = plan(config, CAPACITY, kv)?;
    let info = device.info().clone();
    if let Err(error) = device.compile(source, &load::kernels(&plan)) {
        return Ok(Report { info, compiled: Err(error.to_string()), outcomes: Vec::new() });
    }
    let mut outcomes = outcomes(device, &plan)?;
    let mut bench = Bench::new(device, config, weights, kv, plan)?;
    let mut random = fastrand::Rng::with_seed(3);
    for position in POSITIONS {
        bench.step(position, &mut random, &mut outcomes);
    }
    Ok(Report { info, compiled: Ok(()), outcomes })
}

/// One for each kernel, in the order of the step.
fn outcomes(device: &dyn Device, plan: &Plan) -> Result<Vec<Outcome>, LoadError> {
    let mut out: Vec<Outcome> = Vec::new();
    for launch in &plan.launches {
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

impl<'a> Bench<'a> {
    fn new(
        device: &'a mut dyn Device,
        config: &'a Config,
        weights: &'a Weights,
        kv: KvType,
        plan: Plan,
    ) -> Result<Self, LoadError> {
        let placed = weights::place(device, weights, &plan, false)?;
        let mut places = Vec::new();
        for (index, buffer) in plan.buffers.iter().enumerate() {
            places.push(match placed.places.get(&index) {
                Some(&place) => place,
                None => Place { buffer: device.allocate(buffer.bytes, "the self-test")?, offset: 0 },
            });
        }
        let mut bench = Self { device, config, weights, kv, plan, places };
        let turns = rope::turns(config.attention.rope_theta, config.attention.rotary_dim);
        bench.put(&Contents::Turns, &turns.iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<u8>>());
        let pages: Vec<u8> = (0..CAPACITY as u32 / 64).rev().flat_map(u32::to_le_bytes).collect();
        bench.put(&Contents::Pages, &pages);
        Ok(bench)
    }

    fn put(&mut self, contents: &Contents, bytes: &[u8]) {
        if let Some(index) = self.plan.buffer(contents) {
            self.device.write(self.places[index], bytes);
        }
    }

    fn bytes(&self, index: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.plan.buffers[index].bytes];
        self.device.read(self.places[index], &mut bytes);
        bytes
    }

    /// What a buffer holds, as f32; of words, the bits.
    fn values(&self, contents: &Contents) -> Vec<f32> {
        let Some(index) = self.plan.buffer(contents) else { return Vec::new() };
        let bytes = self.bytes(index);
        match contents {
            Contents::State(_, State::Keys | State::Values) => self.in_order(&bytes),
            _ => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        }
    }

    /// The values of a cache, whose pages lie in reverse, by position.
    fn in_order(&self, bytes: &[u8]) -> Vec<f32> {
        let page = 64 * self.config.attention.kv_width() * self.kv.size();
        let pages = bytes.chunks_exact(page).rev();
        match self.kv {
            KvType::F32 => pages.flat_map(|p| p.as_chunks().0).map(|b| f32::from_le_bytes(*b)).collect(),
            KvType::Bf16 => {
                pages.flat_map(|p| p.as_chunks().0).map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
            }
        }
    }

    /// Random state of a sequence of so many tokens.
    fn randomise(&mut self, position: u32, random: &mut fastrand::Rng) {
        for index in 0..self.plan.buffers.len() {
            let buffer = &self.plan.buffers[index];
            let Contents::State(_, state) = buffer.contents else { continue };
            let bytes: Vec<u8> = match (state, self.kv) {
                (State::Keys | State::Values, KvType::Bf16) => (0..buffer.bytes / 2)
                    .flat_map(|_| bf16::from_f32(random.f32() * 2.0 - 1.0).to_le_bytes())
                    .collect(),
                _ => (0..buffer.bytes / 4).flat_map(|_| (random.f32() - 0.5).to_le_bytes()).collect(),
            };
            self.device.write(self.places[index], &bytes);
        }
        self.put(&Contents::Position, &position.to_le_bytes());
    }

    /// Runs a step launch by launch and checks what each one leaves.
    fn step(&mut self, position: u32, random: &mut fastrand::Rng, outcomes: &mut [Outcome]) {
        let token = random.u32(0..self.config.vocab_size as u32);
        self.randomise(position, random);
        self.put(&Contents::Token, &token.to_le_bytes());
        let mut layer = 0;
        for launch in self.plan.launches.clone() {
            let Some(outcome) = outcomes.iter_mut().find(|o| o.kernel == launch.kernel) else { continue };
            let before = self.before(&launch);
            let step = Step {
                config: self.config,
                weights: self.weights,
                layer: layer.min(self.config.layers.len() - 1),
                position,
                token,
                kv: self.kv,
                before,
            };
            match self.launch(&launch) {
                Ok(time) => outcome.fastest = outcome.fastest.min(time),
                Err(error) => outcome.fault(position, layer, &error.to_string()),
            }
            self.check(&launch, &step, outcome, layer);
            outcome.launches += 1;
            layer += usize::from(launch.kernel == "down");
        }
    }

    /// Values of what a launch is bound to, but for weights.
    fn before(&self, launch: &Launch) -> HashMap<Contents, Vec<f32>> {
        let bound = launch.bindings.iter().map(|b| &self.plan.buffers[b.buffer].contents);
        bound.filter(|c| !c.is_weight()).map(|c| (c.clone(), self.values(c))).collect()
    }

    fn launch(&mut self, launch: &Launch) -> Result<Duration, LoadError> {
        let (kernel, _) =
            self.device.kernel(launch.kernel).ok_or(LoadError::NoKernel { name: launch.kernel })?;
        let places: Vec<Place> = launch.bindings.iter().map(|b| self.places[b.buffer]).collect();
        let start = Instant::now();
        let submission = self.device.submit(&mut |encoder| {
            encoder.dispatch(&Dispatch {
                kernel,
                grid: launch.grid,
                threads: launch.threads,
                threadgroup_memory: &launch.threadgroup_memory,
                places: &places,
                barrier: false,
            });
        })?;
        let ended = self.device.wait(submission);
        self.device.retire(submission);
        ended?;
        Ok(start.elapsed())
    }

    fn check(&self, launch: &Launch, step: &Step<'_>, outcome: &mut Outcome, layer: usize) {
        let position = step.position;
        let Some(expected) = step.expected(launch.kernel) else {
            return outcome.fault(position, layer, "there is nothing to compare it with");
        };
        if launch.kernel == "finish" {
            let best = argmax(&self.values(&Contents::Logits));
            let words =
                [Contents::Token, Contents::Position, Contents::Broken].map(|c| self.values(&c)[0].to_bits());
            if words != [best, position + 1, 0] {
                let text =
                    format!("token, position, fault are {words:?}, expected {:?}", [best, position + 1, 0]);
                outcome.fault(position, layer, &text);
            }
        }
        for (contents, expected) in expected {
            let mut got = self.values(&contents);
            let mut expected = expected;
            let mut tolerance = TOLERANCE;
            match contents {
                Contents::Scratch("parts") => {
                    got = step.merged(&got, &self.values(&Contents::Scratch("weights")))
                }
                Contents::Scratch("chosen") => {
                    // Numbers of experts, which are compared as numbers.
                    let numbers = |x: Vec<f32>| x.into_iter().map(|e| e.to_bits() as f32).collect();
                    (got, expected) = (numbers(got), numbers(expected));
                }
                Contents::State(_, State::Keys | State::Values) => {
                    let end = (position as usize + 1) * self.config.attention.kv_width();
                    got.truncate(end);
                    expected.truncate(end);
                    if self.kv == KvType::Bf16 {
                        // A value between two bf16 may fall either way.
                        tolerance = 1.0 / 128.0;
                    }
                }
                _ => {}
            }
            outcome.compare(position, layer, &contents, &got, &expected, tolerance);
        }
    }
}

impl Outcome {
    /// Whether nothing was wrong.
    pub fn passed(&self) -> bool {
        self.faults.is_empty() && self.launches > 0
    }

    fn fault(&mut self, position: u32, layer: usize, text: &str) {
        self.faults.push(format!("position {position}, layer {layer}: {text}"));
    }

    /// Compares with what is expected. Where that is NaN, anything will do: nobody reads it.
    fn compare(
        &mut self,
        position: u32,
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
