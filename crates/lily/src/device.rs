//! The device that was chosen, as a backend.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail};
use lily_cpu::CpuBackend;
use lily_cuda::CudaBackend;
use lily_model::backend::Backend;
use lily_model::config::Config;
use lily_model::weights::Weights;

use crate::args::{DeviceChoice, Global, UsageError};

/// What a backend must hold at once.
pub struct Size {
    /// Longest sequence, tokens.
    pub context: u32,
    /// Sequences of that length.
    pub sequences: u32,
    /// Bytes for snapshots beside them.
    pub snapshot_bytes: u64,
    /// Tokens of a step.
    pub batch_tokens: u32,
}

/// Opens the device that the command line names, for a model whose weights are loaded.
pub fn open(
    global: &Global,
    config: &Config,
    weights: &Arc<Weights>,
    size: Size,
) -> Result<Box<dyn Backend>> {
    Ok(match global.device {
        DeviceChoice::Auto | DeviceChoice::Cpu => Box::new(cpu(global, config, weights, size)?),
        DeviceChoice::Cuda(device) => {
            Box::new(CudaBackend::new(config.clone(), weights, &cuda_options(device, &size))?)
        }
        DeviceChoice::Metal => {
            let problem = "--device metal is for `lily inspect` only: no backend runs on Apple GPUs yet, use --device cpu";
            bail!(UsageError(problem.to_owned()));
        }
    })
}

/// The processor.
fn cpu(global: &Global, config: &Config, weights: &Arc<Weights>, size: Size) -> Result<CpuBackend> {
    let options = lily_cpu::Options {
        threads: global.threads.map(usize::from),
        context: size.context,
        max_sequences: size.sequences,
        snapshot_bytes: size.snapshot_bytes,
        max_batch_tokens: size.batch_tokens,
        exact: global.cpu_exact,
        ..lily_cpu::Options::default()
    };
    Ok(CpuBackend::new(config.clone(), Arc::clone(weights), &options)?)
}

/// What a GPU is opened with.
pub fn cuda_options(device: usize, size: &Size) -> lily_cuda::Options {
    lily_cuda::Options {
        device,
        context: size.context,
        max_sequences: size.sequences,
        snapshot_bytes: size.snapshot_bytes,
        max_batch_tokens: size.batch_tokens,
        cache: kernel_cache(),
        ..lily_cuda::Options::default()
    }
}

/// Where compiled kernels are kept; nowhere if the system names no folder for such things.
fn kernel_cache() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let caches = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")));
    caches.map(|caches| caches.join("lily/cuda"))
}
