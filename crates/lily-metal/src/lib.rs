//! Backend on Apple GPUs: kernels in Metal Shading Language ([`source`]), the list of what a step launches ([`mod@plan`]), and
//! what runs it ([`backend`]). All of it is the same on every platform but the [`device`] beneath: on macOS that is Metal
//! itself (`metal`), in the tests a machine that runs the kernels on the CPU (`tests/shim`). See `docs/metal.md`.

mod aligned;
pub mod backend;
pub mod device;
pub mod draw;
mod export;
mod load;
#[cfg(target_vendor = "apple")]
pub mod metal;
pub mod pace;
pub mod plan;
mod program;
pub mod rope;
pub mod selftest;
pub mod source;
pub mod state;
mod steps;
mod tensor_check;
pub mod weights;

mod batch;
mod builder;
mod launches;

use std::time::Duration;

use lily_model::matrix::FloatType;

pub use backend::MetalBackend;
pub use plan::{KvType, Plan, PlanError, plan, plan_step};

/// Settings of the backend.
#[derive(Clone, Debug)]
pub struct Options {
    /// Longest sequence, tokens.
    pub context: u32,
    /// Sequences of full length that there is memory for.
    pub max_sequences: u32,
    /// Bytes of state beside that, for snapshots.
    pub snapshot_bytes: u64,
    /// Most tokens in one step.
    pub max_batch_tokens: u32,
    /// What K/V is kept as.
    pub kv: KvType,
    /// Keep the weights resident, so that they are not paged out between requests.
    pub residency: bool,
    /// Multiply matrices of many rows with the tensor operations of Metal 4, if the device has units for them.
    pub tensor: bool,
    /// Keep an aligned copy beside a file whose tensors are not aligned, instead of copying them to memory at every load.
    pub aligned_copies: bool,
    /// Time that a command buffer may take, as predicted for the slowest GPU; a step that takes longer is several.
    pub longest_buffer: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            context: 4096,
            max_sequences: 4,
            snapshot_bytes: 0,
            max_batch_tokens: 512,
            kv: KvType::Bf16,
            residency: true,
            tensor: true,
            aligned_copies: true,
            longest_buffer: pace::LONGEST,
        }
    }
}

/// The backend can't start.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The model.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The device.
    #[error(transparent)]
    Device(#[from] device::DeviceError),
    /// The plan needs something that nothing here provides.
    #[error("{contents} has no place: the plan and the backend are of different versions, which is a bug")]
    Missing {
        /// What.
        contents: String,
    },
    /// A weight is not as long as the plan has it.
    #[error(
        "{contents} has {found} bytes, expected {expected}: the plan and the model disagree, which is a bug"
    )]
    Size {
        /// Which.
        contents: String,
        /// By the plan.
        expected: usize,
        /// By the model.
        found: usize,
    },
    /// Values, scales or biases of a matrix in a type that the kernels don't read.
    #[error(
        "the Metal kernels can't run this model: floats of {module} are {found:?}, expected Bf16; use --device cpu"
    )]
    Floats {
        /// The module.
        module: String,
        /// Their type.
        found: FloatType,
    },
    /// A kernel that the plan launches is not among those that were compiled.
    #[error(
        "kernel {name} was not compiled: the plan and the kernels are of different versions, which is a bug"
    )]
    NoKernel {
        /// Its name.
        name: &'static str,
    },
    /// The GPU can't run a kernel as planned.
    #[error(
        "this GPU can't run kernel {name}: {what} are {found}, expected {expected}; use --device cpu, and please report it with `lily doctor --metal-selftest`"
    )]
    Kernel {
        /// Its name.
        name: &'static str,
        /// What is too small, or another.
        what: &'static str,
        /// By the plan.
        expected: usize,
        /// By the GPU.
        found: usize,
    },
    /// Too little memory.
    #[error(
        "{device} has {available} bytes for Metal; weights and steps need {weights}, state of all sequences {state}: lower --ctx-size or --max-sequences, or take a smaller model"
    )]
    Memory {
        /// Its name.
        device: String,
        /// Bytes.
        available: u64,
        /// Bytes.
        weights: u64,
        /// Bytes.
        state: u64,
    },
}
