//! Tells text from outside from what a template writes.
//!
//! In every string of messages, tools and variables (keys too) a mark is set behind each character that a control
//! token can begin with. The mark is a character that occurs nowhere else, so in the rendered text a control
//! token without a mark in it begins with a character of the template's own, and one that a string from outside
//! spells, in whole or in parts, never counts. Then the marks are dropped. (A template that itself writes the
//! first half of a control token, as in `'<' + name + '>'`, means the second half to complete it.)

use std::collections::HashSet;

use minijinja::value::Value as Jinja;
use serde_json::{Map, Value};

use super::{ChatInput, TemplateError, python};
use crate::tokenizer::Tokenizer;

pub(super) struct Guard {
    mark: char,
    /// What control tokens begin with; punctuation marks, so that trimming white space meets no mark.
    firsts: Vec<char>,
    bytes_seen: u64,
}

impl Guard {
    /// Chooses a mark that occurs in none of these.
    pub(super) fn new(
        source: &str,
        tokenizer: &Tokenizer,
        input: &ChatInput<'_>,
    ) -> Result<Self, TemplateError> {
        let mut taken = HashSet::new();
        let mut take = |text: &str| taken.extend(text.chars().filter(|c| is_candidate(*c)));
        take(source);
        tokenizer.controls().for_each(&mut take);
        input
            .messages
            .iter()
            .chain(input.tools)
            .chain(input.variables.values())
            .for_each(|v| visit(v, &mut take));
        let Some(mark) = candidates().find(|c| !taken.contains(c)) else {
            return Err(TemplateError::Failed(
                "the conversation holds every noncharacter and every private-use character there is: one must be \
                 left to work with"
                    .into(),
            ));
        };
        let firsts: HashSet<char> = tokenizer.controls().filter_map(|token| token.chars().next()).collect();
        Ok(Self { mark, firsts: firsts.into_iter().collect(), bytes_seen: 0 })
    }

    /// Roughly how much input was converted.
    pub(super) fn bytes_seen(&self) -> u64 {
        self.bytes_seen
    }

    /// A JSON value for the template, all its strings marked.
    pub(super) fn value(&mut self, value: &Value) -> Jinja {
        self.bytes_seen += 8;
        match value {
            Value::Null => Jinja::from(()),
            Value::Bool(b) => Jinja::from(*b),
            Value::Number(n) => match (n.as_i64(), n.as_u64()) {
                (Some(n), _) => Jinja::from(n),
                (_, Some(n)) => Jinja::from(n),
                _ => Jinja::from(n.as_f64()),
            },
            Value::String(text) => Jinja::from(self.text(text)),
            Value::Array(items) => items.iter().map(|item| self.value(item)).collect(),
            Value::Object(map) => {
                Jinja::from_pairs(map.iter().map(|(key, value)| (self.text(key), self.value(value))))
            }
        }
    }

    /// A message for the template. With `split_thoughts` the thought in an assistant's content is moved to
    /// `reasoning_content`: behind marks the template would not find it.
    pub(super) fn message(&mut self, message: &Value, split_thoughts: bool) -> Jinja {
        let thought = message
            .as_object()
            .filter(|_| split_thoughts && self.firsts.contains(&'<'))
            .and_then(|map| Some((map, split_thought(map)?)));
        let Some((map, (reasoning, content))) = thought else { return self.value(message) };
        // Only newlines are stripped between thought and content; a mark keeps other white space from the trim
        // that content gets in the template.
        let keep = if content.starts_with(python::is_space) { self.mark.to_string() } else { String::new() };
        let replaced = [
            ("content", Jinja::from(keep + &self.text(&content))),
            ("reasoning_content", Jinja::from(self.text(&reasoning))),
        ];
        let others = map.iter().filter(|(key, _)| !matches!(key.as_str(), "content" | "reasoning_content"));
        let others: Vec<_> = others.map(|(key, value)| (self.text(key), self.value(value))).collect();
        Jinja::from_pairs(others.into_iter().chain(replaced.map(|(key, value)| (key.to_string(), value))))
    }

    pub(super) fn unmark(&self, text: &str) -> String {
        text.replace(self.mark, "")
    }

    pub(super) fn unmark_into(&self, text: &str, out: &mut String) {
        out.extend(text.split(self.mark));
    }

    fn text(&mut self, text: &str) -> String {
        self.bytes_seen += text.len() as u64;
        let mut marked = String::with_capacity(text.len() + 16);
        for part in text.split_inclusive(self.firsts.as_slice()) {
            marked.push_str(part);
            if part.ends_with(self.firsts.as_slice()) {
                marked.push(self.mark);
            }
        }
        marked
    }
}

/// Characters that may be marks: noncharacters, then private use.
fn candidates() -> impl Iterator<Item = char> {
    ('\u{FDD0}'..='\u{FDEF}').chain('\u{F0000}'..=char::MAX)
}

fn is_candidate(c: char) -> bool {
    matches!(c, '\u{FDD0}'..='\u{FDEF}' | '\u{F0000}'..=char::MAX)
}

fn visit(value: &Value, see: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => see(text),
        Value::Array(items) => items.iter().for_each(|item| visit(item, see)),
        Value::Object(map) => map.iter().for_each(|(key, value)| {
            see(key);
            visit(value, see);
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Thought and content of an assistant's message that holds both in `content`, divided as Qwen's templates do:
/// thought is what stands before the first `</think>`, content what stands behind the last.
fn split_thought(message: &Map<String, Value>) -> Option<(String, String)> {
    if message.get("role")? != "assistant" || message.get("reasoning_content").is_some_and(Value::is_string) {
        return None;
    }
    let content = text_content(message.get("content")?)?;
    let content = python::strip(&content);
    let (before, _) = content.split_once("</think>")?;
    let (_, after) = content.rsplit_once("</think>")?;
    let before = before.trim_end_matches('\n');
    let thought = before.rsplit_once("<think>").map_or(before, |(_, thought)| thought);
    Some((thought.trim_start_matches('\n').into(), after.trim_start_matches('\n').into()))
}

/// Content that is a string or a list of text parts, as one string.
fn text_content(content: &Value) -> Option<String> {
    match content {
        Value::String(text) => Some(text.clone()),
        Value::Array(parts) => parts.iter().map(text_part).collect(),
        _ => None,
    }
}

fn text_part(part: &Value) -> Option<&str> {
    let has_medium = ["image", "image_url", "video"].iter().any(|key| part.get(key).is_some());
    let is_medium = matches!(part["type"].as_str(), Some("image" | "video"));
    part.get("text").filter(|_| !has_medium && !is_medium)?.as_str()
}
