//! Backend on the CPU: [`mod@reference`], the oracle in plain f32, beside a fast path with the same rooms as
//! every other backend: `embed` (in [`forward`]), [`gdn`], [`attention`], [`moe`], `head`, [`state`],
//! [`device`].

mod attention;
mod backend;
mod device;
mod export;
mod forward;
mod gdn;
pub mod math;
mod matmul;
mod moe;
pub mod reference;
mod simd;
mod state;
pub mod tap;

pub use backend::{CpuBackend, Options};
pub use device::{Isa, ThreadError};
pub use state::bytes as state_bytes;
