//! Each kernel of a planned step on random values, against the CPU's functions.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::collections::HashMap;

use common::machine::Machine;
use common::model::{Model, edge_shapes, folder};
use common::signature::{Parameter, signatures};
use common::{Guard, ORDERS};
use half::bf16;
use lily_cpu::math::{l2_normalise, rms_norm, rotary, rotate, sigmoid, silu, softmax, softplus, top_k};
use lily_cpu::reference::{L2_EPS, matvec};
use lily_metal::plan::{Access, Contents, KvType, PARTS, State};
use lily_metal::{plan, source};
use lily_model::config::Config;
use lily_model::presets::CONFIG_35B_A3B;
use lily_model::sample::argmax;
use lily_model::weights::{Attention, Gdn, Mixer};

/// Of the largest value.
const TOLERANCE: f32 = 2e-5;

#[track_caller]
fn assert_close(what: &str, got: &[f32], expected: &[f32]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let size = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    for (i, (a, b)) in got.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= TOLERANCE * size, "{what}: {a} at {i}, expected {b} of up to {size}");
    }
}

fn normed(x: &[f32], gains: &[f32], eps: f32) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    rms_norm(x, gains, eps, &mut out);
    out
}

fn add(x: &[f32], y: &[f32]) -> Vec<f32> {
    x.iter().zip(y).map(|(x, y)| x + y).collect()
}

/// What is checked, and the values it should have.
type Expected = Vec<(Contents, Vec<f32>)>;

fn scratch(name: &'static str, values: Vec<f32>) -> (Contents, Vec<f32>) {
    (Contents::Scratch(name), values)
}

/// What the buffers of a launch hold before it runs.
struct Step<'a> {
    model: &'a Model,
    layer: usize,
    position: u32,
    token: u32,
    kv: KvType,
    before: HashMap<Contents, Vec<f32>>,
}

impl Step<'_> {
    fn scratch(&self, name: &'static str) -> &[f32] {
        &self.before[&Contents::Scratch(name)]
    }

    fn state(&self, state: State) -> &[f32] {
        &self.before[&Contents::State(self.layer, state)]
    }

    fn gdn_weights(&self) -> &Gdn {
        match &self.model.weights.layers[self.layer].mixer {
            Mixer::Gdn(w) => w,
            Mixer::Attention(_) => panic!("layer {} is attention", self.layer),
        }
    }

    fn attention_weights(&self) -> &Attention {
        match &self.model.weights.layers[self.layer].mixer {
            Mixer::Attention(w) => w,
            Mixer::Gdn(_) => panic!("layer {} is Gated DeltaNet", self.layer),
        }
    }

    /// What a kernel should make of the buffers.
    fn expected(&self, kernel: &str) -> Expected {
        let weights = &self.model.weights;
        let x = || self.scratch("x");
        match kernel {
            "embed" => {
                let mut row = vec![0.0; self.model.config.hidden_size];
                weights.embedding.read_row(self.token as usize, &mut row);
                vec![scratch("x", row)]
            }
            "project_gdn" => self.project_gdn(),
            "delta" => self.delta(),
            "out_gdn" => self.out_gdn(),
            "project_attention" => {
                let (w, h) = (self.attention_weights(), self.normed_input());
                let rows = [matvec(&w.q_proj, &h), matvec(&w.k_proj, &h), matvec(&w.v_proj, &h)];
                vec![scratch("projected", rows.concat())]
            }
            "attend" => self.attend(),
            "combine" => self.combine(),
            "out_attention" => {
                let y = matvec(&self.attention_weights().o_proj, self.scratch("attended"));
                vec![scratch("x", add(x(), &y))]
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
                let h = normed(x(), &weights.norm, self.model.config.rms_norm_eps);
                vec![(Contents::Logits, matvec(&weights.lm_head, &h))]
            }
            // Words, compared below.
            "finish" => vec![],
            other => panic!("no check for {other}"),
        }
    }

    fn normed_input(&self) -> Vec<f32> {
        let gains = &self.model.weights.layers[self.layer].input_norm;
        normed(self.scratch("x"), gains, self.model.config.rms_norm_eps)
    }

    fn normed_middle(&self) -> Vec<f32> {
        let gains = &self.model.weights.layers[self.layer].post_attention_norm;
        normed(self.scratch("x"), gains, self.model.config.rms_norm_eps)
    }

    fn project_gdn(&self) -> Expected {
        let (w, h, g) = (self.gdn_weights(), self.normed_input(), &self.model.config.gdn);
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

    fn delta(&self) -> Expected {
        let (w, g) = (self.gdn_weights(), &self.model.config.gdn);
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

    fn out_gdn(&self) -> Expected {
        let (g, eps) = (&self.model.config.gdn, self.model.config.rms_norm_eps);
        let blocks = g.value_dim / 32;
        let heads = self.scratch("gated").chunks_exact(g.value_dim);
        let factor = |s: &[f32]| 1.0 / (s.iter().sum::<f32>() / g.value_dim as f32 + eps).sqrt();
        let factors = self.scratch("squares").chunks_exact(blocks).map(factor);
        let y: Vec<f32> = heads.zip(factors).flat_map(|(o, f)| o.iter().map(move |o| o * f)).collect();
        vec![scratch("x", add(self.scratch("x"), &matvec(&self.gdn_weights().out_proj, &y)))]
    }

    /// As the cache holds a number.
    fn rounded(&self, x: f32) -> f32 {
        if self.kv == KvType::Bf16 { bf16::from_f32(x).to_f32() } else { x }
    }

    /// The cache behind the launch, and the attended values before the gate.
    fn attend(&self) -> Expected {
        let (w, c) = (self.attention_weights(), &self.model.config);
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
    fn merged(&self, parts: &[f32], weights: &[f32]) -> Vec<f32> {
        let (d, count) = (self.model.config.attention.head_dim, self.position as usize + 1);
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
        let d = self.model.config.attention.head_dim;
        let merged = self.merged(self.scratch("parts"), self.scratch("weights"));
        let heads = self.scratch("projected").chunks_exact(2 * d).zip(merged.chunks_exact(d));
        let gated = heads.flat_map(|(qg, o)| o.iter().zip(&qg[d..]).map(|(o, g)| o * sigmoid(*g)));
        vec![scratch("attended", gated.collect())]
    }

    /// Experts and their weights, by the router's logits.
    fn route(&self) -> (Vec<usize>, Vec<f32>) {
        let m = &self.model.config.moe;
        let mut p = self.scratch("router_logits")[..m.experts].to_vec();
        softmax(&mut p);
        let mut chosen = vec![0; m.experts_per_token];
        top_k(&p, &mut chosen);
        let total: f32 = chosen.iter().map(|&e| p[e]).sum();
        let weights = chosen.iter().map(|&e| p[e] / total).collect();
        (chosen, weights)
    }

    fn gate_up(&self) -> Expected {
        let (moe, m) = (&self.model.weights.layers[self.layer].moe, &self.model.config.moe);
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
        let (moe, m) = (&self.model.weights.layers[self.layer].moe, &self.model.config.moe);
        let width = m.expert_width.max(m.shared_width);
        let experts = self.scratch("chosen").iter().map(|e| &moe.experts[e.to_bits() as usize]);
        let mut x = self.scratch("x").to_vec();
        for (expert, middle) in experts.chain([&moe.shared]).zip(self.scratch("middle").chunks_exact(width)) {
            x = add(&x, &matvec(&expert.down, &middle[..expert.down.cols]));
        }
        vec![scratch("x", x)]
    }
}

/// What a buffer holds, as f32; of words, the bits.
fn values(machine: &mut Machine, kv: KvType, contents: &Contents) -> Vec<f32> {
    let memory = machine.at(contents);
    match contents {
        Contents::State(_, State::Keys | State::Values) if kv == KvType::Bf16 => {
            memory.bytes().as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()
        }
        _ => memory.floats(),
    }
}

/// Random state of a sequence of so many tokens.
fn randomise(machine: &mut Machine, config: &Config, kv: KvType, position: u32, random: &mut fastrand::Rng) {
    for at in 0..machine.plan.buffers.len() {
        let Contents::State(_, state) = machine.plan.buffers[at].contents else { continue };
        let memory = &mut machine.memory[at];
        let mut value = || random.f32() * 2.0 - 1.0;
        match state {
            State::Conv | State::Recurrent => {
                let values: Vec<f32> = (0..memory.bytes / 4).map(|_| value() * 0.5).collect();
                memory.put_floats(&values);
            }
            State::Keys | State::Values => {
                let written = position as usize * config.attention.kv_width() * kv.size();
                let written = &mut memory.bytes_mut()[..written];
                match kv {
                    KvType::F32 => {
                        written.as_chunks_mut::<4>().0.iter_mut().for_each(|to| *to = value().to_le_bytes());
                    }
                    KvType::Bf16 => written
                        .as_chunks_mut::<2>()
                        .0
                        .iter_mut()
                        .for_each(|to| *to = bf16::from_f32(value()).to_le_bytes()),
                }
            }
        }
    }
    machine.at(&Contents::Position).put([position]);
}

/// Runs a step launch by launch and checks what each one leaves.
fn check_step(name: &str, model: &Model, machine: &mut Machine, kv: KvType, position: u32, token: u32) {
    machine.at(&Contents::Token).put([token]);
    let mut layer = 0;
    for launch in machine.plan.launches.clone() {
        let bound: Vec<Contents> =
            launch.bindings.iter().map(|b| machine.plan.buffers[b.buffer].contents.clone()).collect();
        let before = bound.into_iter().map(|c| (c.clone(), values(machine, kv, &c))).collect();
        let step = Step { model, layer, position, token, kv, before };
        machine.run_launch(&launch);
        for (contents, expected) in step.expected(launch.kernel) {
            let what = format!("{name}, position {position}, layer {layer}, {}: {contents:?}", launch.kernel);
            let got = values(machine, kv, &contents);
            match contents {
                Contents::Scratch("parts") => {
                    let weights = values(machine, kv, &Contents::Scratch("weights"));
                    assert_close(&what, &step.merged(&got, &weights), &expected);
                }
                Contents::Scratch("chosen") => {
                    let bits = |x: Vec<f32>| x.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                    assert_eq!(bits(got), bits(expected), "{what}");
                }
                Contents::State(_, State::Keys | State::Values) => {
                    let end = (position as usize + 1) * model.config.attention.kv_width();
                    assert!(got[end..].iter().all(|x| x.is_nan()), "{what}: later positions are written");
                    if kv == KvType::Bf16 {
                        // A value between two bf16 may fall either way.
                        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= b.abs() / 128.0;
                        assert!(got[..end].iter().zip(&expected).all(near), "{what}");
                    } else {
                        assert_close(&what, &got[..end], &expected[..end]);
                    }
                }
                // Rows of a slot that its expert doesn't have stay as they were: NaN, or of an earlier layer.
                Contents::Scratch("middle") => {
                    let (got, expected): (Vec<f32>, Vec<f32>) =
                        got.iter().zip(&expected).filter(|(_, e)| !e.is_nan()).unzip();
                    assert_close(&what, &got, &expected);
                }
                _ => assert_close(&what, &got, &expected),
            }
        }
        layer += usize::from(launch.kernel == "down");
    }
    let best = argmax(&machine.floats(&Contents::Logits));
    let words = [Contents::Token, Contents::Position, Contents::Broken].map(|c| machine.at(&c).words()[0]);
    assert_eq!(words, [best, position + 1, 0], "{name}, position {position}");
}

fn check_model(name: &str, model: &Model, positions: &[u32], kv: KvType, guard: Guard) {
    check_machine(name, model, &mut model.machine(2200, kv, guard), positions, kv);
}

fn check_machine(name: &str, model: &Model, machine: &mut Machine, positions: &[u32], kv: KvType) {
    let mut random = fastrand::Rng::with_seed(3);
    for (&position, order) in positions.iter().zip(ORDERS.into_iter().cycle()) {
        machine.clear();
        machine.order = order;
        randomise(machine, &model.config, kv, position, &mut random);
        let token = random.u32(0..model.config.vocab_size as u32);
        check_step(name, model, machine, kv, position, token);
    }
}

#[test]
fn each_kernel_computes_what_the_reference_does() {
    let nano = Model::load(&folder("tests/data/nano/mlx-4bit"));
    check_model("nano", &nano, &[0, 1, 130], KvType::Bf16, Guard::Start);
}

/// Positions: the first ones, on both sides of an edge between parts, and with all parts in use.
#[test]
#[ignore = "a minute: shapes at the edges, more positions"]
fn each_kernel_computes_what_the_reference_does_at_edge_shapes() {
    for (name, model) in edge_shapes() {
        check_model(name, &model, &[0, 3, 63, 64, 2100], KvType::F32, Guard::End);
        check_model(name, &model, &[2, 127, 128], KvType::Bf16, Guard::Start);
    }
}

/// Without any one of their barriers the kernels are wrong, in one order of threads or another, and the checks above see it.
#[test]
#[ignore = "a minute: compiles the kernels once for each barrier"]
fn every_barrier_is_needed() {
    const BARRIER: &str = "threadgroup_barrier(mem_flags::mem_threadgroup);";
    let nano = Model::load(&folder("tests/data/nano/mlx-4bit"));
    let source = source::source(&nano.config, KvType::F32);
    let barriers: Vec<usize> = source.match_indices(BARRIER).map(|(at, _)| at).collect();
    assert_eq!(barriers.len(), 8);
    let survivors: Vec<usize> = (0..barriers.len())
        .filter(|&i| {
            let (before, after) = source.split_at(barriers[i]);
            let mutant = format!("{before}{}", &after[BARRIER.len()..]);
            let mut machine = nano.machine_of(&mutant, 2200, KvType::F32, Guard::End);
            let check = || check_machine("mutant", &nano, &mut machine, &[130, 131, 2100], KvType::F32);
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)).is_ok()
        })
        .collect();
    assert!(survivors.is_empty(), "barriers that can be removed unseen, of all in order: {survivors:?}");
}

/// The plan and the kernels' own text agree on buffers, threadgroup memory, threads, and what is written.
#[test]
fn launches_are_bound_as_the_kernels_signatures_say() {
    let config = Config::from_json(CONFIG_35B_A3B).unwrap();
    let signatures = signatures(&source::source(&config, KvType::Bf16)).unwrap();
    let plan = plan(&config, 128, KvType::Bf16).unwrap();
    for launch in &plan.launches {
        let signature = signatures.iter().find(|s| s.name == launch.kernel).unwrap();
        assert_eq!(signature.threads, launch.threads, "{}", launch.kernel);
        let (mut buffers, mut memory) = (0, 0);
        for parameter in &signature.parameters {
            match parameter {
                Parameter::Buffer { index, writable } => {
                    assert_eq!(
                        (*index, *writable),
                        (buffers, launch.bindings[buffers].access != Access::Read)
                    );
                    buffers += 1;
                }
                Parameter::Threadgroup { index } => {
                    assert_eq!(*index, memory);
                    memory += 1;
                }
                Parameter::BuiltIn(_) => {}
            }
        }
        assert_eq!(
            (buffers, memory),
            (launch.bindings.len(), launch.threadgroup_memory.len()),
            "{}",
            launch.kernel
        );
    }
    for signature in &signatures {
        assert!(
            plan.launches.iter().any(|l| l.kernel == signature.name),
            "{} is never launched",
            signature.name
        );
    }
}
