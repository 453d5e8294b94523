//! Products of the many tokens of a chunk of a prompt, from 4-bit weights: when `kernels/chunk.cu` takes them.

use lily_model::config::Config;

use crate::driver::{Args, Context, DriverError, Shape};
use crate::forward::{Device, Product};
use crate::pack::{Packing, TILE_ROWS};
use crate::weights::DeviceMatrix;

/// Threads of a block, as there.
pub const THREADS: u32 = 384;
/// Stages in shared memory, at most as there.
const STAGES: u32 = 3;
/// Rows of weights and tokens of a unit of work, as there.
const UNIT: [u32; 2] = [128, 64];
/// Tiles of a stage at most, as there.
const DEPTH: u32 = 4;
/// Shared memory that a block takes beside what it asks for.
const DECLARED: u32 = 2 << 10;
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

/// Dynamic shared memory by kernel; none where it is not used.
pub fn shared(context: &Context) -> Vec<(&'static str, u32)> {
    Chunk::new(context).map(|_| ("chunk_q4", shared_memory(STAGES))).into_iter().collect()
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
}

#[cfg(test)]
mod tests {
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
    fn other_cards_have_it_not() {
        assert_eq!(Chunk::new(&Context::rtx_4090()), None);
    }
}
