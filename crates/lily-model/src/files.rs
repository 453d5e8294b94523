//! Where a model's files are: a folder on disk, or bytes embedded in the program.

use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

/// Files of a model.
#[derive(Clone, Debug)]
pub enum ModelFiles {
    /// A folder on disk. Large files are mapped, not read.
    Folder(PathBuf),
    /// Name and content of each file.
    Embedded(&'static [(&'static str, &'static [u8])]),
}

/// A file could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The folder itself is missing.
    #[error("model folder {0} does not exist: check --model")]
    NoFolder(PathBuf),
    /// The path given as a folder is something else.
    #[error("{0} is not a folder: --model takes the folder that holds config.json and *.safetensors")]
    NotAFolder(PathBuf),
    /// A file that every model has is missing.
    #[error("{0} is missing: the model is incomplete, download it again")]
    Missing(String),
    /// The system refused.
    #[error("{file}: {source}")]
    Io {
        /// Path of the file.
        file: String,
        /// The system's words.
        source: io::Error,
    },
}

impl ModelFiles {
    /// A folder on disk, which must exist.
    pub fn folder(path: impl Into<PathBuf>) -> Result<Self, FileError> {
        let path = path.into();
        match std::fs::metadata(&path) {
            Ok(m) if m.is_dir() => Ok(Self::Folder(path)),
            Ok(_) => Err(FileError::NotAFolder(path)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(FileError::NoFolder(path)),
            Err(source) => Err(FileError::Io { file: path.display().to_string(), source }),
        }
    }

    /// The name by which messages call a file.
    pub fn describe(&self, name: &str) -> String {
        match self {
            Self::Folder(path) => path.join(name).display().to_string(),
            Self::Embedded(_) => format!("{name} (embedded)"),
        }
    }

    /// Whether a file is there.
    pub fn contains(&self, name: &str) -> bool {
        match self {
            Self::Folder(path) => path.join(name).is_file(),
            Self::Embedded(files) => files.iter().any(|f| f.0 == name),
        }
    }

    /// The content of a file; mapped if it is on disk.
    pub fn open(&self, name: &str) -> Result<Bytes, FileError> {
        match self {
            Self::Folder(path) => map(&path.join(name)),
            Self::Embedded(files) => files
                .iter()
                .find(|f| f.0 == name)
                .map(|f| Bytes::new(f.1))
                .ok_or_else(|| FileError::Missing(self.describe(name))),
        }
    }
}

/// Maps a file.
pub fn map(path: &Path) -> Result<Bytes, FileError> {
    let name = || path.display().to_string();
    let file = File::open(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => FileError::Missing(name()),
        _ => FileError::Io { file: name(), source },
    })?;
    let io = |source| FileError::Io { file: name(), source };
    if file.metadata().map_err(io)?.len() == 0 {
        return Ok(Bytes::new([]));
    }
    // SAFETY: the mapping is read-only and private to this process. Another process that truncates a model
    // file in use can end this one with SIGBUS; the README says not to.
    let mapping = unsafe { Mmap::map(&file) }.map_err(|source| FileError::Io { file: name(), source })?;
    let file = MappedFile { mapping, path: path.to_owned() };
    Ok(Bytes { range: 0..file.mapping.len(), owner: Owner::Mapped(Arc::new(file)) })
}

/// A shared, immutable range of bytes: of a mapped file, of the program itself, or of memory. Clones share.
#[derive(Clone)]
pub struct Bytes {
    owner: Owner,
    range: Range<usize>,
}

/// What the bytes are part of.
#[derive(Clone)]
enum Owner {
    Mapped(Arc<MappedFile>),
    Other(Arc<dyn AsRef<[u8]> + Send + Sync>),
}

struct MappedFile {
    mapping: Mmap,
    path: PathBuf,
}

/// A mapped file that bytes are part of. It begins at a page of memory, and what is left of its last page can be read.
#[derive(Clone, Debug)]
pub struct Mapping<'a> {
    /// All of it.
    pub file: Bytes,
    /// Where it is.
    pub path: &'a Path,
    /// Where in it the bytes begin.
    pub offset: usize,
}

impl Owner {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(file) => &file.mapping,
            Self::Other(owner) => (**owner).as_ref(),
        }
    }
}

impl Bytes {
    /// All bytes of an owner.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        let range = 0..owner.as_ref().len();
        Self { owner: Owner::Other(Arc::new(owner)), range }
    }

    /// The file that these are mapped from; `None` if they are no part of one.
    pub fn mapping(&self) -> Option<Mapping<'_>> {
        let Owner::Mapped(mapped) = &self.owner else { return None };
        let file = Self { range: 0..mapped.mapping.len(), owner: self.owner.clone() };
        Some(Mapping { file, path: &mapped.path, offset: self.range.start })
    }

    /// A part. Panics if the range lies outside, as slicing does.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(
            range.start <= range.end && range.end <= self.range.len(),
            "{range:?} of {}",
            self.range.len()
        );
        let start = self.range.start;
        Self { owner: self.owner.clone(), range: start + range.start..start + range.end }
    }
}

impl Deref for Bytes {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.owner.bytes()[self.range.clone()]
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Bytes({} bytes)", self.range.len())
    }
}
