//! The two products of attention over one page, in the type of the cache.

use crate::device::{Isa, dispatch};
use crate::simd::{Lanes, WIDTH};
use crate::state::{PAGE, Page, Values, padded};

/// An element of the cache.
trait Element: Copy {
    fn load<V: Lanes>(x: &[Self; WIDTH]) -> V;
}

impl Element for f32 {
    #[inline(always)]
    fn load<V: Lanes>(x: &[Self; WIDTH]) -> V {
        V::load(x)
    }
}

/// The bits of a bf16.
impl Element for u16 {
    #[inline(always)]
    fn load<V: Lanes>(x: &[Self; WIDTH]) -> V {
        V::load_bf16(x)
    }
}

impl Page {
    /// `p += q K^T` with `q` of `[rows, head_dim]` and `p` of `[rows, PAGE]`.
    pub fn scores(&self, isa: Isa, kv_head: usize, q: &[f32], p: &mut [f32]) {
        let d = self.head_dim;
        let shape = Shape { a_stride: d, terms: d, b_stride: PAGE, out_stride: PAGE, width: PAGE };
        self.k.multiply(isa, kv_head * d * PAGE, shape, q, p);
    }

    /// `out += p V` over the first `n` positions, with `p` of `[rows, PAGE]`; `out` has `stride` values a row, of which
    /// the padded head is first.
    pub fn weigh(&self, isa: Isa, kv_head: usize, n: usize, p: &[f32], out: &mut [f32], stride: usize) {
        let dp = padded(self.head_dim);
        let shape = Shape { a_stride: PAGE, terms: n, b_stride: dp, out_stride: stride, width: dp };
        self.v.multiply(isa, kv_head * PAGE * dp, shape, p, out);
    }
}

/// Sizes of a product.
#[derive(Clone, Copy)]
struct Shape {
    /// Values from one row of `a` to the next.
    a_stride: usize,
    /// Values of a row of `a`, and rows of `b`.
    terms: usize,
    /// Values from one row of `b` to the next.
    b_stride: usize,
    /// Values from one row of the result to the next.
    out_stride: usize,
    /// Columns: a multiple of [`WIDTH`].
    width: usize,
}

impl Values {
    /// `out += a b`, where `b` begins at value `first`.
    fn multiply(&self, isa: Isa, first: usize, shape: Shape, a: &[f32], out: &mut [f32]) {
        match self {
            Self::F32(b) => {
                let b = &b[first..];
                dispatch!(isa, multiply::<f32>(shape => shape: Shape, a => a: &[f32], b => b: &[f32], out => out: &mut [f32]));
            }
            Self::Bf16(b) => {
                let b = &b[first..];
                dispatch!(isa, multiply::<u16>(shape => shape: Shape, a => a: &[f32], b => b: &[u16], out => out: &mut [f32]));
            }
        }
    }
}

#[inline(always)]
fn multiply<V: Lanes, E: Element>(shape: Shape, a: &[f32], b: &[E], out: &mut [f32]) {
    // As large as the sums, a row of b and one of a fit into the registers.
    if V::ONE_REGISTER {
        tiles::<V, E, 4, 4>(shape, a, b, out)
    } else {
        tiles::<V, E, 2, 2>(shape, a, b, out)
    }
}

/// Tiles of `R` rows and `C` vectors of columns, then what is left.
#[inline(always)]
fn tiles<V: Lanes, E: Element, const R: usize, const C: usize>(
    shape: Shape,
    a: &[f32],
    b: &[E],
    out: &mut [f32],
) {
    let rows = a.len() / shape.a_stride;
    let whole = rows / R * R;
    for row in (0..whole).step_by(R) {
        strip::<V, E, R, C>(shape, &a[row * shape.a_stride..], b, &mut out[row * shape.out_stride..]);
    }
    for row in whole..rows {
        strip::<V, E, 1, C>(shape, &a[row * shape.a_stride..], b, &mut out[row * shape.out_stride..]);
    }
}

#[inline(always)]
fn strip<V: Lanes, E: Element, const R: usize, const C: usize>(
    shape: Shape,
    a: &[f32],
    b: &[E],
    out: &mut [f32],
) {
    let whole = shape.width / (C * WIDTH) * (C * WIDTH);
    for column in (0..whole).step_by(C * WIDTH) {
        tile::<V, E, R, C>(shape, a, &b[column..], &mut out[column..]);
    }
    for column in (whole..shape.width).step_by(WIDTH) {
        tile::<V, E, R, 1>(shape, a, &b[column..], &mut out[column..]);
    }
}

#[inline(always)]
fn tile<V: Lanes, E: Element, const R: usize, const C: usize>(
    shape: Shape,
    a: &[f32],
    b: &[E],
    out: &mut [f32],
) {
    let a: [&[f32]; R] = std::array::from_fn(|r| &a[r * shape.a_stride..][..shape.terms]);
    let mut sums = [[V::zero(); C]; R];
    for i in 0..shape.terms {
        let b = b[i * shape.b_stride..][..C * WIDTH].as_chunks::<WIDTH>().0;
        let b: [V; C] = std::array::from_fn(|c| E::load(&b[c]));
        for r in 0..R {
            let a = V::splat(a[r][i]);
            for c in 0..C {
                sums[r][c] = a.mul_add(b[c], sums[r][c]);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        let out = out[r * shape.out_stride..][..C * WIDTH].as_chunks_mut::<WIDTH>().0;
        for (out, sum) in out.iter_mut().zip(sums) {
            V::load(out).add(*sum).store(out);
        }
    }
}
