//! A [`Device`] that runs kernels on the CPU. Work is done when it is waited for, and not before, so that whoever reads or writes
//! too early shows; what no barrier parts runs in reverse.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::Mutex;

use lily_metal::device::{
    BufferId, Device, DeviceError, Dispatch, Encoder, Info, KernelId, Pipeline, Place, Submission,
};
use lily_model::files::Bytes;

use super::{Guard, Kernels, Memory, Order};

pub struct ShimDevice {
    info: Info,
    kernels: Option<&'static Kernels>,
    inner: Mutex<Inner>,
    submissions: u64,
    pub order: Order,
    /// Buffers that were asked to be kept resident.
    pub resident: usize,
    /// Submissions from now on that fail, of which only that is known.
    pub failing: u64,
    /// Most submissions that were ever on the way at once.
    pub most_waiting: usize,
}

struct Inner {
    buffers: Vec<Buffer>,
    queue: VecDeque<(Submission, Vec<Work>)>,
    done: HashMap<u64, Result<(), DeviceError>>,
}

enum Buffer {
    Own(Memory),
    Mapped(Bytes),
}

enum Work {
    Kernel {
        kernel: usize,
        grid: [usize; 3],
        threads: usize,
        memory: Vec<usize>,
        places: Vec<Place>,
        barrier: bool,
    },
    Copy(Place, Place, usize),
    Zero(Place, usize),
    Fail,
}

impl Buffer {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Own(memory) => memory.bytes(),
            Self::Mapped(bytes) => bytes,
        }
    }

    /// Where kernels find it. Files are mapped read-only: a kernel that writes there is caught.
    fn address(&self) -> *mut c_void {
        self.bytes().as_ptr().cast_mut().cast()
    }

    fn own(&mut self) -> &mut [u8] {
        match self {
            Self::Own(memory) => memory.bytes_mut(),
            Self::Mapped(_) => panic!("a mapped file is written"),
        }
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
            most_waiting: 0,
        }
    }

    /// Bytes of mapped files.
    pub fn mapped_bytes(&self) -> usize {
        let inner = self.inner.lock().unwrap();
        let mapped = inner.buffers.iter().filter(|b| matches!(b, Buffer::Mapped(_)));
        mapped.map(|b| b.bytes().len()).sum()
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
                    let copied =
                        inner.buffers[from.buffer.0 as usize].bytes()[from.offset..][..bytes].to_vec();
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
            let Work::Kernel { kernel, grid, threads, memory, places, .. } = work else { continue };
            let kernels = self.kernels();
            let address = |p: &Place| {
                let buffer = &inner.buffers[p.buffer.0 as usize];
                assert!(p.offset < buffer.bytes().len().max(1), "{p:?} is behind the end of its buffer");
                buffer.address().wrapping_byte_add(p.offset)
            };
            let addresses: Vec<*mut c_void> = places.iter().map(address).collect();
            let name = &kernels.signatures[kernel].name;
            kernels
                .launch_at(name, grid, threads, &memory, &addresses, self.order)
                .map_err(DeviceError::Command)?;
        }
        Ok(())
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
            places: d.places.to_vec(),
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
        let compiled = Kernels::compile(source);
        let missing = kernels.iter().find(|name| compiled.signatures.iter().all(|s| s.name != **name));
        if let Some(name) = missing {
            return Err(DeviceError::Missing { what: format!("kernel {name}"), why: String::new() });
        }
        self.kernels = Some(compiled);
        Ok(())
    }

    fn kernel(&self, name: &str) -> Option<(KernelId, Pipeline)> {
        let signatures = &self.kernels?.signatures;
        let index = signatures.iter().position(|s| s.name == name)?;
        let pipeline = Pipeline { max_threads: signatures[index].threads, lanes: 32 };
        Some((KernelId(index as u32), pipeline))
    }

    fn allocate(&mut self, bytes: usize, what: &'static str) -> Result<BufferId, DeviceError> {
        if bytes > self.info.max_buffer {
            return Err(DeviceError::Memory { bytes, what });
        }
        // It is NaN, so that what is read before it is written shows.
        let memory = self.kernels().allocate(bytes, Guard::End);
        let buffers = &mut self.inner.get_mut().unwrap().buffers;
        buffers.push(Buffer::Own(memory));
        Ok(BufferId(buffers.len() as u32 - 1))
    }

    fn map(&mut self, mapping: &Bytes) -> Result<BufferId, DeviceError> {
        let buffers = &mut self.inner.get_mut().unwrap().buffers;
        buffers.push(Buffer::Mapped(mapping.clone()));
        Ok(BufferId(buffers.len() as u32 - 1))
    }

    fn keep_resident(&mut self, buffers: &[BufferId]) -> Result<(), DeviceError> {
        self.resident += buffers.len();
        Ok(())
    }

    fn read(&self, at: Place, out: &mut [u8]) {
        let inner = self.inner.lock().unwrap();
        out.copy_from_slice(&inner.buffers[at.buffer.0 as usize].bytes()[at.offset..][..out.len()]);
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
