//! The machine that the kernels are tested on finds what is wrong on purpose.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::slice::from_mut;
use std::sync::OnceLock;

use common::{Guard, Kernels, Memory, ORDERS, Order, Shape};

/// Kernels of 64 threads with one buffer of 64 numbers and as many in threadgroup memory.
const SOURCE: &str = include_str!("shim/wrong.metal");

fn kernels() -> &'static Kernels {
    static KERNELS: OnceLock<&'static Kernels> = OnceLock::new();
    KERNELS.get_or_init(|| {
        let kernels = Kernels::compile(SOURCE);
        // They have tests of their own, in races.rs; here they are to show in what is computed.
        kernels.ignore_races();
        kernels
    })
}

fn launch(kernel: &str, out: &mut Memory, order: Order) -> Result<(), String> {
    let signature = kernels().signatures.iter().find(|s| s.name == kernel).unwrap();
    let memory = vec![256; signature.threadgroup_memory()];
    let shape = Shape { kernel, grid: [1, 1, 1], threads: 64, memory: &memory };
    kernels().launch(shape, from_mut(out), &[(0, 0)], order)
}

/// What a kernel leaves in each order.
fn results(kernel: &str) -> Vec<Vec<u32>> {
    let run = |order| {
        let mut out = kernels().allocate(256, Guard::End);
        launch(kernel, &mut out, order).unwrap();
        out.words()
    };
    ORDERS.map(run).to_vec()
}

#[track_caller]
fn refused(kernel: &str, guard: Guard, why: &str) {
    let error = launch(kernel, &mut kernels().allocate(256, guard), Order::Forward).unwrap_err();
    assert!(error.starts_with(kernel) && error.contains(why), "{error}");
    // The next launch is unharmed.
    launch("right", &mut kernels().allocate(256, guard), Order::Forward).unwrap();
}

#[test]
fn a_right_kernel_gives_the_same_in_every_order() {
    let results = results("right");
    let expected: Vec<u32> = (0..64u32).map(|i| ((i + 33) % 64) * 2 + 32 * 31 / 2).collect();
    for result in results {
        assert_eq!(result.iter().map(|w| f32::from_bits(*w) as u32).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn a_missing_barrier_shows() {
    let results = results("missing_barrier");
    assert!(results.iter().any(|r| *r != results[0]));
}

#[test]
fn a_simdgroup_that_runs_ahead_shows() {
    let expected: Vec<u32> = vec![(3 * 32 * 32) as f32; 64].into_iter().map(f32::to_bits).collect();
    assert!(results("runs_ahead").iter().any(|r| *r != expected));
}

#[test]
fn matrices_are_multiplied() {
    let a: Vec<f32> = (0..64).map(|i| (i * i % 23) as f32 - 9.0).collect();
    let dot = |r: usize, c: usize| (0..8).map(|k| a[8 * r + k] * a[8 * c + k]).sum::<f32>();
    let expected: Vec<f32> = (0..64).map(|i| dot(i / 8, i % 8) + 1.0).collect();
    for order in ORDERS {
        let mut out = kernels().allocate(256, Guard::End);
        out.put_floats(&a);
        launch("product", &mut out, order).unwrap();
        assert_eq!(out.floats(), expected);
    }
}

#[test]
fn threadgroup_memory_is_nan_until_it_is_written() {
    for result in results("not_written") {
        let nan: Vec<usize> = (0..64).filter(|&i| f32::from_bits(result[i]).is_nan()).collect();
        assert_eq!(nan, [5]);
    }
}

#[test]
fn threads_that_miss_a_barrier_are_found() {
    refused("missed_barrier", Guard::End, "wait for others that don't come");
    refused("missed_sum", Guard::End, "wait for others that don't come");
    refused("missed_product", Guard::End, "wait for others that don't come");
    refused("mixed_functions", Guard::End, "different functions");
}

#[test]
fn accesses_outside_of_memory_are_found() {
    refused("behind_buffer", Guard::End, "outside of its memory");
    refused("before_buffer", Guard::Start, "outside of its memory");
    refused("behind_threadgroup_memory", Guard::End, "outside of its memory");
    refused("behind_array", Guard::End, "undefined behaviour");
}

#[test]
fn what_no_device_could_launch_is_refused() {
    let mut out = kernels().allocate(256, Guard::End);
    let mut run = |kernel: &str, threads, memory: &[usize]| {
        let shape = Shape { kernel, grid: [1, 1, 1], threads, memory };
        kernels().launch(shape, from_mut(&mut out), &[(0, 0)], Order::Forward).unwrap_err()
    };
    assert!(run("right", 63, &[256]).contains("a multiple of 32"));
    assert!(run("right", 64, &[32 * 1024, 16]).contains("more than 32768"));
    assert!(run("right", 96, &[256]).contains("at most 64"));
    assert!(run("right", 64, &[8]).contains("a multiple of 16"));
    assert!(
        run("right", 64, &[])
            .contains("1 buffers and 0 lengths of threadgroup memory, its signature has 1 and 1")
    );
    assert!(run("nothing", 64, &[256]).contains("no such kernel"));
    let shape = Shape { kernel: "right", grid: [1, 1, 1], threads: 64, memory: &[256] };
    let error = kernels().launch(shape, &mut [], &[], Order::Forward).unwrap_err();
    assert!(error.contains("0 buffers and 1 lengths"), "{error}");
}

/// Rounding is that of the half crate, which lily-model reads and writes bf16 with.
#[test]
fn bf16_is_rounded_to_nearest_even() {
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..100 {
        let mut values = [0.0f32; 64].map(|_| f32::from_bits(random.u32(..)));
        (values[0], values[1], values[2]) =
            (f32::MAX, f32::from_bits(0x3f80_8000), f32::from_bits(0x3f81_8000));
        let mut out = kernels().allocate(256, Guard::End);
        out.put_floats(&values);
        launch("round", &mut out, Order::Forward).unwrap();
        for (value, got) in values.iter().zip(out.floats()) {
            let expected = half::bf16::from_f32(*value).to_f32();
            assert!(
                got == expected || got.is_nan() && expected.is_nan(),
                "{value}: {got}, expected {expected}"
            );
        }
    }
}
