//! `lily synth`: a random checkpoint.

use std::io::{self, Write};

use anyhow::Result;

use crate::args::Synth;
use crate::progress;

/// Runs the command.
pub fn synth(args: &Synth) -> Result<()> {
    let synth = lily_model::synth::Synth::new(args.preset.config_json(), args.seed)?;
    let (name, out) = (args.preset.name(), args.out.display());
    let mut stderr = io::stderr();
    writeln!(
        stderr,
        "writing {} bytes of random weights ({name}, seed {}) to {out}",
        synth.bytes(),
        args.seed
    )?;
    let bar = progress::bytes(synth.bytes(), "writing");
    synth.write(&args.out, &args.preset.other_files(), &|bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    writeln!(stderr, "done: `lily run --model {out}` runs it; its text means nothing")?;
    Ok(())
}
