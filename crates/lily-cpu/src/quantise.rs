//! Activations as int8, to be multiplied with 4-bit codes.
//!
//! With `value = s c + b` per weight and `x = t q` per activation, a group's share of a dot product is
//! `sum (s c + b) t q = s t (sum c q) + b (t sum q)`: an integer dot product, and a sum that all rows share.

use crate::buffers::Buffer;
use crate::device::{Device, Isa, dispatch};
use crate::pool::Disjoint;
use crate::simd::{BLOCK, Lanes, WIDTH};

/// Rows that one item of a parallel loop quantises.
const ROWS: usize = 16;

/// Rows of activations in blocks of [`BLOCK`] columns.
#[derive(Clone, Copy)]
pub struct Quantised<'a> {
    /// Rows.
    pub tokens: usize,
    /// `[blocks, tokens, BLOCK]`, from -127 to 127; of eight columns those at even places come first.
    pub codes: &'a [i8],
    /// `x = scale * code`, `[blocks, tokens]`.
    pub scales: &'a [f32],
    /// Sums of the block's `scale * code`, `[blocks, tokens]`.
    pub sums: &'a [f32],
}

/// Memory of a [`Quantised`], or of several with the same columns, one behind the other.
pub struct Storage<'a> {
    rows: usize,
    cols: usize,
    codes: Buffer<'a, i8>,
    scales: Buffer<'a, f32>,
    sums: Buffer<'a, f32>,
}

impl<'a> Storage<'a> {
    /// For [`Writer`] to fill: `rows` rows of `cols` columns, a multiple of [`BLOCK`].
    pub fn new(device: &'a Device, rows: usize, cols: usize) -> Self {
        let (n, buffers) = (rows * cols / BLOCK, &device.buffers);
        Self {
            rows,
            cols,
            codes: buffers.bytes(rows * cols),
            scales: buffers.floats(n),
            sums: buffers.floats(n),
        }
    }

    /// Quantises `x`, `[tokens, cols]`; `cols` is a multiple of [`BLOCK`].
    pub fn quantise(device: &'a Device, x: &[f32], cols: usize) -> Self {
        let tokens = x.len() / cols;
        let mut storage = Self::new(device, tokens, cols);
        let writer = Writer::new(&mut storage);
        device.pool.run(tokens.div_ceil(ROWS), |i| {
            for row in i * ROWS..tokens.min((i + 1) * ROWS) {
                // SAFETY: each row belongs to one item.
                unsafe { writer.write(device.isa, 0, tokens, row, &x[row * cols..][..cols]) };
            }
        });
        storage
    }

    /// All rows as one matrix, if they were written so.
    pub fn whole(&self) -> Quantised<'_> {
        self.rows(0, self.rows)
    }

    /// Rows that were written as a matrix of their own.
    pub fn rows(&self, first: usize, tokens: usize) -> Quantised<'_> {
        let blocks = self.cols / BLOCK;
        let per_block = first * blocks..(first + tokens) * blocks;
        Quantised {
            tokens,
            codes: &self.codes[per_block.start * BLOCK..per_block.end * BLOCK],
            scales: &self.scales[per_block.clone()],
            sums: &self.sums[per_block],
        }
    }
}

/// Lets different threads write the rows of a [`Storage`]. A row is given as `row` of the matrix of `tokens` rows
/// that begins at row `first` of the storage.
pub struct Writer<'a> {
    blocks: usize,
    codes: Disjoint<'a, i8>,
    scales: Disjoint<'a, f32>,
    sums: Disjoint<'a, f32>,
}

impl<'a> Writer<'a> {
    /// For the time that the storage is filled.
    pub fn new(to: &'a mut Storage<'_>) -> Self {
        Self {
            blocks: to.cols / BLOCK,
            codes: Disjoint::new(&mut to.codes),
            scales: Disjoint::new(&mut to.scales),
            sums: Disjoint::new(&mut to.sums),
        }
    }

    /// Quantises `x`, `[cols]`.
    ///
    /// # Safety
    /// No two threads may write the same row.
    pub unsafe fn write(&self, isa: Isa, first: usize, tokens: usize, row: usize, x: &[f32]) {
        for (b, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
            // SAFETY: the caller keeps threads on different rows.
            let (codes, scale, sum) = unsafe { self.place(first, tokens, row, b) };
            let made = dispatch!(isa, block(x => x: &[f32; BLOCK], codes => to: &mut [i8]) -> (f32, f32));
            (*scale, *sum) = made;
        }
    }

    /// Copies row `from_row` of another matrix.
    ///
    /// # Safety
    /// No two threads may write the same row.
    pub unsafe fn copy(&self, first: usize, tokens: usize, row: usize, from: Quantised<'_>, from_row: usize) {
        for b in 0..self.blocks {
            // SAFETY: the caller keeps threads on different rows.
            let (codes, scale, sum) = unsafe { self.place(first, tokens, row, b) };
            let at = b * from.tokens + from_row;
            codes.copy_from_slice(&from.codes[at * BLOCK..][..BLOCK]);
            (*scale, *sum) = (from.scales[at], from.sums[at]);
        }
    }

    /// Where block `b` of a row goes.
    ///
    /// # Safety
    /// No two threads may ask for the same row.
    #[allow(clippy::mut_from_ref, reason = "rows are kept apart by the caller")]
    unsafe fn place(
        &self,
        first: usize,
        tokens: usize,
        row: usize,
        b: usize,
    ) -> (&mut [i8], &mut f32, &mut f32) {
        let at = first * self.blocks + b * tokens + row;
        // SAFETY: each block of each row has a place of its own, and no other thread has this row.
        unsafe {
            let (scales, sums) = (self.scales.slice(at, 1), self.sums.slice(at, 1));
            (self.codes.slice(at * BLOCK, BLOCK), &mut scales[0], &mut sums[0])
        }
    }
}

/// Quantises one block, rounding to the nearest of 255 steps up to the largest magnitude. Gives the scale and the
/// sum of the quantised values; both are NaN or infinite if a value is.
#[inline(always)]
fn block<V: Lanes>(x: &[f32; BLOCK], to: &mut [i8]) -> (f32, f32) {
    // As integers the bits of magnitudes are in order, NaN last.
    let mut largest = [0u32; WIDTH];
    for x in x.as_chunks::<WIDTH>().0 {
        for (largest, x) in largest.iter_mut().zip(x) {
            *largest = (*largest).max(x.abs().to_bits());
        }
    }
    let largest = f32::from_bits(largest.into_iter().fold(0, u32::max));
    let scale = largest / 127.0;
    let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
    // For the smallest numbers the inverse overflows: they count as nothing.
    let inverse = if inverse.is_finite() { inverse } else { 0.0 };
    let mut rounded = [0i32; BLOCK];
    for (to, x) in rounded.iter_mut().zip(x) {
        // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits.
        *to = (x * inverse + 12_582_912.0).to_bits().cast_signed().wrapping_sub(0x4B40_0000);
    }
    let sum = rounded.iter().fold(0i32, |sum, x| sum.wrapping_add(*x));
    for (j, pairs) in rounded.as_chunks::<8>().0.iter().enumerate() {
        for i in 0..4 {
            to[8 * j + i] = pairs[2 * i] as i8;
            to[8 * j + 4 + i] = pairs[2 * i + 1] as i8;
        }
    }
    (scale, scale * sum as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_within_half_a_step() {
        for isa in Isa::available() {
            for spread in [1e-30f32, 1e-3, 1.0, 1e30] {
                let x: [f32; BLOCK] = std::array::from_fn(|i| spread * ((i * 37 % 101) as f32 / 50.0 - 1.0));
                let mut codes = [0i8; BLOCK];
                let (scale, sum) =
                    dispatch!(isa, block(&x => x: &[f32; BLOCK], &mut codes => to: &mut [i8]) -> (f32, f32));
                for (i, x) in x.iter().enumerate() {
                    let place = i / 8 * 8 + i % 2 * 4 + i % 8 / 2;
                    let back = scale * f32::from(codes[place]);
                    assert!((back - x).abs() <= 0.51 * scale, "{isa:?} {spread}: {i}: {x} became {back}");
                }
                let whole: i32 = codes.iter().map(|&c| i32::from(c)).sum();
                assert_eq!(sum, scale * whole as f32);
            }
        }
    }

    #[test]
    fn what_is_not_finite_stays_so_and_zeros_stay_zeros() {
        for isa in Isa::available() {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = [1.0f32; BLOCK];
                x[17] = bad;
                let mut codes = [0i8; BLOCK];
                let (scale, _) =
                    dispatch!(isa, block(&x => x: &[f32; BLOCK], &mut codes => to: &mut [i8]) -> (f32, f32));
                assert!(!scale.is_finite());
            }
            let mut codes = [9i8; BLOCK];
            let made = dispatch!(isa, block(&[0.0; BLOCK] => x: &[f32; BLOCK], &mut codes => to: &mut [i8]) -> (f32, f32));
            assert_eq!((made, codes), ((0.0, 0.0), [0; BLOCK]));
        }
    }
}
