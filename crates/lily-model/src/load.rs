//! A whole model: configuration, weights and text, opened and checked together.

use std::sync::Arc;

use serde_json::Value;
use tracing::warn;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::config::{Config, ConfigError};
use crate::files::{FileError, ModelFiles};
use crate::generation::GenerationDefaults;
use crate::template::{ChatTemplate, TemplateError};
use crate::tokenizer::{Tokenizer, TokenizerError};
use crate::weights::{Weights, WeightsError};

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const TEMPLATE: &str = "chat_template.jinja";

/// Everything that a model's files say.
pub struct Model {
    /// Shapes and constants.
    pub config: Config,
    /// Weights; matrices stay in the mapped files.
    pub weights: Arc<Weights>,
    /// Text to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    /// The form of a conversation.
    pub template: Arc<ChatTemplate>,
    /// Sampling where a request leaves it open.
    pub generation: GenerationDefaults,
}

/// What is being loaded, for a progress display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Headers of the shards, and small tensors.
    Weights,
    /// The tokenizer.
    Tokenizer,
    /// The chat template.
    Template,
}

impl Stage {
    /// All stages, in order.
    pub const ALL: [Self; 3] = [Self::Weights, Self::Tokenizer, Self::Template];

    /// Name for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Tokenizer => "tokenizer",
            Self::Template => "chat template",
        }
    }
}

/// Why a model can't be loaded. Every message names the file or the tensor.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file is missing or unreadable.
    #[error(transparent)]
    File(#[from] FileError),
    /// A JSON file of settings does not hold what it should.
    #[error("{file}: {source}")]
    Config {
        /// Path of the file.
        file: String,
        /// What is wrong.
        source: ConfigError,
    },
    /// The shards can't be opened.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The shards hold something else than config.json says.
    #[error("{files}: {source}")]
    Weights {
        /// Path of the shards.
        files: String,
        /// What is wrong.
        source: WeightsError,
    },
    /// The tokenizer can't be used.
    #[error("{file}: {source}")]
    Tokenizer {
        /// Path of the file.
        file: String,
        /// What is wrong.
        source: TokenizerError,
    },
    /// The chat template can't be used.
    #[error("{file}: {source}")]
    Template {
        /// Path of the file.
        file: String,
        /// What is wrong.
        source: TemplateError,
    },
    /// There is no chat template.
    #[error(
        "{file} is missing, and {TOKENIZER_CONFIG} has no `chat_template` in its place: the model is incomplete, download it again"
    )]
    NoTemplate {
        /// Path of the file that is missing.
        file: String,
    },
}

impl Model {
    /// Opens and checks all files. `progress` hears what comes next.
    pub fn load(files: &ModelFiles, mut progress: impl FnMut(Stage)) -> Result<Self, LoadError> {
        let config = load_config(files)?;
        let generation = load_generation(files, &config)?;
        progress(Stage::Weights);
        let weights = load_weights(files, &config)?;
        progress(Stage::Tokenizer);
        let tokenizer = load_tokenizer(files)?;
        progress(Stage::Template);
        let template = load_template(files)?;
        let (weights, tokenizer, template) = (Arc::new(weights), Arc::new(tokenizer), Arc::new(template));
        Ok(Self { config, weights, tokenizer, template, generation })
    }
}

/// Reads `config.json` alone.
pub fn load_config(files: &ModelFiles) -> Result<Config, LoadError> {
    let text = files.open(CONFIG)?;
    Config::from_json(&text).map_err(|source| LoadError::Config { file: files.describe(CONFIG), source })
}

/// Opens the shards and gives every tensor its place.
pub fn load_weights(files: &ModelFiles, config: &Config) -> Result<Weights, LoadError> {
    let checkpoint = Checkpoint::open(files)?;
    let named = |source| LoadError::Weights { files: files.describe("*.safetensors"), source };
    Weights::load(&checkpoint, config).map_err(named)
}

fn load_generation(files: &ModelFiles, config: &Config) -> Result<GenerationDefaults, LoadError> {
    let defaults = if files.contains(GENERATION) {
        let named = |source| LoadError::Config { file: files.describe(GENERATION), source };
        GenerationDefaults::from_json(&files.open(GENERATION)?, config).map_err(named)?
    } else {
        GenerationDefaults::neutral(config)
    };
    if defaults.eos_token_ids.is_empty() {
        let file = files.describe(GENERATION);
        warn!("neither {file} nor {CONFIG} has an eos_token_id: answers only end at their token limit");
    }
    Ok(defaults)
}

fn load_tokenizer(files: &ModelFiles) -> Result<Tokenizer, LoadError> {
    let named = |source| LoadError::Tokenizer { file: files.describe(TOKENIZER), source };
    Tokenizer::from_bytes(&files.open(TOKENIZER)?).map_err(named)
}

/// The template has a file of its own; older models carry it in `tokenizer_config.json`.
fn load_template(files: &ModelFiles) -> Result<ChatTemplate, LoadError> {
    let name = if files.contains(TEMPLATE) { TEMPLATE } else { TOKENIZER_CONFIG };
    let named = |source| LoadError::Template { file: files.describe(name), source };
    if name == TOKENIZER_CONFIG {
        let missing = || LoadError::NoTemplate { file: files.describe(TEMPLATE) };
        return ChatTemplate::new(&template_in_tokenizer_config(files)?.ok_or_else(missing)?).map_err(named);
    }
    let bytes = files.open(TEMPLATE)?;
    let not_text = |e| named(TemplateError::Syntax(format!("not UTF-8: {e}")));
    ChatTemplate::new(std::str::from_utf8(&bytes).map_err(not_text)?).map_err(named)
}

fn template_in_tokenizer_config(files: &ModelFiles) -> Result<Option<String>, LoadError> {
    if !files.contains(TOKENIZER_CONFIG) {
        return Ok(None);
    }
    let named =
        |e| LoadError::Config { file: files.describe(TOKENIZER_CONFIG), source: ConfigError::Json(e) };
    let config: Value = serde_json::from_slice(&files.open(TOKENIZER_CONFIG)?).map_err(named)?;
    Ok(config.get("chat_template").and_then(Value::as_str).map(str::to_owned))
}
