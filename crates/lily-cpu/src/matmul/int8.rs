//! 4-bit codes with int8 activations.

use std::ops::Range;

use lily_model::matrix::{FloatType, Floats, Form, Matrix};

use super::deliver;
use crate::device::{Isa, dispatch};
use crate::pool::Disjoint;
use crate::quantise::Quantised;
use crate::simd::{BLOCK, Lanes, QUADS, WIDTH};

/// Tokens that are multiplied with a tile before the next ones are: their sums stay in the first cache.
const TOKENS: usize = 128;
/// Bytes of codes of a row of a block.
const ROW_BYTES: usize = BLOCK / 2;
/// Groups whose bf16 scales make the 16 bytes of a row that are turned at once.
const GROUPS: usize = 8;

/// A matrix of 4-bit codes.
#[derive(Clone, Copy)]
pub struct Codes<'a> {
    /// Outputs.
    rows: usize,
    /// Inputs.
    cols: usize,
    /// Columns that share a scale and a bias: a multiple of [`BLOCK`].
    group: usize,
    /// `cols / 2` bytes a row.
    codes: &'a [u8],
    /// `cols / group` values a row.
    scales: &'a Floats,
    /// As `scales`.
    biases: &'a Floats,
}

impl<'a> Codes<'a> {
    /// A view of a matrix, if it is stored so that it can be multiplied with int8 activations.
    pub fn new(w: &'a Matrix) -> Option<Self> {
        match &w.form {
            Form::Affine { affine, codes, scales, biases }
                if affine.bits == 4 && affine.group_size.is_multiple_of(BLOCK) =>
            {
                Some(Self { rows: w.rows, cols: w.cols, group: affine.group_size, codes, scales, biases })
            }
            _ => None,
        }
    }
}

/// Buffers of a thread.
#[derive(Default)]
pub struct Scratch {
    /// Scales of a tile, `[groups, WIDTH]`.
    scales: Vec<f32>,
    /// Biases of a tile, likewise.
    biases: Vec<f32>,
    /// What is read in whole vectors, and has to end where the matrix does not; zeros behind it.
    copy: Vec<u8>,
}

/// Multiplies `rows`, at most [`WIDTH`] of them, with all tokens.
pub fn tile(
    isa: Isa,
    w: &Codes<'_>,
    rows: Range<usize>,
    x: &Quantised<'_>,
    scratch: &mut super::Scratch,
    out: &Disjoint<'_, f32>,
) {
    let groups = w.cols / w.group;
    let super::Scratch { sums, int8: scratch, .. } = scratch;
    for (values, to) in [(w.scales, &mut scratch.scales), (w.biases, &mut scratch.biases)] {
        to.resize(groups * WIDTH, 0.0);
        by_group(isa, values, rows.clone(), groups, &mut scratch.copy, to);
    }
    let row_bytes = w.cols / 2;
    let codes = if rows.len() == WIDTH {
        // To the end of the matrix, so that what comes next can be asked for in advance.
        &w.codes[rows.start * row_bytes..]
    } else {
        scratch.copy.clear();
        scratch.copy.extend_from_slice(&w.codes[rows.start * row_bytes..rows.end * row_bytes]);
        scratch.copy.resize(WIDTH * row_bytes, 0);
        &scratch.copy
    };
    let tile = Tile { codes, cols: w.cols, group: w.group, scales: &scratch.scales, biases: &scratch.biases };
    for first in (0..x.tokens).step_by(TOKENS) {
        let tokens = first..x.tokens.min(first + TOKENS);
        sums.clear();
        sums.resize(tokens.len() * WIDTH, 0.0);
        dispatch!(isa, multiply(&tile => tile: &Tile<'_>, x => x: &Quantised<'_>, tokens.clone() => tokens: Range<usize>, sums => sums: &mut [f32]));
        deliver(sums, &rows, first, out, w.rows);
    }
}

/// [`WIDTH`] rows.
struct Tile<'a> {
    /// `cols / 2` bytes a row.
    codes: &'a [u8],
    cols: usize,
    group: usize,
    /// `[groups, WIDTH]`.
    scales: &'a [f32],
    /// `[groups, WIDTH]`.
    biases: &'a [f32],
}

/// Adds the products of a tile with some tokens to `sums`, `[tokens, WIDTH]`.
#[inline(always)]
fn multiply<V: Lanes>(tile: &Tile<'_>, x: &Quantised<'_>, tokens: Range<usize>, sums: &mut [f32]) {
    let row_bytes = tile.cols / 2;
    assert!(tile.codes.len() >= WIDTH * row_bytes);
    let (scales, biases) = (tile.scales.as_chunks::<WIDTH>().0, tile.biases.as_chunks::<WIDTH>().0);
    let sums = sums.as_chunks_mut::<WIDTH>().0;
    for b in 0..tile.cols / BLOCK {
        // The same part of the next tile: row by row it is more than the processor's own prefetching keeps up with.
        let ahead = tile.codes.as_ptr().wrapping_add(WIDTH * (row_bytes + b * ROW_BYTES));
        for line in 0..WIDTH * ROW_BYTES / 64 {
            V::prefetch(ahead.wrapping_add(64 * line));
        }
        // SAFETY: column block `b` of a row ends within it, and there are `WIDTH` rows (see the assertion).
        let codes = unsafe { columns::<V>(tile.codes.as_ptr().add(b * ROW_BYTES), row_bytes) };
        let group = b * BLOCK / tile.group;
        let (scale, bias) = (V::load(&scales[group]), V::load(&biases[group]));
        let at = b * x.tokens + tokens.start..b * x.tokens + tokens.end;
        let q = &x.codes.as_chunks::<BLOCK>().0[at.clone()];
        let each = q.iter().zip(&x.scales[at.clone()]).zip(&x.sums[at]);
        for (((q, x_scale), x_sum), sum) in each.zip(sums.iter_mut()) {
            let y = V::dot(&codes, q).mul_add(scale.mul(V::splat(*x_scale)), V::load(sum));
            bias.mul_add(V::splat(*x_sum), y).store(sum);
        }
    }
}

/// The codes of a block of [`WIDTH`] rows, four columns of all rows in a vector: of every eight columns first the
/// even ones, then the odd ones.
///
/// # Safety
/// [`ROW_BYTES`] bytes must be readable at `first + r * stride` for each row `r`.
#[inline(always)]
unsafe fn columns<V: Lanes>(first: *const u8, stride: usize) -> [V::Bytes; QUADS] {
    // SAFETY: the caller vouches for both halves.
    let (left, right) = unsafe { (V::rows(first, stride), V::rows(first.add(16), stride)) };
    std::array::from_fn(|i| {
        let eight = if i < QUADS / 2 { left[i / 2] } else { right[i / 2 - 4] };
        if i % 2 == 0 { V::low_nibbles(eight) } else { V::high_nibbles(eight) }
    })
}

/// Scales or biases of a tile's rows, `[rows, groups]`, to `[groups, WIDTH]`; 0 for rows that aren't there. `copy` is a
/// buffer.
fn by_group(
    isa: Isa,
    values: &Floats,
    rows: Range<usize>,
    groups: usize,
    copy: &mut Vec<u8>,
    to: &mut [f32],
) {
    if values.dtype != FloatType::Bf16 {
        let mut row = vec![0.0; groups];
        to.fill(0.0);
        for (lane, r) in rows.enumerate() {
            values.read(r * groups, &mut row);
            to[lane..].iter_mut().step_by(WIDTH).zip(&row).for_each(|(to, x)| *to = *x);
        }
        return;
    }
    let data = &values.data[rows.start * groups * 2..];
    // The last rows are read in whole vectors too.
    let needed = WIDTH * groups * 2 + 2 * GROUPS;
    let data = if rows.len() == WIDTH && data.len() >= needed {
        data
    } else {
        copy.clear();
        copy.extend_from_slice(&data[..rows.len() * groups * 2]);
        copy.resize(needed, 0);
        copy
    };
    dispatch!(isa, turn(data => data: &[u8], groups => groups: usize, to => to: &mut [f32]));
}

/// [`WIDTH`] rows of `groups` bf16 to `[groups, WIDTH]` f32. `data` goes on for [`GROUPS`] values behind them.
#[inline(always)]
fn turn<V: Lanes>(data: &[u8], groups: usize, to: &mut [f32]) {
    assert!(data.len() >= WIDTH * groups * 2 + 2 * GROUPS && to.len() <= groups * WIDTH);
    for (i, to) in to.as_chunks_mut::<WIDTH>().0.chunks_mut(GROUPS).enumerate() {
        // SAFETY: there are at most `groups` vectors in `to`, so that of the last row no more is read than the values of
        // the group that `i` begins with and `GROUPS - 1` more: within `data`, by the assertion.
        let turned = unsafe { V::rows(data.as_ptr().add(i * 2 * GROUPS), 2 * groups) };
        for (pair, to) in turned.into_iter().zip(to.chunks_mut(2)) {
            for (value, to) in V::bf16_pairs(pair).into_iter().zip(to) {
                value.store(to);
            }
        }
    }
}
