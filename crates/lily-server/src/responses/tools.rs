//! The tools of a request.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::items::CUSTOM_INPUT;
use crate::error::ApiError;
use crate::fields::{Fields, expected, quote};
use crate::generation::tools::{Choice, Tools, function, parse_name};
use crate::warnings::Warnings;

/// `tools`, `tool_choice` and `parallel_tool_calls`; with the names of the custom tools, which the model sees as
/// functions of one text. Kinds that are not known here are the client's to do without.
pub(super) fn parse(
    fields: &mut Fields<'_>,
    warnings: &mut Warnings,
) -> Result<(Tools, HashSet<String>), ApiError> {
    let (mut all, mut custom) = (Vec::new(), HashSet::new());
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
                let parameters = custom_parameters(&mut tool, warnings)?;
                all.push((i, function(name, description, Some(&parameters), None)));
                custom.insert(name.to_owned());
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
    Ok((Tools::new(all, choice, parallel, "tool_choice")?, custom))
}

/// The schema of a function that stands for a custom tool. What its input must look like is told to the model.
fn custom_parameters(tool: &mut Fields<'_>, warnings: &mut Warnings) -> Result<Map<String, Value>, ApiError> {
    let mut input = json!({"type": "string"});
    if let Some(mut format) = tool.object("format")? {
        if format.one_of("type", &["text", "grammar"])? == Some("grammar") {
            let syntax =
                format.one_of("syntax", &["lark", "regex"])?.ok_or_else(|| format.missing("syntax"))?;
            let definition = format.string("definition")?.ok_or_else(|| format.missing("definition"))?;
            input["description"] = format!("Text of this grammar ({syntax}):\n{definition}").into();
            warnings.ignored(&tool.path("format"), "the model is told the grammar, but not held to it");
        }
        format.finish();
    }
    let schema = json!({"type": "object", "properties": {CUSTOM_INPUT: input}, "required": [CUSTOM_INPUT]});
    Ok(schema.as_object().cloned().unwrap_or_default())
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
