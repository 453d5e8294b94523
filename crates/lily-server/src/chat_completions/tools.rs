//! The tools of a request.

use serde_json::Value;

use crate::error::ApiError;
use crate::fields::{Fields, expected, quote};
use crate::generation::tools::{Choice, Tools, parse_name};

/// `tools`, `tool_choice` and `parallel_tool_calls`.
pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<Tools, ApiError> {
    let tools = fields.array("tools")?.unwrap_or_default();
    for (i, tool) in tools.iter().enumerate() {
        check_tool(format!("tools[{i}]"), tool)?;
    }
    let tools = tools.iter().enumerate().map(|(i, tool)| (format!("tools[{i}]"), tool.clone())).collect();
    let choice = parse_choice(fields)?;
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    Tools::new(tools, choice, parallel, "tool_choice")
}

fn parse_choice(fields: &mut Fields<'_>) -> Result<Choice, ApiError> {
    let path = fields.path("tool_choice");
    match fields.any("tool_choice") {
        None => Ok(Choice::Auto),
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => Ok(Choice::Auto),
            "none" => Ok(Choice::None),
            "required" => Ok(Choice::Required),
            other => {
                let expected = "expected auto, none, required or a function";
                Err(ApiError::field(path, format!("{expected}, found {}", quote(&other.into()))))
            }
        },
        Some(value @ Value::Object(_)) => {
            let mut choice = Fields::nested(path, value)?;
            let kind = choice.string("type")?.ok_or_else(|| choice.missing("type"))?;
            if kind != "function" {
                let problem = format!("only a function can be named, found {}", quote(&kind.into()));
                return Err(ApiError::unsupported(choice.path("type"), problem));
            }
            let mut function = choice.object("function")?.ok_or_else(|| choice.missing("function"))?;
            let name = function.string("name")?.ok_or_else(|| function.missing("name"))?;
            function.finish();
            choice.finish();
            Ok(Choice::Named(name.to_owned()))
        }
        Some(other) => Err(expected(&path, "auto, none, required or a function", other)),
    }
}

/// A tool goes to the template as it is; what is wrong with it must be said before.
fn check_tool(path: String, tool: &Value) -> Result<(), ApiError> {
    let mut fields = Fields::nested(path, tool)?;
    let kind = fields.string("type")?.ok_or_else(|| fields.missing("type"))?;
    if kind != "function" {
        let problem = format!("only function tools can be used, found {}", quote(&kind.into()));
        return Err(ApiError::unsupported(fields.path("type"), problem));
    }
    let mut function = fields.object("function")?.ok_or_else(|| fields.missing("function"))?;
    parse_name(&mut function)?;
    function.string("description")?;
    function.map("parameters")?;
    function.boolean("strict")?;
    function.finish();
    fields.finish();
    Ok(())
}
