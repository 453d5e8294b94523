//! The body of a request, field by field; see `chat_completions/request.rs` for the rules.

use lily_engine::request::Sampling;
use serde_json::{Map, Value};

use super::conversation;
use crate::error::ApiError;
use crate::fields::{Fields, OneValue, expected, quote};
use crate::generation::format::{Format, parse_format};
use crate::generation::settings::{Names, Settings};
use crate::generation::thinking::Thinking;
use crate::generation::tools::{self, Choice, Tools};
use crate::generation::turn::Turn;
use crate::warnings::Warnings;

/// Documented fields that Lily honours for some values only.
const ONE_VALUE: &[OneValue] = &[
    ("container", &[], "there are no containers"),
    ("mcp_servers", &["[]"], "the server calls no tools itself"),
    ("service_tier", &[r#""auto""#, r#""standard_only""#], "there is one tier"),
    ("speed", &[r#""standard""#], "there is one speed"),
];

/// Documented fields that never change an answer here. Clients of this API send `context_management` with every
/// request, and ask by it to save what they pay for.
const NO_EFFECT: &[&str] = &[
    "cache_control",
    "context_management",
    "diagnostics",
    "inference_geo",
    "metadata",
    "user_profile_id",
    "workspace_id",
];

const NAMES: Names = Names { max_tokens: &["max_tokens"], least_tokens: 1, stop: "stop_sequences" };

/// A request that was understood.
#[derive(Debug)]
pub(super) struct MessagesRequest {
    pub turn: Turn,
    /// The text of thoughts is not shown.
    pub omits_thought: bool,
    pub stream: bool,
    pub warnings: Warnings,
}

impl MessagesRequest {
    /// Reads a body. `defaults` is what sampling fields mean when they are absent.
    pub fn parse(body: &Map<String, Value>, defaults: &Sampling) -> Result<Self, ApiError> {
        let mut fields = Fields::body(body);
        let mut warnings = Warnings::default();
        let mut messages = conversation::system(fields.any("system"))?;
        let mut places = vec!["system".to_owned(); messages.len()];
        let own = fields.array("messages")?.ok_or_else(|| fields.missing("messages"))?;
        conversation::read(own, &mut messages, &mut places)?;
        let tools = parse_tools(&mut fields, &mut warnings)?;
        let (thinking, omits_thought) = parse_thinking(&mut fields)?;
        let settings = Settings::parse(&mut fields, &NAMES, defaults)?;
        let format = parse_output(&mut fields)?;
        let stream = fields.boolean("stream")?.unwrap_or(false);
        fields.settle(ONE_VALUE, NO_EFFECT)?;
        let turn = Turn { messages, places, tools, thinking, settings, format };
        Ok(Self { turn, omits_thought, stream, warnings })
    }
}

/// `thinking`: off unless asked for, as in this API; with a budget or without. And whether its text is omitted.
fn parse_thinking(fields: &mut Fields<'_>) -> Result<(Thinking, bool), ApiError> {
    let (said, budget, omitted) = match fields.object("thinking")? {
        None => (None, None, false),
        Some(mut thinking) => {
            let kind = thinking.one_of("type", &["enabled", "disabled", "adaptive"])?;
            let kind = kind.ok_or_else(|| thinking.missing("type"))?;
            let budget = thinking.integer("budget_tokens", 1..=i64::from(u32::MAX))?.map(|n| n as u32);
            let display = thinking.one_of("display", &["summarized", "omitted"])?;
            thinking.finish();
            (Some(kind != "disabled"), budget, display == Some("omitted"))
        }
    };
    let mut thinking = Thinking::parse(fields, &[("thinking", said)], budget)?;
    thinking.enabled.get_or_insert(false);
    thinking.keep_thoughts();
    Ok((thinking, omitted))
}

/// `output_config`, and `output_format`, an older name for a part of it. The model has no levels of effort.
fn parse_output(fields: &mut Fields<'_>) -> Result<Option<Format>, ApiError> {
    let mut format = fields.object("output_format")?.map(parse_format).transpose()?.flatten();
    if let Some(mut config) = fields.object("output_config")? {
        config.one_of("effort", &["low", "medium", "high", "xhigh", "max"])?;
        if let Some(inner) = config.object("format")? {
            format = parse_format(inner)?;
        }
        config.finish();
    }
    Ok(format)
}

fn parse_tools(fields: &mut Fields<'_>, warnings: &mut Warnings) -> Result<Tools, ApiError> {
    let mut all = Vec::new();
    for (i, tool) in fields.array("tools")?.unwrap_or_default().iter().enumerate() {
        let mut tool = Fields::nested(format!("tools[{i}]"), tool)?;
        if let Some(kind) = tool.string("type")?.filter(|kind| *kind != "custom") {
            let why = format!("tools of type {} are not known", quote(&kind.into()));
            warnings.ignored(&tool.path("type"), &why);
            continue;
        }
        let name = tools::parse_name(&mut tool)?;
        let description = tool.string("description")?;
        let schema = tool.map("input_schema")?.ok_or_else(|| tool.missing("input_schema"))?;
        let strict = tool.boolean("strict")?;
        tool.any("cache_control");
        tool.finish();
        all.push((format!("tools[{i}]"), tools::function(name, description, Some(schema), strict)));
    }
    let (choice, parallel) = match fields.object("tool_choice")? {
        None => (Choice::Auto, true),
        Some(mut choice) => {
            let parallel = choice.boolean("disable_parallel_tool_use")? != Some(true);
            let kind = choice.one_of("type", &["auto", "any", "tool", "none"])?;
            let kind = match kind.ok_or_else(|| choice.missing("type"))? {
                "auto" => Choice::Auto,
                "any" => Choice::Required,
                "none" => Choice::None,
                _ => {
                    let name = choice.string("name")?.ok_or_else(|| choice.missing("name"))?;
                    Choice::Named(name.to_owned())
                }
            };
            choice.finish();
            (kind, parallel)
        }
    };
    Tools::new(all, choice, parallel, "tool_choice")
}

/// The text of content that is a string or blocks of text.
pub(super) fn text_of(path: &str, content: &Value) -> Result<String, ApiError> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => texts_of(path, blocks).map(|texts| texts.join("\n")),
        other => Err(expected(path, "a string or an array of blocks", other)),
    }
}

/// The texts of blocks that must be of text.
pub(super) fn texts_of(path: &str, blocks: &[Value]) -> Result<Vec<String>, ApiError> {
    let text = |(i, block): (usize, &Value)| {
        let mut block = Fields::nested(format!("{path}[{i}]"), block)?;
        match block.string("type")?.ok_or_else(|| block.missing("type"))? {
            "text" => Ok(block.string("text")?.ok_or_else(|| block.missing("text"))?.to_owned()),
            kind => Err(unsupported_block(&block, kind)),
        }
    };
    blocks.iter().enumerate().map(text).collect()
}

/// The error for a block that the model can't read.
pub(super) fn unsupported_block(block: &Fields<'_>, kind: &str) -> ApiError {
    let problem = format!("this model reads text only, found {}", quote(&kind.into()));
    ApiError::field(block.path("type"), problem).with_code("unsupported_content")
}

#[cfg(test)]
mod tests {
    use lily_engine::testing::greedy;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::generation::tests::{any_json, check_fields};

    fn parse(fields: Value) -> Result<String, ApiError> {
        let tool = json!({"name": "f", "input_schema": {"type": "object"}});
        let mut body = json!({"messages": [{"role": "user", "content": "q"}], "tools": [tool]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let request = MessagesRequest::parse(body.as_object().unwrap(), &greedy())?;
        Ok(format!("{request:?}"))
    }

    #[test]
    fn every_documented_field_acts_or_is_refused() {
        let schema = json!({"type": "json_schema", "schema": {"type": "object"}});
        let fields = [
            ("cache_control", json!({"type": "ephemeral"})),
            ("cache_prompt", json!(false)),
            ("chat_template_kwargs", json!({"preserve_thinking": false})),
            ("container", json!("c")),
            ("context_management", json!({"edits": []})),
            ("enable_thinking", json!(true)),
            ("grammar", json!("start: \"x\"")),
            ("inference_geo", json!("us")),
            ("max_tokens", json!(3)),
            ("mcp_servers", json!([{"type": "url", "url": "x", "name": "y"}])),
            ("messages", json!([{"role": "user", "content": "other"}])),
            ("metadata", json!({"user_id": "u"})),
            ("output_config", json!({"format": schema})),
            ("output_format", schema.clone()),
            ("seed", json!(3)),
            ("service_tier", json!("priority")),
            ("diagnostics", json!({"previous_message_id": "m"})),
            ("speed", json!("fast")),
            ("stop_sequences", json!(["x"])),
            ("user_profile_id", json!("u")),
            ("workspace_id", json!("w")),
            ("stream", json!(true)),
            ("system", json!("s")),
            ("temperature", json!(0.5)),
            ("thinking", json!({"type": "enabled", "budget_tokens": 1024})),
            ("thinking_budget", json!(9)),
            ("tool_choice", json!({"type": "any"})),
            ("tools", json!([{"name": "g", "input_schema": {}}])),
            ("top_k", json!(3)),
            ("top_p", json!(0.5)),
        ];
        check_fields("MessagesRequest", parse, NO_EFFECT, &fields);
    }

    proptest! {
        #[test]
        fn whatever_a_field_holds_the_error_points_into_it(
            name in prop::sample::select(vec![
                "messages", "system", "tools", "tool_choice", "thinking", "output_config",
                "output_format", "stop_sequences",
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
