//! Runs Metal kernels where there is no Mac: on the CPU, or with `LILY_TEST_DEVICE=cuda` on an NVIDIA GPU.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod close;
pub mod cpu;
pub mod device;
pub mod draws;
pub mod gpu;
pub mod machine;
pub mod model;
pub mod signature;
pub mod text;

use std::sync::atomic::{AtomicBool, Ordering};

use lily_metal::plan::{LANES, THREADGROUP_MEMORY, THREADGROUP_MEMORY_ALIGNMENT};

pub use lily_emulate::memory::Guard;

use cpu::{Cpu, Watched};
use gpu::{Gpu, Mirrored};
use signature::Signature;

/// Compiled kernels.
pub struct Kernels {
    device: Device,
    pub signatures: Vec<Signature>,
    /// Whether they are looked for.
    races: AtomicBool,
}

/// A kernel by name and how large its launch is.
#[derive(Clone, Copy)]
pub struct Shape<'a> {
    pub kernel: &'a str,
    /// Threadgroups.
    pub grid: [usize; 3],
    /// Threads of each.
    pub threads: usize,
    /// Bytes of each threadgroup memory argument.
    pub memory: &'a [usize],
}

/// Where a buffer argument is bound: an index into the memory that a launch is given, and bytes from there on.
pub type Bound = (usize, usize);

/// What they run on.
enum Device {
    Cpu(Cpu),
    Gpu(Gpu),
}

/// In which order the CPU runs threads and threadgroups. A GPU has its own.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    Forward,
    Backward,
    /// By chance, from a seed.
    Random(u16),
}

pub const ORDERS: [Order; 3] = [Order::Forward, Order::Backward, Order::Random(7)];

/// Memory of a kernel; on the CPU an access past its guard is caught, on a GPU a sanitizer looks.
pub struct Memory {
    place: Place,
    pub bytes: usize,
}

enum Place {
    Cpu(Watched),
    Gpu(Mirrored),
}

impl Memory {
    pub fn bytes(&self) -> &[u8] {
        match &self.place {
            Place::Cpu(watched) => watched.memory.bytes(),
            Place::Gpu(memory) => &memory.host,
        }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.place {
            Place::Cpu(watched) => watched.memory.bytes_mut(),
            Place::Gpu(memory) => memory.bytes_mut(),
        }
    }

    fn watched(&self) -> &Watched {
        match &self.place {
            Place::Cpu(watched) => watched,
            Place::Gpu(_) => panic!("memory of a GPU for kernels on the CPU"),
        }
    }

    fn mirrored(&mut self) -> &mut Mirrored {
        match &mut self.place {
            Place::Gpu(memory) => memory,
            Place::Cpu(_) => panic!("memory of the CPU for kernels on a GPU"),
        }
    }

    pub fn words(&self) -> Vec<u32> {
        self.bytes().as_chunks::<4>().0.iter().map(|w| u32::from_le_bytes(*w)).collect()
    }

    pub fn floats(&self) -> Vec<f32> {
        self.words().into_iter().map(f32::from_bits).collect()
    }

    pub fn put(&mut self, words: impl IntoIterator<Item = u32>) {
        for (to, word) in self.bytes_mut().as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
    }

    /// Itself, with these words at its beginning.
    pub fn with(mut self, words: impl IntoIterator<Item = u32>) -> Self {
        self.put(words);
        self
    }

    pub fn put_floats(&mut self, values: &[f32]) {
        assert_eq!(4 * values.len(), self.bytes);
        self.put(values.iter().map(|x| x.to_bits()));
    }
}

impl Kernels {
    /// Compiles Metal source for the device that tests run on. Never unloaded: threads keep memory that belongs to it.
    pub fn compile(source: &str) -> &'static Self {
        let signatures = signature::signatures(source).unwrap();
        let device = match gpu::wanted() {
            true => Device::Gpu(Gpu::compile(source, &signatures)),
            false => Device::Cpu(Cpu::compile(source, &signatures)),
        };
        Box::leak(Box::new(Self { device, signatures, races: AtomicBool::new(true) }))
    }

    pub fn allocate(&self, bytes: usize, guard: Guard) -> Memory {
        let place = match &self.device {
            Device::Cpu(_) => Place::Cpu(Watched::new(bytes, guard)),
            Device::Gpu(gpu) => Place::Gpu(gpu.allocate(bytes)),
        };
        let mut memory = Memory { place, bytes };
        // NaN, so that what is read before it is written shows.
        memory.bytes_mut().fill(0xff);
        memory
    }

    /// From now on a race shows only in what is computed; else it is an error, on the CPU.
    pub fn ignore_races(&self) {
        self.races.store(false, Ordering::Relaxed);
    }

    /// Runs a kernel, each of its buffers bound to a place in `memories`, which may be the same for several.
    pub fn launch(
        &self,
        shape: Shape,
        memories: &mut [Memory],
        bound: &[Bound],
        order: Order,
    ) -> Result<(), String> {
        let kernel = shape.kernel;
        let signature = self.signatures.iter().find(|s| s.name == kernel);
        let signature = signature.ok_or_else(|| format!("{kernel}: there is no such kernel"))?;
        check_launch(signature, shape, bound.len()).map_err(|why| format!("{kernel}: {why}"))?;
        for &(index, offset) in bound {
            assert!(offset < memories[index].bytes, "{kernel}: bound behind the end");
        }
        match &self.device {
            Device::Cpu(cpu) => {
                let races = self.races.load(Ordering::Relaxed);
                cpu.launch(signature, shape, memories, bound, order, races)
            }
            Device::Gpu(gpu) => gpu.launch(signature, shape, memories, bound),
        }
    }
}

/// Refuses what no Apple GPU since family 7 could launch, and what doesn't fit the kernel's signature.
fn check_launch(signature: &Signature, shape: Shape, buffers: usize) -> Result<(), String> {
    let Shape { grid, threads, memory, .. } = shape;
    let all: usize = memory.iter().sum();
    if grid.contains(&0) {
        return Err(format!("a grid of {grid:?} threadgroups"));
    }
    if threads == 0 || !threads.is_multiple_of(LANES) || threads > signature.threads {
        let most = signature.threads;
        return Err(format!("{threads} threads, expected a multiple of {LANES}, at most {most}"));
    }
    if all > THREADGROUP_MEMORY {
        return Err(format!("{all} bytes of threadgroup memory, more than {THREADGROUP_MEMORY}"));
    }
    if let Some(odd) = memory.iter().find(|n| **n == 0 || !n.is_multiple_of(THREADGROUP_MEMORY_ALIGNMENT)) {
        return Err(format!(
            "{odd} bytes of threadgroup memory, expected a multiple of {THREADGROUP_MEMORY_ALIGNMENT}"
        ));
    }
    let expected = (signature.buffers(), signature.threadgroup_memory());
    if (buffers, memory.len()) != expected {
        return Err(format!(
            "{buffers} buffers and {} lengths of threadgroup memory, its signature has {} and {}",
            memory.len(),
            expected.0,
            expected.1
        ));
    }
    Ok(())
}
