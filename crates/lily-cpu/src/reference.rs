//! The oracle: the model in plain f32, one token at a time, shaped like its specification. It shares only
//! scalar functions with the fast path, favours being read over speed, and reads every matrix row by row
//! through [`Matrix::read_row`], the definition of what a stored matrix means.

use lily_model::config::{Config, GdnConfig};
use lily_model::matrix::Matrix;
use lily_model::weights::{Attention, Expert, Gdn, Layer, Mixer, Moe, Weights};

use crate::math::{l2_normalise, rms_norm, rotary, rotate, sigmoid, silu, softmax, softplus, top_k};
use crate::tap::{LayerTap, Point, Tap};

/// What q and k norms of Gated DeltaNet add to the sum of squares.
pub const L2_EPS: f32 = 1e-6;

/// The model.
#[derive(Clone, Copy)]
pub struct Reference<'a> {
    /// Shapes and constants.
    pub config: &'a Config,
    /// Weights.
    pub weights: &'a Weights,
}

/// State of one sequence.
#[derive(Clone, Debug, Default)]
pub struct State {
    position: u32,
    layers: Vec<LayerState>,
}

/// State of one layer. Only the fields of its kind are used.
#[derive(Clone, Debug, Default)]
pub struct LayerState {
    /// Gated DeltaNet: the last `taps - 1` inputs of the convolution, oldest first, `[taps - 1, channels]`.
    pub conv: Vec<f32>,
    /// Gated DeltaNet: `[value_heads, key_dim, value_dim]`.
    pub recurrent: Vec<f32>,
    /// Attention: keys, normed and rotated, `[tokens, kv_heads, head_dim]`.
    pub k: Vec<f32>,
    /// Attention: values, `[tokens, kv_heads, head_dim]`.
    pub v: Vec<f32>,
}

impl State {
    /// State behind so many tokens, of one's own making.
    pub fn new(position: u32, layers: Vec<LayerState>) -> Self {
        Self { position, layers }
    }

    /// State of layer `i`; empty before the first token.
    pub fn layer(&self, i: usize) -> Option<&LayerState> {
        self.layers.get(i)
    }
}

/// `W x`.
pub fn matvec(w: &Matrix, x: &[f32]) -> Vec<f32> {
    let mut row = vec![0.0; w.cols];
    let dot = |r| {
        w.read_row(r, &mut row);
        row.iter().zip(x).map(|(w, x)| w * x).sum()
    };
    (0..w.rows).map(dot).collect()
}

fn normed(x: &[f32], gain: &[f32], eps: f32) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    rms_norm(x, gain, eps, &mut out);
    out
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

impl Reference<'_> {
    /// Feeds a token. Returns the final-normed hidden state; `tap` sees what happens inside.
    pub fn step(&self, token: u32, state: &mut State, tap: Tap<'_>) -> Vec<f32> {
        let (c, w) = (self.config, self.weights);
        state.layers.resize_with(w.layers.len(), LayerState::default);
        let mut x = vec![0.0; c.hidden_size];
        w.embedding.read_row(token as usize, &mut x);
        for (i, (layer, st)) in w.layers.iter().zip(&mut state.layers).enumerate() {
            self.layer(layer, &mut x, st, state.position, &mut |point, values| tap(i, point, values));
        }
        state.position += 1;
        normed(&x, &w.norm, c.rms_norm_eps)
    }

    /// Scores of the next token, `[vocab]`, from a final-normed hidden state.
    pub fn logits(&self, hidden: &[f32]) -> Vec<f32> {
        matvec(&self.weights.lm_head, hidden)
    }

    fn layer(&self, w: &Layer, x: &mut [f32], st: &mut LayerState, position: u32, tap: LayerTap<'_>) {
        let eps = self.config.rms_norm_eps;
        let h = normed(x, &w.input_norm, eps);
        let mixed = match &w.mixer {
            Mixer::Gdn(w) => self.gdn(w, &h, st),
            Mixer::Attention(w) => self.attention(w, &h, st, position),
        };
        tap(Point::Mixer, &mixed);
        add(x, &mixed);
        let y = self.moe(&w.moe, &normed(x, &w.post_attention_norm, eps), tap);
        tap(Point::Moe, &y);
        add(x, &y);
        tap(Point::Out, x);
    }

    fn gdn(&self, w: &Gdn, h: &[f32], st: &mut LayerState) -> Vec<f32> {
        let g = &self.config.gdn;
        let (dk, dv) = (g.key_dim, g.value_dim);
        let z = matvec(&w.in_proj_z, h);
        let b = matvec(&w.in_proj_b, h);
        let a = matvec(&w.in_proj_a, h);
        let mut u = causal_conv(g, &w.conv, matvec(&w.in_proj_qkv, h), &mut st.conv);
        let (q, kv) = u.split_at_mut(g.key_heads * dk);
        let (k, v) = kv.split_at_mut(g.key_heads * dk);
        q.chunks_exact_mut(dk).for_each(|q| l2_normalise(q, L2_EPS, (dk as f32).powf(-0.5)));
        k.chunks_exact_mut(dk).for_each(|k| l2_normalise(k, L2_EPS, 1.0));
        st.recurrent.resize(g.state_len(), 0.0);
        let mut out = vec![0.0; g.value_width()];
        for head in 0..g.value_heads {
            let key_head = head / (g.value_heads / g.key_heads);
            let alpha = (-w.a_log[head].exp() * softplus(a[head] + w.dt_bias[head])).exp();
            let state = &mut st.recurrent[head * dk * dv..][..dk * dv];
            let qk = key_head * dk..(key_head + 1) * dk;
            let o = delta_rule(state, &q[qk.clone()], &k[qk], &v[head * dv..][..dv], alpha, sigmoid(b[head]));
            let o = normed(&o, &w.norm, self.config.rms_norm_eps);
            for ((out, o), z) in out[head * dv..].iter_mut().zip(&o).zip(&z[head * dv..]) {
                *out = o * silu(*z);
            }
        }
        matvec(&w.out_proj, &out)
    }

    fn attention(&self, w: &Attention, h: &[f32], st: &mut LayerState, position: u32) -> Vec<f32> {
        let (a, eps) = (&self.config.attention, self.config.rms_norm_eps);
        let d = a.head_dim;
        let mut angles = vec![(0.0, 0.0); a.rotary_dim / 2];
        rotary(position, a.rope_theta, &mut angles);
        let qg = matvec(&w.q_proj, h);
        let mut k = matvec(&w.k_proj, h);
        for k in k.chunks_exact_mut(d) {
            k.copy_from_slice(&normed(k, &w.k_norm, eps));
            rotate(k, &angles);
        }
        st.k.extend_from_slice(&k);
        st.v.extend(matvec(&w.v_proj, h));
        let mut out = vec![0.0; a.query_width()];
        for (head, (qg, out)) in qg.chunks_exact(2 * d).zip(out.chunks_exact_mut(d)).enumerate() {
            let (q, gate) = qg.split_at(d);
            let mut q = normed(q, &w.q_norm, eps);
            rotate(&mut q, &angles);
            let kv_head = head / (a.heads / a.kv_heads);
            let of_head = |cache: &[f32]| -> Vec<Vec<f32>> {
                cache.chunks_exact(a.kv_width()).map(|t| t[kv_head * d..][..d].to_vec()).collect()
            };
            let score =
                |k: &Vec<f32>| q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>() * (d as f32).powf(-0.5);
            let mut p: Vec<f32> = of_head(&st.k).iter().map(score).collect();
            softmax(&mut p);
            for (p, v) in p.iter().zip(of_head(&st.v)) {
                out.iter_mut().zip(v).for_each(|(o, v)| *o += p * v);
            }
            out.iter_mut().zip(gate).for_each(|(o, g)| *o *= sigmoid(*g));
        }
        matvec(&w.o_proj, &out)
    }

    fn moe(&self, w: &Moe, h: &[f32], tap: LayerTap<'_>) -> Vec<f32> {
        let mut p = matvec(&w.router, h);
        softmax(&mut p);
        let mut chosen = vec![0; self.config.moe.experts_per_token];
        top_k(&p, &mut chosen);
        let total: f32 = chosen.iter().map(|&e| p[e]).sum();
        let mut out = vec![0.0; h.len()];
        for &e in &chosen {
            let y = swiglu(&w.experts[e], h);
            out.iter_mut().zip(y).for_each(|(o, y)| *o += p[e] / total * y);
        }
        tap(Point::Experts, &chosen.iter().map(|&e| e as f32).collect::<Vec<_>>());
        tap(Point::ExpertWeights, &chosen.iter().map(|&e| p[e] / total).collect::<Vec<_>>());
        let gate = sigmoid(matvec(&w.shared_gate, h)[0]);
        out.iter_mut().zip(swiglu(&w.shared, h)).for_each(|(o, y)| *o += gate * y);
        out
    }
}

/// Depthwise causal convolution over the last inputs and the new one `u`, then SiLU.
fn causal_conv(g: &GdnConfig, taps: &[f32], u: Vec<f32>, past: &mut Vec<f32>) -> Vec<f32> {
    past.resize(g.conv_state_len(), 0.0);
    past.extend_from_slice(&u);
    let channels = g.conv_channels();
    let sum =
        |ch: usize| (0..g.conv_kernel).map(|j| taps[ch * g.conv_kernel + j] * past[j * channels + ch]).sum();
    let out = (0..channels).map(|ch| silu(sum(ch))).collect();
    past.drain(..channels);
    out
}

/// One step of the gated delta rule on a state `[key_dim, value_dim]`: decay, error against the decayed
/// state, update, and only then the readout.
fn delta_rule(state: &mut [f32], q: &[f32], k: &[f32], v: &[f32], alpha: f32, beta: f32) -> Vec<f32> {
    let dv = v.len();
    state.iter_mut().for_each(|s| *s *= alpha);
    let mut error = v.to_vec();
    for (row, k) in state.chunks_exact(dv).zip(k) {
        error.iter_mut().zip(row).for_each(|(e, s)| *e -= s * k);
    }
    let mut out = vec![0.0; dv];
    for ((row, k), q) in state.chunks_exact_mut(dv).zip(k).zip(q) {
        for ((s, e), o) in row.iter_mut().zip(&error).zip(&mut out) {
            *s += k * beta * e;
            *o += q * *s;
        }
    }
    out
}

fn swiglu(w: &Expert, h: &[f32]) -> Vec<f32> {
    let mut x = matvec(&w.gate, h);
    x.iter_mut().zip(matvec(&w.up, h)).for_each(|(g, u)| *g = silu(*g) * u);
    matvec(&w.down, &x)
}
