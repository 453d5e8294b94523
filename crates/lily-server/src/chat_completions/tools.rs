//! The tools of a request.

use serde_json::Value;

use crate::error::ApiError;
use crate::fields::{Fields, quote};

/// Tool definitions as the template takes them; none if the model must not call any.
pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let tools = fields.array("tools")?.unwrap_or_default();
    for (i, tool) in tools.iter().enumerate() {
        check_tool(format!("tools[{i}]"), tool)?;
    }
    if fields.boolean("parallel_tool_calls")? == Some(false) && !tools.is_empty() {
        let problem = "false is not supported: the model may call several tools at once";
        return Err(ApiError::unsupported("parallel_tool_calls", problem));
    }
    Ok(match parse_choice(fields)? {
        Choice::Auto => tools.to_vec(),
        // What it isn't told of it can't call.
        Choice::None => Vec::new(),
    })
}

enum Choice {
    Auto,
    None,
}

fn parse_choice(fields: &mut Fields<'_>) -> Result<Choice, ApiError> {
    match fields.any("tool_choice") {
        None => Ok(Choice::Auto),
        Some(choice) if choice == "auto" => Ok(Choice::Auto),
        Some(choice) if choice == "none" => Ok(Choice::None),
        Some(other) => {
            let problem = format!(
                "only auto and none are supported, found {}: a call can't be enforced yet",
                quote(other)
            );
            Err(ApiError::unsupported("tool_choice", problem))
        }
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
    let name = function.string("name")?.ok_or_else(|| function.missing("name"))?;
    // These would end the name in the markup that the model writes.
    if name.is_empty() || name.contains(|c: char| c.is_whitespace() || "<>=".contains(c)) {
        let problem = format!("expected a name without spaces and <, >, =, found {}", quote(&name.into()));
        return Err(ApiError::field(function.path("name"), problem));
    }
    function.string("description")?;
    function.map("parameters")?;
    if function.boolean("strict")? == Some(true) {
        let problem = "true is not supported: arguments can't be held to their schema yet";
        return Err(ApiError::unsupported(function.path("strict"), problem));
    }
    function.finish();
    fields.finish();
    Ok(())
}
