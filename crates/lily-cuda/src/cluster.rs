//! Products of several tokens from 8-bit weights, by clusters of blocks: how they are cut into what `kernels/cluster.cu` takes.

use lily_model::config::Config;

use crate::driver::{Args, Buffer, Context, DriverError, Shape};
use crate::forward::{Device, Input, Product};
use crate::kernels::Kernels;
use crate::pack::{Packing, TILE_COLS, TILE_ROWS};
use crate::weights::DeviceMatrix;

/// Warps of a block, as there.
const WARPS: u32 = 8;
/// Blocks of a cluster, as there.
const CLUSTER: u32 = 8;
/// Shared memory that the kernels declare themselves, at most.
const DECLARED: u32 = 2 << 10;
/// Compute capability that has clusters.
const CAPABILITY: u32 = 90;

/// Kernels whose dynamic shared memory is all that a block may have.
const KERNELS: [&str; 3] = ["product_q8_8", "product_q8_32", "router_q8"];

/// What a device has for these products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Clusters {
    /// Clusters that run at a time.
    most: u32,
    /// Dynamic shared memory of a block at most.
    shared: u32,
}

/// How a product is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cut {
    clusters: u32,
    /// Row blocks of a cluster that are in shared memory at a time.
    per: u32,
    /// How often, for the cluster that has most.
    rounds: u32,
    shared: u32,
}

/// Dynamic shared memory by kernel; none where there are no clusters.
pub fn shared(context: &Context) -> Vec<(&'static str, u32)> {
    if context.capability < CAPABILITY {
        return Vec::new();
    }
    KERNELS.iter().map(|name| (*name, context.shared_memory - DECLARED)).collect()
}

/// Dynamic shared memory of `router_q8`: `RouterShared` there, rounded up.
fn router_shared(c: &Config) -> usize {
    let (cluster, tiles) = (CLUSTER as usize, c.hidden_size.div_ceil(TILE_COLS).div_ceil(CLUSTER as usize));
    let rows = (c.moe.experts + 1).next_multiple_of(TILE_ROWS);
    let inputs = cluster * tiles * (128 + 8);
    let sums = (cluster + 1) * rows * 4;
    rows / TILE_ROWS * tiles * Packing::Q8.tile_bytes() + inputs + sums + (1 << 10)
}

impl Clusters {
    /// Asks the device; `None` if it has no clusters, or not of this size.
    pub fn new(context: &Context, kernels: &Kernels) -> Result<Option<Self>, DriverError> {
        if context.capability < CAPABILITY {
            return Ok(None);
        }
        let shared = context.shared_memory - DECLARED;
        let shape = Shape { grid: [CLUSTER, 1, 1], threads: WARPS * 32, shared, overlap: false };
        let most = context.most_clusters(kernels.get("product_q8_32")?, shape, CLUSTER)?;
        tracing::debug!("{most} clusters of {CLUSTER} blocks run at a time");
        Ok((most > 0).then_some(Self { most, shared }))
    }

    /// Cuts a product of `blocks` row blocks of `k_tiles` tiles, for `tokens` tokens a cluster; `None` if they don't fit into
    /// shared memory one by one.
    fn cut(&self, blocks: u32, k_tiles: u32, tile: u32, tokens: u32) -> Option<Cut> {
        let share = k_tiles.div_ceil(CLUSTER);
        let inputs = tokens * share * (128 + 8);
        // Few row blocks make few clusters, in which every warp has one.
        let clusters = if blocks < 2 * self.most { blocks.div_ceil(WARPS) } else { self.most };
        let own = blocks.div_ceil(clusters);
        // Weights of two rounds at a time; sums of two where there are more than two, so that nobody waits for their readers.
        let shared = |per: u32, rounds: u32| {
            let sums = per.next_multiple_of(CLUSTER) * tokens * TILE_ROWS as u32 * 4;
            rounds.min(2) * per * share * tile + if rounds > 2 { 2 } else { 1 } * sums + inputs
        };
        let cut = |rounds: u32| {
            let per = own.div_ceil(rounds);
            Cut { clusters, per, rounds, shared: shared(per, rounds) }
        };
        (1..=own).map(cut).find(|cut| cut.shared <= self.shared)
    }
}

impl Device {
    /// Chooses the experts of `rows` rows of x: launches `router_q8`, where it can be used; says whether. Their fragments stay for the
    /// experts.
    pub(crate) fn choose(
        &self,
        router: &DeviceMatrix,
        gain: &Buffer,
        rows: u32,
    ) -> Result<bool, DriverError> {
        let (Some(clusters), b, shared) = (&self.clusters, &self.buffers, router_shared(&self.config)) else {
            return Ok(false);
        };
        if router.packing != Packing::Q8 || shared > clusters.shared as usize {
            return Ok(false);
        }
        let mut args = Args::new();
        args.u64(router.tiles.address()).u64(b.x.address()).u64(gain.address()).u32(rows);
        args.u64(b.fragments.address()).u64(b.units.address()).u64(b.scale.address());
        args.u64(b.weights.address()).u64(b.chosen.address()).moves(router.tiles.bytes() as u64);
        let (grid, threads) = ([CLUSTER, rows.div_ceil(CLUSTER), 1], WARPS * 32);
        self.launch_with(
            "router_q8",
            Shape { grid, threads, shared: shared as u32, overlap: true },
            &mut args,
        )?;
        Ok(true)
    }

    /// Launches a product, if it is one for clusters; says whether.
    pub(crate) fn clustered(&self, p: &Product<'_>) -> Result<bool, DriverError> {
        let (Some(clusters), b) = (&self.clusters, &self.buffers) else { return Ok(false) };
        let blocks = p.w.rows.div_ceil(TILE_ROWS as u32);
        // Few row blocks keep few warps busy: then tokens are spread over more clusters.
        let tokens = if p.rows <= 8 || blocks < 2 * clusters.most { 8 } else { 32 };
        let name = match (p.w.packing, tokens) {
            (Packing::Q8, 8) => "product_q8_8",
            (Packing::Q8, _) => "product_q8_32",
            _ => return Ok(false),
        };
        let tile = p.w.packing.tile_bytes() as u32;
        let Some(cut) = clusters.cut(blocks, p.w.k_tiles, tile, tokens) else { return Ok(false) };
        let (mode, factor) = match p.input {
            Input::Plain => (0, 0),
            Input::Norm(gain) => (1, gain.address()),
            Input::Heads => (2, b.squares.address()),
        };
        let kept = |buffer: &Buffer| if p.keep { buffer.address() } else { 0 };
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let mut args = Args::new();
        args.words(&p.w.words()).words(&[
            p.x.address(),
            factor,
            p.y.address(),
            kept(&b.fragments),
            kept(&b.units),
            kept(&b.scale),
            pair(mode, p.rows),
            pair(p.w.rows, u32::from(p.add)),
            pair(cut.per, cut.rounds),
        ]);
        args.moves(p.w.tiles.bytes() as u64);
        let grid = [CLUSTER * cut.clusters, p.rows.div_ceil(tokens), 1];
        self.launch_with(
            name,
            Shape { grid, threads: WARPS * 32, shared: cut.shared, overlap: true },
            &mut args,
        )?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Clusters = Clusters { most: 16, shared: 225 << 10 };

    #[test]
    fn a_matrix_that_fits_is_brought_at_once_and_a_larger_one_in_rounds() {
        let cut = |blocks, tokens| H200.cut(blocks, 32, 576, tokens);
        let projection = Cut { clusters: 16, per: 49, rounds: 1, shared: 49 * 2304 + 56 * 512 + 8 * 4 * 136 };
        assert_eq!(cut(772, 8), Some(projection));
        let rounds = |cut: Option<Cut>| cut.map(|c| (c.per, c.rounds));
        assert_eq!(rounds(cut(772, 32)), Some((25, 2)));
        assert_eq!(rounds(cut(15_520, 32)), Some((24, 41)));
    }

    #[test]
    fn small_matrices_take_fewer_clusters_and_wide_ones_none() {
        let router = H200.cut(17, 32, 1088, 8);
        assert_eq!(
            router,
            Some(Cut { clusters: 3, per: 6, rounds: 1, shared: 6 * 4352 + 8 * 512 + 8 * 4 * 136 })
        );
        assert_eq!(H200.cut(100, 8192, 1088, 32), None);
    }
}
