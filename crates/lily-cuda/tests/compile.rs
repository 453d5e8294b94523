//! Every kernel compiles for every architecture that Lily names, and no hot one spills. Needs NVRTC, no GPU.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::random;
use lily_cuda::compile::{Compiler, cubin};
use lily_cuda::kernels::{LOCAL_MEMORY, SOURCES, options};
use lily_model::config::Config;
use lily_model::presets::CONFIG_35B_A3B;

/// Name, registers, and bytes of local memory of each kernel, from the assembler's report.
fn report(log: &str) -> Vec<(String, String, u32)> {
    let (mut name, mut local, mut out) = (String::new(), 0, Vec::new());
    for line in log.lines() {
        if let Some(rest) = line.split("properties for ").nth(1) {
            name = rest.trim().to_owned();
        } else if let Some(before) = line.split(" bytes stack frame").next().filter(|b| b.len() < line.len())
        {
            // Spilled registers are part of the stack frame.
            local = before.rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or(u32::MAX);
        } else if let Some(used) = line.split("Used ").nth(1) {
            out.push((name.clone(), used.split(',').next().unwrap_or("").to_owned(), local));
        }
    }
    out
}

/// The compiler. Without one there is nothing to test, but where `./test` has brought it that is a failure.
fn compiler() -> Option<Compiler> {
    let compiler = Compiler::load();
    if compiler.is_none() {
        assert!(
            std::env::var_os("LILY_NVRTC").is_none(),
            "libnvrtc can't be loaded, though LILY_NVRTC is set"
        );
        println!("skipped: libnvrtc can't be loaded");
    }
    compiler
}

#[test]
fn every_kernel_compiles_and_hot_ones_do_not_spill() {
    let Some(compiler) = compiler() else { return };
    let config = Config::from_json(CONFIG_35B_A3B).unwrap();
    for (arch, capability) in [("sm_80", 80), ("sm_90a", 90), ("sm_100", 100)] {
        for source in SOURCES.iter().filter(|s| (s.fits)(&config, capability)) {
            let compiled =
                compiler.compile(source.name, &source.full_text(), &options(&config, arch)).unwrap();
            assert!(!compiled.cubin.is_empty());
            // One was a macro that took the name of a shape.
            assert!(!compiled.log.contains("warning"), "{}", compiled.log);
            // Then products of warpgroups wait for each other.
            assert!(!compiled.log.contains("Potential Performance Loss"), "{}", compiled.log);
            let kernels = report(&compiled.log);
            for name in source.kernels {
                let (_, registers, local) =
                    kernels.iter().find(|k| k.0 == *name).unwrap_or_else(|| panic!("no kernel {name}"));
                println!("{arch} {name}: {registers}, {local} bytes of local memory");
                let most = LOCAL_MEMORY.iter().find(|(n, _)| n == name).map_or(0, |(_, bytes)| *bytes);
                assert!(*local <= most, "{arch} {name} uses {local} bytes of local memory");
            }
        }
    }
}

/// The shapes of every model that the tests run compile too; a cache folder keeps the result for another machine.
#[test]
fn shapes_of_all_models_compile() {
    let Some(compiler) = compiler() else { return };
    let cache = std::env::var_os("LILY_CUDA_CACHE").map(std::path::PathBuf::from);
    let real = Config::from_json(CONFIG_35B_A3B).unwrap();
    let small = ["dense", "demo"].map(|form| common::load(form).config);
    let random =
        [random::config, random::whole_heads, random::one_expert, random::real_attention].map(|of| of(&[]));
    for config in small.iter().chain(&random).chain([&real]) {
        for source in SOURCES.iter().filter(|s| (s.fits)(config, 90)) {
            let options = options(config, "sm_90a");
            cubin(Some(&compiler), cache.as_deref(), source.name, &source.full_text(), &options).unwrap();
        }
    }
}
