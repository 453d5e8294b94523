//! The body of a request, field by field; see `chat_completions/request.rs` for the rules.

use lily_engine::constraint::Rule;
use lily_engine::request::Sampling;
use serde_json::{Map, Value, json};

use super::tools::ToolNames;
use super::{items, tools};
use crate::error::ApiError;
use crate::fields::{Fields, OneValue};
use crate::generation::format::{Format, parse_format};
use crate::generation::logprobs::short;
use crate::generation::settings::{Names, Settings};
use crate::generation::thinking::{EFFORTS, Thinking};
use crate::generation::turn::Turn;
use crate::warnings::Warnings;

/// Documented fields that Lily honours for some values only.
const ONE_VALUE: &[OneValue] = &[
    ("background", &["false"], "nothing is stored on this server"),
    ("context_management", &["[]"], "send the conversation as it is to be read"),
    ("conversation", &[], "nothing is stored on this server: send the whole conversation as input"),
    ("moderation", &[], "there is no moderation model"),
    ("previous_response_id", &[], "nothing is stored on this server: send the whole conversation as input"),
    ("prompt", &[], "there are no stored prompts"),
    ("service_tier", &[r#""auto""#, r#""default""#], "there is one tier"),
    ("truncation", &[r#""disabled""#], "a conversation is never cut"),
];

/// Documented fields that never change an answer here. Nothing is stored, whatever `store` says; the server calls no
/// tools, so `max_tool_calls` has nothing to bound.
const NO_EFFECT: &[&str] = &[
    "client_metadata",
    "max_tool_calls",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "store",
    "user",
];

const NAMES: Names = Names { max_tokens: &["max_output_tokens"], least_tokens: 1, stop: "stop" };

/// What `include` may ask for with effect.
const LOGPROBS: &str = "message.output_text.logprobs";
const ENCRYPTED: &str = "reasoning.encrypted_content";

/// A request that was understood.
#[derive(Debug)]
pub(super) struct ResponsesRequest {
    pub turn: Turn,
    pub told: Told,
    pub stream: bool,
    pub warnings: Warnings,
}

/// What the answer repeats of its request, and how it is told.
#[derive(Debug)]
pub(super) struct Told {
    /// Members of the answer.
    pub members: Map<String, Value>,
    /// How calls are told.
    pub tools: ToolNames,
    /// Thoughts come a second time, in the member that clients keep.
    pub encrypted: bool,
}

impl ResponsesRequest {
    /// Reads a body. `defaults` is what sampling fields mean when they are absent, `model` the name of the model.
    pub fn parse(body: &Map<String, Value>, defaults: &Sampling, model: &str) -> Result<Self, ApiError> {
        let mut fields = Fields::body(body);
        let mut warnings = Warnings::default();
        let (messages, places) = items::parse(&mut fields, &mut warnings)?;
        let (tools, names) = tools::parse(&mut fields, &mut warnings)?;
        let effort = parse_effort(&mut fields)?;
        let mut thinking = Thinking::parse(&mut fields, &[("reasoning.effort", effort)], None)?;
        thinking.keep_thoughts();
        let mut settings = Settings::parse(&mut fields, &NAMES, defaults)?;
        let include = parse_include(&mut fields, &mut warnings)?;
        let top = fields.integer("top_logprobs", 0..=20)?.map(|n| n as u32);
        let logprobs = include.contains(&LOGPROBS) || top.is_some();
        settings.sampling.logprobs = logprobs.then_some(top.unwrap_or(0));
        let format = parse_text(&mut fields)?;
        let stream = fields.boolean("stream")?.unwrap_or(false);
        parse_stream_options(&mut fields)?;
        let encrypted = include.contains(&ENCRYPTED);
        fields.settle(ONE_VALUE, NO_EFFECT)?;
        let members = members(body, model, &settings, format.as_ref());
        let told = Told { members, tools: names, encrypted };
        Ok(Self {
            turn: Turn { messages, places, tools, thinking, settings, format },
            told,
            stream,
            warnings,
        })
    }
}

/// Whether to think. The model has no levels, and no summaries: its thought itself is told.
fn parse_effort(fields: &mut Fields<'_>) -> Result<Option<bool>, ApiError> {
    let Some(mut reasoning) = fields.object("reasoning")? else { return Ok(None) };
    let effort = reasoning.one_of("effort", &EFFORTS)?.map(|effort| effort != "none");
    for name in ["summary", "generate_summary"] {
        reasoning.one_of(name, &["auto", "concise", "detailed"])?;
    }
    reasoning.finish();
    Ok(effort)
}

fn parse_include<'a>(fields: &mut Fields<'a>, warnings: &mut Warnings) -> Result<Vec<&'a str>, ApiError> {
    let mut include = Vec::new();
    for (i, item) in fields.array("include")?.unwrap_or_default().iter().enumerate() {
        match item.as_str() {
            Some(name @ (LOGPROBS | ENCRYPTED)) => include.push(name),
            _ => warnings.ignored(&format!("include[{i}]"), "there is nothing of the kind in an answer"),
        }
    }
    Ok(include)
}

fn parse_text(fields: &mut Fields<'_>) -> Result<Option<Format>, ApiError> {
    let Some(mut text) = fields.object("text")? else { return Ok(None) };
    let format = text.object("format")?.map(parse_format).transpose()?.flatten();
    // A wish, of which no answer can be said to be wrong.
    text.one_of("verbosity", &["low", "medium", "high"])?;
    text.finish();
    Ok(format)
}

fn parse_stream_options(fields: &mut Fields<'_>) -> Result<(), ApiError> {
    let Some(mut options) = fields.object("stream_options")? else { return Ok(()) };
    if options.boolean("include_obfuscation")? == Some(true) {
        let problem = "not supported: streams are not padded";
        return Err(ApiError::unsupported(options.path("include_obfuscation"), problem));
    }
    options.finish();
    Ok(())
}

/// The members of an answer that its request determines.
fn members(
    body: &Map<String, Value>,
    model: &str,
    settings: &Settings,
    format: Option<&Format>,
) -> Map<String, Value> {
    let given =
        |name: &str, default: Value| body.get(name).filter(|v| !v.is_null()).cloned().unwrap_or(default);
    let format = match format {
        None => json!({"type": "text"}),
        Some((Rule::JsonSchema(_), _)) => body["text"]["format"].clone(),
        Some(_) => Value::Null,
    };
    let members = json!({
        "model": model,
        "instructions": given("instructions", Value::Null),
        "max_output_tokens": settings.max_tokens,
        "max_tool_calls": given("max_tool_calls", Value::Null),
        "metadata": given("metadata", json!({})),
        "parallel_tool_calls": given("parallel_tool_calls", true.into()),
        "previous_response_id": null,
        "reasoning": given("reasoning", json!({"effort": null, "summary": null})),
        "service_tier": "default",
        "store": false,
        "temperature": short(settings.sampling.temperature),
        "text": {"format": format},
        "tool_choice": given("tool_choice", "auto".into()),
        "tools": given("tools", json!([])),
        "top_logprobs": settings.sampling.logprobs.unwrap_or(0),
        "top_p": short(settings.sampling.top_p),
        "truncation": "disabled",
        "user": given("user", Value::Null),
    });
    match members {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use lily_engine::testing::greedy;
    use proptest::prelude::*;

    use super::*;
    use crate::generation::tests::{any_json, check_fields};

    /// All but what is merely repeated in the answer.
    fn parse(fields: Value) -> Result<String, ApiError> {
        let tool = json!({"type": "function", "name": "f", "parameters": {"type": "object"}});
        let mut body = json!({"input": "q", "tools": [tool]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let request = ResponsesRequest::parse(body.as_object().unwrap(), &greedy(), "m")?;
        Ok(format!("{:?} {:?} {}", request.turn, request.stream, request.told.encrypted))
    }

    #[test]
    fn every_documented_field_acts_or_is_refused() {
        let fields = [
            ("background", json!(true)),
            ("cache_prompt", json!(false)),
            ("chat_template_kwargs", json!({"preserve_thinking": false})),
            ("client_metadata", json!({"a": "b"})),
            ("context_management", json!([{"type": "compaction"}])),
            ("conversation", json!("c")),
            ("grammar", json!("start: \"x\"")),
            ("include", json!(["reasoning.encrypted_content"])),
            ("input", json!("other")),
            ("instructions", json!("s")),
            ("max_output_tokens", json!(3)),
            ("max_tool_calls", json!(3)),
            ("metadata", json!({"a": "b"})),
            ("moderation", json!({"model": "m"})),
            ("parallel_tool_calls", json!(false)),
            ("previous_response_id", json!("resp_1")),
            ("prompt", json!({"id": "p"})),
            ("prompt_cache_key", json!("k")),
            ("prompt_cache_options", json!({"ttl": "1h"})),
            ("prompt_cache_retention", json!("24h")),
            ("reasoning", json!({"effort": "none"})),
            ("safety_identifier", json!("s")),
            ("seed", json!(3)),
            ("service_tier", json!("flex")),
            ("stop", json!("x")),
            ("store", json!(true)),
            ("stream", json!(true)),
            ("stream_options", json!({"include_obfuscation": true})),
            ("temperature", json!(0.5)),
            ("text", json!({"format": {"type": "json_object"}})),
            ("tool_choice", json!("required")),
            ("tools", json!([{"type": "custom", "name": "g"}])),
            ("top_logprobs", json!(2)),
            ("top_p", json!(0.5)),
            ("truncation", json!("auto")),
            ("user", json!("u")),
        ];
        check_fields("ResponsesRequest", parse, NO_EFFECT, &fields);
    }

    proptest! {
        #[test]
        fn whatever_a_field_holds_the_error_points_into_it(
            name in prop::sample::select(vec![
                "input", "instructions", "tools", "tool_choice", "reasoning", "text", "include",
                "stream_options",
            ]),
            value in any_json(),
        ) {
            if let Err(error) = parse(json!({name: value})) {
                let param = error.param.unwrap();
                prop_assert!(param.starts_with(name), "{param} for {name}");
                prop_assert!(error.message.starts_with(&param));
            }
        }
    }
}
