//! The tools of a request.

use std::collections::{HashMap, HashSet};

use lily_engine::constraint::Rule;
use serde_json::{Map, Value, json};

use super::items::{ADDITIONAL_TOOLS, CUSTOM_INPUT};
use crate::error::ApiError;
use crate::fields::{Fields, expected, quote};
use crate::generation::format::parse_definition;
use crate::generation::tools::{Choice, Tools, function, parse_name};
use crate::warnings::Warnings;

/// How calls of the tools are told, by the names that the model knows the tools by.
#[derive(Debug, Default)]
pub(super) struct ToolNames {
    /// Those whose calls have an input that is no JSON.
    pub custom: HashSet<String>,
    /// The namespaces of those that are in one.
    namespaces: HashMap<String, String>,
}

impl ToolNames {
    /// Namespace and name of a tool.
    pub fn split<'a>(&'a self, name: &'a str) -> (Option<&'a str>, &'a str) {
        let namespace = self.namespaces.get(name).map(String::as_str);
        let inside = namespace.and_then(|space| name.strip_prefix(space)?.strip_prefix('.'));
        (namespace, inside.unwrap_or(name))
    }
}

/// What the model calls a tool.
pub(super) fn full_name(namespace: Option<&str>, name: &str) -> String {
    namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}.{name}"))
}

/// `tools`, those that items of the input bring, `tool_choice` and `parallel_tool_calls`.
pub(super) fn parse(
    fields: &mut Fields<'_>,
    warnings: &mut Warnings,
) -> Result<(Tools, ToolNames), ApiError> {
    let mut all = Definitions::default();
    all.add_from(fields, None, warnings)?;
    let items = fields.any("input").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    for (i, item) in items.iter().enumerate().filter(|(_, item)| item["type"] == ADDITIONAL_TOOLS) {
        all.add_from(&mut Fields::nested(format!("input[{i}]"), item)?, None, warnings)?;
    }
    let choice = parse_choice(fields)?;
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let tools = Tools::new(all.functions, choice, parallel, "tool_choice")?;
    Ok((Tools { grammars: all.grammars, ..tools }, all.names))
}

/// Tools as functions. A custom tool is one of one text.
#[derive(Default)]
struct Definitions {
    /// Each with its path in the request.
    functions: Vec<(String, Value)>,
    grammars: HashMap<String, Rule>,
    names: ToolNames,
}

impl Definitions {
    /// Adds `tools` of a request, an item or a namespace, whose name and description are given.
    fn add_from(
        &mut self,
        fields: &mut Fields<'_>,
        namespace: Option<(&str, &str)>,
        warnings: &mut Warnings,
    ) -> Result<(), ApiError> {
        for (i, tool) in fields.array("tools")?.unwrap_or_default().iter().enumerate() {
            let place = format!("{}[{i}]", fields.path("tools"));
            let tool = Fields::nested(place.clone(), tool)?;
            self.add(place, namespace, tool, warnings)?;
        }
        Ok(())
    }

    /// Adds one. Kinds that are not known here are the client's to do without.
    fn add(
        &mut self,
        place: String,
        namespace: Option<(&str, &str)>,
        mut tool: Fields<'_>,
        warnings: &mut Warnings,
    ) -> Result<(), ApiError> {
        let kind = tool.string("type")?.ok_or_else(|| tool.missing("type"))?;
        match kind {
            "namespace" if namespace.is_none() => {
                let name = parse_name(&mut tool)?;
                let description = tool.string("description")?.unwrap_or_default();
                self.add_from(&mut tool, Some((name, description)), warnings)?;
                tool.finish();
                return Ok(());
            }
            "function" | "custom" => {}
            kind => {
                let why = format!("tools of type {} are not known", quote(&kind.into()));
                warnings.ignored(&tool.path("type"), &why);
                return Ok(());
            }
        }
        let name = full_name(namespace.map(|(name, _)| name), parse_name(&mut tool)?);
        let own = tool.string("description")?.map(str::to_owned);
        // The model knows no namespaces: what is said of one is said of each of its tools.
        let description = match namespace {
            Some((_, of_all)) => Some(format!("{of_all}\n\n{}", own.unwrap_or_default()).trim().to_owned()),
            None => own,
        };
        let definition = if kind == "custom" {
            let (parameters, grammar) = custom_input(&mut tool)?;
            self.names.custom.insert(name.clone());
            self.grammars.extend(grammar.map(|grammar| (name.clone(), grammar)));
            function(&name, description.as_deref(), Some(&parameters), None)
        } else {
            function(&name, description.as_deref(), tool.map("parameters")?, tool.boolean("strict")?)
        };
        self.functions.push((place, definition));
        self.names.namespaces.extend(namespace.map(|(namespace, _)| (name, namespace.to_owned())));
        tool.finish();
        Ok(())
    }
}

/// The schema of a function that stands for a custom tool, and the grammar of its input. The model is told it too.
fn custom_input(tool: &mut Fields<'_>) -> Result<(Map<String, Value>, Option<Rule>), ApiError> {
    let (mut input, mut grammar) = (json!({"type": "string"}), None);
    if let Some(mut format) = tool.object("format")? {
        if format.one_of("type", &["text", "grammar"])? == Some("grammar") {
            grammar = Some(parse_definition(&mut format)?);
            let definition = format.string("definition")?.unwrap_or_default();
            input["description"] = format!("Text of this grammar:\n{definition}").into();
        }
        format.finish();
    }
    let schema = json!({"type": "object", "properties": {CUSTOM_INPUT: input}, "required": [CUSTOM_INPUT]});
    Ok((schema.as_object().cloned().unwrap_or_default(), grammar))
}

fn parse_choice(fields: &mut Fields<'_>) -> Result<Choice, ApiError> {
    let path = fields.path("tool_choice");
    match fields.any("tool_choice") {
        None => Ok(Choice::Auto),
        Some(choice) if choice == "auto" => Ok(Choice::Auto),
        Some(choice) if choice == "none" => Ok(Choice::None),
        Some(choice) if choice == "required" => Ok(Choice::Required),
        Some(value @ Value::Object(_)) => {
            let mut choice = Fields::nested(path, value)?;
            let kind = choice.string("type")?.ok_or_else(|| choice.missing("type"))?;
            if !["function", "custom"].contains(&kind) {
                let problem = format!("only a function or a custom tool can be named, found {kind:?}");
                return Err(ApiError::unsupported(choice.path("type"), problem));
            }
            let name = choice.string("name")?.ok_or_else(|| choice.missing("name"))?;
            choice.finish();
            Ok(Choice::Named(name.to_owned()))
        }
        Some(other) => Err(expected(&path, "auto, none, required or a tool", other)),
    }
}
