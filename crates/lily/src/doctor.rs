//! `lily doctor`: what Lily finds on this machine.

use std::env::consts::{ARCH, OS};
use std::fs;
use std::io::{self, Write};
use std::thread::available_parallelism;

use anyhow::{Context as _, Result, bail};
use lily_cpu::Isa;
use lily_cuda::driver::{Context, DriverError};
use lily_metal::plan::{Features, KvType};
use lily_metal::selftest::Report;

use crate::args::{Doctor, Global};
use crate::source::Source;

/// Runs the command.
pub fn doctor(args: &Doctor, global: &Global) -> Result<()> {
    if let Some(file) = &args.metal_source {
        let features = Features { kv: KvType::Bf16, tensor: args.metal_tensor };
        let text = lily_metal::source::source(&Source::new(global)?.config()?, features);
        return fs::write(file, text).with_context(|| file.display().to_string());
    }
    // First, since it may be refused.
    let reports = if args.metal_selftest { metal::selftest(global)? } else { Vec::new() };
    let mut out = io::stdout().lock();
    writeln!(out, "lily {} for {OS} on {ARCH}", env!("CARGO_PKG_VERSION"))?;
    let threads = available_parallelism().map_or(1, usize::from);
    writeln!(out, "cpu: {}, {threads} threads", Isa::detect().name())?;
    write_cuda(&mut out)?;
    metal::write(&mut out)?;
    reports.iter().try_for_each(|report| writeln!(out, "\n{report}"))?;
    let Some(failed) = reports.iter().find(|report| !report.passed()) else {
        let passed = if reports.is_empty() { "" } else { "\nall kernels passed\n" };
        return Ok(write!(out, "{passed}")?);
    };
    // The others passed, or were looked at first.
    let instead = if failed.features.tensor { "--metal-no-tensor" } else { "--device cpu" };
    bail!(
        "the Metal kernels do not compute what they should on this machine: please report it with all of the above, and use {instead} until then"
    )
}

/// Every NVIDIA GPU, or why there is none.
fn write_cuda(out: &mut impl Write) -> io::Result<()> {
    for index in 0.. {
        match Context::open(index) {
            Ok(gpu) => {
                let memory = gpu
                    .memory()
                    .map_or_else(|e| e.to_string(), |(free, all)| format!("{all} bytes, {free} free"));
                writeln!(out, "cuda:{index}: {}, {memory}", gpu.description())?;
            }
            // All were seen.
            Err(DriverError::NoDevice { .. }) if index > 0 => break,
            Err(error) => {
                writeln!(out, "cuda: {error}")?;
                break;
            }
        }
    }
    Ok(())
}

#[cfg(target_vendor = "apple")]
mod metal {
    use lily_metal::device::Device;
    use lily_metal::selftest;
    use lily_model::load::load_weights;

    use super::*;
    use crate::device::metal::device;

    /// The GPU, or why there is none.
    pub fn write(out: &mut impl Write) -> io::Result<()> {
        match device() {
            Ok(device) => {
                let info = device.info();
                writeln!(out, "metal: {}, {} bytes for Metal", info.name, info.memory)?;
                info.details.iter().try_for_each(|(name, value)| writeln!(out, "  {name}: {value}"))
            }
            Err(error) => writeln!(out, "metal: {error:#}"),
        }
    }

    /// Runs every kernel against the CPU: those that every GPU runs, then those that this one gets beside them.
    pub fn selftest(global: &Global) -> Result<Vec<Report>> {
        let source = Source::new(global)?;
        let config = source.config()?;
        let weights = load_weights(&source.files, &config)?;
        let tensor = device()?.info().tensor && !global.metal_no_tensor;
        let paths: &[bool] = if tensor { &[false, true] } else { &[false] };
        let run = |&tensor: &bool| {
            let features = Features { kv: KvType::Bf16, tensor };
            Ok(selftest::run(&mut device()?, &config, &weights, features)?)
        };
        paths.iter().map(run).collect()
    }
}

#[cfg(not(target_vendor = "apple"))]
mod metal {
    use super::*;
    use crate::args::UsageError;

    pub fn write(out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "metal: only on Macs")
    }

    pub fn selftest(_: &Global) -> Result<Vec<Report>> {
        bail!(UsageError(
            "--metal-selftest is for Macs: this program was built for another system".to_owned()
        ));
    }
}
