//! A conversation becomes a [`Request`].

mod messages;
mod sampled;

use std::sync::Arc;

use lily_model::template::{ChatInput, ChatTemplate, TemplateError};
use lily_model::tokenizer::Tokenizer;
use serde_json::{Map, Value};

use crate::request::{OutputFormat, Request, Sampling, Tool};

pub use messages::normalize;
pub use sampled::SampledCalls;

/// The control token that begins a turn.
const TURN: &str = "<|im_start|>";

/// A conversation as clients send it. Servers and the terminal both build this.
#[derive(Clone, Debug, Default)]
pub struct Chat {
    /// Messages in OpenAI's form, in any of the shapes that [`normalize`] takes.
    pub messages: Vec<Value>,
    /// Tool definitions in OpenAI's form.
    pub tools: Vec<Value>,
    /// Think before answering (`enable_thinking` of the template); `None`: the template's default.
    pub enable_thinking: Option<bool>,
    /// Further template variables (`chat_template_kwargs`).
    pub variables: Map<String, Value>,
}

/// A conversation that can't be rendered; [`ChatError::param`] says where the fault is.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// A message is not what it should be.
    #[error("messages[{index}]{field}: {problem}")]
    Message {
        /// Which message.
        index: usize,
        /// Path within the message: `.content`, `.tool_calls[0].function.name`; empty for the message itself.
        field: String,
        /// Expected and found.
        problem: String,
    },
    /// A part of a message is not text.
    #[error("messages[{index}].content[{part}].type: this model reads text only, found {kind:?}")]
    UnsupportedPart {
        /// Which message.
        index: usize,
        /// Which part of its content.
        part: usize,
        /// The part's type.
        kind: String,
    },
    /// A tool definition is not what it should be.
    #[error("tools[{index}]: {problem}")]
    Tool {
        /// Which tool.
        index: usize,
        /// Expected and found.
        problem: String,
    },
    /// The template refused the conversation, or failed on it.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

impl ChatError {
    /// Path of what is at fault: `messages[3].content`.
    pub fn param(&self) -> String {
        match self {
            Self::Message { index, field, .. } => format!("messages[{index}]{field}"),
            Self::UnsupportedPart { index, part, .. } => format!("messages[{index}].content[{part}].type"),
            Self::Tool { index, .. } => format!("tools[{index}]"),
            Self::Template(_) => "messages".to_owned(),
        }
    }
}

/// Normalises, renders and tokenises a conversation, up to the opening of the assistant's next turn. Tool calls that
/// `calls` remembers get the tokens that the model wrote. The result has no stop strings and no token limit.
pub fn chat_request(
    chat: &Chat,
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    calls: Option<&SampledCalls>,
    sampling: Sampling,
) -> Result<Request, ChatError> {
    let messages = normalize(&chat.messages)?;
    let tools: Arc<[Tool]> = chat.tools.iter().enumerate().map(parse_tool).collect::<Result<_, _>>()?;
    let mut variables = chat.variables.clone();
    if let Some(enable) = chat.enable_thinking {
        variables.insert("enable_thinking".into(), enable.into());
    }
    let input = ChatInput { messages: &messages, tools: &chat.tools, add_generation_prompt: true, variables };
    let rendered = template.render(&input, tokenizer)?;
    let prompt = tokenizer.encode_chat(&rendered);
    let prompt = match calls {
        Some(calls) => calls.restore(prompt, &messages, &tools, tokenizer),
        None => prompt,
    };
    let starts_in_thought = rendered.ends_in_open_thought();
    Ok(Request {
        boundaries: boundaries(&prompt, tokenizer),
        format: OutputFormat::Chat { starts_in_thought, tools, single_call: false },
        ..Request::raw(prompt, sampling)
    })
}

/// Where other prompts are likely to part from this one: at the end of its first turn, which is the system block
/// if there is one, and at the opening of the reply. The latter is where the next prompt of the conversation
/// parts if the template leaves out old thoughts, since the opening of a thought goes with it.
fn boundaries(prompt: &[u32], tokenizer: &Tokenizer) -> Vec<u32> {
    let turn = tokenizer.control_id(TURN);
    let starts = (0..).zip(prompt).filter(|(_, id)| turn == Some(**id)).map(|(position, _)| position);
    let starts: Vec<u32> = starts.collect();
    starts.get(1).into_iter().chain(starts.last()).copied().collect()
}

/// Templates take `{"type": "function", "function": {...}}` and the bare function alike.
fn parse_tool((index, tool): (usize, &Value)) -> Result<Tool, ChatError> {
    let function = tool.get("function").unwrap_or(tool);
    let name = function.get("name").and_then(Value::as_str).filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| ChatError::Tool {
        index,
        problem: "expected a function with a name, found none".to_owned(),
    })?;
    let parameters = function.get("parameters").cloned().unwrap_or(Value::Null);
    Ok(Tool { name: name.to_owned(), parameters })
}

#[cfg(test)]
mod tests;
