//! Matrix products of activations with matrices as they are stored.
//!
//! [`WIDTH`] rows make a tile, and tiles are what threads claim. A tile's codes are read once per step and never
//! expanded in memory: 4-bit codes are turned in registers so that a vector holds a column of the tile, and
//! multiplied with int8 activations ([`int8`]). Other forms, and all in exact mode, are expanded to f32 a few rows at a
//! time ([`exact`]). The order of additions in a dot product depends on nothing but its length, so a token's result
//! is the same to the bit whatever stands beside it in the batch.

mod exact;
mod int8;

use std::cell::RefCell;
use std::ops::Range;

use lily_model::matrix::Matrix;
use smallvec::SmallVec;

use crate::buffers::Buffer;
use crate::device::Device;
use crate::pool::Disjoint;
use crate::quantise::{Quantised, Storage};
use crate::simd::{BLOCK, WIDTH};

/// Bytes of weights that a claim holds at most, unless one tile is more.
const CLAIM: usize = 1 << 20;
/// Claims per thread of a loop at least, so that threads end together. More of them read memory in shorter runs.
const PIECES: usize = 2;

/// Activations, `[tokens, cols]`, in the forms that products want.
#[derive(Clone, Copy)]
pub struct Input<'a> {
    /// Rows.
    pub tokens: usize,
    /// As computed; may be left out where only matrices that take int8 follow.
    pub x: &'a [f32],
    /// For the matrices that take int8.
    pub quantised: Option<Quantised<'a>>,
}

/// Owner of what an [`Input`] refers to beside the activations themselves.
pub struct Prepared<'a> {
    tokens: usize,
    x: &'a [f32],
    storage: Option<Storage<'a>>,
}

impl<'a> Prepared<'a> {
    /// Quantises `x`, `[tokens, cols]`, if matrices on this device may want that.
    pub fn new(device: &'a Device, x: &'a [f32], cols: usize) -> Self {
        let quantise = !device.exact && cols.is_multiple_of(BLOCK);
        let storage = quantise.then(|| Storage::quantise(device, x, cols));
        Self { tokens: x.len() / cols, x, storage }
    }

    /// For [`Product`].
    pub fn input(&self) -> Input<'_> {
        let quantised = self.storage.as_ref().map(Storage::whole);
        Input { tokens: self.tokens, x: self.x, quantised }
    }
}

/// Whether a matrix is multiplied with int8 activations on this device.
pub fn takes_int8(device: &Device, w: &Matrix) -> bool {
    !device.exact && int8::Codes::new(w).is_some()
}

/// One product `out = x W^T`; several of them make one parallel loop.
pub struct Product<'a> {
    /// `[rows, cols]`.
    pub w: &'a Matrix,
    /// `[tokens, cols]`.
    pub x: Input<'a>,
    /// `[tokens, rows]`.
    pub out: &'a mut [f32],
}

/// A product as the threads see it.
struct Shared<'a> {
    w: &'a Matrix,
    x: Input<'a>,
    out: Disjoint<'a, f32>,
    /// Of `w`.
    bytes: usize,
    /// Its first piece among those of all products.
    first_piece: usize,
}

/// Buffers of a thread.
#[derive(Default)]
pub struct Scratch {
    /// Results of a tile, `[tokens, WIDTH]`.
    sums: Vec<f32>,
    int8: int8::Scratch,
    exact: exact::Scratch,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Computes independent products side by side.
pub fn products<'a>(device: &Device, list: impl IntoIterator<Item = Product<'a>>) {
    // As many as a decoded token of the real model has at once: gate and up of nine experts.
    let mut list: SmallVec<[Shared<'_>; 18]> = list.into_iter().map(Shared::new).collect();
    let bytes: usize = list.iter().map(|p| p.bytes).sum();
    let claim = (bytes / (PIECES * device.pool.threads())).min(CLAIM);
    let mut pieces = 0;
    for p in &mut list {
        p.first_piece = pieces;
        pieces += p.pieces(claim);
    }
    device.pool.run(pieces, |piece| {
        let p = &list[list.partition_point(|p| p.first_piece <= piece) - 1];
        p.run(device, p.tiles(piece - p.first_piece, p.pieces(claim)));
    });
}

/// `out = x W^T` for one matrix, `x` of `[tokens, cols]`.
pub fn product<'a>(device: &'a Device, w: &Matrix, x: &[f32]) -> Buffer<'a, f32> {
    let mut out = device.buffers.floats(x.len() / w.cols * w.rows);
    let prepared = Prepared::new(device, x, w.cols);
    products(device, [Product { w, x: prepared.input(), out: &mut out }]);
    out
}

impl<'a> Shared<'a> {
    fn new(p: Product<'a>) -> Self {
        debug_assert_eq!(p.out.len(), p.x.tokens * p.w.rows);
        let bytes = p.w.bytes() as usize;
        Self { w: p.w, x: p.x, out: Disjoint::new(p.out), bytes, first_piece: 0 }
    }

    fn tile_count(&self) -> usize {
        if self.x.tokens == 0 { 0 } else { self.w.rows.div_ceil(WIDTH) }
    }

    /// Pieces that it is cut into, of about `claim` bytes or one tile.
    fn pieces(&self, claim: usize) -> usize {
        let tiles = self.tile_count();
        self.bytes.div_ceil(claim.max(1)).clamp(1, tiles.max(1)).min(tiles)
    }

    /// Tiles of piece `i` of `n`.
    fn tiles(&self, i: usize, n: usize) -> Range<usize> {
        let tiles = self.tile_count();
        i * tiles / n..(i + 1) * tiles / n
    }

    fn run(&self, device: &Device, tiles: Range<usize>) {
        SCRATCH.with_borrow_mut(|scratch| {
            for tile in tiles {
                let rows = tile * WIDTH..self.w.rows.min((tile + 1) * WIDTH);
                match (int8::Codes::new(self.w), self.x.quantised) {
                    (Some(w), Some(x)) => int8::tile(device.isa, &w, rows, &x, scratch, &self.out),
                    _ => exact::tile(device.isa, self.w, rows, &self.x, scratch, &self.out),
                }
            }
        });
    }
}

/// Copies the results of a tile, `[tokens, WIDTH]`, to `out`, `[all tokens, all_rows]`, from `first_token` on.
fn deliver(sums: &[f32], rows: &Range<usize>, first_token: usize, out: &Disjoint<'_, f32>, all_rows: usize) {
    for (t, sums) in sums.chunks_exact(WIDTH).enumerate() {
        // SAFETY: a tile is claimed by one thread, and no other tile has these rows.
        let out = unsafe { out.slice((first_token + t) * all_rows + rows.start, rows.len()) };
        out.copy_from_slice(&sums[..rows.len()]);
    }
}

#[cfg(test)]
mod tests;
