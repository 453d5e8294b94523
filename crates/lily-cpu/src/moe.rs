//! The mixture of experts. Its formulas are docs/model-spec.md, section 5; [`crate::reference`] has them plainly.

use lily_model::matrix::Matrix;
use lily_model::weights::{Expert, Moe};

use crate::buffers::Buffer;
use crate::device::{Device, dispatch};
use crate::forward::Step;
use crate::math::{sigmoid, softmax, top_k};
use crate::matmul::{Input, Prepared, Product, products, takes_int8};
use crate::pool::Disjoint;
use crate::quantise::{Storage, Writer};
use crate::tap::{LayerTap, Point};
use crate::vector::{add_scaled, swiglu};

/// Rows that one item of a parallel loop activates.
const ROWS: usize = 16;

/// Which experts each token of a step uses. Kept from layer to layer for its memory.
#[derive(Default)]
pub struct Routes {
    /// By falling weight, `[tokens, experts_per_token]`.
    experts: Vec<usize>,
    /// Weights that sum to 1 over a token's experts, like `experts`.
    weights: Vec<f32>,
    /// Tokens of each expert that has some; the shared expert, which has all, comes last.
    groups: Vec<Group>,
    /// Entries of `experts` in the order of their groups: entry `i` is of token `i / experts_per_token`.
    order: Vec<usize>,
    /// Where each entry is in `order`.
    place: Vec<usize>,
}

/// Tokens that share an expert: rows of the buffers that all experts share.
#[derive(Clone, Copy)]
struct Group {
    /// `None`: the shared expert.
    expert: Option<usize>,
    first: usize,
    len: usize,
}

impl Group {
    fn weights<'a>(&self, w: &'a Moe) -> &'a Expert {
        self.expert.map_or(&w.shared, |e| &w.experts[e])
    }
}

/// Applies shared and routed experts to `h`, `[tokens, hidden]`.
pub fn forward<'a>(
    step: &Step<'a>,
    w: &Moe,
    h: &[f32],
    routes: &mut Routes,
    tap: LayerTap<'_>,
) -> Buffer<'a, f32> {
    let (device, hidden, k) = (step.device, step.config.hidden_size, step.config.moe.experts_per_token);
    let n = step.tokens();
    let mut scores = device.buffers.floats(n * w.experts.len());
    let mut shared_gate = device.buffers.floats(n);
    let prepared = Prepared::new(device, h, hidden);
    let x = prepared.input();
    products(
        device,
        [
            Product { w: &w.router, x, out: &mut scores },
            Product { w: &w.shared_gate, x, out: &mut shared_gate },
        ],
    );
    routes.choose(device, &mut scores, w.experts.len(), k);
    for (experts, weights) in routes.experts.chunks_exact(k).zip(routes.weights.chunks_exact(k)) {
        let mut numbers = device.buffers.floats(k);
        numbers.iter_mut().zip(experts).for_each(|(number, &e)| *number = e as f32);
        tap(Point::Experts, &numbers);
        tap(Point::ExpertWeights, weights);
    }
    let results = run_experts(device, w, x, routes, k);
    let mut out = device.buffers.zeros(n * hidden);
    device.pool.chunks(&mut out, hidden, |token, out| {
        let routed = (token * k..(token + 1) * k).map(|e| (routes.weights[e], routes.place[e]));
        let shared = (sigmoid(shared_gate[token]), n * k + token);
        // In the order of the token's own weights, whatever the other tokens chose.
        for (weight, row) in routed.chain([shared]) {
            let y = &results[row * hidden..][..hidden];
            dispatch!(device.isa, add_scaled(out => out: &mut [f32], y => x: &[f32], weight => weight: f32));
        }
    });
    out
}

impl Routes {
    /// Softmax over the experts, the largest `k`, renormalised; then entries grouped by expert.
    fn choose(&mut self, device: &Device, scores: &mut [f32], experts: usize, k: usize) {
        let tokens = scores.len() / experts;
        self.experts.resize(tokens * k, 0);
        self.weights.resize(tokens * k, 0.0);
        let chosen = (Disjoint::new(&mut self.experts), Disjoint::new(&mut self.weights));
        device.pool.chunks(scores, experts, |token, p| {
            // SAFETY: each token's entries belong to one item.
            let (chosen, weights) = unsafe { (chosen.0.slice(token * k, k), chosen.1.slice(token * k, k)) };
            softmax(p);
            top_k(p, chosen);
            let total: f32 = chosen.iter().map(|&e| p[e]).sum();
            weights.iter_mut().zip(chosen).for_each(|(w, e)| *w = p[*e] / total);
        });
        self.group(experts);
        self.groups.push(Group { expert: None, first: tokens * k, len: tokens });
    }

    /// Counting sort of the entries by expert.
    fn group(&mut self, experts: usize) {
        self.groups.clear();
        self.groups.extend((0..experts).map(|e| Group { expert: Some(e), first: 0, len: 0 }));
        self.experts.iter().for_each(|&e| self.groups[e].len += 1);
        let mut first = 0;
        for group in &mut self.groups {
            group.first = first;
            first += group.len;
            group.len = 0;
        }
        self.order.resize(self.experts.len(), 0);
        self.place.resize(self.experts.len(), 0);
        for (entry, &e) in self.experts.iter().enumerate() {
            let group = &mut self.groups[e];
            self.place[entry] = group.first + group.len;
            self.order[group.first + group.len] = entry;
            group.len += 1;
        }
        self.groups.retain(|group| group.len > 0);
    }

    /// Cuts a buffer with `width(group)` values a row into the parts of the groups.
    fn parts<'b>(
        &self,
        buffer: &'b mut [f32],
        width: impl Fn(&Group) -> usize,
    ) -> impl Iterator<Item = (&Group, &'b mut [f32])> {
        let mut rest = buffer;
        self.groups.iter().map(move |g| {
            let (mine, others) = std::mem::take(&mut rest).split_at_mut(g.len * width(g));
            rest = others;
            (g, mine)
        })
    }
}

/// Results of all experts, `[rows of all groups, hidden]`. An expert's weights are read once, for all its tokens.
fn run_experts<'a>(device: &'a Device, w: &Moe, h: Input<'_>, routes: &Routes, k: usize) -> Buffer<'a, f32> {
    let (hidden, width) = (w.shared.gate.cols, |g: &Group| g.weights(w).gate.rows);
    let values = routes.groups.iter().map(|g| g.len * width(g)).sum();
    let (mut gate, mut up) = (device.buffers.floats(values), device.buffers.floats(values));
    let gathered = Gathered::new(device, w, h, routes, k);
    let gates = routes.parts(&mut gate, width).map(|(g, out)| (g, &g.weights(w).gate, out));
    let ups = routes.parts(&mut up, width).map(|(g, out)| (g, &g.weights(w).up, out));
    products(device, gates.chain(ups).map(|(g, w, out)| Product { w, x: gathered.input(g), out }));
    let activated = Activated::new(device, w, routes, &mut gate, &up);
    let rows = routes.groups.iter().map(|g| g.len).sum::<usize>();
    let mut out = device.buffers.floats(rows * hidden);
    let downs = routes.parts(&mut out, |_| hidden);
    products(device, downs.map(|(g, out)| Product { w: &g.weights(w).down, x: activated.input(g), out }));
    out
}

/// The experts' inputs, each expert's tokens one behind the other.
struct Gathered<'a> {
    h: Input<'a>,
    hidden: usize,
    /// `[entries, hidden]`, for matrices that take f32.
    x: Option<Buffer<'a, f32>>,
    /// The same for matrices that take int8.
    quantised: Option<Storage<'a>>,
}

impl<'a> Gathered<'a> {
    fn new(device: &'a Device, w: &Moe, h: Input<'a>, routes: &Routes, k: usize) -> Self {
        let hidden = w.shared.gate.cols;
        let mut gathered = Self { h, hidden, x: None, quantised: None };
        let Some(expert) = w.experts.first().filter(|_| h.tokens > 1) else { return gathered };
        let entries = routes.order.len();
        // The experts of a layer are one tensor in the files, so all are stored alike.
        let int8 = [&expert.gate, &expert.up].map(|w| takes_int8(device, w));
        if int8.contains(&false) {
            let mut x = device.buffers.floats(entries * hidden);
            device.pool.chunks(&mut x, hidden, |row, x| {
                x.copy_from_slice(&h.x[routes.order[row] / k * hidden..][..hidden]);
            });
            gathered.x = Some(x);
        }
        if let Some(from) = h.quantised.filter(|_| int8.contains(&true)) {
            let mut storage = Storage::new(device, entries, hidden);
            let writer = Writer::new(&mut storage);
            let routed = &routes.groups[..routes.groups.len() - 1];
            device.pool.run(routed.len(), |i| {
                let g = &routed[i];
                for row in 0..g.len {
                    // SAFETY: each group belongs to one item.
                    unsafe { writer.copy(g.first, g.len, row, from, routes.order[g.first + row] / k) };
                }
            });
            gathered.quantised = Some(storage);
        }
        gathered
    }

    fn input(&self, g: &Group) -> Input<'_> {
        // A single token goes to all of its experts as it is.
        if g.expert.is_none() || self.h.tokens == 1 {
            return self.h;
        }
        Input {
            tokens: g.len,
            x: self.x.as_ref().map_or(&[], |x| &x[g.first * self.hidden..][..g.len * self.hidden]),
            quantised: self.quantised.as_ref().map(|q| q.rows(g.first, g.len)),
        }
    }
}

/// The hidden values of the experts behind their SwiGLU, as inputs of the last product. Routed experts and the
/// shared one may differ in width.
struct Activated<'a, 'x> {
    routed: Part<'a, 'x>,
    shared: Part<'a, 'x>,
}

/// Rows of one width.
struct Part<'a, 'x> {
    /// First of them among all rows.
    first: usize,
    width: usize,
    x: &'x [f32],
    quantised: Option<Storage<'a>>,
}

impl<'a, 'x> Activated<'a, 'x> {
    /// `gate` becomes `silu(gate) * up`.
    fn new(device: &'a Device, w: &Moe, routes: &Routes, gate: &'x mut [f32], up: &[f32]) -> Self {
        let entries = routes.order.len();
        let down = w.experts.first().map_or(&w.shared.down, |e| &e.down);
        let (routed, shared) = gate.split_at_mut(entries * down.cols);
        let (routed_up, shared_up) = up.split_at(entries * down.cols);
        Self {
            routed: Part::new(device, down, 0, routes, routed, routed_up),
            shared: Part::new(device, &w.shared.down, entries, routes, shared, shared_up),
        }
    }

    fn input(&self, g: &Group) -> Input<'_> {
        let part = if g.expert.is_some() { &self.routed } else { &self.shared };
        let first = g.first - part.first;
        Input {
            tokens: g.len,
            x: &part.x[first * part.width..][..g.len * part.width],
            quantised: part.quantised.as_ref().map(|q| q.rows(first, g.len)),
        }
    }
}

impl<'a, 'x> Part<'a, 'x> {
    fn new(
        device: &'a Device,
        down: &Matrix,
        first: usize,
        routes: &Routes,
        gate: &'x mut [f32],
        up: &[f32],
    ) -> Self {
        let width = down.cols;
        let rows = gate.len() / width;
        let mut quantised = takes_int8(device, down).then(|| Storage::new(device, rows, width));
        let writer = quantised.as_mut().map(Writer::new);
        device.pool.chunks(gate, ROWS * width, |i, gate| {
            for (r, (gate, up)) in
                gate.chunks_exact_mut(width).zip(up[i * ROWS * width..].chunks(width)).enumerate()
            {
                dispatch!(device.isa, swiglu(gate => out: &mut [f32], up => x: &[f32]));
                let Some(writer) = &writer else { continue };
                let row = first + i * ROWS + r;
                let g = &routes.groups[routes.groups.partition_point(|g| g.first <= row) - 1];
                // SAFETY: each row belongs to one item.
                unsafe { writer.write(device.isa, g.first - first, g.len, row - g.first, gate) };
            }
        });
        Self { first, width, x: gate, quantised }
    }
}
