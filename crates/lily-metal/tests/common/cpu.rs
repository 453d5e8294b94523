//! Runs kernels on the CPU: see `shim/runtime.cpp`.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use libloading::Library;
use libloading::os::unix;

use super::signature::Signature;
use super::text::{HEADERS, Way, standard, whole};
use super::{Bound, Guard, Memory, Order, Shape};

#[repr(C)]
struct Request {
    kernel: *const c_char,
    buffers: *const *mut c_void,
    memory: *const u32,
    memory_count: u32,
    grid: [u32; 3],
    threads: u32,
    order: u32,
}

type Allocate = unsafe extern "C" fn(usize, bool) -> *mut c_void;
type Release = unsafe extern "C" fn(*mut c_void, usize);
type Run = unsafe extern "C" fn(*const Request, *mut c_char, usize) -> c_int;

/// Memory beside a guard.
pub struct Guarded {
    address: *mut u8,
    bytes: usize,
    release: Release,
}

// SAFETY: the memory belongs to this value alone.
unsafe impl Send for Guarded {}

impl Guarded {
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `bytes` bytes were allocated, and live as long as this value.
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this is the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: allocated by the same library with this length.
        unsafe { (self.release)(self.address.cast(), self.bytes) }
    }
}

pub fn shim() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/shim")
}

/// Kernels as a library of this machine.
pub struct Cpu(Library);

impl Cpu {
    /// Compiles Metal source with the C++ compiler; the source itself is not changed. The result is kept for the next run.
    pub fn compile(source: &str, signatures: &[Signature]) -> Self {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let guard = ONE_AT_A_TIME.lock().unwrap_or_else(|broken| broken.into_inner());
        let text = whole(source, signatures, Way::Cpu);
        let standard = format!("-std={}", standard(source, Way::Cpu));
        let mut hash = DefaultHasher::new();
        for file in ["entry.h", "runtime.cpp"] {
            std::fs::read(shim().join(file)).unwrap().hash(&mut hash);
        }
        (&text, HEADERS, FLAGS, &standard).hash(&mut hash);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("metal-{:016x}", hash.finish()));
        let library = folder.join("kernels.so");
        if !library.exists() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("lily.cpp"), text).unwrap();
            build(&folder, &standard);
        }
        // Never unloaded, since it handles faults from its first launch on.
        let flags = unix::RTLD_NOW | unix::RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: the library was built from our sources; its constructors only make a list.
        let library = unsafe { unix::Library::open(Some(library), flags) }.unwrap().into();
        drop(guard);
        Self(library)
    }

    pub fn allocate(&self, bytes: usize, guard: Guard) -> Guarded {
        // SAFETY: the functions have these types in runtime.cpp.
        let (allocate, release) = unsafe {
            (
                *self.0.get::<Allocate>(b"shim_allocate\0").unwrap(),
                *self.0.get::<Release>(b"shim_release\0").unwrap(),
            )
        };
        // SAFETY: it only allocates.
        let address = unsafe { allocate(bytes, matches!(guard, Guard::End)) };
        assert!(!address.is_null(), "{bytes} bytes of memory");
        Guarded { address: address.cast(), bytes, release }
    }

    /// Runs a kernel of the library that has as many buffers and threadgroup memory arguments, in memory of this library.
    pub fn launch(
        &self,
        shape: Shape,
        memories: &mut [Memory],
        bound: &[Bound],
        order: Order,
    ) -> Result<(), String> {
        let Shape { kernel, grid, threads, memory } = shape;
        let name = CString::new(kernel).unwrap();
        // SAFETY: within the memory, as `Kernels::launch` has checked.
        let address =
            |&(index, offset): &Bound| unsafe { memories[index].guarded().address.add(offset) }.cast();
        let buffers: Vec<*mut c_void> = bound.iter().map(address).collect();
        let memory: Vec<u32> = memory.iter().map(|&n| n as u32).collect();
        let request = Request {
            kernel: name.as_ptr(),
            buffers: buffers.as_ptr(),
            memory: memory.as_ptr(),
            memory_count: memory.len() as u32,
            grid: grid.map(|n| n as u32),
            threads: threads as u32,
            order: match order {
                Order::Forward => 0,
                Order::Backward => 1,
                Order::Random(seed) => 2 + u32::from(seed),
            },
        };
        let mut error = [0 as c_char; 400];
        // SAFETY: the function has this type in runtime.cpp; all pointers live until it returns, and the kernels' accesses
        // are held to their buffers by guard pages.
        let code = unsafe {
            self.0.get::<Run>(b"shim_launch\0").unwrap()(&request, error.as_mut_ptr(), error.len())
        };
        // SAFETY: the runtime ends it with a zero.
        let error = || unsafe { CStr::from_ptr(error.as_ptr()) }.to_string_lossy().into_owned();
        if code == 0 { Ok(()) } else { Err(error()) }
    }
}

/// Indices of private arrays, shifts and alignment are checked; a fault says so.
const FLAGS: [&str; 12] = [
    "-O2",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Werror",
    "-Wno-attributes",
    // `#pragma unroll`.
    "-Wno-unknown-pragmas",
    "-Wno-volatile",
    "-U_FORTIFY_SOURCE",
    "-ffp-contract=off",
    "-fsanitize=bounds-strict,alignment,shift,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
];

fn build(folder: &Path, standard: &str) {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let made = folder.join(format!("kernels-{}.so", std::process::id()));
    let output = Command::new(&compiler)
        .arg(standard)
        .args(FLAGS)
        .arg("-I")
        .arg(shim())
        .args([folder.join("lily.cpp"), shim().join("runtime.cpp")])
        .arg("-o")
        .arg(&made)
        .output()
        .unwrap_or_else(|e| panic!("the C++ compiler {compiler} can't be run ({e}): install one (Debian: apt install build-essential)"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(made, folder.join("kernels.so")).unwrap();
}
