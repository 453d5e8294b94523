//! The order of the blocks: every step that is not a single decoded token goes this way.

use std::sync::Arc;

use lily_model::config::Config;
use lily_model::pool::PAGE;

use crate::buffers::Buffers;
use crate::chunk::{self, Chunk};
use crate::cluster::Clusters;
use crate::driver::{Args, Buffer, Context, DriverError, Shape};
use crate::group::{self, Group};
use crate::kernels::Kernels;
use crate::pack::{Packing, TILE_COLS, TILE_ROWS};
use crate::state::State;
use crate::step::{Layout, Plan};
use crate::weights::{DeviceLayer, DeviceMatrix, DeviceMixer, DeviceMoe, DeviceWeights, Stack};
use crate::wide::Wide;

/// Threads of most blocks.
pub const THREADS: u32 = 256;
/// Splits of a row's keys in a step of few rows, `MOST_SPLITS` of `kernels/attention.cu`.
const SPLITS: u32 = 64;
/// Rows times splits in a step of many.
pub const SPLIT_ROWS: u32 = 2048;
/// Blocks of flash attention for each multiprocessor in a step of several rows, about: as many as run at a time on an H200. More are
/// better balanced, but in a short context most only begin and end.
const FLASH_BLOCKS: u32 = 2;
/// Rows of a segment from which on they are attended together, by `flash_rows`: enough for two of its blocks.
const MANY_ROWS: u32 = 16;
/// Rows of a block of `flash_rows`, `ROW_WARPS` there.
const ROW_WARPS: u32 = 8;
/// Pairs in a piece of an expert's work, as `GROUP` of `kernels/state.cu`.
const GROUP: u32 = 16;
/// Warps of a block of `combine` and of `add_experts`, as there.
const COMBINE_WARPS: u32 = 2;
/// See [`COMBINE_WARPS`].
const ADD_WARPS: u32 = 2;
/// Parts of a row of logits whose largest is sought at a time.
const BEST_PARTS: u32 = 16;

/// Everything that a step's kernels read and write.
pub struct Device {
    /// The GPU.
    pub context: Arc<Context>,
    /// Shapes.
    pub config: Config,
    /// Code.
    pub kernels: Kernels,
    /// Weights.
    pub weights: DeviceWeights,
    /// Activations.
    pub buffers: Buffers,
    /// Sequences.
    pub state: State,
    /// Of [`Buffers::step`].
    pub layout: Layout,
    /// Experts of several tokens by bulk copies and in one kernel, where it can be used.
    pub group: Option<Group>,
    /// The kernel for a single decoded token, where it can be used.
    pub token: Option<crate::token::Token>,
    /// Products from 8-bit weights, and the router, by clusters of eight blocks, where the device has clusters.
    pub clusters: Option<Clusters>,
    /// Products from 4-bit weights by warpgroups, in smaller clusters.
    pub wide: Option<Wide>,
    /// Those of many tokens.
    pub chunk: Option<Chunk>,
    /// Where launches are noted, when a list is wanted.
    pub record: Option<crate::device::Record>,
    /// Kernels that are not launched, to see what a step costs without them. Its results mean nothing then.
    pub omit: Vec<String>,
}

/// `y = W f(x)` or `y += W f(x)`.
pub(crate) struct Product<'a> {
    /// Weights.
    pub w: &'a DeviceMatrix,
    /// Inputs, `[rows, width]`.
    pub x: &'a Buffer,
    /// What happens to them first.
    pub input: Input<'a>,
    /// Outputs, `[rows, w.rows]`.
    pub y: &'a Buffer,
    /// Tokens.
    pub rows: u32,
    /// Adds to what is in `y`.
    pub add: bool,
    /// Kernels behind this one want the inputs as fragments.
    pub keep: bool,
    /// The kernel before has left the inputs as columns, if the product takes them.
    pub ready: bool,
}

/// Where a product's input comes from.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    /// As it is.
    Plain,
    /// RMS norm with this gain.
    Norm(&'a Buffer),
    /// Value heads with their own norms.
    Heads,
}

/// Index of a layer among those of its kind.
#[derive(Clone, Copy, Default)]
pub struct KindIndex {
    /// Gated DeltaNet layers so far.
    pub gdn: u64,
    /// Attention layers so far.
    pub attention: u64,
}

impl Device {
    /// Enqueues a step whose description is on its way to [`Buffers::step`].
    pub fn step(&self, plan: &Plan) -> Result<(), DriverError> {
        let rows = plan.rows as u32;
        self.embed(rows)?;
        let mut index = KindIndex::default();
        for (i, layer) in self.weights.layers.iter().enumerate() {
            // What reads the residual stream next, and with which gain.
            let next = match self.weights.layers.get(i + 1) {
                Some(next) => Some((next.mixer.input(), &next.input_norm)),
                None => plan.decode.then(|| (self.weights.lm_head(), &self.weights.norm)),
            };
            self.layer(layer, i > 0, next, &mut index, plan)?;
        }
        if plan.logits > 0 {
            self.logits(plan)?;
        }
        if !plan.decode {
            return self.finish(plan, 0);
        }
        let [.., row_table] = self.parts();
        let mut args = Args::new();
        args.u64(row_table).u64(self.buffers.logits.address()).u64(self.buffers.best.address());
        let shape = Shape { grid: [BEST_PARTS, rows, 1], threads: 1024, shared: 0, overlap: true };
        self.launch_with("bests", shape, &mut args)?;
        self.finish(plan, BEST_PARTS)
    }

    /// A layer. `ready`: the one before has left its input as columns; `next`: the product behind this layer, and the gain of its norm.
    fn layer(
        &self,
        w: &DeviceLayer,
        ready: bool,
        next: Option<(&DeviceMatrix, &Buffer)>,
        index: &mut KindIndex,
        plan: &Plan,
    ) -> Result<(), DriverError> {
        let (b, rows) = (&self.buffers, plan.rows as u32);
        let first = |input| Product {
            w: input,
            x: &b.x,
            input: Input::Norm(&w.input_norm),
            y: &b.projected,
            rows,
            add: false,
            keep: false,
            ready,
        };
        let last =
            |w, input, ready| Product { w, x: &b.mixed, input, y: &b.x, rows, add: true, keep: false, ready };
        match &w.mixer {
            DeviceMixer::Gdn { input, vectors, output } => {
                self.product(&first(input))?;
                let ready = self.delta(vectors, index.gdn, plan, output)?;
                index.gdn += 1;
                self.product(&last(output, Input::Heads, ready))?;
            }
            DeviceMixer::Attention { input, vectors, output } => {
                self.product(&first(input))?;
                self.attend(vectors, index.attention, plan, output)?;
                index.attention += 1;
                self.product(&last(output, Input::Plain, true))?;
            }
        }
        self.moe(&w.moe, &w.post_attention_norm, rows, next)
    }

    fn hidden(&self) -> u32 {
        self.config.hidden_size as u32
    }

    /// Launches a kernel of [`THREADS`] threads that may overlap with its predecessor.
    pub fn launch(&self, name: &'static str, grid: [u32; 3], args: &mut Args) -> Result<(), DriverError> {
        self.launch_with(name, Shape { grid, threads: THREADS, shared: 0, overlap: true }, args)
    }

    /// Launches a kernel.
    pub fn launch_with(&self, name: &'static str, shape: Shape, args: &mut Args) -> Result<(), DriverError> {
        let function = self.kernels.get(name)?;
        if self.omit.iter().any(|n| n == name) {
            return Ok(());
        }
        if let Some(record) = &self.record {
            crate::device::note(record, name, shape, args);
        }
        self.context.launch(function, shape, args)
    }

    /// Addresses of segments, draws and rows.
    pub fn parts(&self) -> [u64; 3] {
        let at = self.buffers.step.address();
        [at, at + self.layout.draws() as u64, at + self.layout.row_table() as u64]
    }

    /// Rows of the embedding into the residual stream.
    pub fn embed(&self, rows: u32) -> Result<(), DriverError> {
        let (w, [segments, _, row_table]) = (&self.weights.embedding, self.parts());
        let name = match w.packing {
            Packing::Q4 => "embed_q4",
            Packing::Q8 => "embed_q8",
            Packing::Bf16 => "embed_bf16",
            Packing::Bf16x2 => "embed_bf16x2",
        };
        let mut args = Args::new();
        args.words(&w.words()).u64(row_table).u64(segments).u64(self.state.sampled.address());
        args.u64(self.state.history.address()).u64(self.state.sizes.history as u64 / 4);
        args.u64(self.buffers.x.address()).moves(u64::from(rows) * w.row_bytes());
        self.launch(name, [rows, 1, 1], &mut args)
    }

    /// Fragments of `rows` rows of `x` of `width` values, as matrices of `packing` take them.
    fn prepare(
        &self,
        x: &Buffer,
        input: Input<'_>,
        rows: u32,
        width: u32,
        packing: Packing,
    ) -> Result<(), DriverError> {
        let b = &self.buffers;
        let (name, factor) = match input {
            Input::Plain => ("prepare_plain", 0),
            Input::Norm(gain) => ("prepare_norm", gain.address()),
            Input::Heads => ("prepare_heads", b.squares.address()),
        };
        let mut args = Args::new();
        args.u64(x.address()).u32(width).u32(width).u64(factor);
        args.u32(width.div_ceil(TILE_COLS as u32)).u32(u32::from(packing.takes_digits()));
        args.u64(b.fragments.address()).u64(b.units.address()).u64(b.scale.address());
        self.launch(name, [rows, 1, 1], &mut args)
    }

    /// A product: by warpgroups, by clusters, or of inputs that another kernel has made ready.
    fn product(&self, p: &Product<'_>) -> Result<(), DriverError> {
        if self.widely(p)? || self.clustered(p)? {
            return Ok(());
        }
        let width = match p.input {
            Input::Norm(_) => self.config.hidden_size,
            Input::Heads => self.config.gdn.value_width(),
            Input::Plain => self.config.attention.query_width(),
        };
        self.prepare(p.x, p.input, p.rows, width as u32, p.w.packing)?;
        self.matmul(p)
    }

    /// The product of prepared inputs.
    fn matmul(&self, p: &Product<'_>) -> Result<(), DriverError> {
        let (b, w, rows) = (&self.buffers, p.w, p.rows);
        let blocks = w.rows.div_ceil(TILE_ROWS as u32);
        // More row blocks a block read the inputs less often; fewer keep every multiprocessor busy.
        let tall = blocks >= 4 * self.context.multiprocessors;
        let tiling = match (tall, rows) {
            (false, 0..=4) => Tiling { name: "1x1", blocks: 1, tokens: 4 },
            (true, 0..=4) => Tiling { name: "4x1", blocks: 4, tokens: 4 },
            (false, 5..=8) => Tiling { name: "1x2", blocks: 1, tokens: 8 },
            (true, 5..=8) => Tiling { name: "2x2", blocks: 2, tokens: 8 },
            (false, _) => Tiling { name: "1x4", blocks: 1, tokens: 16 },
            (true, _) => Tiling { name: "4x4", blocks: 4, tokens: 16 },
        };
        let name = matmul_name(w.packing, tiling.name);
        let (r, tokens) = (tiling.blocks, tiling.tokens);
        let mut args = Args::new();
        args.words(&w.words()).u64(b.fragments.address()).u64(b.units.address());
        args.u64(if matches!(p.input, Input::Norm(_)) { b.scale.address() } else { 0 });
        args.u64(p.y.address()).u32(rows).u32(w.rows).u32(u32::from(p.add)).moves(w.tiles.bytes() as u64);
        self.launch(name, [blocks.div_ceil(r), rows.div_ceil(tokens), 1], &mut args)
    }

    /// From projections to gated attention, layer `index` of its kind, as the product with `output` takes it.
    fn attend(
        &self,
        vectors: &[Buffer; 2],
        index: u64,
        plan: &Plan,
        output: &DeviceMatrix,
    ) -> Result<(), DriverError> {
        let (b, s, a) = (&self.buffers, &self.state, &self.config.attention);
        let rows = plan.rows as u32;
        let [segments, _, row_table] = self.parts();
        let layer = index * 2 * 2 * (PAGE * a.kv_width()) as u64;
        let stride = s.sizes.page as u64 / 2;
        let cache = [s.pages.address() + layer, stride, s.tables.address(), s.most_pages() as u64];
        let mut args = Args::new();
        args.u64(segments).u64(row_table).u64(b.projected.address());
        args.u64(vectors[0].address()).u64(vectors[1].address()).u64(b.rotary.address());
        let position = u64::from(rows) * 2 * 2 * a.kv_width() as u64;
        args.words(&cache).u64(b.queries.address()).moves(position);
        let heads = (a.heads + 2 * a.kv_heads) as u32;
        self.launch("append", [heads.div_ceil(8), rows, 1], &mut args)?;

        let splits = match rows {
            0..=32 => SPLITS,
            _ => (SPLIT_ROWS / rows.next_power_of_two()).max(1),
        };
        // In a short context few splits have a page: one row's are spread out, those of many rows share blocks.
        let kv_heads = a.kv_heads as u32;
        let blocks = FLASH_BLOCKS * self.context.multiprocessors;
        let across = if rows == 1 { splits } else { splits.min((blocks / (rows * kv_heads)).max(1)) };
        let together = flash_rows_shared(&self.config);
        // A step may have segments of both kinds; a chunk alone is the usual one.
        let together =
            Some(together).filter(|&t| !plan.decode && rows >= MANY_ROWS && t <= self.context.shared_memory);
        let many = if together.is_some() { MANY_ROWS } else { u32::MAX };
        if together.is_none() || plan.segments > 1 {
            let mut args = Args::new();
            args.u64(segments).u64(row_table).u64(b.queries.address()).words(&cache).u32(splits).u32(many);
            args.u64(b.partial.address()).u64(b.stats.address()).moves_per_position(position);
            let grid = [across, kv_heads, rows];
            let shape = Shape { grid, threads: 128, shared: flash_shared(&self.config), overlap: true };
            self.launch_with("flash", shape, &mut args)?;
        }
        if let Some(shared) = together {
            let blocks = rows.div_ceil(ROW_WARPS);
            let mut args = Args::new();
            args.u64(segments).u64(row_table).u32(rows).u64(b.queries.address()).words(&cache).u32(splits);
            args.u32(many).u64(b.partial.address()).u64(b.stats.address());
            args.moves_per_position(position / u64::from(rows) * u64::from(blocks));
            let shape = Shape { grid: [blocks, kv_heads, 1], threads: 32 * ROW_WARPS, shared, overlap: true };
            self.launch_with("flash_rows", shape, &mut args)?;
        }

        let mut args = Args::new();
        args.u64(segments).u64(row_table).u64(b.projected.address()).u64(b.partial.address());
        args.u64(b.stats.address()).u32(splits).u32(many).u64(b.mixed.address());
        args.words(&self.columns_of(output, rows));
        let grid = [(a.query_width() as u32).div_ceil(4 * TILE_COLS as u32 * COMBINE_WARPS), rows, 1];
        let shape = Shape { grid, threads: 32 * COMBINE_WARPS, shared: 0, overlap: true };
        self.launch_with("combine", shape, &mut args)
    }

    fn moe(
        &self,
        w: &DeviceMoe,
        gain: &Buffer,
        rows: u32,
        next: Option<(&DeviceMatrix, &Buffer)>,
    ) -> Result<(), DriverError> {
        let (b, hidden, x) = (&self.buffers, self.hidden(), &self.buffers.x);
        let q4 = w.gate_up.packing == Packing::Q4 && w.down.packing == Packing::Q4;
        let chunk = self.chunk_of_experts(rows).filter(|_| q4);
        let group = self.group.filter(|_| q4);
        // The kernel of `group` lists those of few rows itself.
        let listed = chunk.is_some() || rows > group::listed(&self.config);
        let pairs = chunk.map(|_| chunk::PAIRS).or(group.map(|_| group::PAIRS)).unwrap_or(GROUP);
        let chosen = (chunk.is_some() || group.is_some()) && self.choose(&w.router, gain, rows)?;
        if chosen && listed {
            self.list_experts(rows, pairs)?;
        } else if !chosen {
            self.route(&w.router, gain, rows, pairs)?;
            if w.gate_up.packing.takes_digits() != w.router.packing.takes_digits() {
                self.prepare(x, Input::Norm(gain), rows, hidden, w.gate_up.packing)?;
            }
        }
        match (chunk, group) {
            (Some(chunk), _) => self.experts_of_chunk(chunk, w, rows)?,
            (None, Some(group)) => self.experts_by_copies(group, w, rows, chosen && !listed)?,
            (None, None) => self.experts(w, rows)?,
        }
        let mut args = Args::new();
        args.u64(b.weights.address()).u64(b.expanded.address()).u64(x.address());
        args.u64(next.map_or(0, |(_, gain)| gain.address()));
        args.words(&next.map_or([0; 2], |(w, _)| self.columns_of(w, rows))).u64(b.eighths.address());
        args.u64(b.done.address());
        let shape =
            Shape { grid: [8 / ADD_WARPS, rows, 1], threads: 32 * ADD_WARPS, shared: 0, overlap: true };
        self.launch_with("add_experts", shape, &mut args)
    }

    /// Chooses the experts of any number of rows and lists them in pieces of up to `group` pairs.
    fn route(&self, router: &DeviceMatrix, gain: &Buffer, rows: u32, group: u32) -> Result<(), DriverError> {
        let b = &self.buffers;
        let input = Input::Norm(gain);
        let (x, y) = (&b.x, &b.router);
        self.product(&Product { w: router, x, input, y, rows, add: false, keep: true, ready: false })?;
        let mut args = Args::new();
        args.u64(b.router.address()).u32(rows).u32(group).u64(b.weights.address()).u64(b.chosen.address());
        args.u64(b.pairs.address()).u64(b.work.address()).u64(b.counts.address());
        let shape = Shape { grid: [1, 1, 1], threads: 1024, shared: 0, overlap: true };
        self.launch_with("route", shape, &mut args)
    }

    /// Lists the experts that `router_q8` has chosen for `rows` rows, in pieces of up to `group` pairs.
    fn list_experts(&self, rows: u32, group: u32) -> Result<(), DriverError> {
        let b = &self.buffers;
        let mut args = Args::new();
        args.u64(b.chosen.address()).u32(rows).u32(group);
        args.u64(b.pairs.address()).u64(b.work.address()).u64(b.counts.address());
        let shape = Shape { grid: [1, 1, 1], threads: 1024, shared: 0, overlap: true };
        self.launch_with("list_experts", shape, &mut args)
    }

    /// What a general kernel of experts takes first, in a step of `rows` rows.
    fn work(&self, stack: &Stack, rows: u32) -> Args {
        let mut args = Args::new();
        args.u64(stack.experts.address()).u64(stack.shared.address());
        args.moves(stack.expected_bytes(&self.config.moe, rows));
        args
    }

    /// The products of all chosen experts of `rows` rows.
    fn experts(&self, w: &DeviceMoe, rows: u32) -> Result<(), DriverError> {
        let (b, m) = (&self.buffers, &self.config.moe);
        let pairs = rows * (m.experts_per_token as u32 + 1);
        // A block a piece of work, as far as pieces can be many.
        let most = pairs.min(pairs / GROUP + m.experts as u32 + 1).min(256);
        let widest = m.expert_width.max(m.shared_width) as u32;
        let lists = |args: &mut Args| {
            args.u64(b.work.address()).u64(b.counts.address()).u64(b.pairs.address());
        };
        let mut args = self.work(&w.gate_up, rows);
        lists(&mut args);
        args.u64(b.fragments.address()).u64(b.units.address());
        args.u64(b.scale.address()).u64(b.middle.address());
        self.launch(expert_name("gate_up", w.gate_up.packing), [widest.div_ceil(8), most, 1], &mut args)?;

        self.prepare(&b.middle, Input::Plain, pairs, widest, w.down.packing)?;
        let mut args = self.work(&w.down, rows);
        lists(&mut args);
        args.u64(b.fragments.address()).u64(b.units.address()).u64(b.expanded.address());
        let blocks = self.hidden().div_ceil(TILE_ROWS as u32);
        self.launch(expert_name("down", w.down.packing), [blocks, most, 1], &mut args)
    }

    /// Logits of the rows that want them.
    fn logits(&self, plan: &Plan) -> Result<(), DriverError> {
        let b = &self.buffers;
        let [_, _, row_table] = self.parts();
        // In a decode step all rows do.
        let x = if plan.decode { &b.x } else { &b.wanted };
        if !plan.decode {
            let mut args = Args::new();
            args.u64(row_table).u64(b.x.address()).u64(b.wanted.address());
            self.launch("gather", [plan.rows as u32, 1, 1], &mut args)?;
        }
        let (w, input, rows) = (self.weights.lm_head(), Input::Norm(&self.weights.norm), plan.logits as u32);
        self.product(&Product {
            w,
            x,
            input,
            y: &b.logits,
            rows,
            add: false,
            keep: false,
            ready: plan.decode,
        })
    }

    /// Faults and draws; the largest logits of so many `parts` of each row are known.
    pub fn finish(&self, plan: &Plan, parts: u32) -> Result<(), DriverError> {
        let (b, s) = (&self.buffers, &self.state);
        let [segments, draws, row_table] = self.parts();
        let at = b.step.address();
        let mut args = Args::new();
        args.u64(segments).u64(row_table).u64(b.x.address()).u64(b.logits.address());
        args.u64(b.best.address()).u32(parts).u64(draws);
        args.u64(at + self.layout.biases() as u64).u64(at + self.layout.masks() as u64);
        args.u64(s.history.address()).u64(s.sizes.history as u64 / 4);
        args.u64(b.seen.address()).u64(b.adjusted.address()).u64(s.sampled.address());
        args.u64(b.results.address());
        let shape = Shape { grid: [plan.segments as u32, 1, 1], threads: 1024, shared: 0, overlap: true };
        self.launch_with("finish", shape, &mut args)
    }

    /// Fills the table of rotary angles, once.
    pub fn rotary_table(&self, positions: usize) -> Result<(), DriverError> {
        let a = &self.config.attention;
        let frequency = |i: usize| a.rope_theta.powf(-2.0 * i as f64 / a.rotary_dim as f64);
        let bytes: Vec<u8> = (0..a.rotary_dim / 2).flat_map(|i| frequency(i).to_le_bytes()).collect();
        let frequencies = self.context.upload(&bytes, "rotary frequencies")?;
        let mut args = Args::new();
        args.u64(frequencies.address()).u64(self.buffers.rotary.address()).u32(positions as u32);
        let blocks = (positions * a.rotary_dim / 2).div_ceil(THREADS as usize) as u32;
        self.launch("rotary_table", [blocks, 1, 1], &mut args)?;
        self.context.synchronize()
    }
}

/// Shared memory of the flash kernel, `Flash` there: queries, K and V of a page, and half a head of each warp's sums.
pub fn flash_shared(c: &Config) -> u32 {
    let row = 2 * c.attention.head_dim as u32;
    16 * row + 2 * PAGE as u32 * row + 4 * 8 * (row + 32) + 256
}

/// Shared memory of `flash_rows`, `FlashRows` there: eight rows' queries, K and V of two pages.
pub fn flash_rows_shared(c: &Config) -> u32 {
    2 * c.attention.head_dim as u32 * (16 * ROW_WARPS + 4 * PAGE as u32)
}

/// Row blocks and tokens of a matmul block.
struct Tiling {
    name: &'static str,
    blocks: u32,
    tokens: u32,
}

fn matmul_name(packing: Packing, tiling: &str) -> &'static str {
    match (packing, tiling) {
        (Packing::Q4, "1x1") => "matmul_q4_1x1",
        (Packing::Q4, "4x1") => "matmul_q4_4x1",
        (Packing::Q4, "1x2") => "matmul_q4_1x2",
        (Packing::Q4, "2x2") => "matmul_q4_2x2",
        (Packing::Q4, "1x4") => "matmul_q4_1x4",
        (Packing::Q8, "1x1") => "matmul_q8_1x1",
        (Packing::Q8, "4x1") => "matmul_q8_4x1",
        (Packing::Q8, "1x2") => "matmul_q8_1x2",
        (Packing::Q8, "2x2") => "matmul_q8_2x2",
        (Packing::Q8, "1x4") => "matmul_q8_1x4",
        (Packing::Bf16, "1x1") => "matmul_bf16_1x1",
        (Packing::Bf16, "4x1") => "matmul_bf16_4x1",
        (Packing::Bf16, "1x2") => "matmul_bf16_1x2",
        (Packing::Bf16, "2x2") => "matmul_bf16_2x2",
        (Packing::Bf16, "1x4") => "matmul_bf16_1x4",
        (Packing::Bf16x2, "1x1") => "matmul_bf16x2_1x1",
        (Packing::Bf16x2, "4x1") => "matmul_bf16x2_4x1",
        (Packing::Bf16x2, "1x2") => "matmul_bf16x2_1x2",
        (Packing::Bf16x2, "2x2") => "matmul_bf16x2_2x2",
        (Packing::Bf16x2, "1x4") => "matmul_bf16x2_1x4",
        (Packing::Q4, _) => "matmul_q4_4x4",
        (Packing::Q8, _) => "matmul_q8_4x4",
        (Packing::Bf16, _) => "matmul_bf16_4x4",
        (Packing::Bf16x2, _) => "matmul_bf16x2_4x4",
    }
}

fn expert_name(stem: &str, packing: Packing) -> &'static str {
    match (stem, packing) {
        ("gate_up", Packing::Q4) => "gate_up_q4",
        ("gate_up", Packing::Q8) => "gate_up_q8",
        ("gate_up", Packing::Bf16) => "gate_up_bf16",
        ("gate_up", Packing::Bf16x2) => "gate_up_bf16x2",
        (_, Packing::Q4) => "down_q4",
        (_, Packing::Q8) => "down_q8",
        (_, Packing::Bf16) => "down_bf16",
        (_, Packing::Bf16x2) => "down_bf16x2",
    }
}
