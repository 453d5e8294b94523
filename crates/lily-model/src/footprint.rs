//! Bytes: of the weights by part, of a sequence's state, and of what decoding one token moves.
//!
//! State is counted in values, since how they are held is a backend's choice; ask it what a context costs.

use crate::config::{Config, LayerKind};
use crate::manifest::{ModuleKind, Part, modules};

/// Bytes of one part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartBytes {
    /// The part.
    pub part: Part,
    /// Values in it.
    pub parameters: u64,
    /// Bytes in an MLX checkpoint.
    pub stored: u64,
    /// Bytes read to decode one token: of the routed experts those that are chosen, of the embedding one row.
    pub read_per_token: u64,
}

/// What a model of a config takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Weights, in the order of [`Part`].
    pub parts: Vec<PartBytes>,
    /// Values of recurrent state per sequence; all are read for every token.
    pub recurrent_values: u64,
    /// Values of convolution state per sequence; all are read and written for every token.
    pub conv_values: u64,
    /// Values of K/V per token of a sequence; those of all earlier tokens are read for every token.
    pub kv_values_per_token: u64,
}

const PARTS: [Part; 6] = [Part::Embedding, Part::Gdn, Part::Attention, Part::Moe, Part::Experts, Part::Head];

impl Footprint {
    /// Counts a model's modules.
    pub fn new(config: &Config) -> Self {
        let gdn_layers = config.count(LayerKind::Gdn) as u64;
        let attention_layers = config.count(LayerKind::Attention) as u64;
        Self {
            parts: PARTS.into_iter().map(|part| part_bytes(config, part)).collect(),
            recurrent_values: gdn_layers * config.gdn.state_len() as u64,
            conv_values: gdn_layers * config.gdn.conv_state_len() as u64,
            kv_values_per_token: 2 * attention_layers * config.attention.kv_width() as u64,
        }
    }

    /// Values in the whole model.
    pub fn parameters(&self) -> u64 {
        self.parts.iter().map(|p| p.parameters).sum()
    }

    /// Bytes of the whole checkpoint, without headers.
    pub fn stored(&self) -> u64 {
        self.parts.iter().map(|p| p.stored).sum()
    }

    /// Bytes of weights read to decode one token.
    pub fn read_per_token(&self) -> u64 {
        self.parts.iter().map(|p| p.read_per_token).sum()
    }

    /// Bytes of weights read in a step that decodes a token of each of `sequences` sequences, if each chooses its experts by
    /// chance: an expert is read once, however many choose it.
    pub fn read_per_step(&self, config: &Config, sequences: usize) -> f64 {
        let missed = 1.0 - config.moe.experts_per_token as f64 / config.moe.experts as f64;
        let read = |p: &PartBytes| match p.part {
            Part::Experts => p.stored as f64 * (1.0 - missed.powi(sequences as i32)),
            Part::Embedding => (p.read_per_token * sequences as u64) as f64,
            _ => p.read_per_token as f64,
        };
        self.parts.iter().map(read).sum()
    }
}

fn part_bytes(config: &Config, part: Part) -> PartBytes {
    let modules = modules(config);
    let mine = modules.iter().filter(|m| m.part == part);
    let (mut parameters, mut stored, mut read) = (0, 0, 0);
    for module in mine {
        let bytes = module.bytes(config);
        parameters += module.elements();
        stored += bytes;
        read += match module.kind {
            ModuleKind::Experts { experts, .. } => {
                bytes / experts as u64 * config.moe.experts_per_token as u64
            }
            ModuleKind::Matrix { rows, .. } if part == Part::Embedding => bytes / rows as u64,
            _ => bytes,
        };
    }
    if part == Part::Head && config.tie_word_embeddings {
        read += part_bytes(config, Part::Embedding).stored;
    }
    PartBytes { part, parameters, stored, read_per_token: read }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets::CONFIG_35B_A3B;

    fn real() -> (Config, Footprint) {
        let config = Config::from_json(CONFIG_35B_A3B).unwrap();
        let footprint = Footprint::new(&config);
        (config, footprint)
    }

    fn read(footprint: &Footprint, parts: &[Part]) -> u64 {
        footprint.parts.iter().filter(|p| parts.contains(&p.part)).map(|p| p.read_per_token).sum()
    }

    /// The design gives whole megabytes.
    #[track_caller]
    fn assert_mega(bytes: u64, expected: f64) {
        assert!((bytes as f64 / 1e6 - expected).abs() < 1.0, "{bytes} bytes, expected {expected} MB");
    }

    #[test]
    fn the_real_model_reads_what_the_design_says() {
        let (_, f) = real();
        assert_mega(f.read_per_token(), 1_669.0);
        assert_mega(read(&f, &[Part::Gdn]), 570.0);
        assert_mega(read(&f, &[Part::Attention]), 153.0);
        assert_mega(read(&f, &[Part::Moe, Part::Experts]), 659.0);
        assert_mega(read(&f, &[Part::Head]), 286.0);
        // f32 state, read and written; bf16 K/V.
        assert_mega(2 * 4 * f.recurrent_values, 126.0);
        assert_eq!(2 * f.kv_values_per_token, 20_480);
    }

    #[test]
    fn a_batch_reads_all_but_experts_once() {
        let (config, f) = real();
        let step = |n| f.read_per_step(&config, n);
        assert!((step(1) - f.read_per_token() as f64).abs() < 1.0);
        // Two tokens share 8 of 256 experts by chance: a quarter of one on average.
        let experts = read(&f, &[Part::Experts]) as f64;
        let row = f.parts[0].read_per_token as f64;
        assert!((step(2) - step(1) - row - experts * (1.0 - 8.0 / 256.0)).abs() < 1.0);
        assert!(step(10_000) < f.stored() as f64 + 10_000.0 * row);
    }

    #[test]
    fn the_real_model_has_the_published_size() {
        let (_, f) = real();
        assert_eq!(f.stored(), 19_508_787_456);
        assert_eq!(f.parameters() / 10_000_000, 3_466);
        let experts = f.parts.iter().find(|p| p.part == Part::Experts).unwrap();
        assert_eq!(experts.stored / 10_000_000, 1_811);
    }

    #[test]
    fn every_module_is_in_one_part() {
        let (config, f) = real();
        let all: u64 = modules(&config).iter().map(|m| m.bytes(&config)).sum();
        assert_eq!(f.stored(), all);
    }

    #[test]
    fn a_tied_head_is_stored_once_and_read_in_full() {
        let (mut config, untied) = real();
        config.tie_word_embeddings = true;
        let tied = Footprint::new(&config);
        assert_eq!(tied.read_per_token(), untied.read_per_token());
        assert_eq!(untied.stored() - tied.stored(), untied.parts[0].stored);
    }
}
