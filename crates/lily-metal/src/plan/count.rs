//! What a token and a chunk of the real model cost an M5 Max, by count: the tables of docs/lab/metal.md.

use super::*;
use crate::pace::command_buffers;

/// Cores, and clocks a second.
const CORES: f64 = 40.0;
const CLOCK: f64 = 1.6e9;
/// Of a core and clock: bytes of threadgroup memory, and bytes from the second-level cache, both measured by others on an M1.
const THREADGROUP_BYTES: f64 = 65.0;
const CACHE_BYTES: f64 = 37.0;
/// Bytes of memory a second.
const BYTES: f64 = 614e9;
/// What of the units' clocks a product of quantised matrices reaches when nothing else binds it. A product of bf16, 4,096 in each
/// dimension, was measured at 48.6 to 53.5 TFLOP/s on an M5 Max; one with 256 experts' matrices, of 4 bits, on an M5, reached 78 to
/// 87 % of what the units were measured at.
const UNITS: f64 = 51.0 / 65.5 * 0.83;
/// What of all other speeds is reached.
const OTHERS: f64 = 0.8;
/// A stage that waits for the one before it, if it takes as long as those of mlx-lm and of the original: the numbers of their stages and
/// their published speeds say 3.4 us each, and 80 % of the memory's bandwidth.
const STAGE: f64 = 3.4e-6;
/// Another command buffer.
const COMMAND_BUFFER: f64 = 20e-6;

/// Clocks of a core, and bytes, for all threadgroups of a launch.
#[derive(Clone, Copy, Default)]
struct Cost {
    units: f64,
    /// Of the ALUs: four instructions of a SIMD-group are one clock.
    alus: f64,
    threadgroup_memory: f64,
    cache: f64,
}

impl Cost {
    fn times(self, n: f64) -> Self {
        Self {
            units: self.units * n,
            alus: self.alus * n,
            threadgroup_memory: self.threadgroup_memory * n,
            cache: self.cache * n,
        }
    }

    /// Seconds of each resource, then those of memory, if all cores have equal shares.
    fn seconds(self, bytes: f64) -> Seconds {
        let clocks = |clocks: f64, reached: f64| clocks / CORES / CLOCK / reached;
        [
            clocks(self.units, UNITS),
            clocks(self.alus, OTHERS),
            clocks(self.threadgroup_memory / THREADGROUP_BYTES, OTHERS),
            clocks(self.cache / CACHE_BYTES, OTHERS),
            bytes / BYTES / OTHERS,
        ]
    }
}

const KB: f64 = 1024.0;
/// Codes, scales and biases of 128 weights in a group of 64 inputs.
const WEIGHTS: f64 = 128.0 * 36.0;

/// Instructions of a SIMD-group, by hand, with what an M1 was measured to take of them: four clocks of a SIMD-group for a shift and
/// for what makes bf16 f32, 14.5 for a sum over its lanes.
mod instructions {
    /// A lane's 16 inputs: four loads, a sum; with a norm the gains, their products and squares too.
    const PLAIN: f64 = 24.0;
    const GAINED: f64 = 64.0;
    /// 16 codes of 4 bits: taken apart 24, multiplied 16; scale and bias 16, loads and addresses 14. Of 8 bits.
    const CODES_4: f64 = 74.0;
    const CODES_8: f64 = 82.0;
    const SUM: f64 = 14.5;

    /// Of a SIMD-group that multiplies `rows` rows of `cols` inputs.
    fn product(cols: f64, rows: f64, inputs: f64, codes: f64) -> f64 {
        cols / 512.0 * (inputs + rows * codes) + (rows + 1.0) * SUM + 20.0
    }

    pub fn gained(cols: f64, rows: f64) -> f64 {
        product(cols, rows, GAINED, CODES_4)
    }

    pub fn router(cols: f64, rows: f64) -> f64 {
        product(cols, rows, GAINED, CODES_8)
    }

    /// With a factor for each 16 inputs, or none.
    pub fn plain(cols: f64, rows: f64, factor: f64) -> f64 {
        product(cols, rows, PLAIN + factor, CODES_4)
    }

    /// What finds a slot's expert: eight rounds over eight logits a lane.
    pub const CHOOSE: f64 = 8.0 * (8.0 * 5.0 + 2.0 * SUM + 12.0);
    /// `delta`, with what it replays in the mean.
    pub const DELTA: f64 = 280.0 + 51.0;
    /// `attend`, of a K/V head's position: two SIMD-groups.
    pub const ATTEND: f64 = 320.0;
}

/// Of a launch of a decoded token.
fn token_cost(launch: &Launch, position: usize) -> Cost {
    let [x, y, _] = launch.grid.map(|n| n as f64);
    let groups = launch.grid.iter().product::<usize>() as f64;
    // Inputs come from the second-level cache once a threadgroup, weights once.
    let product = |simdgroup: f64, inputs: f64| Cost {
        alus: groups * simdgroup,
        cache: groups * inputs * 4.0 + launch.bytes() as f64,
        ..Cost::default()
    };
    match launch.kernel {
        "project_gdn" | "project_attention" => product(instructions::gained(2048.0, 4.0), 2.0 * 2048.0),
        "out_gdn" => product(instructions::plain(4096.0, 4.0, 30.0), 4096.0),
        "out_attention" => product(instructions::plain(4096.0, 4.0, 0.0), 4096.0),
        "router" => {
            let logits = 33.0 * instructions::router(2048.0, 2.0);
            let shared = (x - 33.0) * instructions::gained(2048.0, 8.0);
            product((logits + shared) / x, 2.0 * 2048.0)
        }
        // One of four SIMD-groups chooses.
        "gate_up" => {
            let simdgroup = instructions::gained(2048.0, 8.0) + instructions::CHOOSE / 4.0;
            product(simdgroup, 2.0 * 2048.0 + 256.0)
        }
        "down" => product(instructions::plain(9.0 * 512.0, 4.0, 0.0), 9.0 * 512.0),
        // Eight SIMD-groups a threadgroup.
        "lm_head" => product(2.0 * instructions::gained(2048.0, 4.0), 2.0 * 2048.0),
        "delta" => product(2.0 * instructions::DELTA, 512.0),
        // Two SIMD-groups read each position.
        "attend" => {
            let positions = position as f64 * y;
            let cache = 2.0 * launch.bytes_per_position() as f64 * position as f64;
            Cost { alus: positions * instructions::ATTEND / 4.0, cache, ..Cost::default() }
        }
        _ => Cost::default(),
    }
}

/// Of a launch behind `position`, in a step of so many tokens.
fn cost(plan: &Plan, launch: &Launch, position: usize, tokens: usize) -> Cost {
    let [x, y, z] = launch.grid.map(|n| n as f64);
    let words = launch.bindings.iter().find_map(|b| match &plan.buffers[b.buffer].contents {
        Contents::Numbers(words) => words.get(1),
        _ => None,
    });
    // Of a product: groups of inputs.
    let groups = f64::from(words.copied().unwrap_or(0)) / GROUP as f64;
    // A step of a tile: 64 inputs. Each of four SIMD-groups loads its weights from threadgroup memory.
    let step = |units, alus, threadgroup_memory: f64, cache: f64| Cost {
        units,
        alus,
        threadgroup_memory: threadgroup_memory * KB,
        cache: cache * KB + WEIGHTS,
    };
    // Tiles with pairs in them, if tokens choose at random: a half-empty one an expert, but never less than one.
    let pairs = 8.0 * tokens as f64;
    let tiles = (pairs / 32.0 + 128.0).max(256.0) + tokens as f64 / 32.0;
    match launch.kernel {
        "matmul_tensor" => step(1024.0, 230.0, 48.0, 8.0).times(x * y * groups),
        "gate_up_tensor" => step(512.0, 230.0, 32.0, 4.0).times(x * tiles * 32.0),
        "down_tensor" => step(512.0, 230.0, 32.0, 4.0).times(x * tiles * 8.0),
        "attend_tensor" => {
            let pages = (position as f64 + tokens as f64 / 2.0) / 64.0;
            let page = Cost { units: 2048.0, alus: 530.0, threadgroup_memory: 68.0 * KB, cache: 64.0 * KB };
            page.times(x * y * z * pages)
        }
        // 32 rows x 64 outputs x 32 inputs: 128 products of 8x8, 16 clocks each of one of four.
        "matmul_router_32" => {
            let step =
                Cost { alus: 660.0, threadgroup_memory: 36.0 * KB, cache: 6.3 * KB, ..Cost::default() };
            step.times(x * y * groups * 2.0)
        }
        // Counted in docs/lab/metal.md: of 32 columns of a head, a token.
        "delta_chunks" => Cost { alus: 128.0 / 3.2 * 4.0 * 660.0 * tokens as f64 / 4.0, ..Cost::default() },
        "prepare_chunks" => Cost { alus: 128.0 * 66.0 * tokens as f64 / 4.0, ..Cost::default() },
        _ => Cost::default(),
    }
}

/// Bytes of memory that a launch moves: weights and state, and activations of chunks, which no cache holds.
fn bytes(plan: &Plan, launch: &Launch, position: usize) -> f64 {
    let activations =
        launch.bindings.iter().filter(|b| matches!(plan.buffers[b.buffer].contents, Contents::Scratch(_)));
    // Of what is kept for the convolution the last rows alone are read.
    if launch.kernel == "keep_inputs" {
        return launch.bytes() as f64;
    }
    let activations: usize =
        activations.map(|b| b.length * if b.access == Access::ReadWrite { 2 } else { 1 }).sum();
    launch.bytes() as f64 + launch.bytes_per_position() as f64 * position as f64 + activations as f64
}

/// Seconds of each resource.
type Seconds = [f64; 5];

fn longest(seconds: Seconds) -> f64 {
    seconds.into_iter().fold(0.0, f64::max)
}

/// A step: its kernels with their launches and what they take, and all of it.
struct Counted {
    kernels: Vec<(&'static str, usize, Seconds)>,
    seconds: f64,
}

/// Counts a step behind `position`, of whose launches each takes so long. What one stage launches runs together.
fn count(plan: &Plan, position: usize, of: impl Fn(&Launch) -> Seconds) -> Counted {
    let mut stages = vec![[0.0; 5]; plan.stages() + 1];
    let mut kernels: Vec<(&str, usize, Seconds)> = Vec::new();
    for launch in &plan.launches {
        let seconds = of(launch);
        let add = |to: &mut Seconds| to.iter_mut().zip(seconds).for_each(|(sum, s)| *sum += s);
        add(&mut stages[launch.stage]);
        match kernels.iter_mut().find(|k| k.0 == launch.kernel) {
            Some(kernel) => {
                kernel.1 += 1;
                add(&mut kernel.2);
            }
            None => kernels.push((launch.kernel, 1, seconds)),
        }
    }
    // The first one takes nothing that the host does not hide.
    let buffers = command_buffers(&plan.paces(), &[position], crate::pace::LONGEST).len() - 1;
    let waits = plan.stages() as f64 * STAGE + buffers as f64 * COMMAND_BUFFER;
    Counted { kernels, seconds: stages.into_iter().map(longest).sum::<f64>() + waits }
}

/// Prints what each kernel takes.
fn print(title: &str, counted: &Counted) {
    println!("{title}: {:.2} ms; units, ALUs, threadgroup memory, cache, memory:", 1e3 * counted.seconds);
    for (name, launches, seconds) in &counted.kernels {
        println!("| `{name}` | {launches} | {} |", seconds.map(|s| format!("{:.2}", 1e3 * s)).join(" | "));
    }
}

fn real() -> Config {
    Config::from_json(lily_model::presets::CONFIG_35B_A3B).unwrap()
}

/// A decoded token, whose activations stay in caches.
fn token(position: usize) -> Counted {
    let plan = plan(&real(), 262_144, KvType::Bf16).unwrap();
    count(&plan, position, |launch| {
        let moved = launch.bytes() + launch.bytes_per_position() * position as u64;
        token_cost(launch, position).seconds(moved as f64)
    })
}

/// A chunk with tensor operations.
fn chunk(tokens: usize, position: usize) -> Counted {
    let features = Features { kv: KvType::Bf16, tensor: true };
    let segment = Segment { tokens, capacity: 262_144, want: Want::Nothing };
    let plan = plan_step(&real(), features, &[segment]).unwrap();
    count(&plan, position, |launch| {
        let moved = bytes(&plan, launch, position);
        cost(&plan, launch, position, tokens).seconds(moved)
    })
}

/// Tokens a second of a prompt that is read in chunks.
fn prompt(tokens: usize, chunk_tokens: usize) -> f64 {
    let chunks = (0..tokens).step_by(chunk_tokens);
    let seconds: f64 = chunks.map(|at| chunk(chunk_tokens.min(tokens - at), at).seconds).sum();
    tokens as f64 / seconds
}

/// Memory binds what reads most of it, and speeds published of the same chip are met: as docs/lab/metal.md says.
#[test]
fn a_token_by_count() {
    print("a token", &token(0));
    let counted = token(131_072);
    print("a token behind 131,072", &counted);
    for (name, _, seconds) in counted.kernels {
        let binds = longest(seconds) == seconds[4];
        assert!(binds || seconds[4] < 1e-4, "{name}: {seconds:?}");
    }
    // mlx-lm and the original.
    for (position, published) in
        [(256, [148.5, 194.7]), (4096, [0.0; 2]), (32_768, [0.0; 2]), (131_072, [75.0, 92.7])]
    {
        let speed = 1.0 / token(position).seconds;
        println!("{position}: {speed:.0} tok/s");
        assert!(published.iter().all(|p| speed > *p), "{position}: {speed}");
    }
}

/// The units bind what is multiplied by them, and mlx-lm's published speeds are met: as docs/lab/metal.md says.
#[test]
fn a_chunk_by_count() {
    for (tokens, position) in [(512, 0), (2048, 0), (4096, 0), (2048, 131_072)] {
        let counted = chunk(tokens, position);
        print(&format!("{tokens} tokens behind {position}"), &counted);
        for (name, _, seconds) in counted.kernels {
            assert!(!name.contains("_tensor") || longest(seconds) == seconds[0], "{name}: {seconds:?}");
        }
    }
    for (tokens, published) in
        [(512, 0.0), (2048, 0.0), (4096, 5166.0), (16_384, 0.0), (65_536, 0.0), (131_072, 2238.0)]
    {
        let speeds = [2048, 4096].map(|chunk| prompt(tokens, chunk));
        println!("{tokens}: {speeds:.0?} tok/s in chunks of 2,048 and 4,096");
        assert!(speeds[0] > published, "{tokens}: {speeds:?}");
    }
}
