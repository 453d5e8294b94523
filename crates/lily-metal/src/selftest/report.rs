//! The self-test's table, and what of it belongs into a report of a fault.

use std::fmt;

use super::{Outcome, TOLERANCE};
use crate::device::Info;
use crate::plan::Features;

/// Faults of a kernel that are written out.
const SHOWN: usize = 5;

/// What the self-test found.
#[derive(Clone, Debug)]
pub struct Report {
    /// The device.
    pub info: Info,
    /// Which kernels they were.
    pub features: Features,
    /// Whether the kernels compiled; else the compiler's words.
    pub compiled: Result<(), String>,
    /// How each kernel did.
    pub outcomes: Vec<Outcome>,
}

impl Report {
    /// Whether every kernel compiled and did what it should.
    pub fn passed(&self) -> bool {
        self.compiled.is_ok() && !self.outcomes.is_empty() && self.outcomes.iter().all(Outcome::passed)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Metal self-test: lily {}, {}", env!("CARGO_PKG_VERSION"), self.info.name)?;
        writeln!(
            f,
            "  memory for Metal: {} bytes, largest buffer: {}",
            self.info.memory, self.info.max_buffer
        )?;
        for (name, value) in &self.info.details {
            writeln!(f, "  {name}: {value}")?;
        }
        writeln!(f, "  matrices of many rows by: {}", self.features.path())?;
        if let Err(error) = &self.compiled {
            return writeln!(f, "\nthe kernels don't compile:\n{error}");
        }
        let columns = ("kernel", "threads", "at most", "memory", "launches", "us", "worst");
        let (kernel, threads, most, memory, launches, time, worst) = columns;
        writeln!(f, "\n  {kernel:<20}{threads:>8}{most:>9}{memory:>8}{launches:>10}{time:>9}{worst:>10}")?;
        for o in &self.outcomes {
            let verdict = if o.passed() { "ok" } else { "WRONG" };
            writeln!(
                f,
                "  {:<20}{:>8}{:>9}{:>8}{:>10}{:>9.0}{:>10.1e}  {verdict}",
                o.kernel,
                o.threads,
                o.max_threads,
                o.threadgroup_memory,
                o.launches,
                o.fastest.as_secs_f64() * 1e6,
                o.worst
            )?;
        }
        writeln!(f, "\n  us: the fastest launch on its own, with what handing it over costs")?;
        writeln!(
            f,
            "  worst: largest difference from the CPU, of the largest value; {TOLERANCE:e} is allowed (bf16 caches: 1/128)"
        )?;
        for o in self.outcomes.iter().filter(|o| !o.faults.is_empty()) {
            writeln!(f, "\n{}: {} faults", o.kernel, o.faults.len())?;
            o.faults.iter().take(SHOWN).try_for_each(|fault| writeln!(f, "  {fault}"))?;
        }
        Ok(())
    }
}
