//! Matrix products, f32 activations against matrices as they are stored.
//!
//! A task takes a block of rows, expands [`TILE`] of them at a time into a buffer that stays in the first
//! cache, and multiplies them with every token: codes are read once per step and never expanded in memory.
//! The order of additions in a dot product depends on nothing but its length, so a token's result is the
//! same to the bit whatever stands beside it in the batch.

use lily_model::matrix::{Form, Matrix};
use rayon::prelude::*;

use crate::device::{Device, Isa, dispatch};
use crate::simd::{Lanes, WIDTH};

/// Rows and tokens multiplied together: 4 x 3 vectors of sums, 3 of x and one of weights are the 16 registers
/// of AVX2, and 12 multiply-adds need 7 loads.
const TILE: usize = 4;
const TOKENS: usize = 3;

/// One product `out = x W^T`; several of them make one parallel loop.
pub struct Product<'a> {
    /// `[rows, cols]`.
    pub w: &'a Matrix,
    /// `[tokens, cols]`.
    pub x: &'a [f32],
    /// `[tokens, rows]`.
    pub out: &'a mut [f32],
}

/// Rows of one product, for one task.
struct Task<'a> {
    w: &'a Matrix,
    x: &'a [f32],
    first_row: usize,
    /// `[rows of the task, tokens]`.
    out: &'a mut [f32],
}

/// Computes independent products side by side. Call inside the device's pool.
pub fn products(device: &Device, list: &mut [Product<'_>]) {
    let work: usize = list.iter().map(|p| p.w.rows).sum();
    let block = (work / (8 * device.pool.current_num_threads())).clamp(8, 256).next_multiple_of(TILE);
    // With one token the task's rows are a piece of `out`; with more they are gathered and transposed.
    let mut gathered: Vec<Vec<f32>> =
        list.iter().map(|p| if p.x.len() > p.w.cols { vec![0.0; p.out.len()] } else { Vec::new() }).collect();
    let mut tasks = Vec::new();
    for (p, gathered) in list.iter_mut().zip(&mut gathered) {
        let tokens = p.x.len() / p.w.cols;
        debug_assert_eq!(p.out.len(), tokens * p.w.rows);
        let target = if tokens > 1 { gathered.as_mut_slice() } else { &mut *p.out };
        for (i, out) in target.chunks_mut((block * tokens).max(1)).enumerate() {
            tasks.push(Task { w: p.w, x: p.x, first_row: i * block, out });
        }
    }
    let isa = device.isa;
    tasks.into_par_iter().for_each_init(Scratch::default, |scratch, task| task.run(isa, scratch));
    for (p, gathered) in list.iter_mut().zip(&gathered) {
        if !gathered.is_empty() {
            transpose(gathered, p.w.rows, p.out);
        }
    }
}

/// `out = x W^T` for one matrix.
pub fn product(device: &Device, w: &Matrix, x: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; x.len() / w.cols * w.rows];
    products(device, &mut [Product { w, x, out: &mut out }]);
    out
}

/// `[rows, tokens]` to `[tokens, rows]`.
fn transpose(from: &[f32], rows: usize, to: &mut [f32]) {
    const SIDE: usize = 16;
    let tokens = from.len() / rows;
    to.par_chunks_mut(SIDE * rows).enumerate().for_each(|(i, to)| {
        let first = i * SIDE;
        for rows_from in (0..rows).step_by(SIDE) {
            for (t, to) in to.chunks_exact_mut(rows).enumerate() {
                for r in rows_from..rows.min(rows_from + SIDE) {
                    to[r] = from[r * tokens + first + t];
                }
            }
        }
    });
}

/// Buffers of a thread, reused by its tasks.
#[derive(Default)]
struct Scratch {
    /// Expanded rows, `[TILE, cols]`.
    rows: Vec<f32>,
    /// Scales of one row.
    scales: Vec<f32>,
    /// Biases of one row.
    biases: Vec<f32>,
}

impl Task<'_> {
    fn run(self, isa: Isa, scratch: &mut Scratch) {
        let cols = self.w.cols;
        let tokens = self.x.len() / cols;
        let mut buffer = std::mem::take(&mut scratch.rows);
        buffer.resize(TILE * cols, 0.0);
        for (i, out) in self.out.chunks_mut(TILE * tokens).enumerate() {
            let rows = out.len() / tokens;
            for (r, row) in buffer.chunks_exact_mut(cols).take(rows).enumerate() {
                expand(isa, self.w, self.first_row + i * TILE + r, scratch, row);
            }
            let (w, x) = (&buffer[..rows * cols], self.x);
            if rows == TILE {
                dispatch!(isa, multiply::<TILE>(w: &[f32], x: &[f32], out: &mut [f32]));
            } else {
                for (w, out) in w.chunks_exact(cols).zip(out.chunks_exact_mut(tokens)) {
                    dispatch!(isa, multiply::<1>(w: &[f32], x: &[f32], out: &mut [f32]));
                }
            }
        }
        scratch.rows = buffer;
    }
}

/// `R` expanded rows with every token; `out` is `[R, tokens]`.
#[inline(always)]
fn multiply<V: Lanes, const R: usize>(w: &[f32], x: &[f32], out: &mut [f32]) {
    let cols = w.len() / R;
    let tokens = x.len() / cols;
    let whole = tokens / TOKENS * TOKENS;
    for t in (0..whole).step_by(TOKENS) {
        tile::<V, R, TOKENS>(w, &x[t * cols..][..TOKENS * cols], t, out);
    }
    for t in whole..tokens {
        tile::<V, R, 1>(w, &x[t * cols..][..cols], t, out);
    }
}

/// `R` rows with `T` tokens, the first of which is token `first`.
#[inline(always)]
fn tile<V: Lanes, const R: usize, const T: usize>(w: &[f32], x: &[f32], first: usize, out: &mut [f32]) {
    let cols = w.len() / R;
    let tokens = out.len() / R;
    let whole = cols / WIDTH;
    let rows: [&[f32]; R] = std::array::from_fn(|r| &w[r * cols..][..cols]);
    let xs: [&[f32]; T] = std::array::from_fn(|t| &x[t * cols..][..cols]);
    let row_chunks = rows.map(|row| &row.as_chunks::<WIDTH>().0[..whole]);
    let x_chunks = xs.map(|x| &x.as_chunks::<WIDTH>().0[..whole]);
    let mut sums = [[V::zero(); T]; R];
    for i in 0..whole {
        let x: [V; T] = std::array::from_fn(|t| V::load(&x_chunks[t][i]));
        for r in 0..R {
            let w = V::load(&row_chunks[r][i]);
            for t in 0..T {
                sums[r][t] = w.mul_add(x[t], sums[r][t]);
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            let rest = whole * WIDTH..;
            let rest: f32 = rows[r][rest.clone()].iter().zip(&xs[t][rest]).map(|(w, x)| w * x).sum();
            out[r * tokens + first + t] = sums[r][t].sum() + rest;
        }
    }
}

/// As [`Matrix::read_row`], to the bit, in vector instructions.
fn expand(isa: Isa, w: &Matrix, row: usize, scratch: &mut Scratch, out: &mut [f32]) {
    let Form::Affine { affine, codes, scales, biases } = &w.form else {
        return w.read_row(row, out);
    };
    let groups = w.cols / affine.group_size;
    scratch.scales.resize(groups, 0.0);
    scratch.biases.resize(groups, 0.0);
    scales.read(row * groups, &mut scratch.scales);
    biases.read(row * groups, &mut scratch.biases);
    let row_bytes = w.cols * affine.bits / 8;
    let codes = &codes[row * row_bytes..][..row_bytes];
    let (scales, biases) = (&scratch.scales[..], &scratch.biases[..]);
    match affine.bits {
        4 => dispatch!(isa, expand_4(codes: &[u8], scales: &[f32], biases: &[f32], out: &mut [f32])),
        _ => dispatch!(isa, expand_8(codes: &[u8], scales: &[f32], biases: &[f32], out: &mut [f32])),
    }
}

#[inline(always)]
fn expand_4<V: Lanes>(codes: &[u8], scales: &[f32], biases: &[f32], out: &mut [f32]) {
    let group = out.len() / scales.len();
    let codes = codes.chunks_exact(group / 2);
    for (((codes, out), scale), bias) in codes.zip(out.chunks_exact_mut(group)).zip(scales).zip(biases) {
        let (scale, bias) = (V::splat(*scale), V::splat(*bias));
        for (word, out) in codes.as_chunks::<4>().0.iter().zip(out.as_chunks_mut().0) {
            V::from_nibbles(u32::from_le_bytes(*word)).mul(scale).add(bias).store(out);
        }
    }
}

#[inline(always)]
fn expand_8<V: Lanes>(codes: &[u8], scales: &[f32], biases: &[f32], out: &mut [f32]) {
    let group = out.len() / scales.len();
    let codes = codes.chunks_exact(group);
    for (((codes, out), scale), bias) in codes.zip(out.chunks_exact_mut(group)).zip(scales).zip(biases) {
        let (scale, bias) = (V::splat(*scale), V::splat(*bias));
        for (codes, out) in codes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
            V::from_bytes(codes).mul(scale).add(bias).store(out);
        }
    }
}
