//! Runs kernels on the CPU: see `shim/runtime.cpp`.

use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use libloading::Library;
use libloading::os::unix;

use super::signature::{Parameter, Signature};
use super::text::{HEADERS, Way, standard, whole};
use super::{Bound, Guard, Memory, Order, Shape};

#[repr(C)]
struct Request {
    kernel: *const c_char,
    buffers: *const *mut c_void,
    buffer_count: u32,
    written: *const Written,
    written_count: u32,
    races: bool,
    memory: *const u32,
    memory_count: u32,
    grid: [u32; 3],
    threads: u32,
    order: u32,
}

/// Memory that a kernel may write.
#[repr(C)]
struct Written {
    memory: *mut c_void,
    bytes: usize,
}

/// Two accesses that nothing orders.
#[repr(C)]
#[derive(Default)]
struct Race {
    argument: u32,
    in_threadgroup_memory: bool,
    same_threadgroup: bool,
    offset: usize,
    first: Access,
    second: Access,
}

#[repr(C)]
#[derive(Default)]
struct Access {
    epoch: u32,
    /// The address behind the access in the library's code.
    code: u32,
    thread: u16,
    /// 0: a read; 1: an atomic addition; 2: a write.
    kind: u8,
}

type Allocate = unsafe extern "C" fn(usize, bool) -> *mut c_void;
type Release = unsafe extern "C" fn(*mut c_void, usize);
type Run = unsafe extern "C" fn(*const Request, *mut c_char, usize, *mut Race) -> c_int;

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
pub struct Cpu {
    library: Library,
    path: PathBuf,
    source: String,
}

impl Cpu {
    /// Compiles Metal source with the C++ compiler; the source itself is not changed. The result is kept for the next run.
    pub fn compile(source: &str, signatures: &[Signature]) -> Self {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let guard = ONE_AT_A_TIME.lock().unwrap_or_else(|broken| broken.into_inner());
        let text = whole(source, signatures, Way::Cpu);
        let standard = format!("-std={}", standard(source, Way::Cpu));
        let mut hash = DefaultHasher::new();
        for file in ["entry.h", "races.h", "runtime.cpp"] {
            std::fs::read(shim().join(file)).unwrap().hash(&mut hash);
        }
        (&text, HEADERS, FLAGS, WATCHED, &standard).hash(&mut hash);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("metal-{:016x}", hash.finish()));
        let path = folder.join("kernels.so");
        if !path.exists() {
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("lily.cpp"), text).unwrap();
            build(&folder, &standard);
        }
        // Never unloaded, since it handles faults from its first launch on.
        let flags = unix::RTLD_NOW | unix::RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: the library was built from our sources; its constructors only make a list.
        let library = unsafe { unix::Library::open(Some(&path), flags) }.unwrap().into();
        drop(guard);
        Self { library, path, source: source.to_owned() }
    }

    pub fn allocate(&self, bytes: usize, guard: Guard) -> Guarded {
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
        Guarded { address: address.cast(), bytes, release }
    }

    /// Runs a kernel of the library that has as many buffers and threadgroup memory arguments, in memory of this library. With
    /// `races`, one is an error.
    pub fn launch(
        &self,
        signature: &Signature,
        shape: Shape,
        memories: &mut [Memory],
        bound: &[Bound],
        order: Order,
        races: bool,
    ) -> Result<(), String> {
        let Shape { kernel, grid, threads, memory } = shape;
        let name = CString::new(kernel).unwrap();
        // SAFETY: within the memory, as `Kernels::launch` has checked.
        let address =
            |&(index, offset): &Bound| unsafe { memories[index].guarded().address.add(offset) }.cast();
        let buffers: Vec<*mut c_void> = bound.iter().map(address).collect();
        let written: Vec<Written> = written(signature, bound)
            .map(|index| memories[index].guarded())
            .map(|memory| Written { memory: memory.address.cast(), bytes: memory.bytes })
            .collect();
        let memory: Vec<u32> = memory.iter().map(|&n| n as u32).collect();
        let request = Request {
            kernel: name.as_ptr(),
            buffers: buffers.as_ptr(),
            buffer_count: buffers.len() as u32,
            written: written.as_ptr(),
            written_count: written.len() as u32,
            races,
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
        let mut race = Race::default();
        // SAFETY: the function has this type in runtime.cpp; all pointers live until it returns, and the kernels' accesses
        // are held to their buffers by guard pages.
        let code = unsafe {
            let run = self.library.get::<Run>(b"shim_launch\0").unwrap();
            run(&request, error.as_mut_ptr(), error.len(), &mut race)
        };
        // SAFETY: the runtime ends it with a zero.
        let error = || unsafe { CStr::from_ptr(error.as_ptr()) }.to_string_lossy().into_owned();
        match code {
            0 => Ok(()),
            2 => Err(format!("{} {}", error(), self.told(&race))),
            _ => Err(error()),
        }
    }

    fn told(&self, race: &Race) -> String {
        let Race { argument, in_threadgroup_memory, offset, first, second, .. } = race;
        let memory = if *in_threadgroup_memory { "threadgroup memory" } else { "buffer" };
        let access = |access: &Access| {
            let does = ["reads", "adds to", "writes"][usize::from(access.kind)];
            format!("thread {} {does} it in {}", access.thread, self.line(access.code))
        };
        let order = match race.same_threadgroup {
            true => "no barrier between them",
            false => "the first of an earlier threadgroup: nothing orders threadgroups",
        };
        format!("on {memory} {argument}, byte {offset}: {}; {}; {order}", access(first), access(second))
    }

    /// The line of the kernels' text that a call was made from, and those that called that one; if the call is none of the text's,
    /// a header's file and line.
    fn line(&self, code: u32) -> String {
        let output = Command::new("addr2line")
            .args(["-i", "-s", "-e"])
            .arg(&self.path)
            .arg(format!("{:x}", code - 1))
            .output()
            .unwrap_or_else(|e| {
                panic!("addr2line can't be run ({e}): install it (Debian: apt install binutils)")
            });
        let frames = String::from_utf8_lossy(&output.stdout).into_owned();
        let number = |frame: &str| frame.strip_prefix("lily.metal:")?.split(' ').next()?.parse().ok();
        let numbers: Vec<usize> = frames.lines().filter_map(number).collect();
        let Some(first) = numbers.first() else { return frames.trim().replace('\n', ", called from ") };
        let text = self.source.lines().nth(first - 1).unwrap_or_default().trim();
        let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
        format!("line {}, `{text}`", numbers.join(", called from "))
    }
}

/// Indices of the memory that a kernel may write, each once.
fn written<'a>(signature: &'a Signature, bound: &'a [Bound]) -> impl Iterator<Item = usize> {
    let writable = signature.parameters.iter().filter_map(|parameter| match parameter {
        Parameter::Buffer { index, writable: true } => Some(bound[*index].0),
        _ => None,
    });
    writable.collect::<BTreeSet<usize>>().into_iter()
}

/// Indices of private arrays, shifts and alignment are checked; a fault says so.
const FLAGS: [&str; 11] = [
    "-O2",
    "-fPIC",
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

/// Of the kernels alone: their accesses are told to the runtime, with lines.
const WATCHED: [&str; 5] =
    ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-fno-partial-inlining", "-g1", "-c"];

fn build(folder: &Path, standard: &str) {
    let made = folder.join(format!("kernels-{}", std::process::id()));
    let (object, library) = (made.with_extension("o"), made.with_extension("so"));
    compile(
        Command::new(compiler())
            .arg(standard)
            .args(FLAGS)
            .args(WATCHED)
            .arg(folder.join("lily.cpp"))
            .arg("-o")
            .arg(&object),
    );
    // Not linked with ThreadSanitizer's own runtime; everything that is called must be there.
    let runtime = shim().join("runtime.cpp");
    let link = ["-shared", "-Wl,-z,defs", "-o"];
    let sources = [runtime, object.clone()];
    compile(Command::new(compiler()).arg(standard).args(FLAGS).args(sources).args(link).arg(&library));
    std::fs::remove_file(object).unwrap();
    std::fs::rename(library, folder.join("kernels.so")).unwrap();
}

fn compiler() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned())
}

fn compile(command: &mut Command) {
    let output = command.arg("-I").arg(shim()).output().unwrap_or_else(|e| {
        let compiler = compiler();
        panic!("the C++ compiler {compiler} can't be run ({e}): install one (Debian: apt install build-essential)")
    });
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
