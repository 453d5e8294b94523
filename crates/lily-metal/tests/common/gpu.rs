//! Runs kernels on an NVIDIA GPU: a threadgroup is a block, a SIMD-group a warp, threadgroup memory shared memory. NVRTC makes
//! the code, on any machine, with the driver wrapper and the cache of lily-cuda.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use lily_cuda::compile::{Compiler, cubin};
use lily_cuda::driver::{Args, Buffer, Context, DriverError, Function, Module, Shape};
use lily_cuda::kernels::architecture;

use super::signature::{Parameter, Signature};
use super::text::{Way, standard, whole};
use super::{Bound, Memory};

/// Whether tests run on a GPU: where `LILY_TEST_DEVICE` is `cuda`.
pub fn wanted() -> bool {
    std::env::var("LILY_TEST_DEVICE").is_ok_and(|device| device == "cuda")
}

/// Machine code of Metal source, from lily-cuda's cache (`LILY_CUDA_CACHE`) if it is there.
pub fn code(compiler: Option<&Compiler>, source: &str, signatures: &[Signature], arch: &str) -> Vec<u8> {
    let cache = std::env::var_os("LILY_CUDA_CACHE").map(PathBuf::from);
    let text = whole(source, signatures, Way::Cuda);
    cubin(compiler, cache.as_deref(), "metal.cu", &text, &options(source, arch)).unwrap()
}

/// Options of NVRTC. Lines are kept, for the sanitizers' reports.
pub fn options(source: &str, arch: &str) -> Vec<String> {
    let own = [format!("--gpu-architecture={arch}"), format!("--std={}", standard(source, Way::Cuda))];
    let fixed = ["--device-as-default-execution-space", "--generate-line-info", "--ptxas-options=-v"];
    own.into_iter().chain(fixed.map(str::to_owned)).collect()
}

/// The first device, for the calling thread.
pub fn context() -> &'static Arc<Context> {
    static CONTEXT: OnceLock<Arc<Context>> = OnceLock::new();
    let context = CONTEXT.get_or_init(|| Context::open(0).unwrap());
    context.enter().unwrap();
    context
}

/// Memory of the device, and what the host has of it.
pub struct Mirrored {
    pub host: Vec<u8>,
    device: Buffer,
    /// The host has written since.
    changed: bool,
}

impl Mirrored {
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.changed = true;
        &mut self.host
    }
}

/// Loaded kernels.
pub struct Gpu {
    module: Module,
}

impl Gpu {
    pub fn compile(source: &str, signatures: &[Signature]) -> Self {
        let compiler = Compiler::load();
        let code = code(compiler.as_ref(), source, signatures, &architecture(context().capability));
        Self { module: Module::load(context(), &code).unwrap() }
    }

    pub fn function(&self, kernel: &str) -> Function {
        self.module.function(&format!("entry_{kernel}"), 0).unwrap()
    }

    pub fn allocate(&self, bytes: usize) -> Mirrored {
        let device = context().allocate(bytes, "a test").unwrap();
        Mirrored { host: vec![0; bytes], device, changed: true }
    }

    /// Runs a kernel and waits for it; brings back what its signature says it may write.
    pub fn launch(
        &self,
        signature: &Signature,
        shape: super::Shape,
        memories: &mut [Memory],
        bound: &[Bound],
    ) -> Result<(), String> {
        // The calling thread may be new to it.
        let context = context();
        let mut run = || -> Result<(), DriverError> {
            let mut addresses = Vec::with_capacity(bound.len());
            for &(index, offset) in bound {
                let buffer = memories[index].mirrored();
                if buffer.changed {
                    buffer.device.write(0, &buffer.host)?;
                    buffer.changed = false;
                }
                addresses.push(buffer.device.address() + offset as u64);
            }
            let function = self.function(&signature.name);
            enqueue(context, function, shape.grid, shape.threads, shape.memory, &addresses)?;
            context.synchronize()?;
            let writable = signature.parameters.iter().filter_map(|parameter| match *parameter {
                Parameter::Buffer { index, writable: true } => Some(bound[index].0),
                _ => None,
            });
            // Several may be places in one memory.
            for index in writable.collect::<BTreeSet<_>>() {
                let Mirrored { host, device, .. } = memories[index].mirrored();
                device.read(0, host)?;
            }
            Ok(())
        };
        run().map_err(|e| format!("{}: {e}", signature.name))
    }
}

/// Enqueues a launch: buffers by index, then where each part of shared memory begins, as `text.rs` declares the entry.
pub fn enqueue(
    context: &Context,
    function: Function,
    grid: [usize; 3],
    threads: usize,
    memory: &[usize],
    addresses: &[u64],
) -> Result<(), DriverError> {
    let mut args = Args::new();
    addresses.iter().for_each(|address| {
        args.u64(*address);
    });
    let mut shared = 0;
    for bytes in memory {
        args.u32(shared);
        shared += *bytes as u32;
    }
    let shape = Shape { grid: grid.map(|n| n as u32), threads: threads as u32, shared, overlap: false };
    context.launch(function, shape, &mut args)
}
