//! Grammars of tool calls, in the form that `output/tool_call.rs` reads and the model was trained on.
//!
//! The form writes strings as they are, so a string is held to what can be said of raw text: that it is one of
//! some strings, its length, a pattern. Everything else is JSON of its schema. Parameters come in the order in
//! which the schema has them; those that it does not require may be left out.

use std::fmt::Write;

use lily_model::tokenizer::Tokenizer;
use serde_json::{Map, Value};

use super::lark::{literal, regex};
use super::{ConstraintError, settled};
use crate::output::{Types, tags};
use crate::request::Tool;

/// What the calls of a reply must be.
#[derive(Clone, Debug, PartialEq)]
pub struct Calls {
    /// The tools that may be called.
    pub tools: Vec<Callable>,
    /// The reply consists of calls.
    pub required: bool,
    /// There may be more than one.
    pub parallel: bool,
}

/// A tool that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Callable {
    /// Name and schema.
    pub tool: Tool,
    /// What the schema says and can't be held to is an error. Otherwise it is passed over.
    pub strict: bool,
}

/// How deep schemas are looked into; deeper, a value is any text.
const MAX_DEPTH: usize = 16;

/// Keywords that say nothing about a value that is a string.
const ANNOTATIONS: [&str; 9] =
    ["$comment", "default", "deprecated", "description", "examples", "nullable", "readOnly", "title", "type"];

/// A JSON schema inside the grammar, and where it comes from.
pub(super) struct Part {
    pub tool: usize,
    pub path: String,
    pub schema: Value,
}

/// The grammar of calls.
pub(super) struct Markup {
    rules: String,
    /// Names of the rules of single calls, from behind the opening tag.
    calls: Vec<String>,
    open: String,
    parallel: bool,
    /// All JSON schemas of strict tools.
    pub parts: Vec<Part>,
}

impl Markup {
    pub fn new(calls: &Calls, tokenizer: &Tokenizer) -> Result<Self, ConstraintError> {
        let tag = |text: &str| match tokenizer.control_id(text) {
            Some(_) => text.to_owned(),
            None => literal(text),
        };
        let mut markup = Self {
            rules: String::new(),
            calls: Vec::new(),
            open: tag(tags::OPEN),
            parallel: calls.parallel,
            parts: Vec::new(),
        };
        for (index, callable) in calls.tools.iter().enumerate() {
            markup
                .tool(index, callable, &tag(tags::CLOSE))
                .map_err(|problem| ConstraintError { tool: Some(index), problem })?;
        }
        // Nothing in a value may be read as its end. (A complement must be cut with something: alone, llguidance
        // lets everything pass.)
        let ends = [tags::END_PARAMETER.to_owned(), format!("{}\\n?{}", tags::END_FUNCTION, tags::CLOSE)];
        let _ = writeln!(markup.rules, "FREE: /(?s:.*)/ & ~/(?s:.*)({})(?s:.*)/", regex(&ends.join("|")));
        Ok(markup)
    }

    /// All rules.
    pub fn rules(&self) -> &str {
        &self.rules
    }

    /// One call, from behind its opening tag.
    pub fn opened(&self) -> String {
        self.calls.join(" | ")
    }

    /// All calls of a reply.
    pub fn all(&self) -> String {
        let call = format!("{} ({})", self.open, self.opened());
        if self.parallel { format!("{call} (\"\\n\" {call})*") } else { call }
    }

    fn tool(&mut self, index: usize, callable: &Callable, close: &str) -> Result<(), String> {
        let Tool { name, parameters } = &callable.tool;
        let opening = literal(&format!("\n{}{name}>\n", tags::FUNCTION));
        let closing = literal(&format!("{}\n", tags::END_FUNCTION));
        let empty = Map::new();
        let properties = parameters.get("properties").and_then(Value::as_object).unwrap_or(&empty);
        let required: Vec<&str> =
            parameters["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        if let Some(unknown) = required.iter().find(|name| !properties.contains_key(**name)) {
            return Err(format!("parameters.required: {unknown:?} is not among the properties"));
        }
        let mut body = String::new();
        for (i, (key, schema)) in properties.iter().enumerate() {
            if key.contains(['<', '>', '\n']) {
                return Err(format!("parameters.properties: a call can't have a parameter named {key:?}"));
            }
            let rule = format!("value_{index}_{i}");
            let value =
                Values { callable, index, path: format!("parameters.properties.{key}"), parts: vec![] };
            let (expression, parts) = value.expression(schema, &rule.to_uppercase())?;
            self.parts.extend(parts);
            let _ = write!(self.rules, "{}", expression.terminals);
            let _ = writeln!(self.rules, "{rule}: {}", expression.choices.join(" | "));
            let optional = if required.contains(&key.as_str()) { "" } else { "?" };
            let key = literal(&format!("{}{key}>\n", tags::PARAMETER));
            let _ = write!(body, " ({key} {rule}){optional}");
        }
        let open_ended = properties.is_empty()
            && parameters.get("additionalProperties").is_some_and(|more| *more != false);
        if open_ended {
            let free = format!("FREE {}", literal(&format!("\n{}\n", tags::END_PARAMETER)));
            let _ = writeln!(
                self.rules,
                "OTHER_{index}: {} /[^<>=\\s]+/ \">\\n\" {free}",
                literal(tags::PARAMETER)
            );
            let _ = write!(body, " OTHER_{index}*");
        }
        let _ = writeln!(self.rules, "call_{index}: {opening}{body} {closing} {close}");
        self.calls.push(format!("call_{index}"));
        Ok(())
    }
}

/// The forms that a value may have.
#[derive(Default)]
struct Expression {
    /// Terminals that `choices` refers to.
    terminals: String,
    choices: Vec<String>,
}

/// Turns the schema of a parameter into an expression.
struct Values<'a> {
    callable: &'a Callable,
    index: usize,
    path: String,
    parts: Vec<Part>,
}

impl Values<'_> {
    /// `name` is that of the terminals, but for a number.
    fn expression(mut self, schema: &Value, name: &str) -> Result<(Expression, Vec<Part>), String> {
        let mut expression = Expression::default();
        self.add(schema, name, MAX_DEPTH, &mut expression)?;
        Ok((expression, self.parts))
    }

    fn add(&mut self, schema: &Value, name: &str, depth: usize, to: &mut Expression) -> Result<(), String> {
        let root = &self.callable.tool.parameters;
        let Some(depth) = depth.checked_sub(1) else {
            return self.add_text(&Value::Null, name, to);
        };
        if let Some(target) = schema["$ref"].as_str() {
            let target = target.strip_prefix('#').and_then(|path| root.pointer(path));
            let target = target.ok_or_else(|| self.problem("$ref", "expected a path into the parameters"))?;
            return self.add(target, name, depth, to);
        }
        let constant = schema.get("const").map(std::slice::from_ref);
        if let Some(values) = constant.or_else(|| schema["enum"].as_array().map(Vec::as_slice)) {
            to.choices.extend(values.iter().map(|value| {
                let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                literal(&format!("{text}\n{}\n", tags::END_PARAMETER))
            }));
            return Ok(());
        }
        if let Some(parts) = schema["anyOf"].as_array().or_else(|| schema["oneOf"].as_array()) {
            return parts.iter().try_for_each(|part| self.add(part, name, depth, to));
        }
        let types = Types::of(schema, root);
        if types.has(Types::STRING) {
            return self.add_text(schema, name, to);
        }
        self.add_json(schema, to)
    }

    /// A string, or whatever else the schema allows beside strings: written out, that is a text too.
    fn add_text(&mut self, schema: &Value, name: &str, to: &mut Expression) -> Result<(), String> {
        let mut parts = vec!["FREE".to_owned()];
        for (keyword, value) in schema.as_object().into_iter().flatten() {
            match keyword.as_str() {
                "pattern" => parts.push(self.pattern(value)?),
                "minLength" | "maxLength" => {
                    let length = value.as_u64().filter(|length| *length <= 100_000);
                    let length =
                        length.ok_or_else(|| self.problem(keyword, "expected a number up to 100000"))?;
                    let range =
                        if keyword == "minLength" { format!("{length},") } else { format!("0,{length}") };
                    parts.push(format!("/(?s:.{{{range}}})/"));
                }
                _ if ANNOTATIONS.contains(&keyword.as_str()) || !self.callable.strict => {}
                _ => return Err(self.problem(keyword, "can't be enforced in a string")),
            }
        }
        let terminal = format!("{name}_{}", to.choices.len());
        let end = literal(&format!("\n{}\n", tags::END_PARAMETER));
        let _ = writeln!(to.terminals, "{terminal}: ({}) {end}", parts.join(" & "));
        to.choices.push(terminal);
        Ok(())
    }

    /// A search of the pattern in the text, as JSON schema has it.
    fn pattern(&self, pattern: &Value) -> Result<String, String> {
        let pattern = pattern.as_str().ok_or_else(|| self.problem("pattern", "expected a string"))?;
        let (begin, rest) = pattern.strip_prefix('^').map_or(("(?s:.*)", pattern), |rest| ("", rest));
        let (rest, end) = match rest.strip_suffix('$') {
            Some(inner) if !inner.ends_with('\\') => (inner, ""),
            _ => (rest, "(?s:.*)"),
        };
        Ok(format!("/{begin}({}){end}/", llguidance::regex_to_lark(rest, "dw")))
    }

    fn add_json(&mut self, schema: &Value, to: &mut Expression) -> Result<(), String> {
        let mut schema = schema.as_object().cloned().unwrap_or_default();
        for name in ["$defs", "definitions"] {
            if let Some(definitions) = self.callable.tool.parameters.get(name) {
                schema.insert(name.to_owned(), definitions.clone());
            }
        }
        let schema = settled(&schema.into(), !self.callable.strict)?;
        to.choices.push(format!("%json {schema} {}", literal(&format!("\n{}\n", tags::END_PARAMETER))));
        if self.callable.strict {
            self.parts.push(Part { tool: self.index, path: self.path.clone(), schema });
        }
        Ok(())
    }

    fn problem(&self, keyword: &str, problem: &str) -> String {
        format!("{}.{keyword}: {problem}", self.path)
    }
}
