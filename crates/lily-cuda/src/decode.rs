//! One token, as few dependent kernels as there are dependencies: each has its weights on their way into shared memory
//! before its predecessor has ended.

use crate::driver::{Args, Buffer, DriverError, Shape};
use crate::forward::{Device, KindIndex, THREADS};
use crate::pack::{Packing, TILE_COLS, TILE_ROWS};
use crate::step::Plan;
use crate::weights::{DeviceMatrix, DeviceMixer, DeviceMoe, DeviceWeights};

/// Row blocks in shared memory at most, as in `kernels/decode.cu`. A block that has more refills them in turn, and needs
/// at least four for that; one that has fewer has room for just those.
const STAGES: u32 = 6;
/// Units of a `gate_up_one_q4` block at most; the kernel has room for the sums of 8.
const MOST_UNITS: u32 = 5;

/// Shared memory of each decode kernel, and how many row blocks at a time that is.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    multiprocessors: u32,
    rows: usize,
    router: usize,
    hidden: u32,
    value: u32,
    query: u32,
    units: u32,
    down: u32,
}

/// Bytes behind the stages of a `project` block: `Staging` of `kernels/decode.cu`.
fn staging(k_tiles: u32) -> u32 {
    let bytes = k_tiles * 256 + k_tiles * 4 + 2 * 8 * STAGES * 16 * 4 + 8 * 4;
    bytes.next_multiple_of(8) + 2 * STAGES * 8
}

impl Sizes {
    /// For a model, on a device with so many multiprocessors.
    pub fn new(c: &lily_model::config::Config, multiprocessors: u32) -> Self {
        let tiles = |width: usize| (width / TILE_COLS) as u32;
        let m = &c.moe;
        let units = ((m.shared_width + m.experts_per_token * m.expert_width) / 8) as u32;
        Self {
            multiprocessors,
            rows: c.hidden_size,
            router: m.experts + 1,
            hidden: tiles(c.hidden_size),
            value: tiles(c.gdn.value_width()),
            query: tiles(c.attention.query_width()),
            // As many blocks as multiprocessors, or so many that none has more than it has room for.
            units: units.min(multiprocessors.max(units.div_ceil(MOST_UNITS))),
            down: (m.experts_per_token as u32 * tiles(m.expert_width) + tiles(m.shared_width)) * 576,
        }
    }

    /// Row blocks that a block of a product has in shared memory.
    fn stages(&self, rows: usize) -> u32 {
        let blocks = rows.div_ceil(TILE_ROWS) as u32;
        blocks.div_ceil(blocks.min(self.multiprocessors)).min(STAGES)
    }

    /// Dynamic shared memory by kernel.
    pub fn shared(&self) -> Vec<(&'static str, u32)> {
        let strip = |k_tiles: u32, stages: u32, tile: u32| stages * k_tiles * tile + staging(k_tiles);
        vec![
            ("project_q4", strip(self.hidden, STAGES, 576)),
            ("project_q8", strip(self.hidden, self.stages(self.router), 1088)),
            ("logits_q4", strip(self.hidden, STAGES, 576)),
            ("out_gdn_q4", strip(self.value, self.stages(self.rows), 576)),
            ("out_attention_q4", strip(self.query, self.stages(self.rows), 576)),
            ("gate_up_one_q4", MOST_UNITS * self.hidden * 576),
            ("down_one_q4", self.down),
        ]
    }
}

/// Whether the decode kernels have all that a model needs, on this device.
pub fn supported(w: &DeviceWeights, sizes: &Sizes, context: &crate::driver::Context) -> bool {
    let q4 = |p: Packing| p == Packing::Q4;
    let mixer = |m: &DeviceMixer| match m {
        DeviceMixer::Gdn { input, output, .. } | DeviceMixer::Attention { input, output, .. } => {
            q4(input.packing) && q4(output.packing)
        }
    };
    // What the kernels declare themselves comes on top of the dynamic part.
    let fits = |(_, bytes): (&str, u32)| bytes + (40 << 10) <= context.shared_memory;
    context.capability >= 90
        && sizes.shared().into_iter().all(fits)
        && q4(w.lm_head().packing)
        && w.layers.iter().all(|l| {
            mixer(&l.mixer)
                && l.moe.router.packing == Packing::Q8
                && q4(l.moe.gate_up.packing)
                && q4(l.moe.down.packing)
        })
}

impl Device {
    /// Enqueues the step of one token that draws one.
    pub fn decode_one(&self, sizes: &Sizes) -> Result<(), DriverError> {
        let plan = Plan::decoding(1);
        self.embed(1)?;
        let mut index = KindIndex::default();
        let b = &self.buffers;
        for w in &self.weights.layers {
            match &w.mixer {
                DeviceMixer::Gdn { input, vectors, output } => {
                    self.project("project_q4", input, &b.x, &w.input_norm, &b.projected, sizes)?;
                    self.delta(vectors, index.gdn, 1)?;
                    index.gdn += 1;
                    self.project("out_gdn_q4", output, &b.mixed, &b.squares, &b.x, sizes)?;
                }
                DeviceMixer::Attention { input, vectors, output } => {
                    self.project("project_q4", input, &b.x, &w.input_norm, &b.projected, sizes)?;
                    self.attend(vectors, index.attention, 1)?;
                    index.attention += 1;
                    self.project("out_attention_q4", output, &b.mixed, &b.squares, &b.x, sizes)?;
                }
            }
            self.moe_one(&w.moe, &w.post_attention_norm, sizes)?;
        }
        let head = self.weights.lm_head();
        let blocks = self.project("logits_q4", head, &b.x, &self.weights.norm, &b.logits, sizes)?;
        self.finish(&plan, blocks)
    }

    /// `y = W f(x)`; returns the number of blocks.
    fn project(
        &self,
        name: &'static str,
        w: &DeviceMatrix,
        x: &Buffer,
        factor: &Buffer,
        y: &Buffer,
        sizes: &Sizes,
    ) -> Result<u32, DriverError> {
        let grid = w.rows.div_ceil(TILE_ROWS as u32).min(self.context.multiprocessors);
        let mut args = Args::new();
        args.words(&w.words()).u64(x.address()).u64(factor.address()).u64(y.address());
        args.u32(sizes.stages(w.rows as usize));
        args.u64(self.buffers.best.address()).moves(w.tiles.bytes() as u64);
        self.launch_shared(name, grid, THREADS, sizes, &mut args)?;
        Ok(grid)
    }

    fn moe_one(&self, w: &DeviceMoe, gain: &Buffer, sizes: &Sizes) -> Result<(), DriverError> {
        let b = &self.buffers;
        self.project("project_q8", &w.router, &b.x, gain, &b.router, sizes)?;
        let mut args = Args::new();
        args.u64(b.router.address()).u64(w.gate_up.experts.address()).u64(w.gate_up.shared.address());
        args.u64(b.x.address()).u64(gain.address()).u64(b.middle.address());
        args.moves(w.gate_up.expected_bytes(&self.config.moe, 1));
        // One warp more than others have chooses experts while the rest make the input ready.
        self.launch_shared("gate_up_one_q4", sizes.units, THREADS + 32, sizes, &mut args)?;
        let mut args = Args::new();
        args.u64(b.router.address()).u64(w.down.experts.address()).u64(w.down.shared.address());
        args.u64(b.middle.address()).u64(b.x.address());
        args.moves(w.down.expected_bytes(&self.config.moe, 1));
        let blocks = (self.config.hidden_size / TILE_ROWS) as u32;
        self.launch_shared("down_one_q4", blocks, THREADS, sizes, &mut args)
    }

    fn launch_shared(
        &self,
        name: &'static str,
        blocks: u32,
        threads: u32,
        sizes: &Sizes,
        args: &mut Args,
    ) -> Result<(), DriverError> {
        let shared = sizes.shared().iter().find(|(n, _)| *n == name).map_or(0, |(_, bytes)| *bytes);
        self.launch_with(name, Shape { grid: [blocks, 1, 1], threads, shared, overlap: true }, args)
    }
}
