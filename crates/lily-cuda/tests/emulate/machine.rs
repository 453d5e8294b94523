//! A file of kernels as a library of this machine: see `runtime.cpp`.

use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use libloading::Library;
use libloading::os::unix;
use lily_cuda::kernels::{COMMON, SOURCES, Source, options};
use lily_model::config::Config;

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub grid: [u32; 2],
    pub threads: u32,
    /// Blocks of a cluster.
    pub cluster: u32,
    /// Blocks that run at a time.
    pub together: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

#[repr(C)]
struct Request {
    kernel: *const c_char,
    arguments: *const u64,
    grid: [u32; 2],
    threads: u32,
    cluster: u32,
    together: u32,
    shared: u32,
    seed: u64,
}

type Allocate = unsafe extern "C" fn(usize) -> *mut c_void;
type Release = unsafe extern "C" fn(*mut c_void, usize);
type Launch = unsafe extern "C" fn(*const Request) -> *const c_char;

/// Memory that kernels read and write; an access behind its end (rounded up to 16 bytes) ends the launch.
pub struct Memory {
    address: *mut u8,
    bytes: usize,
    release: Release,
}

impl Memory {
    /// For a kernel's arguments.
    pub fn address(&self) -> u64 {
        self.address as u64
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: so many bytes were allocated, live as long as this value, and no kernel runs.
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }

    pub fn floats(&self) -> Vec<f32> {
        self.bytes().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub fn words(&self) -> Vec<u32> {
        self.bytes().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by the same library with this length.
        unsafe { (self.release)(self.address.cast(), self.bytes) }
    }
}

/// The kernels of a file, for the shapes of a model.
pub struct Emulator {
    library: Library,
}

impl Emulator {
    /// Compiles a file of kernels, `edit`ed, with what goes before it.
    pub fn compile(file: &str, config: &Config, edit: impl Fn(&str) -> String) -> Self {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let source = SOURCES.iter().find(|s| s.name == file).unwrap();
        let text = whole(source, &edit(source.text));
        // Shapes; the others are for NVRTC.
        let shapes =
            options(config, "").into_iter().filter(|o| o.starts_with("-D") && !o.contains("INFINITY"));
        let shapes: Vec<String> = shapes.collect();
        let mut hash = DefaultHasher::new();
        for file in ["shim.h", "runtime.cpp"] {
            std::fs::read(folder().join(file)).unwrap().hash(&mut hash);
        }
        (&text, &shapes, FLAGS).hash(&mut hash);
        let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cuda-{:016x}", hash.finish()));
        let path = made.join("kernels.so");
        if !path.exists() {
            std::fs::create_dir_all(&made).unwrap();
            std::fs::write(made.join("kernels.cpp"), text).unwrap();
            build(&made, &shapes);
        }
        // Never unloaded, since it handles faults from its first launch on.
        let flags = unix::RTLD_NOW | unix::RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: the library was built from our sources, and nothing runs when it is loaded.
        let library = unsafe { unix::Library::open(Some(&path), flags) }.unwrap().into();
        Self { library }
    }

    /// Memory with this content.
    pub fn memory(&self, content: &[u8]) -> Memory {
        // SAFETY: the functions have these types in runtime.cpp.
        let (allocate, release) = unsafe {
            (
                *self.library.get::<Allocate>(b"emu_allocate\0").unwrap(),
                *self.library.get::<Release>(b"emu_release\0").unwrap(),
            )
        };
        // SAFETY: it only allocates.
        let address: *mut u8 = unsafe { allocate(content.len()) }.cast();
        assert!(!address.is_null(), "{} bytes of memory", content.len());
        // SAFETY: as many bytes were just allocated.
        unsafe { address.copy_from_nonoverlapping(content.as_ptr(), content.len()) };
        Memory { address, bytes: content.len(), release }
    }

    pub fn floats(&self, content: &[f32]) -> Memory {
        self.memory(&content.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
    }

    pub fn words(&self, content: &[u32]) -> Memory {
        self.memory(&content.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>())
    }

    /// Memory without numbers: what a kernel does not write stays NaN.
    pub fn unwritten(&self, bytes: usize) -> Memory {
        self.memory(&vec![0xff; bytes])
    }

    /// Runs a kernel; `seed` is of everything that goes by chance. Each argument begins a word.
    pub fn launch(&self, kernel: &str, shape: Shape, arguments: &[u64], seed: u64) -> Result<(), String> {
        let name = CString::new(kernel).unwrap();
        let Shape { grid, threads, cluster, together, shared } = shape;
        let request = Request {
            kernel: name.as_ptr(),
            arguments: arguments.as_ptr(),
            grid,
            threads,
            cluster,
            together,
            shared,
            seed,
        };
        // SAFETY: the function has this type in runtime.cpp, all pointers live until it returns, and what it returns is null or a
        // constant.
        let problem = unsafe {
            let problem = self.library.get::<Launch>(b"emu_launch\0").unwrap()(&request);
            (!problem.is_null()).then(|| CStr::from_ptr(problem))
        };
        problem.map_or(Ok(()), |p| Err(format!("{kernel}, seed {seed}: {}", p.to_string_lossy())))
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulate")
}

/// A file with what goes before it, as C++. The shim stands for the first two of the files, ptx.cu and hopper.cu, and has all `asm`.
fn whole(source: &Source, text: &str) -> String {
    let [_, common, _, state] = COMMON;
    let numbered = |name: &str, text: &str| format!("#line 1 \"{name}\"\n{}", shared_memory(text));
    let text = [("common.cu", common), ("state.cu", state), (source.name, text)]
        .map(|(name, text)| numbered(name, text))
        .concat();
    let stray = text.lines().find(|line| line.contains("asm ") || line.contains("asm("));
    assert_eq!(stray, None, "{}: it belongs into ptx.cu or hopper.cu, and into shim.h", source.name);
    let mut whole = format!("#include \"shim.h\"\n{text}const emu::Kernel emu::kernels[] = {{\n");
    for kernel in source.kernels {
        writeln!(whole, "    {{\"{kernel}\", [](const u8* at) {{ emu::call({kernel}, at); }}}},").unwrap();
    }
    whole + "    {nullptr, nullptr}};\n"
}

/// Each block has its own shared memory, so variables there become references.
fn shared_memory(text: &str) -> String {
    let mut variables = 0;
    let mut line = |line: &str| {
        let Some((indent, declared)) = line.split_once("__shared__ ") else { return line.to_owned() };
        if indent == "extern " {
            assert_eq!(declared, "__align__(128) u8 shared[];", "the one form that is known");
            return "static const emu::Dynamic shared;".to_owned();
        }
        assert_eq!(indent.trim(), "", "{line}");
        let declared = declared.trim_start_matches("__align__(16) ");
        let (kind, names) = declared.split_once(' ').unwrap();
        let reference = |declarator: &str| {
            let (name, dimensions) = declarator.split_at(declarator.find('[').unwrap_or(declarator.len()));
            variables += 1;
            format!("auto& {name} = emu::shared_variable<emu::Type<{kind}{dimensions}>, {variables}>();")
        };
        names.split_once(';').unwrap_or_else(|| panic!("{line}")).0.split(", ").map(reference).collect()
    };
    text.lines().map(|l| line(l) + "\n").collect()
}

/// Indices of arrays, shifts and alignment are checked; a fault says so.
const FLAGS: [&str; 16] = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-Wall",
    "-Werror",
    "-Wno-attributes",
    // `#pragma unroll`.
    "-Wno-unknown-pragmas",
    "-Wno-unused-variable",
    "-Wno-sign-compare",
    "-Wno-maybe-uninitialized",
    "-U_FORTIFY_SOURCE",
    "-ftls-model=initial-exec",
    // Variables of templates would be one for all libraries.
    "-fno-gnu-unique",
    "-ffp-contract=off",
    "-fsanitize=bounds-strict,alignment,shift,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
];

fn build(made: &Path, shapes: &[String]) {
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let library = made.join(format!("kernels-{}.so", std::process::id()));
    let mut command = Command::new(&compiler);
    command.args(FLAGS).args(shapes).arg("-I").arg(folder()).arg(made.join("kernels.cpp"));
    command.arg(folder().join("runtime.cpp")).args(["-shared", "-Wl,-z,defs", "-o"]).arg(&library);
    let output = command.output().unwrap_or_else(|e| {
        panic!("the C++ compiler {compiler} can't be run ({e}): install one (Debian: apt install build-essential)")
    });
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(library, made.join("kernels.so")).unwrap();
}
