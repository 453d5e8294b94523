//! The processor: its threads, its instruction set and memory for activations.

use std::io;

use crate::buffers::Buffers;
use crate::pool::Pool;

/// Instructions that the kernels are compiled for; chosen at load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    #[cfg(target_arch = "x86_64")]
    #[non_exhaustive]
    Avx512,
    /// x86-64 with AVX2, FMA and AVX-VNNI.
    #[cfg(target_arch = "x86_64")]
    #[non_exhaustive]
    AvxVnni,
    /// x86-64 with AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    #[non_exhaustive]
    Avx2,
    /// arm64 with dot products.
    #[cfg(target_arch = "aarch64")]
    #[non_exhaustive]
    Neon,
    /// What the target guarantees: SSE2 on x86-64, NEON on arm64.
    Portable,
}

impl Isa {
    /// All that this processor has, the best first.
    pub fn available() -> Vec<Self> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni");
            if avx2 && avx512 {
                found.push(Self::Avx512);
            }
            if avx2 && is_x86_feature_detected!("avxvnni") {
                found.push(Self::AvxVnni);
            }
            if avx2 {
                found.push(Self::Avx2);
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("dotprod") {
            found.push(Self::Neon);
        }
        found.push(Self::Portable);
        found
    }

    /// The best that this processor has.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// Name for people.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => "avx-vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon-dotprod",
            Self::Portable => "portable",
        }
    }
}

/// Calls a kernel compiled for the instruction set at hand. The kernel must be `#[inline(always)]`; its first
/// generic argument is the vector type ([`crate::simd::Lanes`]).
macro_rules! dispatch {
    ($isa:expr, $kernel:ident $(::<$($generic:tt),+>)? ($($arg:expr => $name:ident: $type:ty),* $(,)?) $(-> $out:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
        fn avx512($($name: $type),*) $(-> $out)? {
            $kernel::<$crate::simd::Avx512 $(, $($generic),+)?>($($name),*)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avxvnni,avx2,fma")]
        fn avx_vnni($($name: $type),*) $(-> $out)? {
            $kernel::<$crate::simd::AvxVnni $(, $($generic),+)?>($($name),*)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn avx2($($name: $type),*) $(-> $out)? {
            $kernel::<$crate::simd::Avx2 $(, $($generic),+)?>($($name),*)
        }
        #[cfg(target_arch = "aarch64")]
        #[target_feature(enable = "dotprod")]
        fn neon($($name: $type),*) $(-> $out)? {
            $kernel::<$crate::simd::Neon $(, $($generic),+)?>($($name),*)
        }
        match $isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this value is only made by `available`, which found the features.
            $crate::device::Isa::Avx512 => unsafe { avx512($($arg),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: likewise.
            $crate::device::Isa::AvxVnni => unsafe { avx_vnni($($arg),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: likewise.
            $crate::device::Isa::Avx2 => unsafe { avx2($($arg),*) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: likewise.
            $crate::device::Isa::Neon => unsafe { neon($($arg),*) },
            $crate::device::Isa::Portable => {
                $kernel::<$crate::simd::Portable $(, $($generic),+)?>($($arg),*)
            }
        }
    }};
}
pub(crate) use dispatch;

/// Threads, instruction set and memory of a backend.
pub struct Device {
    /// Every parallel loop runs here.
    pub pool: Pool,
    /// Kernels in use.
    pub isa: Isa,
    /// Whether 4-bit matrices are multiplied with f32 activations instead of int8 ones.
    pub exact: bool,
    /// Memory for activations.
    pub buffers: Buffers,
}

/// The system refused to start threads.
#[derive(Debug, thiserror::Error)]
#[error("can't start {threads} threads: {source}; try a smaller --threads")]
pub struct ThreadError {
    threads: usize,
    source: io::Error,
}

impl Device {
    /// Starts the threads; by default one per core that this process may use.
    pub fn new(threads: Option<usize>, isa: Isa, exact: bool) -> Result<Self, ThreadError> {
        let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()));
        let pool = Pool::new(threads).map_err(|source| ThreadError { threads, source })?;
        Ok(Self { pool, isa, exact, buffers: Buffers::default() })
    }

    /// `cpu (avx2, int8 activations, 2 threads)`.
    pub fn name(&self) -> String {
        let n = self.pool.threads();
        let activations = if self.exact { "f32" } else { "int8" };
        let plural = if n == 1 { "" } else { "s" };
        format!("cpu ({}, {activations} activations, {n} thread{plural})", self.isa.name())
    }
}
