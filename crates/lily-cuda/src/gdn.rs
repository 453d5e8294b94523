//! Gated DeltaNet between its two projections: how `kernels/gdn.cu` is launched.

use lily_model::config::{GdnConfig, LayerKind};

use crate::driver::{Args, Buffer, Context, DriverError, Shape};
use crate::forward::{Device, THREADS};
use crate::state::Sequence;
use crate::step::Plan;
use crate::weights::DeviceMatrix;

/// Width of the value heads that `delta_4` takes whole.
const WHOLE: usize = 128;
/// Columns of a head that a block of `delta_1` has.
const COLUMNS: usize = 32;
/// Segments from which on whole heads are faster.
const MANY: usize = 4;
/// Most updates of a state that wait in a log: the next token writes the state. More save little of what writing costs, and each is one
/// more to add to every state that is read (docs/lab/cuda.md).
pub const PENDING: usize = 3;
/// Threads of a block of `delta_4` and of `delta_inputs`.
const HEAD_THREADS: u32 = 128;
/// Rows of a segment from which on the kernels for chunks are faster, by count (docs/lab/cuda.md).
pub const CHUNK_ROWS: usize = 24;
/// Threads of a block of `delta_chunk`.
const CHUNK_THREADS: u32 = 128;
/// Rows that a block of it has in shared memory: twice those that come together, and one that is read but not used.
const CHUNK_AHEAD: usize = 17;
/// Rows of a block of `delta_inputs`.
const RUN: u32 = 16;

/// Dynamic shared memory of a block of `delta_4`, bytes: `Head` of the kernel. `None` where the kernel can't be used.
pub fn shared_memory(g: &GdnConfig, context: &Context) -> Option<u32> {
    let inputs = (2 * g.key_dim + 2 * WHOLE + 46).next_multiple_of(4);
    let keys = PENDING * (g.key_dim + 16);
    let bytes = 4 * (g.key_dim * WHOLE + inputs + keys + 2 * WHOLE + 4).next_multiple_of(32) as u32;
    (g.value_dim == WHOLE && bytes <= context.shared_memory).then_some(bytes)
}

/// Values of a layer's `Update` of the kernels.
pub fn update_len(g: &GdnConfig) -> usize {
    g.key_heads * g.key_dim + g.value_width() + g.value_heads.next_multiple_of(4)
}

/// Values of q and k of a head in the kernels for chunks, `Keys` there: an eighth of a key is padded.
fn keys_len(g: &GdnConfig) -> usize {
    let words = (g.key_dim / 8).div_ceil(4);
    2 * 8 * 4 * (words | 1)
}

/// Values of a row of the kernels for chunks, `Prepared` there.
pub fn prepared_len(g: &GdnConfig) -> usize {
    g.key_heads * keys_len(g) + g.value_heads * (8 + g.value_dim)
}

/// Dynamic shared memory of a block of `delta_chunk`, bytes. `alone`: there is a multiprocessor for each, so two should not share one.
pub fn chunk_shared(g: &GdnConfig, context: &Context, alone: bool) -> u32 {
    let rows = 4 * (CHUNK_AHEAD * (keys_len(g) + 8 + COLUMNS)) as u32;
    if alone { rows.max(context.shared_memory / 2 + 1024) } else { rows }
}

/// Dynamic shared memory by kernel.
pub fn shared(g: &GdnConfig, context: &Context) -> impl Iterator<Item = (&'static str, u32)> {
    let whole = shared_memory(g, context).map(|bytes| ("delta_4", bytes));
    whole.into_iter().chain([("delta_chunk", chunk_shared(g, context, true))])
}

/// Bytes of states and logs of a layer that a segment moves, on average.
fn moved(g: &GdnConfig, plan: &Plan, whole: bool) -> u64 {
    let all = 2 * (g.state_len() + g.conv_state_len());
    let values = match whole && plan.rows == plan.segments {
        true => {
            let unwritten = g.state_len() * PENDING / (PENDING + 1);
            // Of `PENDING` + 1 tokens, each reads the updates that the ones before it have left, and all but one leave theirs.
            let updates = update_len(g) * PENDING / 2 + update_len(g) * PENDING / (PENDING + 1);
            all - unwritten + updates
        }
        false => all,
    };
    4 * values as u64
}

impl Device {
    /// Shared memory of the kernel for whole heads, if short segments of a step of so many go through it. It and the kernels for chunks
    /// know of logs; `delta_1`, which steps of fewer may need, does not.
    fn whole_heads(&self, segments: usize) -> Option<u32> {
        shared_memory(&self.config.gdn, &self.context).filter(|_| segments >= MANY)
    }

    /// Whether a step of so many segments takes what is in logs into account, so that it may leave updates there.
    pub(crate) fn reads_logs(&self, segments: usize) -> bool {
        self.state.sizes.updates > 0 && self.whole_heads(segments).is_some()
    }

    /// Writes what waits in a sequence's log to its states.
    pub(crate) fn settle(&self, sequence: &mut Sequence) -> Result<(), DriverError> {
        if sequence.pending == 0 {
            return Ok(());
        }
        let (s, g, slot) = (&self.state, &self.config.gdn, u64::from(sequence.lease.slot));
        let at = |buffer: &Buffer, bytes: usize| buffer.address() + slot * bytes as u64;
        let mut args = Args::new();
        args.u64(at(&s.recurrent, s.sizes.recurrent)).u64(at(&s.updates, s.sizes.updates));
        args.u32(sequence.pending);
        let heads = self.config.count(LayerKind::Gdn) * g.value_heads;
        let shape =
            Shape { grid: [heads as u32, 1, 1], threads: g.value_dim as u32, shared: 0, overlap: false };
        self.launch_with("settle", shape, &mut args)?;
        sequence.pending = 0;
        Ok(())
    }

    /// Convolution and delta rule of layer `index` of its kind. Says whether it leaves columns for the product with `output`.
    pub(crate) fn delta(
        &self,
        vectors: &[Buffer; 4],
        index: u64,
        plan: &Plan,
        output: &DeviceMatrix,
    ) -> Result<bool, DriverError> {
        let g = &self.config.gdn;
        let whole = self.whole_heads(plan.segments);
        let chunks = plan.long > 0 && g.value_dim == WHOLE;
        let normed = whole.is_some() || chunks;
        let columns = if normed { self.columns_of(output, plan.rows as u32) } else { [0; 2] };
        let delta = self.delta_words(vectors, index, columns);
        // If one of few segments is long, all go its way.
        let (least, others) = match (chunks, whole) {
            (true, Some(_)) => (CHUNK_ROWS, plan.segments - plan.long),
            (true, None) => (1, 0),
            (false, _) => (CHUNK_ROWS, plan.segments),
        };
        let tables = vectors.iter().map(|v| v.bytes() as u64).sum::<u64>();
        if others > 0 {
            // Few sequences are spread over many blocks; for many, a block does once what a head's columns have in common.
            let heads = (plan.segments * g.value_heads) as u32;
            let mut args = Args::new();
            args.words(&delta).moves(others as u64 * moved(g, plan, whole.is_some()) + tables);
            match whole {
                Some(shared) => {
                    let shape = Shape { grid: [heads, 1, 1], threads: HEAD_THREADS, shared, overlap: true };
                    self.launch_with("delta_4", shape, &mut args)?;
                }
                None => {
                    self.launch("delta_1", [heads * (g.value_dim / COLUMNS) as u32, 1, 1], &mut args)?;
                }
            }
        }
        if chunks {
            self.delta_of_chunks(&delta, plan, [least, plan.segments - others], tables)?;
        }
        Ok(normed)
    }

    /// `Delta` of the kernels.
    fn delta_words(&self, vectors: &[Buffer; 4], index: u64, columns: [u64; 2]) -> [u64; 16] {
        let (b, s, g) = (&self.buffers, &self.state, &self.config.gdn);
        let [segments, ..] = self.parts();
        let [conv, a_log, dt_bias, norm] = vectors.each_ref().map(Buffer::address);
        [
            segments,
            b.projected.address(),
            conv,
            a_log,
            dt_bias,
            norm,
            s.recurrent.address() + index * 4 * g.state_len() as u64,
            s.sizes.recurrent as u64 / 4,
            s.conv.address() + index * 2 * 4 * g.conv_state_len() as u64,
            s.sizes.conv as u64 / 4,
            b.mixed.address(),
            b.squares.address(),
            columns[0],
            columns[1],
            s.updates.address() + index * (s.sizes.updates / self.config.count(LayerKind::Gdn)) as u64,
            (s.sizes.updates / (4 * update_len(g))) as u64,
        ]
    }

    /// The segments of at least `least` rows, so many, by the kernels for chunks. `tables`: bytes of the layer's small weights.
    fn delta_of_chunks(
        &self,
        delta: &[u64; 16],
        plan: &Plan,
        [least, segments]: [usize; 2],
        tables: u64,
    ) -> Result<(), DriverError> {
        let (b, g, rows) = (&self.buffers, &self.config.gdn, plan.rows as u32);
        let [_, _, row_table] = self.parts();
        // `Chunk` of the kernels.
        let chunk = [row_table, b.prepared.address(), u64::from(rows) | (least as u64) << 32];
        let args = |moves: u64| {
            let mut args = Args::new();
            args.words(delta).words(&chunk).moves(moves);
            args
        };
        let grid = [g.key_heads as u32, rows.div_ceil(RUN), 1];
        let shape = Shape { grid, threads: HEAD_THREADS, shared: 0, overlap: true };
        let moved = (segments * 2 * 4 * g.conv_state_len()) as u64 + tables;
        self.launch_with("delta_inputs", shape, &mut args(moved))?;

        let blocks = (plan.segments * g.value_heads * (WHOLE / COLUMNS)) as u32;
        let alone = blocks <= self.context.multiprocessors;
        let shared = chunk_shared(g, &self.context, alone);
        let shape = Shape { grid: [blocks, 1, 1], threads: CHUNK_THREADS, shared, overlap: true };
        self.launch_with("delta_chunk", shape, &mut args((segments * 2 * 4 * g.state_len()) as u64))?;

        let grid = [(g.value_heads as u32).div_ceil(THREADS / 32), rows, 1];
        self.launch("delta_outputs", grid, &mut args(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_that_are_not_one_piece_or_do_not_fit_are_left_to_the_other_kernel() {
        let bytes = |key_dim, value_dim| {
            let g = GdnConfig { key_heads: 16, value_heads: 32, key_dim, value_dim, conv_kernel: 4 };
            shared_memory(&g, &Context::h200())
        };
        // Three share a multiprocessor's 228 KB, of which each takes one more.
        assert!(bytes(128, 128).is_some_and(|bytes| 3 * (bytes + 1024) <= 228 << 10));
        assert!(bytes(256, 128).is_some());
        assert_eq!(bytes(512, 128), None);
        assert_eq!(bytes(128, 64), None);
    }

    #[test]
    fn blocks_of_a_chunk_have_a_multiprocessor_each_if_there_are_enough() {
        let g = GdnConfig { key_heads: 16, value_heads: 32, key_dim: 128, value_dim: 128, conv_kernel: 4 };
        let context = Context::h200();
        let bytes = |alone| chunk_shared(&g, &context, alone);
        assert!(bytes(true) <= context.shared_memory && 2 * (bytes(true) + 1024) > 228 << 10);
        assert!(4 * (bytes(false) + 1024) < 228 << 10);
    }
}
