//! A file of kernels as a library of this machine: see `runtime.cpp`.

use std::ffi::{CStr, CString, c_char};
use std::fmt::Write;
use std::path::Path;

use lily_cuda::kernels::{COMMON, SOURCES, Source, options};
use lily_emulate::library::{Compiler, Library};
use lily_emulate::memory::{Guard, Guarded};
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

type Launch = unsafe extern "C" fn(*const Request) -> *const c_char;

/// Memory that kernels read and write.
pub struct Memory(Guarded);

impl Memory {
    /// For a kernel's arguments.
    pub fn address(&self) -> u64 {
        self.0.address() as u64
    }

    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    pub fn floats(&self) -> Vec<f32> {
        self.bytes().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub fn words(&self) -> Vec<u32> {
        self.bytes().as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    }
}

/// The kernels of a file, for the shapes of a model.
pub struct Emulator {
    library: Library,
}

impl Emulator {
    /// Compiles a file of kernels, `edit`ed, with what goes before it, for Hopper.
    pub fn compile(file: &str, config: &Config, edit: impl Fn(&str) -> String) -> Self {
        Self::compile_for(true, file, config, edit)
    }

    /// The same for Hopper, or for a card without its products of warpgroups.
    pub fn compile_for(hopper: bool, file: &str, config: &Config, edit: impl Fn(&str) -> String) -> Self {
        let source = SOURCES.iter().find(|s| s.name == file).unwrap();
        let text = whole(source, &edit(source.text));
        // Shapes; the others are for NVRTC.
        let shapes = options(config, "");
        let shapes = shapes.iter().filter(|o| o.starts_with("-D") && !o.contains("INFINITY"));
        let card = if hopper { "-DHAS_WARPGROUPS=1" } else { "-DHAS_WARPGROUPS=0" };
        let flags: Vec<&str> = FLAGS.into_iter().chain([card]).chain(shapes.map(String::as_str)).collect();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulate");
        let compiler = Compiler::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &[&folder]).unwrap();
        let kernels = compiler.object("kernels.cpp", &text, &flags).unwrap();
        let runtime = compiler.object("runtime.cpp", include_str!("runtime.cpp"), &FLAGS).unwrap();
        Self { library: compiler.library(&[runtime, kernels]).unwrap() }
    }

    /// Memory with this content.
    pub fn memory(&self, content: &[u8]) -> Memory {
        let mut memory = Guarded::new(content.len(), Guard::End).unwrap();
        memory.bytes_mut().copy_from_slice(content);
        Memory(memory)
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
            let problem = self.library.function::<Launch>("emu_launch").unwrap()(&request);
            (!problem.is_null()).then(|| CStr::from_ptr(problem))
        };
        problem.map_or(Ok(()), |p| Err(format!("{kernel}, seed {seed}: {}", p.to_string_lossy())))
    }
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
const FLAGS: [&str; 15] = [
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
    // Variables of templates would be one for all libraries.
    "-fno-gnu-unique",
    "-ffp-contract=off",
    "-fsanitize=bounds-strict,alignment,shift,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
];
