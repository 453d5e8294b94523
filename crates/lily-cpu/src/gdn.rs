//! The Gated DeltaNet block. Its formulas are docs/model-spec.md, section 3; [`crate::reference`] has them plainly.

use std::cell::RefCell;
use std::sync::Arc;

use lily_model::config::GdnConfig;
use lily_model::weights::Gdn;
use smallvec::SmallVec;

use crate::buffers::Buffer;
use crate::device::{Isa, dispatch};
use crate::forward::{Rows, Step};
use crate::math::{sigmoid, softplus};
use crate::matmul::{Prepared, Product, product, products};
use crate::pool::Disjoint;
use crate::reference::L2_EPS;
use crate::simd::{Lanes, WIDTH};
use crate::state::Recurrent;
use crate::vector::{dot, l2_normalise, mul_silu, rms_norm};

/// Tokens that a head works on before it turns to the next columns of its state.
const TOKENS: usize = 64;
/// Columns of a head's state that lie together and are worked on at a time: at 128 rows they stay in the first cache.
pub const COLUMNS: usize = 2 * WIDTH;

/// What the projections give, for every token of a step.
struct Projected<'a> {
    /// `[q | k | v]` before the convolution, `[tokens, channels]`.
    u: &'a [f32],
    /// The output gate, `[tokens, value_width]`.
    z: &'a [f32],
    /// Decay per value head, `[tokens, value_heads]`.
    alpha: &'a [f32],
    /// Write strength per value head, `[tokens, value_heads]`.
    beta: &'a [f32],
}

/// Buffers of a thread, for one head and [`TOKENS`] tokens.
#[derive(Default)]
struct Scratch {
    /// `[tokens, key_dim]`, normalised.
    q: Vec<f32>,
    /// `[tokens, key_dim]`, normalised.
    k: Vec<f32>,
    /// `[tokens, value_dim]`; becomes the readout.
    v: Vec<f32>,
    /// Filter taps of some channels, `[taps, channels]`.
    taps: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Mixes `h`, `[tokens, hidden]`, along each sequence of the step; advances `states`, one per segment.
pub fn forward<'a>(
    step: &Step<'a>,
    w: &Gdn,
    h: &[f32],
    states: SmallVec<[&mut Arc<Recurrent>; 4]>,
) -> Buffer<'a, f32> {
    let (g, device) = (&step.config.gdn, step.device);
    let n = step.tokens();
    let mut u = device.buffers.floats(n * g.conv_channels());
    let mut z = device.buffers.floats(n * g.value_width());
    let mut beta = device.buffers.floats(n * g.value_heads);
    let mut alpha = device.buffers.floats(n * g.value_heads);
    let prepared = Prepared::new(device, h, step.config.hidden_size);
    let x = prepared.input();
    products(
        device,
        [
            Product { w: &w.in_proj_qkv, x, out: &mut u },
            Product { w: &w.in_proj_z, x, out: &mut z },
            Product { w: &w.in_proj_b, x, out: &mut beta },
            Product { w: &w.in_proj_a, x, out: &mut alpha },
        ],
    );
    for (alpha, (a_log, dt_bias)) in alpha.iter_mut().zip(w.a_log.iter().zip(&w.dt_bias).cycle()) {
        *alpha = (-a_log.exp() * softplus(*alpha + dt_bias)).exp();
    }
    beta.iter_mut().for_each(|b| *b = sigmoid(*b));
    let mut o = device.buffers.floats(n * g.value_width());
    let projected = Projected { u: &u, z: &z, alpha: &alpha, beta: &beta };
    mix(step, w, &projected, states, &mut o);
    product(device, &w.out_proj, &o)
}

/// Convolution, delta rule, norm and gate, heads side by side; `o` is `[tokens, value_width]`.
fn mix(
    step: &Step<'_>,
    w: &Gdn,
    projected: &Projected<'_>,
    states: SmallVec<[&mut Arc<Recurrent>; 4]>,
    o: &mut [f32],
) {
    let g = &step.config.gdn;
    let per_head = g.key_dim * g.value_dim;
    let mut states: SmallVec<[&mut Recurrent; 4]> = states.into_iter().map(Arc::make_mut).collect();
    let heads: SmallVec<[(&[f32], Disjoint<'_, f32>); 4]> =
        states.iter_mut().map(|s| (&s.conv[..], Disjoint::new(&mut s.state))).collect();
    let o = Disjoint::new(o);
    step.device.pool.run(heads.len() * g.value_heads, |i| {
        let (segment, head) = (i / g.value_heads, i % g.value_heads);
        let (past, state) = &heads[segment];
        // SAFETY: each head's state and each head's part of `o` belong to one item.
        let state = unsafe { state.slice(head * per_head, per_head) };
        let head =
            Head { g, w, eps: step.config.rms_norm_eps, head, rows: step.rows[segment], projected, past };
        SCRATCH.with_borrow_mut(|scratch| head.run(step.device.isa, state, scratch, &o));
    });
    drop(heads);
    for (rows, state) in step.rows.iter().zip(&mut states) {
        remember(&projected.u[rows.range(g.conv_channels())], &mut state.conv);
    }
}

/// Keeps the last inputs of the convolution: `past` becomes the end of `past` and `u` together.
fn remember(u: &[f32], past: &mut [f32]) {
    let keep = past.len();
    if u.len() >= keep {
        past.copy_from_slice(&u[u.len() - keep..]);
    } else {
        past.copy_within(u.len().., 0);
        past[keep - u.len()..].copy_from_slice(u);
    }
}

/// One value head of one segment.
struct Head<'a> {
    g: &'a GdnConfig,
    w: &'a Gdn,
    eps: f32,
    head: usize,
    rows: Rows,
    projected: &'a Projected<'a>,
    /// Inputs of the convolution before the segment, `[taps - 1, channels]`.
    past: &'a [f32],
}

impl Head<'_> {
    /// `state` is the head's, see [`Recurrent`]; `o` is the whole step's.
    fn run(&self, isa: Isa, state: &mut [f32], scratch: &mut Scratch, o: &Disjoint<'_, f32>) {
        let (dk, dv) = (self.g.key_dim, self.g.value_dim);
        let key_head = self.head / (self.g.value_heads / self.g.key_heads);
        for first in (0..self.rows.len).step_by(TOKENS) {
            let n = TOKENS.min(self.rows.len - first);
            let Scratch { q, k, v, taps } = &mut *scratch;
            self.convolve(isa, first, key_head * dk, dk, n, taps, q);
            self.convolve(isa, first, (self.g.key_heads + key_head) * dk, dk, n, taps, k);
            self.convolve(isa, first, 2 * self.g.key_heads * dk + self.head * dv, dv, n, taps, v);
            for (q, k) in q.chunks_exact_mut(dk).zip(k.chunks_exact_mut(dk)) {
                let factor = (dk as f32).powf(-0.5);
                dispatch!(isa, l2_normalise(q => x: &mut [f32], L2_EPS => eps: f32, factor => factor: f32));
                dispatch!(isa, l2_normalise(k => x: &mut [f32], L2_EPS => eps: f32, 1.0 => factor: f32));
            }
            let (q, k) = (&q[..], &k[..]);
            for (i, state) in state.chunks_mut(COLUMNS * dk).enumerate() {
                let part = Columns { head: self, first, state, q, k, v, column: i * COLUMNS };
                dispatch!(isa, delta_rule(part => part: Columns<'_>));
            }
            self.deliver(isa, first, v, o);
        }
    }

    /// Causal convolution and SiLU of channels `channel..channel + width` of `n` tokens into `out`, `[n, width]`.
    #[allow(clippy::too_many_arguments, reason = "three calls that differ in channels and target")]
    fn convolve(
        &self,
        isa: Isa,
        first: usize,
        channel: usize,
        width: usize,
        n: usize,
        taps: &mut Vec<f32>,
        out: &mut Vec<f32>,
    ) {
        let (channels, kernel) = (self.g.conv_channels(), self.g.conv_kernel);
        taps.resize(kernel * width, 0.0);
        for (j, taps) in taps.chunks_exact_mut(width).enumerate() {
            for (i, tap) in taps.iter_mut().enumerate() {
                *tap = self.w.conv[(channel + i) * kernel + j];
            }
        }
        out.resize(n * width, 0.0);
        for (t, out) in out.chunks_exact_mut(width).enumerate() {
            out.fill(0.0);
            for (j, taps) in taps.chunks_exact(width).enumerate() {
                let input = match (first + t + j).checked_sub(kernel - 1) {
                    None => &self.past[(first + t + j) * channels + channel..][..width],
                    Some(t) => &self.projected.u[(self.rows.first + t) * channels + channel..][..width],
                };
                dispatch!(isa, add_product(out => out: &mut [f32], input => x: &[f32], taps => y: &[f32]));
            }
            dispatch!(isa, silu(out => x: &mut [f32]));
        }
    }

    /// Norm and gate of a head's readout, `[tokens, value_dim]`, into its place.
    fn deliver(&self, isa: Isa, first: usize, readout: &[f32], o: &Disjoint<'_, f32>) {
        let (dv, width) = (self.g.value_dim, self.g.value_width());
        for (t, readout) in readout.chunks_exact(dv).enumerate() {
            let at = (self.rows.first + first + t) * width + self.head * dv;
            // SAFETY: this head's part of this token; no other item has it.
            let o = unsafe { o.slice(at, dv) };
            let (z, gain) = (&self.projected.z[at..][..dv], &self.w.norm[..]);
            dispatch!(isa, rms_norm(readout => x: &[f32], gain => gain: &[f32], self.eps => eps: f32, o => out: &mut [f32]));
            dispatch!(isa, mul_silu(o => out: &mut [f32], z => x: &[f32]));
        }
    }
}

/// `out += x * y`.
#[inline(always)]
fn add_product<V: Lanes>(out: &mut [f32], x: &[f32], y: &[f32]) {
    let whole = out.len() / WIDTH * WIDTH;
    let chunks = out.as_chunks_mut::<WIDTH>().0.iter_mut();
    for ((out, x), y) in chunks.zip(x.as_chunks().0).zip(y.as_chunks().0) {
        V::load(x).mul_add(V::load(y), V::load(out)).store(out);
    }
    for ((out, x), y) in out[whole..].iter_mut().zip(&x[whole..]).zip(&y[whole..]) {
        *out = V::fma(*x, *y, *out);
    }
}

/// `x = silu(x)`.
#[inline(always)]
fn silu<V: Lanes>(x: &mut [f32]) {
    let (chunks, rest) = x.as_chunks_mut::<WIDTH>();
    for chunk in chunks {
        V::load(chunk).silu().store(chunk);
    }
    rest.iter_mut().for_each(|x| *x = crate::math::silu(*x));
}

/// Some columns of one head's state and up to [`TOKENS`] tokens.
struct Columns<'a> {
    head: &'a Head<'a>,
    first: usize,
    /// `[key_dim, columns]`.
    state: &'a mut [f32],
    q: &'a [f32],
    k: &'a [f32],
    /// Values; becomes the readout.
    v: &'a mut [f32],
    /// First of the columns.
    column: usize,
}

/// The recurrence over the tokens of `part`, on its columns: they depend on no others.
#[inline(always)]
fn delta_rule<V: Lanes>(part: Columns<'_>) {
    let Columns { head, first, state, q, k, v, column } = part;
    let (dk, dv) = (head.g.key_dim, head.g.value_dim);
    let each = q.chunks_exact(dk).zip(k.chunks_exact(dk)).zip(v.chunks_exact_mut(dv));
    for (t, ((q, k), v)) in each.enumerate() {
        let gate = (head.rows.first + first + t) * head.g.value_heads + head.head;
        let token = Token { q, k, alpha: head.projected.alpha[gate], beta: head.projected.beta[gate] };
        let v = &mut v[column..][..state.len() / dk];
        if let Some(v) = v.as_mut_array() { token.whole::<V>(state, v) } else { token.rest::<V>(state, v) }
    }
}

/// What one token brings to one head.
struct Token<'a> {
    q: &'a [f32],
    k: &'a [f32],
    alpha: f32,
    beta: f32,
}

impl Token<'_> {
    /// [`COLUMNS`] columns. With `e = beta (v - alpha S^T k)` the new state is `alpha S + k e^T`, and its readout
    /// `alpha S^T q + (k . q) e`: so one pass reads the state and a second one updates it.
    #[inline(always)]
    fn whole<V: Lanes>(&self, state: &mut [f32], v: &mut [f32; COLUMNS]) {
        let rows = state.as_chunks::<COLUMNS>().0;
        // Even and odd rows in sums of their own, so that an addition need not wait for the last.
        let (mut sk, mut sq) = ([[V::zero(); 2]; 2], [[V::zero(); 2]; 2]);
        let ((rows, last), (k, last_k), (q, last_q)) =
            (rows.as_chunks::<2>(), self.k.as_chunks::<2>(), self.q.as_chunks::<2>());
        for ((rows, k), q) in rows.iter().zip(k).zip(q) {
            for r in 0..2 {
                let row = rows[r].as_chunks::<WIDTH>().0;
                for c in 0..2 {
                    let s = V::load(&row[c]);
                    sk[r][c] = s.mul_add(V::splat(k[r]), sk[r][c]);
                    sq[r][c] = s.mul_add(V::splat(q[r]), sq[r][c]);
                }
            }
        }
        for ((row, k), q) in last.iter().zip(last_k).zip(last_q) {
            let row = row.as_chunks::<WIDTH>().0;
            for c in 0..2 {
                let s = V::load(&row[c]);
                sk[0][c] = s.mul_add(V::splat(*k), sk[0][c]);
                sq[0][c] = s.mul_add(V::splat(*q), sq[0][c]);
            }
        }
        let (alpha, beta) = (V::splat(self.alpha), V::splat(self.beta));
        let kq = V::splat(dot::<V>(self.k, self.q));
        let v = v.as_chunks_mut::<WIDTH>().0;
        let mut e = [V::zero(); 2];
        for c in 0..2 {
            let s = sk[0][c].add(sk[1][c]).mul(alpha);
            e[c] = V::load(&v[c]).sub(s).mul(beta);
            kq.mul_add(e[c], sq[0][c].add(sq[1][c]).mul(alpha)).store(&mut v[c]);
        }
        for (row, k) in state.as_chunks_mut::<COLUMNS>().0.iter_mut().zip(self.k) {
            let row = row.as_chunks_mut::<WIDTH>().0;
            let k = V::splat(*k);
            for c in 0..2 {
                k.mul_add(e[c], V::load(&row[c]).mul(alpha)).store(&mut row[c]);
            }
        }
    }

    /// As [`Token::whole`], for fewer columns, one by one.
    #[inline(always)]
    fn rest<V: Lanes>(&self, state: &mut [f32], v: &mut [f32]) {
        let (kq, width) = (dot::<V>(self.k, self.q), v.len());
        for (c, v) in v.iter_mut().enumerate() {
            let (mut sk, mut sq) = (0.0f32, 0.0f32);
            for ((row, k), q) in state.chunks_exact(width).zip(self.k).zip(self.q) {
                sk = V::fma(row[c], *k, sk);
                sq = V::fma(row[c], *q, sq);
            }
            let e = self.beta * (*v - self.alpha * sk);
            *v = V::fma(kq, e, self.alpha * sq);
            for (row, k) in state.chunks_exact_mut(width).zip(self.k) {
                row[c] = V::fma(*k, e, self.alpha * row[c]);
            }
        }
    }
}
