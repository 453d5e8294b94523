//! arm64 with dot products of bytes: Apple silicon, and Armv8.4 servers and phones.
//!
//! As in the x86 implementation, values of these types are only made behind [`crate::device::dispatch`], on a processor
//! that has the instructions; every `unsafe` block relies on that.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{BLOCK, Lanes, QUADS, WIDTH};

/// 16 lanes in four registers.
#[derive(Clone, Copy)]
pub struct Neon(float32x4_t, float32x4_t, float32x4_t, float32x4_t);

/// Applies an expression to each register. Closures won't do: one that is not inlined would be compiled without the
/// instructions.
macro_rules! each {
    ($f:ident($($x:expr),+)) => {
        // SAFETY: see the head of this file.
        unsafe { Self($f($($x.0),+), $f($($x.1),+), $f($($x.2),+), $f($($x.3),+)) }
    };
}

/// Sums of four products of bytes, each group of `codes` with group `lane` of `x`, added to `sum`. The intrinsic is not
/// stable.
macro_rules! sdot {
    ($sum:expr, $codes:expr, $x:expr, $lane:literal) => {
        asm!(
            concat!("sdot {0:v}.4s, {1:v}.16b, {2:v}.4b[", $lane, "]"),
            inout(vreg) $sum, in(vreg) $codes, in(vreg) $x,
            options(pure, nomem, nostack, preserves_flags),
        )
    };
}

#[inline(always)]
fn exp2_whole(x: float32x4_t) -> float32x4_t {
    // SAFETY: see the head of this file.
    unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtq_s32_f32(x), vdupq_n_s32(127)))) }
}

/// Lanes `4 i..4 i + 4` of eight nibbles.
#[inline(always)]
fn nibbles(word: u32, counts: [i32; 4]) -> float32x4_t {
    // SAFETY: see the head of this file.
    unsafe {
        let codes = vshlq_u32(vdupq_n_u32(word), vld1q_s32(counts.as_ptr()));
        vcvtq_f32_u32(vandq_u32(codes, vdupq_n_u32(15)))
    }
}

/// 16 bytes of each of 4 rows: register `i` has bytes `4 i..4 i + 4` of every row.
///
/// # Safety
/// 16 bytes must be readable at each row.
#[inline(always)]
unsafe fn four_rows(first: *const u8, stride: usize) -> [uint8x16_t; 4] {
    // SAFETY: see the head of this file; the caller vouches for the rows.
    unsafe {
        let a = vreinterpretq_u32_u8(vld1q_u8(first));
        let b = vreinterpretq_u32_u8(vld1q_u8(first.add(stride)));
        let c = vreinterpretq_u32_u8(vld1q_u8(first.add(2 * stride)));
        let d = vreinterpretq_u32_u8(vld1q_u8(first.add(3 * stride)));
        let (ab0, ab1) = (vreinterpretq_u64_u32(vzip1q_u32(a, b)), vreinterpretq_u64_u32(vzip2q_u32(a, b)));
        let (cd0, cd1) = (vreinterpretq_u64_u32(vzip1q_u32(c, d)), vreinterpretq_u64_u32(vzip2q_u32(c, d)));
        [
            vreinterpretq_u8_u64(vzip1q_u64(ab0, cd0)),
            vreinterpretq_u8_u64(vzip2q_u64(ab0, cd0)),
            vreinterpretq_u8_u64(vzip1q_u64(ab1, cd1)),
            vreinterpretq_u8_u64(vzip2q_u64(ab1, cd1)),
        ]
    }
}

impl Lanes for Neon {
    /// Rows `4 j..4 j + 4` in register `j`.
    type Bytes = [uint8x16_t; 4];

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: see the head of this file.
        let x = unsafe { vdupq_n_f32(x) };
        Self(x, x, x, x)
    }
    #[inline(always)]
    fn load(x: &[f32; WIDTH]) -> Self {
        let at = x.as_ptr();
        // SAFETY: see the head of this file; `x` has 16 values.
        unsafe { Self(vld1q_f32(at), vld1q_f32(at.add(4)), vld1q_f32(at.add(8)), vld1q_f32(at.add(12))) }
    }
    #[inline(always)]
    fn load_bf16(x: &[u16; WIDTH]) -> Self {
        // SAFETY: see the head of this file; `x` has 16 values.
        unsafe {
            let (low, high) = (vld1q_u16(x.as_ptr()), vld1q_u16(x.as_ptr().add(8)));
            Self(
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(low))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_high_u16(low))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(high))),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_high_u16(high))),
            )
        }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; WIDTH]) {
        let at = to.as_mut_ptr();
        // SAFETY: see the head of this file; `to` has 16 values.
        unsafe {
            vst1q_f32(at, self.0);
            vst1q_f32(at.add(4), self.1);
            vst1q_f32(at.add(8), self.2);
            vst1q_f32(at.add(12), self.3);
        }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        each!(vaddq_f32(self, other))
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        each!(vsubq_f32(self, other))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        each!(vmulq_f32(self, other))
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        each!(vdivq_f32(self, other))
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        each!(vfmaq_f32(c, self, b))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        each!(vmaxq_f32(self, other))
    }
    #[inline(always)]
    fn clamp(self, low: f32, high: f32) -> Self {
        // These instructions give NaN if either operand is.
        let x = each!(vmaxq_f32(self, Self::splat(low)));
        each!(vminq_f32(x, Self::splat(high)))
    }
    #[inline(always)]
    fn round(self) -> Self {
        each!(vrndnq_f32(self))
    }
    #[inline(always)]
    fn exp2_whole(self) -> Self {
        Self(exp2_whole(self.0), exp2_whole(self.1), exp2_whole(self.2), exp2_whole(self.3))
    }
    #[inline(always)]
    fn from_nibbles(words: [u32; 2]) -> Self {
        let (low, high) = ([0, -4, -8, -12], [-16, -20, -24, -28]);
        Self(nibbles(words[0], low), nibbles(words[0], high), nibbles(words[1], low), nibbles(words[1], high))
    }
    #[inline(always)]
    fn from_bytes(bytes: &[u8; WIDTH]) -> Self {
        // SAFETY: see the head of this file; `bytes` has 16.
        unsafe {
            let x = vld1q_u8(bytes.as_ptr());
            let (low, high) = (vmovl_u8(vget_low_u8(x)), vmovl_u8(vget_high_u8(x)));
            Self(
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))),
                vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))),
                vcvtq_f32_u32(vmovl_u16(vget_high_u16(high))),
            )
        }
    }
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    unsafe fn rows(first: *const u8, stride: usize) -> [Self::Bytes; 4] {
        // SAFETY: the caller vouches for all 16 rows.
        let (a, b, c, d) = unsafe {
            (
                four_rows(first, stride),
                four_rows(first.add(4 * stride), stride),
                four_rows(first.add(8 * stride), stride),
                four_rows(first.add(12 * stride), stride),
            )
        };
        [
            [a[0], b[0], c[0], d[0]],
            [a[1], b[1], c[1], d[1]],
            [a[2], b[2], c[2], d[2]],
            [a[3], b[3], c[3], d[3]],
        ]
    }
    #[inline(always)]
    fn low_nibbles(x: Self::Bytes) -> Self::Bytes {
        // SAFETY: see the head of this file.
        unsafe {
            let mask = vdupq_n_u8(15);
            [vandq_u8(x[0], mask), vandq_u8(x[1], mask), vandq_u8(x[2], mask), vandq_u8(x[3], mask)]
        }
    }
    #[inline(always)]
    fn high_nibbles(x: Self::Bytes) -> Self::Bytes {
        // SAFETY: see the head of this file.
        unsafe {
            [vshrq_n_u8::<4>(x[0]), vshrq_n_u8::<4>(x[1]), vshrq_n_u8::<4>(x[2]), vshrq_n_u8::<4>(x[3])]
        }
    }
    #[inline(always)]
    fn bf16_pairs(x: Self::Bytes) -> [Self; 2] {
        macro_rules! pair {
            ($x:expr) => {
                // SAFETY: see the head of this file.
                unsafe {
                    let x = vreinterpretq_u32_u8($x);
                    let high = vandq_u32(x, vdupq_n_u32(0xffff_0000));
                    (vreinterpretq_f32_u32(vshlq_n_u32::<16>(x)), vreinterpretq_f32_u32(high))
                }
            };
        }
        let (a, b, c, d) = (pair!(x[0]), pair!(x[1]), pair!(x[2]), pair!(x[3]));
        [Self(a.0, b.0, c.0, d.0), Self(a.1, b.1, c.1, d.1)]
    }
    #[inline(always)]
    fn dot(codes: &[Self::Bytes; QUADS], x: &[i8; BLOCK]) -> Self {
        // SAFETY: see the head of this file; each load takes 16 of the 64 activations.
        unsafe {
            let zero = vdupq_n_s32(0);
            let mut sums = [zero, zero, zero, zero];
            for i in 0..QUADS / 4 {
                let x = vld1q_s8(x.as_ptr().add(16 * i));
                for j in 0..4 {
                    sdot!(sums[j], codes[4 * i][j], x, "0");
                    sdot!(sums[j], codes[4 * i + 1][j], x, "1");
                    sdot!(sums[j], codes[4 * i + 2][j], x, "2");
                    sdot!(sums[j], codes[4 * i + 3][j], x, "3");
                }
            }
            Self(
                vcvtq_f32_s32(sums[0]),
                vcvtq_f32_s32(sums[1]),
                vcvtq_f32_s32(sums[2]),
                vcvtq_f32_s32(sums[3]),
            )
        }
    }
    #[inline(always)]
    fn prefetch(at: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { asm!("prfm pldl1keep, [{0}]", in(reg) at, options(nostack, preserves_flags, readonly)) }
    }
}
