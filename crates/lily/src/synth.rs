//! `lily synth`: a random checkpoint.

use std::borrow::Cow;
use std::io::{self, Write};

use anyhow::{Result, bail};
use lily_model::presets::first_layers;

use crate::args::{Synth, UsageError};
use crate::progress;

/// Runs the command.
pub fn synth(args: &Synth) -> Result<()> {
    let config = match args.layers {
        None => Cow::from(args.preset.config_json()),
        Some(layers) => match first_layers(args.preset.config_json(), layers) {
            Ok(config) => config.into(),
            Err(e) => bail!(UsageError(format!("--layers: {e}"))),
        },
    };
    let synth = lily_model::synth::Synth::new(&config, args.seed)?;
    let (name, out) = (args.preset.name(), args.out.display());
    let layers = args.layers.map_or(String::new(), |n| format!(", layers 1 to {n}"));
    let mut stderr = io::stderr();
    writeln!(
        stderr,
        "writing {} bytes of random weights ({name}{layers}, seed {}) to {out}",
        synth.bytes(),
        args.seed
    )?;
    let bar = progress::bytes(synth.bytes(), "writing");
    synth.write(&args.out, &args.preset.other_files(), &|bytes| bar.inc(bytes))?;
    bar.finish_and_clear();
    writeln!(stderr, "done: `lily run --model {out}` runs it; its text means nothing")?;
    Ok(())
}
