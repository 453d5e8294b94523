//! Whether to think before answering, and for how long.

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::fields::{Fields, expected};

/// Template variables that have fields of their own.
const RESERVED_VARIABLES: [&str; 3] = ["add_generation_prompt", "messages", "tools"];

/// The efforts that OpenAI's API knows. The model has no levels: it thinks, or it doesn't.
pub(crate) const EFFORTS: [&str; 7] = ["none", "minimal", "low", "medium", "high", "xhigh", "max"];

/// Whether and how long to think.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Thinking {
    /// `None`: as the template has it.
    pub enabled: Option<bool>,
    /// Further variables of the template.
    pub variables: Map<String, Value>,
    /// Most tokens of the thought.
    pub budget: Option<u32>,
}

impl Thinking {
    /// Reads `enable_thinking`, `chat_template_kwargs` and `thinking_budget`. `said` is what the endpoint's own
    /// fields say, by their paths; `budget` what they allow. A contradiction is an error.
    pub fn parse(
        fields: &mut Fields<'_>,
        said: &[(&str, Option<bool>)],
        budget: Option<u32>,
    ) -> Result<Self, ApiError> {
        let mut variables = fields.map("chat_template_kwargs")?.cloned().unwrap_or_default();
        for name in RESERVED_VARIABLES {
            if variables.contains_key(name) {
                let path = format!("chat_template_kwargs.{name}");
                return Err(ApiError::field(
                    path,
                    "can't be set here: the request has a field for it, or fixes it",
                ));
            }
        }
        let in_variables = match variables.remove("enable_thinking") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(on)) => Some(on),
            Some(other) => {
                return Err(expected("chat_template_kwargs.enable_thinking", "true or false", &other));
            }
        };
        let own = fields.integer("thinking_budget", 0..=i64::from(u32::MAX))?.map(|tokens| tokens as u32);
        // No thought at all is not a short thought.
        let none = (own == Some(0)).then_some(false);
        let mut all = vec![
            ("enable_thinking", fields.boolean("enable_thinking")?),
            ("chat_template_kwargs.enable_thinking", in_variables),
            ("thinking_budget", none),
        ];
        all.extend_from_slice(said);
        let budget = own.or(budget).filter(|tokens| *tokens > 0);
        Ok(Self { enabled: agreed(&all)?, variables, budget })
    }
}

impl Thinking {
    /// Renders earlier thoughts as they were written, unless the request has it otherwise. Agents send them back;
    /// where they are left out, the prompt parts from what was read at the first answer.
    pub fn keep_thoughts(&mut self) {
        self.variables.entry("preserve_thinking").or_insert(true.into());
    }
}

/// What all that is said comes to.
fn agreed(said: &[(&str, Option<bool>)]) -> Result<Option<bool>, ApiError> {
    let mut said = said.iter().filter_map(|(name, on)| Some((name, (*on)?)));
    let Some((first, on)) = said.next() else { return Ok(None) };
    match said.find(|(_, other)| *other != on) {
        Some((second, _)) => Err(ApiError::field(*second, format!("contradicts {first}: give one of them"))),
        None => Ok(Some(on)),
    }
}
