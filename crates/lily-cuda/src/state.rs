//! State of sequences: K/V in pages that sequences and snapshots share, recurrent state in slots.
//!
//! A page is written only behind the positions that are already in it, so a snapshot may share even the page that its
//! sequence goes on filling; a sequence that resumes gets its own copy of that last page.

use std::sync::Arc;

use lily_model::config::{Config, LayerKind};

use crate::driver::{Buffer, Context, DriverError};

/// Positions of a page.
pub const PAGE: usize = 64;

/// Sizes of the state, bytes.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Recurrent states of all Gated DeltaNet layers, f32, per slot.
    pub recurrent: usize,
    /// Two copies of the conv inputs of all Gated DeltaNet layers, f32, per slot.
    pub conv: usize,
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
            history: 4 * context,
            page: 2 * 2 * attention * PAGE * config.attention.kv_width(),
        }
    }

    /// Bytes of a slot.
    pub fn slot(&self) -> usize {
        self.recurrent + self.conv + self.history
    }

    /// Bytes of so many slots and pages.
    pub fn bytes(&self, slots: usize, pages: usize) -> u64 {
        (slots * self.slot() + pages * self.page) as u64
    }

    /// Bytes that a sequence of so many tokens takes.
    pub fn sequence(&self, capacity: usize) -> u64 {
        self.bytes(1, capacity.div_ceil(PAGE))
    }
}

/// A sequence or a snapshot.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Its slot.
    pub slot: u32,
    /// Its pages, in order.
    pub pages: Vec<u32>,
    /// Tokens fed so far.
    pub len: usize,
    /// Most tokens.
    pub capacity: usize,
    /// Which of the two conv states is the present one.
    pub parity: u32,
    /// Whether the last step sampled a token, which is then in the slot.
    pub sampled: bool,
}

/// Tokens of a prompt between two snapshots, as the engine takes them: a snapshot comes with so many new pages.
const SNAPSHOT_TOKENS: usize = 2048;

/// How many slots and pages there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Slots.
    pub slots: usize,
    /// Pages.
    pub pages: usize,
}

impl Capacity {
    /// For `sequences` sequences of `length` tokens, and for snapshots in `snapshot_bytes` bytes beside them: as many as
    /// have [`SNAPSHOT_TOKENS`] each to themselves. What is left over becomes pages.
    pub fn new(sizes: &Sizes, length: usize, sequences: usize, snapshot_bytes: u64) -> Self {
        let (slot, page) = (sizes.slot() as u64, sizes.page.max(1) as u64);
        let snapshot = slot + (SNAPSHOT_TOKENS.min(length).div_ceil(PAGE) as u64) * page;
        // The last may have fewer: with its neighbours it often shares more.
        let snapshots = snapshot_bytes.div_ceil(snapshot).min(snapshot_bytes / slot);
        let pages = (snapshot_bytes - snapshots * slot) / page;
        Self {
            slots: sequences + snapshots as usize,
            pages: sequences * length.div_ceil(PAGE) + pages as usize,
        }
    }
}

/// Which slots and pages are taken. A page counts once, however many share it, until the last lets go.
pub struct Pool {
    capacity: Capacity,
    free_slots: Vec<u32>,
    free_pages: Vec<u32>,
    /// Of each page.
    users: Vec<u32>,
}

impl Pool {
    /// All free.
    pub fn new(capacity: Capacity) -> Self {
        Self {
            capacity,
            free_slots: (0..capacity.slots as u32).rev().collect(),
            free_pages: (0..capacity.pages as u32).rev().collect(),
            users: vec![0; capacity.pages],
        }
    }

    /// Bytes of all slots and pages.
    pub fn budget(&self, sizes: &Sizes) -> u64 {
        sizes.bytes(self.capacity.slots, self.capacity.pages)
    }

    /// Bytes of the slots and pages that are free.
    pub fn free_bytes(&self, sizes: &Sizes) -> u64 {
        sizes.bytes(self.free_slots.len(), self.free_pages.len())
    }

    /// Bytes of the largest sequence that could be made now; 0 without a free slot.
    pub fn largest(&self, sizes: &Sizes) -> u64 {
        match self.free_slots.is_empty() {
            true => 0,
            false => sizes.bytes(1, self.free_pages.len()),
        }
    }

    /// Whether a slot and so many pages are free.
    pub fn fits(&self, pages: usize) -> bool {
        !self.free_slots.is_empty() && pages <= self.free_pages.len()
    }

    /// A slot, the pages `shared` and fresh ones behind them, if there are so many.
    pub fn take(&mut self, capacity: usize, shared: &[u32]) -> Option<Sequence> {
        let fresh = capacity.div_ceil(PAGE).saturating_sub(shared.len());
        let left = self.free_pages.len().checked_sub(fresh)?;
        let slot = self.free_slots.pop()?;
        let fresh = self.free_pages.split_off(left);
        let pages: Vec<u32> = shared.iter().copied().chain(fresh).collect();
        pages.iter().for_each(|&p| self.users[p as usize] += 1);
        Some(Sequence { slot, pages, len: 0, capacity, parity: 0, sampled: false })
    }

    /// Gives back what a sequence has.
    pub fn release(&mut self, sequence: Sequence) {
        self.free_slots.push(sequence.slot);
        for page in sequence.pages {
            self.users[page as usize] -= 1;
            if self.users[page as usize] == 0 {
                self.free_pages.push(page);
            }
        }
    }
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
        let slot = u64::from(sequence.slot);
        let zero = |buffer: &Buffer, bytes: usize| {
            self.context.fill(buffer.address() + slot * bytes as u64, 0, bytes)
        };
        zero(&self.recurrent, self.sizes.recurrent)?;
        zero(&self.conv, self.sizes.conv)?;
        Ok(sequence)
    }

    /// A copy at `from`'s position with room for `capacity` tokens: shares the pages that are full, and copies the last
    /// one unless `frozen`, for a copy that is never written. [`Pool::fits`] must have said yes to [`State::own_pages`].
    pub fn copy(&mut self, from: &Sequence, capacity: usize, frozen: bool) -> Result<Sequence, DriverError> {
        let shared = if frozen { from.len.div_ceil(PAGE) } else { from.len / PAGE };
        let mut copy = self.take(capacity, &from.pages[..shared])?;
        let slots = (u64::from(copy.slot), u64::from(from.slot));
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
            self.context.copy(at(copy.pages[shared]), at(from.pages[shared]), self.sizes.page)?;
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
        let sequence = self.pool.take(capacity, shared).ok_or_else(missing)?;
        let table: Vec<u8> = sequence.pages.iter().flat_map(|p| p.to_le_bytes()).collect();
        let at = u64::from(sequence.slot) * (self.most_pages * 4) as u64;
        self.context.send(self.tables.address() + at, &table)?;
        Ok(sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { recurrent: 1000, conv: 20, history: 4, page: 64 };

    #[test]
    fn snapshots_get_memory_of_their_own() {
        let capacity = |length, sequences, bytes| {
            let Capacity { slots, pages } = Capacity::new(&SIZES, length, sequences, bytes);
            (slots, pages)
        };
        // A snapshot takes a slot of 1,024 bytes and 32 pages of 64.
        assert_eq!(capacity(4096, 4, 0), (4, 256));
        assert_eq!(capacity(4096, 4, 3 * 3072), (7, 256 + 96));
        // A fourth that has fewer pages to itself.
        assert_eq!(capacity(4096, 4, 3 * 3072 + 1030), (8, 256 + 96));
        assert_eq!(capacity(100, 1, 10 * (1024 + 128)), (11, 2 + 20));
        // Too little for the state of even one.
        assert_eq!(capacity(4096, 1, 1023), (1, 64 + 15));
        assert_eq!(capacity(4096, 1, 1024), (2, 64));
        for bytes in (0..100_000).step_by(37) {
            let Capacity { slots, pages } = Capacity::new(&SIZES, 4096, 2, bytes);
            let used = SIZES.bytes(slots, pages) - SIZES.bytes(2, 128);
            assert!(used <= bytes && bytes - used < 64, "{bytes}: {used}");
        }
    }

    /// 130 tokens are two full pages and a part of one. What is shared counts once, until the last lets go.
    #[test]
    fn free_bytes_are_all_that_is_not_reserved() {
        let mut pool = Pool::new(Capacity { slots: 4, pages: 10 });
        let free = |pool: &Pool| pool.free_bytes(&SIZES);
        let (budget, slot, page) = (pool.budget(&SIZES), 1024, 64);
        assert_eq!((budget, free(&pool)), (4 * slot + 10 * page, budget));
        let sequence = pool.take(192, &[]).unwrap();
        assert_eq!(budget - free(&pool), slot + 3 * page);
        let snapshot = pool.take(130, &sequence.pages).unwrap();
        assert_eq!(budget - free(&pool), 2 * slot + 3 * page);
        let resumed = pool.take(256, &snapshot.pages[..2]).unwrap();
        assert_eq!(budget - free(&pool), 3 * slot + 5 * page);
        // A fourth uses up the slots, and bytes of pages stay free.
        let last = pool.take(64, &[]).unwrap();
        assert_eq!(budget - free(&pool), 4 * slot + 6 * page);
        assert_eq!((pool.largest(&SIZES), pool.fits(0)), (0, false));
        assert!(pool.take(0, &[]).is_none());
        pool.release(last);
        assert_eq!(pool.largest(&SIZES), slot + 5 * page);
        assert!(pool.fits(5) && !pool.fits(6) && pool.take(6 * 64, &[]).is_none());
        pool.release(sequence);
        assert_eq!(budget - free(&pool), 2 * slot + 5 * page);
        pool.release(snapshot);
        assert_eq!(budget - free(&pool), slot + 4 * page);
        pool.release(resumed);
        assert_eq!(free(&pool), budget);
    }
}
