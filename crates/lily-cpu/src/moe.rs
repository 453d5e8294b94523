//! The mixture of experts. Its formulas are docs/model-spec.md, section 5; [`crate::reference`] has them plainly.

use lily_model::weights::{Expert, Moe};
use rayon::prelude::*;

use crate::forward::Step;
use crate::math::{sigmoid, silu, softmax, top_k};
use crate::matmul::{Product, products};
use crate::tap::{LayerTap, Point};

/// Which experts each token of a step uses.
struct Routes {
    /// By falling weight, `[tokens, experts_per_token]`.
    experts: Vec<usize>,
    /// Weights that sum to 1 over a token's experts, like `experts`.
    weights: Vec<f32>,
}

/// Tokens that share an expert.
struct Group<'a> {
    expert: &'a Expert,
    /// Entries of [`Routes`] that chose it, in order; entry `i` is of token `i / experts_per_token`.
    entries: Vec<usize>,
    /// Their hidden states, `[entries, hidden]`.
    x: Vec<f32>,
    /// `[entries, width]`.
    gate: Vec<f32>,
    /// `[entries, width]`.
    up: Vec<f32>,
    /// `[entries, hidden]`.
    out: Vec<f32>,
}

/// Applies shared and routed experts to `h`, `[tokens, hidden]`.
pub fn forward(step: &Step<'_>, w: &Moe, h: &[f32], tap: LayerTap<'_>) -> Vec<f32> {
    let (hidden, k) = (step.config.hidden_size, step.config.moe.experts_per_token);
    let n = step.tokens();
    let mut scores = vec![0.0; n * w.experts.len()];
    let mut shared_gate = vec![0.0; n];
    products(
        step.device,
        &mut [
            Product { w: &w.router, x: h, out: &mut scores },
            Product { w: &w.shared_gate, x: h, out: &mut shared_gate },
        ],
    );
    let routes = route(&mut scores, w.experts.len(), k);
    for token in 0..n {
        let chosen = token * k..(token + 1) * k;
        tap(Point::Experts, &routes.experts[chosen.clone()].iter().map(|&e| e as f32).collect::<Vec<_>>());
        tap(Point::ExpertWeights, &routes.weights[chosen]);
    }
    let mut groups = group(w, &routes, h, hidden, k);
    run_experts(step, &mut groups);
    // Where each entry's result lies, so that a token adds its experts up in the order of its own weights,
    // whatever the other tokens chose.
    let mut place = vec![(0, 0); routes.experts.len()];
    for (g, group) in groups.iter().enumerate() {
        group.entries.iter().enumerate().for_each(|(i, &entry)| place[entry] = (g, i));
    }
    let mut out = vec![0.0; n * hidden];
    out.par_chunks_exact_mut(hidden).enumerate().for_each(|(token, out)| {
        let chosen = token * k..(token + 1) * k;
        let (shared, shared_row) = (groups.len() - 1, token);
        let routed = chosen.map(|entry| (routes.weights[entry], place[entry]));
        let shared = (sigmoid(shared_gate[token]), (shared, shared_row));
        for (weight, (group, row)) in routed.chain([shared]) {
            let y = &groups[group].out[row * hidden..][..hidden];
            out.iter_mut().zip(y).for_each(|(o, y)| *o += weight * y);
        }
    });
    out
}

/// Softmax over the experts, the largest `k`, renormalised.
fn route(scores: &mut [f32], experts: usize, k: usize) -> Routes {
    let mut routes = Routes { experts: Vec::new(), weights: Vec::new() };
    for p in scores.chunks_exact_mut(experts) {
        softmax(p);
        let chosen = top_k(p, k);
        let total: f32 = chosen.iter().map(|&e| p[e]).sum();
        routes.weights.extend(chosen.iter().map(|&e| p[e] / total));
        routes.experts.extend(chosen);
    }
    routes
}

/// One group per expert in use, and the shared expert with every token as the last.
fn group<'a>(w: &'a Moe, routes: &Routes, h: &[f32], hidden: usize, k: usize) -> Vec<Group<'a>> {
    let mut entries = vec![Vec::new(); w.experts.len()];
    for (entry, &e) in routes.experts.iter().enumerate() {
        entries[e].push(entry);
    }
    let make = |expert: &'a Expert, entries: Vec<usize>, x: Vec<f32>| {
        let (rows, width) = (x.len() / hidden, expert.gate.rows);
        let (gate, up, out) = (vec![0.0; rows * width], vec![0.0; rows * width], vec![0.0; rows * hidden]);
        Group { expert, entries, x, gate, up, out }
    };
    let used = w.experts.iter().zip(entries).filter(|(_, entries)| !entries.is_empty());
    let routed = used.map(|(expert, entries)| {
        let x = entries.iter().flat_map(|entry| &h[entry / k * hidden..][..hidden]).copied().collect();
        make(expert, entries, x)
    });
    routed.chain([make(&w.shared, Vec::new(), h.to_vec())]).collect()
}

fn run_experts(step: &Step<'_>, groups: &mut [Group<'_>]) {
    let mut list = Vec::new();
    for g in groups.iter_mut() {
        list.push(Product { w: &g.expert.gate, x: &g.x, out: &mut g.gate });
        list.push(Product { w: &g.expert.up, x: &g.x, out: &mut g.up });
    }
    products(step.device, &mut list);
    groups.par_iter_mut().for_each(|g| g.gate.iter_mut().zip(&g.up).for_each(|(g, u)| *g = silu(*g) * u));
    let down = groups.iter_mut().map(|g| Product { w: &g.expert.down, x: &g.gate, out: &mut g.out });
    products(step.device, &mut down.collect::<Vec<_>>());
}
