//! How to generate: the fields that mean the same at every endpoint.

use std::sync::Arc;

use lily_engine::constraint::Rule;
use lily_engine::request::{Request, Sampling};
use serde_json::Value;

use super::format;
use crate::error::ApiError;
use crate::fields::{Fields, expected, quote};

/// Most stop strings of a request.
const MAX_STOP: usize = 16;

/// Most answers to one request.
const MAX_ANSWERS: i64 = 16;

/// How to generate.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub sampling: Sampling,
    pub max_tokens: Option<u32>,
    pub stop: Vec<String>,
    pub ignore_eos: bool,
    pub cache_prompt: bool,
    /// From the field `grammar`.
    pub grammar: Option<Rule>,
}

/// What these fields are called at an endpoint.
pub(crate) struct Names {
    /// Upper bounds of the tokens generated: the lowest holds.
    pub max_tokens: &'static [&'static str],
    /// The least that these may be.
    pub least_tokens: i64,
    /// The stop strings.
    pub stop: &'static str,
}

impl Settings {
    /// Reads the fields; `defaults` is what those of sampling mean when they are absent. Log-probabilities are left
    /// to the endpoint, which each ask for them in their own way.
    pub fn parse(fields: &mut Fields<'_>, names: &Names, defaults: &Sampling) -> Result<Self, ApiError> {
        let settings = Self {
            sampling: parse_sampling(fields, defaults)?,
            max_tokens: parse_max_tokens(fields, names)?,
            stop: parse_stop(fields, names.stop)?,
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
            cache_prompt: fields.boolean("cache_prompt")?.unwrap_or(true),
            grammar: format::parse_grammar(fields)?,
        };
        if settings.ignore_eos && settings.grammar.is_some() {
            return Err(ApiError::field(
                "ignore_eos",
                "contradicts grammar, which says where the answer ends",
            ));
        }
        Ok(settings)
    }

    /// The request with these settings.
    pub fn apply(self, request: Request) -> Request {
        let Self { sampling, max_tokens, stop, ignore_eos, cache_prompt, .. } = self;
        Request { sampling, max_tokens, stop, ignore_eos, cache_prompt, ..request }
    }
}

/// How many answers.
pub(crate) fn parse_n(fields: &mut Fields<'_>) -> Result<u32, ApiError> {
    Ok(fields.integer("n", 1..=MAX_ANSWERS)?.map_or(1, |n| n as u32))
}

fn parse_sampling(fields: &mut Fields<'_>, defaults: &Sampling) -> Result<Sampling, ApiError> {
    // A negative top_k turns it off in other engines.
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?;
    Ok(Sampling {
        temperature: fields.number("temperature", 0.0..=2.0)?.unwrap_or(defaults.temperature),
        top_k: top_k.map_or(defaults.top_k, |k| u32::try_from(k).unwrap_or(0)),
        top_p: fields.number("top_p", 0.0..=1.0)?.unwrap_or(defaults.top_p),
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(defaults.min_p),
        repetition_penalty: fields
            .number("repetition_penalty", 0.01..=100.0)?
            .unwrap_or(defaults.repetition_penalty),
        presence_penalty: fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(defaults.presence_penalty),
        frequency_penalty: fields
            .number("frequency_penalty", -2.0..=2.0)?
            .unwrap_or(defaults.frequency_penalty),
        logit_bias: parse_logit_bias(fields)?.map_or_else(|| Arc::clone(&defaults.logit_bias), Arc::from),
        seed: parse_seed(fields)?.or(defaults.seed),
        logprobs: None,
    })
}

/// `{"TOKEN ID": BIAS}`.
fn parse_logit_bias(fields: &mut Fields<'_>) -> Result<Option<Vec<(u32, f32)>>, ApiError> {
    let path = fields.path("logit_bias");
    let Some(entries) = fields.map("logit_bias")? else { return Ok(None) };
    let parse = |(token, bias): (&String, &Value)| {
        let id = token.parse::<u32>().map_err(|_| {
            ApiError::field(
                &*path,
                format!("expected token ids as keys, found {}", quote(&(&**token).into())),
            )
        })?;
        let bias = bias
            .as_f64()
            .filter(|bias| (-100.0..=100.0).contains(bias))
            .ok_or_else(|| expected(&format!("{path}.{id}"), "a number from -100 to 100", bias))?;
        Ok((id, bias as f32))
    };
    entries.iter().map(parse).collect::<Result<_, _>>().map(Some)
}

/// Any 64-bit integer, with or without sign.
fn parse_seed(fields: &mut Fields<'_>) -> Result<Option<u64>, ApiError> {
    let path = fields.path("seed");
    let Some(value) = fields.any("seed") else { return Ok(None) };
    let seed = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    seed.map(Some).ok_or_else(|| expected(&path, "a 64-bit integer", value))
}

fn parse_max_tokens(fields: &mut Fields<'_>, names: &Names) -> Result<Option<u32>, ApiError> {
    let mut lowest = None;
    for name in names.max_tokens {
        let bound =
            fields.integer(name, names.least_tokens..=i64::from(u32::MAX))?.map(|tokens| tokens as u32);
        lowest = lowest.into_iter().chain(bound).min();
    }
    Ok(lowest)
}

fn parse_stop(fields: &mut Fields<'_>, name: &'static str) -> Result<Vec<String>, ApiError> {
    let path = fields.path(name);
    let strings = match fields.any(name) {
        None => return Ok(Vec::new()),
        Some(Value::Array(strings)) => strings.as_slice(),
        Some(one) => std::slice::from_ref(one),
    };
    if strings.len() > MAX_STOP {
        let problem = format!("expected at most {MAX_STOP} strings, found {}", strings.len());
        return Err(ApiError::field(path, problem));
    }
    let read = |value: &Value| match value.as_str() {
        Some(text) if !text.is_empty() => Ok(text.to_owned()),
        _ => Err(expected(&path, "a string that is not empty, or an array of them", value)),
    };
    strings.iter().map(read).collect()
}
