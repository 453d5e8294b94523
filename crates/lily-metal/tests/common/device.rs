//! A [`Device`] that runs kernels on the CPU. Work is done when it is waited for, and not before, so that whoever reads or writes
//! too early shows; what no barrier parts runs in reverse.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;

use lily_metal::device::{
    Argument, BufferId, Device, DeviceError, Dispatch, Encoder, Info, KernelId, Pipeline, Place, Submission,
};
use lily_model::files::Bytes;

use super::cpu::{Cpu, Guarded};
use super::signature::{Signature, signatures};
use super::{Guard, Order, check_launch};

pub struct ShimDevice {
    info: Info,
    /// Never unloaded: threads keep memory that belongs to them.
    kernels: Option<&'static (Cpu, Vec<Signature>)>,
    inner: Mutex<Inner>,
    /// How many there were.
    pub submissions: u64,
    pub order: Order,
    /// Buffers that were asked to be kept resident.
    pub resident: usize,
    /// Submissions from now on that fail, of which only that is known.
    pub failing: u64,
    /// Threads of a threadgroup that it allows any kernel.
    pub most_threads: usize,
    /// Most submissions that were ever on the way at once.
    pub most_waiting: usize,
}

struct Inner {
    buffers: Vec<Buffer>,
    queue: VecDeque<(Submission, Vec<Work>)>,
    done: HashMap<u64, Result<(), DeviceError>>,
}

struct Buffer {
    memory: Guarded,
    /// A copy of a mapped file, which nothing may write.
    is_mapped: bool,
}

enum Work {
    Kernel {
        kernel: usize,
        grid: [usize; 3],
        threads: usize,
        memory: Vec<usize>,
        arguments: Vec<Argument>,
        barrier: bool,
    },
    Copy(Place, Place, usize),
    Zero(Place, usize),
    Fail,
}

impl Buffer {
    fn own(&mut self) -> &mut [u8] {
        assert!(!self.is_mapped, "a mapped file is written");
        self.memory.bytes_mut()
    }
}

impl ShimDevice {
    pub fn new(memory: u64) -> Self {
        let info = Info {
            name: "emulated on the CPU".to_owned(),
            memory,
            max_buffer: memory as usize,
            page: 4096,
            details: vec![("compiler", std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned()))],
        };
        let inner = Inner { buffers: Vec::new(), queue: VecDeque::new(), done: HashMap::new() };
        Self {
            info,
            kernels: None,
            inner: Mutex::new(inner),
            submissions: 0,
            order: Order::Forward,
            resident: 0,
            failing: 0,
            most_threads: 1024,
            most_waiting: 0,
        }
    }

    /// Bytes of mapped files.
    pub fn mapped_bytes(&self) -> usize {
        let inner = self.inner.lock().unwrap();
        inner.buffers.iter().filter(|b| b.is_mapped).map(|b| b.memory.bytes().len()).sum()
    }

    fn kernels(&self) -> &'static (Cpu, Vec<Signature>) {
        self.kernels.expect("nothing was compiled")
    }

    fn add(&mut self, memory: Guarded, is_mapped: bool) -> BufferId {
        let buffers = &mut self.inner.get_mut().unwrap().buffers;
        buffers.push(Buffer { memory, is_mapped });
        BufferId(buffers.len() as u32 - 1)
    }

    fn run(&self, inner: &mut Inner, work: Vec<Work>) -> Result<(), DeviceError> {
        let mut together = Vec::new();
        for work in work {
            if !matches!(work, Work::Kernel { barrier: false, .. }) {
                self.run_together(inner, &mut together)?;
            }
            match work {
                Work::Kernel { .. } => together.push(work),
                Work::Copy(from, to, bytes) => {
                    let copied =
                        inner.buffers[from.buffer.0 as usize].memory.bytes()[from.offset..][..bytes].to_vec();
                    inner.buffers[to.buffer.0 as usize].own()[to.offset..][..bytes].copy_from_slice(&copied);
                }
                Work::Zero(at, bytes) => {
                    inner.buffers[at.buffer.0 as usize].own()[at.offset..][..bytes].fill(0);
                }
                Work::Fail => return Err(DeviceError::Command("it fails on purpose".to_owned())),
            }
        }
        self.run_together(inner, &mut together)
    }

    fn run_together(&self, inner: &mut Inner, together: &mut Vec<Work>) -> Result<(), DeviceError> {
        for work in together.drain(..).rev() {
            let Work::Kernel { kernel, grid, threads, memory, arguments, .. } = work else { continue };
            let (cpu, signatures) = self.kernels();
            let words: Vec<Option<Guarded>> = arguments.iter().map(|a| self.words(a)).collect();
            let bound = |(argument, words): (&Argument, &'_ Option<Guarded>)| match (argument, words) {
                (Argument::Place(place), _) => {
                    (&raw const inner.buffers[place.buffer.0 as usize].memory, place.offset)
                }
                (_, Some(words)) => (&raw const *words, 0),
                (_, None) => unreachable!("words without memory"),
            };
            let bound: Vec<_> = arguments.iter().zip(&words).map(bound).collect();
            // SAFETY: buffers and words live until the launch has ended, and nothing else uses them.
            let bound: Vec<(&Guarded, usize)> =
                bound.into_iter().map(|(at, n)| (unsafe { &*at }, n)).collect();
            let signature = &signatures[kernel];
            check_launch(signature, grid, threads, &memory, bound.len())
                .and_then(|()| cpu.launch(&signature.name, grid, threads, &memory, &bound, self.order))
                .map_err(DeviceError::Command)?;
        }
        Ok(())
    }

    /// Memory for words that come along with a launch.
    fn words(&self, argument: &Argument) -> Option<Guarded> {
        let Argument::Words(words, count) = argument else { return None };
        let mut memory = self.kernels().0.allocate(4 * count, Guard::End);
        let bytes: Vec<u8> = words[..*count].iter().flat_map(|w| w.to_le_bytes()).collect();
        memory.bytes_mut().copy_from_slice(&bytes);
        Some(memory)
    }
}

struct Recorder(Vec<Work>);

impl Encoder for Recorder {
    fn dispatch(&mut self, d: &Dispatch<'_>) {
        self.0.push(Work::Kernel {
            kernel: d.kernel.0 as usize,
            grid: d.grid,
            threads: d.threads,
            memory: d.threadgroup_memory.to_vec(),
            arguments: d.arguments.to_vec(),
            barrier: d.barrier,
        });
    }

    fn copy(&mut self, from: Place, to: Place, bytes: usize) {
        self.0.push(Work::Copy(from, to, bytes));
    }

    fn zero(&mut self, at: Place, bytes: usize) {
        self.0.push(Work::Zero(at, bytes));
    }
}

impl Device for ShimDevice {
    fn info(&self) -> &Info {
        &self.info
    }

    fn compile(&mut self, source: &str, kernels: &[&'static str]) -> Result<(), DeviceError> {
        let signatures = signatures(source).map_err(DeviceError::Compile)?;
        if let Some(name) = kernels.iter().find(|name| signatures.iter().all(|s| s.name != **name)) {
            return Err(DeviceError::Missing { what: format!("kernel {name}"), why: String::new() });
        }
        self.kernels = Some(Box::leak(Box::new((Cpu::compile(source, &signatures), signatures))));
        Ok(())
    }

    fn kernel(&self, name: &str) -> Option<(KernelId, Pipeline)> {
        let (_, signatures) = self.kernels?;
        let index = signatures.iter().position(|s| s.name == name)?;
        let pipeline = Pipeline { max_threads: signatures[index].threads.min(self.most_threads), lanes: 32 };
        Some((KernelId(index as u32), pipeline))
    }

    fn allocate(&mut self, bytes: usize, what: &'static str) -> Result<BufferId, DeviceError> {
        if bytes > self.info.max_buffer {
            return Err(DeviceError::Memory { bytes, what });
        }
        let mut memory = self.kernels().0.allocate(bytes, Guard::End);
        // NaN, so that what is read before it is written shows.
        memory.bytes_mut().fill(0xff);
        Ok(self.add(memory, false))
    }

    fn map(&mut self, mapping: &Bytes) -> Result<BufferId, DeviceError> {
        let mut memory = self.kernels().0.allocate(mapping.len(), Guard::End);
        memory.bytes_mut().copy_from_slice(mapping);
        Ok(self.add(memory, true))
    }

    fn keep_resident(&mut self, buffers: &[BufferId]) -> Result<(), DeviceError> {
        self.resident += buffers.len();
        Ok(())
    }

    fn read(&self, at: Place, out: &mut [u8]) {
        let inner = self.inner.lock().unwrap();
        out.copy_from_slice(&inner.buffers[at.buffer.0 as usize].memory.bytes()[at.offset..][..out.len()]);
    }

    fn write(&mut self, at: Place, bytes: &[u8]) {
        let inner = self.inner.get_mut().unwrap();
        inner.buffers[at.buffer.0 as usize].own()[at.offset..][..bytes.len()].copy_from_slice(bytes);
    }

    fn submit(&mut self, encode: &mut dyn FnMut(&mut dyn Encoder)) -> Result<Submission, DeviceError> {
        let mut recorder = Recorder(Vec::new());
        encode(&mut recorder);
        if self.failing > 0 {
            self.failing -= 1;
            recorder.0 = vec![Work::Fail];
        }
        self.submissions += 1;
        let submission = Submission(self.submissions);
        let queue = &mut self.inner.get_mut().unwrap().queue;
        queue.push_back((submission, recorder.0));
        self.most_waiting = self.most_waiting.max(queue.len());
        Ok(submission)
    }

    fn wait(&self, submission: Submission) -> Result<(), DeviceError> {
        let mut inner = self.inner.lock().unwrap();
        while inner.queue.front().is_some_and(|(next, _)| *next <= submission) {
            let Some((next, work)) = inner.queue.pop_front() else { break };
            let outcome = self.run(&mut inner, work);
            inner.done.insert(next.0, outcome);
        }
        inner.done.get(&submission.0).cloned().unwrap_or(Ok(()))
    }

    fn retire(&mut self, submission: Submission) {
        self.inner.get_mut().unwrap().done.retain(|id, _| *id > submission.0);
    }
}
