//! The CUDA driver: one context and one stream, memory, launches, graphs. The library is loaded at run time.

mod event;
mod occupancy;

use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUdeviceptr, CUresult};

pub use self::event::Event;
pub use crate::args::{Args, Traffic};

/// A call into the driver failed.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum DriverError {
    /// There is no driver on this machine.
    #[error("no CUDA driver on this machine (libcuda can't be loaded): use another device")]
    NoDriver,
    /// The device is not there.
    #[error("there is no CUDA device {index}; {count} found")]
    NoDevice {
        /// Asked for.
        index: usize,
        /// Devices of this machine.
        count: usize,
    },
    /// The device is too old.
    #[error("{name} has compute capability {major}.{minor}; Lily's kernels need 8.0 or newer")]
    TooOld {
        /// Of the device.
        name: String,
        /// Of its compute capability.
        major: i32,
        /// Of its compute capability.
        minor: i32,
    },
    /// Memory ran out.
    #[error(
        "out of device memory: {needed} bytes for {what}, {free} are free; --ctx-size, --max-sequences and --cache-ram make state smaller, --device cpu needs none of it"
    )]
    OutOfMemory {
        /// Asked for.
        needed: usize,
        /// What it is for.
        what: String,
        /// Free at the time.
        free: usize,
    },
    /// A stand-in can't compute.
    #[error("there is no device behind this context: it only stands in for one")]
    StandIn,
    /// Anything else, with the driver's name for it.
    #[error("{call} failed: {name}")]
    Call {
        /// What was called.
        call: &'static str,
        /// The driver's name of the error.
        name: String,
    },
}

fn check(call: &'static str, result: CUresult) -> Result<(), DriverError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = ptr::null();
    // SAFETY: the driver is loaded, since a call returned; it hands out a static string or leaves null.
    let name = unsafe {
        sys::cuGetErrorName(result, &mut name);
        if name.is_null() { "unknown error".into() } else { CStr::from_ptr(name).to_string_lossy() }
    };
    Err(DriverError::Call { call, name: name.into_owned() })
}

/// Of an open device.
struct Handles {
    device: sys::CUdevice,
    stream: sys::CUstream,
}

/// A device with its primary context and the one stream that all work goes through; or its stand-in.
pub struct Context {
    /// `None` for a stand-in.
    handles: Option<Handles>,
    /// The next address that a stand-in gives out.
    next: AtomicU64,
    /// Marketing name.
    pub name: String,
    /// Compute capability: 90 is 9.0.
    pub capability: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Most bytes of shared memory that a block may ask for.
    pub shared_memory: u32,
}

// SAFETY: contexts and streams may be used from any thread that has made the context current, which every entry does.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Context {}

impl Context {
    /// Opens a device.
    pub fn open(index: usize) -> Result<Arc<Self>, DriverError> {
        // SAFETY: looks for the library only.
        if !unsafe { sys::is_culib_present() } {
            return Err(DriverError::NoDriver);
        }
        let (mut count, mut device) = (0, 0);
        // SAFETY: out-pointers are valid; the driver is there.
        unsafe {
            if sys::cuInit(0) != CUresult::CUDA_SUCCESS {
                return Err(DriverError::NoDevice { index, count: 0 });
            }
            check("cuDeviceGetCount", sys::cuDeviceGetCount(&mut count))?;
        }
        if index >= count as usize {
            return Err(DriverError::NoDevice { index, count: count as usize });
        }
        let mut name = [0; 256];
        // SAFETY: as above; `name` is as long as said.
        unsafe {
            check("cuDeviceGet", sys::cuDeviceGet(&mut device, index as i32))?;
            check("cuDeviceGetName", sys::cuDeviceGetName(name.as_mut_ptr(), 256, device))?;
        }
        // SAFETY: the driver has ended the string with a zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let attribute = |a| -> Result<i32, DriverError> {
            let mut value = 0;
            // SAFETY: the out-pointer and the device are valid.
            check("cuDeviceGetAttribute", unsafe { sys::cuDeviceGetAttribute(&mut value, a, device) })?;
            Ok(value)
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if major < 8 {
            return Err(DriverError::TooOld { name, major, minor });
        }
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: out-pointers are valid; the context is retained until `drop`.
        unsafe {
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&mut context, device))?;
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))?;
            check("cuStreamCreate", sys::cuStreamCreate(&mut stream, 1))?;
        }
        Ok(Arc::new(Self {
            handles: Some(Handles { device, stream }),
            next: AtomicU64::new(0),
            name,
            capability: (major * 10 + minor) as u32,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
            shared_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                as u32,
        }))
    }

    /// A stand-in for a device, on any machine: buffers have addresses but no memory, and what is enqueued is dropped.
    /// Whatever would bring a result back fails.
    fn stand_in(name: &str, capability: u32, multiprocessors: u32, shared_memory: u32) -> Arc<Self> {
        Arc::new(Self {
            handles: None,
            next: AtomicU64::new(1 << 40),
            name: name.to_owned(),
            capability,
            multiprocessors,
            shared_memory,
        })
    }

    /// A stand-in for an H200, the GPU that the kernels are tuned on.
    pub fn h200() -> Arc<Self> {
        Self::stand_in("NVIDIA H200", 90, 132, 227 << 10)
    }

    /// A stand-in for a card that has less shared memory than those of data centres.
    #[cfg(test)]
    pub(crate) fn rtx_4090() -> Arc<Self> {
        Self::stand_in("NVIDIA GeForce RTX 4090", 89, 128, 99 << 10)
    }

    /// A stand-in for this device.
    pub fn as_stand_in(&self) -> Arc<Self> {
        Self::stand_in(&self.name, self.capability, self.multiprocessors, self.shared_memory)
    }

    /// Name and compute capability.
    pub fn description(&self) -> String {
        format!("{}, compute capability {}.{}", self.name, self.capability / 10, self.capability % 10)
    }

    /// Whether there is no device behind it.
    pub fn is_stand_in(&self) -> bool {
        self.handles.is_none()
    }

    fn handles(&self) -> Result<&Handles, DriverError> {
        self.handles.as_ref().ok_or(DriverError::StandIn)
    }

    /// Makes the context current on the calling thread; a backend that moved between threads calls it first.
    pub fn enter(&self) -> Result<(), DriverError> {
        let device = self.handles()?.device;
        let mut context = ptr::null_mut();
        // SAFETY: retaining again and releasing at once yields the primary context, which `self` keeps alive.
        unsafe {
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&mut context, device))?;
            check("cuDevicePrimaryCtxRelease", sys::cuDevicePrimaryCtxRelease_v2(device))?;
            check("cuCtxSetCurrent", sys::cuCtxSetCurrent(context))
        }
    }

    /// Waits until everything that was enqueued is done.
    pub fn synchronize(&self) -> Result<(), DriverError> {
        let Some(Handles { stream, .. }) = self.handles else { return Ok(()) };
        // SAFETY: the stream lives as long as `self`.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(stream) })
    }

    /// Bytes free on the device, and in all.
    pub fn memory(&self) -> Result<(usize, usize), DriverError> {
        self.handles()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: out-pointers are valid.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }

    /// Memory for `bytes` bytes (at least one), not initialised.
    pub fn allocate(self: &Arc<Self>, bytes: usize, what: &str) -> Result<Buffer, DriverError> {
        let (mut address, bytes) = (0, bytes.max(16));
        if self.is_stand_in() {
            let address = self.next.fetch_add(bytes.next_multiple_of(256) as u64, Ordering::Relaxed);
            return Ok(Buffer { address, bytes, context: self.clone() });
        }
        // SAFETY: the out-pointer is valid.
        let result = unsafe { sys::cuMemAlloc_v2(&mut address, bytes) };
        if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let free = self.memory()?.0;
            return Err(DriverError::OutOfMemory { needed: bytes, what: what.to_owned(), free });
        }
        check("cuMemAlloc", result)?;
        Ok(Buffer { address, bytes, context: self.clone() })
    }

    /// Memory with bytes of the host in it.
    pub fn upload(self: &Arc<Self>, bytes: &[u8], what: &str) -> Result<Buffer, DriverError> {
        let buffer = self.allocate(bytes.len(), what)?;
        buffer.write(0, bytes)?;
        Ok(buffer)
    }

    /// Enqueues a launch. With `overlap` the kernel may begin before its predecessor has ended: it must wait itself.
    pub fn launch(&self, function: Function, shape: Shape, args: &mut Args) -> Result<(), DriverError> {
        let Some(Handles { stream, .. }) = self.handles else { return Ok(()) };
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let overlap = shape.overlap && self.capability >= 90;
        let config = shape.config(stream, &mut attribute, u32::from(overlap));
        let mut pointers = args.pointers();
        // SAFETY: `pointers` lead to one value per parameter of the kernel, as the callers in `forward` and `token`
        // write them in the kernel's order; the driver copies them during the call.
        let result =
            unsafe { sys::cuLaunchKernelEx(&config, function.0, pointers.as_mut_ptr(), ptr::null_mut()) };
        check("cuLaunchKernelEx", result)
    }

    /// Fills with a byte, in the order of the stream.
    pub fn fill(&self, at: u64, byte: u8, bytes: usize) -> Result<(), DriverError> {
        let Some(Handles { stream, .. }) = self.handles else { return Ok(()) };
        // SAFETY: callers pass ranges of their buffers.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(at, byte, bytes, stream) })
    }

    /// Copies within the device, in the order of the stream.
    pub fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), DriverError> {
        let Some(Handles { stream, .. }) = self.handles else { return Ok(()) };
        // SAFETY: callers pass ranges of their buffers.
        check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream) })
    }

    /// Copies from the host in the order of the stream; pinned memory must stay unchanged until then.
    pub fn send(&self, to: u64, from: &[u8]) -> Result<(), DriverError> {
        let Some(Handles { stream, .. }) = self.handles else { return Ok(()) };
        // SAFETY: callers pass ranges of their buffers; pageable memory is copied before the call returns.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), stream) };
        check("cuMemcpyHtoDAsync", result)
    }

    /// Copies to the host in the order of the stream; pageable memory is filled when the call returns.
    pub fn receive(&self, to: &mut [u8], from: u64) -> Result<(), DriverError> {
        let stream = self.handles()?.stream;
        // SAFETY: `to` is as long as said; callers pass ranges of their buffers.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), stream) };
        check("cuMemcpyDtoHAsync", result)
    }

    /// Records what `enqueue` enqueues as a graph instead of running it.
    pub fn capture(
        self: &Arc<Self>,
        enqueue: impl FnOnce() -> Result<(), DriverError>,
    ) -> Result<Graph, DriverError> {
        let stream = self.handles()?.stream;
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the stream is ours alone, so nobody else enqueues during the capture; the graph is destroyed after
        // its executable form is made.
        unsafe {
            let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
            check("cuStreamBeginCapture", sys::cuStreamBeginCapture_v2(stream, mode))?;
            let enqueued = enqueue();
            let ended = check("cuStreamEndCapture", sys::cuStreamEndCapture(stream, &mut graph));
            enqueued?;
            ended?;
            let result = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0);
            sys::cuGraphDestroy(graph);
            check("cuGraphInstantiate", result)?;
        }
        Ok(Graph { exec, context: self.clone() })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let Some(Handles { device, stream }) = self.handles else { return };
        // SAFETY: nothing of the context is in use any more: buffers, modules and graphs hold an `Arc` of it.
        unsafe {
            sys::cuStreamDestroy_v2(stream);
            sys::cuDevicePrimaryCtxRelease_v2(device);
        }
    }
}

/// Grid, block and options of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// May begin before its predecessor has ended.
    pub overlap: bool,
}

impl Shape {
    /// As the driver takes it, with the first `attributes` of those that `attrs` leads to.
    fn config(
        self,
        stream: sys::CUstream,
        attrs: *mut sys::CUlaunchAttribute,
        attributes: u32,
    ) -> sys::CUlaunchConfig {
        let [x, y, z] = self.grid;
        sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            hStream: stream,
            attrs,
            numAttrs: attributes,
        }
    }
}

/// Device memory.
pub struct Buffer {
    address: CUdeviceptr,
    bytes: usize,
    context: Arc<Context>,
}

impl Buffer {
    /// Address on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Writes at an offset and waits for it.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DriverError> {
        assert!(offset + bytes.len() <= self.bytes);
        self.context.send(self.address + offset as u64, bytes)?;
        self.context.synchronize()
    }

    /// Reads from an offset, behind everything enqueued.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), DriverError> {
        assert!(offset + out.len() <= self.bytes);
        self.context.receive(out, self.address + offset as u64)?;
        self.context.synchronize()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.context.is_stand_in() {
            return;
        }
        // SAFETY: allocated by `allocate`, freed once; freeing waits for work that uses it.
        unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Page-locked memory of the host, which the device copies from and to without waiting.
pub struct Pinned {
    data: *mut u8,
    bytes: usize,
    _context: Arc<Context>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Zeroed memory.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, DriverError> {
        context.handles()?;
        let mut data = ptr::null_mut();
        // SAFETY: the out-pointer is valid; the memory is as long as asked for.
        unsafe {
            check("cuMemHostAlloc", sys::cuMemHostAlloc(&mut data, bytes, 0))?;
            ptr::write_bytes(data.cast::<u8>(), 0, bytes);
        }
        Ok(Self { data: data.cast(), bytes, _context: context.clone() })
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: allocated and initialised with this length; copies by the device are waited for before reads.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }

    /// Its bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, freed once.
        unsafe { sys::cuMemFreeHost(self.data.cast::<c_void>()) };
    }
}

/// Loaded kernels.
pub struct Module {
    module: sys::CUmodule,
    _context: Arc<Context>,
}

// SAFETY: a handle that the driver lets any thread use.
unsafe impl Send for Module {}
// SAFETY: as above; the driver locks.
unsafe impl Sync for Module {}

/// A kernel of a module that lives as long as the backend.
#[derive(Clone, Copy)]
pub struct Function(sys::CUfunction);

impl Function {
    /// What a stand-in launches.
    pub const NONE: Self = Self(ptr::null_mut());

    /// Registers and bytes of local memory of a thread. Not for [`Self::NONE`].
    pub fn resources(self) -> Result<(u32, u32), DriverError> {
        let attribute = |which| -> Result<u32, DriverError> {
            let mut value = 0;
            // SAFETY: the out-pointer is valid, and the function's module is loaded.
            check("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&mut value, which, self.0) })?;
            Ok(value as u32)
        };
        use sys::CUfunction_attribute as Of;
        Ok((attribute(Of::CU_FUNC_ATTRIBUTE_NUM_REGS)?, attribute(Of::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?))
    }
}

// SAFETY: as for modules.
unsafe impl Send for Function {}

impl Module {
    /// Loads machine code.
    pub fn load(context: &Arc<Context>, cubin: &[u8]) -> Result<Self, DriverError> {
        context.handles()?;
        let mut module = ptr::null_mut();
        // SAFETY: `cubin` is a whole image: it comes from the compiler or from a file whose checksum was right.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&mut module, cubin.as_ptr().cast()) })?;
        Ok(Self { module, _context: context.clone() })
    }

    /// A kernel by name, allowed to use `shared` bytes of dynamic shared memory.
    pub fn function(&self, name: &str, shared: u32) -> Result<Function, DriverError> {
        let mut function = ptr::null_mut();
        let name = CString::new(name).unwrap_or_default();
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let carveout = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the module and the string are valid.
        unsafe {
            check(
                "cuModuleGetFunction",
                sys::cuModuleGetFunction(&mut function, self.module, name.as_ptr()),
            )?;
            if shared > 0 {
                check("cuFuncSetAttribute", sys::cuFuncSetAttribute(function, attribute, shared as i32))?;
            }
            // One split of L1 and shared memory for all: a kernel that needs another one must wait until a
            // multiprocessor is empty, and would not overlap with its predecessor.
            check("cuFuncSetAttribute", sys::cuFuncSetAttribute(function, carveout, 100))?;
            // Asking for anything loads the code now: it can't be loaded while a graph is recorded.
            let (mut registers, which) = (0, sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS);
            check("cuFuncGetAttribute", sys::cuFuncGetAttribute(&mut registers, which, function))?;
        }
        Ok(Function(function))
    }
}

impl Module {
    /// Numbers that the code defines under a name.
    pub fn numbers<const N: usize>(&self, name: &str) -> Result<[u32; N], DriverError> {
        let c_name = CString::new(name).unwrap_or_default();
        let (mut at, mut bytes, mut out) = (0, 0, [0u32; N]);
        // SAFETY: out-pointers are valid; as many bytes are copied as both sides have.
        unsafe {
            check(
                "cuModuleGetGlobal",
                sys::cuModuleGetGlobal_v2(&mut at, &mut bytes, self.module, c_name.as_ptr()),
            )?;
            check("cuMemcpyDtoH", sys::cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), at, bytes.min(4 * N)))?;
        }
        Ok(out)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded by `load`, unloaded once.
        unsafe { sys::cuModuleUnload(self.module) };
    }
}

/// A recorded step.
pub struct Graph {
    exec: sys::CUgraphExec,
    context: Arc<Context>,
}

// SAFETY: as for modules.
unsafe impl Send for Graph {}

impl Graph {
    /// Enqueues it.
    pub fn launch(&self) -> Result<(), DriverError> {
        // SAFETY: instantiated by `capture`.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, self.context.handles()?.stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated by `capture`, destroyed once.
        unsafe { sys::cuGraphExecDestroy(self.exec) };
    }
}
