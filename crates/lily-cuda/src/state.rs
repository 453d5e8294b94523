//! State of sequences: K/V in pages that sequences and snapshots share, recurrent state in slots.
//!
//! A page is written only behind the positions that are already in it, so a snapshot may share even the page that its
//! sequence goes on filling; a sequence that resumes gets its own copy of that last page.

use std::sync::Arc;

use lily_model::config::{Config, LayerKind};
use lily_model::pool::{Capacity, Lease, PAGE, PartSizes, Pool};

use crate::driver::{Buffer, Context, DriverError};
use crate::gdn::{PENDING, update_len};

/// Sizes of the state, bytes.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Recurrent states of all Gated DeltaNet layers, f32, per slot.
    pub recurrent: usize,
    /// Two copies of the conv inputs of all Gated DeltaNet layers, f32, per slot.
    pub conv: usize,
    /// Logs of the recurrent states of all Gated DeltaNet layers, per slot.
    pub updates: usize,
    /// Tokens of a slot.
    pub history: usize,
    /// K/V of all attention layers for [`PAGE`] positions, bf16.
    pub page: usize,
}

impl Sizes {
    /// Of a model with so much context.
    pub fn new(config: &Config, context: usize) -> Self {
        let (gdn, attention) = (config.count(LayerKind::Gdn), config.count(LayerKind::Attention));
        Self {
            recurrent: 4 * gdn * config.gdn.state_len(),
            conv: 2 * 4 * gdn * config.gdn.conv_state_len(),
            updates: 4 * gdn * PENDING * update_len(&config.gdn),
            history: 4 * context,
            page: 2 * 2 * attention * PAGE * config.attention.kv_width(),
        }
    }

    /// As the pool counts them.
    pub fn parts(&self) -> PartSizes {
        PartSizes { slot: self.recurrent + self.conv + self.updates + self.history, page: self.page }
    }
}

/// A sequence or a snapshot.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Its slot and its pages.
    pub lease: Lease,
    /// Tokens fed so far.
    pub len: usize,
    /// Most tokens.
    pub capacity: usize,
    /// Which of the two conv states is the present one.
    pub parity: u32,
    /// Whether the last step sampled a token, which is then in the slot.
    pub sampled: bool,
    /// Updates in the slot's log that are not in its recurrent states: those of the last tokens. Snapshots have none.
    pub pending: u32,
}

/// Device memory of all state, and who has what.
pub struct State {
    context: Arc<Context>,
    /// Sizes of the parts.
    pub sizes: Sizes,
    /// Who has what.
    pub pool: Pool,
    /// Per slot: `[gdn layers, value_heads, key_dim, value_dim]` f32.
    pub recurrent: Buffer,
    /// Per slot: `[gdn layers, PENDING]` of the kernels' `Update`.
    pub updates: Buffer,
    /// Per slot: `[gdn layers, 2, taps - 1, channels]` f32.
    pub conv: Buffer,
    /// Per slot: its tokens.
    pub history: Buffer,
    /// Per slot: the token it sampled last.
    pub sampled: Buffer,
    /// Per page: `[attention layers, 2, kv_heads, PAGE, head_dim]` bf16.
    pub pages: Buffer,
    /// Per slot: numbers of its pages, [`State::most_pages`] of them.
    pub tables: Buffer,
    most_pages: usize,
}

impl State {
    /// Allocates memory for sequences of up to `length` tokens.
    pub fn new(
        context: &Arc<Context>,
        sizes: Sizes,
        length: usize,
        capacity: Capacity,
    ) -> Result<Self, DriverError> {
        let most_pages = length.div_ceil(PAGE);
        let Capacity { slots, pages } = capacity;
        let allocate = |bytes, what| context.allocate(bytes, what);
        let this = Self {
            context: context.clone(),
            sizes,
            recurrent: allocate(slots * sizes.recurrent, "recurrent state")?,
            conv: allocate(slots * sizes.conv, "conv state")?,
            updates: allocate(slots * sizes.updates, "log of recurrent state")?,
            history: allocate(slots * sizes.history, "token history")?,
            sampled: allocate(slots * 4, "sampled tokens")?,
            pages: allocate(pages * sizes.page, "K/V pages")?,
            tables: allocate(slots * most_pages * 4, "page tables")?,
            most_pages,
            pool: Pool::new(capacity),
        };
        // A sampled token may be read before one was drawn, by a step that then ignores it: it must be a token.
        context.fill(this.sampled.address(), 0, slots * 4)?;
        Ok(this)
    }

    /// Pages in a table.
    pub fn most_pages(&self) -> usize {
        self.most_pages
    }

    /// An empty sequence; [`Pool::fits`] must have said yes.
    pub fn create(&mut self, capacity: usize) -> Result<Sequence, DriverError> {
        let sequence = self.take(capacity, &[])?;
        let slot = u64::from(sequence.lease.slot);
        let zero = |buffer: &Buffer, bytes: usize| {
            self.context.fill(buffer.address() + slot * bytes as u64, 0, bytes)
        };
        zero(&self.recurrent, self.sizes.recurrent)?;
        zero(&self.conv, self.sizes.conv)?;
        Ok(sequence)
    }

    /// A copy at `from`'s position with room for `capacity` tokens: shares the pages that are full, and copies the last
    /// one unless `frozen`, for a copy that is never written. [`Pool::fits`] must have said yes to [`State::own_pages`], and `from`
    /// must be settled: its log is not copied.
    pub fn copy(&mut self, from: &Sequence, capacity: usize, frozen: bool) -> Result<Sequence, DriverError> {
        debug_assert_eq!(from.pending, 0, "a copy of a sequence that is not settled");
        let shared = if frozen { from.len.div_ceil(PAGE) } else { from.len / PAGE };
        let mut copy = self.take(capacity, &from.lease.pages[..shared])?;
        let slots = (u64::from(copy.lease.slot), u64::from(from.lease.slot));
        let move_slot = |buffer: &Buffer, bytes: usize| {
            let at = |slot: u64| buffer.address() + slot * bytes as u64;
            self.context.copy(at(slots.0), at(slots.1), bytes)
        };
        move_slot(&self.recurrent, self.sizes.recurrent)?;
        move_slot(&self.conv, self.sizes.conv)?;
        move_slot(&self.history, self.sizes.history)?;
        move_slot(&self.sampled, 4)?;
        if !frozen && !from.len.is_multiple_of(PAGE) {
            let at = |page: u32| self.page_address(page);
            self.context.copy(at(copy.lease.pages[shared]), at(from.lease.pages[shared]), self.sizes.page)?;
        }
        (copy.len, copy.parity, copy.sampled) = (from.len, from.parity, from.sampled);
        Ok(copy)
    }

    /// Pages that [`State::copy`] takes for itself.
    pub fn own_pages(from: &Sequence, capacity: usize, frozen: bool) -> usize {
        if frozen { 0 } else { capacity.div_ceil(PAGE) - from.len / PAGE }
    }

    /// Address of a page.
    pub fn page_address(&self, page: u32) -> u64 {
        self.pages.address() + u64::from(page) * self.sizes.page as u64
    }

    fn take(&mut self, capacity: usize, shared: &[u32]) -> Result<Sequence, DriverError> {
        let missing = || DriverError::Call { call: "state", name: "no free slot or page".to_owned() };
        let lease = self.pool.take(capacity, shared).ok_or_else(missing)?;
        let table: Vec<u8> = lease.pages.iter().flat_map(|p| p.to_le_bytes()).collect();
        let at = u64::from(lease.slot) * (self.most_pages * 4) as u64;
        self.context.send(self.tables.address() + at, &table)?;
        Ok(Sequence { lease, len: 0, capacity, parity: 0, sampled: false, pending: 0 })
    }
}
