//! Eight f32 lanes, in the instructions of the processor at hand.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m128i, __m256, _mm_loadl_epi64, _mm256_add_ps, _mm256_and_si256, _mm256_cvtepi32_ps,
    _mm256_cvtepu8_epi32, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_mul_ps, _mm256_set1_epi32, _mm256_set1_ps,
    _mm256_setr_epi32, _mm256_setzero_ps, _mm256_srlv_epi32, _mm256_storeu_ps,
};

/// Lanes of a vector.
pub const WIDTH: usize = 8;

/// A vector of [`WIDTH`] f32. A kernel that is generic over it gives the same result, to the bit, in every
/// implementation whose [`Lanes::fma`] rounds alike.
pub trait Lanes: Copy {
    /// All lanes 0.
    fn zero() -> Self;
    /// All lanes `x`.
    fn splat(x: f32) -> Self;
    /// From memory.
    fn load(x: &[f32; WIDTH]) -> Self;
    /// To memory.
    fn store(self, to: &mut [f32; WIDTH]);
    /// Lane by lane.
    fn add(self, other: Self) -> Self;
    /// Lane by lane.
    fn mul(self, other: Self) -> Self;
    /// `self * b + c`, rounded once where the processor can.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// Eight 4-bit codes, lowest first.
    fn from_nibbles(word: u32) -> Self;
    /// Eight 8-bit codes.
    fn from_bytes(bytes: &[u8; WIDTH]) -> Self;
    /// `a * b + c` of single numbers, rounded as [`Lanes::mul_add`] rounds.
    fn fma(a: f32, b: f32, c: f32) -> f32;

    /// The sum of all lanes, by halves.
    #[inline(always)]
    fn sum(self) -> f32 {
        let mut x = [0.0; WIDTH];
        self.store(&mut x);
        ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    }
}

/// What every target can do.
#[derive(Clone, Copy)]
pub struct Portable([f32; WIDTH]);

impl Portable {
    #[inline(always)]
    fn lanes(f: impl Fn(usize) -> f32) -> Self {
        Self(std::array::from_fn(f))
    }
}

impl Lanes for Portable {
    #[inline(always)]
    fn zero() -> Self {
        Self([0.0; WIDTH])
    }
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; WIDTH])
    }
    #[inline(always)]
    fn load(x: &[f32; WIDTH]) -> Self {
        Self(*x)
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
    fn mul(self, other: Self) -> Self {
        Self::lanes(|i| self.0[i] * other.0[i])
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        Self::lanes(|i| Self::fma(self.0[i], b.0[i], c.0[i]))
    }
    #[inline(always)]
    fn from_nibbles(word: u32) -> Self {
        Self::lanes(|i| (word >> (4 * i) & 15) as f32)
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
}

/// AVX2 with FMA. Only [`crate::device::dispatch`] names it, behind a check of the processor, and everything
/// here is inlined into the function that it makes.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub struct Avx2(__m256);

// SAFETY of every block: values of this type are only made in code that runs on a processor with AVX2 and FMA
// (see the type), and arrays are as long as the loads and stores.
#[cfg(target_arch = "x86_64")]
impl Lanes for Avx2 {
    #[inline(always)]
    fn zero() -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_setzero_ps() })
    }
    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_set1_ps(x) })
    }
    #[inline(always)]
    fn load(x: &[f32; WIDTH]) -> Self {
        // SAFETY: as above; the load may be unaligned.
        Self(unsafe { _mm256_loadu_ps(x.as_ptr()) })
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; WIDTH]) {
        // SAFETY: as above; the store may be unaligned.
        unsafe { _mm256_storeu_ps(to.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_add_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_mul_ps(self.0, other.0) })
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        // SAFETY: as above.
        Self(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
    }
    /// One shift with a different count in each lane.
    #[inline(always)]
    fn from_nibbles(word: u32) -> Self {
        // SAFETY: as above.
        Self(unsafe {
            let counts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
            let codes = _mm256_srlv_epi32(_mm256_set1_epi32(word.cast_signed()), counts);
            _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15)))
        })
    }
    #[inline(always)]
    fn from_bytes(bytes: &[u8; WIDTH]) -> Self {
        // SAFETY: as above; the load takes 8 bytes and may be unaligned.
        Self(unsafe {
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes.as_ptr().cast::<__m128i>())))
        })
    }
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}
