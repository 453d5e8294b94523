//! The experts' kernels of kernels/group.cu and kernels/chunk.cu, with what `prepare_norm` and `route` or `list_experts` leave before them.

use lily_cuda::chunk;
use lily_cuda::group::{self, PAIRS};
use lily_cuda::pack::{Packing, RowSource, TILE_COLS, TILE_ROWS, pack};
use lily_model::config::{Affine, Config};
use lily_model::matrix::Matrix;

use crate::common::random::{self, Numbers};
use crate::machine::{Emulator, Memory, Shape};
use crate::wide::{THREADS, bound, dot};

pub struct Emulators {
    pub config: Config,
    group: Emulator,
    matmul: Emulator,
    moe: Emulator,
    /// Chunks' kernels, if they are run.
    chunk: Option<Emulator>,
}

/// What the kernel is tried on: few experts, odd numbers of tiles.
pub fn config(hidden: usize, experts: usize, chosen: usize, widths: [usize; 2]) -> Config {
    let mut config = random::config(&[]);
    config.hidden_size = hidden;
    config.moe.experts = experts;
    config.moe.experts_per_token = chosen;
    [config.moe.expert_width, config.moe.shared_width] = widths;
    config
}

impl Emulators {
    pub fn new(config: Config, edit: impl Fn(&str) -> String) -> Self {
        let other = |file| Emulator::compile(file, &config, str::to_owned);
        let (matmul, moe) = (other("matmul.cu"), other("moe.cu"));
        Self { group: Emulator::compile("group.cu", &config, edit), matmul, moe, chunk: None, config }
    }

    /// With the kernels of chunks, which are `edit`ed.
    pub fn with_chunk(config: Config, edit: impl Fn(&str) -> String) -> Self {
        let chunk = Some(Emulator::compile("chunk.cu", &config, edit));
        Self { chunk, ..Self::new(config, str::to_owned) }
    }
}

/// An expert's matrices.
struct Expert {
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

impl Expert {
    fn new(numbers: &mut Numbers, hidden: usize, width: usize) -> Self {
        let mut matrix = |rows, cols| numbers.affine(rows, cols, Affine { bits: 4, group_size: 64 }, 2.0);
        Self { gate: matrix(width, hidden), up: matrix(width, hidden), down: matrix(hidden, width) }
    }

    /// Eight rows of gate, then the same of up, and so on.
    fn gate_up(&self) -> Vec<u8> {
        let eight = |first: usize| {
            [&self.gate, &self.up]
                .into_iter()
                .flat_map(move |m| (first..first + 8).map(move |row| Some((m, row))))
        };
        let rows: Vec<RowSource<'_>> = (0..self.gate.rows).step_by(8).flat_map(eight).collect();
        pack(&rows, self.gate.cols, Packing::Q4)
    }

    fn down(&self) -> Vec<u8> {
        let rows: Vec<RowSource<'_>> = (0..self.down.rows).map(|row| Some((&self.down, row))).collect();
        pack(&rows, self.down.cols, Packing::Q4)
    }
}

/// A layer's experts, the shared one last.
pub struct Layer {
    experts: Vec<Expert>,
    /// Gate and up, down: of the experts, of the shared one.
    packed: [Memory; 4],
}

impl Layer {
    pub fn new(e: &Emulators, seed: u64) -> Self {
        let (c, mut numbers) = (&e.config, Numbers(seed));
        let width = |i: usize| if i == c.moe.experts { c.moe.shared_width } else { c.moe.expert_width };
        let experts: Vec<Expert> =
            (0..=c.moe.experts).map(|i| Expert::new(&mut numbers, c.hidden_size, width(i))).collect();
        let (routed, shared) = experts.split_at(c.moe.experts);
        let all = |experts: &[Expert], part: fn(&Expert) -> Vec<u8>| {
            e.group.memory(&experts.iter().flat_map(part).collect::<Vec<u8>>())
        };
        let packed = [
            all(routed, Expert::gate_up),
            all(shared, Expert::gate_up),
            all(routed, Expert::down),
            all(shared, Expert::down),
        ];
        Self { experts, packed }
    }
}

/// Who chooses the experts.
#[derive(Clone, Copy, Debug)]
pub enum Choice {
    /// Each token others.
    Random,
    /// All tokens the same.
    Same,
}

/// Who lists the pairs of each expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lists {
    /// The experts' kernel itself, of what is chosen.
    Itself,
    /// `list_experts`, of what is chosen.
    Apart,
    /// `route`, which chooses too.
    Route,
}

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub tokens: usize,
    pub choice: Choice,
    pub lists: Lists,
    pub blocks: u32,
}

/// What a step has before its experts.
struct Step {
    x: Vec<f32>,
    gain: Vec<f32>,
    /// Of `x` as fragments.
    inputs: [Memory; 3],
    chosen: Vec<u32>,
    logits: Memory,
}

/// What experts leave: between their products and behind them, of each pair.
type Left = [Vec<f32>; 2];

impl Step {
    fn new(e: &Emulators, case: Case, seed: u64) -> Result<Self, String> {
        let (c, mut numbers) = (&e.config, Numbers(seed));
        let (hidden, tokens) = (c.hidden_size, case.tokens);
        let tiles = hidden.div_ceil(TILE_COLS);
        let x = numbers.reals(tokens * hidden, 0.0, 1.0);
        let gain = numbers.reals(hidden, 1.0, 0.5);
        let inputs = [tokens * tiles * 128, tokens * tiles * 8, tokens * 4].map(|n| e.group.unwritten(n));
        let (rows, gains) = (e.matmul.floats(&x), e.matmul.floats(&gain));
        let shape = Shape { grid: [tokens as u32, 1], threads: THREADS, cluster: 1, together: 1, shared: 0 };
        let [fragments, units, scale] = inputs.each_ref().map(Memory::address);
        let (width, tiles) = (hidden as u64, tiles as u64);
        let arguments = [rows.address(), width, width, gains.address(), tiles, 1, fragments, units, scale];
        e.matmul.launch("prepare_norm", shape, &arguments, seed)?;

        // One for each expert and the shared one's gate.
        let row = numbers.reals(c.moe.experts + 1, 0.0, 1.0);
        let logits: Vec<f32> = match case.choice {
            Choice::Random => numbers.reals(tokens * row.len(), 0.0, 1.0),
            Choice::Same => row.repeat(tokens),
        };
        let chosen = logits
            .chunks(row.len())
            .flat_map(|l| best(&l[..c.moe.experts], c.moe.experts_per_token))
            .collect();
        Ok(Self { x, gain, inputs, chosen, logits: e.moe.floats(&logits) })
    }

    /// Work, counts and pairs: lists in pieces of up to `group` pairs, or only room for them.
    fn lists(&self, e: &Emulators, by: Lists, group: u32, seed: u64) -> Result<[Memory; 3], String> {
        let (c, tokens) = (&e.config, self.inputs[2].bytes().len() / 4);
        let pairs = tokens * (c.moe.experts_per_token + 1);
        let lists = [(pairs + c.moe.experts) * 16, 8, pairs * 4].map(|n| e.group.unwritten(n));
        let [work, counts, list] = lists.each_ref().map(Memory::address);
        let (rows, group) = (tokens as u64, u64::from(group));
        let shape = Shape { grid: [1, 1], threads: 1024, cluster: 1, together: 1, shared: 0 };
        match by {
            Lists::Itself => {}
            Lists::Apart => {
                let chosen = e.moe.words(&self.chosen);
                let arguments = [chosen.address(), rows, group, list, work, counts];
                e.moe.launch("list_experts", shape, &arguments, seed)?;
            }
            Lists::Route => {
                let (weights, scratch) = (e.group.unwritten(pairs * 4), e.group.unwritten(pairs * 4));
                let (logits, weights, scratch) =
                    (self.logits.address(), weights.address(), scratch.address());
                let arguments = [logits, rows, group, weights, scratch, list, work, counts];
                e.moe.launch("route", shape, &arguments, seed)?;
            }
        }
        Ok(lists)
    }

    /// Whether what is left is right.
    fn check(&self, e: &Emulators, layer: &Layer, [middle, expanded]: &Left) -> Result<(), String> {
        let (c, hidden, slots) = (&e.config, e.config.hidden_size, e.config.moe.experts_per_token + 1);
        let widest = c.moe.expert_width.max(c.moe.shared_width);
        for pair in 0..expanded.len() / hidden {
            let (token, slot) = (pair / slots, pair % slots);
            let index = if slot + 1 == slots {
                c.moe.experts
            } else {
                self.chosen[token * (slots - 1) + slot] as usize
            };
            let (expert, x) = (&layer.experts[index], &self.x[token * hidden..][..hidden]);
            let got = [&middle[pair * widest..][..expert.gate.rows], &expanded[pair * hidden..][..hidden]];
            check(expert, x, &self.gain, got).map_err(|e| format!("token {token}, expert {index}: {e}"))?;
        }
        Ok(())
    }

    /// The kernel of group.cu.
    fn by_copies(&self, e: &Emulators, layer: &Layer, case: Case, seed: u64) -> Result<Left, String> {
        let c = &e.config;
        let (hidden, slots) = (c.hidden_size, c.moe.experts_per_token + 1);
        let (pairs, widest) = (case.tokens * slots, c.moe.expert_width.max(c.moe.shared_width));
        let lists = self.lists(e, case.lists, PAIRS, seed)?;
        let told = e.group.words(&self.chosen);
        let left = [pairs * widest * 4, pairs * hidden * 4].map(|n| e.group.unwritten(n));
        let done = e.group.words(&vec![0; pairs]);
        let [gate_up, gate_up_shared, down, down_shared] = layer.packed.each_ref().map(Memory::address);
        let [work, counts, list] = lists.each_ref().map(Memory::address);
        let [fragments, units, scale] = self.inputs.each_ref().map(Memory::address);
        let [middle, expanded] = left.each_ref().map(Memory::address);
        let arguments = [
            gate_up,
            gate_up_shared,
            down,
            down_shared,
            work,
            counts,
            list,
            if case.lists == Lists::Itself { told.address() } else { 0 },
            case.tokens as u64,
            fragments,
            units,
            scale,
            middle,
            expanded,
            done.address(),
        ];
        let (threads, shared) = (group::GROUP_THREADS, group::bytes(c));
        let shape = Shape { grid: [case.blocks, 1], threads, cluster: 1, together: case.blocks, shared };
        e.group.launch("experts_group_q4", shape, &arguments, seed)?;
        self.check_done(c, &done.words())?;
        Ok(left.map(|m| m.floats()))
    }

    /// Strips of every piece, for nobody else; then a launch is as the first.
    fn check_done(&self, c: &Config, done: &[u32]) -> Result<(), String> {
        let strips = |width: usize| width.div_ceil(TILE_ROWS / 2) as u32;
        let mut of_expert = vec![0; c.moe.experts];
        self.chosen.iter().for_each(|&i| of_expert[i as usize] += 1);
        let routed: u32 = of_expert.iter().map(|n: &u32| n.div_ceil(PAIRS)).sum();
        let all = (self.chosen.len() / c.moe.experts_per_token) as u32;
        let expected = routed * strips(c.moe.expert_width) + all.div_ceil(PAIRS) * strips(c.moe.shared_width);
        match done.iter().sum::<u32>() == expected {
            true => Ok(()),
            false => Err(format!("{done:?} strips are done, expected {expected}")),
        }
    }

    /// The kernels of chunk.cu.
    fn of_chunk(
        &self,
        e: &Emulators,
        emulator: &Emulator,
        layer: &Layer,
        case: Case,
        seed: u64,
    ) -> Result<Left, String> {
        let c = &e.config;
        let (hidden, slots) = (c.hidden_size, c.moe.experts_per_token + 1);
        let (pairs, widest) = (case.tokens * slots, c.moe.expert_width.max(c.moe.shared_width));
        let lists = self.lists(e, case.lists, chunk::PAIRS, seed)?;
        let left = [pairs * widest * 4, pairs * hidden * 4].map(|n| emulator.unwritten(n));
        let records = emulator.unwritten(chunk::records_bytes(c, case.tokens));
        let [gate_up, gate_up_shared, down, down_shared] = layer.packed.each_ref().map(Memory::address);
        let [work, counts, list] = lists.each_ref().map(Memory::address);
        let [fragments, units, scale] = self.inputs.each_ref().map(Memory::address);
        let [middle, expanded] = left.each_ref().map(Memory::address);
        let stages = 2 + seed % 2;
        let arguments = [
            gate_up,
            gate_up_shared,
            down,
            down_shared,
            work,
            counts,
            list,
            fragments,
            units,
            scale,
            records.address(),
            middle,
            expanded,
            stages,
        ];
        let grid = [chunk::pieces(c, case.tokens) as u32, 2];
        let gather = Shape { grid, threads: THREADS, cluster: 1, together: 2, shared: 0 };
        let multiply = Shape {
            grid: [case.blocks, 1],
            threads: chunk::THREADS,
            shared: chunk::shared_memory(stages as u32),
            ..gather
        };
        for (name, shape) in [
            ("chunk_gather", gather),
            ("chunk_gate_up_q4", multiply),
            ("chunk_columns", gather),
            ("chunk_down_q4", multiply),
        ] {
            emulator.launch(name, shape, &arguments, seed)?;
        }
        Ok(left.map(|m| m.floats()))
    }
}

/// A step's launches. Whether what they leave is right.
pub fn run(e: &Emulators, layer: &Layer, case: Case, seed: u64) -> Result<(), String> {
    let step = Step::new(e, case, seed)?;
    step.check(e, layer, &step.by_copies(e, layer, case, seed)?)
}

/// The same by the kernels of chunks, which must get what the others get.
pub fn run_chunk(e: &Emulators, layer: &Layer, case: Case, seed: u64) -> Result<(), String> {
    let step = Step::new(e, case, seed)?;
    let left = step.of_chunk(e, e.chunk.as_ref().unwrap(), layer, case, seed)?;
    step.check(e, layer, &left)?;
    let bits = |left: &Left| left.clone().map(|v| v.into_iter().map(f32::to_bits).collect::<Vec<u32>>());
    if bits(&left) == bits(&step.by_copies(e, layer, case, seed)?) {
        return Ok(());
    }
    Err("not what the kernel of fewer tokens gets".to_owned())
}

/// The `n` largest, by falling value.
fn best(logits: &[f32], n: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
    order.truncate(n);
    order
}

/// Whether the two products are right, the second one of what the first has left.
fn check(expert: &Expert, x: &[f32], gain: &[f32], [middle, expanded]: [&[f32]; 2]) -> Result<(), String> {
    let rms = (x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64 + 1e-6).sqrt();
    let inputs: Vec<f64> = x.iter().zip(gain).map(|(&x, &g)| f64::from(x) * f64::from(g)).collect();
    let product = |matrix: &Matrix, row: usize, inputs: &[f64]| {
        let mut weights = vec![0.0; matrix.cols];
        matrix.read_row(row, &mut weights);
        (dot(&weights, inputs), bound(&weights, inputs))
    };
    let near = |what: &str, row: usize, got: f32, expected: f64, most: f64| {
        let off = (f64::from(got) - expected).abs();
        let right = off <= most;
        right.then_some(()).ok_or_else(|| format!("{what} {row}: {got}, expected {expected} within {most}"))
    };
    for (row, &got) in middle.iter().enumerate() {
        let [(gate, off_gate), (up, off_up)] =
            [&expert.gate, &expert.up].map(|m| product(m, row, &inputs)).map(|(y, off)| (y / rms, off / rms));
        let silu = gate / (1.0 + (-gate).exp());
        // SiLU is never steeper than 1.1.
        let most = 1.1 * off_gate * (up.abs() + off_up) + silu.abs() * off_up + 1e-5 * (silu * up).abs();
        near("middle", row, got, silu * up, most)?;
    }
    let middle: Vec<f64> = middle.iter().map(|&x| f64::from(x)).collect();
    for (row, &got) in expanded.iter().enumerate() {
        let (expected, most) = product(&expert.down, row, &middle);
        near("expanded", row, got, expected, most + 1e-6 * expected.abs())?;
    }
    Ok(())
}
