//! The processor: its threads and its instruction set.

use rayon::{ThreadPool, ThreadPoolBuilder};

/// Instructions that the kernels are compiled for; chosen at load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// x86-64 with AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    #[non_exhaustive]
    Avx2,
    /// What the target guarantees: SSE2 on x86-64, NEON on arm64.
    Portable,
}

impl Isa {
    /// The best that this processor has.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Self::Avx2;
        }
        Self::Portable
    }

    /// Name for people.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            Self::Portable => "portable",
        }
    }
}

/// Calls a kernel compiled for the instruction set at hand. The kernel must be `#[inline(always)]`; its first
/// generic argument is the vector type ([`crate::simd::Lanes`]).
macro_rules! dispatch {
    ($isa:expr, $kernel:ident $(::<$($generic:tt),+>)? ($($arg:ident: $type:ty),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        fn avx2($($arg: $type),*) {
            $kernel::<$crate::simd::Avx2 $(, $($generic),+)?>($($arg),*);
        }
        match $isa {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this value is only made by `detect`, which found both features.
            $crate::device::Isa::Avx2 => unsafe { avx2($($arg),*) },
            $crate::device::Isa::Portable => $kernel::<$crate::simd::Portable $(, $($generic),+)?>($($arg),*),
        }
    }};
}
pub(crate) use dispatch;

/// Threads and instruction set of a backend.
pub struct Device {
    /// Every parallel loop runs here.
    pub pool: ThreadPool,
    /// Kernels in use.
    pub isa: Isa,
}

/// The system refused to start threads.
#[derive(Debug, thiserror::Error)]
#[error("can't start {threads} threads: {source}; try a smaller --threads")]
pub struct ThreadError {
    threads: usize,
    source: rayon::ThreadPoolBuildError,
}

impl Device {
    /// Starts the threads; by default one per core that this process may use.
    pub fn new(threads: Option<usize>, isa: Isa) -> Result<Self, ThreadError> {
        let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()));
        let pool =
            ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("lily-cpu-{i}")).build();
        Ok(Self { pool: pool.map_err(|source| ThreadError { threads, source })?, isa })
    }

    /// `cpu (avx2, 2 threads)`.
    pub fn name(&self) -> String {
        let n = self.pool.current_num_threads();
        format!("cpu ({}, {n} thread{})", self.isa.name(), if n == 1 { "" } else { "s" })
    }
}
