//! Tools, which to call, and how strictly.

use std::collections::HashMap;

use lily_engine::constraint::{Callable, Calls, Rule};
use lily_engine::request::Tool;
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::fields::{Fields, quote};

/// The tools of a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tools {
    /// As the template takes them, in the form of chat completions.
    pub definitions: Vec<Value>,
    /// Place of each in the request.
    pub places: Vec<usize>,
    /// Grammars of those that are called with a text, by their names.
    pub grammars: HashMap<String, Rule>,
    pub choice: Choice,
    /// Whether there may be several calls.
    pub parallel: bool,
}

/// Which tools to call.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Choice {
    #[default]
    Auto,
    None,
    Required,
    /// Of this name.
    Named(String),
}

impl Tools {
    /// The tools with the choice among them, which `path` is the place of.
    pub fn new(
        tools: Vec<(usize, Value)>,
        choice: Choice,
        parallel: bool,
        path: &str,
    ) -> Result<Self, ApiError> {
        let (places, definitions): (Vec<usize>, Vec<Value>) = tools.into_iter().unzip();
        let tools = Self { definitions, places, choice, parallel, ..Self::default() };
        match &tools.choice {
            Choice::Required | Choice::Named(_) if tools.definitions.is_empty() => {
                Err(ApiError::field(path, "asks for a call, but there are no tools"))
            }
            Choice::Named(name)
                if !tools.definitions.iter().any(|tool| tool["function"]["name"] == **name) =>
            {
                Err(ApiError::field(path, format!("there is no tool {}", quote(&(&**name).into()))))
            }
            // What it isn't told of it can't call.
            Choice::None => Ok(Self { definitions: Vec::new(), places: Vec::new(), ..tools }),
            _ => Ok(tools),
        }
    }

    /// What calls must be, if anything is asked of them, and the places in the request of the tools that may be
    /// called. `held`: the answer is held to a form, so that calls beside it must have theirs.
    pub fn calls(&self, held: bool) -> (Option<Calls>, Vec<usize>) {
        let callable = |tool: &Value| {
            let function = &tool["function"];
            let name = function["name"].as_str().unwrap_or_default().to_owned();
            let text = self.grammars.get(&name).cloned();
            let tool = Tool { name, parameters: function["parameters"].clone() };
            Callable { tool, strict: function["strict"] == true, text }
        };
        let all = self.places.iter().zip(self.definitions.iter().map(callable));
        let chosen = all.filter(|(_, callable)| match &self.choice {
            Choice::Named(name) => callable.tool.name == *name,
            _ => true,
        });
        let (places, tools): (Vec<usize>, Vec<Callable>) = chosen.unzip();
        let required = matches!(self.choice, Choice::Required | Choice::Named(_));
        let parallel = self.parallel && !matches!(self.choice, Choice::Named(_));
        let is_bound = |tool: &Callable| tool.strict || tool.text.is_some();
        let needed = required || (!tools.is_empty() && (held || tools.iter().any(is_bound)));
        (needed.then_some(Calls { tools, required, parallel }), places)
    }
}

/// A function in the form of chat completions, from its parts; `None` leaves a part out.
pub(crate) fn function(
    name: &str,
    description: Option<&str>,
    parameters: Option<&Map<String, Value>>,
    strict: Option<bool>,
) -> Value {
    let mut function = json!({"name": name});
    let parts = [
        ("description", description.map(Value::from)),
        ("parameters", parameters.map(|schema| Value::Object(schema.clone()))),
        ("strict", strict.filter(|strict| *strict).map(Value::from)),
    ];
    for (part, value) in parts {
        if let Some(value) = value {
            function[part] = value;
        }
    }
    json!({"type": "function", "function": function})
}

/// The name of a tool. These characters would end it in the markup that the model writes.
pub(crate) fn parse_name<'a>(fields: &mut Fields<'a>) -> Result<&'a str, ApiError> {
    let name = fields.string("name")?.ok_or_else(|| fields.missing("name"))?;
    if name.is_empty() || name.contains(|c: char| c.is_whitespace() || "<>=".contains(c)) {
        let problem = format!("expected a name without spaces and <, >, =, found {}", quote(&name.into()));
        return Err(ApiError::field(fields.path("name"), problem));
    }
    Ok(name)
}
