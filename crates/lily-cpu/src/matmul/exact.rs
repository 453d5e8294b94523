//! Matrices of any form, expanded to f32 a few rows at a time, with f32 activations.

use std::ops::Range;

use lily_model::matrix::{Form, Matrix};

use super::{Input, deliver};
use crate::device::{Isa, dispatch};
use crate::pool::Disjoint;
use crate::simd::{Lanes, WIDTH, load_some};

/// Rows and tokens multiplied together: 2 x 3 vectors of sums and 2 of weights are the 16 registers of AVX2.
const ROWS: usize = 2;
const TOKENS: usize = 3;

/// Buffers of a thread.
#[derive(Default)]
pub struct Scratch {
    /// Expanded rows, `[ROWS, cols]`.
    rows: Vec<f32>,
    /// Scales of one row.
    scales: Vec<f32>,
    /// Biases of one row.
    biases: Vec<f32>,
}

/// Multiplies `rows`, at most [`WIDTH`] of them, with all tokens.
pub fn tile(
    isa: Isa,
    w: &Matrix,
    rows: Range<usize>,
    input: &Input<'_>,
    scratch: &mut super::Scratch,
    out: &Disjoint<'_, f32>,
) {
    let (cols, x) = (w.cols, input.x);
    assert_eq!(x.len(), input.tokens * cols, "a matrix that takes f32 was given none");
    let super::Scratch { sums, exact: scratch, .. } = scratch;
    sums.resize(input.tokens * WIDTH, 0.0);
    let mut buffer = std::mem::take(&mut scratch.rows);
    buffer.resize(ROWS * cols, 0.0);
    for lane in (0..rows.len()).step_by(ROWS) {
        let n = ROWS.min(rows.len() - lane);
        for (r, row) in buffer.chunks_exact_mut(cols).take(n).enumerate() {
            expand(isa, w, rows.start + lane + r, scratch, row);
        }
        let expanded = &buffer[..n * cols];
        if n == ROWS {
            dispatch!(isa, multiply::<ROWS>(expanded => w: &[f32], x => x: &[f32], lane => lane: usize, sums => sums: &mut [f32]));
        } else {
            dispatch!(isa, multiply::<1>(expanded => w: &[f32], x => x: &[f32], lane => lane: usize, sums => sums: &mut [f32]));
        }
    }
    scratch.rows = buffer;
    deliver(sums, &rows, 0, out, w.rows);
}

/// `R` expanded rows with every token; results go to lanes `lane..lane + R` of `sums`, `[tokens, WIDTH]`.
#[inline(always)]
fn multiply<V: Lanes, const R: usize>(w: &[f32], x: &[f32], lane: usize, sums: &mut [f32]) {
    let cols = w.len() / R;
    let many = x.chunks_exact(TOKENS * cols);
    let rest = many.remainder();
    let (sums_many, sums_rest) = sums.split_at_mut(many.len() * TOKENS * WIDTH);
    for (x, sums) in many.zip(sums_many.chunks_exact_mut(TOKENS * WIDTH)) {
        dots::<V, R, TOKENS>(w, x, lane, sums);
    }
    for (x, sums) in rest.chunks_exact(cols).zip(sums_rest.chunks_exact_mut(WIDTH)) {
        dots::<V, R, 1>(w, x, lane, sums);
    }
}

/// `R` rows with `T` tokens.
#[inline(always)]
fn dots<V: Lanes, const R: usize, const T: usize>(w: &[f32], x: &[f32], lane: usize, sums: &mut [f32]) {
    let cols = w.len() / R;
    let rows: [_; R] = std::array::from_fn(|r| w[r * cols..][..cols].as_chunks::<WIDTH>());
    let xs: [_; T] = std::array::from_fn(|t| x[t * cols..][..cols].as_chunks::<WIDTH>());
    let mut acc = [[V::zero(); T]; R];
    for i in 0..cols / WIDTH {
        for r in 0..R {
            let w = V::load(&rows[r].0[i]);
            for t in 0..T {
                acc[r][t] = w.mul_add(V::load(&xs[t].0[i]), acc[r][t]);
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            if !xs[t].1.is_empty() {
                acc[r][t] = load_some::<V>(rows[r].1).mul_add(load_some(xs[t].1), acc[r][t]);
            }
            sums[t * WIDTH + lane + r] = acc[r][t].sum();
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
        4 => {
            dispatch!(isa, expand_4(codes => c: &[u8], scales => s: &[f32], biases => b: &[f32], out => out: &mut [f32]))
        }
        _ => {
            dispatch!(isa, expand_8(codes => c: &[u8], scales => s: &[f32], biases => b: &[f32], out => out: &mut [f32]))
        }
    }
}

#[inline(always)]
fn expand_4<V: Lanes>(codes: &[u8], scales: &[f32], biases: &[f32], out: &mut [f32]) {
    let group = out.len() / scales.len();
    let codes = codes.chunks_exact(group / 2);
    for (((codes, out), scale), bias) in codes.zip(out.chunks_exact_mut(group)).zip(scales).zip(biases) {
        let (scale, bias) = (V::splat(*scale), V::splat(*bias));
        for (words, out) in codes.as_chunks::<8>().0.iter().zip(out.as_chunks_mut().0) {
            let word = |i: usize| u32::from_le_bytes([words[i], words[i + 1], words[i + 2], words[i + 3]]);
            V::from_nibbles([word(0), word(4)]).mul(scale).add(bias).store(out);
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
