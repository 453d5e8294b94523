//! Backend on NVIDIA GPUs. Kernels are CUDA C++ written for this model and compiled for its shapes at load; the driver
//! is loaded at run time, so the same program starts on machines without one.
//!
//! The rooms are those of every backend: `embed`, `gdn`, `attention`, `moe`, `head` are kernel files, `forward` has their
//! order, `wide` and `cluster` its products on Hopper (4-bit weights; 8-bit ones and the router), `group` its experts there, `chunk` both
//! for many tokens, `token` the short way for one token, `state` the memory of sequences, `driver` the device.

mod args;
mod backend;
pub mod buffers;
pub mod chunk;
pub mod cluster;
pub mod compile;
pub mod device;
pub mod driver;
mod export;
pub mod forward;
pub mod gdn;
pub mod group;
pub mod kernels;
pub mod pack;
pub mod profile;
pub mod state;
pub mod step;
pub mod token;
pub mod weights;
pub mod wide;

use lily_model::config::Config;

pub use backend::{CudaBackend, Options};

/// The backend can't start.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The device.
    #[error(transparent)]
    Driver(#[from] driver::DriverError),
    /// The kernels.
    #[error(transparent)]
    Compile(#[from] compile::CompileError),
    /// Attention needs more shared memory than the device has.
    #[error(
        "attention with heads of {head_dim} needs {needed} bytes of shared memory a block, {device} has {available}; use --device cpu"
    )]
    SharedMemory {
        /// Of the model.
        head_dim: usize,
        /// Bytes.
        needed: u32,
        /// Name of the device.
        device: String,
        /// Bytes.
        available: u32,
    },
    /// Random weights can't have the form of the config.
    #[error(
        "random weights are only made in 4 and 8 bits, with groups of 64 or 128: {module} has another form, so write the model with `lily synth` and load that"
    )]
    Random {
        /// The first of the modules that lie together.
        module: String,
    },
    /// Shapes that the kernels aren't written for.
    #[error(
        "the CUDA kernels can't run this model: {field} is {found}, expected {expected}; use --device cpu"
    )]
    Shape {
        /// What.
        field: &'static str,
        /// Of the model.
        found: usize,
        /// What would do.
        expected: &'static str,
    },
}

/// Refuses shapes that the kernels aren't written for.
fn check_shapes(c: &Config) -> Result<(), LoadError> {
    let (g, a, m) = (&c.gdn, &c.attention, &c.moe);
    let multiple = |n: usize, of: usize| n > 0 && n.is_multiple_of(of);
    let checks = [
        ("hidden_size", c.hidden_size, multiple(c.hidden_size, 64), "a multiple of 64"),
        ("the width of the value heads", g.value_width(), multiple(g.value_width(), 64), "a multiple of 64"),
        ("linear_value_head_dim", g.value_dim, multiple(g.value_dim, 32), "a multiple of 32"),
        (
            "linear_key_head_dim",
            g.key_dim,
            multiple(g.key_dim, 8) && g.key_dim <= 256,
            "a multiple of 8, at most 256",
        ),
        ("head_dim", a.head_dim, multiple(a.head_dim, 64) && a.head_dim <= 256, "64, 128, 192 or 256"),
        ("query heads per K/V head", a.heads / a.kv_heads, a.heads / a.kv_heads <= 8, "at most 8"),
        ("num_experts", m.experts, m.experts <= 1024, "at most 1024"),
        ("num_experts_per_tok", m.experts_per_token, m.experts_per_token <= 31, "at most 31"),
        ("moe_intermediate_size", m.expert_width, multiple(m.expert_width, 64), "a multiple of 64"),
        ("shared_expert_intermediate_size", m.shared_width, multiple(m.shared_width, 64), "a multiple of 64"),
    ];
    match checks.into_iter().find(|(_, _, good, _)| !good) {
        Some((field, found, _, expected)) => Err(LoadError::Shape { field, found, expected }),
        None => Ok(()),
    }
}
