//! Published settings of Qwen3.6-35B-A3B, for all that can be known of the model without its files.
//! Apache-2.0, copyright 2026 Alibaba Cloud; see `presets/35b-a3b/LICENSE`.

use serde_json::{Map, Value};

use crate::config::{Config, ConfigError};

/// `config.json` of the MLX 4-bit conversion.
pub const CONFIG_35B_A3B: &[u8] = include_bytes!("../presets/35b-a3b/config.json");

/// `generation_config.json`.
pub const GENERATION_35B_A3B: &[u8] = include_bytes!("../presets/35b-a3b/generation_config.json");

/// Why a config can't be cut down.
#[derive(Debug, thiserror::Error)]
pub enum FirstLayersError {
    /// There are not as many layers.
    #[error("{asked} layers can't be taken: the model has {found}, so take 1 to {found}")]
    Count {
        /// Layers wanted.
        asked: usize,
        /// Layers of the config.
        found: usize,
    },
    /// The config is not one of this architecture.
    #[error("config.json: {0}")]
    Config(#[from] ConfigError),
}

/// The text of a `config.json` with only its first `layers` layers; widths, experts and vocabulary stay. For
/// measuring at the real width where the whole model is too large.
pub fn first_layers(config_json: &[u8], layers: usize) -> Result<Vec<u8>, FirstLayersError> {
    let found = Config::from_json(config_json)?.layers.len();
    if !(1..=found).contains(&layers) {
        return Err(FirstLayersError::Count { asked: layers, found });
    }
    let mut root: Value = serde_json::from_slice(config_json).map_err(ConfigError::from)?;
    if let Some(top) = root.as_object_mut() {
        for key in ["quantization", "quantization_config"] {
            if let Some(forms) = top.get_mut(key).and_then(Value::as_object_mut) {
                forms.retain(|module, _| layer_of(module).is_none_or(|layer| layer < layers));
            }
        }
        match top.get_mut("text_config").and_then(Value::as_object_mut) {
            Some(text) => cut(text, layers),
            // A text-only config has the fields at the top.
            None => cut(top, layers),
        }
    }
    Ok(format!("{root:#}\n").into_bytes())
}

fn cut(text: &mut Map<String, Value>, layers: usize) {
    text.insert("num_hidden_layers".to_owned(), layers.into());
    if let Some(kinds) = text.get_mut("layer_types").and_then(Value::as_array_mut) {
        kinds.truncate(layers);
    }
}

/// The layer of a module of the text model, by its path: 3 for `language_model.model.layers.3.mlp.gate`.
fn layer_of(module: &str) -> Option<usize> {
    module.strip_prefix("language_model.model.layers.")?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LayerKind;

    #[test]
    fn the_first_layers_are_those_of_the_whole_model() {
        let whole = Config::from_json(CONFIG_35B_A3B).unwrap();
        let four = Config::from_json(&first_layers(CONFIG_35B_A3B, 4).unwrap()).unwrap();
        let (gdn, attention) = (LayerKind::Gdn, LayerKind::Attention);
        assert_eq!(four.layers, [gdn, gdn, gdn, attention]);
        let (whole_forms, forms) = (whole.quantization.clone().unwrap(), four.quantization.clone().unwrap());
        // Router and shared gate of each layer have 8 bits.
        assert_eq!((whole_forms.overrides.len(), forms.overrides.len()), (80, 8));
        assert!(forms.overrides.iter().all(|(module, form)| whole_forms.overrides[module] == *form));
        let back = Config { layers: whole.layers.clone(), quantization: whole.quantization.clone(), ..four };
        assert_eq!(back, whole);
    }

    #[test]
    fn a_text_only_config_is_cut_too() {
        let root: Value = serde_json::from_slice(CONFIG_35B_A3B).unwrap();
        let mut text = root["text_config"].clone();
        text["eos_token_id"] = root["eos_token_id"].clone();
        let cut = first_layers(text.to_string().as_bytes(), 1).unwrap();
        assert_eq!(Config::from_json(&cut).unwrap().layers, [LayerKind::Gdn]);
    }

    #[test]
    fn layers_that_are_not_there_are_refused() {
        for asked in [0, 41] {
            let e = first_layers(CONFIG_35B_A3B, asked).unwrap_err().to_string();
            assert_eq!(e, format!("{asked} layers can't be taken: the model has 40, so take 1 to 40"));
        }
    }
}
