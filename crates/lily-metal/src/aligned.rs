//! Copies of files whose tensors lie at odd places, as MLX writes them: a header may have any length there. A GPU reads a mapped
//! file in place only if they are aligned. A copy has the tensors alone, aligned, and is kept beside the file.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use lily_model::files::{Bytes, map};

/// What a tensor begins at a multiple of.
const ALIGNMENT: usize = 256;

/// A copy, and where in it the tensors begin.
pub struct Copy {
    /// Mapped.
    pub file: Bytes,
    /// In the order of the tensors.
    pub offsets: Vec<usize>,
}

/// The copy of a mapped file; made if it isn't there. `tensors`: where they are in the original.
pub fn copy(path: &Path, original: &[u8], tensors: &[Range<usize>]) -> io::Result<Copy> {
    let (mut offsets, mut end) = (Vec::new(), 0usize);
    for tensor in tensors {
        offsets.push(end.next_multiple_of(ALIGNMENT));
        end = end.next_multiple_of(ALIGNMENT) + tensor.len();
    }
    let copy = name(path, tensors)?;
    if fs::metadata(&copy).is_ok_and(|m| m.len() == end as u64) {
        tracing::debug!("using the aligned copy {}", copy.display());
    } else {
        tracing::warn!(
            "{} has tensors at odd places: keeping an aligned copy of {end} bytes beside it, {}; it may be deleted",
            path.display(),
            copy.display()
        );
        write(original, tensors, &copy)?;
    }
    Ok(Copy { file: map(&copy).map_err(io::Error::other)?, offsets })
}

/// The name says what it is a copy of: a file that was changed gets another, and so do other tensors.
fn name(original: &Path, tensors: &[Range<usize>]) -> io::Result<PathBuf> {
    let metadata = fs::metadata(original)?;
    let changed = metadata.modified()?.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    let layout = crc32fast::hash(format!("{} {tensors:?}", metadata.len()).as_bytes());
    let mut name = OsString::from(".");
    name.push(original.file_name().unwrap_or_default());
    name.push(format!(".{changed:x}-{layout:08x}.lily-aligned"));
    Ok(original.with_file_name(name))
}

/// Written under another name and renamed, so that nobody maps half a file.
fn write(original: &[u8], tensors: &[Range<usize>], path: &Path) -> io::Result<()> {
    let part = path.with_extension(format!("{}.part", std::process::id()));
    let write = || {
        let mut file = BufWriter::new(File::create(&part)?);
        let mut end = 0usize;
        for tensor in tensors {
            file.write_all(&[0; ALIGNMENT][..end.next_multiple_of(ALIGNMENT) - end])?;
            file.write_all(&original[tensor.clone()])?;
            end = end.next_multiple_of(ALIGNMENT) + tensor.len();
        }
        file.into_inner()?.sync_all()?;
        fs::rename(&part, path)
    };
    write().inspect_err(|_| {
        // What is left of it is of no use; that it can't be removed changes nothing.
        let _ = fs::remove_file(&part);
    })
}
