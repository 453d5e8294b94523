//! Backend on the CPU: [`mod@reference`], the oracle in plain f32, beside a fast path with the same rooms as
//! every other backend: `embed`, `gdn`, `attention`, `moe`, `head`, `state` and `device`; `forward` has their order.

mod attention;
mod backend;
mod buffers;
mod device;
mod embed;
mod export;
mod forward;
mod gdn;
mod head;
pub mod math;
mod matmul;
mod moe;
mod pool;
pub mod probe;
mod quantise;
pub mod reference;
mod simd;
mod state;
pub mod tap;
mod vector;

pub use backend::{CpuBackend, Options, state_bytes};
pub use device::{Isa, ThreadError};
