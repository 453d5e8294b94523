//! Forms that an answer can be held to.

use lily_engine::constraint::{ConstraintError, Rule};
use serde_json::Value;

use crate::error::ApiError;
use crate::fields::{Fields, quote};

/// A form, and the path of the field that asks for it.
pub(crate) type Format = (Rule, String);

/// `grammar`: a text in the form of Lark or of llama.cpp, or an object with `syntax` and `definition`.
pub(crate) fn parse_grammar(fields: &mut Fields<'_>) -> Result<Option<Rule>, ApiError> {
    match fields.any("grammar") {
        None => Ok(None),
        // Either has a sign that the other has not.
        Some(Value::String(text)) if text.contains("::=") => Ok(Some(Rule::Gbnf(text.clone()))),
        Some(Value::String(text)) => Ok(Some(Rule::Lark(text.clone()))),
        Some(value) => {
            let mut grammar = Fields::nested(fields.path("grammar"), value)?;
            let rule = parse_definition(&mut grammar)?;
            grammar.finish();
            Ok(Some(rule))
        }
    }
}

/// `syntax` and `definition`.
pub(crate) fn parse_definition(grammar: &mut Fields<'_>) -> Result<Rule, ApiError> {
    let syntax = grammar.one_of("syntax", &["lark", "gbnf", "regex"])?;
    let syntax = syntax.ok_or_else(|| grammar.missing("syntax"))?;
    let text = grammar.string("definition")?.ok_or_else(|| grammar.missing("definition"))?.to_owned();
    Ok(match syntax {
        "regex" => Rule::Regex(text),
        "gbnf" => Rule::Gbnf(text),
        _ => Rule::Lark(text),
    })
}

/// `{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", ...}`, whose schema is in a member
/// `json_schema` (chat) or beside the type (responses).
pub(crate) fn parse_format(mut format: Fields<'_>) -> Result<Option<Format>, ApiError> {
    let kind = format.one_of("type", &["text", "json_object", "json_schema"])?;
    let rule = match kind.ok_or_else(|| format.missing("type"))? {
        "text" => None,
        "json_object" => Some((Rule::json_object(), format.path("type"))),
        _ => match format.object("json_schema")? {
            Some(mut nested) => {
                let rule = parse_schema(&mut nested)?;
                nested.finish();
                Some(rule)
            }
            None if format.any("schema").is_some() => Some(parse_schema(&mut format)?),
            None => return Err(format.missing("json_schema")),
        },
    };
    format.finish();
    Ok(rule)
}

/// `strict: false` asks for less than is given: the schema holds either way.
fn parse_schema(fields: &mut Fields<'_>) -> Result<Format, ApiError> {
    fields.string("name")?;
    fields.string("description")?;
    fields.boolean("strict")?;
    let path = fields.path("schema");
    let schema = fields.any("schema").ok_or_else(|| fields.missing("schema"))?;
    if !schema.is_object() {
        return Err(ApiError::field(path, format!("expected an object, found {}", quote(schema))));
    }
    Ok((Rule::JsonSchema(schema.clone()), path))
}

/// The error for a form that can't be held to. `answer` is the path of the answer's; `tools` are the places in the
/// request of the tools that may be called.
pub(crate) fn refused(error: ConstraintError, answer: &str, tools: &[usize]) -> ApiError {
    match error.tool {
        None => ApiError::unsupported(answer, error.problem),
        Some(tool) => {
            let tool = tools.get(tool).copied().unwrap_or(tool);
            ApiError::unsupported(format!("tools[{tool}]"), error.problem)
        }
    }
}
