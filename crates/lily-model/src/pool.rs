//! Which parts of a device's state memory are taken: slots, one for each sequence and snapshot, and pages of K/V, which they
//! share.

use crate::backend::{BackendError, Limits};

/// Positions of a page of K/V.
pub const PAGE: usize = 64;

/// Bytes of the parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartSizes {
    /// Of a slot: what a sequence holds however long it is.
    pub slot: usize,
    /// Of a page: K/V of all attention layers for [`PAGE`] positions.
    pub page: usize,
}

impl PartSizes {
    /// Bytes of so many slots and pages.
    pub fn bytes(&self, slots: usize, pages: usize) -> u64 {
        (slots * self.slot + pages * self.page) as u64
    }

    /// Bytes that a sequence of so many tokens takes.
    pub fn sequence(&self, capacity: usize) -> u64 {
        self.bytes(1, capacity.div_ceil(PAGE))
    }
}

/// A slot and pages that are taken: given back with [`Pool::release`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The slot.
    pub slot: u32,
    /// The pages, in order.
    pub pages: Vec<u32>,
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
    pub fn new(sizes: &PartSizes, length: usize, sequences: usize, snapshot_bytes: u64) -> Self {
        let (slot, page) = (sizes.slot as u64, sizes.page.max(1) as u64);
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
    pub fn budget(&self, sizes: &PartSizes) -> u64 {
        sizes.bytes(self.capacity.slots, self.capacity.pages)
    }

    /// Bytes of the slots and pages that are free.
    pub fn free_bytes(&self, sizes: &PartSizes) -> u64 {
        sizes.bytes(self.free_slots.len(), self.free_pages.len())
    }

    /// Bytes of the largest sequence that could be made now; 0 without a free slot.
    pub fn largest(&self, sizes: &PartSizes) -> u64 {
        match self.free_slots.is_empty() {
            true => 0,
            false => sizes.bytes(1, self.free_pages.len()),
        }
    }

    /// Whether a slot and so many pages are free.
    pub fn fits(&self, pages: usize) -> bool {
        !self.free_slots.is_empty() && pages <= self.free_pages.len()
    }

    /// Refuses a sequence of `capacity` tokens that the context or the free memory can't hold; `fresh`: pages of it that are not
    /// shared.
    pub fn check_room(
        &self,
        sizes: &PartSizes,
        limits: &Limits,
        capacity: usize,
        fresh: usize,
    ) -> Result<(), BackendError> {
        limits.check_length(capacity)?;
        if self.fits(fresh) {
            return Ok(());
        }
        let (needed, available) = (sizes.bytes(1, fresh), self.largest(sizes));
        Err(BackendError::OutOfMemory { capacity: capacity as u32, needed, available })
    }

    /// A slot, the pages `shared` and fresh ones behind them, if there are so many.
    pub fn take(&mut self, capacity: usize, shared: &[u32]) -> Option<Lease> {
        let fresh = capacity.div_ceil(PAGE).saturating_sub(shared.len());
        let left = self.free_pages.len().checked_sub(fresh)?;
        let slot = self.free_slots.pop()?;
        let fresh = self.free_pages.split_off(left);
        let pages: Vec<u32> = shared.iter().copied().chain(fresh).collect();
        pages.iter().for_each(|&p| self.users[p as usize] += 1);
        Some(Lease { slot, pages })
    }

    /// Gives back what was taken.
    pub fn release(&mut self, lease: Lease) {
        self.free_slots.push(lease.slot);
        for page in lease.pages {
            self.users[page as usize] -= 1;
            if self.users[page as usize] == 0 {
                self.free_pages.push(page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: PartSizes = PartSizes { slot: 1024, page: 64 };

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

    #[test]
    fn a_sequence_that_does_not_fit_is_refused_with_numbers() {
        let mut pool = Pool::new(Capacity { slots: 2, pages: 3 });
        let limits = Limits {
            name: String::new(),
            vocab_size: 1,
            context: 256,
            max_batch_tokens: 1,
            max_segments: 1,
            state_budget: 0,
        };
        let check = |pool: &Pool, capacity, fresh| pool.check_room(&SIZES, &limits, capacity, fresh);
        assert_eq!(check(&pool, 192, 3), Ok(()));
        // Of four pages one is shared.
        assert_eq!(check(&pool, 256, 3), Ok(()));
        let (capacity, needed, available) = (256, 1024 + 4 * 64, 1024 + 3 * 64);
        let refused = Err(BackendError::OutOfMemory { capacity, needed, available });
        assert_eq!(check(&pool, 256, 4), refused);
        assert_eq!(check(&pool, 257, 1), Err(BackendError::TooLong { capacity: 257, context: 256 }));
        // Pages without a slot are of no use.
        assert!(pool.take(0, &[]).is_some() && pool.take(0, &[]).is_some());
        let refused = Err(BackendError::OutOfMemory { capacity: 1, needed: 1024, available: 0 });
        assert_eq!(check(&pool, 1, 0), refused);
    }
}
