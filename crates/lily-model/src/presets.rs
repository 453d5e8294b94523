//! Published settings of Qwen3.6-35B-A3B, for all that can be known of the model without its files.
//! Apache-2.0, copyright 2026 Alibaba Cloud; see `presets/35b-a3b/LICENSE`.

/// `config.json` of the MLX 4-bit conversion.
pub const CONFIG_35B_A3B: &[u8] = include_bytes!("../presets/35b-a3b/config.json");

/// `generation_config.json`.
pub const GENERATION_35B_A3B: &[u8] = include_bytes!("../presets/35b-a3b/generation_config.json");
