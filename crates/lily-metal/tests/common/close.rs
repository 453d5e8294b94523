//! How near results must be to what is expected.

/// Of the largest value.
pub const TOLERANCE: f32 = 2e-5;
/// Of sums of numbers that were rounded to bf16.
pub const BF16_TOLERANCE: f32 = 1e-2;

/// What is not expected (NaN) must not be there either.
#[track_caller]
pub fn assert_close(what: &str, got: &[f32], expected: &[f32], tolerance: f32) {
    assert_within(what, got, expected, tolerance, 0.0);
}

/// Of values that are kept as bf16: one between two of them may fall either way, and what is left of numbers that cancel is as
/// wrong as these are.
#[track_caller]
pub fn assert_close_in_bf16(what: &str, got: &[f32], expected: &[f32]) {
    assert_within(what, got, expected, TOLERANCE, 1.0 / 128.0);
}

/// The same of values that are kept as half.
#[track_caller]
pub fn assert_close_in_half(what: &str, got: &[f32], expected: &[f32]) {
    assert_within(what, got, expected, TOLERANCE, 1.0 / 1024.0);
}

/// Within a share of the largest value and one of the value itself.
#[track_caller]
fn assert_within(what: &str, got: &[f32], expected: &[f32], of_largest: f32, of_itself: f32) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let size = expected.iter().filter(|x| !x.is_nan()).fold(0.0f32, |m, x| m.max(x.abs()));
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        let close = (a - b).abs() <= of_largest * size + of_itself * b.abs() || a.is_nan() && b.is_nan();
        assert!(close, "{what}: {a} at {i}, expected {b} of up to {size}");
    }
}
