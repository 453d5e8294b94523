//! What this machine can do at best: bytes read from memory and int8 multiply-adds in a second. Speeds are compared
//! with it; nothing that computes uses it.

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::{int32x4_t, vaddvq_s32, vdupq_n_s8, vdupq_n_s32};
#[cfg(any(target_arch = "aarch64", target_arch = "x86_64"))]
use std::arch::asm;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m256i, __m512i, _mm256_add_epi32, _mm256_cvtsi256_si32, _mm256_dpbusd_avx_epi32, _mm256_madd_epi16,
    _mm256_maddubs_epi16, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_setzero_si256, _mm512_cvtsi512_si32,
    _mm512_dpbusd_epi32, _mm512_set1_epi8, _mm512_setzero_si512,
};
use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// Times that memory is read, or a run of multiply-adds made; the fastest one counts.
const PASSES: usize = 5;
/// Least time of a run of multiply-adds.
const RUN: Duration = Duration::from_millis(30);
/// Independent sums in registers: more than latency times throughput of any of the instructions.
const SUMS: usize = 12;

/// int8 products added to 32-bit sums, in registers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Int8Peak {
    /// The instructions that were timed.
    pub instructions: &'static str,
    /// Multiply-adds a second, of all threads together.
    pub multiply_adds_per_s: f64,
}

/// Bytes a second at which `threads` threads together read `memory`, each its own piece from front to end: the fastest
/// of a few passes, after one that brings the pages in. Far more than the caches hold, or it is their
/// bandwidth that is measured.
pub fn read_bandwidth(memory: &[u8], threads: usize) -> f64 {
    let pieces: Vec<&[u8]> = memory.chunks(memory.len().div_ceil(threads.max(1)).max(1)).collect();
    let read = |i: usize| {
        if let Some(piece) = pieces.get(i) {
            black_box(sum(piece));
        }
    };
    let times = passes(pieces.len(), 1 + PASSES, &read);
    memory.len() as f64 / fastest(&times[1..])
}

/// Sum of a piece as 64-bit words, without the bytes behind its last whole line.
fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 8];
    for line in bytes.as_chunks::<64>().0 {
        for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}

/// The peak of `threads` threads together, with the widest instructions that this processor has.
pub fn int8_peak(threads: usize) -> Int8Peak {
    let kernel = kernels()[0];
    let mut rounds = 1 << 12;
    while fastest(&passes(1, 1, &|_| kernel.run(rounds))) < RUN.as_secs_f64() {
        rounds *= 2;
    }
    let times = passes(threads, PASSES, &|_| kernel.run(rounds));
    let made = kernel.multiply_adds * SUMS as u64 * rounds * threads as u64;
    Int8Peak { instructions: kernel.instructions, multiply_adds_per_s: made as f64 / fastest(&times) }
}

/// Seconds of each of `n` passes, in which thread `i` of `threads` does `work(i)`.
fn passes(threads: usize, n: usize, work: &(dyn Fn(usize) + Sync)) -> Vec<f64> {
    let barrier = &Barrier::new(threads.max(1));
    let pass = move |i| {
        barrier.wait();
        let start = Instant::now();
        work(i);
        barrier.wait();
        start.elapsed().as_secs_f64()
    };
    thread::scope(|scope| {
        for i in 1..threads {
            scope.spawn(move || (0..n).for_each(|_| _ = pass(i)));
        }
        (0..n).map(|_| pass(0)).collect()
    })
}

fn fastest(times: &[f64]) -> f64 {
    times.iter().copied().fold(f64::INFINITY, f64::min)
}

/// A way to multiply and add.
#[derive(Clone, Copy)]
struct Kernel {
    instructions: &'static str,
    /// Multiply-adds that one step of one sum makes.
    multiply_adds: u64,
    /// Makes so many rounds of one step for each of [`SUMS`] sums, and returns the low 32 bits of all sums,
    /// added up. Every product is 2 times 3. Only to be called if the processor has the instructions.
    sums: unsafe fn(u64) -> i32,
}

impl Kernel {
    fn run(&self, rounds: u64) {
        // SAFETY: `kernels` gives only those that the processor has.
        black_box(unsafe { (self.sums)(black_box(rounds)) });
    }
}

/// All that this processor has, the fastest first.
fn kernels() -> Vec<Kernel> {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni") {
            found.push(Kernel { instructions: "AVX-512 VNNI", multiply_adds: 64, sums: avx512_vnni });
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("avxvnni") {
            found.push(Kernel { instructions: "AVX-VNNI", multiply_adds: 32, sums: avx_vnni });
        }
        if is_x86_feature_detected!("avx2") {
            found.push(Kernel { instructions: "AVX2 (vpmaddubsw)", multiply_adds: 32, sums: avx2 });
        }
    }
    #[cfg(target_arch = "aarch64")]
    if std::arch::is_aarch64_feature_detected!("dotprod") {
        found.push(Kernel { instructions: "NEON sdot", multiply_adds: 16, sums: neon });
    }
    found.push(Kernel { instructions: "portable", multiply_adds: 64, sums: portable });
    found
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
fn avx512_vnni(rounds: u64) -> i32 {
    let (a, b) = (black_box(_mm512_set1_epi8(2)), black_box(_mm512_set1_epi8(3)));
    let mut sums: [__m512i; SUMS] = [_mm512_setzero_si512(); SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, a, b);
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(_mm512_cvtsi512_si32(*sum)))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,avxvnni")]
fn avx_vnni(rounds: u64) -> i32 {
    let (a, b) = (black_box(_mm256_set1_epi8(2)), black_box(_mm256_set1_epi8(3)));
    let mut sums: [__m256i; SUMS] = [_mm256_setzero_si256(); SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_dpbusd_avx_epi32(*sum, a, b);
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(_mm256_cvtsi256_si32(*sum)))
}

/// Three instructions a step: products in pairs, pairs in fours, the sum.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2(rounds: u64) -> i32 {
    let (mut a, b) = (_mm256_set1_epi8(2), black_box(_mm256_set1_epi8(3)));
    let ones = _mm256_set1_epi16(1);
    let mut sums: [__m256i; SUMS] = [_mm256_setzero_si256(); SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            // SAFETY: no instruction at all. The compiler can't know that `a` stays what it is, so it makes every
            // product anew.
            unsafe { asm!("/* {0} */", inout(ymm_reg) a, options(nomem, nostack, preserves_flags)) };
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(_mm256_cvtsi256_si32(*sum)))
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,dotprod")]
fn neon(rounds: u64) -> i32 {
    let (a, b) = (black_box(vdupq_n_s8(2)), black_box(vdupq_n_s8(3)));
    let mut sums: [int32x4_t; SUMS] = [vdupq_n_s32(0); SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            // SAFETY: touches registers only, with an instruction that the function's features have.
            unsafe {
                asm!("sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) *sum, in(vreg) a, in(vreg) b,
                    options(nomem, nostack, preserves_flags));
            }
        }
    }
    // One lane of four, as the other kernels return.
    sums.iter().fold(0, |all, sum| all.wrapping_add(vaddvq_s32(*sum) / 4))
}

/// Plain loops, in what the target guarantees.
fn portable(rounds: u64) -> i32 {
    let b = black_box([3i8; 64]);
    let mut sums = [0i32; SUMS];
    for _ in 0..rounds {
        for sum in &mut sums {
            let a = black_box([2i8; 64]);
            let dot: i32 = a.iter().zip(&b).map(|(a, b)| i32::from(*a) * i32::from(*b)).sum();
            *sum = sum.wrapping_add(dot);
        }
    }
    sums.iter().fold(0, |all, sum| all.wrapping_add(*sum))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The count of multiply-adds that speeds are made from is the count that took place.
    #[test]
    fn every_kernel_makes_the_multiply_adds_that_it_is_counted_for() {
        for kernel in kernels() {
            for rounds in [0, 1, 5] {
                // SAFETY: `kernels` gives only those that the processor has.
                let sum = unsafe { (kernel.sums)(rounds) };
                // A lane of a vector adds up four products, the portable sum all of them.
                let products =
                    if kernel.instructions == "portable" { kernel.multiply_adds as i32 } else { 4 };
                let expected = SUMS as i32 * rounds as i32 * products * 2 * 3;
                assert_eq!(sum, expected, "{}, {rounds} rounds", kernel.instructions);
            }
        }
    }

    #[test]
    fn the_whole_memory_is_read_by_any_number_of_threads() {
        let memory: Vec<u8> = (0..=255).cycle().take(64 * 1000).collect();
        let words = memory.as_chunks::<8>().0.iter();
        assert_eq!(sum(&memory), words.fold(0u64, |all, w| all.wrapping_add(u64::from_ne_bytes(*w))));
        for threads in [1, 2, 3, 7] {
            assert!(read_bandwidth(&memory, threads) > 0.0);
        }
    }

    #[test]
    fn more_rounds_take_longer() {
        let kernel = kernels()[0];
        let time = |rounds| fastest(&passes(1, PASSES, &|_| kernel.run(rounds)));
        let (short, long) = (time(1 << 16), time(1 << 20));
        assert!(long > 4.0 * short, "16 times the rounds: {short} s and {long} s");
    }

    #[test]
    fn every_thread_works_in_every_pass() {
        let count = std::sync::atomic::AtomicUsize::new(0);
        let times =
            passes(3, 4, &|i| _ = count.fetch_add(1 << (8 * i), std::sync::atomic::Ordering::Relaxed));
        assert_eq!((times.len(), count.into_inner()), (4, 0x04_04_04));
    }
}
