//! Scalar functions and norms, f32, as docs/model-spec.md writes them.

/// `1 / (1 + e^-x)`.
#[inline]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `x * sigmoid(x)`.
#[inline]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

/// `ln(1 + e^x)`, without overflow.
#[inline]
pub fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// `out = x / sqrt(mean(x^2) + eps) * gain`.
pub fn rms_norm(x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
    let mean = sum_of_squares(x) / x.len() as f32;
    let scale = 1.0 / (mean + eps).sqrt();
    for ((o, x), g) in out.iter_mut().zip(x).zip(gain) {
        *o = x * scale * g;
    }
}

/// `x = x / sqrt(sum(x^2) + eps) * scale`.
pub fn l2_normalise(x: &mut [f32], eps: f32, scale: f32) {
    let factor = scale / (sum_of_squares(x) + eps).sqrt();
    x.iter_mut().for_each(|x| *x *= factor);
}

fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 8];
    let (chunks, rest) = x.as_chunks::<8>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += x * x;
        }
    }
    lanes.iter().sum::<f32>() + rest.iter().map(|x| x * x).sum::<f32>()
}

/// `x = softmax(x)`.
pub fn softmax(x: &mut [f32]) {
    let max = x.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
    let mut sum = 0.0;
    for x in x.iter_mut() {
        *x = (*x - max).exp();
        sum += *x;
    }
    x.iter_mut().for_each(|x| *x /= sum);
}

/// Indices of the `chosen.len()` largest values, falling; of equal ones the smaller index first. There must be as
/// many values.
pub fn top_k(x: &[f32], chosen: &mut [usize]) {
    assert!(chosen.len() <= x.len());
    let k = chosen.len();
    let mut found = 0;
    for i in 0..x.len() {
        // Those before which `i` comes: a tie goes to the one that was there.
        let mut place = found;
        while place > 0 && x[chosen[place - 1]].total_cmp(&x[i]).is_lt() {
            place -= 1;
        }
        if place < k {
            found = (found + 1).min(k);
            chosen[place..found].rotate_right(1);
            chosen[place] = i;
        }
    }
}

/// Cosine and sine of the rotary angles at a position: `angle_i = position * theta^(-2i / dims)`, for
/// `i < dims / 2 = out.len()`. In f64: at position 262,143 an f32 angle would be off by 0.01.
pub fn rotary(position: u32, theta: f64, out: &mut [(f32, f32)]) {
    let half = out.len() as f64;
    for (i, out) in out.iter_mut().enumerate() {
        let angle = f64::from(position) * theta.powf(-(i as f64) / half);
        *out = (angle.cos() as f32, angle.sin() as f32);
    }
}

/// Rotates the pairs `(i, i + n)` of a head, `n = angles.len()`; the other dimensions pass.
pub fn rotate(head: &mut [f32], angles: &[(f32, f32)]) {
    let (low, high) = head.split_at_mut(angles.len());
    for ((a, b), (cos, sin)) in low.iter_mut().zip(high).zip(angles) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_stay_finite() {
        assert_eq!((sigmoid(-200.0), sigmoid(200.0)), (0.0, 1.0));
        assert_eq!((silu(-200.0), silu(200.0)), (-0.0, 200.0));
        assert_eq!((softplus(-200.0), softplus(200.0)), (0.0, 200.0));
    }

    #[test]
    fn top_k_takes_the_smaller_index_among_equals() {
        let mut chosen = [0; 3];
        top_k(&[1.0, 3.0, 3.0, 2.0, 3.0, 0.0], &mut chosen);
        assert_eq!(chosen, [1, 2, 4]);
        top_k(&[f32::NAN, 0.0, 1.0], &mut chosen);
        assert_eq!(chosen, [0, 2, 1]);
    }

    #[test]
    fn rotation_leaves_the_rest_of_the_head_alone() {
        let mut head = [1.0, 2.0, 3.0, 4.0, 5.0];
        rotate(&mut head, &[(0.0, 1.0), (1.0, 0.0)]);
        assert_eq!(head, [-3.0, 2.0, 1.0, 4.0, 5.0]);
    }
}
