//! The gated attention block. Its formulas are docs/model-spec.md, section 4; [`crate::reference`] has them plainly.
//!
//! The query heads that share a K/V head, and several tokens, are rows of one block, so that a page of the cache is
//! loaded once for all of them. A page is two small matrix products, with an online softmax between them.

mod products;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use lily_model::config::AttentionConfig;
use lily_model::weights::Attention;
use smallvec::SmallVec;

use crate::buffers::Buffer;
use crate::device::{Isa, dispatch};
use crate::forward::{Rows, Step};
use crate::math::rotate;
use crate::matmul::{Prepared, Product, product, products};
use crate::pool::Disjoint;
use crate::simd::{Lanes, WIDTH};
use crate::state::{PAGE, Page, padded};
use crate::vector::{mul_sigmoid, rms_norm, scale};

/// Rows of a block at most.
const ROWS: usize = 32;
/// Pages whose softmax is a sum of its own. Such parts can be computed side by side, and are added up in order, so
/// that the result depends neither on the number of threads nor on how a prompt was cut into chunks.
const PART: usize = 16;

/// Mixes `h`, `[tokens, hidden]`, along each sequence of the step; appends to `caches`, one per segment.
pub fn forward<'a>(
    step: &Step<'a>,
    w: &Attention,
    h: &[f32],
    mut caches: SmallVec<[&mut Vec<Arc<Page>>; 4]>,
) -> Buffer<'a, f32> {
    let (a, device) = (&step.config.attention, step.device);
    let n = step.tokens();
    let mut qg = device.buffers.floats(n * 2 * a.query_width());
    let mut k = device.buffers.floats(n * a.kv_width());
    let mut v = device.buffers.floats(n * a.kv_width());
    let prepared = Prepared::new(device, h, step.config.hidden_size);
    let x = prepared.input();
    products(
        device,
        [
            Product { w: &w.q_proj, x, out: &mut qg },
            Product { w: &w.k_proj, x, out: &mut k },
            Product { w: &w.v_proj, x, out: &mut v },
        ],
    );
    norm_and_rotate(step, &mut qg, 2 * a.head_dim, &w.q_norm);
    norm_and_rotate(step, &mut k, a.head_dim, &w.k_norm);
    for (rows, pages) in step.rows.iter().zip(&mut caches) {
        let kv = rows.range(a.kv_width());
        append(a, pages, rows.start, &k[kv.clone()], &v[kv]);
    }
    let mut o = device.buffers.floats(n * a.query_width());
    attend(step, &caches, &qg, &mut o);
    product(device, &w.o_proj, &o)
}

/// Norms and rotates the first `head_dim` values of every `stride` in `x`.
fn norm_and_rotate(step: &Step<'_>, x: &mut [f32], stride: usize, gain: &[f32]) {
    let (d, isa, eps) = (step.config.attention.head_dim, step.device.isa, step.config.rms_norm_eps);
    let width = x.len() / step.tokens();
    step.device.pool.chunks(x, width, |token, x| {
        SCRATCH.with_borrow_mut(|scratch| {
            scratch.q.resize(d, 0.0);
            let normed = &mut scratch.q[..d];
            for head in x.chunks_exact_mut(stride) {
                let head = &mut head[..d];
                dispatch!(isa, rms_norm(head => x: &[f32], gain => gain: &[f32], eps => eps: f32, normed => out: &mut [f32]));
                head.copy_from_slice(normed);
                rotate(head, step.angles(token));
            }
        });
    });
}

/// Writes keys and values, `[tokens, kv_heads, head_dim]`, at positions from `start` on.
fn append(a: &AttentionConfig, pages: &mut [Arc<Page>], start: usize, k: &[f32], v: &[f32]) {
    let d = a.head_dim;
    for (t, (k, v)) in k.chunks_exact(a.kv_width()).zip(v.chunks_exact(a.kv_width())).enumerate() {
        let position = start + t;
        let page = Arc::make_mut(&mut pages[position / PAGE]);
        for (head, (k, v)) in k.chunks_exact(d).zip(v.chunks_exact(d)).enumerate() {
            page.put(head, position % PAGE, k, v);
        }
    }
}

/// Buffers of a thread.
#[derive(Default)]
struct Scratch {
    /// Scaled queries of a block, `[rows, head_dim]`.
    q: Vec<f32>,
    /// Scores, then weights, of a block and a page, `[rows, PAGE]`.
    p: Vec<f32>,
    /// A block's result so far, and that of one part.
    results: [Vec<f32>; 2],
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Rows of one segment that share a K/V head.
struct Block<'a> {
    step: &'a Step<'a>,
    pages: &'a [Arc<Page>],
    rows: Rows,
    kv_head: usize,
    /// Of the `tokens * heads / kv_heads` rows of the segment and the K/V head: token by token.
    range: Range<usize>,
}

/// Causal attention of each segment's new tokens over its cache, gated. `qg` is `[tokens, heads, 2 * head_dim]`,
/// `out` is `[tokens, heads, head_dim]`.
fn attend(step: &Step<'_>, caches: &[&mut Vec<Arc<Page>>], qg: &[f32], out: &mut [f32]) {
    let (a, device) = (&step.config.attention, step.device);
    let group = a.heads / a.kv_heads;
    let blocks_of = |rows: &Rows| (rows.len * group).div_ceil(ROWS) * a.kv_heads;
    let block = |mut i: usize| {
        let mut segment = 0;
        while i >= blocks_of(&step.rows[segment]) {
            i -= blocks_of(&step.rows[segment]);
            segment += 1;
        }
        let rows = step.rows[segment];
        let first = i / a.kv_heads * ROWS;
        let range = first..(rows.len * group).min(first + ROWS);
        Block { step, pages: caches[segment], rows, kv_head: i % a.kv_heads, range }
    };
    let blocks: usize = step.rows.iter().map(blocks_of).sum();
    let parts = step.rows.iter().map(|r| (r.start + r.len).div_ceil(PART * PAGE)).max().unwrap_or(1);
    let out = Disjoint::new(out);
    if parts == 1 || blocks >= 4 * device.pool.threads() {
        return device.pool.run(blocks, |i| block(i).run(qg, &out));
    }
    // A few tokens over a long cache: the parts of a block are shared out too.
    let size = ROWS * result_width(a);
    let mut results = device.buffers.floats(blocks * parts * size);
    device.pool.chunks(&mut results, size, |i, result| {
        let block = block(i / parts);
        let result = &mut result[..block.range.len() * result_width(a)];
        SCRATCH.with_borrow_mut(|Scratch { q, p, .. }| {
            block.queries(qg, q);
            block.part(i % parts, q, p, result);
        });
    });
    device.pool.run(blocks, |i| {
        let block = block(i);
        SCRATCH.with_borrow_mut(|Scratch { results: [total, _], .. }| {
            let len = block.range.len() * result_width(a);
            block.clear(total);
            for part in 0..block.parts() {
                block.merge(total, &results[(i * parts + part) * size..][..len]);
            }
            block.deliver(total, qg, &out);
        });
    });
}

/// Values that a row's result takes: weighted values, the largest score, the sum of weights.
fn result_width(a: &AttentionConfig) -> usize {
    padded(a.head_dim) + 2
}

impl Block<'_> {
    fn config(&self) -> &AttentionConfig {
        &self.step.config.attention
    }

    fn isa(&self) -> Isa {
        self.step.device.isa
    }

    /// Token of a row, in the segment, and query head.
    fn token_and_head(&self, row: usize) -> (usize, usize) {
        let a = self.config();
        let group = a.heads / a.kv_heads;
        (row / group, self.kv_head * group + row % group)
    }

    /// Positions that a row may look at.
    fn visible(&self, row: usize) -> usize {
        self.rows.start + self.token_and_head(row).0 + 1
    }

    fn parts(&self) -> usize {
        self.visible(self.range.end - 1).div_ceil(PART * PAGE)
    }

    fn run(&self, qg: &[f32], out: &Disjoint<'_, f32>) {
        SCRATCH.with_borrow_mut(|Scratch { q, p, results: [total, one] }| {
            self.queries(qg, q);
            self.clear(total);
            one.resize(self.range.len() * result_width(self.config()), 0.0);
            for part in 0..self.parts() {
                self.part(part, q, p, one);
                self.merge(total, one);
            }
            self.deliver(total, qg, out);
        });
    }

    /// The block's queries, scaled, `[rows, head_dim]`.
    fn queries(&self, qg: &[f32], q: &mut Vec<f32>) {
        let (a, isa) = (self.config(), self.isa());
        let d = a.head_dim;
        q.clear();
        for row in self.range.clone() {
            let (token, head) = self.token_and_head(row);
            q.extend_from_slice(&qg[((self.rows.first + token) * a.heads + head) * 2 * d..][..d]);
        }
        let (q, factor) = (&mut q[..], (d as f32).powf(-0.5));
        dispatch!(isa, scale(q => x: &mut [f32], factor => factor: f32));
    }

    /// A result to add others to: nothing seen.
    fn clear(&self, result: &mut Vec<f32>) {
        let width = result_width(self.config());
        result.clear();
        result.resize(self.range.len() * width, 0.0);
        result.chunks_exact_mut(width).for_each(|row| row[width - 2] = f32::NEG_INFINITY);
    }

    /// `sum_i e^(s_i - max) v_i`, `max` and `sum_i e^(s_i - max)` of each row over the pages of one part.
    fn part(&self, part: usize, q: &[f32], p: &mut Vec<f32>, result: &mut [f32]) {
        let (a, isa) = (self.config(), self.isa());
        let (width, dp) = (result_width(a), padded(a.head_dim));
        result.fill(0.0);
        result.chunks_exact_mut(width).for_each(|row| row[dp] = f32::NEG_INFINITY);
        p.resize(self.range.len() * PAGE, 0.0);
        let last = self.visible(self.range.end - 1).div_ceil(PAGE);
        for page in part * PART..last.min((part + 1) * PART) {
            p.fill(0.0);
            self.pages[page].scores(isa, self.kv_head, q, p);
            let seen = |row: usize| self.visible(row).saturating_sub(page * PAGE).min(PAGE);
            let rows = self.range.clone().zip(p.chunks_exact_mut(PAGE)).zip(result.chunks_exact_mut(width));
            for ((row, p), result) in rows {
                let n = seen(row);
                dispatch!(isa, softmax(p => p: &mut [f32], n => n: usize, result => result: &mut [f32]));
            }
            // Rows that see as much go together: what a row may not see must not reach it, not even times 0.
            let mut first = 0;
            while first < self.range.len() {
                let n = seen(self.range.start + first);
                let alike = self.range.clone().skip(first).take_while(|&row| seen(row) == n).count();
                let p = &p[first * PAGE..][..alike * PAGE];
                let result = &mut result[first * width..][..alike * width];
                self.pages[page].weigh(isa, self.kv_head, n, p, result, width);
                first += alike;
            }
        }
    }

    /// Adds the result of one more part to `total`.
    fn merge(&self, total: &mut [f32], part: &[f32]) {
        let width = result_width(self.config());
        let dp = width - 2;
        for (total, part) in total.chunks_exact_mut(width).zip(part.chunks_exact(width)) {
            if part[dp] == f32::NEG_INFINITY && part[dp + 1] == 0.0 {
                continue;
            }
            let max = if part[dp] > total[dp] { part[dp] } else { total[dp] };
            let (old, new) = ((total[dp] - max).exp(), (part[dp] - max).exp());
            for (total, part) in total[..dp].iter_mut().zip(part) {
                *total = *total * old + part * new;
            }
            total[dp + 1] = total[dp + 1] * old + part[dp + 1] * new;
            total[dp] = max;
        }
    }

    /// Divides by the sum of weights, gates, and writes to the block's places of the step.
    fn deliver(&self, total: &[f32], qg: &[f32], out: &Disjoint<'_, f32>) {
        let (a, isa) = (self.config(), self.isa());
        let d = a.head_dim;
        for (row, total) in self.range.clone().zip(total.chunks_exact(result_width(a))) {
            let (token, head) = self.token_and_head(row);
            let at = (self.rows.first + token) * a.heads + head;
            // SAFETY: this head of this token belongs to one block.
            let out = unsafe { out.slice(at * d, d) };
            let sum = total[padded(d) + 1];
            out.iter_mut().zip(total).for_each(|(o, x)| *o = x / sum);
            let gate = &qg[at * 2 * d + d..][..d];
            dispatch!(isa, mul_sigmoid(out => out: &mut [f32], gate => x: &[f32]));
        }
    }
}

/// One row's scores of a page, the first `n` of them visible, become weights, 0 for the others; what the row's result
/// holds so far is scaled to the new maximum.
#[inline(always)]
fn softmax<V: Lanes>(p: &mut [f32], n: usize, result: &mut [f32]) {
    p[n..].fill(f32::NEG_INFINITY);
    let chunks = p.as_chunks_mut::<WIDTH>().0;
    let mut largest = V::splat(f32::NEG_INFINITY);
    for chunk in chunks.iter() {
        largest = largest.max(V::load(chunk));
    }
    let dp = result.len() - 2;
    let (old, page) = (result[dp], largest.largest());
    let max = if page > old { page } else { old };
    if n == 0 {
        return p.fill(0.0);
    }
    for chunk in chunks.iter_mut() {
        V::load(chunk).sub(V::splat(max)).exp().store(chunk);
    }
    p[n..].fill(0.0);
    let mut sum = V::zero();
    for chunk in p.as_chunks::<WIDTH>().0 {
        sum = sum.add(V::load(chunk));
    }
    let shrink = (old - max).exp();
    result[dp] = max;
    result[dp + 1] = result[dp + 1] * shrink + sum.sum();
    if shrink != 1.0 {
        scale::<V>(&mut result[..dp], shrink);
    }
}
