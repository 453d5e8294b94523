//! The items of a conversation as the messages of chat completions, which the engine reads.

use serde_json::{Value, json};

use super::tools::full_name;
use crate::error::ApiError;
use crate::fields::{Fields, expected, quote};
use crate::warnings::Warnings;

/// The parameter that carries the input of a custom tool.
pub(super) const CUSTOM_INPUT: &str = "input";

/// The type of an item that brings tools.
pub(super) const ADDITIONAL_TOOLS: &str = "additional_tools";

/// Messages, and the path in the request of what each comes from.
type Messages = (Vec<Value>, Vec<String>);

/// `instructions` and `input`.
pub(super) fn parse(fields: &mut Fields<'_>, warnings: &mut Warnings) -> Result<Messages, ApiError> {
    let mut conversation = Conversation::default();
    if let Some(text) = fields.string("instructions")? {
        conversation.push("instructions".to_owned(), json!({"role": "system", "content": text}));
    }
    match fields.any("input").ok_or_else(|| fields.missing("input"))? {
        Value::String(text) => {
            conversation.push("input".to_owned(), json!({"role": "user", "content": text}));
        }
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                conversation.item(Fields::nested(format!("input[{i}]"), item)?, warnings)?;
            }
        }
        other => return Err(expected("input", "a string or an array of items", other)),
    }
    Ok((conversation.messages, conversation.places))
}

#[derive(Default)]
struct Conversation {
    messages: Vec<Value>,
    places: Vec<String>,
    /// The last message is an answer that further items belong to.
    open: bool,
}

impl Conversation {
    fn push(&mut self, place: String, message: Value) {
        self.open = message["role"] == "assistant";
        self.messages.push(message);
        self.places.push(place);
    }

    /// The message of the answer that an item belongs to: thoughts, texts and calls in a row are one.
    fn answer(&mut self, place: &str) -> &mut Value {
        if !self.open {
            self.push(place.to_owned(), json!({"role": "assistant", "content": ""}));
        }
        let last = self.messages.len() - 1;
        &mut self.messages[last]
    }

    fn item(&mut self, mut item: Fields<'_>, warnings: &mut Warnings) -> Result<(), ApiError> {
        let place = item.path("type").trim_end_matches(".type").to_owned();
        match item.string("type")?.unwrap_or("message") {
            "message" => self.message(&mut item, place)?,
            "reasoning" => {
                if let Some(text) = thought(&mut item)? {
                    let answer = self.answer(&place);
                    // A thought begins an answer.
                    if answer["content"] == "" && answer.get("tool_calls").is_none() {
                        let before = answer["reasoning_content"].as_str().unwrap_or_default();
                        answer["reasoning_content"] = format!("{before}{text}").into();
                    } else {
                        let message = json!({"role": "assistant", "content": "", "reasoning_content": text});
                        self.push(place, message);
                    }
                }
            }
            "function_call" => {
                let arguments = item.string("arguments")?.ok_or_else(|| item.missing("arguments"))?;
                self.call(&mut item, &place, arguments.into())?;
            }
            "custom_tool_call" => {
                let input = item.string("input")?.ok_or_else(|| item.missing("input"))?;
                self.call(&mut item, &place, json!({CUSTOM_INPUT: input}))?;
            }
            "function_call_output" | "custom_tool_call_output" => {
                let id = item.string("call_id")?.ok_or_else(|| item.missing("call_id"))?;
                let output = item.any("output").ok_or_else(|| item.missing("output"))?;
                let text = text_of(&item.path("output"), output)?;
                self.push(place, json!({"role": "tool", "tool_call_id": id, "content": text}));
            }
            // The model is told all tools at the start of its prompt, wherever they come from.
            ADDITIONAL_TOOLS => {
                item.any("role");
                item.any("tools");
            }
            "item_reference" => {
                let problem = "nothing is stored on this server: send the item itself";
                return Err(ApiError::unsupported(item.path("type"), problem));
            }
            kind => {
                let why = format!("items of type {} are not known", quote(&kind.into()));
                warnings.ignored(&place, &why);
                return Ok(());
            }
        }
        for name in ["id", "status", "phase"] {
            item.any(name);
        }
        item.finish();
        Ok(())
    }

    fn message(&mut self, item: &mut Fields<'_>, place: String) -> Result<(), ApiError> {
        let role = item.one_of("role", &["user", "assistant", "system", "developer"])?;
        let role = role.ok_or_else(|| item.missing("role"))?;
        let content = item.any("content").ok_or_else(|| item.missing("content"))?;
        let text = text_of(&item.path("content"), content)?;
        if role != "assistant" {
            self.push(place, json!({"role": role, "content": text}));
            return Ok(());
        }
        let answer = self.answer(&place);
        let before = answer["content"].as_str().unwrap_or_default();
        answer["content"] = format!("{before}{text}").into();
        Ok(())
    }

    fn call(&mut self, item: &mut Fields<'_>, place: &str, arguments: Value) -> Result<(), ApiError> {
        let id = item.string("call_id")?.ok_or_else(|| item.missing("call_id"))?;
        let name = item.string("name")?.ok_or_else(|| item.missing("name"))?;
        let name = full_name(item.string("namespace")?, name);
        let function = json!({"name": name, "arguments": arguments});
        let call = json!({"id": id, "type": "function", "function": function});
        let answer = self.answer(place);
        match answer["tool_calls"].as_array_mut() {
            Some(calls) => calls.push(call),
            None => answer["tool_calls"] = json!([call]),
        }
        Ok(())
    }
}

/// The text of a thought: as it was told, or else as it was told a second time.
fn thought(item: &mut Fields<'_>) -> Result<Option<String>, ApiError> {
    let parts = item.array("content")?.unwrap_or_default();
    let text: String = parts.iter().filter_map(|part| part["text"].as_str()).collect();
    let again = item.string("encrypted_content")?;
    item.array("summary")?;
    Ok(if text.is_empty() { again.map(str::to_owned) } else { Some(text) })
}

/// The text of content that is a string or parts of text.
fn text_of(path: &str, content: &Value) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let texts = parts.iter().enumerate().map(|(i, part)| {
                let mut part = Fields::nested(format!("{path}[{i}]"), part)?;
                match part.string("type")?.ok_or_else(|| part.missing("type"))? {
                    "input_text" | "output_text" | "text" => {
                        part.string("text")?.ok_or_else(|| part.missing("text"))
                    }
                    "refusal" => part.string("refusal")?.ok_or_else(|| part.missing("refusal")),
                    kind => {
                        let problem = format!("this model reads text only, found {}", quote(&kind.into()));
                        let error = ApiError::field(part.path("type"), problem);
                        Err(error.with_code("unsupported_content"))
                    }
                }
            });
            texts.collect()
        }
        other => Err(expected(path, "a string or an array of parts", other)),
    }
}
