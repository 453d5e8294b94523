//! C++ becomes a library of this machine. What was compiled is kept, and not compiled again.

use std::collections::hash_map::DefaultHasher;
use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use libloading::os::unix;

/// The folder of `fibers.h`.
fn runtime() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("runtime")
}

/// The C++ compiler of this machine, `c++` or what `CXX` names, with a folder for what it makes.
#[derive(Clone, Debug)]
pub struct Compiler {
    command: String,
    cache: PathBuf,
    includes: Vec<PathBuf>,
    /// Hash of all that objects depend on but for their text and flags: the compiler's version, the files in the folders.
    version: u64,
}

impl Compiler {
    /// Texts may include the files of `includes` but Rust's, and `fibers.h`. What is made comes into the folder `cache`, which need not
    /// be there and may be deleted.
    ///
    /// Fails without a compiler, and if a folder can't be read or made.
    pub fn new(cache: &Path, includes: &[&Path]) -> Result<Self, String> {
        let command = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let includes: Vec<PathBuf> = includes.iter().map(|i| i.to_path_buf()).chain([runtime()]).collect();
        let mut hasher = DefaultHasher::new();
        run(Command::new(&command).arg("--version"))?.hash(&mut hasher);
        includes.iter().try_for_each(|folder| hash_files(folder, &mut hasher))?;
        fs::create_dir_all(cache).map_err(|e| format!("{}: {e}", cache.display()))?;
        Ok(Self { command, cache: cache.to_owned(), includes, version: hasher.finish() })
    }

    /// An object file of C++. `flags` go before the text. Errors of the compiler name the lines of `name`.
    pub fn object(&self, name: &str, text: &str, flags: &[&str]) -> Result<PathBuf, String> {
        self.make("o", &(name, text, flags), |made| {
            let source = made.with_extension("cpp");
            let text = format!("#line 1 \"{name}\"\n{text}");
            fs::write(&source, text).map_err(|e| format!("{}: {e}", source.display()))?;
            let mut command = Command::new(&self.command);
            command.args(flags).args(self.includes.iter().map(|folder| format!("-I{}", folder.display())));
            run(command.arg("-c").arg(source).arg("-o").arg(made))
        })
    }

    /// Links objects of [`Compiler::object`], in which nothing may be missing, and loads what comes of it.
    pub fn library(&self, objects: &[PathBuf]) -> Result<Library, String> {
        let path = self.make("so", &objects, |made| {
            let mut command = Command::new(&self.command);
            run(command.args(["-shared", "-Wl,-z,defs", "-o"]).arg(made).args(objects))
        })?;
        Library::open(path)
    }

    /// The file that `make` makes of what is hashed by `key`, from the cache if it is there. Others that want the same wait.
    fn make(
        &self,
        extension: &str,
        key: &impl Hash,
        make: impl FnOnce(&Path) -> Result<String, String>,
    ) -> Result<PathBuf, String> {
        let mut hasher = DefaultHasher::new();
        (self.version, &self.command, key).hash(&mut hasher);
        let path = self.cache.join(format!("{:016x}.{extension}", hasher.finish()));
        let problem = |e| format!("{}: {e}", path.display());
        if !path.exists() {
            let lock = File::create(path.with_extension(format!("{extension}.lock"))).map_err(problem)?;
            lock.lock().map_err(problem)?;
            if !path.exists() {
                let made = path.with_extension(format!("new.{extension}"));
                make(&made)?;
                fs::rename(made, &path).map_err(problem)?;
            }
        }
        Ok(path)
    }
}

/// Names and contents of a folder's files, and of those in folders there.
fn hash_files(folder: &Path, hasher: &mut impl Hasher) -> Result<(), String> {
    let problem = |e| format!("{}: {e}", folder.display());
    let entries = fs::read_dir(folder).map_err(problem)?;
    let mut paths: Vec<PathBuf> =
        entries.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>().map_err(problem)?;
    paths.sort_unstable();
    for path in paths.iter().filter(|path| path.extension().is_none_or(|e| e != "rs")) {
        if path.is_dir() {
            hash_files(path, hasher)?;
        } else {
            (path, fs::read(path).map_err(problem)?).hash(hasher);
        }
    }
    Ok(())
}

/// What a command of the compiler prints.
fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|e| {
        let program = command.get_program().display();
        format!(
            "the C++ compiler {program} can't be run ({e}): install one (Debian: apt install build-essential)"
        )
    })?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// A loaded library. It is never unloaded, since it handles faults from its first launch on.
#[derive(Debug)]
pub struct Library {
    library: unix::Library,
    path: PathBuf,
}

impl Library {
    fn open(path: PathBuf) -> Result<Self, String> {
        let flags = unix::RTLD_NOW | unix::RTLD_LOCAL | libc::RTLD_NODELETE;
        // SAFETY: it was made of the callers' sources, whose initialisers only fill variables of their own.
        let library = unsafe { unix::Library::open(Some(&path), flags) };
        Ok(Self { library: library.map_err(|e| format!("{}: {e}", path.display()))?, path })
    }

    /// The file, for tools that read it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A function of the library.
    ///
    /// # Safety
    ///
    /// `F` must be the type that the sources declare it with: `unsafe extern "C" fn(..) -> ..`.
    pub unsafe fn function<F: Copy>(&self, name: &str) -> Result<F, String> {
        // SAFETY: of this type, as the caller says; and it stays when the symbol is dropped, since nothing is unloaded.
        let symbol = unsafe { self.library.get::<F>(name) };
        symbol.map(|symbol| *symbol).map_err(|e| format!("{}: {e}", self.path.display()))
    }
}
