//! The kernels as machine code of an NVIDIA GPU: that there is such code, which needs only NVRTC; what they cost there; and
//! that the sanitizers see mistakes. What they compute is tested by the other tests, with `LILY_TEST_DEVICE=cuda`.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::slice::from_mut;
use std::sync::Arc;

use common::draws;
use common::gpu::{Gpu, code, context, enqueue, options, wanted};
use common::model::{Model, edge_shapes, folder, unquantised};
use common::signature::signatures;
use common::text::{Way, whole};
use common::{Guard, Kernels, Order, Shape};
use lily_cuda::compile::Compiler;
use lily_cuda::driver::{Buffer, Context, Event, Function};
use lily_cuda::profile::{copy_bandwidth, median_us};
use lily_metal::draw::Draw;
use lily_metal::plan::{self, Contents, Features, KvType, Launch, Plan, Segment, State, Want};
use lily_metal::{plan_step, source};
use lily_model::config::Config;
use lily_model::presets::CONFIG_35B_A3B;
use lily_model::sample::SampleParams;

const WRONG: &str = include_str!("shim/wrong.metal");
const WRONG_TENSORS: &str = include_str!("shim/wrong_tensors.metal");

/// A kernel that does nothing: what a launch costs.
const IDLE: &str = "#include <metal_stdlib>
using namespace metal;
[[max_total_threads_per_threadgroup(128)]]
kernel void idle(
    device float* out [[buffer(0)]],
    uint i [[thread_index_in_threadgroup]]
) {
    if (i >= 128) {
        out[i] = 0.0f;
    }
}
";

/// NVRTC. Without it there is nothing to test, but where `./test` has brought it that is a failure.
fn compiler() -> Option<Compiler> {
    let compiler = Compiler::load();
    if compiler.is_none() {
        assert!(
            std::env::var_os("LILY_NVRTC").is_none(),
            "libnvrtc can't be loaded, though LILY_NVRTC is set"
        );
        println!("skipped: libnvrtc can't be loaded");
    }
    compiler
}

fn real() -> Config {
    Config::from_json(CONFIG_35B_A3B).unwrap()
}

/// The assembler's report is that no kernel has too few registers, and no warnings.
#[test]
fn the_kernels_compile_for_an_nvidia_gpu() {
    let Some(compiler) = compiler() else { return };
    let bf16 = Config { quantization: None, ..real() };
    let all = [(KvType::Bf16, false), (KvType::F32, false), (KvType::Bf16, true)].map(|way| (real(), way));
    for (config, (kv, tensor)) in all.into_iter().chain([(bf16, (KvType::Bf16, true))]) {
        let source = source::source(&config, Features { kv, tensor });
        let signatures = signatures(&source).unwrap();
        let text = whole(&source, &signatures, Way::Cuda);
        let log = compiler.compile("metal.cu", &text, &options(&source, "sm_90a")).unwrap().log;
        println!("{log}");
        assert!(!log.contains("warning"), "{log}");
        let without = log.matches(" 0 bytes spill stores, 0 bytes spill loads").count();
        assert_eq!(
            (without, log.matches("spill stores").count()),
            (signatures.len(), signatures.len()),
            "{log}"
        );
    }
}

/// Everything that runs on a GPU compiles; a cache folder keeps the result for a machine without a compiler.
#[test]
#[ignore = "half a minute: makes random models"]
fn all_that_runs_on_a_gpu_compiles() {
    let Some(compiler) = compiler() else { return };
    let files = ["tests/data/nano/mlx-4bit", "tests/data/nano/hf", "models/demo"]
        .map(|path| Model::load(&folder(path)).config);
    let edges = edge_shapes().into_iter().map(|(_, model)| model.config);
    let unquantised = [true, false].map(|all| unquantised(all, 5).config);
    let draws = draws::VOCABULARIES.map(draws::config);
    let models = files.into_iter().chain(edges).chain(unquantised).chain(draws).chain([real()]);
    let features =
        [KvType::Bf16, KvType::F32].map(|kv| [Features { kv, tensor: false }, Features { kv, tensor: true }]);
    let sources = models.flat_map(|c| features.concat().into_iter().map(move |f| source::source(&c, f)));
    for source in sources.chain([WRONG, WRONG_TENSORS, IDLE].map(str::to_owned)) {
        assert!(!code(Some(&compiler), &source, &signatures(&source).unwrap(), "sm_90a").is_empty());
    }
}

/// Whether there is a GPU to run on.
fn on_a_gpu() -> bool {
    if !wanted() {
        println!("skipped: LILY_TEST_DEVICE is not cuda");
    }
    wanted()
}

fn launch_wrong(kernel: &str) {
    if !on_a_gpu() {
        return;
    }
    let kernels = Kernels::compile(WRONG);
    let signature = kernels.signatures.iter().find(|s| s.name == kernel).unwrap();
    let memory = vec![256; signature.threadgroup_memory()];
    let mut out = kernels.allocate(256, Guard::End);
    let shape = Shape { kernel, grid: [1, 1, 1], threads: 64, memory: &memory };
    kernels.launch(shape, from_mut(&mut out), &[(0, 0)], Order::Forward).unwrap();
}

#[test]
#[ignore = "for compute-sanitizer --tool racecheck on a GPU, which must report it"]
fn racecheck_must_report_a_missing_barrier() {
    launch_wrong("missing_barrier");
}

#[test]
#[ignore = "for compute-sanitizer --tool memcheck on a GPU, which must report it"]
fn memcheck_must_report_an_access_behind_a_buffer() {
    launch_wrong("behind_buffer");
}

/// A step of the real model with random weights in the GPU's memory.
struct Device {
    plan: Plan,
    segments: Vec<Segment>,
    kernels: Gpu,
    buffers: Vec<Buffer>,
    /// Holds the position at which steps start.
    start: Buffer,
}

/// Bytes a second that an H200 reads and writes when it copies.
const COPY: f64 = 4.3e12;

/// Bytes of random data that buffers are filled with again and again.
const BLOCK: usize = 16 << 20;

/// Microseconds from which on one measurement is enough.
const LONG_US: f64 = 20_000.0;

impl Device {
    fn new(context: &Arc<Context>, config: &Config, segments: &[Segment]) -> Self {
        let kv = KvType::Bf16;
        let source = source::source(config, kv);
        let kernels = Gpu::compile(&source, &signatures(&source).unwrap());
        let plan = plan_step(config, kv, segments).unwrap();
        let mut random = fastrand::Rng::with_seed(1);
        let bytes: Vec<u8> = (0..BLOCK / 8).flat_map(|_| random.u64(..).to_le_bytes()).collect();
        let mut bf16 = |low: f32, high: f32| -> Vec<u8> {
            let mut value = || half::bf16::from_f32(low + (high - low) * random.f32()).to_le_bytes();
            (0..BLOCK / 2).flat_map(|_| value()).collect()
        };
        // Values of matrices lie around 0.
        let (scales, biases, kv_values) = (bf16(0.01, 0.02), bf16(-0.15, -0.075), bf16(-1.0, 1.0));
        let floats: Vec<u8> = (0..BLOCK / 4).flat_map(|_| random.f32().to_le_bytes()).collect();
        let block = |bytes: &[u8]| context.upload(bytes, "random data").unwrap();
        let blocks = [bytes, scales, biases, kv_values, floats].map(|b| block(&b));
        let turns = lily_metal::rope::turns(config.attention.rope_theta, config.attention.rotary_dim);
        let vocab = config.vocab_size as u32;
        let words = |words: &mut dyn Iterator<Item = u32>| words.flat_map(u32::to_le_bytes).collect();
        let fill = |buffer: &plan::Buffer| {
            let made = context.allocate(buffer.bytes, "the real model").unwrap();
            let count = buffer.bytes as u32 / 4;
            // What is not random.
            let exact: Vec<u8> = match &buffer.contents {
                Contents::Turns => turns.iter().flat_map(|t| t.to_le_bytes()).collect(),
                Contents::Numbers(numbers) => words(&mut numbers.iter().copied()),
                Contents::Draw => {
                    words(&mut Draw::new(&SampleParams::greedy(), &[], false, 0).words.into_iter())
                }
                Contents::Pages => words(&mut (0..count)),
                Contents::State(_, State::Pending) => words(&mut (0..count).map(|_| 0)),
                Contents::Token => words(&mut (0..count).map(|i| (i * 7919 + 1) % vocab)),
                _ => Vec::new(),
            };
            let block = match &buffer.contents {
                Contents::Codes(_) => &blocks[0],
                Contents::Scales(_) => &blocks[1],
                Contents::Biases(_) => &blocks[2],
                Contents::State(_, State::Keys | State::Values) => &blocks[3],
                _ => &blocks[4],
            };
            for at in (0..buffer.bytes).step_by(BLOCK) {
                let bytes = BLOCK.min(buffer.bytes - at);
                context.copy(made.address() + at as u64, block.address(), bytes).unwrap();
            }
            context.synchronize().unwrap();
            made.write(0, &exact).unwrap();
            made
        };
        let buffers = plan.buffers.iter().map(fill).collect();
        let start = context.allocate(4, "a position").unwrap();
        Self { plan, segments: segments.to_vec(), kernels, buffers, start }
    }

    fn of(&self, segment: usize, contents: &Contents) -> Option<&Buffer> {
        self.plan.buffer_of(segment, contents).map(|at| &self.buffers[at])
    }

    /// Microseconds of launches, one behind the other, from a position.
    fn time(&self, launches: &[&Launch], position: u32) -> f64 {
        // Before the recording, in which no code can be loaded.
        let functions: Vec<Function> = launches.iter().map(|l| self.kernels.function(l.kernel)).collect();
        let context = context();
        self.start.write(0, &position.to_le_bytes()).unwrap();
        let restart = || {
            (0..self.segments.len()).try_for_each(|segment| {
                let moved = self.of(segment, &Contents::Position).unwrap();
                context.copy(moved.address(), self.start.address(), 4)
            })
        };
        let enqueue_all = || {
            launches.iter().zip(&functions).try_for_each(|(l, function)| {
                let addresses: Vec<u64> =
                    l.bindings.iter().map(|b| self.buffers[b.buffer].address() + b.offset as u64).collect();
                enqueue(context, *function, l.grid, l.threads, &l.threadgroup_memory, &addresses)
            })
        };
        restart().unwrap();
        // A whole step moves on; launches of one kernel are not measured together with copies.
        let whole = launches.len() == self.plan.launches.len();
        let first = || if whole { restart() } else { Ok(()) };
        let graph = context.capture(|| first().and_then(|()| enqueue_all())).unwrap();
        let (begin, end) = (Event::new(context).unwrap(), Event::new(context).unwrap());
        let once = || {
            begin.record().unwrap();
            graph.launch().unwrap();
            end.record().unwrap();
            end.wait().unwrap();
            f64::from(end.since(&begin).unwrap()) * 1e3
        };
        // The first one also loads code.
        once();
        let us = once();
        if us < LONG_US { median_us(context, || graph.launch()).unwrap() } else { us }
    }

    /// A line about a whole step; what one leaves is there for the launches that are timed alone.
    fn step_cost(&self, name: &str, position: u32) -> String {
        let all: Vec<&Launch> = self.plan.launches.iter().collect();
        let us = self.time(&all, position);
        let mut broken = [0; 4];
        for segment in 0..self.segments.len() {
            self.of(segment, &Contents::Broken).unwrap().read(0, &mut broken).unwrap();
            assert_eq!(broken, [0; 4], "a logit is not finite");
        }
        let tokens: usize = self.segments.iter().map(|s| s.tokens).sum();
        let bytes = self.plan.bytes() + self.plan.bytes_per_position() * u64::from(position);
        let rate = bytes as f64 / us * 1e6;
        format!(
            "position {position}, {name}: a step of {} launches takes {us:.0} us, {:.0} tok/s, {:.0} GB/s, {:.0} % of 4.3 TB/s",
            all.len(),
            tokens as f64 * 1e6 / us,
            rate / 1e9,
            100.0 * rate / COPY
        )
    }

    /// A line about all launches of a kernel.
    fn kernel_cost(&self, kernel: &str, position: u32, idle_us: f64) -> String {
        let launches: Vec<&Launch> = self.plan.launches.iter().filter(|l| l.kernel == kernel).collect();
        let bytes = |l: &&Launch| (l.bytes() + l.bytes_per_position() * u64::from(position)) as f64;
        let all: f64 = launches.iter().map(bytes).sum();
        let n = launches.len() as f64;
        let us = self.time(&launches, position) / n;
        let (registers, local) = self.kernels.function(kernel).resources().unwrap();
        let share = |us: f64| 100.0 * all / n / us * 1e6 / COPY;
        format!(
            "| {kernel} | {n} | {registers} | {local} | {:.2} | {:.0} | {us:.2} | {:.0} | {:.0} | {:.0} | {:.0} |",
            all / n / 1e6,
            all / 1e6,
            us * n,
            all / n / us / 1e3,
            share(us),
            share((us - idle_us).max(0.1))
        )
    }
}

/// Microseconds of a launch that does nothing, among others.
fn idle_us() -> f64 {
    let kernels = Gpu::compile(IDLE, &signatures(IDLE).unwrap());
    let (context, function) = (context(), kernels.function("idle"));
    let out = context.allocate(16, "nothing").unwrap();
    let launch = || enqueue(context, function, [128, 1, 1], 128, &[], &[out.address()]);
    let graph = context.capture(|| (0..40).try_for_each(|_| launch())).unwrap();
    median_us(context, || graph.launch()).unwrap() / 40.0
}

/// Steps that are measured: a name, sequences, tokens of each, what is wanted of them, positions.
const STEPS: [(&str, usize, usize, Want, &[u32]); 5] = [
    ("one token", 1, 1, Want::Last, &[4_095, 65_535]),
    ("a draft of 8 tokens", 1, 8, Want::All, &[4_095]),
    ("one token of 8 sequences", 8, 1, Want::Last, &[4_095]),
    ("a chunk of 32 tokens", 1, 32, Want::Last, &[4_096]),
    ("a chunk of 512 tokens", 1, 512, Want::Last, &[4_096]),
];

/// Time and bytes a second of each kernel, its launches of all layers one behind the other. Those that move less than the 50 MB
/// of the L2 cache together find them there; the others come from memory. In the last column a launch that does nothing is taken
/// off.
#[test]
#[ignore = "a measurement on a GPU with 30 GB"]
fn cost_of_the_real_models_kernels() {
    if !on_a_gpu() {
        return;
    }
    let context = context();
    let (idle, copied) = (idle_us(), copy_bandwidth(context).unwrap() / 1e12);
    println!("{}; copies at {copied:.2} TB/s; a launch that does nothing: {idle:.2} us", context.name);
    println!(
        "| kernel | launches | registers | local | MB each | all | us each | all | GB/s | % of 4.3 TB/s | less the start |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
    let mut summary = Vec::new();
    for (name, sequences, tokens, want, positions) in STEPS {
        let capacity = positions.iter().fold(0, |most, p| most.max(*p as usize)) + tokens;
        let segments = vec![Segment { tokens, capacity, want }; sequences];
        let device = Device::new(context, &real(), &segments);
        let mut names: Vec<&str> = device.plan.launches.iter().map(|l| l.kernel).collect();
        names.sort_unstable();
        names.dedup();
        for (i, &position) in positions.iter().enumerate() {
            let step = device.step_cost(name, position);
            println!("| **{name}, position {position}** |");
            let moves = |kernel: &&str| {
                device.plan.launches.iter().any(|l| l.kernel == *kernel && l.bytes_per_position() > 0)
            };
            for kernel in names.iter().filter(|kernel| i == 0 || moves(kernel)) {
                println!("{}", device.kernel_cost(kernel, position, idle));
            }
            summary.push(step);
        }
    }
    println!("{}", summary.join("\n"));
}
