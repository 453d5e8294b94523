//! What each kernel should make of its buffers, by the CPU's functions.

use std::collections::HashMap;

use half::{bf16, f16};
use lily_cpu::math::{rms_norm, rotary, rotate, sigmoid};
use lily_cpu::reference::matvec;
use lily_model::config::Config;
use lily_model::matrix::Matrix;
use lily_model::sample::{SampleParams, argmax};
use lily_model::weights::{Attention, Gdn, Layer, Mixer, Weights};

use crate::draw::{self, Draw};
use crate::plan::{Contents, KvType, PAGE, State};

mod experts;
mod gdn;

/// Positions of a block of `attend_rows`.
const POSITIONS: usize = 32;

fn normed(x: &[f32], gains: &[f32], eps: f32) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    rms_norm(x, gains, eps, &mut out);
    out
}

fn add(x: &[f32], y: &[f32]) -> Vec<f32> {
    x.iter().zip(y).map(|(x, y)| x + y).collect()
}

fn half(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

/// W x; with `rounds` of numbers rounded to half, as tensor operations have it.
fn product(w: &Matrix, x: &[f32], rounds: bool) -> Vec<f32> {
    if !rounds {
        return matvec(w, x);
    }
    let x: Vec<f32> = x.iter().copied().map(half).collect();
    let mut row = vec![0.0; w.cols];
    let dot = |r| {
        w.read_row(r, &mut row);
        row.iter().zip(&x).map(|(w, x)| half(*w) * x).sum()
    };
    (0..w.rows).map(dot).collect()
}

/// What is checked, and the values it should have; of words, the bits.
pub type Expected = Vec<(Contents, Vec<f32>)>;

fn scratch(name: &'static str, values: Vec<f32>) -> (Contents, Vec<f32>) {
    (Contents::Scratch(name), values)
}

/// Values that are kept as half.
fn halves(name: &'static str, values: Vec<f32>) -> (Contents, Vec<f32>) {
    scratch(name, values.into_iter().map(half).collect())
}

/// Whether a scratch buffer is of numbers in half.
pub fn is_half(contents: &Contents) -> bool {
    matches!(contents, Contents::Scratch(name) if name.ends_with("_half"))
}

fn bits(word: usize) -> f32 {
    f32::from_bits(word as u32)
}

/// Positions of a part: `part_length` of `attention.metal`.
fn part_length(count: usize, parts: usize) -> usize {
    count.div_ceil(parts).div_ceil(POSITIONS).max(2) * POSITIONS
}

/// A launch, and what is bound to it before it runs: of each buffer the part that it may touch.
pub struct Launched<'a> {
    /// Shapes.
    pub config: &'a Config,
    /// Weights.
    pub weights: &'a Weights,
    /// Which layer it is of.
    pub layer: usize,
    /// Of the segment, if it is one's.
    pub position: usize,
    /// Type of the cache.
    pub kv: KvType,
    /// Values; of words, the bits. A name stands for one buffer of the launch.
    pub before: HashMap<Contents, Vec<f32>>,
}

impl Launched<'_> {
    fn scratch(&self, name: &'static str) -> &[f32] {
        self.before.get(&Contents::Scratch(name)).map_or(&[], Vec::as_slice)
    }

    /// Rows of a scratch buffer.
    fn rows(&self, name: &'static str, width: usize) -> std::slice::ChunksExact<'_, f32> {
        self.scratch(name).chunks_exact(width)
    }

    fn x(&self) -> std::slice::ChunksExact<'_, f32> {
        self.rows("x", self.config.hidden_size)
    }

    fn state(&self, state: State) -> &[f32] {
        self.before.get(&Contents::State(self.layer, state)).map_or(&[], Vec::as_slice)
    }

    fn numbers(&self) -> &[u32] {
        let numbers = |c: &'_ Contents| matches!(c, Contents::Numbers(_));
        match self.before.keys().find(|c| numbers(c)) {
            Some(Contents::Numbers(words)) => words,
            _ => &[],
        }
    }

    /// Name of the only matrix, or vector, that is bound.
    fn name(&self) -> &str {
        let name = |c: &'_ Contents| matches!(c, Contents::Codes(_) | Contents::Vector(_));
        match self.before.keys().find(|c| name(c)) {
            Some(Contents::Codes(name) | Contents::Vector(name)) => name,
            _ => "",
        }
    }

    fn of_layer(&self) -> Option<&Layer> {
        self.weights.layers.get(self.layer)
    }

    fn gdn(&self) -> Option<&Gdn> {
        match &self.of_layer()?.mixer {
            Mixer::Gdn(w) => Some(w),
            Mixer::Attention(_) => None,
        }
    }

    fn attention(&self) -> Option<&Attention> {
        match &self.of_layer()?.mixer {
            Mixer::Attention(w) => Some(w),
            Mixer::Gdn(_) => None,
        }
    }

    fn matrix(&self) -> Option<&Matrix> {
        Some(match self.name().rsplit('.').next()? {
            "embed_tokens" | "lm_head" => &self.weights.lm_head,
            "in_proj_qkv" => &self.gdn()?.in_proj_qkv,
            "in_proj_z" => &self.gdn()?.in_proj_z,
            "in_proj_b" => &self.gdn()?.in_proj_b,
            "in_proj_a" => &self.gdn()?.in_proj_a,
            "out_proj" => &self.gdn()?.out_proj,
            "q_proj" => &self.attention()?.q_proj,
            "k_proj" => &self.attention()?.k_proj,
            "v_proj" => &self.attention()?.v_proj,
            "o_proj" => &self.attention()?.o_proj,
            "gate" => &self.of_layer()?.moe.router,
            "shared_expert_gate" => &self.of_layer()?.moe.shared_gate,
            _ => return None,
        })
    }

    /// What a kernel should make of the buffers; `None`: nobody has said, or they don't belong to it.
    pub fn of(&self, kernel: &str) -> Option<Expected> {
        let rounds = kernel.contains("_tensor");
        Some(match kernel {
            "embed" => self.embed(),
            "project_gdn" => self.project_gdn()?,
            "delta" => self.delta(true)?,
            "delta_chunks" => self.delta(false)?,
            "prepare_chunks" => self.prepare_chunks()?,
            "keep_inputs" => self.keep_inputs(),
            "norm_heads" => vec![scratch("gated", self.normed_heads())],
            "gate_heads" => vec![scratch("gated", self.gated_heads()?)],
            "gate_heads_half" => vec![halves("gated_half", self.gated_heads()?)],
            "norm_heads_half" => vec![halves("gated_half", self.normed_heads())],
            "out_gdn" => self.out(&self.gdn()?.out_proj, &self.normed_heads()),
            "project_attention" => self.project_attention()?,
            "append" => self.append()?,
            "attend" => self.attend()?,
            "attend_rows" | "attend_tensor" => vec![scratch("parts", self.attended(self.scratch("q")))],
            "combine" => vec![scratch("attended", self.combined())],
            "combine_half" => vec![halves("attended_half", self.combined())],
            "out_attention" => self.out(&self.attention()?.o_proj, self.scratch("attended")),
            "router" => self.router()?,
            "gate_up" => self.gate_up()?,
            "down" => self.down()?,
            "norm_rows" => vec![scratch("h", self.normed_rows()?)],
            "norm_rows_half" => vec![halves("h_half", self.normed_rows()?)],
            "norm_rows_both" => {
                let h = self.normed_rows()?;
                vec![scratch("h", h.clone()), halves("h_half", h)]
            }
            "matmul" | "matmul_16" | "matmul_router" | "matmul_router_32" | "matmul_few"
            | "matmul_tensor" | "matmul_tensor_32" => self.matmul(rounds)?,
            "route" => self.route()?,
            "sort_pairs" => self.sort_pairs()?,
            "gather_pairs" => self.gather_pairs()?,
            "gate_up_rows" | "gate_up_tensor" => self.gate_up_rows(rounds)?,
            "down_rows" | "down_tensor" => self.down_rows(rounds)?,
            "sum_slots" => self.sum_slots(),
            "lm_head" => {
                let (x, weights) = (self.scratch("x"), &self.weights);
                let h = normed(x, &weights.norm, self.config.rms_norm_eps);
                vec![(Contents::Logits, matvec(&weights.lm_head, &h))]
            }
            "best" => self.best(),
            // Words, compared by the caller.
            "finish" | "advance" => vec![],
            _ => return None,
        })
    }

    fn embed(&self) -> Expected {
        let mut x = Vec::new();
        for token in self.before.get(&Contents::Token).into_iter().flatten() {
            let mut row = vec![0.0; self.config.hidden_size];
            self.weights.embedding.read_row(token.to_bits() as usize, &mut row);
            x.extend(row);
        }
        vec![scratch("x", x)]
    }

    fn normed_input(&self, gains: &[f32]) -> Vec<Vec<f32>> {
        self.x().map(|x| normed(x, gains, self.config.rms_norm_eps)).collect()
    }

    fn input_norm(&self) -> &[f32] {
        self.of_layer().map_or(&[], |layer| &layer.input_norm)
    }

    fn middle_norm(&self) -> &[f32] {
        self.of_layer().map_or(&[], |layer| &layer.post_attention_norm)
    }

    fn normed_rows(&self) -> Option<Vec<f32>> {
        let gains = match self.name().rsplit('.').next()? {
            "input_layernorm" => self.input_norm(),
            "post_attention_layernorm" => self.middle_norm(),
            _ => &self.weights.norm,
        };
        Some(self.normed_input(gains).concat())
    }

    /// Of the buffers that may be one, the output is the one that isn't the input.
    fn matmul(&self, rounds: bool) -> Option<Expected> {
        let &[rows, cols, outs, add] = self.numbers() else { return None };
        let [rows, cols, outs] = [rows, cols, outs].map(|n| n as usize);
        let matrix = self.matrix()?;
        if (matrix.rows, matrix.cols) != (outs, cols) {
            return None;
        }
        let input =
            ["h", "gated", "attended", "h_half", "gated_half", "attended_half"].map(Contents::Scratch);
        let input = input.iter().find(|c| self.before.contains_key(c))?;
        let output =
            |c: &&Contents| matches!(c, Contents::Logits) || matches!(c, Contents::Scratch(_)) && *c != input;
        let output = self.before.keys().find(output)?;
        let mut y = self.before[output].clone();
        if y.len() != rows * outs {
            return None;
        }
        for (row, x) in self.before[input].chunks_exact(cols).enumerate() {
            for (y, new) in y[row * outs..].iter_mut().zip(product(matrix, x, rounds)) {
                *y = if add == 1 { *y + new } else { new };
            }
        }
        Some(vec![(output.clone(), y)])
    }

    fn out(&self, matrix: &Matrix, y: &[f32]) -> Expected {
        vec![scratch("x", add(self.scratch("x"), &matvec(matrix, y)))]
    }

    fn project_attention(&self) -> Option<Expected> {
        let (w, h) = (self.attention()?, &self.normed_input(self.input_norm())[0]);
        Some(vec![
            scratch("queries", matvec(&w.q_proj, h)),
            scratch("new_keys", matvec(&w.k_proj, h)),
            scratch("new_values", matvec(&w.v_proj, h)),
        ])
    }

    /// As the cache holds a number.
    fn rounded(&self, x: f32) -> f32 {
        if self.kv == KvType::Bf16 { bf16::from_f32(x).to_f32() } else { x }
    }

    /// A head, normed and rotated.
    fn turned(&self, head: &[f32], gains: &[f32], row: usize) -> Vec<f32> {
        let (c, a) = (&self.config, &self.config.attention);
        let mut angles = vec![(0.0, 0.0); a.rotary_dim / 2];
        rotary((self.position + row) as u32, a.rope_theta, &mut angles);
        let mut head = normed(head, gains, c.rms_norm_eps);
        rotate(&mut head, &angles);
        head
    }

    /// Queries, normed, rotated and scaled.
    fn q(&self) -> Option<Vec<f32>> {
        let (a, q_norm) = (&self.config.attention, &self.attention()?.q_norm);
        let row = |(row, queries): (usize, &[f32])| {
            let heads = queries.chunks_exact(2 * a.head_dim);
            let turned = heads.flat_map(|qg| self.turned(&qg[..a.head_dim], q_norm, row));
            turned.collect::<Vec<_>>()
        };
        let q = self.rows("queries", 2 * a.query_width()).enumerate().flat_map(row);
        Some(q.map(|q| q * (a.head_dim as f32).powf(-0.5)).collect())
    }

    /// Keys and values with the new ones.
    fn appended(&self) -> Option<[Vec<f32>; 2]> {
        let (a, k_norm) = (&self.config.attention, &self.attention()?.k_norm);
        let mut keys = self.state(State::Keys).to_vec();
        let mut values = self.state(State::Values).to_vec();
        let new = self.rows("new_keys", a.kv_width()).zip(self.rows("new_values", a.kv_width()));
        for (row, (new_keys, new_values)) in new.enumerate() {
            let at = (self.position + row) * a.kv_width();
            let heads = new_keys.chunks_exact(a.head_dim);
            let turned = heads.flat_map(|k| self.turned(k, k_norm, row));
            keys[at..].iter_mut().zip(turned).for_each(|(to, k)| *to = self.rounded(k));
            values[at..].iter_mut().zip(new_values).for_each(|(to, v)| *to = self.rounded(*v));
        }
        Some([keys, values])
    }

    fn append(&self) -> Option<Expected> {
        let a = &self.config.attention;
        let q = self.q()?.into_iter().map(|q| self.rounded(q)).collect();
        let [mut keys, mut values] = self.appended()?;
        let end = self.position + self.scratch("new_keys").len() / a.kv_width();
        let behind = end * a.kv_width()..end.next_multiple_of(PAGE) * a.kv_width();
        keys[behind.clone()].fill(0.0);
        values[behind].fill(0.0);
        Some(vec![
            scratch("q", q),
            (Contents::State(self.layer, State::Keys), keys),
            (Contents::State(self.layer, State::Values), values),
        ])
    }

    /// The cache behind the launch, and the attended values before the gate.
    fn attend(&self) -> Option<Expected> {
        let [keys, values] = self.appended()?;
        let keys = (Contents::State(self.layer, State::Keys), keys);
        let values = (Contents::State(self.layer, State::Values), values);
        let mut before = self.before.clone();
        before.extend([keys.clone(), values.clone()]);
        let appended = Launched { before, ..*self };
        // Checked behind a merge of the parts.
        Some(vec![scratch("parts", appended.attended(&self.q()?)), keys, values])
    }

    /// Attended values of queries, before the gate, `[rows, heads, head_dim]`. In f64: contexts are long.
    fn attended(&self, q: &[f32]) -> Vec<f32> {
        let a = &self.config.attention;
        let d = a.head_dim;
        let mut out = Vec::new();
        for (i, q) in q.chunks_exact(d).enumerate() {
            let (at, kv_head) = (self.position + i / a.heads, i % a.heads / (a.heads / a.kv_heads));
            let of = |state, t: usize| &self.state(state)[(t * a.kv_heads + kv_head) * d..][..d];
            let dot = |k: &[f32]| q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>();
            let scores: Vec<f64> = (0..=at).map(|t| dot(of(State::Keys, t))).collect();
            let top = scores.iter().fold(f64::NEG_INFINITY, |m, s| m.max(*s));
            let (mut total, mut o) = (0.0, vec![0.0; d]);
            for (t, score) in scores.iter().enumerate() {
                let p = (score - top).exp();
                total += p;
                o.iter_mut().zip(of(State::Values, t)).for_each(|(o, v)| *o += p * f64::from(*v));
            }
            out.extend(o.iter().map(|o| (o / total) as f32));
        }
        out
    }

    /// Parts and their weights, merged, `[rows, heads, head_dim]`.
    pub fn merged(&self, parts: &[f32], weights: &[f32]) -> Vec<f32> {
        let a = &self.config.attention;
        let (d, most) = (a.head_dim, weights.len() / (2 * self.tokens() * a.heads));
        let count = self.position + self.tokens();
        let used = count.div_ceil(part_length(count, most));
        let mut out = Vec::new();
        for (parts, weights) in parts.chunks_exact(most * d).zip(weights.chunks_exact(2 * most)) {
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

    /// Tokens of the segment of an attention launch.
    fn tokens(&self) -> usize {
        let width = self.config.attention.query_width();
        let of = |name, width: usize| self.before.get(&Contents::Scratch(name)).map(|v| v.len() / width);
        of("q", width).or(of("queries", 2 * width)).unwrap_or(1)
    }

    fn combined(&self) -> Vec<f32> {
        let d = self.config.attention.head_dim;
        let merged = self.merged(self.scratch("parts"), self.scratch("weights"));
        let heads = self.rows("queries", 2 * d).zip(merged.chunks_exact(d));
        heads.flat_map(|(qg, o)| o.iter().zip(&qg[d..]).map(|(o, g)| o * sigmoid(*g))).collect()
    }

    /// The first logit of each group, if nothing changes them; what else a draw makes of them shows in its token.
    fn best(&self) -> Expected {
        let Some(draw) = self.before.get(&Contents::Draw) else { return Vec::new() };
        let plain = Draw::new(&SampleParams::greedy(), &[], false, self.config.vocab_size).words;
        // Kind, changes and mask.
        if [4, 11, 13].iter().any(|&word| draw[word].to_bits() != plain[word]) {
            return Vec::new();
        }
        let logits = self.before.get(&Contents::Logits).map_or(&[][..], Vec::as_slice);
        let first = |(group, logits): (usize, &[f32])| {
            let best = argmax(logits) as usize;
            [logits[best], 0.0, bits(group * draw::GROUP + best)]
        };
        vec![scratch("best", logits.chunks(draw::GROUP).enumerate().flat_map(first).collect())]
    }
}
