//! Products of kernels/wide.cu and kernels/chunk.cu: inputs become columns, clusters or blocks multiply them.

use lily_cuda::chunk;
use lily_cuda::pack::{Packing, TILE_COLS, pack};
use lily_cuda::wide::{self, columns_bytes, eighths};
use lily_model::config::Affine;
use lily_model::matrix::Matrix;

use crate::common::random::{self, Numbers};
use crate::machine::{Emulator, Memory, Shape};

/// Of all files: blocks of other kernels.
pub const THREADS: u32 = 256;

/// For Hopper, or a card without its products of warpgroups.
pub fn emulator(hopper: bool, edit: impl Fn(&str) -> String) -> Emulator {
    Emulator::compile_for(hopper, "wide.cu", &random::config(&[]), edit)
}

/// The kernel of many tokens, which only Hopper has.
pub fn chunk_emulator(edit: impl Fn(&str) -> String) -> Emulator {
    Emulator::compile("chunk.cu", &random::config(&[]), edit)
}

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub rows: usize,
    pub tiles: usize,
    pub tokens: usize,
    pub clusters: u32,
    pub stages: u32,
    /// y is added to.
    pub add: bool,
    /// Inputs are normed.
    pub normed: bool,
}

/// Name, tokens of a group and blocks of a cluster.
pub const KERNELS: [(&str, usize, u32); 4] =
    [("wide_8_by_2", 8, 2), ("wide_16_by_2", 16, 2), ("wide_32_by_2", 32, 2), ("wide_32_by_4", 32, 4)];

/// Inputs as columns, and what their squares add up to.
struct Inputs {
    columns: Memory,
    squares: Memory,
}

/// A case's numbers.
pub struct Product {
    case: Case,
    matrix: Matrix,
    packed: Vec<u8>,
    x: Vec<f32>,
    gain: Vec<f32>,
    before: Vec<f32>,
}

impl Product {
    pub fn new(case: Case, seed: u64) -> Self {
        let mut numbers = Numbers(seed);
        let width = case.tiles * TILE_COLS;
        let matrix = numbers.affine(case.rows, width, Affine { bits: 4, group_size: 64 }, 1.0);
        let rows: Vec<_> = (0..case.rows).map(|row| Some((&matrix, row))).collect();
        let packed = pack(&rows, width, Packing::Q4);
        let x = numbers.reals(case.tokens * width, 0.0, 1.0);
        let gain = numbers.reals(width, 1.0, 0.5);
        let before = numbers.reals(case.tokens * case.rows, 0.0, 1.0);
        Self { case, matrix, packed, x, gain, before }
    }

    /// The inputs in records of `record` tokens, by a kernel of wide.cu.
    fn inputs(&self, emulator: &Emulator, record: u64, seed: u64) -> Result<Inputs, String> {
        let case = self.case;
        let columns = emulator.unwritten(columns_bytes(case.tokens, case.tiles));
        let squares = emulator.unwritten(eighths(case.tokens) * 4);
        let (x, gain) = (emulator.floats(&self.x), emulator.floats(&self.gain));
        let shape =
            Shape { grid: [case.tokens as u32, 1], threads: THREADS, cluster: 1, together: 1, shared: 0 };
        let to = [columns.address(), record | (case.tiles as u64) << 32];
        let name = if case.normed { "columns_norm" } else { "columns_plain" };
        emulator.launch(
            name,
            shape,
            &[x.address(), gain.address(), to[0], to[1], squares.address()],
            seed,
        )?;
        Ok(Inputs { columns, squares })
    }

    /// What a kernel makes of them.
    fn multiply(
        &self,
        emulator: &Emulator,
        inputs: &Inputs,
        name: &str,
        shape: Shape,
        seed: u64,
    ) -> Result<Vec<f32>, String> {
        let (case, tiles) = (self.case, emulator.memory(&self.packed));
        let y =
            if case.add { emulator.floats(&self.before) } else { emulator.unwritten(self.before.len() * 4) };
        let arguments = [
            tiles.address(),
            case.rows as u64 | (case.tiles as u64) << 32,
            inputs.columns.address(),
            if case.normed { inputs.squares.address() } else { 0 },
            y.address(),
            case.tokens as u64 | (case.rows as u64) << 32,
            u64::from(case.add) | u64::from(case.stages) << 32,
        ];
        emulator.launch(name, shape, &arguments, seed)?;
        Ok(y.floats())
    }

    /// What a kernel of wide.cu computes.
    pub fn run(
        &self,
        emulator: &Emulator,
        kernel: (&str, usize, u32),
        seed: u64,
    ) -> Result<Vec<f32>, String> {
        let (case, (name, group, blocks)) = (self.case, kernel);
        let inputs = self.inputs(emulator, if group == 8 { 8 } else { 32 }, seed)?;
        let (fixed, stage) = wide::shared_memory(group as u32, blocks, case.tiles as u32);
        let shape = Shape {
            grid: [blocks * case.clusters, case.tokens.div_ceil(group) as u32],
            threads: wide::THREADS,
            cluster: blocks,
            together: 2 * blocks,
            shared: fixed + case.stages * stage,
        };
        self.multiply(emulator, &inputs, name, shape, seed)
    }

    /// What the kernel of chunk.cu computes, with as many blocks as the case has clusters; `wide` makes the columns.
    pub fn run_chunk(&self, wide: &Emulator, emulator: &Emulator, seed: u64) -> Result<Vec<f32>, String> {
        let case = self.case;
        let inputs = self.inputs(wide, 32, seed)?;
        let shape = Shape {
            grid: [case.clusters, 1],
            threads: chunk::THREADS,
            cluster: 1,
            together: 2,
            shared: chunk::shared_memory(case.stages),
        };
        self.multiply(emulator, &inputs, "chunk_q4", shape, seed)
    }

    /// Whether `y` is the product, as near as inputs of 16 bits let it be.
    pub fn check(&self, y: &[f32]) -> Result<(), String> {
        let (case, width) = (self.case, self.matrix.cols);
        let mut weights = vec![0.0; width];
        for row in 0..case.rows {
            self.matrix.read_row(row, &mut weights);
            for token in 0..case.tokens {
                let x = &self.x[token * width..][..width];
                let mut scale = 1.0;
                if case.normed {
                    scale = (x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64 + 1e-6)
                        .sqrt()
                        .recip();
                }
                let inputs: Vec<f64> = x
                    .iter()
                    .zip(&self.gain)
                    .map(|(&x, &g)| f64::from(x) * if case.normed { f64::from(g) } else { 1.0 })
                    .collect();
                let at = token * case.rows + row;
                let before = if case.add { f64::from(self.before[at]) } else { 0.0 };
                let expected = dot(&weights, &inputs) * scale + before;
                let most = bound(&weights, &inputs) * scale + expected.abs() * 1e-6;
                let off = (f64::from(y[at]) - expected).abs();
                if off.is_nan() || off > most {
                    return Err(format!(
                        "row {row}, token {token}: {}, expected {expected} within {most}",
                        y[at]
                    ));
                }
            }
        }
        Ok(())
    }
}

pub fn dot(weights: &[f32], inputs: &[f64]) -> f64 {
    weights.iter().zip(inputs).map(|(&w, x)| f64::from(w) * x).sum()
}

/// How far a product may be off: each input is by half a unit, 1 / 65,200 of the largest of its tile (docs/decisions/0013); and each of the
/// sums in f32, of a tile's codes and of its biases apart, by 2^-24 of what is added, of which there are as many as tiles and eight more.
pub fn bound(weights: &[f32], inputs: &[f64]) -> f64 {
    let (mut inexact, mut added) = (0.0, 0.0);
    for (w, x) in weights.chunks(TILE_COLS).zip(inputs.chunks(TILE_COLS)) {
        let most = x.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
        let sum = w.iter().map(|&w| f64::from(w).abs()).sum::<f64>();
        inexact += sum * most / 64_000.0;
        // Of a random matrix scale times code and bias are at most so large (`Numbers::affine`).
        let largest = w.iter().fold(0.0, |m: f64, &w| m.max(f64::from(w).abs()));
        added += 4.0 * largest * x.iter().map(|x| x.abs()).sum::<f64>();
    }
    inexact + added * (weights.len() / TILE_COLS + 8) as f64 * 2f64.powi(-24)
}
