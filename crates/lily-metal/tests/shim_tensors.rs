//! As `shim.rs`, of the tensor operations of Metal 4.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::slice::from_mut;
use std::sync::OnceLock;

use common::{Guard, Kernels, Memory, ORDERS, Order, Shape};

/// Kernels of 64 threads with one buffer of 256 numbers and 512 of two bytes in threadgroup memory.
const SOURCE: &str = include_str!("shim/wrong_tensors.metal");

/// Where the operations read.
const OPERATIONS: &str = "called from MetalPerformancePrimitives.h:";

fn kernels() -> &'static Kernels {
    static KERNELS: OnceLock<&'static Kernels> = OnceLock::new();
    KERNELS.get_or_init(|| Kernels::compile(SOURCE))
}

fn launch(kernel: &str, out: &mut Memory, order: Order) -> Result<(), String> {
    let signature = kernels().signatures.iter().find(|s| s.name == kernel).unwrap();
    let memory = vec![1024; signature.threadgroup_memory()];
    let shape = Shape { kernel, grid: [1, 1, 1], threads: 64, memory: &memory };
    kernels().launch(shape, from_mut(out), &[(0, 0)], order)
}

/// Whole numbers, whose sums of products are exact.
fn matrix() -> Vec<f32> {
    (0..256).map(|i| (i * i % 23) as f32 - 9.0).collect()
}

fn run(kernel: &str, order: Order) -> Result<Vec<f32>, String> {
    let mut out = kernels().allocate(1024, Guard::End);
    out.put_floats(&matrix());
    launch(kernel, &mut out, order).map(|()| out.floats())
}

fn squared() -> Vec<f32> {
    let a = matrix();
    let dot = |r: usize, c: usize| (0..16).map(|k| a[16 * r + k] * a[16 * c + k]).sum::<f32>();
    (0..256).map(|i| dot(i / 16, i % 16)).collect()
}

#[test]
fn matrices_are_multiplied() {
    for order in ORDERS {
        assert_eq!(run("square", order).unwrap(), squared());
    }
}

#[test]
fn a_product_is_no_barrier() {
    let kernels = ["square_without_barrier", "square_overwritten"];
    for (kernel, order) in kernels.into_iter().flat_map(|kernel| ORDERS.map(|order| (kernel, order))) {
        let error = run(kernel, order).unwrap_err();
        assert!(error.contains("a race on threadgroup memory 0") && error.contains(OPERATIONS), "{error}");
    }
}

#[test]
fn what_was_never_set_is_nan() {
    assert!(run("square_of_nothing", Order::Forward).unwrap().iter().all(|x| x.is_nan()));
}

#[test]
fn wrong_use_of_tensors_is_refused() {
    for (kernel, why) in [
        ("square_of_everything", "outside of its memory"),
        ("square_by_some", "not all threads of a scope take part"),
        ("square_by_too_few", "another number of threads"),
        ("square_of_another_shape", "another shape"),
        ("square_of_overlapping_rows", "rows overlap"),
        ("square_of_odd_places", "multiples of 64 bytes"),
    ] {
        let error = run(kernel, Order::Forward).unwrap_err();
        assert!(error.starts_with(kernel) && error.contains(why), "{error}");
        // The next launch is unharmed.
        run("square", Order::Forward).unwrap();
    }
}

/// Rounding is that of the half crate, which the expected values are made with.
#[test]
fn half_is_rounded_to_nearest_even() {
    let mut random = fastrand::Rng::with_seed(1);
    let check = |values: &[f32; 256]| {
        let mut out = kernels().allocate(1024, Guard::End);
        out.put_floats(values);
        launch("round_to_half", &mut out, Order::Forward).unwrap();
        for (value, got) in values.iter().zip(out.floats()) {
            let expected = half::f16::from_f32(*value).to_f32();
            let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
            assert!(same, "{value:e}: {got:e}, expected {expected:e}");
        }
    };
    for _ in 0..100 {
        check(&[0.0; 256].map(|_: f32| f32::from_bits(random.u32(..))));
        // Those of half's own size, and halfway between two of them.
        check(&[0.0; 256].map(|_: f32| half::f16::from_bits(random.u16(..)).to_f32()));
        check(&[0.0; 256].map(|_: f32| {
            let bits = random.u16(..0x7bff);
            let [a, b] = [bits, bits + 1].map(|b| half::f16::from_bits(b).to_f32());
            (a + b) / 2.0
        }));
    }
}
