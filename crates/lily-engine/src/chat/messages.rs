//! Messages in the shapes that clients send against the one shape that templates render.

use std::mem;

use serde_json::{Map, Value};

use super::ChatError;

type Message = Map<String, Value>;

/// Brings messages into the form that a template can render. Fields that are not named here are kept.
///
/// * `content`: null, absent and `[]` become the empty string, text parts are joined as they are.
/// * `reasoning` is another name of `reasoning_content`.
/// * `tool_calls[].function.arguments`: JSON text becomes the object it spells; absent, null and blank, `{}`.
/// * `developer` is another name of `system`. System messages at the start become one, joined by an empty line.
///   One further on becomes a user message at its place, its text unchanged: templates refuse a system message
///   there, and moved to the start it would apply to turns before it and change a prompt that was read already.
///   One that is blank is left out.
pub fn normalize(messages: &[Value]) -> Result<Vec<Value>, ChatError> {
    let messages = messages.iter().enumerate().map(|(index, message)| Place { index }.message(message));
    Ok(settle_system_messages(messages.collect::<Result<_, _>>()?))
}

/// Where errors point to.
#[derive(Clone, Copy)]
struct Place {
    index: usize,
}

impl Place {
    fn error(self, field: impl Into<String>, problem: impl Into<String>) -> ChatError {
        ChatError::Message { index: self.index, field: field.into(), problem: problem.into() }
    }

    fn expected(self, field: impl Into<String>, expected: &str, found: &Value) -> ChatError {
        self.error(field, format!("expected {expected}, found {}", kind_of(found)))
    }

    fn message(self, message: &Value) -> Result<Message, ChatError> {
        let mut message = message.as_object().ok_or_else(|| self.expected("", "an object", message))?.clone();
        let role = message.get("role").unwrap_or(&Value::Null);
        match role.as_str() {
            Some("developer") => drop(message.insert("role".into(), "system".into())),
            Some("system" | "user" | "assistant" | "tool") => {}
            Some(other) => {
                let expected = "expected system, developer, user, assistant or tool";
                return Err(self.error(".role", format!("{expected}, found {other:?}")));
            }
            None => return Err(self.expected(".role", "a string", role)),
        }
        let content = self.content(message.get("content").unwrap_or(&Value::Null))?;
        message.insert("content".into(), content.into());
        self.reasoning(&mut message)?;
        self.tool_calls(&mut message)?;
        Ok(message)
    }

    fn content(self, content: &Value) -> Result<String, ChatError> {
        match content {
            Value::Null => Ok(String::new()),
            Value::String(text) => Ok(text.clone()),
            Value::Array(parts) => {
                parts.iter().enumerate().map(|(part, value)| self.part(part, value)).collect()
            }
            other => Err(self.expected(".content", "a string, an array of text parts or null", other)),
        }
    }

    fn part(self, part: usize, value: &Value) -> Result<&str, ChatError> {
        let field = format!(".content[{part}]");
        let object = value.as_object().ok_or_else(|| self.expected(&*field, "an object", value))?;
        let kind = object.get("type").unwrap_or(&Value::Null);
        match kind.as_str() {
            Some("text") => {
                let text = object.get("text").unwrap_or(&Value::Null);
                text.as_str().ok_or_else(|| self.expected(field + ".text", "a string", text))
            }
            Some(other) => {
                Err(ChatError::UnsupportedPart { index: self.index, part, kind: other.to_owned() })
            }
            None => Err(self.expected(field + ".type", "a string", kind)),
        }
    }

    fn reasoning(self, message: &mut Message) -> Result<(), ChatError> {
        for name in ["reasoning", "reasoning_content"] {
            match message.remove(name) {
                None | Some(Value::Null) => {}
                Some(text @ Value::String(_)) => drop(message.insert("reasoning_content".into(), text)),
                Some(other) => return Err(self.expected(format!(".{name}"), "a string or null", &other)),
            }
        }
        Ok(())
    }

    fn tool_calls(self, message: &mut Message) -> Result<(), ChatError> {
        match message.get_mut("tool_calls") {
            Some(Value::Array(calls)) if !calls.is_empty() => {
                calls.iter_mut().enumerate().try_for_each(|(call, value)| self.tool_call(call, value))
            }
            None => Ok(()),
            Some(Value::Null | Value::Array(_)) => {
                message.remove("tool_calls");
                Ok(())
            }
            Some(other) => Err(self.expected(".tool_calls", "an array or null", other)),
        }
    }

    fn tool_call(self, call: usize, value: &mut Value) -> Result<(), ChatError> {
        let field = format!(".tool_calls[{call}].function");
        let found = mem::take(value.get_mut("function").unwrap_or(&mut Value::Null));
        let Value::Object(mut function) = found else {
            return Err(self.expected(field, "an object", &found));
        };
        let name = function.get("name").unwrap_or(&Value::Null);
        if !name.is_string() {
            return Err(self.expected(field + ".name", "a string", name));
        }
        let arguments = match function.remove("arguments") {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(arguments)) => arguments,
            Some(Value::String(text)) if text.trim().is_empty() => Map::new(),
            Some(Value::String(text)) => serde_json::from_str(&text).map_err(|error| {
                let expected = "expected the text of a JSON object";
                self.error(
                    format!("{field}.arguments"),
                    format!("{expected}, but it does not parse: {error}"),
                )
            })?,
            Some(other) => {
                return Err(self.expected(field + ".arguments", "the text of a JSON object", &other));
            }
        };
        function.insert("arguments".into(), arguments.into());
        value["function"] = function.into();
        Ok(())
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// The rule for system messages; their contents are strings here.
fn settle_system_messages(messages: Vec<Message>) -> Vec<Value> {
    let is_system = |message: &Message| message["role"] == "system";
    let is_blank = |message: &Message| message["content"].as_str().is_none_or(|text| text.trim().is_empty());
    let mut settled: Vec<Message> = Vec::with_capacity(messages.len());
    for mut message in messages {
        match settled.last_mut() {
            None => settled.push(message),
            Some(_) if is_system(&message) && is_blank(&message) => {}
            Some(first) if is_system(&message) && is_system(first) => {
                let texts = [&first["content"], &message["content"]].map(|text| text.as_str().unwrap_or(""));
                let joined = texts.join(if is_blank(first) { "" } else { "\n\n" });
                first.insert("content".into(), joined.into());
            }
            Some(_) => {
                if is_system(&message) {
                    message.insert("role".into(), "user".into());
                }
                settled.push(message);
            }
        }
    }
    settled.into_iter().map(Value::Object).collect()
}
