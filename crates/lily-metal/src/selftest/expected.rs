//! What each kernel should make of what it reads, by the CPU's functions.

use std::collections::HashMap;

use half::bf16;
use lily_cpu::math::{l2_normalise, rms_norm, rotary, rotate, sigmoid, silu, softmax, softplus, top_k};
use lily_cpu::reference::{L2_EPS, matvec};
use lily_model::config::Config;
use lily_model::weights::{Attention, Gdn, Mixer, Weights};

use crate::plan::{Contents, KvType, PARTS, State};

fn normed(x: &[f32], gains: &[f32], eps: f32) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    rms_norm(x, gains, eps, &mut out);
    out
}

fn add(x: &[f32], y: &[f32]) -> Vec<f32> {
    x.iter().zip(y).map(|(x, y)| x + y).collect()
}

/// What is checked, and the values it should have.
pub type Expected = Vec<(Contents, Vec<f32>)>;

fn scratch(name: &'static str, values: Vec<f32>) -> (Contents, Vec<f32>) {
    (Contents::Scratch(name), values)
}

/// What the buffers of a launch hold before it runs.
pub struct Step<'a> {
    /// Shapes.
    pub config: &'a Config,
    /// Weights.
    pub weights: &'a Weights,
    /// Layer of the launch.
    pub layer: usize,
    /// Position of the token.
    pub position: u32,
    /// The token.
    pub token: u32,
    /// Type of the cache.
    pub kv: KvType,
    /// Values of the buffers that the launch is bound to; words as bits.
    pub before: HashMap<Contents, Vec<f32>>,
}

impl Step<'_> {
    fn scratch(&self, name: &'static str) -> &[f32] {
        self.before.get(&Contents::Scratch(name)).map_or(&[], Vec::as_slice)
    }

    fn state(&self, state: State) -> &[f32] {
        self.before.get(&Contents::State(self.layer, state)).map_or(&[], Vec::as_slice)
    }

    /// What a kernel should make of the buffers; `None`: nobody has said.
    pub fn expected(&self, kernel: &str) -> Option<Expected> {
        match &self.weights.layers.get(self.layer).map(|layer| &layer.mixer) {
            Some(Mixer::Gdn(w)) => self.of_gdn(w, kernel),
            Some(Mixer::Attention(w)) => self.of_attention(w, kernel),
            None => None,
        }
        .or_else(|| self.of_every_layer(kernel))
    }

    fn of_gdn(&self, w: &Gdn, kernel: &str) -> Option<Expected> {
        match kernel {
            "project_gdn" => Some(self.project_gdn(w)),
            "delta" => Some(self.delta(w)),
            "out_gdn" => Some(self.out_gdn(w)),
            _ => None,
        }
    }

    fn of_attention(&self, w: &Attention, kernel: &str) -> Option<Expected> {
        Some(match kernel {
            "project_attention" => {
                let h = self.normed_input();
                let rows = [matvec(&w.q_proj, &h), matvec(&w.k_proj, &h), matvec(&w.v_proj, &h)];
                vec![scratch("projected", rows.concat())]
            }
            "attend" => self.attend(w),
            "combine" => self.combine(),
            "out_attention" => {
                let y = matvec(&w.o_proj, self.scratch("attended"));
                vec![scratch("x", add(self.scratch("x"), &y))]
            }
            _ => return None,
        })
    }

    fn of_every_layer(&self, kernel: &str) -> Option<Expected> {
        let weights = self.weights;
        Some(match kernel {
            "embed" => {
                let mut row = vec![0.0; self.config.hidden_size];
                weights.embedding.read_row(self.token as usize, &mut row);
                vec![scratch("x", row)]
            }
            "router" => {
                let (moe, h) = (&weights.layers[self.layer].moe, self.normed_middle());
                vec![scratch(
                    "router_logits",
                    [matvec(&moe.router, &h), matvec(&moe.shared_gate, &h)].concat(),
                )]
            }
            "gate_up" => self.gate_up(),
            "down" => self.down(),
            "lm_head" => {
                let h = normed(self.scratch("x"), &weights.norm, self.config.rms_norm_eps);
                vec![(Contents::Logits, matvec(&weights.lm_head, &h))]
            }
            // Words, compared by the caller.
            "finish" => vec![],
            _ => return None,
        })
    }

    fn normed_input(&self) -> Vec<f32> {
        let gains = &self.weights.layers[self.layer].input_norm;
        normed(self.scratch("x"), gains, self.config.rms_norm_eps)
    }

    fn normed_middle(&self) -> Vec<f32> {
        let gains = &self.weights.layers[self.layer].post_attention_norm;
        normed(self.scratch("x"), gains, self.config.rms_norm_eps)
    }

    fn project_gdn(&self, w: &Gdn) -> Expected {
        let (h, g) = (self.normed_input(), &self.config.gdn);
        let channels = g.conv_channels();
        let mut conv = self.state(State::Conv).to_vec();
        let slot = self.position as usize % g.conv_kernel * channels;
        conv[slot..slot + channels].copy_from_slice(&matvec(&w.in_proj_qkv, &h));
        vec![
            (Contents::State(self.layer, State::Conv), conv),
            scratch("z", matvec(&w.in_proj_z, &h)),
            scratch("b", matvec(&w.in_proj_b, &h)),
            scratch("a", matvec(&w.in_proj_a, &h)),
        ]
    }

    fn delta(&self, w: &Gdn) -> Expected {
        let g = &self.config.gdn;
        let (dk, dv, channels) = (g.key_dim, g.value_dim, g.conv_channels());
        let ring = self.state(State::Conv);
        let convolved = |ch: usize| {
            let tap = |j: usize| {
                let slot = (self.position as usize + 1 + j) % g.conv_kernel;
                w.conv[ch * g.conv_kernel + j] * ring[slot * channels + ch]
            };
            silu((0..g.conv_kernel).map(tap).sum())
        };
        let u: Vec<f32> = (0..channels).map(convolved).collect();
        let key_width = g.key_heads * dk;
        let mut state = self.state(State::Recurrent).to_vec();
        let (mut gated, mut squares) = (Vec::new(), Vec::new());
        for head in 0..g.value_heads {
            let key_head = head / (g.value_heads / g.key_heads);
            let mut q = u[key_head * dk..][..dk].to_vec();
            let mut k = u[key_width + key_head * dk..][..dk].to_vec();
            l2_normalise(&mut q, L2_EPS, (dk as f32).powf(-0.5));
            l2_normalise(&mut k, L2_EPS, 1.0);
            let alpha = (-w.a_log[head].exp() * softplus(self.scratch("a")[head] + w.dt_bias[head])).exp();
            let beta = sigmoid(self.scratch("b")[head]);
            let mut o = vec![0.0; dv];
            for (column, o) in o.iter_mut().enumerate() {
                let s = &mut state[head * dk * dv..];
                let decayed: Vec<f32> = (0..dk).map(|i| alpha * s[i * dv + column]).collect();
                let known: f32 = decayed.iter().zip(&k).map(|(s, k)| s * k).sum();
                let error = beta * (u[2 * key_width + head * dv + column] - known);
                for i in 0..dk {
                    s[i * dv + column] = decayed[i] + k[i] * error;
                    *o += s[i * dv + column] * q[i];
                }
            }
            let z = &self.scratch("z")[head * dv..][..dv];
            gated.extend(o.iter().zip(&w.norm).zip(z).map(|((o, g), z)| o * g * silu(*z)));
            squares.extend(o.chunks_exact(32).map(|o| o.iter().map(|o| o * o).sum::<f32>()));
        }
        let recurrent = Contents::State(self.layer, State::Recurrent);
        vec![(recurrent, state), scratch("gated", gated), scratch("squares", squares)]
    }

    fn out_gdn(&self, w: &Gdn) -> Expected {
        let (g, eps) = (&self.config.gdn, self.config.rms_norm_eps);
        let blocks = g.value_dim / 32;
        let heads = self.scratch("gated").chunks_exact(g.value_dim);
        let factor = |s: &[f32]| 1.0 / (s.iter().sum::<f32>() / g.value_dim as f32 + eps).sqrt();
        let factors = self.scratch("squares").chunks_exact(blocks).map(factor);
        let y: Vec<f32> = heads.zip(factors).flat_map(|(o, f)| o.iter().map(move |o| o * f)).collect();
        vec![scratch("x", add(self.scratch("x"), &matvec(&w.out_proj, &y)))]
    }

    /// As the cache holds a number.
    fn rounded(&self, x: f32) -> f32 {
        if self.kv == KvType::Bf16 { bf16::from_f32(x).to_f32() } else { x }
    }

    /// The cache behind the launch, and the attended values before the gate.
    fn attend(&self, w: &Attention) -> Expected {
        let c = self.config;
        let (a, d, at) = (&c.attention, c.attention.head_dim, self.position as usize);
        let projected = self.scratch("projected");
        let (qg, kv) = projected.split_at(2 * a.query_width());
        let mut angles = vec![(0.0, 0.0); a.rotary_dim / 2];
        rotary(self.position, a.rope_theta, &mut angles);
        let turned = |head: &[f32], gains: &[f32]| {
            let mut head = normed(head, gains, c.rms_norm_eps);
            rotate(&mut head, &angles);
            head
        };
        let mut keys = self.state(State::Keys).to_vec();
        let mut values = self.state(State::Values).to_vec();
        let row = at * a.kv_width()..(at + 1) * a.kv_width();
        let new: Vec<f32> = kv[..a.kv_width()].chunks_exact(d).flat_map(|k| turned(k, &w.k_norm)).collect();
        keys[row.clone()].iter_mut().zip(&new).for_each(|(to, x)| *to = self.rounded(*x));
        values[row].iter_mut().zip(&kv[a.kv_width()..]).for_each(|(to, x)| *to = self.rounded(*x));
        let mut out = Vec::new();
        for (head, qg) in qg.chunks_exact(2 * d).enumerate() {
            let q = turned(&qg[..d], &w.q_norm);
            let kv_head = head / (a.heads / a.kv_heads);
            let of = |cache: &'_ [f32], t: usize| cache[(t * a.kv_heads + kv_head) * d..][..d].to_vec();
            let score = |t| q.iter().zip(of(&keys, t)).map(|(q, k)| q * k).sum::<f32>() / (d as f32).sqrt();
            let mut p: Vec<f32> = (0..=at).map(score).collect();
            softmax(&mut p);
            let mut o = vec![0.0; d];
            for (t, p) in p.iter().enumerate() {
                o.iter_mut().zip(of(&values, t)).for_each(|(o, v)| *o += p * v);
            }
            out.extend(o);
        }
        vec![
            (Contents::State(self.layer, State::Keys), keys),
            (Contents::State(self.layer, State::Values), values),
            // Checked behind a merge of the parts.
            scratch("parts", out),
        ]
    }

    /// Parts and their weights, merged, `[heads, head_dim]`.
    pub fn merged(&self, parts: &[f32], weights: &[f32]) -> Vec<f32> {
        let (d, count) = (self.config.attention.head_dim, self.position as usize + 1);
        let used = count.div_ceil(count.div_ceil(PARTS).max(64));
        let mut out = Vec::new();
        for (parts, weights) in parts.chunks_exact(PARTS * d).zip(weights.chunks_exact(2 * PARTS)) {
            let (weights, _) = weights[..2 * used].as_chunks::<2>();
            let top = weights.iter().fold(f32::NEG_INFINITY, |m, [top, _]| m.max(*top));
            let total: f32 = weights.iter().map(|[at, sum]| (at - top).exp() * sum).sum();
            let dim = |i: usize| {
                let part = |(p, [at, _]): (usize, &[f32; 2])| (at - top).exp() * parts[p * d + i];
                weights.iter().enumerate().map(part).sum::<f32>() / total
            };
            out.extend((0..d).map(dim));
        }
        out
    }

    fn combine(&self) -> Expected {
        let d = self.config.attention.head_dim;
        let merged = self.merged(self.scratch("parts"), self.scratch("weights"));
        let heads = self.scratch("projected").chunks_exact(2 * d).zip(merged.chunks_exact(d));
        let gated = heads.flat_map(|(qg, o)| o.iter().zip(&qg[d..]).map(|(o, g)| o * sigmoid(*g)));
        vec![scratch("attended", gated.collect())]
    }

    /// Experts and their weights, by the router's logits.
    fn route(&self) -> (Vec<usize>, Vec<f32>) {
        let m = &self.config.moe;
        let mut p = self.scratch("router_logits")[..m.experts].to_vec();
        softmax(&mut p);
        let mut chosen = vec![0; m.experts_per_token];
        top_k(&p, &mut chosen);
        let total: f32 = chosen.iter().map(|&e| p[e]).sum();
        let weights = chosen.iter().map(|&e| p[e] / total).collect();
        (chosen, weights)
    }

    fn gate_up(&self) -> Expected {
        let (moe, m) = (&self.weights.layers[self.layer].moe, &self.config.moe);
        let (h, (chosen, weights)) = (self.normed_middle(), self.route());
        let shared = sigmoid(self.scratch("router_logits")[m.experts]);
        let slots = chosen.iter().map(|&e| &moe.experts[e]).zip(weights).chain([(&moe.shared, shared)]);
        let mut middle = self.scratch("middle").to_vec();
        let width = m.expert_width.max(m.shared_width);
        for (out, (expert, weight)) in middle.chunks_exact_mut(width).zip(slots) {
            let pairs = matvec(&expert.gate, &h).into_iter().zip(matvec(&expert.up, &h));
            out.iter_mut().zip(pairs).for_each(|(out, (g, u))| *out = weight * silu(g) * u);
        }
        let chosen = chosen.iter().map(|&e| f32::from_bits(e as u32)).collect();
        vec![scratch("middle", middle), scratch("chosen", chosen)]
    }

    fn down(&self) -> Expected {
        let (moe, m) = (&self.weights.layers[self.layer].moe, &self.config.moe);
        let width = m.expert_width.max(m.shared_width);
        let experts = self.scratch("chosen").iter().map(|e| &moe.experts[e.to_bits() as usize]);
        let mut x = self.scratch("x").to_vec();
        for (expert, middle) in experts.chain([&moe.shared]).zip(self.scratch("middle").chunks_exact(width)) {
            x = add(&x, &matvec(&expert.down, &middle[..expert.down.cols]));
        }
        vec![scratch("x", x)]
    }
}
