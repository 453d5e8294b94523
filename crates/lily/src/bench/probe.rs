//! `lily bench --probe`: the machine alone.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::thread::{self, available_parallelism};

use anyhow::{Context, Result};
use lily_cpu::probe::{int8_peak, read_bandwidth};
use memmap2::{Mmap, MmapMut};
use serde_json::{Value, json};

use crate::args::Global;
use crate::progress;

/// Bytes that are read to measure bandwidth: several times the caches of today's processors.
const BUFFER: usize = 1 << 30;

/// Threads that the backend would use.
pub fn threads(global: &Global) -> usize {
    global.threads.map_or_else(|| available_parallelism().map_or(1, usize::from), usize::from)
}

/// What some threads reached together.
struct Row {
    threads: usize,
    anonymous: f64,
    mapped: f64,
    multiply_adds: f64,
}

/// Runs it: 1, 2, 4 and so on threads, up to all.
pub fn probe(as_json: bool, global: &Global) -> Result<()> {
    let all = threads(global);
    let spinner = progress::spinner();
    spinner.set_message("measuring the machine");
    let anonymous = anonymous_memory(all)?;
    let mapped = mapped_file()?;
    let mut rows = Vec::new();
    let mut instructions = "";
    for threads in counts(all) {
        let peak = int8_peak(threads);
        instructions = peak.instructions;
        rows.push(Row {
            threads,
            anonymous: read_bandwidth(&anonymous, threads),
            mapped: read_bandwidth(&mapped, threads),
            multiply_adds: peak.multiply_adds_per_s,
        });
    }
    spinner.finish_and_clear();
    let mut out = io::stdout().lock();
    let written = if as_json {
        writeln!(out, "{:#}", report(&rows, instructions))
    } else {
        write_text(&mut out, &rows, instructions)
    };
    Ok(written?)
}

/// 1, 2, 4 and so on, and `all`.
fn counts(all: usize) -> Vec<usize> {
    let mut counts: Vec<usize> =
        std::iter::successors(Some(1), |n| Some(2 * n)).take_while(|n| *n < all).collect();
    counts.push(all);
    counts
}

/// A buffer that has something in every page, each part touched first by a thread that may read it later.
pub fn anonymous_memory(threads: usize) -> Result<MmapMut> {
    let mut memory = MmapMut::map_anon(BUFFER)
        .with_context(|| format!("{BUFFER} bytes of memory, to measure bandwidth"))?;
    thread::scope(|scope| {
        for part in memory.chunks_mut(BUFFER.div_ceil(threads.max(1))) {
            scope.spawn(|| part.fill(0xA5));
        }
    });
    Ok(memory)
}

/// A file as large, mapped as a model's files are; it is gone when it is closed.
fn mapped_file() -> Result<Mmap> {
    let write = |file: &File| -> io::Result<Mmap> {
        let mut writer = BufWriter::new(file);
        let block = vec![0xA5; 1 << 20];
        for _ in 0..BUFFER / block.len() {
            writer.write_all(&block)?;
        }
        writer.flush()?;
        // SAFETY: the file has no name, so nobody else can change it.
        unsafe { Mmap::map(file) }
    };
    let file = tempfile::tempfile().and_then(|file| write(&file));
    file.with_context(|| format!("{BUFFER} bytes of a temporary file, to measure reading it"))
}

fn report(rows: &[Row], instructions: &str) -> Value {
    let row = |row: &Row| {
        json!({
            "threads": row.threads,
            "read_bytes_per_s": row.anonymous,
            "mapped_read_bytes_per_s": row.mapped,
            "int8_multiply_adds_per_s": row.multiply_adds,
        })
    };
    json!({"int8_instructions": instructions, "probe": rows.iter().map(row).collect::<Value>()})
}

fn write_text(out: &mut impl Write, rows: &[Row], instructions: &str) -> io::Result<()> {
    writeln!(out, "reading {} MiB of memory; int8 multiply-adds with {instructions}", BUFFER >> 20)?;
    writeln!(
        out,
        "{:>7}{:>16}{:>20}{:>24}",
        "threads", "memory GB/s", "mapped file GB/s", "G multiply-adds/s"
    )?;
    for row in rows {
        let (memory, mapped, peak) = (row.anonymous / 1e9, row.mapped / 1e9, row.multiply_adds / 1e9);
        writeln!(out, "{:>7}{memory:>16.1}{mapped:>20.1}{peak:>24.0}", row.threads)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::counts;

    #[test]
    fn thread_counts_double_up_to_all() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(2), [1, 2]);
        assert_eq!(counts(6), [1, 2, 4, 6]);
    }
}
