//! The delta rule of kernels/gdn.cu against the same in f64 (docs/model-spec.md, section 3).

use lily_cuda::driver::Context;
use lily_cuda::gdn;
use lily_model::config::{Config, GdnConfig};

use crate::common::random::{self, Numbers};
use crate::machine::{Emulator, Shape};
use crate::wide::THREADS;

/// Two value heads a key head; keys that are no multiple of all that threads are dealt in.
pub fn config() -> Config {
    let mut config = random::config(&[]);
    config.gdn = GdnConfig { key_heads: 2, value_heads: 4, key_dim: 72, value_dim: 128, conv_kernel: 4 };
    config
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Inputs of a launch; rows of each segment.
struct Inputs {
    rows: Vec<usize>,
    projected: Vec<f32>,
    taps: Vec<f32>,
    a_log: Vec<f32>,
    bias: Vec<f32>,
    gain: Vec<f32>,
    states: Vec<f32>,
    convs: Vec<f32>,
}

/// What a segment of so many rows reads, by index: the slot of its state and which of the two conv states.
fn place(segment: usize) -> (usize, usize) {
    (segment * 2 % 5, segment % 2)
}
const SLOTS: usize = 5;

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub enum Kernel {
    /// `delta_1`: 32 columns of a head each.
    Columns,
    /// `delta_4`: whole heads.
    Heads,
}

/// Runs a kernel for segments of `rows` rows.
pub fn run(e: &Emulator, c: &Config, kernel: Kernel, rows: &[usize], seed: u64) -> Result<(), String> {
    let (g, mut numbers, all) = (&c.gdn, Numbers(seed), rows.iter().sum::<usize>());
    let (value, past) = (g.value_width(), g.conv_kernel - 1);
    let channels = 2 * g.key_heads * g.key_dim + value;
    let width = channels + value + 2 * g.value_heads;
    let (state, conv) = (g.value_heads * g.key_dim * g.value_dim, 2 * past * channels);
    let mut reals = |n| numbers.reals(n, 0.0, 1.0);
    let inputs = Inputs {
        rows: rows.to_vec(),
        projected: reals(all * width),
        taps: reals(channels * g.conv_kernel),
        a_log: reals(g.value_heads),
        bias: reals(g.value_heads),
        gain: reals(g.value_dim),
        states: reals(SLOTS * state),
        convs: reals(SLOTS * conv),
    };
    let mut first = 0;
    let mut segments = Vec::new();
    for (i, &rows) in rows.iter().enumerate() {
        let (slot, parity) = place(i);
        segments.extend([first, rows as u32, 0, slot as u32, u32::MAX, parity as u32, 0, 0]);
        first += rows as u32;
    }
    let segments = e.words(&segments);
    let vectors =
        [&inputs.projected, &inputs.taps, &inputs.a_log, &inputs.bias, &inputs.gain].map(|v| e.floats(v));
    let (states, convs) = (e.floats(&inputs.states), e.floats(&inputs.convs));
    let (gated, squares) = (e.unwritten(all * value * 4), e.unwritten(all * value / 32 * 4));
    let mut arguments = vec![segments.address()];
    arguments.extend(vectors.iter().map(|v| v.address()));
    arguments.extend([
        states.address(),
        state as u64,
        convs.address(),
        conv as u64,
        gated.address(),
        squares.address(),
        0,
        0,
    ]);
    let heads = (g.value_heads * rows.len()) as u32;
    let shape = Shape { grid: [heads * 4, 1], threads: THREADS, cluster: 1, together: 4, shared: 0 };
    let (name, shape) = match kernel {
        Kernel::Columns => ("delta_1", shape),
        Kernel::Heads => {
            let shared = gdn::shared_memory(g, &Context::h200()).unwrap();
            ("delta_4", Shape { grid: [heads, 1], threads: 128, shared, ..shape })
        }
    };
    e.launch(name, shape, &arguments, seed)?;
    let expected = inputs.expected(c);
    let got = [gated.floats(), squares.floats(), states.floats(), convs.floats()];
    for ((what, got), expected) in ["gated", "squares", "states", "convs"].into_iter().zip(got).zip(expected)
    {
        for (i, (&got, expected)) in got.iter().zip(expected).enumerate() {
            let off = (f64::from(got) - expected).abs();
            // Sums of 72 products in f32, over a few rows.
            if off.is_nan() || off > 2e-5 * (1.0 + expected.abs()) {
                return Err(format!("{name}, {what} {i}: {got}, expected {expected}"));
            }
        }
    }
    Ok(())
}

impl Inputs {
    /// Gated readouts, sums of squares of 32 columns, states and conv states.
    fn expected(&self, c: &Config) -> [Vec<f64>; 4] {
        let g = &c.gdn;
        let (keys, value, past) = (g.key_heads * g.key_dim, g.value_width(), g.conv_kernel - 1);
        let channels = 2 * keys + value;
        let width = channels + value + 2 * g.value_heads;
        let wide = |v: &[f32]| v.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let (mut states, mut convs) = (wide(&self.states), wide(&self.convs));
        let (mut gated, mut squares, mut row) = (Vec::new(), Vec::new(), 0);
        for (segment, &rows) in self.rows.iter().enumerate() {
            let (slot, parity) = place(segment);
            let conv = &mut convs[slot * 2 * past * channels..][..2 * past * channels];
            let mut window = conv[parity * past * channels..][..past * channels].to_vec();
            for _ in 0..rows {
                let u = wide(&self.projected[row * width..][..width]);
                row += 1;
                window.extend(&u[..channels]);
                let mixed: Vec<f64> = (0..channels)
                    .map(|ch| {
                        silu(
                            (0..=past)
                                .map(|j| {
                                    f64::from(self.taps[ch * (past + 1) + j]) * window[j * channels + ch]
                                })
                                .sum(),
                        )
                    })
                    .collect();
                window.drain(..channels);
                for head in 0..g.value_heads {
                    let key_head = head / (g.value_heads / g.key_heads);
                    let unit = |v: &[f64]| {
                        let norm = (v.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                        v.iter().map(|x| x / norm).collect::<Vec<f64>>()
                    };
                    let q = unit(&mixed[key_head * g.key_dim..][..g.key_dim]);
                    let k = unit(&mixed[keys + key_head * g.key_dim..][..g.key_dim]);
                    let v = &mixed[2 * keys + head * g.value_dim..][..g.value_dim];
                    let (z, b, a) = (
                        channels + head * g.value_dim,
                        channels + value + head,
                        channels + value + g.value_heads + head,
                    );
                    let softplus = (u[a] + f64::from(self.bias[head])).exp().ln_1p();
                    let alpha = (-f64::from(self.a_log[head]).exp() * softplus).exp();
                    let beta = 1.0 / (1.0 + (-u[b]).exp());
                    let state = &mut states[(slot * g.value_heads + head) * g.key_dim * g.value_dim..]
                        [..g.key_dim * g.value_dim];
                    let mut outs = Vec::new();
                    for column in 0..g.value_dim {
                        let at = |i: usize| i * g.value_dim + column;
                        let read: f64 = (0..g.key_dim).map(|i| alpha * state[at(i)] * k[i]).sum();
                        let step = beta * (v[column] - read);
                        (0..g.key_dim).for_each(|i| state[at(i)] = alpha * state[at(i)] + k[i] * step);
                        let out = (0..g.key_dim).map(|i| state[at(i)] * q[i]).sum::<f64>()
                            / (g.key_dim as f64).sqrt();
                        gated.push(out * f64::from(self.gain[column]) * silu(u[z + column]));
                        outs.push(out);
                    }
                    squares.extend(outs.chunks(32).map(|o| o.iter().map(|x| x * x).sum::<f64>()));
                }
            }
            conv[(1 - parity) * past * channels..][..past * channels].copy_from_slice(&window);
        }
        [gated, squares, states, convs]
    }
}
