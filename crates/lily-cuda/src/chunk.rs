//! Products of the many tokens of a chunk of a prompt, and their experts, from 4-bit weights: when `kernels/chunk.cu` takes them.

use lily_model::config::Config;

use crate::driver::{Args, Context, DriverError, Shape};
use crate::forward::{Device, Product, THREADS as OTHERS};
use crate::pack::{Packing, TILE_COLS, TILE_ROWS};
use crate::weights::{DeviceMatrix, DeviceMoe};
use crate::wide::columns_bytes;

/// Threads of a block, as there.
pub const THREADS: u32 = 384;
/// Stages in shared memory, at most as there.
const STAGES: u32 = 3;
/// Rows of weights and tokens of a unit of work, as there.
const UNIT: [u32; 2] = [128, 64];
/// Tiles of a stage at most, as there.
const DEPTH: u32 = 4;
/// Shared memory that a block takes beside what it asks for.
const DECLARED: u32 = 4 << 10;
/// Kernels that use dynamic shared memory.
const KERNELS: [&str; 3] = ["chunk_q4", "chunk_gate_up_q4", "chunk_down_q4"];
/// Pairs of a row and an expert that a piece of work has at most.
pub const PAIRS: u32 = UNIT[1];
/// Pairs that an expert must have on average: with fewer, smaller pieces of work are faster.
const LEAST_PAIRS: usize = 8;
/// Blocks for a piece of work in the kernels that bring inputs together.
const GATHERING: u32 = 4;
/// Compute capability that has the products of warpgroups.
const CAPABILITY: u32 = 90;

/// Whether the kernel is compiled for a compute capability.
pub(crate) fn fits(_: &Config, capability: u32) -> bool {
    capability == CAPABILITY
}

/// Bytes of dynamic shared memory of a block: `Stage` there, and twice sums of a unit.
pub fn shared_memory(stages: u32) -> u32 {
    let [rows, tokens] = UNIT;
    let (weights, inputs) = (rows / TILE_ROWS as u32 * Packing::Q4.tile_bytes() as u32, tokens * 136);
    stages * DEPTH * (weights + inputs) + 2 * rows * tokens * 4
}

/// Whether a device has these kernels, so that steps of thousands of tokens read prompts fastest; a device that can't be opened has not.
pub fn is_for(device: usize) -> bool {
    Context::open(device).is_ok_and(|context| Chunk::new(&context).is_some())
}

/// Dynamic shared memory by kernel; none where it is not used.
pub fn shared(context: &Context) -> Vec<(&'static str, u32)> {
    let kernels = KERNELS.map(|name| (name, shared_memory(STAGES)));
    Chunk::new(context).into_iter().flat_map(|_| kernels).collect()
}

/// Whether the experts of a step of so many rows have enough of them.
fn has_experts(c: &Config, rows: usize) -> bool {
    rows * c.moe.experts_per_token >= LEAST_PAIRS * c.moe.experts
}

/// Pieces of work of so many rows, at most.
pub fn pieces(c: &Config, rows: usize) -> usize {
    let (experts, pairs) = (c.moe.experts, rows * c.moe.experts_per_token);
    (pairs / PAIRS as usize + experts).min(pairs) + rows.div_ceil(PAIRS as usize)
}

/// Bytes of the inputs of all pieces of work, as columns.
pub fn records_bytes(c: &Config, rows: usize) -> usize {
    let width = c.hidden_size.max(c.moe.expert_width).max(c.moe.shared_width);
    columns_bytes(pieces(c, rows) * PAIRS as usize, width.div_ceil(TILE_COLS))
}

/// The same on a device; as good as none where the kernels are not used.
pub(crate) fn room_for_records(context: &Context, c: &Config, rows: usize) -> usize {
    Chunk::new(context).filter(|_| has_experts(c, rows)).map_or(16, |_| records_bytes(c, rows))
}

/// What a device has for these products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chunk {
    /// Blocks that run at a time.
    most: u32,
}

impl Chunk {
    /// `None` if the device can't run the kernel.
    pub fn new(context: &Context) -> Option<Self> {
        let room = shared_memory(STAGES) + DECLARED <= context.shared_memory;
        (context.capability == CAPABILITY && room).then_some(Self { most: context.multiprocessors })
    }

    /// Blocks for a product of so many outputs and tokens, if it is large enough: with fewer units of work than a third of
    /// the multiprocessors, smaller ones are faster.
    fn blocks(self, outputs: u32, tokens: u32) -> Option<u32> {
        let units = outputs.div_ceil(UNIT[0]) * tokens.div_ceil(UNIT[1]);
        (tokens >= UNIT[1] && 3 * units >= self.most).then_some(units.min(self.most))
    }
}

impl Device {
    /// Blocks for a product of so many rows, if it is one for this kernel.
    pub(crate) fn chunk_blocks(&self, w: &DeviceMatrix, rows: u32) -> Option<u32> {
        self.chunk.filter(|_| w.packing == Packing::Q4)?.blocks(w.rows, rows)
    }

    /// Launches a product by so many blocks; its inputs are there as columns.
    pub(crate) fn chunked(&self, p: &Product<'_>, blocks: u32) -> Result<(), DriverError> {
        let mut args = Args::new();
        args.words(&p.w.words()).words(&self.wide_args(p, STAGES)).moves(p.w.tiles.bytes() as u64);
        let shape =
            Shape { grid: [blocks, 1, 1], threads: THREADS, shared: shared_memory(STAGES), overlap: true };
        self.launch_with("chunk_q4", shape, &mut args)
    }

    /// What the device has for the experts of so many rows, if they are for these kernels and of 4 bits.
    pub(crate) fn chunk_of_experts(&self, rows: u32) -> Option<Chunk> {
        self.chunk.filter(|_| has_experts(&self.config, rows as usize))
    }

    /// The products of all chosen experts of `rows` rows, which are listed in pieces of [`PAIRS`].
    pub(crate) fn experts_of_chunk(&self, chunk: Chunk, w: &DeviceMoe, rows: u32) -> Result<(), DriverError> {
        let (b, m) = (&self.buffers, &self.config.moe);
        let experts = self.experts_and_lists(w);
        // `Experts` of the kernels, behind what they begin with.
        let others = [
            b.fragments.address(),
            b.units.address(),
            b.scale.address(),
            b.records.address(),
            b.middle.address(),
            b.expanded.address(),
            u64::from(STAGES),
        ];
        let grid = [pieces(&self.config, rows as usize) as u32, GATHERING, 1];
        let gather = Shape { grid, threads: OTHERS, shared: 0, overlap: true };
        let multiply = Shape {
            grid: [chunk.most, 1, 1],
            threads: THREADS,
            shared: shared_memory(STAGES),
            overlap: true,
        };
        let bytes = [&w.gate_up, &w.down].map(|stack| stack.expected_bytes(m, rows));
        for (name, shape, bytes) in [
            ("chunk_gather", gather, 0),
            ("chunk_gate_up_q4", multiply, bytes[0]),
            ("chunk_columns", gather, 0),
            ("chunk_down_q4", multiply, bytes[1]),
        ] {
            self.launch_with(name, shape, Args::new().words(&experts).words(&others).moves(bytes))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use lily_model::presets::CONFIG_35B_A3B;

    use super::*;

    #[test]
    fn products_with_work_for_a_third_of_the_multiprocessors_are_taken() {
        let chunk = Chunk::new(&Context::h200()).unwrap();
        assert_eq!(chunk.blocks(12_352, 512), Some(132));
        assert_eq!(chunk.blocks(12_352, 64), Some(97));
        assert_eq!(chunk.blocks(12_352, 63), None);
        assert_eq!(chunk.blocks(2048, 512), Some(128));
        assert_eq!([128, 129].map(|tokens| chunk.blocks(2048, tokens)), [None, Some(48)]);
    }

    #[test]
    fn experts_with_eight_pairs_each_are_taken() {
        let config = Config::from_json(CONFIG_35B_A3B).unwrap();
        assert_eq!([255, 256].map(|rows| has_experts(&config, rows)), [false, true]);
        // The most: of each expert a piece that is not full, the full ones, those of the shared one.
        assert_eq!(pieces(&config, 512), 256 + 64 + 8);
        assert_eq!(pieces(&config, 1), 8 + 1);
    }

    #[test]
    fn other_cards_have_it_not() {
        assert_eq!(Chunk::new(&Context::rtx_4090()), None);
    }
}
