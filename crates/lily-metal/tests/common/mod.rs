//! Runs Metal kernels on the CPU: see `shim/runtime.cpp`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(dead_code, reason = "each test file uses its own part")]

pub mod device;
pub mod machine;
pub mod model;
pub mod signature;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use libloading::Library;

use signature::{Parameter, Signature};

/// Compiled kernels.
pub struct Kernels {
    library: Library,
    pub signatures: Vec<Signature>,
}

/// In which order threads and threadgroups run.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    Forward,
    Backward,
    /// By chance, from a seed.
    Random(u16),
}

pub const ORDERS: [Order; 3] = [Order::Forward, Order::Backward, Order::Random(7)];

/// Where a buffer's guard is.
#[derive(Clone, Copy, Debug)]
pub enum Guard {
    Start,
    End,
}

#[repr(C)]
struct Request {
    kernel: *const c_char,
    buffers: *const *mut c_void,
    buffer_count: u32,
    memory: *const u32,
    memory_count: u32,
    grid: [u32; 3],
    threads: u32,
    order: u32,
}

type Allocate = unsafe extern "C" fn(usize, bool) -> *mut c_void;
type Release = unsafe extern "C" fn(*mut c_void, usize);
type Run = unsafe extern "C" fn(*const Request, *mut c_char, usize) -> c_int;

/// Memory of a kernel; an access past its guard is caught.
pub struct Memory {
    address: *mut u8,
    pub bytes: usize,
    release: Release,
}

// SAFETY: the memory belongs to this value alone.
unsafe impl Send for Memory {}

impl Memory {
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `bytes` bytes were allocated, and live as long as this value.
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and this is the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
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

    pub fn put_floats(&mut self, values: &[f32]) {
        assert_eq!(4 * values.len(), self.bytes);
        self.put(values.iter().map(|x| x.to_bits()));
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by the same library with this length.
        unsafe { (self.release)(self.address.cast(), self.bytes) }
    }
}

fn shim() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/shim")
}

impl Kernels {
    /// Compiles Metal source with the C++ compiler; the source itself is not changed. The result is kept for the next
    /// run. Never unloaded: threads keep memory that belongs to it.
    pub fn compile(source: &str) -> &'static Self {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let guard = ONE_AT_A_TIME.lock().unwrap_or_else(|broken| broken.into_inner());
        let signatures = signature::signatures(source).unwrap();
        let entry = entry(&signatures);
        let mut hash = DefaultHasher::new();
        for file in ["metal_stdlib", "entry.h", "runtime.cpp"] {
            std::fs::read(shim().join(file)).unwrap().hash(&mut hash);
        }
        (source, &entry, FLAGS).hash(&mut hash);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("metal-{:016x}", hash.finish()));
        let library = folder.join("kernels.so");
        if !library.exists() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("lily.metal"), source).unwrap();
            std::fs::write(folder.join("entry.cpp"), entry).unwrap();
            build(&folder);
        }
        // SAFETY: the library was built from our sources; its constructors only make a list.
        let library = unsafe { Library::new(library) }.unwrap();
        drop(guard);
        Box::leak(Box::new(Self { library, signatures }))
    }

    pub fn allocate(&self, bytes: usize, guard: Guard) -> Memory {
        // SAFETY: the functions have these types in runtime.cpp.
        let (allocate, release) = unsafe {
            (
                *self.library.get::<Allocate>(b"shim_allocate\0").unwrap(),
                *self.library.get::<Release>(b"shim_release\0").unwrap(),
            )
        };
        // SAFETY: it only allocates.
        let address = unsafe { allocate(bytes, matches!(guard, Guard::End)) };
        assert!(!address.is_null(), "{bytes} bytes of memory");
        let mut memory = Memory { address: address.cast(), bytes, release };
        // NaN, so that what is read before it is written shows.
        memory.bytes_mut().fill(0xff);
        memory
    }

    pub fn launch(
        &self,
        kernel: &str,
        grid: [usize; 3],
        threads: usize,
        memory: &[usize],
        buffers: &mut [&mut Memory],
        order: Order,
    ) -> Result<(), String> {
        let buffers: Vec<*mut c_void> = buffers.iter().map(|b| b.address.cast()).collect();
        self.launch_at(kernel, grid, threads, memory, &buffers, order)
    }

    /// As [`Self::launch`], with buffers bound somewhere inside of memory.
    pub fn launch_at(
        &self,
        kernel: &str,
        grid: [usize; 3],
        threads: usize,
        memory: &[usize],
        buffers: &[*mut c_void],
        order: Order,
    ) -> Result<(), String> {
        let name = CString::new(kernel).unwrap();
        let memory: Vec<u32> = memory.iter().map(|&n| n as u32).collect();
        let request = Request {
            kernel: name.as_ptr(),
            buffers: buffers.as_ptr(),
            buffer_count: buffers.len() as u32,
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
            self.library.get::<Run>(b"shim_launch\0").unwrap()(&request, error.as_mut_ptr(), error.len())
        };
        // SAFETY: the runtime ends it with a zero.
        let error = || unsafe { CStr::from_ptr(error.as_ptr()) }.to_string_lossy().into_owned();
        if code == 0 { Ok(()) } else { Err(error()) }
    }
}

/// Indices of private arrays, shifts and alignment are checked; a fault says so.
const FLAGS: [&str; 11] = [
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Werror",
    "-Wno-attributes",
    "-U_FORTIFY_SOURCE",
    "-ffp-contract=off",
    "-fsanitize=bounds-strict,alignment,shift,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
];

fn build(folder: &Path) {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let made = folder.join(format!("kernels-{}.so", std::process::id()));
    let output = Command::new(&compiler)
        .args(FLAGS)
        .arg("-I")
        .arg(shim())
        .args([folder.join("entry.cpp"), shim().join("runtime.cpp")])
        .arg("-o")
        .arg(&made)
        .output()
        .unwrap_or_else(|e| panic!("the C++ compiler {compiler} can't be run ({e}): install one (Debian: apt install build-essential)"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(made, folder.join("kernels.so")).unwrap();
}

/// An entry point for each kernel, which passes it what its signature's attributes ask for.
fn entry(signatures: &[Signature]) -> String {
    let mut text = "#include \"lily.metal\"\n#include \"entry.h\"\n".to_owned();
    for s in signatures {
        let arguments: Vec<String> = s
            .parameters
            .iter()
            .map(|p| match p {
                Parameter::Buffer { index, .. } => format!("shim::buffer({index})"),
                Parameter::Threadgroup { index } => format!("shim::threadgroup_memory({index})"),
                Parameter::BuiltIn(name) => format!("shim::{name}()"),
            })
            .collect();
        let (name, arguments) = (&s.name, arguments.join(", "));
        text += &format!("static void entry_{name}() {{ {name}({arguments}); }}\n");
        text += &format!("static shim::Kernel kernel_{name}(\"{name}\", entry_{name});\n");
    }
    text
}
