//! Kernels from source to machine code, by NVRTC, once per machine: cubins lie in a cache on disk, keyed by source,
//! shapes, architecture and compiler version.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::ptr;

use libloading::Library;

/// Kernels can't be compiled.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// Neither a compiler nor a cached cubin.
    #[error(
        "the CUDA run-time compiler (libnvrtc) can't be loaded, and {cache} has no kernels for this model and device: install the CUDA toolkit, or the nvidia-cuda-nvrtc package with LD_LIBRARY_PATH set to its folder"
    )]
    NoCompiler {
        /// Folder of the cache.
        cache: String,
    },
    /// The source is wrong.
    #[error("{file} does not compile for {arch}:\n{log}")]
    Source {
        /// Name of the file.
        file: &'static str,
        /// Architecture.
        arch: String,
        /// The compiler's words.
        log: String,
    },
    /// NVRTC itself failed.
    #[error("{0} of libnvrtc failed with code {1}")]
    Call(&'static str, c_int),
}

/// A compiled file.
pub struct Compiled {
    /// Machine code.
    pub cubin: Vec<u8>,
    /// The assembler's report: registers and spills of each kernel. Empty if it came from the cache.
    pub log: String,
}

/// NVRTC, loaded.
pub struct Compiler {
    library: Library,
    /// Major and minor version.
    pub version: (i32, i32),
}

type Program = *mut c_void;

/// Calls a function of the library by name and checks its code.
macro_rules! call {
    ($self:ident, $name:expr, $($arg:expr => $type:ty),*) => {{
        // SAFETY: name and types are those of nvrtc.h; every pointer argument is valid for the call.
        unsafe {
            match $self.library.get::<unsafe extern "C" fn($($type),*) -> c_int>($name.as_bytes()) {
                Ok(f) => f($($arg),*),
                Err(_) => -1,
            }
        }
    }};
}

impl Compiler {
    /// Looks for the library by its usual names.
    pub fn load() -> Option<Self> {
        let names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "/usr/local/cuda/lib64/libnvrtc.so"];
        // SAFETY: NVRTC's initialisers have no requirements.
        let library = names.iter().find_map(|name| unsafe { Library::new(*name) }.ok())?;
        let mut this = Self { library, version: (0, 0) };
        let (mut major, mut minor) = (0, 0);
        let code = call!(this, "nvrtcVersion", &mut major => *mut c_int, &mut minor => *mut c_int);
        this.version = (major, minor);
        (code == 0).then_some(this)
    }

    /// Compiles a file; `name` is for messages.
    pub fn compile(
        &self,
        name: &'static str,
        source: &str,
        options: &[String],
    ) -> Result<Compiled, CompileError> {
        let mut program: Program = ptr::null_mut();
        let c_string = |s: &str| CString::new(s).unwrap_or_default();
        let (source, file) = (c_string(source), c_string(name));
        let code = call!(self, "nvrtcCreateProgram",
            &mut program => *mut Program, source.as_ptr() => *const c_char, file.as_ptr() => *const c_char,
            0 => c_int, ptr::null() => *const *const c_char, ptr::null() => *const *const c_char);
        if code != 0 {
            return Err(CompileError::Call("nvrtcCreateProgram", code));
        }
        let strings: Vec<CString> = options.iter().map(|o| c_string(o)).collect();
        let pointers: Vec<*const c_char> = strings.iter().map(|s| s.as_ptr()).collect();
        let code = call!(self, "nvrtcCompileProgram",
            program => Program, pointers.len() as c_int => c_int, pointers.as_ptr() => *const *const c_char);
        let log = self.bytes("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program);
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
        let cubin =
            if code == 0 { self.bytes("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program) } else { Vec::new() };
        call!(self, "nvrtcDestroyProgram", &mut program => *mut Program);
        match code {
            0 => Ok(Compiled { cubin, log }),
            6 => Err(CompileError::Source {
                file: name,
                arch: options.first().cloned().unwrap_or_default(),
                log,
            }),
            code => Err(CompileError::Call("nvrtcCompileProgram", code)),
        }
    }

    fn bytes(&self, size: &str, get: &str, program: Program) -> Vec<u8> {
        let mut n = 0usize;
        let code = call!(self, size, program => Program, &mut n => *mut usize);
        let mut out = vec![0u8; n];
        if code == 0 {
            call!(self, get, program => Program, out.as_mut_ptr() => *mut u8);
        }
        out
    }
}

/// Machine code of a file: from the cache, or compiled and put there. The cache is best effort: a folder that can't be
/// written only costs time.
pub fn cubin(
    compiler: Option<&Compiler>,
    cache: Option<&Path>,
    name: &'static str,
    source: &str,
    options: &[String],
) -> Result<Vec<u8>, CompileError> {
    let key = key(source, options);
    let path = |version: (i32, i32)| -> Option<PathBuf> {
        let stem = name.trim_end_matches(".cu");
        Some(cache?.join(format!("{stem}-{key:016x}-nvrtc{}.{}.cubin", version.0, version.1)))
    };
    // Without a compiler any version's code will do: it is for this very source and device.
    let versions: Vec<(i32, i32)> = match compiler {
        Some(c) => vec![c.version],
        None => (12..16).rev().flat_map(|major| (0..12).rev().map(move |minor| (major, minor))).collect(),
    };
    if let Some(code) = versions.into_iter().find_map(|v| read_checked(&path(v)?)) {
        return Ok(code);
    }
    let Some(compiler) = compiler else {
        let cache = cache.map_or_else(|| "the cache (off)".to_owned(), |p| p.display().to_string());
        return Err(CompileError::NoCompiler { cache });
    };
    let compiled = compiler.compile(name, source, options)?;
    if let Some(path) = path(compiler.version)
        && let Err(e) = write_checked(&path, &compiled.cubin)
    {
        tracing::warn!(
            "kernels can't be cached in {}: {e}; they are compiled again next time",
            path.display()
        );
    }
    Ok(compiled.cubin)
}

/// FNV-1a over everything that decides the code.
fn key(source: &str, options: &[String]) -> u64 {
    let bytes = options.iter().flat_map(|o| o.bytes().chain([0])).chain(source.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// A cached file is its CRC-32 and the code; a damaged one counts as absent.
fn read_checked(path: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(path).ok()?;
    let (crc, code) = bytes.split_first_chunk::<4>()?;
    (crc32fast::hash(code).to_le_bytes() == *crc).then(|| code.to_vec())
}

fn write_checked(path: &Path, code: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    // Under a name of its own first: two processes may do this at once.
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&temporary, [&crc32fast::hash(code).to_le_bytes(), code].concat())?;
    std::fs::rename(temporary, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_depends_on_everything() {
        let options = |o: &[&str]| o.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        let one = key("source", &options(&["-DA=1", "-DB=2"]));
        assert_ne!(one, key("source ", &options(&["-DA=1", "-DB=2"])));
        assert_ne!(one, key("source", &options(&["-DA=1-DB=2"])));
        assert_ne!(one, key("source", &options(&["-DA=1", "-DB=3"])));
    }

    #[test]
    fn a_damaged_cache_file_counts_as_absent() {
        let path = std::env::temp_dir().join(format!("lily-cuda-cache-{}", std::process::id()));
        write_checked(&path, b"code").unwrap();
        assert_eq!(read_checked(&path).unwrap(), b"code");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[5] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(read_checked(&path), None);
        std::fs::remove_file(&path).unwrap();
    }
}
