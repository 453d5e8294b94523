//! `lily logits`: the scores of every next token of a sequence, in a file.

use std::fs;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use lily_cpu::reference::{Reference, State};
use lily_cpu::tap::no_tap;
use lily_model::backend::{Backend, Batch, Output, Rows, Segment, SegmentError, Tokens, Want};
use lily_model::load::load_weights;
use lily_model::sample::first_non_finite;
use serde_json::json;

use crate::args::{Global, Logits, UsageError};
use crate::device::{self, Size};
use crate::progress;
use crate::session::context;
use crate::source::Source;

/// Most bytes of logits held at once.
const CHUNK_BYTES: usize = 64 << 20;
/// Most tokens of a step.
const MAX_CHUNK: usize = 256;

/// Runs the command.
pub fn logits(args: &Logits, global: &Global) -> Result<()> {
    let source = Source::new(global)?;
    let config = source.config()?;
    let ids = read_ids(&args.ids, config.vocab_size)?;
    let tokens = u32::try_from(ids.len()).unwrap_or(u32::MAX);
    if let Err(e) = context(Some(tokens), &config) {
        bail!(UsageError(format!("{} holds {tokens} ids: {e}", args.ids.display())));
    }
    source.announce();
    let weights = Arc::new(load_weights(&source.files, &config)?);
    let file = LogitsFile::create(&args.out, ids.len(), config.vocab_size)?;
    if args.reference {
        let reference = Reference { config: &config, weights: &weights };
        return file.fill(|write| by_reference(&reference, &ids, write));
    }
    let chunk = rows_at_once(config.vocab_size);
    let size = Size { context: tokens, sequences: 1, snapshot_bytes: 0, chunk: Some(chunk as u32) };
    let mut backend = device::open(global, &config, &weights, size)?;
    file.fill(|write| by_backend(&mut *backend, &ids, chunk, write))
}

/// Ids separated by commas or white space, each below `vocab`.
fn read_ids(file: &Path, vocab: usize) -> Result<Vec<u32>> {
    let text = fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let words = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty());
    let id = |(i, word): (usize, &str)| match word.parse::<u32>() {
        Ok(id) if (id as usize) < vocab => Ok(id),
        _ => bail!("{}: entry {i} is {word:?}, expected a token id below {vocab}", file.display()),
    };
    let ids = words.enumerate().map(id).collect::<Result<Vec<_>>>()?;
    if ids.is_empty() {
        bail!("{} holds no token ids: write some, separated by commas or white space", file.display());
    }
    Ok(ids)
}

/// Tokens of a step, so that their logits take no more than [`CHUNK_BYTES`].
pub fn rows_at_once(vocab: usize) -> usize {
    (CHUNK_BYTES / 4 / vocab).clamp(1, MAX_CHUNK)
}

/// Takes rows of logits.
type Sink<'a> = &'a mut dyn FnMut(&[f32]) -> Result<()>;

fn by_reference(reference: &Reference<'_>, ids: &[u32], write: Sink<'_>) -> Result<()> {
    let mut state = State::default();
    for (position, &id) in ids.iter().enumerate() {
        let logits = reference.logits(&reference.step(id, &mut state, &mut no_tap));
        if first_non_finite(&logits).is_some() {
            bail!(SegmentError::NonFinite { position: position as u32 });
        }
        write(&logits)?;
    }
    Ok(())
}

/// Feeds `ids` to a sequence of its own, `chunk` at a time, and hands out the logits of all positions in order.
pub fn by_backend(backend: &mut dyn Backend, ids: &[u32], chunk: usize, write: Sink<'_>) -> Result<()> {
    let seq = backend.create(ids.len() as u32)?;
    for (i, part) in ids.chunks(chunk).enumerate() {
        let start = (i * chunk) as u32;
        let segment =
            Segment { seq, start, tokens: Tokens::Ids(part.to_vec()), want: Want::Logits(Rows::All) };
        let ticket = backend.forward(&Batch { segments: vec![segment] })?;
        for output in backend.wait(ticket)? {
            if let Output::Logits(rows) = output? {
                write(&rows)?;
            }
        }
    }
    backend.free(seq)?;
    Ok(())
}

/// A safetensors file with one tensor, which appears under its name when it is whole.
struct LogitsFile<'a> {
    path: &'a Path,
    temporary: tempfile::NamedTempFile,
    rows: usize,
    vocab: usize,
}

impl<'a> LogitsFile<'a> {
    fn create(path: &'a Path, rows: usize, vocab: usize) -> Result<Self> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut builder = tempfile::Builder::new();
        // As any new file has, not the restricted ones of temporary files.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let temporary =
            builder.tempfile_in(folder).with_context(|| format!("{} can't be written", path.display()))?;
        Ok(Self { path, temporary, rows, vocab })
    }

    /// Writes the rows that `compute` gives out, which must be as many as promised.
    fn fill(self, compute: impl FnOnce(Sink<'_>) -> Result<()>) -> Result<()> {
        let named = || format!("{} can't be written", self.path.display());
        let data_bytes = self.rows * self.vocab * 4;
        let info = json!({"dtype": "F32", "shape": [self.rows, self.vocab], "data_offsets": [0, data_bytes]});
        let mut header = json!({"logits": info}).to_string();
        while !header.len().is_multiple_of(8) {
            header.push(' ');
        }
        let bar = progress::counted(self.rows as u64, "computing", "tokens");
        let mut out = BufWriter::new(self.temporary.as_file());
        out.write_all(&(header.len() as u64).to_le_bytes()).with_context(named)?;
        out.write_all(header.as_bytes()).with_context(named)?;
        compute(&mut |rows| {
            bar.inc((rows.len() / self.vocab) as u64);
            rows.iter().try_for_each(|x| out.write_all(&x.to_le_bytes())).with_context(named)
        })?;
        out.flush().with_context(named)?;
        drop(out);
        bar.finish_and_clear();
        self.temporary.persist(self.path).map_err(|e| e.error).with_context(named)?;
        Ok(())
    }
}
