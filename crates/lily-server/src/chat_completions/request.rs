//! The body of a request, field by field.
//!
//! Each documented field is read here or in [`generation`](crate::generation) and acts, or is in [`ONE_VALUE`] and
//! refused unless it asks for what happens anyway, or is in [`NO_EFFECT`] because it never changes an answer. Others
//! are ignored with a debug log line. `docs/api.md` has the same list for users.

use lily_engine::request::Sampling;
use serde_json::{Map, Value};

use super::tools;
use crate::error::ApiError;
use crate::fields::{Fields, OneValue};
use crate::generation::format::parse_format;
use crate::generation::settings::{Names, Settings, parse_n};
use crate::generation::thinking::{EFFORTS, Thinking};
use crate::generation::turn::Turn;

/// Documented fields that Lily honours for some values only: the JSON texts of these values, and why no other.
const ONE_VALUE: &[OneValue] = &[
    ("audio", &[], "the model writes text only"),
    ("function_call", &[r#""auto""#, r#""none""#], "use tools and tool_choice"),
    ("functions", &["[]"], "use tools"),
    ("modalities", &[r#"["text"]"#], "the model writes text only"),
    ("moderation", &[], "there is no moderation model"),
    ("prediction", &[], "predicted outputs are not supported"),
    ("service_tier", &[r#""auto""#, r#""default""#], "there is one tier"),
    ("store", &["false"], "nothing is stored on this server"),
    ("verbosity", &[r#""medium""#], "ask for a length in the prompt, or set max_tokens"),
    ("web_search_options", &[], "the server has no access to the web"),
];

/// Documented fields that label a request.
const NO_EFFECT: &[&str] = &[
    "metadata",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "user",
];

/// What the shared fields are called here. Both bounds are upper ones, so the lower one holds.
const NAMES: Names =
    Names { max_tokens: &["max_tokens", "max_completion_tokens"], least_tokens: 1, stop: "stop" };

/// A request that was understood.
#[derive(Debug)]
pub(crate) struct ChatCompletionRequest {
    pub turn: Turn,
    /// How many answers.
    pub n: u32,
    pub stream: bool,
    pub include_usage: bool,
    /// A stream tells how far the prompt is read.
    pub return_progress: bool,
    /// Thoughts are part of the content, between their tags.
    pub tagged: bool,
}

impl ChatCompletionRequest {
    /// Reads a body. `defaults` is what sampling fields mean when they are absent.
    pub fn parse(body: &Map<String, Value>, defaults: &Sampling) -> Result<Self, ApiError> {
        let mut fields = Fields::body(body);
        let messages = parse_messages(&mut fields)?;
        let tools = tools::parse(&mut fields)?;
        let effort = fields.one_of("reasoning_effort", &EFFORTS)?.map(|effort| effort != "none");
        let thinking = Thinking::parse(&mut fields, &[("reasoning_effort", effort)], None)?;
        let mut settings = Settings::parse(&mut fields, &NAMES, defaults)?;
        settings.sampling.logprobs = parse_logprobs(&mut fields)?;
        let format = fields.object("response_format")?.map(parse_format).transpose()?.flatten();
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let request = Self {
            turn: Turn { messages, places: Vec::new(), tools, thinking, settings, format },
            n: parse_n(&mut fields)?,
            stream,
            include_usage: parse_include_usage(&mut fields, stream)?,
            return_progress: parse_return_progress(&mut fields, stream)?,
            tagged: fields.one_of("reasoning_format", &["auto", "deepseek", "none"])? == Some("none"),
        };
        fields.settle(ONE_VALUE, NO_EFFECT)?;
        Ok(request)
    }
}

/// The engine brings messages into the template's form; what it would pass over is refused here.
fn parse_messages(fields: &mut Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let messages = fields.array("messages")?.ok_or_else(|| fields.missing("messages"))?;
    if messages.is_empty() {
        return Err(ApiError::field("messages", "expected at least one message, found none"));
    }
    for (i, message) in messages.iter().enumerate() {
        for name in ["audio", "function_call"] {
            if message.get(name).is_some_and(|value| !value.is_null()) {
                let problem = "not supported: only text and tool_calls can be read";
                return Err(ApiError::unsupported(format!("messages[{i}].{name}"), problem));
            }
        }
    }
    Ok(messages.to_vec())
}

/// How many alternatives to report with each token, if tokens are to be reported at all.
fn parse_logprobs(fields: &mut Fields<'_>) -> Result<Option<u32>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=20)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0) as u32)),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::field("top_logprobs", "needs logprobs: true")),
    }
}

/// Whether a stream ends with the usage.
pub(crate) fn parse_include_usage(fields: &mut Fields<'_>, stream: bool) -> Result<bool, ApiError> {
    let Some(mut options) = fields.object("stream_options")? else { return Ok(false) };
    if !stream {
        return Err(ApiError::field("stream_options", "needs stream: true"));
    }
    let include_usage = options.boolean("include_usage")?.unwrap_or(false);
    if options.boolean("include_obfuscation")? == Some(true) {
        let problem = "not supported: streams are not padded";
        return Err(ApiError::unsupported(options.path("include_obfuscation"), problem));
    }
    options.finish();
    Ok(include_usage)
}

/// Whether a stream tells how far the prompt is read.
pub(crate) fn parse_return_progress(fields: &mut Fields<'_>, stream: bool) -> Result<bool, ApiError> {
    match fields.boolean("return_progress")? {
        Some(true) if !stream => Err(ApiError::field("return_progress", "needs stream: true")),
        wanted => Ok(wanted == Some(true)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::generation::tests::{any_json, check_fields};

    fn defaults() -> Sampling {
        Sampling {
            temperature: 0.6,
            top_k: 20,
            top_p: 0.95,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Arc::new([]),
            seed: None,
            logprobs: None,
        }
    }

    /// Parses a request with one message, a tool and these fields.
    fn parse(fields: Value) -> Result<ChatCompletionRequest, ApiError> {
        let mut body = json!({
            "messages": [{"role": "user", "content": "q"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        });
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        ChatCompletionRequest::parse(body.as_object().unwrap(), &defaults())
    }

    fn param(fields: Value) -> String {
        parse(fields.clone()).expect_err(&fields.to_string()).param.unwrap()
    }

    /// All fields of OpenAI's schema (version 2.3.0) and those of other engines that Lily documents, each
    /// with a value that asks for something: it must act, be refused by name, or be a mere label.
    #[test]
    fn every_documented_field_acts_or_is_refused() {
        let fields = [
            ("audio", json!({"voice": "alloy", "format": "wav"})),
            ("cache_prompt", json!(false)),
            ("chat_template_kwargs", json!({"preserve_thinking": true})),
            ("enable_thinking", json!(false)),
            ("frequency_penalty", json!(1)),
            ("grammar", json!("start: \"x\"")),
            ("function_call", json!({"name": "f"})),
            ("functions", json!([{"name": "f"}])),
            ("ignore_eos", json!(true)),
            ("logit_bias", json!({"3": -100})),
            ("logprobs", json!(true)),
            ("max_completion_tokens", json!(3)),
            ("max_tokens", json!(3)),
            ("messages", json!([{"role": "user", "content": "other"}])),
            ("metadata", json!({"a": "b"})),
            ("min_p", json!(0.1)),
            ("modalities", json!(["text", "audio"])),
            ("moderation", json!({"model": "m"})),
            ("n", json!(2)),
            ("parallel_tool_calls", json!(false)),
            ("prediction", json!({"type": "content", "content": "x"})),
            ("presence_penalty", json!(1)),
            ("prompt_cache_key", json!("k")),
            ("prompt_cache_options", json!({"ttl": "1h"})),
            ("prompt_cache_retention", json!("24h")),
            ("reasoning_effort", json!("none")),
            ("reasoning_format", json!("none")),
            ("repetition_penalty", json!(1.1)),
            ("response_format", json!({"type": "json_object"})),
            ("return_progress", json!(true)),
            ("safety_identifier", json!("s")),
            ("seed", json!(3)),
            ("service_tier", json!("flex")),
            ("stop", json!("x")),
            ("store", json!(true)),
            ("stream", json!(true)),
            ("stream_options", json!({"include_usage": true})),
            ("temperature", json!(0)),
            ("thinking_budget", json!(100)),
            ("tool_choice", json!("none")),
            ("tools", json!([{"type": "function", "function": {"name": "g"}}])),
            ("top_k", json!(3)),
            ("top_logprobs", json!(3)),
            ("top_p", json!(0.5)),
            ("user", json!("u")),
            ("verbosity", json!("low")),
            ("web_search_options", json!({})),
        ];
        let parse = |fields| parse(fields).map(|request| format!("{request:?}"));
        check_fields("ChatCompletionRequest", parse, NO_EFFECT, &fields);
    }

    #[test]
    fn values_that_ask_for_nothing_are_accepted() {
        let fields = json!({
            "audio": null, "function_call": "auto", "functions": [], "modalities": ["text"], "n": 1,
            "response_format": {"type": "text"}, "service_tier": "auto", "store": false, "verbosity": "medium",
            "tool_choice": "auto", "parallel_tool_calls": true, "temperature": null, "stop": null, "model": "any",
            "a_field_of_tomorrow": {"x": 1},
        });
        let plain = parse(json!({})).unwrap();
        assert_eq!(format!("{:?}", parse(fields).unwrap()), format!("{plain:?}"));
        assert_eq!(plain.turn.settings.sampling, defaults());
    }

    #[test]
    fn wrong_values_are_named() {
        for (fields, expected) in [
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"temperature": 2.1}), "temperature"),
            (json!({"top_p": -0.1}), "top_p"),
            (json!({"top_k": 1.5}), "top_k"),
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"max_tokens": -1}), "max_tokens"),
            (json!({"max_completion_tokens": 1u64 << 32}), "max_completion_tokens"),
            (json!({"stream": 1}), "stream"),
            (json!({"stream_options": {"include_usage": true}}), "stream_options"),
            (json!({"stream": true, "stream_options": {"include_usage": 1}}), "stream_options.include_usage"),
            (json!({"top_logprobs": 3}), "top_logprobs"),
            (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
            (json!({"seed": 1.5}), "seed"),
            (json!({"logit_bias": {"x": 1}}), "logit_bias"),
            (json!({"logit_bias": {"3": 101}}), "logit_bias.3"),
            (json!({"stop": ""}), "stop"),
            (json!({"stop": vec!["x"; 17]}), "stop"),
            (json!({"model": 3}), "model"),
            (json!({"messages": null}), "messages"),
            (json!({"messages": {}}), "messages"),
            (json!({"messages": []}), "messages"),
            (json!({"messages": [{"role": "assistant", "function_call": {}}]}), "messages[0].function_call"),
            (json!({"tools": [{"type": "custom", "custom": {"name": "x"}}]}), "tools[0].type"),
            (json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}), "tools[0].function.name"),
            (
                json!({"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]}),
                "tools[0].function.strict",
            ),
            (
                json!({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}),
                "tools[0].function.parameters",
            ),
            (json!({"tools": [], "tool_choice": "required"}), "tool_choice"),
            (json!({"tool_choice": "sometimes"}), "tool_choice"),
            (json!({"tool_choice": {"type": "function", "function": {"name": "other"}}}), "tool_choice"),
            (json!({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}), "tool_choice.type"),
            (json!({"n": 0}), "n"),
            (json!({"n": 17}), "n"),
            (json!({"response_format": {"type": "yaml"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
                "response_format.json_schema.schema",
            ),
            (json!({"grammar": {"syntax": "bnf", "definition": "x"}}), "grammar.syntax"),
            (json!({"grammar": {"syntax": "regex"}}), "grammar.definition"),
            (json!({"grammar": "start: \"x\"", "ignore_eos": true}), "ignore_eos"),
            (json!({"thinking_budget": -1}), "thinking_budget"),
            (json!({"thinking_budget": 0, "enable_thinking": true}), "thinking_budget"),
            (json!({"reasoning_effort": "huge"}), "reasoning_effort"),
            (json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs.messages"),
            (
                json!({"chat_template_kwargs": {"enable_thinking": "no"}}),
                "chat_template_kwargs.enable_thinking",
            ),
            (json!({"enable_thinking": true, "reasoning_effort": "none"}), "reasoning_effort"),
        ] {
            assert_eq!(param(fields.clone()), expected, "{fields}");
        }
    }

    #[test]
    fn four_spellings_turn_thinking_off() {
        for fields in [
            json!({"enable_thinking": false}),
            json!({"chat_template_kwargs": {"enable_thinking": false}}),
            json!({"reasoning_effort": "none"}),
            json!({"thinking_budget": 0}),
        ] {
            let thinking = parse(fields).unwrap().turn.thinking;
            assert_eq!(thinking, Thinking { enabled: Some(false), ..Thinking::default() });
        }
        let enabled = |fields| parse(fields).unwrap().turn.thinking.enabled;
        assert_eq!(enabled(json!({"reasoning_effort": "low"})), Some(true));
        assert_eq!(enabled(json!({})), None);
    }

    #[test]
    fn the_lower_of_two_token_limits_holds() {
        let request = parse(json!({"max_tokens": 5, "max_completion_tokens": 3})).unwrap();
        assert_eq!(request.turn.settings.max_tokens, Some(3));
    }

    #[test]
    fn tool_choice_none_hides_the_tools() {
        let tools = |fields| parse(fields).unwrap().turn.tools.definitions.len();
        assert_eq!(tools(json!({})), 1);
        assert_eq!(tools(json!({"tool_choice": "none", "parallel_tool_calls": true})), 0);
    }

    #[test]
    fn signed_and_unsigned_seeds_are_taken() {
        assert_eq!(parse(json!({"seed": -1})).unwrap().turn.settings.sampling.seed, Some(u64::MAX));
        assert_eq!(parse(json!({"seed": u64::MAX})).unwrap().turn.settings.sampling.seed, Some(u64::MAX));
    }

    #[test]
    fn a_negative_top_k_is_off() {
        assert_eq!(parse(json!({"top_k": -1})).unwrap().turn.settings.sampling.top_k, 0);
    }

    proptest! {
        #[test]
        fn whatever_a_field_holds_the_error_points_into_it(
            name in prop::sample::select(vec![
                "messages", "tools", "tool_choice", "stop", "stream_options", "logit_bias", "seed",
                "n", "top_k", "temperature", "max_tokens", "response_format", "grammar",
                "thinking_budget", "chat_template_kwargs", "enable_thinking", "model",
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
