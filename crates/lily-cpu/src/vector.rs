//! Elementwise kernels and norms over slices of any length.

use crate::simd::{Lanes, WIDTH, load_some, store_some};

/// `out_i = f(out_i, x_i)`, for a `V` in scope. A macro, because a closure that is not inlined would be compiled without
/// the instructions of `V`.
macro_rules! update {
    ($out:expr, $x:expr, |$o:ident, $v:ident| $f:expr) => {{
        let (out, out_rest) = $out.as_chunks_mut::<WIDTH>();
        let (x, x_rest) = $x.as_chunks::<WIDTH>();
        for (out, x) in out.iter_mut().zip(x) {
            let ($o, $v) = (V::load(out), V::load(x));
            $f.store(out);
        }
        if !out_rest.is_empty() {
            let ($o, $v) = (load_some::<V>(out_rest), load_some::<V>(x_rest));
            store_some($f, out_rest);
        }
    }};
}

/// `out += x`.
#[inline(always)]
pub fn add<V: Lanes>(out: &mut [f32], x: &[f32]) {
    update!(out, x, |out, x| out.add(x));
}

/// `out += weight * x`.
#[inline(always)]
pub fn add_scaled<V: Lanes>(out: &mut [f32], x: &[f32], weight: f32) {
    update!(out, x, |out, x| x.mul_add(V::splat(weight), out));
}

/// `out = silu(out) * x`: the gate of a SwiGLU network with its other half.
#[inline(always)]
pub fn swiglu<V: Lanes>(out: &mut [f32], x: &[f32]) {
    update!(out, x, |out, x| out.silu().mul(x));
}

/// `out = out * silu(x)`.
#[inline(always)]
pub fn mul_silu<V: Lanes>(out: &mut [f32], x: &[f32]) {
    update!(out, x, |out, x| out.mul(x.silu()));
}

/// `out = out * sigmoid(x)`.
#[inline(always)]
pub fn mul_sigmoid<V: Lanes>(out: &mut [f32], x: &[f32]) {
    update!(out, x, |out, x| out.mul(x.sigmoid()));
}

/// `out *= factor`.
#[inline(always)]
pub fn scale<V: Lanes>(out: &mut [f32], factor: f32) {
    let (chunks, rest) = out.as_chunks_mut::<WIDTH>();
    for chunk in chunks {
        V::load(chunk).mul(V::splat(factor)).store(chunk);
    }
    rest.iter_mut().for_each(|x| *x *= factor);
}

/// `sum_i x_i y_i`.
#[inline(always)]
pub fn dot<V: Lanes>(x: &[f32], y: &[f32]) -> f32 {
    let (xs, x_rest) = x.as_chunks::<WIDTH>();
    let (ys, y_rest) = y.as_chunks::<WIDTH>();
    let mut sum = V::zero();
    for (x, y) in xs.iter().zip(ys) {
        sum = V::load(x).mul_add(V::load(y), sum);
    }
    if !x_rest.is_empty() {
        sum = load_some::<V>(x_rest).mul_add(load_some(y_rest), sum);
    }
    sum.sum()
}

/// `out = x / sqrt(mean(x^2) + eps) * gain`.
#[inline(always)]
pub fn rms_norm<V: Lanes>(x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
    let factor = 1.0 / (dot::<V>(x, x) / x.len() as f32 + eps).sqrt();
    out.copy_from_slice(x);
    update!(out, gain, |x, gain| x.mul(V::splat(factor)).mul(gain));
}

/// `x = x / sqrt(sum(x^2) + eps) * factor`.
#[inline(always)]
pub fn l2_normalise<V: Lanes>(x: &mut [f32], eps: f32, factor: f32) {
    let factor = factor / (dot::<V>(x, x) + eps).sqrt();
    scale::<V>(x, factor);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Isa, dispatch};
    use crate::math;

    fn numbers(n: usize, spread: f32) -> Vec<f32> {
        (0..n).map(|i| spread * ((i * 7919 % 1013) as f32 / 506.0 - 1.0)).collect()
    }

    /// Every instruction set that this machine has, against scalar code.
    #[test]
    fn kernels_agree_with_scalar_code() {
        for isa in Isa::available() {
            for n in [1, 15, 16, 17, 128, 200] {
                let (x, y) = (numbers(n, 90.0), numbers(n + 3, 5.0)[3..].to_vec());
                let close = |got: &[f32], want: &dyn Fn(usize) -> f32| {
                    for (i, got) in got.iter().enumerate() {
                        let want = want(i);
                        assert!(
                            (got - want).abs() <= 1e-6 * want.abs() + 1e-30,
                            "{isa:?}: {i}: {got} {want}"
                        );
                    }
                };
                let mut out = x.clone();
                dispatch!(isa, swiglu(&mut out => a1: &mut [f32], &y => a2: &[f32]));
                close(&out, &|i| math::silu(x[i]) * y[i]);
                let mut out = y.clone();
                dispatch!(isa, mul_sigmoid(&mut out => a1: &mut [f32], &x => a2: &[f32]));
                close(&out, &|i| y[i] * math::sigmoid(x[i]));
                let mut out = y.clone();
                dispatch!(isa, add_scaled(&mut out => a1: &mut [f32], &x => a2: &[f32], 0.3 => a3: f32));
                close(&out, &|i| f64::from(x[i]).mul_add(f64::from(0.3f32), f64::from(y[i])) as f32);
                let (mut out, mut want) = (vec![0.0; n], vec![0.0; n]);
                dispatch!(isa, rms_norm(&x => a1: &[f32], &y => a2: &[f32], 1e-6 => a3: f32, &mut out => a4: &mut [f32]));
                math::rms_norm(&x, &y, 1e-6, &mut want);
                assert!(out.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 1e-5), "{isa:?} {n}");
            }
        }
    }

    #[test]
    fn extremes_stay_what_they_are() {
        for isa in Isa::available() {
            let mut x = [0.0, -200.0, 200.0, f32::NAN, f32::INFINITY];
            let one = [1.0; 5];
            dispatch!(isa, swiglu(&mut x => a1: &mut [f32], &one => a2: &[f32]));
            assert!(x[0] == 0.0 && x[1].abs() < 1e-35 && x[2] == 200.0, "{isa:?} {x:?}");
            assert!(x[3].is_nan() && !x[4].is_finite(), "{isa:?} {x:?}");
            let (mut x, nan) = ([1.0; 2], [f32::NAN, -f32::NAN]);
            dispatch!(isa, mul_sigmoid(&mut x => a1: &mut [f32], &nan => a2: &[f32]));
            assert!(x.iter().all(|x| x.is_nan()), "{isa:?} {x:?}");
        }
    }
}
