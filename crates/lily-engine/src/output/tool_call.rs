//! Tool calls, from `<tool_call>` to `</tool_call>`.
//!
//! The form that the model was trained on, line by line:
//! `<tool_call>`, `<function=NAME>`, any number of `<parameter=KEY>`, VALUE, `</parameter>`, then `</function>`,
//! `</tool_call>`. A JSON object with `name` and `arguments` between the outer tags is understood too. Markup that
//! isn't well formed still has a defined meaning, and a call whose name was read is never dropped:
//!
//! * Closing tags may be missing: the next opening tag, or the end of the output, closes what is open. Inside a
//!   value only `</parameter>` counts, or `</function>` and `</tool_call>` in a row: a value may well hold tags.
//! * Text between parameters is ignored.
//! * Of parameters with the same name the first counts: it was sent already when the second one comes.
//! * `<tool_call>` that neither form follows is text.

use std::mem;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::arguments::Arguments;
use super::markup::{Scan, at_start, scan};
use super::{Output, Step};
use crate::request::Tool;

/// The markup.
pub(crate) mod tags {
    pub(crate) const OPEN: &str = "<tool_call>";
    pub(crate) const CLOSE: &str = "</tool_call>";
    pub(crate) const FUNCTION: &str = "<function=";
    pub(crate) const END_FUNCTION: &str = "</function>";
    pub(crate) const PARAMETER: &str = "<parameter=";
    pub(crate) const END_PARAMETER: &str = "</parameter>";
}
use tags::{CLOSE, END_FUNCTION, END_PARAMETER, FUNCTION, OPEN, PARAMETER};

#[derive(Debug)]
pub(super) struct CallParser {
    state: State,
    tools: Arc<[Tool]>,
    single: bool,
    /// What has been read and is not a call yet.
    raw: String,
    /// A name that has begun.
    name: String,
    /// The call that has begun.
    arguments: Option<Arguments>,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// `<function=` or a JSON object.
    Opening,
    /// More of a JSON object.
    Json,
    /// More of a function's name.
    FunctionName,
    /// A parameter or the end of the function.
    Body,
    /// More of a parameter's name.
    ParameterName,
    /// The newline before a value.
    ValueStart,
    /// More of a value.
    Value,
    /// The end of the call.
    Closing,
}

impl CallParser {
    /// A parser for what follows [`OPEN`]. `single`: no second function follows the first.
    pub fn new(tools: Arc<[Tool]>, single: bool) -> Self {
        let raw = OPEN.to_owned();
        Self { state: State::Opening, tools, single, raw, name: String::new(), arguments: None }
    }

    pub fn step(&mut self, rest: &str, output: &mut Output) -> Step {
        match self.state {
            State::Opening => self.opening(rest),
            State::Json => self.json(rest, output),
            State::FunctionName => self.function_name(rest, output),
            State::Body => self.body(rest, output),
            State::ParameterName => self.parameter_name(rest, output),
            State::ValueStart => {
                self.state = State::Value;
                Step::Used(usize::from(rest.starts_with('\n')))
            }
            State::Value => self.value(rest, output),
            State::Closing => self.closing(rest),
        }
    }

    /// The output ends here; `held` was not read yet, a tag cut short. Gives what is text after all.
    pub fn finish(mut self, held: &str, cut: bool, output: &mut Output) -> String {
        match self.state {
            State::Opening | State::Json => {
                self.raw.push_str(held);
                if self.json_call(output) || cut { String::new() } else { self.raw }
            }
            State::FunctionName if cut => String::new(),
            State::FunctionName if self.name.trim().is_empty() => self.raw,
            State::FunctionName => {
                self.begin(output);
                self.end(output);
                String::new()
            }
            _ if cut => String::new(),
            _ => {
                self.end(output);
                String::new()
            }
        }
    }

    fn opening(&mut self, rest: &str) -> Step {
        let blank = rest.len() - rest.trim_start().len();
        if blank > 0 {
            self.raw.push_str(&rest[..blank]);
            return Step::Used(blank);
        }
        if rest.starts_with('{') {
            self.state = State::Json;
            return Step::Used(0);
        }
        match at_start(rest, &[FUNCTION]) {
            Scan::Tag { .. } => self.open_function(),
            Scan::Partial { .. } => Step::More,
            Scan::Nothing => Step::Text(0, mem::take(&mut self.raw)),
        }
    }

    fn open_function(&mut self) -> Step {
        self.raw.push_str(FUNCTION);
        self.name.clear();
        self.state = State::FunctionName;
        Step::Used(FUNCTION.len())
    }

    fn json(&mut self, rest: &str, output: &mut Output) -> Step {
        let tags = [CLOSE, OPEN];
        let (at, tag) = match scan(rest, &tags) {
            Scan::Tag { at, tag } => (at, Some(tags[tag])),
            Scan::Partial { at: 0 } => return Step::More,
            Scan::Partial { at } => (at, None),
            Scan::Nothing => (rest.len(), None),
        };
        self.raw.push_str(&rest[..at]);
        match tag {
            None => Step::Used(at),
            Some(_) if !self.json_call(output) => Step::Text(at, mem::take(&mut self.raw)),
            Some(CLOSE) => Step::Done(at + CLOSE.len()),
            Some(_) => Step::Done(at),
        }
    }

    /// Gives out the call that `raw` spells in JSON, if it does.
    fn json_call(&self, output: &mut Output) -> bool {
        #[derive(Deserialize)]
        struct Call<'a> {
            name: String,
            #[serde(borrow)]
            arguments: Option<&'a RawValue>,
        }
        let Ok(call) = serde_json::from_str::<Call<'_>>(&self.raw[OPEN.len()..]) else { return false };
        let json = call.arguments.map_or("{}", RawValue::get);
        let json = match serde_json::from_str(json) {
            Ok(Value::Object(_)) => json.to_owned(),
            Ok(Value::Null) => "{}".to_owned(),
            Ok(Value::String(text)) if matches!(serde_json::from_str(&text), Ok(Value::Object(_))) => text,
            _ => return false,
        };
        let index = output.call(&call.name);
        output.arguments(index, &json);
        true
    }

    /// Reads on to the end of a name, which is `>`, or the end of the line if that was forgotten.
    fn read_name(&mut self, rest: &str) -> (usize, bool) {
        let end = rest.find(['>', '\n']);
        let name = &rest[..end.unwrap_or(rest.len())];
        self.name.push_str(name);
        (name.len() + usize::from(rest[name.len()..].starts_with('>')), end.is_some())
    }

    fn function_name(&mut self, rest: &str, output: &mut Output) -> Step {
        let (used, complete) = self.read_name(rest);
        self.raw.push_str(&rest[..used]);
        if complete {
            if self.name.trim().is_empty() {
                return Step::Text(used, mem::take(&mut self.raw));
            }
            self.begin(output);
        }
        Step::Used(used)
    }

    fn begin(&mut self, output: &mut Output) {
        let name = self.name.trim();
        let tool = self.tools.iter().find(|tool| tool.name == name);
        if tool.is_none() {
            tracing::debug!(name, "the model calls a tool that it was not given");
        }
        let schema = tool.map_or(Value::Null, |tool| tool.parameters.clone());
        self.arguments = Some(Arguments::new(output.call(name), schema));
        self.state = State::Body;
    }

    fn end(&mut self, output: &mut Output) {
        if let Some(arguments) = self.arguments.take() {
            arguments.finish(output);
        }
        self.raw.clear();
        self.state = State::Closing;
    }

    fn body(&mut self, rest: &str, output: &mut Output) -> Step {
        let tags = [PARAMETER, END_FUNCTION, CLOSE, OPEN, FUNCTION];
        let (at, tag) = match scan(rest, &tags) {
            Scan::Tag { at, tag } => (at, Some(tags[tag])),
            Scan::Partial { at: 0 } => return Step::More,
            Scan::Partial { at } => (at, None),
            Scan::Nothing => (rest.len(), None),
        };
        let ignored = rest[..at].trim();
        if !ignored.is_empty() {
            tracing::debug!(text = ignored, "text between the parameters of a tool call ignored");
        }
        match tag {
            None => Step::Used(at),
            Some(PARAMETER) => {
                self.name.clear();
                self.state = State::ParameterName;
                Step::Used(at + PARAMETER.len())
            }
            Some(END_FUNCTION) => {
                self.end(output);
                Step::Used(at + END_FUNCTION.len())
            }
            Some(_) => {
                self.end(output);
                Step::Used(at)
            }
        }
    }

    fn parameter_name(&mut self, rest: &str, output: &mut Output) -> Step {
        let (used, complete) = self.read_name(rest);
        if complete {
            self.state = State::ValueStart;
            if let Some(arguments) = &mut self.arguments {
                arguments.begin(self.name.trim(), output);
            }
        }
        Step::Used(used)
    }

    fn value(&mut self, rest: &str, output: &mut Output) -> Step {
        let Some(arguments) = &mut self.arguments else { return Step::Done(0) };
        let (at, close) = find_value_end(rest);
        // The newline before the closing tag is markup: one at the end of the text waits for what follows it.
        let text = rest[..at].strip_suffix('\n').unwrap_or(&rest[..at]);
        arguments.push(text, output);
        match close {
            None if text.is_empty() => Step::More,
            None => Step::Used(text.len()),
            Some(length) => {
                arguments.end(output);
                self.state = State::Body;
                Step::Used(at + length)
            }
        }
    }

    fn closing(&mut self, rest: &str) -> Step {
        let blank = rest.len() - rest.trim_start().len();
        if blank > 0 {
            return Step::Used(blank);
        }
        let tags: &[&str] = if self.single { &[CLOSE] } else { &[CLOSE, FUNCTION] };
        match at_start(rest, tags) {
            Scan::Tag { tag: 0, .. } => Step::Done(CLOSE.len()),
            Scan::Tag { .. } => self.open_function(),
            Scan::Partial { .. } => Step::More,
            Scan::Nothing => Step::Done(0),
        }
    }
}

/// Where a value ends, and how much of the closing markup to skip; `None`: it goes on after the text, of which
/// so much is certain to belong to it.
fn find_value_end(text: &str) -> (usize, Option<usize>) {
    for (at, _) in text.match_indices("<") {
        let rest = &text[at..];
        match at_start(rest, &[END_PARAMETER, END_FUNCTION]) {
            Scan::Tag { tag: 0, .. } => return (at, Some(END_PARAMETER.len())),
            Scan::Tag { .. } => {
                let after = &rest[END_FUNCTION.len()..];
                match at_start(after.strip_prefix('\n').unwrap_or(after), &[CLOSE]) {
                    // Left for the body to read.
                    Scan::Tag { .. } => return (at, Some(0)),
                    Scan::Partial { .. } => return (at, None),
                    Scan::Nothing => {}
                }
            }
            Scan::Partial { .. } => return (at, None),
            Scan::Nothing => {}
        }
    }
    (text.len(), None)
}
