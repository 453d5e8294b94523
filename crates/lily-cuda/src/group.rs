//! Experts of several tokens from 4-bit weights that come by bulk copies: what `kernels/group.cu` takes.

use lily_model::config::Config;

use crate::driver::{Args, Context, DriverError, Shape};
use crate::forward::{Device, THREADS};
use crate::kernels::Kernels;
use crate::pack::{Packing, TILE_COLS};
use crate::weights::DeviceMoe;

/// The kernel.
const KERNEL: &str = "experts_group_q4";
/// Threads of a block, as there.
pub const GROUP_THREADS: u32 = THREADS + 96;
/// Blocks on a multiprocessor, at most.
const BLOCKS: u32 = 2;
/// Pairs of a piece of work, as `BY_COPIES` there: as many as one product takes.
pub const PAIRS: u32 = 4;
/// Strips of weights in shared memory, as there.
const RING: usize = 3;
/// Row blocks of a strip of down, as there.
const DOWN_GROUP: usize = 4;
/// Shared memory that the kernel declares itself, at most.
const DECLARED: u32 = 40 << 10;
/// Compute capability that has bulk copies.
pub const CAPABILITY: u32 = 90;

/// What a device has for the kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// Blocks that run at a time.
    blocks: u32,
    /// Dynamic shared memory of a block.
    shared: u32,
}

/// Rows of a step for which the kernel lists the experts itself, as `LISTED_ROWS` there.
pub fn listed(c: &Config) -> u32 {
    32.min(GROUP_THREADS / c.moe.experts_per_token as u32)
}

/// Dynamic shared memory of a block, in bytes: strips, and the inputs of a chunk of gate/up or of two of down.
pub fn bytes(c: &Config) -> u32 {
    let middle = c.moe.expert_width.max(c.moe.shared_width);
    let (tiles, middle_tiles) = (c.hidden_size.div_ceil(TILE_COLS), middle.div_ceil(TILE_COLS));
    let strip = tiles.max(DOWN_GROUP * middle_tiles) * Packing::Q4.tile_bytes();
    let inputs = (tiles * (128 + 8) + 16).max(2 * middle_tiles * TILE_COLS * 4);
    (RING * strip + PAIRS as usize * inputs) as u32
}

/// Dynamic shared memory by kernel; none where it can't be used.
pub fn shared(context: &Context, c: &Config) -> Option<(&'static str, u32)> {
    let fits = context.capability >= CAPABILITY && bytes(c) + DECLARED <= context.shared_memory;
    fits.then(|| (KERNEL, bytes(c)))
}

impl Group {
    /// Asks the device; `None` if it can't run the kernel.
    pub fn new(context: &Context, kernels: &Kernels, c: &Config) -> Result<Option<Self>, DriverError> {
        let Some((name, shared)) = shared(context, c) else { return Ok(None) };
        let shape = Shape { grid: [1, 1, 1], threads: GROUP_THREADS, shared, overlap: true };
        // Blocks wait for each other: all must run at once.
        let blocks = context.most_blocks(kernels.get(name)?, shape)?.min(BLOCKS) * context.multiprocessors;
        tracing::debug!("{blocks} blocks of {name} run at a time");
        Ok((blocks > 0).then_some(Self { blocks, shared }))
    }
}

impl Device {
    /// Weights of a layer's experts, then the lists of pairs: what `Experts` of group.cu and of chunk.cu begin with.
    pub(crate) fn experts_and_lists(&self, w: &DeviceMoe) -> [u64; 7] {
        let b = &self.buffers;
        [
            w.gate_up.experts.address(),
            w.gate_up.shared.address(),
            w.down.experts.address(),
            w.down.shared.address(),
            b.work.address(),
            b.counts.address(),
            b.pairs.address(),
        ]
    }

    /// The products of all chosen experts of `rows` rows; of lists that `route` made, or of what `router_q8` has `chosen`.
    pub(crate) fn experts_by_copies(
        &self,
        group: Group,
        w: &DeviceMoe,
        rows: u32,
        chosen: bool,
    ) -> Result<(), DriverError> {
        let (b, m) = (&self.buffers, &self.config.moe);
        let mut args = Args::new();
        // `Experts` of the kernel.
        args.words(&self.experts_and_lists(w)).words(&[
            if chosen { b.chosen.address() } else { 0 },
            u64::from(rows),
            b.fragments.address(),
            b.units.address(),
            b.scale.address(),
            b.middle.address(),
            b.expanded.address(),
            b.done.address(),
        ]);
        // Down waits for gate and up.
        args.moves(w.gate_up.expected_bytes(m, rows) + w.down.expected_bytes(m, rows)).stages(2);
        let Group { blocks, shared } = group;
        let shape = Shape { grid: [blocks, 1, 1], threads: GROUP_THREADS, shared, overlap: true };
        self.launch_with(KERNEL, shape, &mut args)
    }
}

#[cfg(test)]
mod tests {
    use lily_model::presets::CONFIG_35B_A3B;

    use super::*;

    #[test]
    fn all_blocks_run_at_once_two_on_a_multiprocessor() {
        let (context, config) = (Context::h200(), Config::from_json(CONFIG_35B_A3B).unwrap());
        let group = Group::new(&context, &Kernels::names(), &config).unwrap();
        assert_eq!(group, Some(Group { blocks: 2 * 132, shared: 3 * 32 * 576 + 4 * (32 * 136 + 16) }));
    }

    #[test]
    fn a_model_whose_strips_are_too_wide_goes_another_way() {
        let (context, mut config) = (Context::h200(), Config::from_json(CONFIG_35B_A3B).unwrap());
        config.hidden_size = 1 << 14;
        assert_eq!(Group::new(&context, &Kernels::names(), &config).unwrap(), None);
    }
}
