//! Products of several tokens from 4-bit weights: how they are cut into what `kernels/wide.cu` takes, and their inputs.

use crate::driver::{Args, Context, DriverError, Shape};
use crate::forward::{Device, Input, Product};
use crate::kernels::Kernels;
use crate::pack::{Packing, TILE_ROWS};
use crate::weights::DeviceMatrix;

/// Threads of a block, as there.
pub const THREADS: u32 = 288;
/// Row blocks of a unit of work, as there.
const UNIT: u32 = 4;
/// Units in shared memory at most, as there.
const STAGES: u32 = 8;
/// Parts of a row that are always summed apart.
const EIGHTHS: u32 = 8;
/// Shared memory that a block takes beside what it asks for.
const DECLARED: u32 = 2 << 10;
/// Compute capability that has clusters.
const CAPABILITY: u32 = 90;

/// A kernel for so many tokens at once, by clusters of so many blocks, of which so many share a multiprocessor.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Kernel {
    name: &'static str,
    tokens: u32,
    blocks: u32,
    share: u32,
}

/// In the order in which they are preferred. Two blocks for few tokens hide each other's latencies.
const KERNELS: [Kernel; 5] = [
    Kernel { name: "wide_8_by_2", tokens: 8, blocks: 2, share: 2 },
    Kernel { name: "wide_8_by_2", tokens: 8, blocks: 2, share: 1 },
    Kernel { name: "wide_16_by_2", tokens: 16, blocks: 2, share: 1 },
    Kernel { name: "wide_32_by_2", tokens: 32, blocks: 2, share: 1 },
    Kernel { name: "wide_32_by_4", tokens: 32, blocks: 4, share: 1 },
];

/// What a device has for these products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wide {
    /// Clusters of each kernel that run at a time.
    most: [u32; KERNELS.len()],
    /// Shared memory of a multiprocessor.
    shared: u32,
}

/// How a product is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cut {
    kernel: Kernel,
    clusters: u32,
    /// Units in shared memory at a time.
    stages: u32,
    shared: u32,
}

/// Bytes of a record of `tokens` rows, as `record_bytes` in `kernels/common.cu`.
fn record_bytes(tokens: u32) -> u32 {
    tokens * 136
}

/// Rows of a step whose inputs are in a record together: what a kernel of [`KERNELS`] takes at once.
fn tokens_of_group(rows: u32) -> u32 {
    if rows <= 8 { 8 } else { 32 }
}

/// Bytes of dynamic shared memory of a block, for `tokens` tokens by clusters of `blocks`: what it takes in any case, and for each unit
/// that it has at a time.
pub fn shared_memory(tokens: u32, blocks: u32, k_tiles: u32) -> (u32, u32) {
    let part = k_tiles.div_ceil(blocks);
    // The inputs of a block, and two units' sums: of each row block that it adds up, as many as rows have parts.
    let sums = 2 * (2 * blocks) * (UNIT / blocks) * tokens * TILE_ROWS as u32 * 4;
    (part * record_bytes(tokens) + sums, part * UNIT * Packing::Q4.tile_bytes() as u32)
}

/// Dynamic shared memory by kernel, at most; none where there are no clusters.
pub fn shared(context: &Context) -> Vec<(&'static str, u32)> {
    if context.capability < CAPABILITY {
        return Vec::new();
    }
    KERNELS.iter().map(|kernel| (kernel.name, context.shared_memory - DECLARED)).collect()
}

impl Kernel {
    /// Dynamic shared memory of a block, at most, where a multiprocessor has `all`.
    fn room(&self, all: u32) -> u32 {
        all / self.share - DECLARED
    }
}

impl Wide {
    /// Asks the device; `None` if it has no clusters.
    pub fn new(context: &Context, kernels: &Kernels) -> Result<Option<Self>, DriverError> {
        if context.capability < CAPABILITY {
            return Ok(None);
        }
        let (all, mut most) = (context.shared_memory, [0; KERNELS.len()]);
        for (kernel, most) in KERNELS.iter().zip(&mut most) {
            let grid = [kernel.blocks, 1, 1];
            let shape = Shape { grid, threads: THREADS, shared: kernel.room(all), overlap: false };
            *most = context.most_clusters(kernels.get(kernel.name)?, shape, kernel.blocks)?;
            tracing::debug!("{most} clusters of {kernel:?} run at a time");
        }
        Ok(most.iter().all(|&n| n > 0).then_some(Self { most, shared: all }))
    }

    /// Cuts a product of `blocks` row blocks of `k_tiles` tiles; `None` if too little of it fits into shared memory.
    fn cut(&self, blocks: u32, k_tiles: u32, rows: u32) -> Option<Cut> {
        let (units, tokens) = (blocks.div_ceil(UNIT), tokens_of_group(rows));
        // A part of a group's tokens at once is more work: it must be the only part, or all parts must run at a time.
        let suits = |kernel: &Kernel, most: u32| {
            let parts = rows.div_ceil(kernel.tokens);
            tokens_of_group(kernel.tokens) == tokens
                && (kernel.tokens == tokens || parts == 1 || units * parts <= most)
        };
        let cut = |(kernel, most): (Kernel, u32)| {
            let clusters = units.min(most);
            let own = units.div_ceil(clusters);
            let (fixed, stage) = shared_memory(kernel.tokens, kernel.blocks, k_tiles);
            let stages = own.min(STAGES).min(kernel.room(self.shared).checked_sub(fixed)? / stage);
            // A unit is brought while the one before it is multiplied.
            (stages >= own.min(2)).then_some(Cut { kernel, clusters, stages, shared: fixed + stages * stage })
        };
        KERNELS
            .into_iter()
            .zip(self.most)
            .filter(|(kernel, most)| suits(kernel, *most))
            .filter_map(cut)
            .next()
    }
}

impl Device {
    /// How a product is cut, if it is one for these kernels.
    fn wide_cut(&self, w: &DeviceMatrix, rows: u32) -> Option<Cut> {
        if w.packing != Packing::Q4 {
            return None;
        }
        self.wide.as_ref()?.cut(w.rows.div_ceil(TILE_ROWS as u32), w.k_tiles, rows)
    }

    /// Launches a product whose inputs are columns, if it is one for these kernels or for that of a chunk; says whether.
    pub(crate) fn widely(&self, p: &Product<'_>) -> Result<bool, DriverError> {
        if p.keep || !self.takes_columns(p.w, p.rows) {
            return Ok(false);
        }
        if !p.ready {
            self.columns(p)?;
        }
        if let Some(blocks) = self.chunk_blocks(p.w, p.rows) {
            self.chunked(p, blocks)?;
        } else if let Some(cut) = self.wide_cut(p.w, p.rows) {
            self.clusters_of(p, &cut)?;
        }
        Ok(true)
    }

    /// Launches a product by these kernels.
    fn clusters_of(&self, p: &Product<'_>, cut: &Cut) -> Result<(), DriverError> {
        let kernel = cut.kernel;
        let mut args = Args::new();
        args.words(&p.w.words()).words(&self.wide_args(p, cut.stages)).moves(p.w.tiles.bytes() as u64);
        let grid = [kernel.blocks * cut.clusters, p.rows.div_ceil(kernel.tokens), 1];
        self.launch_with(
            kernel.name,
            Shape { grid, threads: THREADS, shared: cut.shared, overlap: true },
            &mut args,
        )
    }

    /// `Wide` in `kernels/warpgroup.cu`, for a product with so many stages of weights in shared memory.
    pub(crate) fn wide_args(&self, p: &Product<'_>, stages: u32) -> [u64; 5] {
        let b = &self.buffers;
        let squares = if matches!(p.input, Input::Norm(_)) { b.eighths.address() } else { 0 };
        [
            b.columns.address(),
            squares,
            p.y.address(),
            u64::from(p.rows) | u64::from(p.w.rows) << 32,
            u64::from(p.add) | u64::from(stages) << 32,
        ]
    }

    /// Whether a product with `w` is of inputs as columns.
    fn takes_columns(&self, w: &DeviceMatrix, rows: u32) -> bool {
        self.chunk_blocks(w, rows).is_some() || self.wide_cut(w, rows).is_some()
    }

    /// Where the kernel before a product with `w` leaves its inputs as columns, for that kernel's arguments; nowhere if the product
    /// does not take them.
    pub(crate) fn columns_of(&self, w: &DeviceMatrix, rows: u32) -> [u64; 2] {
        if !self.takes_columns(w, rows) {
            return [0; 2];
        }
        [self.buffers.columns.address(), u64::from(tokens_of_group(rows)) | u64::from(w.k_tiles) << 32]
    }

    /// The inputs of a product as columns.
    fn columns(&self, p: &Product<'_>) -> Result<(), DriverError> {
        let b = &self.buffers;
        let (name, factor) = match p.input {
            Input::Plain => ("columns_plain", 0),
            Input::Norm(gain) => ("columns_norm", gain.address()),
            Input::Heads => ("columns_heads", b.squares.address()),
        };
        let mut args = Args::new();
        args.u64(p.x.address()).u64(factor);
        args.words(&self.columns_of(p.w, p.rows)).u64(b.eighths.address());
        self.launch(name, [p.rows, 1, 1], &mut args)
    }
}

/// Bytes of columns for `rows` rows of `tiles` tiles.
pub fn columns_bytes(rows: usize, tiles: usize) -> usize {
    rows.next_multiple_of(32) * tiles * record_bytes(1) as usize
}

/// Sums of squares of a row's eighths.
pub fn eighths(rows: usize) -> usize {
    rows * EIGHTHS as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Wide = Wide { most: [132, 66, 66, 66, 30], shared: 227 << 10 };

    fn cut(blocks: u32, k_tiles: u32, rows: u32) -> Option<(Kernel, u32, u32)> {
        H200.cut(blocks, k_tiles, rows).map(|cut| (cut.kernel, cut.clusters, cut.stages))
    }

    #[test]
    fn blocks_for_few_tokens_share_a_multiprocessor() {
        assert_eq!(cut(772, 32, 8), Some((KERNELS[0], 132, 2)));
        assert_eq!(cut(15_520, 32, 2), Some((KERNELS[0], 132, 2)));
        // A wide input leaves no room for two.
        assert_eq!(cut(128, 64, 8), Some((KERNELS[1], 32, 1)));
    }

    #[test]
    fn wide_inputs_of_many_tokens_are_cut_in_four_and_wider_ones_not_at_all() {
        assert_eq!(cut(772, 32, 17), Some((KERNELS[3], 66, 3)));
        assert_eq!(cut(128, 64, 512), Some((KERNELS[4], 30, 2)));
        assert_eq!(cut(128, 512, 32), None);
    }

    #[test]
    fn few_rows_are_multiplied_with_halves_of_the_tokens_side_by_side() {
        assert_eq!(cut(128, 64, 32), Some((KERNELS[2], 32, 1)));
        // There are no more.
        assert_eq!(cut(772, 32, 16), Some((KERNELS[2], 66, 3)));
    }
}
