//! Runs kernels on the CPU: see `shim/runtime.cpp`.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::null_mut;

use lily_emulate::library::{Compiler, Library};
use lily_emulate::memory::{Guard, Guarded};

use super::signature::{Parameter, Signature};
use super::text::{Way, standard, whole};
use super::{Bound, Memory, Order, Shape};

#[repr(C)]
struct Request {
    kernel: *const c_char,
    buffers: *const *mut c_void,
    buffer_count: u32,
    written: *const Given,
    written_count: u32,
    memory: *const Given,
    memory_count: u32,
    grid: [u32; 3],
    threads: u32,
    order: u32,
}

/// Memory that a kernel may write, and what races are found with: null, if none are looked for.
#[repr(C)]
struct Given {
    first: *mut u8,
    bytes: usize,
    cells: *mut u8,
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

type Run = unsafe extern "C" fn(*const Request, *mut c_char, usize, *mut Race) -> c_int;

/// Guarded memory, and the accesses to it if races are looked for: three for each byte.
pub struct Watched {
    pub memory: Guarded,
    cells: OnceCell<Guarded>,
}

impl Watched {
    pub fn new(bytes: usize, guard: Guard) -> Self {
        Self { memory: Guarded::new(bytes, guard).unwrap(), cells: OnceCell::new() }
    }

    /// For a launch, which looks for races in it if it is asked to.
    fn given(&self, races: bool) -> Given {
        let bytes = self.memory.bytes().len();
        let cells = || Guarded::new(bytes * 3 * size_of::<Access>(), Guard::End).unwrap();
        let cells = if races { self.cells.get_or_init(cells).address() } else { null_mut() };
        Given { first: self.memory.address(), bytes, cells }
    }
}

pub fn shim() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/shim")
}

/// Kernels as a library of this machine.
pub struct Cpu {
    library: Library,
    source: String,
}

impl Cpu {
    /// Compiles Metal source with the C++ compiler; the source itself is not changed. The result is kept for the next run.
    pub fn compile(source: &str, signatures: &[Signature]) -> Self {
        let compiler = Compiler::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &[&shim()]).unwrap();
        let standard = format!("-std={}", standard(source, Way::Cpu));
        let flags = [&[standard.as_str()], &FLAGS[..]].concat();
        let watched = [&flags[..], &WATCHED].concat();
        let text = whole(source, signatures, Way::Cpu);
        let kernels = compiler.object("lily.cpp", &text, &watched).unwrap();
        let runtime = compiler.object("runtime.cpp", RUNTIME, &flags).unwrap();
        // Not linked with ThreadSanitizer's own runtime; everything that is called must be there.
        let library = compiler.library(&[runtime, kernels]).unwrap();
        Self { library, source: source.to_owned() }
    }

    /// Runs a kernel of the library that has as many buffers and threadgroup memory arguments. With `races`, one is an error.
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
        let address = |&(index, offset): &Bound| {
            let first = memories[index].watched().memory.address();
            // SAFETY: within the memory, as `Kernels::launch` has checked.
            unsafe { first.add(offset) }.cast()
        };
        let buffers: Vec<*mut c_void> = bound.iter().map(address).collect();
        let written: Vec<Given> =
            written(signature, bound).map(|index| memories[index].watched().given(races)).collect();
        let threadgroup: Vec<Watched> = memory.iter().map(|&bytes| Watched::new(bytes, Guard::End)).collect();
        let memory: Vec<Given> = threadgroup.iter().map(|memory| memory.given(races)).collect();
        let request = Request {
            kernel: name.as_ptr(),
            buffers: buffers.as_ptr(),
            buffer_count: buffers.len() as u32,
            written: written.as_ptr(),
            written_count: written.len() as u32,
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
            let run = self.library.function::<Run>("shim_launch").unwrap();
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
            .arg(self.library.path())
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

/// What runs the kernels.
const RUNTIME: &str = include_str!("../shim/runtime.cpp");

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
const WATCHED: [&str; 4] =
    ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-fno-partial-inlining", "-g1"];
