//! `generation_config.json`: how the model's makers want tokens to be drawn when a request doesn't say.

use serde_json::Value;

use crate::config::{Config, ConfigError};
use crate::fields::{Fields, invalid};

/// Sampling where a request leaves it open, and the tokens that end a turn. The numbers mean what they mean in
/// [`crate::sample::SampleParams`].
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "documented at SampleParams")]
pub struct GenerationDefaults {
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    /// Tokens that end a turn.
    pub eos_token_ids: Vec<u32>,
}

impl GenerationDefaults {
    /// For a model without the file: its distribution as it is, and the end-of-turn tokens of its config.
    pub fn neutral(config: &Config) -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            eos_token_ids: config.eos_token_ids.clone(),
        }
    }

    /// Reads and checks the text of a `generation_config.json`. A field that is absent is as in
    /// [`GenerationDefaults::neutral`]; `do_sample: false` means greedy, whatever the other fields say.
    pub fn from_json(text: &[u8], config: &Config) -> Result<Self, ConfigError> {
        let root: Value = serde_json::from_slice(text)?;
        let fields = Fields::of(&root, "")?;
        let neutral = Self::neutral(config);
        let share = |key, default| {
            fields.number_or(key, default, "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))
        };
        let mut defaults = Self {
            temperature: fields.number_or(
                "temperature",
                neutral.temperature,
                "a number from 0 (greedy) up",
                |x| x >= 0.0,
            )?,
            top_k: top_k(&fields)?,
            top_p: share("top_p", neutral.top_p)?,
            min_p: share("min_p", neutral.min_p)?,
            repetition_penalty: fields.number_or(
                "repetition_penalty",
                neutral.repetition_penalty,
                "a number above 0",
                |x| x > 0.0,
            )?,
            eos_token_ids: eos_token_ids(&fields, config)?,
        };
        if fields.get("do_sample").is_some() && !fields.bool("do_sample")? {
            defaults.temperature = 0.0;
        }
        Ok(defaults)
    }
}

fn top_k(fields: &Fields<'_>) -> Result<u32, ConfigError> {
    let Some(value) = fields.get("top_k") else { return Ok(0) };
    let k = value.as_u64().and_then(|n| u32::try_from(n).ok());
    k.ok_or_else(|| invalid("top_k", "a whole number from 0 (keep all) up", value))
}

fn eos_token_ids(fields: &Fields<'_>, config: &Config) -> Result<Vec<u32>, ConfigError> {
    let key = "eos_token_id";
    let ids = if fields.get(key).is_some() { fields.token_ids(key)? } else { config.eos_token_ids.clone() };
    match ids.iter().find(|&&id| id as usize >= config.vocab_size) {
        Some(&id) => {
            Err(invalid(key, format!("ids below the vocabulary's size, {}", config.vocab_size), &id.into()))
        }
        None => Ok(ids),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets::{CONFIG_35B_A3B, GENERATION_35B_A3B};

    fn read(json: &str) -> Result<GenerationDefaults, ConfigError> {
        GenerationDefaults::from_json(json.as_bytes(), &Config::from_json(CONFIG_35B_A3B).unwrap())
    }

    #[test]
    fn the_published_file_is_read_in_full() {
        let found = read(std::str::from_utf8(GENERATION_35B_A3B).unwrap()).unwrap();
        let expected = GenerationDefaults {
            temperature: 1.0,
            top_k: 20,
            top_p: 0.95,
            min_p: 0.0,
            repetition_penalty: 1.0,
            eos_token_ids: vec![248_046, 248_044],
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn absent_fields_are_neutral_and_no_sampling_is_greedy() {
        let config = Config::from_json(CONFIG_35B_A3B).unwrap();
        assert_eq!(read("{}").unwrap(), GenerationDefaults::neutral(&config));
        assert_eq!(read(r#"{"top_k": null}"#).unwrap().top_k, 0);
        assert_eq!(read(r#"{"eos_token_id": 7}"#).unwrap().eos_token_ids, [7]);
        assert_eq!(read(r#"{"do_sample": false, "temperature": 0.7}"#).unwrap().temperature, 0.0);
        assert_eq!(read(r#"{"do_sample": true, "temperature": 0.7}"#).unwrap().temperature, 0.7);
    }

    #[test]
    fn bad_values_are_refused_by_name() {
        let cases = [
            (r#"{"temperature": -1}"#, "`temperature` is -1, expected a number from 0 (greedy) up"),
            (r#"{"temperature": "hot"}"#, "`temperature` is \"hot\""),
            (r#"{"top_k": -1}"#, "`top_k` is -1, expected a whole number from 0 (keep all) up"),
            (r#"{"top_k": 1.5}"#, "`top_k` is 1.5"),
            (r#"{"top_p": 1.1}"#, "`top_p` is 1.1, expected a number from 0 to 1"),
            (r#"{"min_p": -0.1}"#, "`min_p` is -0.1"),
            (r#"{"repetition_penalty": 0}"#, "`repetition_penalty` is 0, expected a number above 0"),
            (r#"{"do_sample": 1}"#, "`do_sample` is 1, expected true or false"),
            (
                r#"{"eos_token_id": "end"}"#,
                "`eos_token_id` is \"end\", expected a token id or a list of them",
            ),
            (
                r#"{"eos_token_id": [248320]}"#,
                "`eos_token_id` is 248320, expected ids below the vocabulary's size",
            ),
            ("[]", "`the file` is [], expected an object"),
            ("{", "not valid JSON"),
        ];
        for (json, words) in cases {
            let e = read(json).unwrap_err().to_string();
            assert!(e.contains(words), "{e:?} should say {words:?}");
        }
    }
}
