//! Activations and results of a step.

use std::sync::Arc;

use lily_model::config::Config;

use crate::chunk::room_for_records;
use crate::driver::{Buffer, Context, DriverError};
use crate::forward::SPLIT_ROWS;
use crate::gdn::prepared_len;
use crate::pack::TILE_COLS;
use crate::step::{Layout, MAX_SEGMENTS};
use crate::wide::{columns_bytes, eighths};

/// Activations and results; made once, for the largest step.
pub struct Buffers {
    /// Segments, draws, rows, masks, biases: see [`Layout`].
    pub step: Buffer,
    /// Residual stream, `[rows, hidden]`.
    pub x: Buffer,
    /// Output of a mixer's first product.
    pub projected: Buffer,
    /// Inputs of the delta rule of a chunk, `Prepared` of `kernels/gdn_chunk.cu` for each row.
    pub prepared: Buffer,
    /// Inputs of products as fragments, with the units and sums of their tiles and 1 / rms per row.
    pub fragments: Buffer,
    /// See `fragments`.
    pub units: Buffer,
    /// See `fragments`.
    pub scale: Buffer,
    /// Inputs of products as columns of digits.
    pub columns: Buffer,
    /// Sums of squares of the eighths of such inputs.
    pub eighths: Buffer,
    /// Input of a mixer's last product: gated readout, or gated attention.
    pub mixed: Buffer,
    /// Partial sums of squares of the readout.
    pub squares: Buffer,
    /// Normed and rotated queries.
    pub queries: Buffer,
    /// Parts of flash attention.
    pub partial: Buffer,
    /// Their maxima and sums.
    pub stats: Buffer,
    /// Cosines and sines of all positions.
    pub rotary: Buffer,
    /// Router logits and the shared gate's.
    pub router: Buffer,
    /// Weight of each slot of each row.
    pub weights: Buffer,
    /// Expert of each slot of each row.
    pub chosen: Buffer,
    /// Pairs of row and slot, by expert.
    pub pairs: Buffer,
    /// Pieces of work, and their number.
    pub work: Buffer,
    /// See `work`.
    pub counts: Buffer,
    /// Strips of gate/up that are in `middle`, by piece of work; zeros between layers.
    pub done: Buffer,
    /// Inputs of the experts of many rows as columns, by piece of work: of gate/up, then of down.
    pub records: Buffer,
    /// Between gate/up and down, per pair.
    pub middle: Buffer,
    /// Behind down, per pair.
    pub expanded: Buffer,
    /// Rows that logits are wanted for.
    pub wanted: Buffer,
    /// Logits of those.
    pub logits: Buffer,
    /// Logits as sampling leaves them, per segment.
    pub adjusted: Buffer,
    /// How often a token was seen, per segment.
    pub seen: Buffer,
    /// The largest logit of each part of a row.
    pub best: Buffer,
    /// Token and fault of each segment.
    pub results: Buffer,
}

impl Buffers {
    /// For steps of `rows` tokens.
    pub fn new(
        context: &Arc<Context>,
        c: &Config,
        layout: &Layout,
        positions: usize,
    ) -> Result<Self, DriverError> {
        let (g, a, m, rows) = (&c.gdn, &c.attention, &c.moe, layout.rows);
        let slots = m.experts_per_token + 1;
        let projected = (g.conv_channels() + g.value_width() + 2 * g.value_heads)
            .max(2 * (a.query_width() + a.kv_width()));
        let mixed = g.value_width().max(a.query_width());
        let middle = m.expert_width.max(m.shared_width);
        let tiles = (c.hidden_size.max(mixed) / TILE_COLS).max(slots * middle / TILE_COLS);
        let splits = rows.max(SPLIT_ROWS as usize);
        let allocate = |bytes: usize| context.allocate(bytes, "activations");
        let floats = |n: usize| allocate(4 * n);
        let done = floats(rows * slots)?;
        context.fill(done.address(), 0, done.bytes())?;
        Ok(Self {
            step: allocate(layout.bytes())?,
            x: floats(rows * c.hidden_size)?,
            projected: floats(rows * projected)?,
            prepared: floats(rows * prepared_len(g))?,
            fragments: allocate(rows * tiles * 256)?,
            units: floats(2 * rows * tiles)?,
            scale: floats(rows)?,
            columns: allocate(columns_bytes(rows, c.hidden_size.max(mixed).div_ceil(TILE_COLS)))?,
            eighths: floats(eighths(rows))?,
            mixed: floats(rows * mixed)?,
            squares: floats(rows * g.value_width() / 32)?,
            queries: floats(rows * a.query_width())?,
            partial: floats(splits * a.query_width())?,
            stats: floats(2 * splits * a.heads)?,
            rotary: floats(positions * a.rotary_dim)?,
            router: floats(rows * (m.experts + 1))?,
            weights: floats(rows * slots)?,
            chosen: floats(rows * slots)?,
            pairs: floats(rows * slots)?,
            work: allocate(16 * (rows * slots).max(m.experts + 1))?,
            counts: floats(2)?,
            records: allocate(room_for_records(context, c, rows))?,
            middle: floats(rows * slots * middle)?,
            done,
            expanded: floats(rows * slots * c.hidden_size)?,
            wanted: floats(rows * c.hidden_size)?,
            logits: floats(rows * c.vocab_size)?,
            adjusted: floats(MAX_SEGMENTS * c.vocab_size)?,
            seen: floats(MAX_SEGMENTS * c.vocab_size)?,
            best: allocate(16 * 1024)?,
            results: allocate(8 * MAX_SEGMENTS)?,
        })
    }
}
