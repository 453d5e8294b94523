//! Which model, and what its files are.

use std::io::{self, Write};
use std::path::Path;

use anyhow::Result;
use lily_model::config::Config;
use lily_model::files::ModelFiles;
use lily_model::load::{LoadError, Model, load_config};
use lily_model::presets::{CONFIG_35B_A3B, GENERATION_35B_A3B};

use crate::args::{Global, Preset};
use crate::progress;

/// Files of the demonstration model.
pub const DEMO: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/demo.rs"));

/// Said whenever it is used.
const DEMO_NOTICE: &str = "Using the built-in demonstration model, which is very small: it shows Lily at work and \
    knows little. --model FOLDER takes a real one.";

/// A model that was chosen, but not loaded.
pub struct Source {
    /// Its files.
    pub files: ModelFiles,
    /// Its name.
    pub name: String,
}

impl Source {
    /// The folder given on the command line, or the demonstration model.
    pub fn new(global: &Global) -> Result<Self> {
        match global.model.as_deref().filter(|folder| !folder.as_os_str().is_empty()) {
            Some(folder) => Ok(Self { files: ModelFiles::folder(folder)?, name: folder_name(folder) }),
            None => Ok(Self { files: ModelFiles::Embedded(DEMO), name: "lily-demo".to_owned() }),
        }
    }

    /// Reads the configuration alone.
    pub fn config(&self) -> Result<Config, LoadError> {
        load_config(&self.files)
    }

    /// Says so if this is only the demonstration model.
    pub fn announce(&self) {
        if matches!(self.files, ModelFiles::Embedded(_)) {
            // There is nobody to tell if this fails.
            let _ = writeln!(io::stderr(), "{DEMO_NOTICE}");
        }
    }

    /// Loads everything, with a sign of life on a terminal.
    pub fn load(&self) -> Result<Model> {
        self.announce();
        let spinner = progress::spinner();
        let model =
            Model::load(&self.files, |stage| spinner.set_message(format!("loading {}", stage.name())));
        spinner.finish_and_clear();
        Ok(model?)
    }
}

/// The last part of a path, with `.` and links resolved.
fn folder_name(folder: &Path) -> String {
    let whole = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    whole.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

impl Preset {
    /// Name, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Demo => "demo",
            Self::Qwen35bA3b => "35b-a3b",
        }
    }

    /// Text of its config.json.
    pub fn config_json(self) -> &'static [u8] {
        match self {
            Self::Demo => demo_file("config.json"),
            Self::Qwen35bA3b => CONFIG_35B_A3B,
        }
    }

    /// Files that a checkpoint of it needs besides config and weights, so that it can be run. The tokenizer and
    /// the template are the demonstration model's for all presets: the real ones are too large to carry.
    pub fn other_files(self) -> Vec<(&'static str, &'static [u8])> {
        let generation = match self {
            Self::Demo => demo_file("generation_config.json"),
            Self::Qwen35bA3b => GENERATION_35B_A3B,
        };
        let of_demo = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];
        let mut files: Vec<_> = of_demo.into_iter().map(|name| (name, demo_file(name))).collect();
        files.push(("generation_config.json", generation));
        files
    }
}

/// A file of the demonstration model. The build sees to it that all that are asked for are there.
fn demo_file(name: &str) -> &'static [u8] {
    DEMO.iter().find(|file| file.0 == name).map_or(&[], |file| file.1)
}
