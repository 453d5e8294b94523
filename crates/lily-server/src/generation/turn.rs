//! A turn of a chat, whichever API asks for it.

use lily_engine::chat::{Chat, ChatError, chat_request};
use lily_engine::constraint::Outline;
use lily_engine::request::{OutputFormat, Request};
use serde_json::Value;

use super::format::{Format, refused};
use super::settings::Settings;
use super::thinking::Thinking;
use super::tools::Tools;
use crate::app::ServerState;
use crate::error::ApiError;

/// The error for a conversation that can't be rendered, with the path of what is at fault as the client knows it.
fn placed(error: ChatError, places: &[String]) -> ApiError {
    match (&error, places.last()) {
        (ChatError::Message { index, field, problem }, Some(_)) if *index < places.len() => {
            ApiError::field(format!("{}{field}", places[*index]), problem)
        }
        (ChatError::Template(_), Some(last)) => {
            let field = last.split('[').next().map(str::to_owned);
            ApiError { param: field, ..error.into() }
        }
        _ => error.into(),
    }
}

/// A turn to be generated; nothing in it is left to check but what the engine knows better.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// In OpenAI's form.
    pub messages: Vec<Value>,
    /// Paths in the request of what the messages come from; empty: `messages[0]` and so on.
    pub places: Vec<String>,
    pub tools: Tools,
    pub thinking: Thinking,
    pub settings: Settings,
    /// What the answer is to be held to.
    pub format: Option<Format>,
}

impl Turn {
    /// Renders and tokenises it, and compiles what it is to be held to.
    pub fn request(self, state: &ServerState) -> Result<Request, ApiError> {
        let Self { messages, places, tools, thinking, settings, format } = self;
        let format = match (format, &settings.grammar) {
            (Some((_, path)), Some(_)) => {
                return Err(ApiError::field("grammar", format!("contradicts {path}: give one of them")));
            }
            (format, grammar) => format.or(grammar.clone().map(|rule| (rule, "grammar".to_owned()))),
        };
        let (calls, callable) = tools.calls(format.is_some());
        let single_call = !tools.parallel;
        let chat = Chat {
            messages,
            tools: tools.definitions,
            enable_thinking: thinking.enabled,
            variables: thinking.variables,
        };
        let request = chat_request(
            &chat,
            &state.template,
            &state.tokenizer,
            Some(&state.calls),
            settings.sampling.clone(),
        )
        .map_err(|error| placed(error, &places))?;
        let request = settings.apply(request);
        let (answer, path) = format.map_or((None, "tools".to_owned()), |(rule, path)| (Some(rule), path));
        let outline = Outline { answer, calls };
        let constraint = state.engine.compile(&outline, &request.format);
        let constraint = constraint.map_err(|error| refused(error, &path, &callable))?;
        if request.ignore_eos && constraint.is_some() {
            let problem = "can't be combined with a form that the answer must have, which says where it ends";
            return Err(ApiError::field("ignore_eos", problem));
        }
        let format = match request.format {
            OutputFormat::Chat { starts_in_thought, tools, .. } => {
                OutputFormat::Chat { starts_in_thought, tools, single_call }
            }
            OutputFormat::Raw => OutputFormat::Raw,
        };
        Ok(Request { format, constraint, thinking_budget: thinking.budget, ..request })
    }
}
