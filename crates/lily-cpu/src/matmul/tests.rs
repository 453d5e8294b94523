//! Products in every instruction set of this machine against plain f64 sums.

use lily_model::config::Affine;
use lily_model::files::Bytes;
use lily_model::matrix::{FloatType, Floats, Form, Matrix};
use proptest::prelude::*;

use super::*;
use crate::device::Isa;

/// SplitMix64.
fn numbers(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// From -1 to 1.
fn reals(n: usize, seed: u64) -> Vec<f32> {
    let mut next = numbers(seed);
    (0..n).map(|_| (next() >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn floats(dtype: FloatType, values: &[f32]) -> Floats {
    let bytes = |x: &f32| match dtype {
        FloatType::F32 => x.to_le_bytes().to_vec(),
        FloatType::F16 => half::f16::from_f32(*x).to_le_bytes().to_vec(),
        FloatType::Bf16 => half::bf16::from_f32(*x).to_le_bytes().to_vec(),
    };
    Floats { dtype, data: Bytes::new(values.iter().flat_map(bytes).collect::<Vec<u8>>()) }
}

fn matrix(rows: usize, cols: usize, affine: Affine, dtype: FloatType, spread: f32, seed: u64) -> Matrix {
    let mut next = numbers(seed);
    let codes: Vec<u8> = (0..rows * cols * affine.bits / 8).map(|_| next() as u8).collect();
    let scaled = |factor: f32, seed| {
        reals(rows * cols / affine.group_size, seed).iter().map(|x| x * factor).collect::<Vec<_>>()
    };
    let scales = floats(dtype, &scaled(spread, seed + 1));
    let biases = floats(dtype, &scaled(8.0 * spread, seed + 2));
    Matrix { rows, cols, form: Form::Affine { affine, codes: Bytes::new(codes), scales, biases } }
}

/// `x W^T` in f64, and the sum of magnitudes that rounding errors are relative to.
fn plain(w: &Matrix, x: &[f32]) -> Vec<(f64, f64)> {
    let mut row = vec![0.0; w.cols];
    let mut out = vec![(0.0, 0.0); x.len() / w.cols * w.rows];
    for r in 0..w.rows {
        w.read_row(r, &mut row);
        for (t, x) in x.chunks_exact(w.cols).enumerate() {
            let terms = || row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
            out[t * w.rows + r] = (terms().sum(), terms().map(f64::abs).sum());
        }
    }
    out
}

/// What int8 activations stand for.
fn rounded(device: &Device, x: &[f32], cols: usize) -> Vec<f32> {
    let storage = Storage::quantise(device, x, cols);
    let q = storage.whole();
    let mut out = vec![0.0; x.len()];
    for (t, out) in out.chunks_exact_mut(cols).enumerate() {
        for (i, out) in out.iter_mut().enumerate() {
            let at = i / BLOCK * q.tokens + t;
            let place = i % BLOCK / 8 * 8 + i % 2 * 4 + i % 8 / 2;
            *out = q.scales[at] * f32::from(q.codes[at * BLOCK + place]);
        }
    }
    out
}

fn check(w: &Matrix, x: &[f32]) {
    for exact in [true, false] {
        let mut first: Option<Vec<f32>> = None;
        for isa in Isa::available() {
            let device = Device::new(Some(2), isa, exact).unwrap_or_else(|e| panic!("{e}"));
            let got = product(&device, w, x);
            let x = if takes_int8(&device, w) { rounded(&device, x, w.cols) } else { x.to_vec() };
            for (i, (got, (want, size))) in got.iter().zip(plain(w, &x)).enumerate() {
                let error = (f64::from(*got) - want).abs();
                assert!(error <= 1e-5 * size, "{isa:?}, exact {exact}, value {i}: {got}, expected {want}");
            }
            // Without fused multiply-add the last bit may differ.
            if isa != Isa::Portable || cfg!(target_arch = "aarch64") {
                assert!(*first.get_or_insert_with(|| got.to_vec()) == *got, "{isa:?} differs, exact {exact}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn any_shape(
        rows in 1usize..70,
        blocks in 1usize..20,
        group_size in prop::sample::select(vec![32usize, 64, 128]),
        bits in prop::sample::select(vec![4usize, 4, 4, 8]),
        dtype in prop::sample::select(vec![FloatType::Bf16, FloatType::Bf16, FloatType::F16, FloatType::F32]),
        tokens in prop_oneof![1usize..8, 100usize..300],
        seed: u64,
    ) {
        let (cols, seed) = (blocks * group_size, seed >> 8);
        let w = matrix(rows, cols, Affine { bits, group_size }, dtype, 0.01, seed);
        check(&w, &reals(tokens * cols, seed + 3));
    }
}

#[test]
fn extreme_scales() {
    for (weights, activations) in [(1e-20, 1.0), (1e10, 1e10), (1.0, 1e-30), (1e-3, 1e30)] {
        let w = matrix(33, 192, Affine { bits: 4, group_size: 64 }, FloatType::F32, weights, 5);
        let x: Vec<f32> = reals(3 * 192, 6).iter().map(|x| x * activations).collect();
        check(&w, &x);
    }
}

#[test]
fn the_largest_codes_and_activations_do_not_overflow() {
    let (rows, cols) = (17, 256);
    let one = |n| floats(FloatType::Bf16, &vec![1.0; n]);
    let affine = Affine { bits: 4, group_size: 64 };
    let codes = Bytes::new(vec![0xffu8; rows * cols / 2]);
    let form = Form::Affine { affine, codes, scales: one(rows * 4), biases: one(rows * 4) };
    for sign in [1.0, -1.0] {
        check(&Matrix { rows, cols, form: form.clone() }, &vec![sign; 2 * cols]);
    }
}

/// A value that is not finite spoils its own token and no other.
#[test]
fn nan_stays_with_its_token() {
    let w = matrix(20, 128, Affine { bits: 4, group_size: 64 }, FloatType::Bf16, 0.01, 1);
    let mut x = reals(5 * 128, 2);
    x[2 * 128 + 70] = f32::NAN;
    for isa in Isa::available() {
        let device = Device::new(Some(1), isa, false).unwrap_or_else(|e| panic!("{e}"));
        for (i, y) in product(&device, &w, &x).iter().enumerate() {
            assert_eq!(y.is_nan(), i / 20 == 2, "{isa:?} {i}");
        }
    }
}
