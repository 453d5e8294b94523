//! Rotary angles for a language without f64.

use std::f64::consts::TAU;

/// By how much of a full turn each rotated pair moves a position, in units of 2^-64: `theta^(-2i / dims) / 2 pi` for `i < dims / 2`.
/// A position times that, in 64 bits without the carry, is its angle: whole turns drop out, and nothing is lost at long
/// positions as it is in f32.
pub fn turns(theta: f64, dims: usize) -> Vec<u64> {
    let turn = |i: usize| theta.powf(-2.0 * i as f64 / dims as f64) / TAU;
    (0..dims / 2).map(|i| (turn(i) * 2f64.powi(64)) as u64).collect()
}

#[cfg(test)]
mod tests {
    use std::f32::consts::PI;

    use super::*;

    /// As `attend` in `attention.metal` does it.
    fn angle(turn: u64, position: u32) -> f32 {
        (turn.wrapping_mul(u64::from(position)) >> 32) as u32 as i32 as f32 * (PI / 2_147_483_648.0)
    }

    #[test]
    fn angles_are_exact_at_every_position() {
        let turns = turns(1e7, 64);
        let mut expected = vec![(0.0, 0.0); 32];
        for position in [0, 1, 2, 100, 4_095, 65_537, 200_001, 262_143] {
            lily_cpu::math::rotary(position, 1e7, &mut expected);
            for (turn, (cos, sin)) in turns.iter().zip(&expected) {
                let angle = angle(*turn, position);
                assert!((angle.cos() - cos).abs() < 1e-6, "{position}: {} instead of {cos}", angle.cos());
                assert!((angle.sin() - sin).abs() < 1e-6, "{position}: {} instead of {sin}", angle.sin());
            }
        }
    }
}
