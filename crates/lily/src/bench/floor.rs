//! What tokens cost at least: bytes and multiply-adds, and what this machine makes of them in a second.

use anyhow::Result;
use lily_cpu::probe::{Int8Peak, int8_peak, read_bandwidth};
use lily_model::config::Config;
use lily_model::footprint::Footprint;
use lily_model::manifest::{ModuleKind, Part, modules};
use serde_json::{Value, json};

use super::probe::anonymous_memory;

/// The machine at its best, with so many threads.
pub struct Machine {
    /// Threads that were measured together.
    pub threads: usize,
    /// Bytes a second read from memory.
    pub read_bytes_per_s: f64,
    /// Multiply-adds in registers.
    pub int8: Int8Peak,
}

impl Machine {
    /// Measures it.
    pub fn probe(threads: usize) -> Result<Self> {
        let read_bytes_per_s = read_bandwidth(&anonymous_memory(threads)?, threads);
        Ok(Self { threads, read_bytes_per_s, int8: int8_peak(threads) })
    }

    /// For programs.
    pub fn json(&self) -> Value {
        json!({
            "threads": self.threads,
            "read_bytes_per_s": self.read_bytes_per_s,
            "int8_multiply_adds_per_s": self.int8.multiply_adds_per_s,
            "int8_instructions": self.int8.instructions,
        })
    }
}

/// What a model's tokens take on the CPU.
pub struct Work {
    config: Config,
    /// Whether the cache is f32.
    exact: bool,
    /// Weights, read for each decoded token.
    weight_bytes: u64,
    /// Multiply-adds of all matrices but lm_head's, for a token.
    multiply_adds: u64,
    /// Those of lm_head.
    head_multiply_adds: u64,
}

impl Work {
    /// Counts a model's modules.
    pub fn new(config: &Config, exact: bool) -> Self {
        let (mut multiply_adds, mut head_multiply_adds) = (0, 0);
        for module in modules(config) {
            let made = match module.kind {
                ModuleKind::Matrix { rows, cols } => (rows * cols) as u64,
                ModuleKind::Experts { rows, cols, .. } => (config.moe.experts_per_token * rows * cols) as u64,
                _ => 0,
            };
            match module.part {
                // A row is looked up. If it is lm_head too, it is multiplied there.
                Part::Embedding if config.tie_word_embeddings => head_multiply_adds += made,
                Part::Embedding => {}
                Part::Head => head_multiply_adds += made,
                _ => multiply_adds += made,
            }
        }
        let weight_bytes = Footprint::new(config).read_per_token();
        Self { config: config.clone(), exact, weight_bytes, multiply_adds, head_multiply_adds }
    }

    /// Bytes moved for a token, as the mean of `decode` tokens after a prompt: weights read, recurrent and
    /// convolution state read and written, K/V of all earlier positions read.
    pub fn decode_bytes(&self, prompt: u32, decode: u32) -> f64 {
        let state = |tokens: usize| lily_cpu::state_bytes(&self.config, self.exact, tokens) as f64;
        let middle = prompt as usize + decode as usize / 2;
        self.weight_bytes as f64 + state(0) + state(middle)
    }

    /// Multiply-adds of matrices for a token of a prompt; lm_head only meets the last one. Attention scores and the
    /// delta rule are left out: they are not products with weights, and small at the lengths that are measured here.
    pub fn prefill_multiply_adds(&self, prompt: u32) -> f64 {
        self.multiply_adds as f64 + self.head_multiply_adds as f64 / f64::from(prompt.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lily_model::presets::CONFIG_35B_A3B;

    #[test]
    fn the_real_model_takes_what_its_name_and_design_say() {
        let config = Config::from_json(CONFIG_35B_A3B).unwrap();
        let work = Work::new(&config, false);
        // "A3B", about 3e9 active parameters, counts the embedding too: 0.51e9, as lm_head has.
        let head = 248_320 * 2048;
        assert_eq!(work.head_multiply_adds, head);
        assert!((2.3e9..2.6e9).contains(&work.prefill_multiply_adds(u32::MAX)), "{}", work.multiply_adds);
        assert_eq!(work.prefill_multiply_adds(1), (work.multiply_adds + head) as f64);
        // 1,669 MB of weights and 126 MB of recurrent state, a little convolution state and K/V.
        let short = work.decode_bytes(1, 1);
        assert!((1.79e9..1.81e9).contains(&short), "{short}");
        let kv = work.decode_bytes(100_000, 0) - short;
        assert!((20_480e5 * 0.99..40_960e5 * 1.01).contains(&kv), "{kv}");
    }

    #[test]
    fn a_tied_head_costs_the_same() {
        let config = Config::from_json(CONFIG_35B_A3B).unwrap();
        let tied = Work::new(&Config { tie_word_embeddings: true, ..config.clone() }, false);
        assert_eq!(tied.prefill_multiply_adds(7), Work::new(&config, false).prefill_multiply_adds(7));
    }
}
