//! What a kernel is launched with.

use std::ffi::c_void;
use std::ptr;

/// Parameters of a launch, in order; and what it costs, which the kernel is not told.
pub struct Args {
    words: [u64; 64],
    used: usize,
    starts: [usize; 24],
    count: usize,
    traffic: Traffic,
    stages: u32,
}

/// Bytes of weights and state that a launch must read or write. Activations, which stay in the L2 cache, don't count, nor
/// do gains and tables of some kilobytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Always.
    pub bytes: u64,
    /// More for each position that its rows have come to.
    pub bytes_per_position: u64,
}

impl Args {
    /// None yet.
    pub fn new() -> Self {
        Self { words: [0; 64], used: 0, starts: [0; 24], count: 0, traffic: Traffic::default(), stages: 1 }
    }

    /// Adds a number.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.words(&[u64::from(value)])
    }

    /// Adds a number or an address.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.words(&[value])
    }

    /// Adds a structure, as little-endian words.
    pub fn words(&mut self, words: &[u64]) -> &mut Self {
        self.starts[self.count] = self.used;
        self.words[self.used..self.used + words.len()].copy_from_slice(words);
        self.used += words.len();
        self.count += 1;
        self
    }

    /// Says that so many bytes of weights or state are moved: see [`Traffic`].
    pub fn moves(&mut self, bytes: u64) -> &mut Self {
        self.traffic.bytes += bytes;
        self
    }

    /// The same for each position that a row has come to.
    pub fn moves_per_position(&mut self, bytes: u64) -> &mut Self {
        self.traffic.bytes_per_position += bytes;
        self
    }

    /// Says how many dependent stages the kernel has inside: points at which its blocks wait for each other's results, and one.
    pub fn stages(&mut self, stages: u32) -> &mut Self {
        self.stages = stages;
        self
    }

    /// Dependent stages; one if nothing was said.
    pub fn stage_count(&self) -> u32 {
        self.stages
    }

    /// All that was said to be moved.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// A pointer to each, as the driver takes them.
    pub(crate) fn pointers(&mut self) -> [*mut c_void; 24] {
        let mut pointers = [ptr::null_mut(); 24];
        for (pointer, start) in pointers.iter_mut().zip(&self.starts[..self.count]) {
            *pointer = (&raw mut self.words[*start]).cast();
        }
        pointers
    }
}

impl Default for Args {
    fn default() -> Self {
        Self::new()
    }
}
