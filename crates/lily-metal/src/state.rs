//! Memory for the state of sequences: recurrent state in slots, K/V in pages, in buffers of all layers that are made at load.

use lily_model::pool::{Lease, PAGE, PartSizes};

use crate::device::{BufferId, Device, DeviceError, Encoder, Place};
use crate::plan::{Contents, Plan, SETTLE_EVERY, State};

/// What a slot's part of a buffer begins at a multiple of.
const ALIGNMENT: usize = 256;

/// State of one layer in a slot: convolution inputs, recurrent state, or what is pending of it.
#[derive(Clone, Copy, Debug)]
struct Slots {
    contents: (usize, State),
    /// Of a slot.
    bytes: usize,
    stride: usize,
}

/// Keys or values of one layer.
#[derive(Clone, Copy, Debug)]
struct Cache {
    contents: (usize, State),
    /// Of a position.
    row: usize,
}

/// Which state a sequence has, by the plan of a step.
#[derive(Clone, Debug)]
pub struct Layout {
    slots: Vec<Slots>,
    caches: Vec<Cache>,
    /// Sizes of slots and pages.
    pub sizes: PartSizes,
}

/// All of it, on a device.
pub struct StateMemory {
    layout: Layout,
    slots: Vec<BufferId>,
    caches: Vec<BufferId>,
}

impl Layout {
    /// `capacity`: that of the plan.
    pub fn new(plan: &Plan, capacity: usize) -> Self {
        let (mut slots, mut caches) = (Vec::new(), Vec::new());
        for buffer in &plan.buffers {
            let Contents::State(layer, state) = buffer.contents else { continue };
            match state {
                State::Conv | State::Recurrent | State::Log | State::Pending => {
                    let stride = buffer.bytes.next_multiple_of(ALIGNMENT);
                    slots.push(Slots { contents: (layer, state), bytes: buffer.bytes, stride });
                }
                State::Keys | State::Values => {
                    let row = buffer.bytes / capacity.next_multiple_of(PAGE);
                    caches.push(Cache { contents: (layer, state), row });
                }
            }
        }
        let slot = slots.iter().map(|s| s.stride).sum();
        let page = caches.iter().map(|c| c.row * PAGE).sum();
        Self { slots, caches, sizes: PartSizes { slot, page } }
    }

    /// Bytes of an exported state of so many tokens.
    pub fn exported(&self, len: usize) -> usize {
        let slots: usize = self.slots.iter().map(|s| s.bytes).sum();
        slots + len * self.caches.iter().map(|c| c.row).sum::<usize>()
    }

    /// Checks what is exported of a slot: kernels trust the number of pending tokens. Says what is wrong.
    pub fn check_slot(&self, mut bytes: &[u8]) -> Result<(), String> {
        for s in &self.slots {
            let Some((piece, rest)) = bytes.split_at_checked(s.bytes) else {
                return Err("its state is cut off".to_owned());
            };
            bytes = rest;
            let (layer, state) = s.contents;
            let counts = piece.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word));
            if let (State::Pending, Some(most)) = (state, counts.max())
                && most as usize >= SETTLE_EVERY
            {
                let room = SETTLE_EVERY - 1;
                return Err(format!("layer {layer} has {most} pending tokens, its log has room for {room}"));
            }
        }
        Ok(())
    }
}

impl StateMemory {
    /// As [`Layout::check_slot`].
    pub fn check_slot(&self, bytes: &[u8]) -> Result<(), String> {
        self.layout.check_slot(bytes)
    }

    /// Makes it for so many slots and pages.
    pub fn new(
        device: &mut dyn Device,
        layout: Layout,
        slots: usize,
        pages: usize,
    ) -> Result<Self, DeviceError> {
        let mut of_slots = Vec::new();
        for s in &layout.slots {
            of_slots.push(device.allocate(slots * s.stride, "recurrent state")?);
        }
        let mut of_caches = Vec::new();
        for c in &layout.caches {
            of_caches.push(device.allocate(pages * PAGE * c.row, "K/V pages")?);
        }
        Ok(Self { layout, slots: of_slots, caches: of_caches })
    }

    /// Sizes of slots and pages.
    pub fn sizes(&self) -> &PartSizes {
        &self.layout.sizes
    }

    /// Bytes of an exported state of so many tokens.
    pub fn exported(&self, len: usize) -> usize {
        self.layout.exported(len)
    }

    /// Where a state of a layer begins, and by how much that of the next slot lies behind; K/V of all sequences have one
    /// beginning.
    pub fn place(&self, layer: usize, state: State) -> Option<(Place, usize)> {
        let wanted = (layer, state);
        let slots = self.layout.slots.iter().zip(&self.slots);
        let caches = self.layout.caches.iter().zip(&self.caches);
        let of_slots = slots.filter(|(s, _)| s.contents == wanted).map(|(s, &buffer)| (buffer, s.stride));
        let of_caches = caches.filter(|(c, _)| c.contents == wanted).map(|(_, &buffer)| (buffer, 0));
        of_slots.chain(of_caches).next().map(|(buffer, stride)| (Place { buffer, offset: 0 }, stride))
    }

    fn slot_places(&self, slot: u32) -> impl Iterator<Item = (Place, usize)> {
        let place = move |(s, &buffer): (&Slots, &BufferId)| {
            (Place { buffer, offset: slot as usize * s.stride }, s.bytes)
        };
        self.layout.slots.iter().zip(&self.slots).map(place)
    }

    fn page_places(&self, page: u32) -> impl Iterator<Item = (Place, usize)> {
        let place = move |(c, &buffer): (&Cache, &BufferId)| {
            (Place { buffer, offset: page as usize * PAGE * c.row }, c.row)
        };
        self.layout.caches.iter().zip(&self.caches).map(place)
    }

    /// Makes a slot the state of an empty sequence.
    pub fn clear(&self, to: &mut dyn Encoder, slot: u32) {
        self.slot_places(slot).for_each(|(place, bytes)| to.zero(place, bytes));
    }

    /// Copies a slot.
    pub fn copy_slot(&self, to: &mut dyn Encoder, from: u32, slot: u32) {
        for ((from, bytes), (at, _)) in self.slot_places(from).zip(self.slot_places(slot)) {
            to.copy(from, at, bytes);
        }
    }

    /// Copies the first `rows` positions of a page.
    pub fn copy_page(&self, to: &mut dyn Encoder, from: u32, page: u32, rows: usize) {
        for ((from, row), (at, _)) in self.page_places(from).zip(self.page_places(page)) {
            to.copy(from, at, rows * row);
        }
    }

    /// Every piece of the state of a sequence of `len` tokens, in the order in which it is exported.
    pub fn pieces(&self, lease: &Lease, len: usize) -> impl Iterator<Item = (Place, usize)> {
        let rows = move |i: usize| (len - i * PAGE).min(PAGE);
        let pages = lease.pages.iter().take(len.div_ceil(PAGE)).enumerate();
        let cached = pages.flat_map(move |(i, &page)| {
            self.page_places(page).map(move |(place, row)| (place, rows(i) * row))
        });
        self.slot_places(lease.slot).chain(cached)
    }
}

#[cfg(test)]
mod tests {
    use lily_model::config::Config;
    use lily_model::presets::CONFIG_35B_A3B;

    use super::*;
    use crate::plan::{KvType, plan};

    #[test]
    fn a_slot_with_more_pending_tokens_than_a_log_holds_is_refused() {
        let config = Config::from_json(CONFIG_35B_A3B).unwrap();
        let layout = Layout::new(&plan(&config, 64, KvType::Bf16).unwrap(), 64);
        let mut bytes = vec![0; layout.exported(0)];
        assert_eq!(layout.check_slot(&bytes), Ok(()));
        let last = layout.slots.iter().rposition(|s| s.contents.1 == State::Pending).unwrap();
        let at = layout.slots[..=last].iter().map(|s| s.bytes).sum::<usize>() - 4;
        bytes[at] = 3;
        assert_eq!(layout.check_slot(&bytes), Ok(()));
        bytes[at] = 4;
        let e = layout.check_slot(&bytes).unwrap_err();
        assert!(e.contains("has 4 pending tokens, its log has room for 3"), "{e}");
    }
}
