//! What tokens cost at least: bytes and multiply-adds, and what this machine makes of them in a second.

use anyhow::Result;
use lily_cpu::probe::{Int8Peak, int8_peak, read_bandwidth};
use lily_model::config::Config;
use lily_model::footprint::Footprint;
use lily_model::manifest::{ModuleKind, Part, modules};
use serde_json::{Value, json};

use super::probe::anonymous_memory;

/// The device at its best.
pub enum Machine {
    /// So many threads of the processor together.
    Cpu {
        /// Threads.
        threads: usize,
        /// Bytes a second read from memory.
        read_bytes_per_s: f64,
        /// Multiply-adds in registers.
        int8: Int8Peak,
    },
    /// A GPU.
    Gpu {
        /// Bytes a second read and written while copying.
        copy_bytes_per_s: f64,
    },
}

impl Machine {
    /// Measures the processor.
    pub fn probe(threads: usize) -> Result<Self> {
        let read_bytes_per_s = read_bandwidth(&anonymous_memory(threads)?, threads);
        Ok(Self::Cpu { threads, read_bytes_per_s, int8: int8_peak(threads) })
    }

    /// Bytes a second.
    pub fn bytes_per_s(&self) -> f64 {
        match self {
            Self::Cpu { read_bytes_per_s: bytes, .. } | Self::Gpu { copy_bytes_per_s: bytes } => *bytes,
        }
    }

    /// Multiply-adds a second, where they were measured.
    pub fn multiply_adds_per_s(&self) -> Option<f64> {
        match self {
            Self::Cpu { int8, .. } => Some(int8.multiply_adds_per_s),
            Self::Gpu { .. } => None,
        }
    }

    /// For people.
    pub fn text(&self) -> String {
        match self {
            Self::Cpu { threads, read_bytes_per_s, int8 } => format!(
                "this machine, {threads} threads: reads {:.1} GB/s, {:.0} G int8 multiply-adds/s ({})",
                read_bytes_per_s / 1e9,
                int8.multiply_adds_per_s / 1e9,
                int8.instructions
            ),
            Self::Gpu { copy_bytes_per_s } => {
                format!("this GPU: copies {:.0} GB/s, read and written", copy_bytes_per_s / 1e9)
            }
        }
    }

    /// For programs.
    pub fn json(&self) -> Value {
        match self {
            Self::Cpu { threads, read_bytes_per_s, int8 } => json!({
                "threads": threads,
                "read_bytes_per_s": read_bytes_per_s,
                "int8_multiply_adds_per_s": int8.multiply_adds_per_s,
                "int8_instructions": int8.instructions,
            }),
            Self::Gpu { copy_bytes_per_s } => json!({"copy_bytes_per_s": copy_bytes_per_s}),
        }
    }
}

/// What a model's tokens take.
pub struct Work {
    config: Config,
    footprint: Footprint,
    /// Multiply-adds of all matrices but lm_head's, for a token.
    multiply_adds: u64,
    /// Those of lm_head.
    head_multiply_adds: u64,
}

impl Work {
    /// Counts a model's modules.
    pub fn new(config: &Config) -> Self {
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
        let footprint = Footprint::new(config);
        Self { config: config.clone(), footprint, multiply_adds, head_multiply_adds }
    }

    /// Bytes that must be moved for a token in steps of `batch`, as the mean of `decode` tokens after a prompt: weights and recurrent
    /// state read (it need not be written for every token, and on GPUs is not), convolution state read and written, K/V of all earlier
    /// positions read. `kv_bytes`: those of a number of K/V.
    pub fn decode_bytes(&self, prompt: u32, decode: u32, batch: u32, kv_bytes: u64) -> f64 {
        let f = &self.footprint;
        let fixed = 4 * (f.recurrent_values + 2 * f.conv_values);
        let middle = u64::from(prompt) + u64::from(decode) / 2;
        let state = fixed + kv_bytes * f.kv_values_per_token * middle;
        f.read_per_step(&self.config, batch as usize) / f64::from(batch) + state as f64
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
        let work = Work::new(&config);
        // "A3B", about 3e9 active parameters, counts the embedding too: 0.51e9, as lm_head has.
        let head = 248_320 * 2048;
        assert_eq!(work.head_multiply_adds, head);
        assert!((2.3e9..2.6e9).contains(&work.prefill_multiply_adds(u32::MAX)), "{}", work.multiply_adds);
        assert_eq!(work.prefill_multiply_adds(1), (work.multiply_adds + head) as f64);
        // 1,669 MB of weights and 63 MB of recurrent state, a little convolution state and K/V.
        let short = work.decode_bytes(1, 1, 1, 2);
        assert!((1.73e9..1.75e9).contains(&short), "{short}");
        let kv = work.decode_bytes(100_000, 0, 1, 2) - short;
        assert!((20_480e5 * 0.99..20_480e5 * 1.01).contains(&kv), "{kv}");
        // Weights but experts' are shared: 8 sequences move 8 times the state, 1.7 GB less 0.6 once, and 7.2 times 0.57 GB.
        let eight = 8.0 * work.decode_bytes(1, 1, 8, 2);
        assert!((5.5e9..6.5e9).contains(&eight), "{eight}");
    }

    #[test]
    fn a_tied_head_costs_the_same() {
        let config = Config::from_json(CONFIG_35B_A3B).unwrap();
        let tied = Work::new(&Config { tie_word_embeddings: true, ..config.clone() });
        assert_eq!(tied.prefill_multiply_adds(7), Work::new(&config).prefill_multiply_adds(7));
    }
}
