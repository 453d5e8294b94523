//! Anthropic's messages as those of chat completions, which the engine reads.

use serde_json::{Value, json};

use super::request::{text_of, texts_of, unsupported_block};
use super::response::SIGNATURE;
use crate::error::ApiError;
use crate::fields::{Fields, expected};

/// Begins a line of the system prompt that is different in every request of one client, and no part of what it
/// asks for. With it no two requests would begin alike.
const BILLING: &str = "x-anthropic-billing-header:";

/// The system prompt, a message for each of its blocks; they become one.
pub(super) fn system(system: Option<&Value>) -> Result<Vec<Value>, ApiError> {
    let texts = match system {
        None => Vec::new(),
        Some(Value::Array(blocks)) => texts_of("system", blocks)?,
        Some(other) => vec![text_of("system", other)?],
    };
    let texts = texts.iter().map(|text| without_billing(text)).filter(|text| !text.trim().is_empty());
    Ok(texts.map(|text| json!({"role": "system", "content": text})).collect())
}

fn without_billing(text: &str) -> String {
    text.split_inclusive('\n').filter(|line| !line.trim_start().starts_with(BILLING)).collect()
}

/// Adds messages to `to`, and for each the path of what it comes from to `places`.
pub(super) fn read(
    messages: &[Value],
    to: &mut Vec<Value>,
    places: &mut Vec<String>,
) -> Result<(), ApiError> {
    for (i, message) in messages.iter().enumerate() {
        let path = format!("messages[{i}]");
        let mut message = Fields::nested(path.clone(), message)?;
        let role = message.one_of("role", &["user", "assistant", "system"])?;
        let role = role.ok_or_else(|| message.missing("role"))?;
        let content = message.any("content").ok_or_else(|| message.missing("content"))?;
        message.finish();
        let before = to.len();
        match role {
            "assistant" if i + 1 == messages.len() => {
                let problem = "the last message can't be the assistant's: an answer can't be begun for it";
                return Err(ApiError::unsupported(path, problem));
            }
            "assistant" => to.push(assistant(&format!("{path}.content"), content)?),
            "system" => {
                let text = without_billing(&text_of(&format!("{path}.content"), content)?);
                to.push(json!({"role": "system", "content": text}));
            }
            _ => user(&format!("{path}.content"), content, to)?,
        }
        places.extend((before..to.len()).map(|_| path.clone()));
    }
    if messages.is_empty() {
        return Err(ApiError::field("messages", "expected at least one message, found none"));
    }
    Ok(())
}

/// Results of tools become messages of their own; what the user says around them stays in its order.
fn user(path: &str, content: &Value, to: &mut Vec<Value>) -> Result<(), ApiError> {
    let Value::Array(blocks) = content else {
        to.push(json!({"role": "user", "content": text_of(path, content)?}));
        return Ok(());
    };
    let mut texts: Vec<&str> = Vec::new();
    let flush = |texts: &mut Vec<&str>, to: &mut Vec<Value>| {
        if !texts.is_empty() {
            to.push(json!({"role": "user", "content": texts.join("\n\n")}));
            texts.clear();
        }
    };
    for (i, block) in blocks.iter().enumerate() {
        let mut block = Fields::nested(format!("{path}[{i}]"), block)?;
        match block.string("type")?.ok_or_else(|| block.missing("type"))? {
            "text" => texts.push(block.string("text")?.ok_or_else(|| block.missing("text"))?),
            "tool_result" => {
                flush(&mut texts, to);
                let id = block.string("tool_use_id")?.ok_or_else(|| block.missing("tool_use_id"))?;
                let content = block.any("content").unwrap_or(&Value::Null);
                let text = text_of(&block.path("content"), content)?;
                let failed = block.boolean("is_error")? == Some(true);
                let text = if failed { format!("Error: {text}") } else { text };
                to.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
            }
            kind => return Err(unsupported_block(&block, kind)),
        }
        block.any("cache_control");
        block.finish();
    }
    flush(&mut texts, to);
    Ok(())
}

fn assistant(path: &str, content: &Value) -> Result<Value, ApiError> {
    let Value::Array(blocks) = content else {
        return Ok(json!({"role": "assistant", "content": text_of(path, content)?}));
    };
    let (mut text, mut thought, mut calls) = (String::new(), None::<String>, Vec::new());
    for (i, block) in blocks.iter().enumerate() {
        let mut block = Fields::nested(format!("{path}[{i}]"), block)?;
        match block.string("type")?.ok_or_else(|| block.missing("type"))? {
            "text" => text += block.string("text")?.ok_or_else(|| block.missing("text"))?,
            "thinking" => {
                let piece = block.string("thinking")?.ok_or_else(|| block.missing("thinking"))?;
                let signature = block.string("signature")?.filter(|text| *text != SIGNATURE);
                let piece = if piece.is_empty() { signature.unwrap_or_default() } else { piece };
                thought.get_or_insert_default().push_str(piece);
            }
            // A thought of another model, which nobody else can read.
            "redacted_thinking" => drop(block.any("data")),
            "tool_use" => {
                let id = block.string("id")?.ok_or_else(|| block.missing("id"))?;
                let name = block.string("name")?.ok_or_else(|| block.missing("name"))?;
                let input = block.any("input").ok_or_else(|| block.missing("input"))?;
                if !input.is_object() {
                    return Err(expected(&block.path("input"), "an object", input));
                }
                let function = json!({"name": name, "arguments": input});
                calls.push(json!({"id": id, "type": "function", "function": function}));
            }
            kind => return Err(unsupported_block(&block, kind)),
        }
        block.any("cache_control");
        block.finish();
    }
    let mut message = json!({"role": "assistant", "content": text});
    if let Some(thought) = thought {
        message["reasoning_content"] = thought.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    Ok(message)
}
