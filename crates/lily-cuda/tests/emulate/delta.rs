//! The delta rule of kernels/gdn.cu against the same in f64 (docs/model-spec.md, section 3).

use lily_cuda::driver::Context;
use lily_cuda::gdn::{self, CHUNK_ROWS, PENDING, prepared_len, update_len};
use lily_cuda::wide::{columns_bytes, eighths};
use lily_model::config::{Config, GdnConfig};

use crate::common::random::{self, Numbers};
use crate::machine::{Emulator, Memory, Shape};
use crate::wide::THREADS;

/// Two value heads a key head; keys that are no multiple of all that threads are dealt in.
pub fn config() -> Config {
    let mut config = random::config(&[]);
    config.gdn = GdnConfig { key_heads: 2, value_heads: 4, key_dim: 72, value_dim: 128, conv_kernel: 4 };
    config
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Inputs of a launch; rows of each segment.
struct Inputs {
    rows: Vec<usize>,
    projected: Vec<f32>,
    taps: Vec<f32>,
    a_log: Vec<f32>,
    bias: Vec<f32>,
    gain: Vec<f32>,
    states: Vec<f32>,
    convs: Vec<f32>,
    /// Of each slot.
    logs: Vec<f32>,
}

/// What a segment of so many rows reads, by index: the slot of its state and which of the two conv states.
fn place(segment: usize) -> (usize, usize) {
    (segment * 2 % 5, segment % 2)
}
const SLOTS: usize = 5;

/// How many updates wait in a segment's log, and whether its own is left there.
fn log(kernel: Kernel, segment: usize, rows: usize) -> (usize, bool) {
    let pending = segment * 3 % (PENDING + 1);
    match kernel {
        Kernel::Columns => (0, false),
        Kernel::Heads | Kernel::Both => (pending, rows == 1 && pending < PENDING),
        Kernel::Chunks => (pending, false),
    }
}

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kernel {
    /// `delta_1`: 32 columns of a head each.
    Columns,
    /// `delta_4`: whole heads.
    Heads,
    /// `delta_inputs`, `delta_chunk` and `delta_outputs`, for segments of any length.
    Chunks,
    /// The same for long segments only, behind `delta_4` for the others.
    Both,
}

/// Runs a kernel for segments of `rows` rows; all but the first once more behind `settle`, with the same result to the bit, which is also
/// that of the first.
pub fn run(e: &Emulator, c: &Config, kernel: Kernel, rows: &[usize], seed: u64) -> Result<(), String> {
    let inputs = Inputs::new(c, rows, seed);
    let expected = inputs.expected(c, kernel);
    let got = inputs.launch(e, c, kernel, false, None, seed)?;
    let names = ["gated", "squares", "states", "convs", "logs"];
    for ((what, got), expected) in names.into_iter().zip(&got).zip(expected) {
        for (i, (&got, expected)) in got.iter().zip(expected).enumerate() {
            let off = (f64::from(got) - expected).abs();
            // Sums of 72 products in f32, over a few rows.
            if off.is_nan() || off > 2e-5 * (1.0 + expected.abs()) {
                return Err(format!("{kernel:?}, {what} {i}: {got}, expected {expected}"));
            }
        }
    }
    if kernel == Kernel::Columns {
        return Ok(());
    }
    // Gated readouts and squares, which all of the states go into. What is deferred is in no state.
    let compared = if kernel == Kernel::Chunks { 4 } else { 2 };
    let bits = |of: &[Vec<f32>; 5]| -> Vec<Vec<u32>> {
        of[..compared].iter().map(|v| v.iter().map(|x| x.to_bits()).collect()).collect()
    };
    for other in [kernel, Kernel::Columns] {
        if bits(&inputs.launch(e, c, other, true, None, seed)?) != bits(&got) {
            return Err(format!("{other:?} of settled states gives other bits than replayed updates"));
        }
    }
    Ok(())
}

/// Where a kernel leaves columns of so many rows, as it is told.
fn columns_of(c: &Config, rows: usize, to: &Memory) -> [u64; 2] {
    [to.address(), if rows <= 8 { 8 } else { 32 } | (c.gdn.value_width() as u64 / 64) << 32]
}

/// Runs a kernel that leaves columns for the next product: to the bit those that `columns_heads`, of `wide`, makes of what `delta_1` leaves.
pub fn run_columns(
    [e, wide]: [&Emulator; 2],
    c: &Config,
    kernel: Kernel,
    rows: &[usize],
    seed: u64,
) -> Result<(), String> {
    let (inputs, all) = (Inputs::new(c, rows, seed), rows.iter().sum::<usize>());
    let bytes = columns_bytes(all, c.gdn.value_width() / 64);
    let [got, expected] = [(); 2].map(|()| e.unwritten(bytes));
    inputs.launch(e, c, kernel, false, Some(&got), seed)?;
    let [gated, squares, ..] = inputs.launch(e, c, Kernel::Columns, true, None, seed)?;
    let (gated, squares, sums) = (e.floats(&gated), e.floats(&squares), e.unwritten(eighths(all) * 4));
    let [records, groups] = columns_of(c, all, &expected);
    let shape = Shape { grid: [all as u32, 1], threads: THREADS, cluster: 1, together: 1, shared: 0 };
    let arguments = [gated.address(), squares.address(), records, groups, sums.address()];
    wide.launch("columns_heads", shape, &arguments, seed)?;
    let differs = got.bytes().iter().zip(expected.bytes()).position(|(a, b)| a != b);
    differs.map_or(Ok(()), |at| Err(format!("byte {at} of the columns differs")))
}

impl Inputs {
    fn new(c: &Config, rows: &[usize], seed: u64) -> Self {
        let (g, all, mut numbers) = (&c.gdn, rows.iter().sum::<usize>(), Numbers(seed));
        let mut reals = |n| numbers.reals(n, 0.0, 1.0);
        let mut inputs = Self {
            rows: rows.to_vec(),
            projected: reals(all * (g.conv_channels() + g.value_width() + 2 * g.value_heads)),
            taps: reals(g.conv_channels() * g.conv_kernel),
            a_log: reals(g.value_heads),
            bias: reals(g.value_heads),
            gain: reals(g.value_dim),
            states: reals(SLOTS * g.state_len()),
            convs: reals(SLOTS * 2 * g.conv_state_len()),
            logs: reals(SLOTS * PENDING * update_len(g)),
        };
        // A key that is always 0, and -0 where it is added: the sign of what remains is that of sums with zeros.
        let (key, head) = (g.key_heads * g.key_dim, g.key_dim * g.value_dim);
        inputs.taps[key * g.conv_kernel..][..g.conv_kernel].fill(0.0);
        inputs.states.chunks_exact_mut(head).for_each(|state| state[..g.value_dim].fill(-0.0));
        inputs
    }

    /// What a kernel makes of them: as [`Inputs::expected`].
    fn launch(
        &self,
        e: &Emulator,
        c: &Config,
        kernel: Kernel,
        settle: bool,
        columns: Option<&Memory>,
        seed: u64,
    ) -> Result<[Vec<f32>; 5], String> {
        let (g, all) = (&c.gdn, self.rows.iter().sum::<usize>());
        let vectors = [&self.projected, &self.taps, &self.a_log, &self.bias, &self.gain].map(|v| e.floats(v));
        let [states, convs, logs] = [&self.states, &self.convs, &self.logs].map(|v| e.floats(v));
        let shape =
            Shape { grid: [g.value_heads as u32, 1], threads: 128, cluster: 1, together: 4, shared: 0 };
        let (mut first, mut segments, mut table) = (0, Vec::new(), Vec::new());
        for (i, &rows) in self.rows.iter().enumerate() {
            let (slot, parity) = place(i);
            let (mut pending, defers) = log(kernel, i, rows);
            if settle {
                pending = log(Kernel::Heads, i, rows).0;
                let at = |floats: usize| (slot * 4 * floats) as u64;
                let states = states.address() + at(g.state_len());
                let logs = logs.address() + at(PENDING * update_len(g));
                e.launch("settle", shape, &[states, logs, pending as u64], seed)?;
                pending = 0;
            }
            segments.extend([first, rows as u32, 0, slot as u32, u32::MAX, parity as u32, 0, 0]);
            segments.extend([pending as u32, u32::from(defers)]);
            table.extend((0..rows as u32).flat_map(|r| [0, r, i as u32, u32::MAX]));
            first += rows as u32;
        }
        let segments = e.words(&segments);
        let width = all * g.value_width();
        let (gated, squares) = (e.unwritten(width * 4), e.unwritten(width / 32 * 4));
        let mut arguments = vec![segments.address()];
        arguments.extend(vectors.iter().map(|v| v.address()));
        arguments.extend([states.address(), g.state_len() as u64]);
        arguments.extend([convs.address(), 2 * g.conv_state_len() as u64]);
        let [records, groups] = columns.map_or([0; 2], |to| columns_of(c, all, to));
        arguments.extend([gated.address(), squares.address(), records, groups]);
        arguments.extend([logs.address(), PENDING as u64]);
        let heads = (g.value_heads * self.rows.len()) as u32;
        if kernel == Kernel::Columns {
            e.launch("delta_1", Shape { grid: [heads * 4, 1], threads: THREADS, ..shape }, &arguments, seed)?;
        }
        if matches!(kernel, Kernel::Heads | Kernel::Both) {
            let shared = gdn::shared_memory(g, &Context::h200()).unwrap();
            e.launch("delta_4", Shape { grid: [heads, 1], shared, ..shape }, &arguments, seed)?;
        }
        if matches!(kernel, Kernel::Chunks | Kernel::Both) {
            let (table, prepared) = (e.words(&table), e.unwritten(all * prepared_len(g) * 4));
            let least = if kernel == Kernel::Both { CHUNK_ROWS } else { 1 };
            arguments.extend([table.address(), prepared.address(), all as u64 | (least as u64) << 32]);
            let shared = gdn::chunk_shared(g, &Context::h200(), false);
            let (all, norms) = (all as u32, (g.value_heads as u32).div_ceil(8));
            let runs = Shape { grid: [g.key_heads as u32, all.div_ceil(16)], ..shape };
            e.launch("delta_inputs", runs, &arguments, seed)?;
            e.launch("delta_chunk", Shape { grid: [heads * 4, 1], shared, ..shape }, &arguments, seed)?;
            let outputs = Shape { grid: [norms, all], threads: THREADS, ..shape };
            e.launch("delta_outputs", outputs, &arguments, seed)?;
        }
        Ok([gated.floats(), squares.floats(), states.floats(), convs.floats(), logs.floats()])
    }

    /// Gated readouts, sums of squares of 32 columns, states, conv states and logs.
    fn expected(&self, c: &Config, kernel: Kernel) -> [Vec<f64>; 5] {
        let g = &c.gdn;
        let (keys, value, past) = (g.key_heads * g.key_dim, g.value_width(), g.conv_kernel - 1);
        let channels = 2 * keys + value;
        let width = channels + value + 2 * g.value_heads;
        let wide = |v: &[f32]| v.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        let [mut all_states, mut convs, mut logs] = [&self.states, &self.convs, &self.logs].map(|v| wide(v));
        let (mut gated, mut squares, mut row) = (Vec::new(), Vec::new(), 0);
        for (segment, &rows) in self.rows.iter().enumerate() {
            let (slot, parity) = place(segment);
            let conv = &mut convs[slot * 2 * past * channels..][..2 * past * channels];
            let (pending, defers) = log(kernel, segment, rows);
            let log = &mut logs[slot * PENDING * update_len(g)..][..PENDING * update_len(g)];
            let written = all_states.clone();
            let states = &mut all_states[slot * g.state_len()..][..g.state_len()];
            log.chunks_exact(update_len(g)).take(pending).for_each(|update| replay(g, update, states));
            let mut window = conv[parity * past * channels..][..past * channels].to_vec();
            for _ in 0..rows {
                let u = wide(&self.projected[row * width..][..width]);
                row += 1;
                window.extend(&u[..channels]);
                let mixed: Vec<f64> = (0..channels)
                    .map(|ch| {
                        silu(
                            (0..=past)
                                .map(|j| {
                                    f64::from(self.taps[ch * (past + 1) + j]) * window[j * channels + ch]
                                })
                                .sum(),
                        )
                    })
                    .collect();
                window.drain(..channels);
                for head in 0..g.value_heads {
                    let key_head = head / (g.value_heads / g.key_heads);
                    let norm = |v: &[f64]| (v.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    let unit = |v: &[f64]| v.iter().map(|x| x / norm(v)).collect::<Vec<f64>>();
                    let q = unit(&mixed[key_head * g.key_dim..][..g.key_dim]);
                    let raw_k = &mixed[keys + key_head * g.key_dim..][..g.key_dim];
                    let k = unit(raw_k);
                    let v = &mixed[2 * keys + head * g.value_dim..][..g.value_dim];
                    let (z, b, a) = (
                        channels + head * g.value_dim,
                        channels + value + head,
                        channels + value + g.value_heads + head,
                    );
                    let softplus = (u[a] + f64::from(self.bias[head])).exp().ln_1p();
                    let alpha = (-f64::from(self.a_log[head]).exp() * softplus).exp();
                    let beta = 1.0 / (1.0 + (-u[b]).exp());
                    let state = &mut states[head * g.key_dim * g.value_dim..][..g.key_dim * g.value_dim];
                    let mut steps = Vec::new();
                    let mut outs = Vec::new();
                    for column in 0..g.value_dim {
                        let at = |i: usize| i * g.value_dim + column;
                        let read: f64 = (0..g.key_dim).map(|i| alpha * state[at(i)] * k[i]).sum();
                        let step = beta * (v[column] - read);
                        (0..g.key_dim).for_each(|i| state[at(i)] = alpha * state[at(i)] + k[i] * step);
                        let out = (0..g.key_dim).map(|i| state[at(i)] * q[i]).sum::<f64>()
                            / (g.key_dim as f64).sqrt();
                        gated.push(out * f64::from(self.gain[column]) * silu(u[z + column]));
                        outs.push(out);
                        steps.push(step / norm(raw_k));
                    }
                    if defers {
                        let own = &mut log[pending * update_len(g)..];
                        own[key_head * g.key_dim..][..g.key_dim].copy_from_slice(raw_k);
                        own[keys + head * g.value_dim..][..g.value_dim].copy_from_slice(&steps);
                        own[keys + value + head] = alpha;
                    }
                    squares.extend(outs.chunks(32).map(|o| o.iter().map(|x| x * x).sum::<f64>()));
                }
            }
            conv[(1 - parity) * past * channels..][..past * channels].copy_from_slice(&window);
            if defers {
                all_states = written;
            }
        }
        [gated, squares, all_states, convs, logs]
    }
}

/// Adds an update of a log to the states of a layer.
fn replay(g: &GdnConfig, update: &[f64], states: &mut [f64]) {
    let (k, rest) = update.split_at(g.key_heads * g.key_dim);
    let (step, alpha) = rest.split_at(g.value_width());
    for (i, s) in states.iter_mut().enumerate() {
        let (row, column) = (i / g.value_dim, i % g.value_dim);
        let (head, key) = (row / g.key_dim, row % g.key_dim);
        let key_head = head / (g.value_heads / g.key_heads);
        *s = alpha[head] * *s + k[key_head * g.key_dim + key] * step[head * g.value_dim + column];
    }
}
