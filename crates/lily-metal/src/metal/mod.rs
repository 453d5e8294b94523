//! [`Device`] with Metal itself, on macOS. It creates, binds, dispatches and waits, and decides nothing: everything that does is
//! tested on any platform.
//!
//! Buffers are untracked: Metal orders nothing by itself. Within a submission barriers stand where the caller says, and one
//! fence makes each encoder wait for the one before it.

mod encoder;
mod pipelines;

use std::collections::VecDeque;
use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr::NonNull;

use lily_model::files::Bytes;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSError, NSProcessInfo};
use objc2_metal::{
    MTLBuffer, MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandQueue, MTLCreateSystemDefaultDevice,
    MTLDevice, MTLFence, MTLGPUFamily, MTLResidencySet, MTLResidencySetDescriptor, MTLResourceOptions,
};

use crate::device::{BufferId, Device, DeviceError, Encoder, Info, KernelId, Pipeline, Place, Submission};
use crate::pace;
use crate::source::Language;
use encoder::MetalEncoder;
use pipelines::Kernel;

type Object<T> = Retained<ProtocolObject<T>>;

/// The GPU of a Mac.
pub struct MetalDevice {
    device: Object<dyn MTLDevice>,
    queue: Object<dyn MTLCommandQueue>,
    fence: Object<dyn MTLFence>,
    /// Whether anything has updated the fence.
    fenced: bool,
    info: Info,
    kernels: Vec<Kernel>,
    buffers: Vec<Buffer>,
    residency: Option<Object<dyn MTLResidencySet>>,
    /// Handed over and not retired.
    submitted: VecDeque<(Submission, Object<dyn MTLCommandBuffer>)>,
    submissions: u64,
    /// Folder for compiled kernels.
    cache: Option<PathBuf>,
}

struct Buffer {
    metal: Object<dyn MTLBuffer>,
    /// Held for as long as the GPU may read it.
    _mapping: Option<Bytes>,
}

// SAFETY: Apple documents devices, queues, buffers, pipelines, fences and residency sets as usable from any thread, and command
// buffers from one at a time; this value, which has no clone, is used by one thread at a time.
unsafe impl Send for MetalDevice {}

/// An error in the system's words.
fn words(error: &NSError) -> String {
    error.localizedDescription().to_string()
}

fn missing(what: &str) -> DeviceError {
    DeviceError::Missing { what: what.to_owned(), why: String::new() }
}

impl MetalDevice {
    /// Opens the system's GPU. `cache`: a folder for compiled kernels; `None`: compile them at every load.
    pub fn open(cache: Option<PathBuf>) -> Result<Self, DeviceError> {
        autoreleasepool(|_| {
            let device = MTLCreateSystemDefaultDevice().ok_or(DeviceError::None)?;
            if !objc2::available!(macos = 14.0) {
                return Err(missing("language version 3.1 here, which needs macOS 14"));
            }
            if !device.supportsFamily(MTLGPUFamily::Apple7) {
                let what = format!("family Apple7 on {}: M1 or later is needed", device.name());
                return Err(DeviceError::Missing { what, why: String::new() });
            }
            let queue = device.newCommandQueueWithMaxCommandBufferCount(pace::MOST_BUFFERS);
            let queue = queue.ok_or_else(|| missing("command queue"))?;
            let fence = device.newFence().ok_or_else(|| missing("fence"))?;
            let info = info(&device);
            Ok(Self {
                device,
                queue,
                fence,
                fenced: false,
                info,
                kernels: Vec::new(),
                buffers: Vec::new(),
                residency: None,
                submitted: VecDeque::new(),
                submissions: 0,
                cache,
            })
        })
    }

    fn add(&mut self, metal: Object<dyn MTLBuffer>, mapping: Option<Bytes>) -> BufferId {
        self.buffers.push(Buffer { metal, _mapping: mapping });
        BufferId(self.buffers.len() as u32 - 1)
    }

    /// Where a place is in the host's memory, if `bytes` bytes of it are inside of its buffer.
    fn address(&self, at: Place, bytes: usize) -> *mut u8 {
        let buffer = &self.buffers[at.buffer.0 as usize].metal;
        let inside = at.offset.checked_add(bytes).is_some_and(|end| end <= buffer.length());
        assert!(inside, "{bytes} bytes at {at:?} are outside of a buffer of {}", buffer.length());
        buffer.contents().as_ptr().cast::<u8>().wrapping_add(at.offset)
    }
}

/// What the system says of a GPU.
fn info(device: &ProtocolObject<dyn MTLDevice>) -> Info {
    let families = [
        ("Apple7", MTLGPUFamily::Apple7),
        ("Apple8", MTLGPUFamily::Apple8),
        ("Apple9", MTLGPUFamily::Apple9),
        ("Apple10", MTLGPUFamily::Apple10),
        ("Metal3", MTLGPUFamily::Metal3),
        ("Metal4", MTLGPUFamily::Metal4),
    ];
    let supported: Vec<&str> = families
        .into_iter()
        .filter(|(_, family)| device.supportsFamily(*family))
        .map(|(name, _)| name)
        .collect();
    let system = NSProcessInfo::processInfo().operatingSystemVersionString().to_string();
    Info {
        name: device.name().to_string(),
        memory: device.recommendedMaxWorkingSetSize(),
        max_buffer: device.maxBufferLength(),
        // SAFETY: it reads a setting of the system.
        page: usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(16 * 1024),
        // Family 10 is the M5's, the first with such units.
        tensor: objc2::available!(macos = 26.0)
            && [MTLGPUFamily::Apple10, MTLGPUFamily::Metal4].into_iter().all(|f| device.supportsFamily(f)),
        details: vec![
            ("system", system),
            ("families", supported.join(" ")),
            ("unified memory", device.hasUnifiedMemory().to_string()),
            ("threadgroup memory", device.maxThreadgroupMemoryLength().to_string()),
        ],
    }
}

/// Shared with the host, and ordered by nobody but us.
const OPTIONS: MTLResourceOptions =
    MTLResourceOptions::StorageModeShared.union(MTLResourceOptions::HazardTrackingModeUntracked);

impl Device for MetalDevice {
    fn info(&self) -> &Info {
        &self.info
    }

    fn compile(
        &mut self,
        source: &str,
        language: Language,
        kernels: &[&'static str],
    ) -> Result<(), DeviceError> {
        let (device, info, cache) = (&self.device, &self.info, self.cache.as_deref());
        self.kernels =
            autoreleasepool(|_| pipelines::compile(device, info, cache, source, language, kernels))?;
        Ok(())
    }

    fn kernel(&self, name: &str) -> Option<(KernelId, Pipeline)> {
        let index = self.kernels.iter().position(|kernel| kernel.name == name)?;
        Some((KernelId(index as u32), self.kernels[index].pipeline()))
    }

    fn allocate(&mut self, bytes: usize, what: &'static str) -> Result<BufferId, DeviceError> {
        let buffer = self.device.newBufferWithLength_options(bytes.max(16), OPTIONS);
        let buffer = buffer.ok_or(DeviceError::Memory { bytes, what })?;
        Ok(self.add(buffer, None))
    }

    fn map(&mut self, mapping: &Bytes) -> Result<BufferId, DeviceError> {
        let bytes = mapping.len().next_multiple_of(self.info.page);
        let refused = DeviceError::Memory { bytes, what: "a mapped file" };
        let Some(address) = NonNull::new(mapping.as_ptr().cast_mut().cast::<c_void>()) else {
            return Err(refused);
        };
        // SAFETY: a mapping begins at a page and its last page can be read to its end; it lives as long as the buffer, which
        // holds it; kernels only read it.
        let buffer = unsafe {
            self.device.newBufferWithBytesNoCopy_length_options_deallocator(address, bytes, OPTIONS, None)
        };
        Ok(self.add(buffer.ok_or(refused)?, Some(mapping.clone())))
    }

    fn keep_resident(&mut self, buffers: &[BufferId]) -> Result<(), DeviceError> {
        if !objc2::available!(macos = 15.0) {
            tracing::debug!("residency sets need macOS 15: weights may be paged out between requests");
            return Ok(());
        }
        let set = autoreleasepool(|_| {
            let descriptor = MTLResidencySetDescriptor::new();
            let set = self.device.newResidencySetWithDescriptor_error(&descriptor);
            set.map_err(|e| DeviceError::Missing { what: "residency set".to_owned(), why: words(&e) })
        })?;
        for id in buffers {
            set.addAllocation(ProtocolObject::from_ref(&*self.buffers[id.0 as usize].metal));
        }
        set.commit();
        set.requestResidency();
        self.queue.addResidencySet(&set);
        self.residency = Some(set);
        Ok(())
    }

    fn read(&self, at: Place, out: &mut [u8]) {
        let from = self.address(at, out.len());
        // SAFETY: inside of the buffer, as was checked; no work that is not waited for writes there, as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
    }

    fn write(&mut self, at: Place, bytes: &[u8]) {
        let to = self.address(at, bytes.len());
        // SAFETY: inside of the buffer, as was checked; no work that is not waited for touches it, as the caller promises.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    fn submit(&mut self, encode: &mut dyn FnMut(&mut dyn Encoder)) -> Result<Submission, DeviceError> {
        let commands = autoreleasepool(|_| {
            // All that it refers to lives until the work is done: see `drop`.
            let commands = self.queue.commandBufferWithUnretainedReferences();
            let commands = commands.ok_or_else(|| missing("command buffer"))?;
            let fence = self.fenced.then_some(&*self.fence);
            let mut encoder =
                MetalEncoder::new(&commands, &self.kernels, &self.buffers, &self.fence, fence.is_some());
            encode(&mut encoder);
            encoder.finish()?;
            commands.commit();
            Ok(commands)
        })?;
        self.fenced = true;
        self.submissions += 1;
        let submission = Submission(self.submissions);
        self.submitted.push_back((submission, commands));
        Ok(submission)
    }

    fn wait(&self, submission: Submission) -> Result<(), DeviceError> {
        let Some((_, commands)) = self.submitted.iter().find(|(id, _)| *id == submission) else {
            return Ok(());
        };
        autoreleasepool(|_| {
            commands.waitUntilCompleted();
            if commands.status() == MTLCommandBufferStatus::Completed {
                return Ok(());
            }
            let why = commands.error().map_or_else(|| "it does not say why".to_owned(), |e| words(&e));
            Err(DeviceError::Command(why))
        })
    }

    fn retire(&mut self, submission: Submission) {
        self.submitted.retain(|(id, _)| *id > submission);
    }
}

impl Drop for MetalDevice {
    /// Command buffers don't hold what they use.
    fn drop(&mut self) {
        if let Some((_, commands)) = self.submitted.back() {
            commands.waitUntilCompleted();
        }
        if let Some(set) = &self.residency {
            self.queue.removeResidencySet(set);
            set.endResidency();
        }
    }
}
