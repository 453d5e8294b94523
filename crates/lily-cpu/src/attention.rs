//! The gated attention block. Its formulas are docs/model-spec.md, section 4; [`crate::reference`] has them plainly.

use std::sync::Arc;

use lily_model::config::AttentionConfig;
use lily_model::weights::Attention;
use rayon::prelude::*;

use crate::device::{Isa, dispatch};
use crate::forward::{Rows, Step};
use crate::math::{rms_norm, rotate, sigmoid};
use crate::matmul::{Product, product, products};
use crate::simd::{Lanes, WIDTH};
use crate::state::{PAGE, Page};

/// Mixes `h`, `[tokens, hidden]`, along each sequence of the step; appends to `caches`, one per segment.
pub fn forward(step: &Step<'_>, w: &Attention, h: &[f32], caches: Vec<&mut Vec<Arc<Page>>>) -> Vec<f32> {
    let a = &step.config.attention;
    let n = step.tokens();
    let mut qg = vec![0.0; n * 2 * a.query_width()];
    let (mut k, mut v) = (vec![0.0; n * a.kv_width()], vec![0.0; n * a.kv_width()]);
    products(
        step.device,
        &mut [
            Product { w: &w.q_proj, x: h, out: &mut qg },
            Product { w: &w.k_proj, x: h, out: &mut k },
            Product { w: &w.v_proj, x: h, out: &mut v },
        ],
    );
    norm_and_rotate(step, &mut qg, 2 * a.head_dim, &w.q_norm);
    norm_and_rotate(step, &mut k, a.head_dim, &w.k_norm);
    let mut o = vec![0.0; n * a.query_width()];
    for (&rows, pages) in step.rows.iter().zip(caches) {
        let kv = rows.range(a.kv_width());
        append(a, pages, rows.start, &k[kv.clone()], &v[kv]);
        let query = rows.range(2 * a.query_width());
        attend(step, rows, pages, &qg[query], &mut o[rows.range(a.query_width())]);
    }
    product(step.device, &w.o_proj, &o)
}

/// Norms and rotates the first `head_dim` values of every `stride` in `x`.
fn norm_and_rotate(step: &Step<'_>, x: &mut [f32], stride: usize, gain: &[f32]) {
    let d = step.config.attention.head_dim;
    let width = x.len() / step.tokens();
    x.par_chunks_exact_mut(width).zip(&step.angles).for_each_init(
        || vec![0.0; d],
        |normed, (token, angles)| {
            for head in token.chunks_exact_mut(stride) {
                rms_norm(&head[..d], gain, step.config.rms_norm_eps, normed);
                rotate(normed, angles);
                head[..d].copy_from_slice(normed);
            }
        },
    );
}

/// Writes keys and values, `[tokens, kv_heads, head_dim]`, at positions from `start` on.
fn append(a: &AttentionConfig, pages: &mut [Arc<Page>], start: usize, k: &[f32], v: &[f32]) {
    let d = a.head_dim;
    for (t, (k, v)) in k.chunks_exact(a.kv_width()).zip(v.chunks_exact(a.kv_width())).enumerate() {
        let position = start + t;
        let page = Arc::make_mut(&mut pages[position / PAGE]);
        for head in 0..a.kv_heads {
            let slot = (head * PAGE + position % PAGE) * d;
            page.k[slot..][..d].copy_from_slice(&k[head * d..][..d]);
            page.v[slot..][..d].copy_from_slice(&v[head * d..][..d]);
        }
    }
}

/// Causal attention of one sequence's new tokens over its cache, gated. `qg` is
/// `[tokens, heads, 2 * head_dim]`, `out` is `[tokens, heads, head_dim]`.
fn attend(step: &Step<'_>, rows: Rows, pages: &[Arc<Page>], qg: &[f32], out: &mut [f32]) {
    let a = &step.config.attention;
    let (d, isa) = (a.head_dim, step.device.isa);
    out.par_chunks_exact_mut(d).zip(qg.par_chunks_exact(2 * d)).enumerate().for_each(|(i, (out, qg))| {
        let (token, head) = (i / a.heads, i % a.heads);
        let (q, gate) = qg.split_at(d);
        let visible = rows.start + token + 1;
        let kv_head = head / (a.heads / a.kv_heads);
        online_softmax(isa, q, pages, kv_head, visible, out);
        out.iter_mut().zip(gate).for_each(|(o, g)| *o *= sigmoid(*g));
    });
}

/// `out = softmax(q K^T / sqrt(d)) V` over the first `visible` positions, a page at a time, so that a
/// position's sum does not depend on how the prompt was cut into chunks.
fn online_softmax(isa: Isa, q: &[f32], pages: &[Arc<Page>], kv_head: usize, visible: usize, out: &mut [f32]) {
    let d = q.len();
    let scale = (d as f32).powf(-0.5);
    let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0f32);
    out.fill(0.0);
    for (i, page) in pages.iter().take(visible.div_ceil(PAGE)).enumerate() {
        let n = PAGE.min(visible - i * PAGE);
        let cache = kv_head * PAGE * d..(kv_head * PAGE + n) * d;
        let (k, v) = (&page.k[cache.clone()], &page.v[cache]);
        let mut p = [0.0f32; PAGE];
        let p = &mut p[..n];
        dispatch!(isa, scores(q: &[f32], k: &[f32], scale: f32, p: &mut [f32]));
        let page_max = p.iter().fold(max, |m, &s| m.max(s));
        let shrink = (max - page_max).exp();
        max = page_max;
        p.iter_mut().for_each(|s| *s = (*s - max).exp());
        sum = sum * shrink + p.iter().sum::<f32>();
        out.iter_mut().for_each(|o| *o *= shrink);
        let p = &*p;
        dispatch!(isa, weigh(p: &[f32], v: &[f32], out: &mut [f32]));
    }
    out.iter_mut().for_each(|o| *o /= sum);
}

/// `p_i = scale * q . k_i`.
#[inline(always)]
fn scores<V: Lanes>(q: &[f32], k: &[f32], scale: f32, p: &mut [f32]) {
    let (q_chunks, q_rest) = q.as_chunks::<WIDTH>();
    for (p, k) in p.iter_mut().zip(k.chunks_exact(q.len())) {
        let (k_chunks, k_rest) = k.as_chunks::<WIDTH>();
        let mut sum = V::zero();
        for (q, k) in q_chunks.iter().zip(k_chunks) {
            sum = V::load(q).mul_add(V::load(k), sum);
        }
        let rest: f32 = q_rest.iter().zip(k_rest).map(|(q, k)| q * k).sum();
        *p = scale * (sum.sum() + rest);
    }
}

/// `out += sum_i p_i v_i`.
#[inline(always)]
fn weigh<V: Lanes>(p: &[f32], v: &[f32], out: &mut [f32]) {
    for (p, v) in p.iter().zip(v.chunks_exact(out.len())) {
        for (o, v) in out.iter_mut().zip(v) {
            *o = V::fma(*p, *v, *o);
        }
    }
}
