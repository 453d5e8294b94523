//! A [`Device`] that runs kernels where tests do. Work is done when it is waited for, and not before, so that whoever reads or
//! writes too early shows; what no barrier parts runs in reverse.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Mutex;

use lily_metal::device::{
    Argument, BufferId, Device, DeviceError, Dispatch, Encoder, Info, KernelId, Pipeline, Place, Submission,
};
use lily_metal::source::Language;
use lily_model::files::Bytes;

use super::signature::signatures;
use super::text::has_tensors;
use super::{Bound, Guard, Kernels, Memory, Order, Shape, gpu};

/// Makes another text of one.
pub type Spoil = fn(String) -> Result<String, DeviceError>;

pub struct ShimDevice {
    info: Info,
    kernels: Option<&'static Kernels>,
    inner: Mutex<Inner>,
    /// How many there were.
    pub submissions: u64,
    pub order: Order,
    /// Buffers that were asked to be kept resident.
    pub resident: usize,
    /// How many submissions go well before one fails, of which only that is known.
    pub failing: Option<u64>,
    /// How many it takes before it refuses one.
    pub accepting: Option<u64>,
    /// Threads of a threadgroup that it allows any kernel.
    pub most_threads: usize,
    /// Most submissions that were ever on the way at once.
    pub most_waiting: usize,
    /// What it makes of a text with tensor operations before it compiles it.
    pub spoil: Spoil,
}

struct Inner {
    buffers: Vec<Memory>,
    /// Those that are copies of mapped files, which nothing may write.
    mapped: HashSet<BufferId>,
    queue: VecDeque<(Submission, Vec<Work>)>,
    done: HashMap<u64, Result<(), DeviceError>>,
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

impl Inner {
    fn bytes(&self, at: Place, bytes: usize) -> &[u8] {
        &self.buffers[at.buffer.0 as usize].bytes()[at.offset..][..bytes]
    }

    fn bytes_mut(&mut self, at: Place, bytes: usize) -> &mut [u8] {
        assert!(!self.mapped.contains(&at.buffer), "a mapped file is written");
        &mut self.buffers[at.buffer.0 as usize].bytes_mut()[at.offset..][..bytes]
    }

    fn add(&mut self, memory: Memory) -> BufferId {
        self.buffers.push(memory);
        BufferId(self.buffers.len() as u32 - 1)
    }
}

impl ShimDevice {
    pub fn new(memory: u64) -> Self {
        let (name, compiler) = match gpu::wanted() {
            true => (gpu::context().name.clone(), "NVRTC".to_owned()),
            false => {
                ("emulated on the CPU".to_owned(), std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned()))
            }
        };
        let details = vec![("compiler", compiler)];
        let info = Info { name, memory, max_buffer: memory as usize, page: 4096, tensor: false, details };
        let (buffers, mapped) = (Vec::new(), HashSet::new());
        let inner = Inner { buffers, mapped, queue: VecDeque::new(), done: HashMap::new() };
        Self {
            info,
            kernels: None,
            inner: Mutex::new(inner),
            submissions: 0,
            order: Order::Forward,
            resident: 0,
            failing: None,
            accepting: None,
            most_threads: 1024,
            most_waiting: 0,
            spoil: Ok,
        }
    }

    /// The same, with units for tensor operations.
    pub fn with_tensors(memory: u64) -> Self {
        let mut device = Self::new(memory);
        device.info.tensor = true;
        device
    }

    /// Submissions on the way.
    pub fn waiting(&self) -> usize {
        self.inner.lock().unwrap().queue.len()
    }

    /// Bytes of mapped files.
    pub fn mapped_bytes(&self) -> usize {
        let inner = self.inner.lock().unwrap();
        inner.mapped.iter().map(|buffer| inner.buffers[buffer.0 as usize].bytes).sum()
    }

    fn kernels(&self) -> &'static Kernels {
        self.kernels.expect("nothing was compiled")
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
                    let copied = inner.bytes(from, bytes).to_vec();
                    inner.bytes_mut(to, bytes).copy_from_slice(&copied);
                }
                Work::Zero(at, bytes) => inner.bytes_mut(at, bytes).fill(0),
                Work::Fail => return Err(DeviceError::Command("it fails on purpose".to_owned())),
            }
        }
        self.run_together(inner, &mut together)
    }

    fn run_together(&self, inner: &mut Inner, together: &mut Vec<Work>) -> Result<(), DeviceError> {
        for work in together.drain(..).rev() {
            let Work::Kernel { kernel, grid, threads, memory, arguments, .. } = work else { continue };
            let kernels = self.kernels();
            let kernel = &kernels.signatures[kernel].name;
            let shape = Shape { kernel, grid, threads, memory: &memory };
            let buffers = inner.buffers.len();
            let bind = |argument: &Argument| match argument {
                Argument::Place(place) => (place.buffer.0 as usize, place.offset),
                // Memory of their own, for this launch.
                Argument::Words(words, count) => {
                    let memory = kernels.allocate(4 * count, Guard::End);
                    inner.buffers.push(memory.with(words[..*count].iter().copied()));
                    (inner.buffers.len() - 1, 0)
                }
            };
            let bound: Vec<Bound> = arguments.iter().map(bind).collect();
            let outcome = kernels.launch(shape, &mut inner.buffers, &bound, self.order);
            inner.buffers.truncate(buffers);
            outcome.map_err(DeviceError::Command)?;
        }
        Ok(())
    }
}

/// Counts down to 0, and no further: whether that was it.
fn counted_down(left: &mut Option<u64>) -> bool {
    let now = *left;
    *left = now.and_then(|n| n.checked_sub(1));
    now == Some(0)
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

    fn compile(
        &mut self,
        source: &str,
        language: Language,
        kernels: &[&'static str],
    ) -> Result<(), DeviceError> {
        let mut source = source.to_owned();
        match (has_tensors(&source), language) {
            (true, Language::V4_0) => source = (self.spoil)(source)?,
            (false, Language::V3_1) => {}
            _ => return Err(DeviceError::Compile(format!("a text of another version than {language:?}"))),
        }
        let source = &source;
        let signatures = signatures(source).map_err(DeviceError::Compile)?;
        if let Some(name) = kernels.iter().find(|name| signatures.iter().all(|s| s.name != **name)) {
            return Err(DeviceError::Missing { what: format!("kernel {name}"), why: String::new() });
        }
        self.kernels = Some(Kernels::compile(source));
        Ok(())
    }

    fn kernel(&self, name: &str) -> Option<(KernelId, Pipeline)> {
        let signatures = &self.kernels?.signatures;
        let index = signatures.iter().position(|s| s.name == name)?;
        let pipeline = Pipeline { max_threads: signatures[index].threads.min(self.most_threads), lanes: 32 };
        Some((KernelId(index as u32), pipeline))
    }

    fn allocate(&mut self, bytes: usize, what: &'static str) -> Result<BufferId, DeviceError> {
        if bytes > self.info.max_buffer {
            return Err(DeviceError::Memory { bytes, what });
        }
        let memory = self.kernels().allocate(bytes, Guard::End);
        Ok(self.inner.get_mut().unwrap().add(memory))
    }

    fn map(&mut self, mapping: &Bytes) -> Result<BufferId, DeviceError> {
        let mut memory = self.kernels().allocate(mapping.len(), Guard::End);
        memory.bytes_mut().copy_from_slice(mapping);
        let inner = self.inner.get_mut().unwrap();
        let buffer = inner.add(memory);
        inner.mapped.insert(buffer);
        Ok(buffer)
    }

    fn keep_resident(&mut self, buffers: &[BufferId]) -> Result<(), DeviceError> {
        self.resident += buffers.len();
        Ok(())
    }

    fn read(&self, at: Place, out: &mut [u8]) {
        out.copy_from_slice(self.inner.lock().unwrap().bytes(at, out.len()));
    }

    fn write(&mut self, at: Place, bytes: &[u8]) {
        self.inner.get_mut().unwrap().bytes_mut(at, bytes.len()).copy_from_slice(bytes);
    }

    fn submit(&mut self, encode: &mut dyn FnMut(&mut dyn Encoder)) -> Result<Submission, DeviceError> {
        if counted_down(&mut self.accepting) {
            return Err(DeviceError::Missing { what: "command buffer".to_owned(), why: String::new() });
        }
        let mut recorder = Recorder(Vec::new());
        encode(&mut recorder);
        if counted_down(&mut self.failing) {
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
