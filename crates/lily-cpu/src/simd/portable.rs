//! What every target can do, written so that a compiler can find the vectors in it.

use super::{BLOCK, Lanes, QUADS, WIDTH};

/// Plain arrays. Also the test twin of the other implementations.
#[derive(Clone, Copy)]
pub struct Portable([f32; WIDTH]);

impl Portable {
    #[inline(always)]
    fn lanes(f: impl Fn(usize) -> f32) -> Self {
        Self(std::array::from_fn(f))
    }
}

impl Lanes for Portable {
    type Bytes = [[u8; 4]; WIDTH];

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; WIDTH])
    }
    #[inline(always)]
    fn load(x: &[f32; WIDTH]) -> Self {
        Self(*x)
    }
    #[inline(always)]
    fn load_bf16(x: &[u16; WIDTH]) -> Self {
        Self::lanes(|i| f32::from_bits(u32::from(x[i]) << 16))
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; WIDTH]) {
        *to = self.0;
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self::lanes(|i| self.0[i] + other.0[i])
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        Self::lanes(|i| self.0[i] - other.0[i])
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        Self::lanes(|i| self.0[i] * other.0[i])
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        Self::lanes(|i| self.0[i] / other.0[i])
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        Self::lanes(|i| Self::fma(self.0[i], b.0[i], c.0[i]))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        Self::lanes(|i| if self.0[i] > other.0[i] { self.0[i] } else { other.0[i] })
    }
    #[inline(always)]
    fn clamp(self, low: f32, high: f32) -> Self {
        Self::lanes(|i| self.0[i].clamp(low, high))
    }
    #[inline(always)]
    fn round(self) -> Self {
        // Adding 1.5 * 2^23 leaves no bits for a fraction.
        Self::lanes(|i| (self.0[i] + 12_582_912.0) - 12_582_912.0)
    }
    #[inline(always)]
    fn exp2_whole(self) -> Self {
        Self::lanes(|i| f32::from_bits(((self.0[i] as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn from_nibbles(words: [u32; 2]) -> Self {
        Self::lanes(|i| (words[i / 8] >> (4 * (i % 8)) & 15) as f32)
    }
    #[inline(always)]
    fn from_bytes(bytes: &[u8; WIDTH]) -> Self {
        Self::lanes(|i| f32::from(bytes[i]))
    }
    /// arm64 has a fused multiply-add in its base; elsewhere it would be a call of a slow function.
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        if cfg!(target_arch = "aarch64") { a.mul_add(b, c) } else { a * b + c }
    }

    #[inline(always)]
    unsafe fn rows(first: *const u8, stride: usize) -> [Self::Bytes; 4] {
        // SAFETY: the caller vouches for 16 bytes at each row.
        let row = |r: usize| unsafe { first.add(r * stride).cast::<[[u8; 4]; 4]>().read() };
        let rows: [[[u8; 4]; 4]; WIDTH] = std::array::from_fn(row);
        std::array::from_fn(|i| std::array::from_fn(|r| rows[r][i]))
    }
    #[inline(always)]
    fn low_nibbles(x: Self::Bytes) -> Self::Bytes {
        x.map(|quad| quad.map(|b| b & 15))
    }
    #[inline(always)]
    fn high_nibbles(x: Self::Bytes) -> Self::Bytes {
        x.map(|quad| quad.map(|b| b >> 4))
    }
    #[inline(always)]
    fn bf16_pairs(x: Self::Bytes) -> [Self; 2] {
        [
            Self::lanes(|i| f32::from_bits(u32::from_le_bytes([0, 0, x[i][0], x[i][1]]))),
            Self::lanes(|i| f32::from_bits(u32::from_le_bytes([0, 0, x[i][2], x[i][3]]))),
        ]
    }
    #[inline(always)]
    fn dot(codes: &[Self::Bytes; QUADS], x: &[i8; BLOCK]) -> Self {
        let mut sums = [0i32; WIDTH];
        for (codes, x) in codes.iter().zip(x.as_chunks::<4>().0) {
            for (sum, codes) in sums.iter_mut().zip(codes) {
                *sum += codes.iter().zip(x).map(|(&c, &x)| i32::from(c) * i32::from(x)).sum::<i32>();
            }
        }
        Self::lanes(|i| sums[i] as f32)
    }
    #[inline(always)]
    fn prefetch(_: *const u8) {}
}
