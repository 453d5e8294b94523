//! The Gated DeltaNet block. Its formulas are docs/model-spec.md, section 3; [`crate::reference`] has them plainly.

use std::sync::Arc;

use lily_model::config::GdnConfig;
use lily_model::weights::Gdn;
use rayon::prelude::*;

use crate::device::{Isa, dispatch};
use crate::forward::{Rows, Step};
use crate::math::{l2_normalise, rms_norm, sigmoid, silu, softplus};
use crate::matmul::{Product, product, products};
use crate::reference::L2_EPS;
use crate::simd::Lanes;
use crate::state::Recurrent;

/// Inputs of the delta rule for every token of a step.
struct Inputs {
    /// `[q | k | v]` behind the convolution, q and k normalised; `[tokens, channels]`.
    qkv: Vec<f32>,
    /// Decay per value head, `[tokens, value_heads]`.
    alpha: Vec<f32>,
    /// Write strength per value head, `[tokens, value_heads]`.
    beta: Vec<f32>,
}

/// One value head of one sequence.
struct Head<'a> {
    head: usize,
    rows: Rows,
    /// `[key_dim, value_dim]`.
    state: &'a mut [f32],
    /// `[tokens of the sequence, value_dim]`.
    out: &'a mut [f32],
}

/// Mixes `h`, `[tokens, hidden]`, along each sequence of the step; advances `states`, one per segment.
pub fn forward(step: &Step<'_>, w: &Gdn, h: &[f32], states: Vec<&mut Arc<Recurrent>>) -> Vec<f32> {
    let g = &step.config.gdn;
    let n = step.tokens();
    let mut u = vec![0.0; n * g.conv_channels()];
    let mut z = vec![0.0; n * g.value_width()];
    let (mut b, mut a) = (vec![0.0; n * g.value_heads], vec![0.0; n * g.value_heads]);
    products(
        step.device,
        &mut [
            Product { w: &w.in_proj_qkv, x: h, out: &mut u },
            Product { w: &w.in_proj_z, x: h, out: &mut z },
            Product { w: &w.in_proj_b, x: h, out: &mut b },
            Product { w: &w.in_proj_a, x: h, out: &mut a },
        ],
    );
    let mut states: Vec<&mut Recurrent> = states.into_iter().map(Arc::make_mut).collect();
    let mut qkv = vec![0.0; u.len()];
    for (rows, state) in step.rows.iter().zip(&mut states) {
        let channels = rows.range(g.conv_channels());
        convolve(g, &w.conv, &u[channels.clone()], &mut state.conv, &mut qkv[channels]);
    }
    qkv.par_chunks_exact_mut(g.conv_channels()).for_each(|token| normalise(g, token));
    for (a, (a_log, dt_bias)) in a.iter_mut().zip(w.a_log.iter().zip(&w.dt_bias).cycle()) {
        *a = (-a_log.exp() * softplus(*a + dt_bias)).exp();
    }
    b.iter_mut().for_each(|b| *b = sigmoid(*b));
    let inputs = Inputs { qkv, alpha: a, beta: b };
    let mut o = delta_rule(step, &inputs, &mut states);
    gate(step, &w.norm, &z, &mut o);
    product(step.device, &w.out_proj, &o)
}

/// Depthwise causal convolution and SiLU over one sequence's new inputs `u`, `[tokens, channels]`; `past`
/// becomes the last `taps - 1` inputs.
fn convolve(g: &GdnConfig, taps: &[f32], u: &[f32], past: &mut [f32], out: &mut [f32]) {
    let (channels, kernel) = (g.conv_channels(), g.conv_kernel);
    let input = |i: usize| -> &[f32] {
        match i.checked_sub(kernel - 1) {
            None => &past[i * channels..][..channels],
            Some(t) => &u[t * channels..][..channels],
        }
    };
    out.par_chunks_exact_mut(channels).enumerate().for_each(|(t, out)| {
        for j in 0..kernel {
            for (ch, (o, u)) in out.iter_mut().zip(input(t + j)).enumerate() {
                *o += taps[ch * kernel + j] * u;
            }
        }
        out.iter_mut().for_each(|o| *o = silu(*o));
    });
    let tokens = u.len() / channels;
    let keep = past.len();
    match tokens.checked_sub(kernel - 1) {
        Some(_) => past.copy_from_slice(&u[u.len() - keep..]),
        None => {
            past.copy_within(u.len().., 0);
            past[keep - u.len()..].copy_from_slice(u);
        }
    }
}

/// L2-normalises the query and key heads of one token.
fn normalise(g: &GdnConfig, token: &mut [f32]) {
    let (q, rest) = token.split_at_mut(g.key_heads * g.key_dim);
    let k = &mut rest[..g.key_heads * g.key_dim];
    q.chunks_exact_mut(g.key_dim).for_each(|q| l2_normalise(q, L2_EPS, (g.key_dim as f32).powf(-0.5)));
    k.chunks_exact_mut(g.key_dim).for_each(|k| l2_normalise(k, L2_EPS, 1.0));
}

/// Runs the recurrence, heads side by side. Returns `[tokens, value_heads, value_dim]`.
fn delta_rule(step: &Step<'_>, inputs: &Inputs, states: &mut [&mut Recurrent]) -> Vec<f32> {
    let g = &step.config.gdn;
    let mut by_head = vec![0.0; step.tokens() * g.value_width()];
    let mut rest = by_head.as_mut_slice();
    let mut heads = Vec::new();
    for (&rows, state) in step.rows.iter().zip(states) {
        let (mine, others) = rest.split_at_mut(rows.len * g.value_width());
        rest = others;
        let states = state.state.chunks_exact_mut(g.key_dim * g.value_dim);
        let outs = mine.chunks_exact_mut(rows.len * g.value_dim);
        heads.extend(states.zip(outs).enumerate().map(|(head, (state, out))| Head {
            head,
            rows,
            state,
            out,
        }));
    }
    heads.into_par_iter().for_each(|head| head.run(g, inputs, step.device.isa));
    let mut out = vec![0.0; by_head.len()];
    for rows in &step.rows {
        let range = rows.range(g.value_width());
        let by_head = &by_head[range.clone()];
        out[range].par_chunks_exact_mut(g.value_width()).enumerate().for_each(|(t, out)| {
            for (head, out) in out.chunks_exact_mut(g.value_dim).enumerate() {
                out.copy_from_slice(&by_head[(head * rows.len + t) * g.value_dim..][..g.value_dim]);
            }
        });
    }
    out
}

impl Head<'_> {
    fn run(self, g: &GdnConfig, inputs: &Inputs, isa: Isa) {
        let (dk, dv) = (g.key_dim, g.value_dim);
        let key_head = self.head / (g.value_heads / g.key_heads);
        let mut error = vec![0.0; dv];
        for (t, out) in self.out.chunks_exact_mut(dv).enumerate() {
            let token = self.rows.first + t;
            let qkv = &inputs.qkv[token * g.conv_channels()..][..g.conv_channels()];
            let q = &qkv[key_head * dk..][..dk];
            let k = &qkv[(g.key_heads + key_head) * dk..][..dk];
            let v = &qkv[2 * g.key_heads * dk + self.head * dv..][..dv];
            let gate = token * g.value_heads + self.head;
            let input = DeltaInput { q, k, v, alpha: inputs.alpha[gate], beta: inputs.beta[gate] };
            let (state, error) = (&mut *self.state, &mut error[..]);
            dispatch!(isa, delta_step(state: &mut [f32], input: DeltaInput<'_>, error: &mut [f32], out: &mut [f32]));
        }
    }
}

/// What one token brings to one head.
struct DeltaInput<'a> {
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    alpha: f32,
    beta: f32,
}

/// One token of one head: decay, error against the decayed state, update, readout. `error` is scratch.
#[inline(always)]
fn delta_step<V: Lanes>(state: &mut [f32], x: DeltaInput<'_>, error: &mut [f32], out: &mut [f32]) {
    let dv = x.v.len();
    out.fill(0.0);
    for (row, k) in state.chunks_exact_mut(dv).zip(x.k) {
        for (s, o) in row.iter_mut().zip(out.iter_mut()) {
            *s *= x.alpha;
            *o = V::fma(*s, *k, *o);
        }
    }
    // `out` held S^T k; from here on it gathers S^T q.
    for ((e, v), o) in error.iter_mut().zip(x.v).zip(out.iter_mut()) {
        *e = x.beta * (v - *o);
        *o = 0.0;
    }
    for ((row, k), q) in state.chunks_exact_mut(dv).zip(x.k).zip(x.q) {
        for ((s, e), o) in row.iter_mut().zip(error.iter()).zip(out.iter_mut()) {
            *s = V::fma(*k, *e, *s);
            *o = V::fma(*q, *s, *o);
        }
    }
}

/// RMS norm of each head, then the gate: `o = rms(o) * w * silu(z)`.
fn gate(step: &Step<'_>, gain: &[f32], z: &[f32], o: &mut [f32]) {
    let dv = step.config.gdn.value_dim;
    o.par_chunks_exact_mut(dv).zip(z.par_chunks_exact(dv)).for_each_init(
        || vec![0.0; dv],
        |normed, (o, z)| {
            rms_norm(o, gain, step.config.rms_norm_eps, normed);
            for ((o, y), z) in o.iter_mut().zip(normed).zip(z) {
                *o = *y * silu(*z);
            }
        },
    );
}
