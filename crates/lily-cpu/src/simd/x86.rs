//! AVX2 with FMA, the same with VNNI, and AVX-512 with VNNI.
//!
//! Only [`crate::device::dispatch`] names these types, behind a check of the processor, and everything here is
//! inlined into the functions that it makes. That is what every `unsafe` block relies on: a value of these types
//! is only made in code that runs on a processor with the instructions. Loads and stores may be unaligned.

use std::arch::x86_64::*;

use super::{BLOCK, Lanes, QUADS, WIDTH};

/// Four activations in every group of four bytes: quad `i` of a block.
#[inline(always)]
fn quad(x: &[i8; BLOCK], i: usize) -> i32 {
    i32::from_le_bytes(std::array::from_fn(|j| x[4 * i + j].cast_unsigned()))
}

/// 16 lanes in two registers; with `VNNI` four products of bytes are summed in one instruction.
#[derive(Clone, Copy)]
pub struct Ymm<const VNNI: bool>(__m256, __m256);

/// AVX2 and FMA.
pub type Avx2 = Ymm<false>;
/// AVX2, FMA and AVX-VNNI.
pub type AvxVnni = Ymm<true>;

/// An expression for each of two values. Closures won't do: one that is not inlined would be compiled without the
/// instructions.
macro_rules! both {
    ($x:ident in [$a:expr, $b:expr] => $f:expr) => {
        [
            {
                let $x = $a;
                $f
            },
            {
                let $x = $b;
                $f
            },
        ]
    };
}

/// Applies an intrinsic to both halves.
macro_rules! halves {
    ($f:ident($($x:expr),+)) => {
        // SAFETY: see the head of this file.
        unsafe { Self($f($($x.0),+), $f($($x.1),+)) }
    };
}

impl<const VNNI: bool> Lanes for Ymm<VNNI> {
    type Bytes = [__m256i; 2];

    #[inline(always)]
    fn splat(x: f32) -> Self {
        // SAFETY: see the head of this file.
        let x = unsafe { _mm256_set1_ps(x) };
        Self(x, x)
    }
    #[inline(always)]
    fn load(x: &[f32; WIDTH]) -> Self {
        // SAFETY: see the head of this file; `x` has both halves.
        unsafe { Self(_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))) }
    }
    #[inline(always)]
    fn load_bf16(x: &[u16; WIDTH]) -> Self {
        // SAFETY: see the head of this file; `x` has 32 bytes.
        unsafe {
            let [a, b] = both!(at in [x.as_ptr(), x.as_ptr().add(8)] => {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            });
            Self(a, b)
        }
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; WIDTH]) {
        // SAFETY: see the head of this file; `to` has both halves.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), self.0);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), self.1);
        }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        halves!(_mm256_add_ps(self, other))
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        halves!(_mm256_sub_ps(self, other))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        halves!(_mm256_mul_ps(self, other))
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        halves!(_mm256_div_ps(self, other))
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        halves!(_mm256_fmadd_ps(self, b, c))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        halves!(_mm256_max_ps(self, other))
    }
    #[inline(always)]
    fn clamp(self, low: f32, high: f32) -> Self {
        // Of two operands with a NaN these instructions take the second.
        let (low, high) = (Self::splat(low), Self::splat(high));
        let x = halves!(_mm256_max_ps(low, self));
        halves!(_mm256_min_ps(high, x))
    }
    #[inline(always)]
    fn round(self) -> Self {
        // SAFETY: see the head of this file.
        unsafe {
            Self(
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0),
                _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.1),
            )
        }
    }
    #[inline(always)]
    fn exp2_whole(self) -> Self {
        // SAFETY: see the head of this file.
        unsafe {
            let [a, b] = both!(x in [self.0, self.1] => {
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
            });
            Self(a, b)
        }
    }
    /// One shift with a different count in each lane.
    #[inline(always)]
    fn from_nibbles(words: [u32; 2]) -> Self {
        // SAFETY: see the head of this file.
        unsafe {
            let counts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
            let [a, b] = both!(word in [words[0], words[1]] => {
                let codes = _mm256_srlv_epi32(_mm256_set1_epi32(word.cast_signed()), counts);
                _mm256_cvtepi32_ps(_mm256_and_si256(codes, _mm256_set1_epi32(15)))
            });
            Self(a, b)
        }
    }
    #[inline(always)]
    fn from_bytes(bytes: &[u8; WIDTH]) -> Self {
        // SAFETY: see the head of this file; each load takes 8 of the 16 bytes.
        unsafe {
            let [a, b] = both!(at in [bytes.as_ptr(), bytes.as_ptr().add(8)] => {
                _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())))
            });
            Self(a, b)
        }
    }
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    unsafe fn rows(first: *const u8, stride: usize) -> [Self::Bytes; 4] {
        // SAFETY: see the head of this file; the caller vouches for 16 bytes at each row.
        unsafe {
            let (low, high) = (eight_rows(first, stride), eight_rows(first.add(8 * stride), stride));
            [[low[0], high[0]], [low[1], high[1]], [low[2], high[2]], [low[3], high[3]]]
        }
    }
    #[inline(always)]
    fn low_nibbles(x: Self::Bytes) -> Self::Bytes {
        // SAFETY: see the head of this file.
        both!(x in [x[0], x[1]] => unsafe { _mm256_and_si256(x, _mm256_set1_epi8(15)) })
    }
    #[inline(always)]
    fn high_nibbles(x: Self::Bytes) -> Self::Bytes {
        // SAFETY: see the head of this file.
        both!(x in [x[0], x[1]] => unsafe {
            _mm256_and_si256(_mm256_srli_epi32::<4>(x), _mm256_set1_epi8(15))
        })
    }
    #[inline(always)]
    fn bf16_pairs(x: Self::Bytes) -> [Self; 2] {
        // SAFETY: see the head of this file.
        unsafe {
            let upper = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
            let low = both!(x in [x[0], x[1]] => _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x)));
            let high = both!(x in [x[0], x[1]] => _mm256_castsi256_ps(_mm256_and_si256(x, upper)));
            [Self(low[0], low[1]), Self(high[0], high[1])]
        }
    }
    #[inline(always)]
    fn dot(codes: &[Self::Bytes; QUADS], x: &[i8; BLOCK]) -> Self {
        // SAFETY: see the head of this file.
        unsafe {
            let mut total = [_mm256_setzero_si256(); 2];
            if VNNI {
                for (i, codes) in codes.iter().enumerate() {
                    let x = _mm256_set1_epi32(quad(x, i));
                    total[0] = _mm256_dpbusd_avx_epi32(total[0], codes[0], x);
                    total[1] = _mm256_dpbusd_avx_epi32(total[1], codes[1], x);
                }
            } else {
                // A pair of products is at most 2 * 15 * 127, and 8 of these fit into 16 bits.
                for (i, codes) in codes.as_chunks::<8>().0.iter().enumerate() {
                    let mut sums = [_mm256_setzero_si256(); 2];
                    for (j, codes) in codes.iter().enumerate() {
                        let x = _mm256_set1_epi32(quad(x, 8 * i + j));
                        sums[0] = _mm256_add_epi16(sums[0], _mm256_maddubs_epi16(codes[0], x));
                        sums[1] = _mm256_add_epi16(sums[1], _mm256_maddubs_epi16(codes[1], x));
                    }
                    let ones = _mm256_set1_epi16(1);
                    for half in 0..2 {
                        total[half] = _mm256_add_epi32(total[half], _mm256_madd_epi16(sums[half], ones));
                    }
                }
            }
            Self(_mm256_cvtepi32_ps(total[0]), _mm256_cvtepi32_ps(total[1]))
        }
    }
    #[inline(always)]
    fn prefetch(at: *const u8) {
        // SAFETY: see the head of this file; a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}

/// 16 bytes of each of 8 rows, `stride` bytes apart: register `i` has bytes `4 i..4 i + 4` of every row.
///
/// # Safety
/// 16 bytes must be readable at each row.
#[inline(always)]
unsafe fn eight_rows(first: *const u8, stride: usize) -> [__m256i; 4] {
    // SAFETY: see the head of this file; the caller vouches for the rows.
    unsafe {
        let (a, b) = (two_rows(first, stride, 0), two_rows(first, stride, 1));
        let (c, d) = (two_rows(first, stride, 2), two_rows(first, stride, 3));
        let (ab0, ab1) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let (cd0, cd1) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        [
            _mm256_unpacklo_epi64(ab0, cd0),
            _mm256_unpackhi_epi64(ab0, cd0),
            _mm256_unpacklo_epi64(ab1, cd1),
            _mm256_unpackhi_epi64(ab1, cd1),
        ]
    }
}

/// Rows `r` and `r + 4` of those of [`eight_rows`].
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn two_rows(first: *const u8, stride: usize, r: usize) -> __m256i {
    // SAFETY: see the head of this file; the caller vouches for the rows.
    unsafe {
        let low = _mm256_castsi128_si256(_mm_loadu_si128(first.add(r * stride).cast()));
        _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(first.add((r + 4) * stride).cast()))
    }
}

/// Rows `r`, `r + 4`, `r + 8` and `r + 12` of 16, 16 bytes of each.
///
/// # Safety
/// 16 bytes must be readable at each row.
#[inline(always)]
unsafe fn four_rows(first: *const u8, stride: usize, r: usize) -> __m512i {
    // SAFETY: see the head of this file; the caller vouches for the rows.
    unsafe {
        let x = _mm512_castsi128_si512(_mm_loadu_si128(first.add(r * stride).cast()));
        let x = _mm512_inserti32x4::<1>(x, _mm_loadu_si128(first.add((r + 4) * stride).cast()));
        let x = _mm512_inserti32x4::<2>(x, _mm_loadu_si128(first.add((r + 8) * stride).cast()));
        _mm512_inserti32x4::<3>(x, _mm_loadu_si128(first.add((r + 12) * stride).cast()))
    }
}

/// AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Clone, Copy)]
pub struct Avx512(__m512);

/// Wraps what an intrinsic gives.
macro_rules! zmm {
    ($x:expr) => {
        // SAFETY: see the head of this file.
        unsafe { Self($x) }
    };
}

impl Lanes for Avx512 {
    type Bytes = __m512i;
    const ONE_REGISTER: bool = true;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        zmm!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(x: &[f32; WIDTH]) -> Self {
        zmm!(_mm512_loadu_ps(x.as_ptr()))
    }
    #[inline(always)]
    fn load_bf16(x: &[u16; WIDTH]) -> Self {
        zmm!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    fn store(self, to: &mut [f32; WIDTH]) {
        // SAFETY: see the head of this file; `to` has 16 values.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        zmm!(_mm512_add_ps(self.0, other.0))
    }
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        zmm!(_mm512_sub_ps(self.0, other.0))
    }
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        zmm!(_mm512_mul_ps(self.0, other.0))
    }
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        zmm!(_mm512_div_ps(self.0, other.0))
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        zmm!(_mm512_fmadd_ps(self.0, b.0, c.0))
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        zmm!(_mm512_max_ps(self.0, other.0))
    }
    #[inline(always)]
    fn clamp(self, low: f32, high: f32) -> Self {
        // Of two operands with a NaN these instructions take the second.
        zmm!(_mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), self.0)))
    }
    #[inline(always)]
    fn round(self) -> Self {
        zmm!(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT }>(self.0))
    }
    #[inline(always)]
    fn exp2_whole(self) -> Self {
        zmm!({
            let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
        })
    }
    /// One shift with a different count in each lane.
    #[inline(always)]
    fn from_nibbles(words: [u32; 2]) -> Self {
        zmm!({
            let counts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
            let low = _mm256_set1_epi32(words[0].cast_signed());
            let high = _mm256_set1_epi32(words[1].cast_signed());
            let words = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
            let codes = _mm512_srlv_epi32(words, counts);
            _mm512_cvtepi32_ps(_mm512_and_si512(codes, _mm512_set1_epi32(15)))
        })
    }
    #[inline(always)]
    fn from_bytes(bytes: &[u8; WIDTH]) -> Self {
        zmm!(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()))))
    }
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    unsafe fn rows(first: *const u8, stride: usize) -> [Self::Bytes; 4] {
        // SAFETY: see the head of this file; the caller vouches for 16 bytes at each row.
        unsafe {
            let (a, b) = (four_rows(first, stride, 0), four_rows(first, stride, 1));
            let (c, d) = (four_rows(first, stride, 2), four_rows(first, stride, 3));
            let (ab0, ab1) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let (cd0, cd1) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            [
                _mm512_unpacklo_epi64(ab0, cd0),
                _mm512_unpackhi_epi64(ab0, cd0),
                _mm512_unpacklo_epi64(ab1, cd1),
                _mm512_unpackhi_epi64(ab1, cd1),
            ]
        }
    }
    #[inline(always)]
    fn low_nibbles(x: Self::Bytes) -> Self::Bytes {
        // SAFETY: see the head of this file.
        unsafe { _mm512_and_si512(x, _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    fn high_nibbles(x: Self::Bytes) -> Self::Bytes {
        // SAFETY: see the head of this file.
        unsafe { _mm512_and_si512(_mm512_srli_epi32::<4>(x), _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    fn bf16_pairs(x: Self::Bytes) -> [Self; 2] {
        // SAFETY: see the head of this file.
        unsafe {
            let high = _mm512_and_si512(x, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()));
            [Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(x))), Self(_mm512_castsi512_ps(high))]
        }
    }
    #[inline(always)]
    fn dot(codes: &[Self::Bytes; QUADS], x: &[i8; BLOCK]) -> Self {
        // Two chains, so that one multiplication need not wait for the last.
        zmm!({
            let (mut even, mut odd) = (_mm512_setzero_si512(), _mm512_setzero_si512());
            for i in (0..QUADS).step_by(2) {
                even = _mm512_dpbusd_epi32(even, codes[i], _mm512_set1_epi32(quad(x, i)));
                odd = _mm512_dpbusd_epi32(odd, codes[i + 1], _mm512_set1_epi32(quad(x, i + 1)));
            }
            _mm512_cvtepi32_ps(_mm512_add_epi32(even, odd))
        })
    }
    #[inline(always)]
    fn prefetch(at: *const u8) {
        // SAFETY: see the head of this file; a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
}
