//! The device that was chosen, as a backend.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use lily_cpu::CpuBackend;
use lily_cuda::CudaBackend;
use lily_model::backend::{Backend, Limits};
use lily_model::config::Config;
use lily_model::weights::Weights;

use crate::args::{DeviceChoice, Global};

/// What a backend must hold at once.
pub struct Size {
    /// Longest sequence, tokens.
    pub context: u32,
    /// Sequences of that length.
    pub sequences: u32,
    /// Bytes for snapshots beside them.
    pub snapshot_bytes: u64,
    /// Tokens of a prompt that one step reads, at most; else what suits the device.
    pub chunk: Option<u32>,
}

/// Tokens of a prompt that one step reads: each of 256 experts then gets 16 of them on average.
const CHUNK: u32 = 512;
/// The same with the tensor operations of an M5, and on Hopper, which are fast enough for steps that long: 64, full tiles of theirs.
const LONG_CHUNK: u32 = 2048;

impl Size {
    /// Tokens of a step: those of a prompt, where `usual` suits the device, beside one of each sequence.
    fn batch_tokens(&self, usual: u32) -> u32 {
        self.chunk.unwrap_or(usual).min(self.context) + self.sequences
    }
}

/// Tokens of a prompt that one step of an opened device reads beside `sequences` others.
pub fn chunk(limits: &Limits, sequences: u32) -> u32 {
    limits.max_batch_tokens - sequences
}

/// Opens the device that the command line names, for a model whose weights are loaded.
pub fn open(
    global: &Global,
    config: &Config,
    weights: &Arc<Weights>,
    size: Size,
) -> Result<Box<dyn Backend>> {
    Ok(match global.device {
        DeviceChoice::Auto => auto(global, config, weights, size)?,
        DeviceChoice::Cpu => Box::new(cpu(global, config, weights, size)?),
        DeviceChoice::Cuda(device) => {
            Box::new(CudaBackend::new(config.clone(), weights, &cuda_options(device, &size))?)
        }
        DeviceChoice::Metal => metal::open(global, config, weights, &size)?,
    })
}

/// The GPU of a Mac, if there is one and it can run the model; else the processor.
fn auto(global: &Global, config: &Config, weights: &Arc<Weights>, size: Size) -> Result<Box<dyn Backend>> {
    if cfg!(target_vendor = "apple") && !global.cpu_exact {
        match metal::open(global, config, weights, &size) {
            Ok(backend) => return Ok(backend),
            Err(error) => tracing::warn!("the CPU is used instead of the GPU: {error:#}"),
        }
    }
    Ok(Box::new(cpu(global, config, weights, size)?))
}

/// The GPU of a Mac.
#[cfg(target_vendor = "apple")]
pub mod metal {
    use lily_metal::device::Device;
    use lily_metal::metal::MetalDevice;
    use lily_metal::{KvType, MetalBackend};

    use super::*;

    /// Opens the device alone.
    pub fn device() -> Result<MetalDevice> {
        Ok(MetalDevice::open(kernel_cache("metal"))?)
    }

    /// Opens the device with a model.
    pub fn open(
        global: &Global,
        config: &Config,
        weights: &Arc<Weights>,
        size: &Size,
    ) -> Result<Box<dyn Backend>> {
        Ok(Box::new(backend(global, config, weights, size)?))
    }

    /// As [`open`], of its own type.
    pub fn backend(
        global: &Global,
        config: &Config,
        weights: &Weights,
        size: &Size,
    ) -> Result<MetalBackend<MetalDevice>> {
        let device = device()?;
        let tensor = !global.metal_no_tensor && device.info().tensor;
        let options = lily_metal::Options {
            context: size.context,
            max_sequences: size.sequences,
            snapshot_bytes: size.snapshot_bytes,
            max_batch_tokens: size.batch_tokens(if tensor { LONG_CHUNK } else { CHUNK }),
            kv: KvType::Bf16,
            residency: !global.metal_no_residency,
            tensor,
            aligned_copies: !global.metal_no_aligned_copies,
            ..lily_metal::Options::default()
        };
        Ok(MetalBackend::new(device, config.clone(), weights, &options)?)
    }
}

/// There is none here.
#[cfg(not(target_vendor = "apple"))]
pub mod metal {
    use anyhow::bail;

    use super::*;
    use crate::args::UsageError;

    /// Says so.
    pub fn open(_: &Global, _: &Config, _: &Arc<Weights>, _: &Size) -> Result<Box<dyn Backend>> {
        let problem =
            "--device metal is for Macs: this program was built for another system, use --device cpu or cuda";
        bail!(UsageError(problem.to_owned()));
    }
}

/// The processor.
fn cpu(global: &Global, config: &Config, weights: &Arc<Weights>, size: Size) -> Result<CpuBackend> {
    let options = lily_cpu::Options {
        threads: global.threads.map(usize::from),
        context: size.context,
        max_sequences: size.sequences,
        snapshot_bytes: size.snapshot_bytes,
        max_batch_tokens: size.batch_tokens(CHUNK),
        exact: global.cpu_exact,
        ..lily_cpu::Options::default()
    };
    Ok(CpuBackend::new(config.clone(), Arc::clone(weights), &options)?)
}

/// What a GPU is opened with.
pub fn cuda_options(device: usize, size: &Size) -> lily_cuda::Options {
    let usual = if lily_cuda::chunk::is_for(device) { LONG_CHUNK } else { CHUNK };
    lily_cuda::Options {
        device,
        context: size.context,
        max_sequences: size.sequences,
        snapshot_bytes: size.snapshot_bytes,
        max_batch_tokens: size.batch_tokens(usual),
        cache: kernel_cache("cuda"),
        ..lily_cuda::Options::default()
    }
}

/// Where compiled kernels for a kind of device are kept; nowhere if the system names no folder for such things.
fn kernel_cache(kind: &str) -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let below_home = if cfg!(target_vendor = "apple") { "Library/Caches" } else { ".cache" };
    let caches = folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(below_home)));
    caches.map(|caches| caches.join("lily").join(kind))
}
