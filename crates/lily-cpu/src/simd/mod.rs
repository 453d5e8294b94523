//! Vectors of 16 lanes, in the instructions of the processor at hand. Kernels are written once, generic over
//! [`Lanes`], and compiled for each instruction set by [`crate::device::dispatch`].

#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
pub use neon::Neon;
pub use portable::Portable;
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512, AvxVnni};

/// Lanes of a vector; also the rows of a matrix that are multiplied side by side.
pub const WIDTH: usize = 16;
/// Columns of a quantised product that share one scale of the activations.
pub const BLOCK: usize = 64;
/// Vectors of codes that a block of [`WIDTH`] rows fills, four columns in each.
pub const QUADS: usize = BLOCK / 4;

/// A vector of [`WIDTH`] f32, and the arithmetic of [`WIDTH`] rows of 4-bit codes.
///
/// A kernel that is generic over it gives the same result, to the bit, in every implementation whose
/// [`Lanes::fma`] rounds alike. NaN comes out wherever it goes in.
pub trait Lanes: Copy {
    /// [`WIDTH`] groups of four bytes.
    type Bytes: Copy;
    /// Whether a vector is one register, of which there are 32; otherwise it is several, of 16 or 32.
    const ONE_REGISTER: bool = false;

    /// All lanes `x`.
    fn splat(x: f32) -> Self;
    /// From memory.
    fn load(x: &[f32; WIDTH]) -> Self;
    /// From memory, bf16.
    fn load_bf16(x: &[u16; WIDTH]) -> Self;
    /// To memory.
    fn store(self, to: &mut [f32; WIDTH]);
    /// Lane by lane.
    fn add(self, other: Self) -> Self;
    /// Lane by lane.
    fn sub(self, other: Self) -> Self;
    /// Lane by lane.
    fn mul(self, other: Self) -> Self;
    /// Lane by lane.
    fn div(self, other: Self) -> Self;
    /// `self * b + c`, rounded once where the processor can.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// The larger one, lane by lane; not for NaN.
    fn max(self, other: Self) -> Self;
    /// Not below `low`, not above `high`; NaN stays.
    fn clamp(self, low: f32, high: f32) -> Self;
    /// The nearest whole number, ties to even, for magnitudes up to 2^22.
    fn round(self) -> Self;
    /// `2^self` for whole numbers from -126 to 127.
    fn exp2_whole(self) -> Self;
    /// Eight 4-bit codes of each word, lowest first.
    fn from_nibbles(words: [u32; 2]) -> Self;
    /// 8-bit codes.
    fn from_bytes(bytes: &[u8; WIDTH]) -> Self;
    /// `a * b + c` of single numbers, rounded as [`Lanes::mul_add`] rounds.
    fn fma(a: f32, b: f32, c: f32) -> f32;

    /// 16 bytes of each of [`WIDTH`] rows: vector `i` has bytes `4 i..4 i + 4` of every row.
    ///
    /// # Safety
    /// 16 bytes must be readable at `first + r * stride` for each row `r`.
    unsafe fn rows(first: *const u8, stride: usize) -> [Self::Bytes; 4];
    /// The low half of every byte.
    fn low_nibbles(x: Self::Bytes) -> Self::Bytes;
    /// The high half of every byte.
    fn high_nibbles(x: Self::Bytes) -> Self::Bytes;
    /// The two bf16 of every group of four bytes.
    fn bf16_pairs(x: Self::Bytes) -> [Self; 2];
    /// Dot products of a block of every row, codes from 0 to 15, with one block of activations from -127 to
    /// 127: exact integers, then f32.
    fn dot(codes: &[Self::Bytes; QUADS], x: &[i8; BLOCK]) -> Self;
    /// Asks for the cache line at `at`, which may be anywhere.
    fn prefetch(at: *const u8);

    /// All lanes 0.
    #[inline(always)]
    fn zero() -> Self {
        Self::splat(0.0)
    }

    /// The sum of all lanes, by halves.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut x = [0.0; WIDTH];
        self.store(&mut x);
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                x[i] += x[i + half];
            }
        }
        x[0]
    }

    /// The largest lane; not for NaN.
    #[inline(always)]
    fn largest(self) -> f32 {
        let mut x = [0.0; WIDTH];
        self.store(&mut x);
        x.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
    }

    /// `e^self` to 1e-6 of its value; what would be below 1e-38 or above 1e38 stops there.
    ///
    /// `e^x = 2^n e^r` with `n = round(x / ln 2)`, and `e^r` by its Taylor series to `r^7` for `|r| <= ln 2 / 2`.
    #[inline(always)]
    fn exp(self) -> Self {
        let x = self.clamp(-87.0, 88.0);
        let n = x.mul(Self::splat(std::f32::consts::LOG2_E)).round();
        // ln 2 in two parts, the first with zeros at its end, so that n times it is exact.
        let r = n.mul_add(Self::splat(-0.693_359_4), x);
        let r = n.mul_add(Self::splat(2.121_944_4e-4), r);
        let coefficients = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
        let mut p = Self::splat(1.0 / 5040.0);
        for c in coefficients {
            p = p.mul_add(r, Self::splat(c));
        }
        p.mul(n.exp2_whole())
    }

    /// `self / (1 + e^-self)`.
    #[inline(always)]
    fn silu(self) -> Self {
        let one = Self::splat(1.0);
        self.div(one.add(Self::zero().sub(self).exp()))
    }

    /// `1 / (1 + e^-self)`.
    #[inline(always)]
    fn sigmoid(self) -> Self {
        let one = Self::splat(1.0);
        one.div(one.add(Self::zero().sub(self).exp()))
    }
}

/// Loads up to [`WIDTH`] values, the rest 0.
#[inline(always)]
pub fn load_some<V: Lanes>(x: &[f32]) -> V {
    let mut lanes = [0.0; WIDTH];
    lanes[..x.len()].copy_from_slice(x);
    V::load(&lanes)
}

/// Stores the first values, up to [`WIDTH`].
#[inline(always)]
pub fn store_some<V: Lanes>(v: V, to: &mut [f32]) {
    let mut lanes = [0.0; WIDTH];
    v.store(&mut lanes);
    to.copy_from_slice(&lanes[..to.len()]);
}
