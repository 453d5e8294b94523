//! Races are found, and nothing else is taken for one.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::slice::from_mut;
use std::sync::OnceLock;

use common::{Guard, Kernels, Memory, ORDERS, Order, Shape, gpu};

/// Kernels of 64 threads with one buffer of 256 bytes and as many in threadgroup memory.
const SOURCE: &str = include_str!("shim/races.metal");

fn kernels() -> &'static Kernels {
    static KERNELS: OnceLock<&'static Kernels> = OnceLock::new();
    KERNELS.get_or_init(|| Kernels::compile(SOURCE))
}

fn launch(kernel: &str, groups: usize, out: &mut Memory, order: Order) -> Result<(), String> {
    let signature = kernels().signatures.iter().find(|s| s.name == kernel).unwrap();
    let memory = vec![256; signature.threadgroup_memory()];
    let shape = Shape { kernel, grid: [groups, 1, 1], threads: 64, memory: &memory };
    kernels().launch(shape, from_mut(out), &[(0, 0)], order)
}

/// In every order a race is told of this memory, with these lines, in one order or the other.
#[track_caller]
fn races(kernel: &str, groups: usize, memory: &str, lines: [&str; 2], why: &str) {
    // On a GPU compute-sanitizer looks.
    if gpu::wanted() {
        return;
    }
    for order in ORDERS {
        let mut out = kernels().allocate(256, Guard::End);
        let error = launch(kernel, groups, &mut out, order).unwrap_err();
        for part in [kernel, "a race on", memory, lines[0], lines[1], why] {
            assert!(error.contains(part), "{order:?}, {part:?}: {error}");
        }
        // The next launch is unharmed, and knows nothing of this one.
        launch("parted", 4, &mut out, order).unwrap();
    }
}

const GROUPS: &str = "nothing orders threadgroups";
const THREADS: &str = "no barrier between them";

#[test]
fn what_barriers_part_is_no_race() {
    for order in ORDERS {
        let mut out = kernels().allocate(256, Guard::End);
        launch("parted", 4, &mut out, order).unwrap();
        let expected: Vec<u8> = (0..256).map(|at| ((at % 64 + 1) % 64 + 33) as u8 % 64 + 3).collect();
        assert_eq!(out.bytes(), expected);
        launch("added", 1, &mut out, order).unwrap();
        let sums: Vec<u32> = (0..64).map(|at| if at < 4 { 16 * at + 480 } else { 0 }).collect();
        assert_eq!(out.words(), sums);
        // Nor are launches one.
        launch("groups_write", 1, &mut out, order).unwrap();
        launch("groups_write", 1, &mut out, order).unwrap();
    }
}

#[test]
fn threadgroups_that_meet_are_found() {
    let line = "`out[i] = float(group);`";
    races("groups_write", 2, "buffer 0, byte 28:", [line, "thread 7 writes"], GROUPS);
    races("groups_write", 3, "buffer 0, byte 28:", [line, "thread 7 writes"], GROUPS);
    let lines = ["reads it in line 44, `out[32 + i] = out[i];`", "writes it in line 46, `out[i] = 1.0f;`"];
    races("group_reads", 2, "buffer 0, byte 12:", lines, GROUPS);
    let lines = ["`const float sum = out[0] + out[1];`", "thread 5 writes it in line 60, `out[1] = sum;`"];
    races("group_writes_later", 2, "buffer 0, byte 4:", lines, GROUPS);
    // Alone they are right.
    for kernel in ["groups_write", "group_reads", "group_writes_later"] {
        launch(kernel, 1, &mut kernels().allocate(256, Guard::End), Order::Forward).unwrap();
    }
}

#[test]
fn threads_that_meet_in_device_memory_are_found() {
    races("device_memory", 1, "buffer 0, byte ", ["`out[i] = 1.0f;`", "`out[0] = out[i + 1];`"], THREADS);
}

#[test]
fn threads_that_meet_in_threadgroup_memory_are_found() {
    let memory = "threadgroup memory 0, byte ";
    let put = "writes it in line 77, called from 89, `to[at] = float(at);`";
    races("next_round", 1, memory, [put, "reads it in line 91, `sum += shared[63 - i];`"], THREADS);
    races("lanes", 1, memory, ["`shared[i] = float(i);`", "`out[i] = shared[i ^ 1] + sum;`"], THREADS);
    races("same_value", 1, memory, ["`shared[0] = 1.0f;`", "writes"], THREADS);
    races(
        "loaded_early",
        1,
        memory,
        ["adds to it in line", "`out[i] = atomic_load_explicit(sums, "],
        THREADS,
    );
    let lines = ["`simdgroup_store(a, shared, 8);`", "`simdgroup_load(a, shared, 8);`"];
    races("matrices", 1, memory, lines, THREADS);
}
