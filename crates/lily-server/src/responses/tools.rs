//! The tools of a request.

use std::collections::{HashMap, HashSet};

use lily_engine::constraint::Rule;
use serde_json::{Map, Value, json};

use super::items::CUSTOM_INPUT;
use crate::error::ApiError;
use crate::fields::{Fields, expected, quote};
use crate::generation::format::parse_definition;
use crate::generation::tools::{Choice, Tools, function, parse_name};
use crate::warnings::Warnings;

/// `tools`, `tool_choice` and `parallel_tool_calls`; with the names of the custom tools, which the model sees as
/// functions of one text. Kinds that are not known here are the client's to do without.
pub(super) fn parse(
    fields: &mut Fields<'_>,
    warnings: &mut Warnings,
) -> Result<(Tools, HashSet<String>), ApiError> {
    let (mut all, mut custom, mut grammars) = (Vec::new(), HashSet::new(), HashMap::new());
    for (i, tool) in fields.array("tools")?.unwrap_or_default().iter().enumerate() {
        let mut tool = Fields::nested(format!("tools[{i}]"), tool)?;
        match tool.string("type")?.ok_or_else(|| tool.missing("type"))? {
            "function" => {
                let name = parse_name(&mut tool)?;
                let description = tool.string("description")?;
                let parameters = tool.map("parameters")?;
                all.push((i, function(name, description, parameters, tool.boolean("strict")?)));
            }
            "custom" => {
                let name = parse_name(&mut tool)?;
                let description = tool.string("description")?;
                let (parameters, grammar) = custom_input(&mut tool)?;
                all.push((i, function(name, description, Some(&parameters), None)));
                custom.insert(name.to_owned());
                grammars.extend(grammar.map(|grammar| (name.to_owned(), grammar)));
            }
            kind => {
                let why = format!("tools of type {} are not known", quote(&kind.into()));
                warnings.ignored(&tool.path("type"), &why);
                continue;
            }
        }
        tool.finish();
    }
    let choice = parse_choice(fields)?;
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let tools = Tools::new(all, choice, parallel, "tool_choice")?;
    Ok((Tools { grammars, ..tools }, custom))
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
