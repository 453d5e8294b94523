//! Grammars of tool calls, in the form that `output/tool_call.rs` reads and the model was trained on.
//!
//! The form writes strings as they are, so a string is held to what can be said of raw text: that it is one of
//! some strings, its length, a pattern. Everything else is JSON of its schema. Parameters come in the order in
//! which the schema has them; those that it does not require may be left out.

use std::fmt::Write;

use lily_model::tokenizer::Tokenizer;
use llguidance::api::GrammarWithLexer;
use serde_json::{Map, Value};

use super::lark::{literal, regex};
use super::{ConstraintError, Rule, settled};
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
    /// What the tool's one parameter must be: text, whatever the schema says.
    pub text: Option<Rule>,
}

/// How deep schemas are looked into; deeper, a value is any text.
const MAX_DEPTH: usize = 16;

/// Keywords that say nothing about a value that is a string.
const ANNOTATIONS: [&str; 9] =
    ["$comment", "default", "deprecated", "description", "examples", "nullable", "readOnly", "title", "type"];

/// Tells whether a grammar can be compiled on its own, and why not.
type Check<'a> = &'a dyn Fn(GrammarWithLexer) -> Result<(), String>;

/// The grammar of calls.
pub(super) struct Markup {
    rules: String,
    /// Names of the rules of single calls, from behind the opening tag.
    calls: Vec<String>,
    open: String,
    parallel: bool,
    /// Grammars that the rules refer to by their names.
    pub grammars: Vec<GrammarWithLexer>,
}

impl Markup {
    pub fn new(calls: &Calls, tokenizer: &Tokenizer, check: Check<'_>) -> Result<Self, ConstraintError> {
        let tag = |text: &str| match tokenizer.control_id(text) {
            Some(_) => text.to_owned(),
            None => literal(text),
        };
        let mut markup = Self {
            rules: String::new(),
            calls: Vec::new(),
            open: tag(tags::OPEN),
            parallel: calls.parallel,
            grammars: Vec::new(),
        };
        for (index, callable) in calls.tools.iter().enumerate() {
            markup
                .tool(index, callable, &tag(tags::CLOSE), check)
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

    fn tool(
        &mut self,
        index: usize,
        callable: &Callable,
        close: &str,
        check: Check<'_>,
    ) -> Result<(), String> {
        let Tool { name, parameters } = &callable.tool;
        let opening = literal(&format!("\n{}{name}>\n", tags::FUNCTION));
        let closing = literal(&format!("{}\n", tags::END_FUNCTION));
        let empty = Map::new();
        let properties = parameters.get("properties").and_then(Value::as_object).unwrap_or(&empty);
        let required: Vec<&str> =
            parameters["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let unknown = required.iter().find(|name| !properties.contains_key(**name));
        if let Some(unknown) = unknown.filter(|_| callable.strict) {
            return Err(format!("parameters.required: {unknown:?} is not among the properties"));
        }
        let mut body = String::new();
        for (i, (key, schema)) in properties.iter().enumerate() {
            if key.contains(['<', '>', '\n']) {
                return Err(format!("parameters.properties: a call can't have a parameter named {key:?}"));
            }
            let rule = format!("value_{index}_{i}");
            let expression = match &callable.text {
                Some(text) => self.text(index, text, check)?,
                None => {
                    let values = Values { callable, path: format!("parameters.properties.{key}"), check };
                    values.expression(schema, &rule.to_uppercase())?
                }
            };
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

impl Markup {
    /// Text of a grammar of its own. That it may hold the end of a value is up to who wrote it.
    fn text(&mut self, index: usize, text: &Rule, check: Check<'_>) -> Result<Expression, String> {
        let name = format!("tool_{index}");
        let grammar = text.grammar()?;
        check(grammar.clone()).map_err(|problem| format!("format: {problem}"))?;
        let end = literal(&format!("\n{}\n", tags::END_PARAMETER));
        let choices = vec![format!("@{name} {end}")];
        self.grammars.push(GrammarWithLexer { name: Some(name), ..grammar });
        Ok(Expression { terminals: String::new(), choices })
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
    path: String,
    check: Check<'a>,
}

impl Values<'_> {
    /// `name` is that of the terminals, but for a number.
    fn expression(self, schema: &Value, name: &str) -> Result<Expression, String> {
        let mut expression = Expression::default();
        self.add(schema, name, MAX_DEPTH, &mut expression)?;
        Ok(expression)
    }

    fn add(&self, schema: &Value, name: &str, depth: usize, to: &mut Expression) -> Result<(), String> {
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
    fn add_text(&self, schema: &Value, name: &str, to: &mut Expression) -> Result<(), String> {
        let mut parts = vec!["FREE".to_owned()];
        for (keyword, value) in schema.as_object().into_iter().flatten() {
            match keyword.as_str() {
                "pattern" => parts.extend(self.pattern(value)?),
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
    fn pattern(&self, pattern: &Value) -> Result<Option<String>, String> {
        let pattern = pattern.as_str().ok_or_else(|| self.problem("pattern", "expected a string"))?;
        let (begin, rest) = pattern.strip_prefix('^').map_or(("(?s:.*)", pattern), |rest| ("", rest));
        let (rest, end) = match rest.strip_suffix('$') {
            Some(inner) if !inner.ends_with('\\') => (inner, ""),
            _ => (rest, "(?s:.*)"),
        };
        let terminal = format!("/{begin}({}){end}/", llguidance::regex_to_lark(rest, "dw"));
        match (self.check)(GrammarWithLexer::from_lark(format!("start: {terminal}"))) {
            Ok(()) => Ok(Some(terminal)),
            Err(problem) if self.callable.strict => Err(self.problem("pattern", &problem)),
            Err(_) => Ok(None),
        }
    }

    fn add_json(&self, schema: &Value, to: &mut Expression) -> Result<(), String> {
        let mut schema = schema.as_object().cloned().unwrap_or_default();
        for name in ["$defs", "definitions"] {
            if let Some(definitions) = self.callable.tool.parameters.get(name) {
                schema.insert(name.to_owned(), definitions.clone());
            }
        }
        let mut schema = settled(&schema.into(), !self.callable.strict)?;
        if let Err(problem) = (self.check)(GrammarWithLexer::from_json_schema(schema.clone())) {
            if self.callable.strict {
                return Err(format!("{}: {problem}", self.path));
            }
            schema = settled(&Value::Bool(true), true)?;
        }
        to.choices.push(format!("%json {schema} {}", literal(&format!("\n{}\n", tags::END_PARAMETER))));
        Ok(())
    }

    fn problem(&self, keyword: &str, problem: &str) -> String {
        format!("{}.{keyword}: {problem}", self.path)
    }
}
