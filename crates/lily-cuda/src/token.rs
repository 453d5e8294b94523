//! One decoded token as one kernel, `kernels/token/`, between the embedding and the draw.

use lily_model::config::{Config, LayerKind};
use lily_model::footprint::Footprint;
use lily_model::pool::PAGE;

use crate::driver::{Args, Buffer, DriverError, Shape};
use crate::forward::Device;
use crate::pack::{Packing, TILE_COLS, TILE_ROWS};
use crate::step::Plan;
use crate::weights::{DeviceLayer, DeviceMixer};

/// Threads of a block: eight warps that compute, and a group of four of which one copies.
const THREADS: u32 = 384;
/// Bytes of a slot of the ring.
const SLOT: usize = 32 * 576;
/// Slots.
const RING: usize = 9;
/// Row blocks of x that a block owns at most.
const MOST_OWN: u32 = 2;
/// Words of a layer's addresses: `Layer` of the kernel.
const LAYER_WORDS: usize = 15;
/// Copies of weights that a block may have on their way at a time: of 1 to 8, 2 was the fastest (docs/lab/cuda.md).
const AHEAD: u64 = 2;

/// What the kernel needs besides the buffers of [`Device`].
pub struct Token {
    /// Blocks; each is alone on a multiprocessor.
    blocks: u32,
    /// Addresses of all layers' weights.
    layers: Buffer,
    /// Values on their way from block to block.
    packets: Buffer,
    /// Number of the last layer's packets.
    epoch: Buffer,
}

/// Whether the kernel is written for a model's shapes and a compute capability.
pub fn fits(c: &Config, capability: u32) -> bool {
    let (g, a, m) = (&c.gdn, &c.attention, &c.moe);
    capability >= 90
        // Smaller ones were never tried.
        && c.hidden_size / TILE_ROWS >= 8
        && g.value_dim.is_multiple_of(64)
        && g.key_dim.is_multiple_of(32)
        && g.key_dim <= 128
        && a.query_width().is_multiple_of(TILE_COLS)
        // A page takes whole slots.
        && a.head_dim.is_power_of_two()
        && m.experts_per_token < 16
        && c.hidden_size.max(m.expert_width).max(m.shared_width) / TILE_COLS * 576 <= SLOT
}

impl Token {
    /// `None`: the device, the model's shapes or the form of its weights do not suit it.
    pub fn new(d: &Device) -> Result<Option<Self>, DriverError> {
        let suits = fits(&d.config, d.context.capability) && d.weights.layers.iter().all(packed);
        if !suits || d.weights.lm_head().packing != Packing::Q4 {
            return Ok(None);
        }
        let rows = (d.config.hidden_size / TILE_ROWS) as u32;
        let m = &d.config.moe;
        // Blocks wait for each other: all must run at once, and each must have something in every layer that the others wait for,
        // rows of x or else a share of both products of x.
        let input = |l: &DeviceLayer| {
            let (DeviceMixer::Gdn { input, .. } | DeviceMixer::Attention { input, .. }) = &l.mixer;
            input.rows / TILE_ROWS as u32
        };
        let experts = (m.experts_per_token * m.expert_width / 8) as u32;
        let shares = d.weights.layers.iter().map(input).fold(experts, u32::min);
        let blocks = d.context.multiprocessors.min(rows.max(shares));
        // Gate and up of a block are one round: as many units as there is room for the sums of.
        let units = |rows: usize| (rows / 8).div_ceil(blocks.max(1) as usize);
        let [routed, shared] = [m.experts_per_token * m.expert_width, m.shared_width].map(units);
        let fits_round = routed <= RING && routed + shared <= (m.experts_per_token + 1).max(8);
        let table: Vec<u8> = layers(d).iter().flatten().flat_map(|word| word.to_le_bytes()).collect();
        let [bytes, packets] = match d.context.is_stand_in() {
            false => d.kernels.numbers("token.cu", "token_sizes")?,
            true => [0; 2],
        };
        if rows > MOST_OWN * blocks
            || !fits_round
            || bytes as usize + table.len() > d.context.shared_memory as usize
        {
            return Ok(None);
        }
        let packets = d.context.allocate(8 * packets as usize, "packets between blocks")?;
        d.context.fill(packets.address(), 0, packets.bytes())?;
        let epoch = d.context.upload(&[0; 16], "number of packets")?;
        let layers = d.context.upload(&table, "addresses of layers")?;
        Ok(Some(Self { blocks, layers, packets, epoch }))
    }

    /// Enqueues the step of one token that draws one.
    pub fn step(&self, d: &Device) -> Result<(), DriverError> {
        let (b, s, w) = (&d.buffers, &d.state, &d.weights);
        d.embed(1)?;
        let [segments, _, rows] = d.parts();
        let mut args = Args::new();
        // `Token` of the kernel.
        args.words(&[
            segments,
            rows,
            self.layers.address(),
            d.config.layers.len() as u64,
            b.x.address(),
            w.norm.address(),
            w.lm_head().tiles.address(),
            b.logits.address(),
            b.best.address(),
            s.recurrent.address(),
            s.sizes.recurrent as u64 / 4,
            s.conv.address(),
            s.sizes.conv as u64 / 4,
            s.pages.address(),
            s.sizes.page as u64 / 2,
            s.tables.address(),
            s.most_pages() as u64,
            b.rotary.address(),
            self.packets.address(),
            self.epoch.address(),
            AHEAD,
        ]);
        let footprint = Footprint::new(&d.config);
        let state = 2 * 4 * (footprint.recurrent_values + footprint.conv_values);
        args.moves(weight_bytes(d) + state);
        args.moves_per_position(2 * footprint.kv_values_per_token);
        args.stages(stages(&d.config.layers));
        let (grid, shared) = ([self.blocks, 1, 1], d.context.shared_memory);
        d.launch_with("token", Shape { grid, threads: THREADS, shared, overlap: true }, &mut args)?;
        d.finish(&Plan::decoding(1), self.blocks)
    }
}

/// Bytes of the weights that a token reads.
fn weight_bytes(d: &Device) -> u64 {
    let moe = &d.config.moe;
    let layer = |l: &DeviceLayer| {
        let bytes = |b: &Buffer| b.bytes() as u64;
        let mixer = match &l.mixer {
            DeviceMixer::Gdn { input, vectors, output } => {
                bytes(&input.tiles) + bytes(&output.tiles) + vectors.iter().map(bytes).sum::<u64>()
            }
            DeviceMixer::Attention { input, output, .. } => bytes(&input.tiles) + bytes(&output.tiles),
        };
        mixer
            + bytes(&l.moe.router.tiles)
            + l.moe.gate_up.expected_bytes(moe, 1)
            + l.moe.down.expected_bytes(moe, 1)
    };
    d.weights.layers.iter().map(layer).sum::<u64>() + d.weights.lm_head().tiles.bytes() as u64
}

/// Whether a layer's matrices have the forms that the kernel takes.
fn packed(l: &DeviceLayer) -> bool {
    let (DeviceMixer::Gdn { input, output, .. } | DeviceMixer::Attention { input, output, .. }) = &l.mixer;
    let q4 = [input.packing, output.packing, l.moe.gate_up.packing, l.moe.down.packing];
    q4.iter().all(|p| *p == Packing::Q4) && l.moe.router.packing == Packing::Q8
}

/// `Layer` of the kernel, for all layers.
fn layers(d: &Device) -> Vec<[u64; LAYER_WORDS]> {
    let (mut gdn, mut attention) = (0, 0);
    let one = |l: &DeviceLayer| {
        let at = Buffer::address;
        let (input, output, vectors, index) = match &l.mixer {
            DeviceMixer::Gdn { input, vectors: [a, b, c, e], output } => {
                gdn += 1;
                (input, output, [at(a), at(b), at(c), at(e)], gdn - 1)
            }
            DeviceMixer::Attention { input, vectors: [q, k], output } => {
                attention += 1;
                (input, output, [at(q), at(k), 0, 0], attention - 1)
            }
        };
        let [v0, v1, v2, v3] = vectors;
        let m = &l.moe;
        [
            at(&input.tiles),
            at(&output.tiles),
            at(&m.router.tiles),
            at(&m.gate_up.experts),
            at(&m.gate_up.shared),
            at(&m.down.experts),
            at(&m.down.shared),
            at(&l.input_norm),
            at(&l.post_attention_norm),
            v0,
            v1,
            v2,
            v3,
            index,
            u64::from(matches!(l.mixer, DeviceMixer::Attention { .. })),
        ]
    };
    d.weights.layers.iter().map(one).collect()
}

/// Stages of the kernel that depend on one another: each begins when the blocks' values of the one before are there.
fn stages(layers: &[LayerKind]) -> u32 {
    let of = |kind: &LayerKind| match kind {
        // Projection, delta rule, out projection; router, gate and up, down.
        LayerKind::Gdn => 6,
        // Projection, attention over the splits, their sum, out projection; as above.
        LayerKind::Attention => 7,
    };
    // And lm_head.
    layers.iter().map(of).sum::<u32>() + 1
}

const _: () = assert!(PAGE == 64, "the kernel deals pages by 64 keys");
