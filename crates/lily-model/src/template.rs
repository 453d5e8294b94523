//! The chat form of a checkpoint (`chat_template.jinja`).
//!
//! Templates are written for Hugging Face's renderer: Jinja2 with `trim_blocks`, `lstrip_blocks`, loop controls,
//! a few functions and Python's idea of how values print ([`python`]). Text that reaches a template from outside
//! is marked on its way in, so that afterwards the control tokens which the template itself wrote can be told
//! from those that a message, a tool definition or a variable merely spells ([`guard`]).

mod guard;
mod python;

use std::ops::Range;

use minijinja::value::Value as Jinja;
use minijinja::{Environment, Error, ErrorKind};
use serde_json::{Map, Value};

use crate::tokenizer::{PromptPiece, Tokenizer};
use guard::Guard;

/// Errors of a chat template.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template's source does not parse; says where.
    #[error("{0}")]
    Syntax(String),
    /// The template refused the conversation (`raise_exception`), in its own words.
    #[error("{0}")]
    Refused(String),
    /// The template failed on this conversation.
    #[error("{0}")]
    Failed(String),
}

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
}

/// What a conversation is rendered with.
#[derive(Clone, Debug, Default)]
pub struct ChatInput<'a> {
    /// Messages in the form of OpenAI's API: `role`, `content`, `reasoning_content`, `tool_calls`.
    /// `tool_calls[].function.arguments` must be an object.
    pub messages: &'a [Value],
    /// Tool definitions in the form of OpenAI's API.
    pub tools: &'a [Value],
    /// Append the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables for the template: `enable_thinking`, `preserve_thinking`, ...
    pub variables: Map<String, Value>,
}

/// A rendered conversation that remembers which control tokens the template wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenderedChat {
    text: String,
    /// All of `text`, divided: control tokens with their ids, and what stands between them.
    pieces: Vec<(Range<usize>, Option<u32>)>,
}

/// The template's name in its own error messages.
const NAME: &str = "chat_template.jinja";

/// Work that rendering may take, in minijinja's fuel: an instruction costs 1, so do 64 bytes written. Qwen3.6's
/// template needs under 2 for a byte of input. A template that loops for ever, or keeps doubling a string, ends
/// here.
const FUEL_BASE: u64 = 1_000_000;
const FUEL_PER_INPUT_BYTE: u64 = 8;

impl ChatTemplate {
    /// Compiles a template.
    pub fn new(source: &str) -> Result<Self, TemplateError> {
        let mut environment = python::environment().map_err(|e| TemplateError::Failed(e.to_string()))?;
        environment
            .add_template_owned(NAME, source.to_string())
            .map_err(|e| TemplateError::Syntax(e.to_string()))?;
        Ok(Self { environment, source: source.to_string() })
    }

    /// Renders a conversation; `tokenizer` says what the control tokens are.
    ///
    /// Where the template looks for control tokens in a message, it finds none: a user's message that spells
    /// `<tool_response>` is a user's message. The one exception is an assistant's message whose content opens
    /// with its thought (`<think>...</think>`), the form in which clients send a reply back: the thought is
    /// recognised as the template would.
    pub fn render(
        &self,
        input: &ChatInput<'_>,
        tokenizer: &Tokenizer,
    ) -> Result<RenderedChat, TemplateError> {
        if input.messages.is_empty() {
            // Said by transformers before the template is asked.
            return Err(TemplateError::Refused(
                "Cannot apply chat template to an empty conversation. Provide at least one message.".into(),
            ));
        }
        let mut guard = Guard::new(&self.source, tokenizer, input)?;
        let context = self.context(input, &mut guard)?;

        let mut environment = self.environment.clone();
        environment.set_fuel(Some(FUEL_BASE + FUEL_PER_INPUT_BYTE * guard.bytes_seen()));
        let marked = environment
            .get_template(NAME)
            .and_then(|template| template.render(context))
            .map_err(|e| explain(&e, &guard))?;

        let mut chat = RenderedChat { text: String::with_capacity(marked.len()), pieces: Vec::new() };
        for piece in tokenizer.pieces(&marked) {
            let (piece, id) = match piece {
                PromptPiece::Control { id, text } => (text, Some(id)),
                PromptPiece::Text(text) => (text, None),
            };
            let start = chat.text.len();
            guard.unmark_into(piece, &mut chat.text);
            chat.pieces.push((start..chat.text.len(), id));
        }
        Ok(chat)
    }

    fn context(&self, input: &ChatInput<'_>, guard: &mut Guard) -> Result<Jinja, TemplateError> {
        let split_thoughts = self.source.contains("reasoning_content");
        let messages: Jinja =
            input.messages.iter().map(|message| guard.message(message, split_thoughts)).collect();
        let tools: Jinja = input.tools.iter().map(|tool| guard.value(tool)).collect();
        let own = [
            ("messages", messages),
            ("tools", if input.tools.is_empty() { Jinja::from(()) } else { tools }),
            ("add_generation_prompt", Jinja::from(input.add_generation_prompt)),
        ];
        if let Some((name, _)) = own.iter().find(|(name, _)| input.variables.contains_key(*name)) {
            return Err(TemplateError::Failed(format!(
                "the template variable {name:?} belongs to the conversation and can't be set on its own"
            )));
        }
        let variables = input.variables.iter().map(|(name, value)| (name.as_str(), guard.value(value)));
        Ok(Jinja::from_pairs(variables.chain(own)))
    }
}

impl RenderedChat {
    /// The text, as transformers renders it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The text in pieces: control tokens that the template wrote, and everything between them.
    pub fn pieces(&self) -> impl DoubleEndedIterator<Item = PromptPiece<'_>> {
        self.pieces.iter().map(|(range, id)| match (&self.text[range.clone()], *id) {
            (text, Some(id)) => PromptPiece::Control { id, text },
            (text, None) => PromptPiece::Text(text),
        })
    }

    /// Whether the prompt ends inside a thought: its last `<think>` is not closed, so what the model writes next
    /// belongs to the thought.
    pub fn ends_in_open_thought(&self) -> bool {
        let tag = |piece| match piece {
            PromptPiece::Control { text: "<think>", .. } => Some(true),
            PromptPiece::Control { text: "</think>", .. } => Some(false),
            _ => None,
        };
        self.pieces().rev().find_map(tag).unwrap_or(false)
    }
}

/// What `raise_exception` raises.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

fn explain(error: &Error, guard: &Guard) -> TemplateError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(Refusal(words)) = cause.downcast_ref() {
            return TemplateError::Refused(guard.unmark(words));
        }
        source = cause.source();
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return TemplateError::Failed(format!(
            "the template was stopped: for a conversation of this size it took more work than any template should \
             ({error})"
        ));
    }
    TemplateError::Failed(guard.unmark(&error.to_string()))
}
