//! Backend on the CPU: [`mod@reference`], the oracle in plain f32, beside a fast path with the same rooms as
//! every other backend: `embed`, `gdn`, `attention`, `moe`, `head`, `state` and `device`; `forward` has their order.

mod attention;
mod backend;
mod device;
mod embed;
mod export;
mod forward;
mod gdn;
mod head;
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
