//! Memory that kernels are given: an access beside it is a fault, which ends their launch (`runtime/fibers.h`).

use std::io;
use std::ptr::{null_mut, slice_from_raw_parts, slice_from_raw_parts_mut};

/// Bytes on either side that can't be touched. Only addresses are spent, and a wild index must not meet other memory.
const BESIDE: usize = 1 << 30;
const PAGE: usize = 4096;
/// Of an address.
const ALIGNMENT: usize = 16;

/// Which side is guarded to the byte; the other one is so from the next page on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// The first byte is the first of a page.
    Start,
    /// The last byte, rounded up to a multiple of 16, is the last of a page.
    End,
}

/// So many bytes, zeros at first, at a multiple of 16.
#[derive(Debug)]
pub struct Guarded {
    address: *mut u8,
    bytes: usize,
}

// SAFETY: the memory belongs to this value alone.
unsafe impl Send for Guarded {}

impl Guarded {
    /// Fails when the system has no more addresses or mappings.
    pub fn new(bytes: usize, guard: Guard) -> io::Result<Self> {
        let room = bytes.next_multiple_of(PAGE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: new pages, at no address in particular.
        let all = unsafe { libc::mmap(null_mut(), room + 2 * BESIDE, libc::PROT_NONE, flags, -1, 0) };
        if all == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let before = if guard == Guard::End { room - bytes.next_multiple_of(ALIGNMENT) } else { 0 };
        // SAFETY: within the pages.
        let first = unsafe { all.byte_add(BESIDE) };
        // SAFETY: as above: `before` is less than a page, or 0 without any.
        let memory = Self { address: unsafe { first.byte_add(before) }.cast(), bytes };
        // SAFETY: they are ours, and nobody knows of them yet. On failure `memory` gives them back.
        if unsafe { libc::mprotect(first, room, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(memory)
    }

    /// Where it begins, for kernels, which may read and write all of it while nothing else does.
    pub fn address(&self) -> *mut u8 {
        self.address
    }

    /// What is in it. No kernel may run.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: so many bytes are ours as long as this value lives.
        unsafe { &*slice_from_raw_parts(self.address, self.bytes) }
    }

    /// As [`Guarded::bytes`].
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this is the only reference.
        unsafe { &mut *slice_from_raw_parts_mut(self.address, self.bytes) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let room = self.bytes.next_multiple_of(PAGE);
        let all = (self.address as usize) / PAGE * PAGE - BESIDE;
        // SAFETY: mapped by `new`, which put the address into the first of the pages that can be touched.
        unsafe { libc::munmap(all as *mut _, room + 2 * BESIDE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the system can read a byte there, which it tells without a fault.
    fn is_there(address: usize) -> bool {
        let mut pipe = [0; 2];
        // SAFETY: two numbers are written; a bad address is an error of `write`.
        unsafe {
            assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
            let written = libc::write(pipe[1], address as *const _, 1);
            pipe.into_iter().for_each(|end| assert_eq!(libc::close(end), 0));
            written == 1
        }
    }

    #[test]
    fn all_of_it_is_there_and_nothing_beside() {
        for guard in [Guard::Start, Guard::End] {
            for bytes in [1, 15, 16, 100, 4096, 4097, 70_000] {
                let mut memory = Guarded::new(bytes, guard).unwrap();
                let first = memory.address() as usize;
                assert_eq!(first % ALIGNMENT, 0);
                assert_eq!(memory.bytes(), vec![0; bytes]);
                memory.bytes_mut().fill(7);
                assert!(is_there(first) && is_there(first + bytes - 1));
                // To the byte on one side, from the next page on on the other.
                let (before, behind) = match guard {
                    Guard::Start => (1, bytes.next_multiple_of(PAGE)),
                    Guard::End => (1 + first % PAGE, bytes.next_multiple_of(ALIGNMENT)),
                };
                for far in [0, 5000, BESIDE - PAGE] {
                    assert!(!is_there(first - before - far), "{bytes}, {guard:?}: {far} before");
                    assert!(!is_there(first + behind + far), "{bytes}, {guard:?}: {far} behind");
                }
            }
        }
    }

    /// More than there are addresses for at once.
    #[test]
    fn what_is_dropped_is_given_back() {
        for _ in 0..(1usize << 47) / (2 * BESIDE) + 1 {
            Guarded::new(1, Guard::End).unwrap();
        }
    }
}
