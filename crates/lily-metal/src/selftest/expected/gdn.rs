//! The same of Gated DeltaNet.

use lily_cpu::math::{l2_normalise, sigmoid, silu, softplus};
use lily_cpu::reference::{L2_EPS, matvec};
use lily_model::weights::Gdn;

use super::{Expected, Launched, bits, scratch};
use crate::batch::{CHUNK_MATRICES, DELTA_CHUNK};
use crate::plan::{Contents, SETTLE_EVERY, State};

impl Launched<'_> {
    pub(super) fn project_gdn(&self) -> Option<Expected> {
        let (w, h) = (self.gdn()?, &self.normed_input(self.input_norm())[0]);
        Some(vec![
            scratch("qkv", matvec(&w.in_proj_qkv, h)),
            scratch("z", matvec(&w.in_proj_z, h)),
            scratch("b", matvec(&w.in_proj_b, h)),
            scratch("a", matvec(&w.in_proj_a, h)),
        ])
    }

    /// The ring behind a launch that keeps all inputs.
    fn kept(&self) -> Vec<f32> {
        let g = &self.config.gdn;
        let channels = g.conv_channels();
        let mut ring = self.state(State::Conv).to_vec();
        for (row, inputs) in self.rows("qkv", channels).enumerate() {
            let slot = (self.position + row) % g.conv_kernel * channels;
            ring[slot..slot + channels].copy_from_slice(inputs);
        }
        ring
    }

    pub(super) fn keep_inputs(&self) -> Expected {
        vec![(Contents::State(self.layer, State::Conv), self.kept())]
    }

    /// Convolved inputs of a row.
    fn convolved(&self, w: &Gdn, row: usize) -> Vec<f32> {
        let g = &self.config.gdn;
        let (channels, taps) = (g.conv_channels(), g.conv_kernel);
        let (new, ring) = (self.scratch("qkv"), self.state(State::Conv));
        let input = |ch: usize, j: usize| match (row + 1 + j).checked_sub(taps) {
            Some(row) => new[row * channels + ch],
            None => ring[(self.position + row + 1 + j) % taps * channels + ch],
        };
        let sum = |ch: usize| silu((0..taps).map(|j| w.conv[ch * taps + j] * input(ch, j)).sum());
        (0..channels).map(sum).collect()
    }

    /// Query and key of a key head, normed, of a row's convolved inputs.
    fn query_and_key(&self, u: &[f32], key_head: usize) -> [Vec<f32>; 2] {
        let (dk, key_width) = (self.config.gdn.key_dim, self.config.gdn.key_heads * self.config.gdn.key_dim);
        let mut q = u[key_head * dk..][..dk].to_vec();
        let mut k = u[key_width + key_head * dk..][..dk].to_vec();
        l2_normalise(&mut q, L2_EPS, (dk as f32).powf(-0.5));
        l2_normalise(&mut k, L2_EPS, 1.0);
        [q, k]
    }

    /// alpha and beta of a row.
    fn gates(&self, w: &Gdn, row: usize, head: usize) -> [f32; 2] {
        let at = row * self.config.gdn.value_heads + head;
        let alpha = (-w.a_log[head].exp() * softplus(self.scratch("a")[at] + w.dt_bias[head])).exp();
        [alpha, sigmoid(self.scratch("b")[at])]
    }

    /// Recurrent state with what is pending, and how many tokens that are.
    fn settled(&self) -> (Vec<f32>, usize) {
        let g = &self.config.gdn;
        let (dk, dv) = (g.key_dim, g.value_dim);
        let key_width = g.key_heads * dk;
        let pending = self.state(State::Pending).first().map_or(0, |n| n.to_bits() as usize);
        let mut state = self.state(State::Recurrent).to_vec();
        let log = self.state(State::Log).chunks_exact(key_width + g.value_width() + g.value_heads);
        for entry in log.take(pending) {
            let (keys, rest) = entry.split_at(key_width);
            let (errors, decays) = rest.split_at(g.value_width());
            for (head, s) in state.chunks_exact_mut(dk * dv).enumerate() {
                let keys = &keys[head / (g.value_heads / g.key_heads) * dk..];
                for (i, s) in s.iter_mut().enumerate() {
                    *s = decays[head] * *s + keys[i / dv] * errors[head * dv + i % dv];
                }
            }
        }
        (state, pending)
    }

    /// The delta rule, token by token: `delta_chunks` is held to it too, without gain and gate, and needs what `prepare_chunks` was
    /// bound to.
    pub(super) fn delta(&self, gate: bool) -> Option<Expected> {
        let (w, g) = (self.gdn()?, &self.config.gdn);
        let (dk, dv, heads) = (g.key_dim, g.value_dim, g.value_heads);
        let key_width = g.key_heads * dk;
        let shared_by = heads / g.key_heads;
        let (mut state, pending) = self.settled();
        let (mut gated, mut squares, mut added) = (Vec::new(), Vec::new(), Vec::new());
        for row in 0..self.scratch("qkv").len() / g.conv_channels() {
            let u = self.convolved(w, row);
            let (mut keys, mut errors, mut decays) = (Vec::new(), Vec::new(), Vec::new());
            for (head, s) in state.chunks_exact_mut(dk * dv).enumerate() {
                let inputs = self.query_and_key(&u, head / shared_by);
                let gates = self.gates(w, row, head);
                let (o, of_head) = token(s, &inputs, gates, &u[2 * key_width + head * dv..][..dv]);
                if gate {
                    let z = &self.scratch("z")[row * g.value_width() + head * dv..][..dv];
                    gated.extend(o.iter().zip(&w.norm).zip(z).map(|((o, g), z)| o * g * silu(*z)));
                } else {
                    gated.extend(&o);
                }
                squares.extend(o.chunks_exact(32).map(|o| o.iter().map(|o| o * o).sum::<f32>()));
                if head % shared_by == 0 {
                    keys.extend_from_slice(&inputs[1]);
                }
                errors.extend(of_head);
                decays.push(gates[0]);
            }
            added.extend([keys, errors, decays].concat());
        }
        // Tokens wait in the log while there is room for them.
        let mut log = self.state(State::Log).to_vec();
        let entry = log.len() / (SETTLE_EVERY - 1);
        let mut now = pending + added.len() / entry;
        if now < SETTLE_EVERY {
            log[pending * entry..now * entry].copy_from_slice(&added);
            state = self.state(State::Recurrent).to_vec();
        } else {
            now = 0;
        }
        let pending = vec![bits(now); self.state(State::Pending).len()];
        // One token's inputs go into the ring.
        let one = self.scratch("qkv").len() == g.conv_channels();
        let ring = if one { self.kept() } else { self.state(State::Conv).to_vec() };
        Some(vec![
            (Contents::State(self.layer, State::Conv), ring),
            (Contents::State(self.layer, State::Recurrent), state),
            (Contents::State(self.layer, State::Log), log),
            (Contents::State(self.layer, State::Pending), pending),
            scratch("gated", gated),
            scratch("squares", squares),
        ])
    }

    /// With gain and gate, normed.
    pub(super) fn gated_heads(&self) -> Option<Vec<f32>> {
        let gains = self.gdn()?.norm.iter().cycle();
        let gates = gains.zip(self.scratch("z")).map(|(gain, z)| gain * silu(*z));
        Some(self.normed_heads().into_iter().zip(gates).map(|(o, gate)| o * gate).collect())
    }

    pub(super) fn normed_heads(&self) -> Vec<f32> {
        let (g, eps) = (&self.config.gdn, self.config.rms_norm_eps);
        let heads = self.scratch("gated").chunks_exact(g.value_dim);
        let factor = |s: &[f32]| 1.0 / (s.iter().sum::<f32>() / g.value_dim as f32 + eps).sqrt();
        let factors = self.scratch("squares").chunks_exact(g.value_dim / 32).map(factor);
        heads.zip(factors).flat_map(|(o, f)| o.iter().map(move |o| o * f)).collect()
    }

    /// Keys and queries as matrices of 8 tokens and 8 dimensions, and a chunk's matrices, as `delta_chunks.metal` lists them.
    pub(super) fn prepare_chunks(&self) -> Option<Expected> {
        let (w, g) = (self.gdn()?, &self.config.gdn);
        let of = |name| self.scratch(name).to_vec();
        let (mut keys, mut queries, mut matrices) =
            (of("chunk_keys"), of("chunk_queries"), of("chunk_matrices"));
        let rows: Vec<Vec<f32>> =
            (0..self.rows("qkv", g.conv_channels()).len()).map(|row| self.convolved(w, row)).collect();
        let per_head = DELTA_CHUNK * g.key_dim;
        for (chunk, rows) in rows.chunks(DELTA_CHUNK).enumerate() {
            // Tokens that aren't there, up to the end of a block, are zeros.
            let there = rows.len().next_multiple_of(BLOCK);
            for key_head in 0..g.key_heads {
                let mut inputs: Vec<[Vec<f32>; 2]> =
                    rows.iter().map(|u| self.query_and_key(u, key_head)).collect();
                inputs.resize(there, [vec![0.0; g.key_dim], vec![0.0; g.key_dim]]);
                let first = (chunk * g.key_heads + key_head) * per_head;
                for (t, [q, k]) in inputs.iter().enumerate() {
                    for i in 0..g.key_dim {
                        let block = t / BLOCK * (g.key_dim / BLOCK) + i / BLOCK;
                        let at = first + block * NUMBERS + t % BLOCK * BLOCK + i % BLOCK;
                        (queries[at], keys[at]) = (q[i], k[i]);
                    }
                }
                let shared_by = g.value_heads / g.key_heads;
                for head in key_head * shared_by..(key_head + 1) * shared_by {
                    let gate = |t: usize| match t < rows.len() {
                        true => self.gates(w, chunk * DELTA_CHUNK + t, head),
                        false => [1.0, 0.0],
                    };
                    let gates: Vec<[f32; 2]> = (0..there).map(gate).collect();
                    let to =
                        &mut matrices[(chunk * g.value_heads + head) * CHUNK_MATRICES..][..CHUNK_MATRICES];
                    chunk_matrices(&inputs, &gates, to);
                }
            }
        }
        Some(vec![
            scratch("chunk_keys", keys),
            scratch("chunk_queries", queries),
            scratch("chunk_matrices", matrices),
        ])
    }
}

/// The delta rule of a token of one head, whose state `[key_dim, value_dim]` moves on: what is read of it, and the errors.
fn token(
    s: &mut [f32],
    [q, k]: &[Vec<f32>; 2],
    [alpha, beta]: [f32; 2],
    values: &[f32],
) -> (Vec<f32>, Vec<f32>) {
    let (mut read, mut errors) = (vec![0.0; values.len()], Vec::new());
    for (column, (v, o)) in values.iter().zip(&mut read).enumerate() {
        let decayed: Vec<f32> = s[column..].iter().step_by(values.len()).map(|s| alpha * s).collect();
        let known: f32 = decayed.iter().zip(k).map(|(s, k)| s * k).sum();
        let error = beta * (v - known);
        for (i, decayed) in decayed.into_iter().enumerate() {
            s[i * values.len() + column] = decayed + k[i] * error;
            *o += s[i * values.len() + column] * q[i];
        }
        errors.push(error);
    }
    (read, errors)
}

/// Tokens of a block, and numbers of its matrix.
const BLOCK: usize = 8;
const NUMBERS: usize = BLOCK * BLOCK;

/// The matrices of a chunk, of a value head, from its queries and keys, alphas and betas. In f64.
fn chunk_matrices(inputs: &[[Vec<f32>; 2]], gates: &[[f32; 2]], to: &mut [f32]) {
    let count = inputs.len();
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
    let beta = |i: usize| f64::from(gates[i][1]);
    // Decay from behind token `from` to behind token `to`.
    let decay =
        |from: usize, to: usize| gates[from..to].iter().map(|[alpha, _]| f64::from(*alpha)).product::<f64>();
    let known = |i: usize, j: usize| dot(&inputs[i][1], &inputs[j][1]) * decay(j + 1, i + 1);
    let mut put = |matrix: usize, i: usize, j: usize, x: f64| {
        to[matrix * NUMBERS + i % BLOCK * BLOCK + j % BLOCK] = x as f32;
    };
    for j in 0..count {
        let block = j / BLOCK;
        // The column of the inverse of I + beta L K K^T, times beta.
        let mut solved = [0.0; BLOCK];
        for i in block * BLOCK..(block + 1) * BLOCK {
            // With the zeros above the diagonal: what is not finite reaches its whole block.
            let above = (block * BLOCK..i).map(|m| known(i, m) * solved[m % BLOCK]).sum::<f64>();
            solved[i % BLOCK] = if i < j { 0.0 } else { beta(i) * (if i == j { 1.0 } else { -above }) };
            put(6 + block, i, j, solved[i % BLOCK]);
            put(10 + block, i, j, -solved[i % BLOCK] * decay(0, j + 1));
            put(14 + block, i, j, if i == j { decay(0, j + 1) } else { 0.0 });
            put(28 + block, i, j, if i == j { decay(j + 1, count) } else { 0.0 });
            if block == 0 {
                put(32, i, j, if i == j { decay(0, count) } else { 0.0 });
            }
        }
        for i in block * BLOCK..count {
            let row = i / BLOCK;
            if row > block {
                put(row * (row - 1) / 2 + block, i, j, -known(i, j));
            }
            let read = if i < j { 0.0 } else { dot(&inputs[i][0], &inputs[j][1]) * decay(j + 1, i + 1) };
            put(18 + row * (row + 1) / 2 + block, i, j, read);
        }
    }
}
