//! The one reader of what the model writes: thought, answer, tool calls.
//!
//! A reply is an optional thought, closed by `</think>`, then text and tool calls in any order. Replies that
//! are streamed and replies that are not go through the same [`OutputParser`]: its pieces, put together, are
//! the same however the text was cut on its way in.
//!
//! White space that only separates is not part of anything: newlines at both ends of the thought, all white
//! space between the thought and the answer, text around tool calls that is nothing but white space.

mod arguments;
mod markup;
mod thought;
mod tool_call;

use std::mem;
use std::sync::Arc;

use serde_json::Value;

use crate::request::Tool;
use markup::{Scan, scan};
use thought::Thought;
use tool_call::CallParser;

pub(crate) use arguments::{Types, integral};
pub(crate) use tool_call::tags;

/// A piece of output. Pieces of a kind concatenate.
#[derive(Clone, Debug, PartialEq)]
pub enum Delta {
    /// Text of the thought.
    Reasoning(String),
    /// Text of the answer.
    Text(String),
    /// A tool call begins.
    ToolCall {
        /// 0, 1, ... within the reply.
        index: u32,
        /// `call_` and 24 random letters and digits.
        id: String,
        /// Function name.
        name: String,
    },
    /// A fragment of the JSON text of the arguments of call `index`.
    ToolArguments {
        /// Which call.
        index: u32,
        /// JSON text; all fragments of a call concatenate to one JSON object, unless the output was cut by a
        /// limit inside the call: then they are the beginning of one.
        fragment: String,
    },
}

/// Reads one reply of a chat.
#[derive(Debug)]
pub struct OutputParser {
    mode: Mode,
    /// Text that can't be read before more of it has come: at most a tag and a newline.
    held: String,
    tools: Arc<[Tool]>,
    single_call: bool,
    output: Output,
}

#[derive(Debug)]
enum Mode {
    Thought(Thought),
    Text(Leading),
    Call(Box<CallParser>),
}

/// What happens to white space at the start of a piece of text.
#[derive(Debug)]
enum Leading {
    /// It separates the thought from the answer.
    Drop,
    /// It belongs to the text that follows, if any does before the next tool call.
    Keep(String),
    /// The start is behind.
    Over,
}

/// What a step of a part of the parser did with the text at hand.
enum Step {
    /// Read so many bytes, or changed its state.
    Used(usize),
    /// More text is needed.
    More,
    /// Read so many bytes and is done.
    Done(usize),
    /// Read so many bytes, and all that this part has read is plain text.
    Text(usize, String),
}

/// What is given out.
#[derive(Debug, Default)]
struct Output {
    deltas: Vec<Delta>,
    calls: u32,
}

impl OutputParser {
    /// A parser for a reply that begins inside a thought or not. Without tools, markup of tool calls is text.
    /// `single_call`: a call has one function, and nothing is to be read behind the first call.
    pub fn new(starts_in_thought: bool, tools: Arc<[Tool]>, single_call: bool) -> Self {
        let mode = match (starts_in_thought, tools.is_empty()) {
            (true, _) => Mode::Thought(Thought::default()),
            (false, true) => Mode::Text(Leading::Over),
            (false, false) => Mode::Text(Leading::Keep(String::new())),
        };
        Self { mode, held: String::new(), tools, single_call, output: Output::default() }
    }

    /// Whether the text so far ends inside the thought.
    pub fn in_thought(&self) -> bool {
        matches!(self.mode, Mode::Thought(_))
    }

    /// Whether the text so far ends inside a tool call.
    pub fn in_call(&self) -> bool {
        matches!(self.mode, Mode::Call(_))
    }

    /// Whether the one call that there may be is complete.
    pub fn is_complete(&self) -> bool {
        self.single_call && self.output.calls > 0 && !self.in_call()
    }

    /// Tool calls begun so far.
    pub fn calls(&self) -> u32 {
        self.output.calls
    }

    /// Takes a piece of text and gives what became certain.
    pub fn push(&mut self, piece: &str) -> Vec<Delta> {
        let mut text = mem::take(&mut self.held);
        text.push_str(piece);
        let mut rest = text.as_str();
        while !rest.is_empty() && !self.is_complete() {
            let step = match &mut self.mode {
                Mode::Thought(thought) => thought.step(rest, &mut self.output),
                Mode::Text(_) => self.step_text(rest),
                Mode::Call(call) => call.step(rest, &mut self.output),
            };
            match step {
                Step::Used(n) => rest = &rest[n..],
                Step::More => break,
                Step::Done(n) => {
                    rest = &rest[n..];
                    self.mode = Mode::Text(match self.mode {
                        Mode::Thought(_) => Leading::Drop,
                        _ => Leading::Keep(String::new()),
                    });
                }
                Step::Text(n, text) => {
                    rest = &rest[n..];
                    self.output.text(&text);
                    self.mode = Mode::Text(Leading::Over);
                }
            }
        }
        self.held = if self.is_complete() { String::new() } else { rest.to_owned() };
        mem::take(&mut self.output.deltas)
    }

    /// The end of the text. `cut`: by a limit, not by the model; then an open tool call stays open, and one
    /// whose name isn't complete is left out. Otherwise it is closed.
    pub fn finish(&mut self, cut: bool) -> Vec<Delta> {
        let held = mem::take(&mut self.held);
        match mem::replace(&mut self.mode, Mode::Text(Leading::Over)) {
            Mode::Thought(thought) => thought.finish(&held, &mut self.output),
            Mode::Text(leading) => {
                if let Leading::Keep(blank) = leading
                    && (self.output.calls == 0 || !held.is_empty())
                {
                    self.output.text(&blank);
                }
                self.output.text(&held);
            }
            Mode::Call(call) => {
                let text = call.finish(&held, cut, &mut self.output);
                self.output.text(&text);
            }
        }
        mem::take(&mut self.output.deltas)
    }

    fn step_text(&mut self, rest: &str) -> Step {
        let Mode::Text(leading) = &mut self.mode else { return Step::More };
        let blank = rest.len() - rest.trim_start().len();
        if !matches!(leading, Leading::Over) && blank > 0 {
            if let Leading::Keep(kept) = leading {
                kept.push_str(&rest[..blank]);
            }
            return Step::Used(blank);
        }
        let tags: &[&str] = if self.tools.is_empty() { &[] } else { &[tags::OPEN] };
        let (text, opens_call) = match scan(rest, tags) {
            Scan::Tag { at, .. } => (&rest[..at], true),
            Scan::Partial { at: 0 } => return Step::More,
            Scan::Partial { at } => (&rest[..at], false),
            Scan::Nothing => (rest, false),
        };
        if !text.is_empty() {
            if let Leading::Keep(kept) = leading {
                self.output.text(kept);
            }
            *leading = Leading::Over;
            self.output.text(text);
        }
        if !opens_call {
            return Step::Used(text.len());
        }
        self.mode = Mode::Call(Box::new(CallParser::new(Arc::clone(&self.tools), self.single_call)));
        Step::Used(text.len() + tags::OPEN.len())
    }
}

impl Output {
    fn reasoning(&mut self, text: &str) {
        match self.deltas.last_mut() {
            _ if text.is_empty() => {}
            Some(Delta::Reasoning(last)) => last.push_str(text),
            _ => self.deltas.push(Delta::Reasoning(text.to_owned())),
        }
    }

    fn text(&mut self, text: &str) {
        match self.deltas.last_mut() {
            _ if text.is_empty() => {}
            Some(Delta::Text(last)) => last.push_str(text),
            _ => self.deltas.push(Delta::Text(text.to_owned())),
        }
    }

    /// Begins a call and gives its index.
    fn call(&mut self, name: &str) -> u32 {
        let index = self.calls;
        self.calls += 1;
        let id = "call_".chars().chain(std::iter::repeat_with(fastrand::alphanumeric).take(24)).collect();
        self.deltas.push(Delta::ToolCall { index, id, name: name.to_owned() });
        index
    }

    fn arguments(&mut self, call: u32, json: &str) {
        match self.deltas.last_mut() {
            _ if json.is_empty() => {}
            Some(Delta::ToolArguments { index, fragment }) if *index == call => fragment.push_str(json),
            _ => self.deltas.push(Delta::ToolArguments { index: call, fragment: json.to_owned() }),
        }
    }
}

/// The one call that a text between the tags of a call spells: its name and its arguments.
pub(crate) fn read_call(text: &str, tools: &Arc<[Tool]>) -> Option<(String, Value)> {
    let mut parser = OutputParser::new(false, Arc::clone(tools), false);
    parser.mode = Mode::Call(Box::new(CallParser::new(Arc::clone(tools), false)));
    let deltas = [parser.push(text), parser.push(tags::CLOSE), parser.finish(false)].concat();
    let mut deltas = deltas.into_iter();
    let Some(Delta::ToolCall { name, .. }) = deltas.next() else { return None };
    let mut json = String::new();
    for delta in deltas {
        let Delta::ToolArguments { fragment, .. } = delta else { return None };
        json += &fragment;
    }
    Some((name, serde_json::from_str(&json).ok()?))
}

#[cfg(test)]
mod tests;
