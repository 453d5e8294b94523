//! The answer, item by item. Streamed or not, it is put together here.

use std::mem;
use std::sync::Arc;

use lily_engine::output::Delta;
use lily_engine::request::{FinishReason, Finished, Usage};
use lily_model::sample::Logprobs;
use lily_model::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::items::CUSTOM_INPUT;
use super::request::Told;
use crate::app::unix_time;
use crate::error::ApiError;
use crate::generation::logprobs::TokenLogprob;
use crate::trace::random_id;

/// An answer so far.
pub(super) struct Answer {
    id: String,
    created: u64,
    told: Told,
    tokenizer: Arc<Tokenizer>,
    items: Vec<Item>,
    /// The last item may grow.
    open: bool,
    /// Tokens whose text has not come yet.
    tokens: Vec<TokenLogprob>,
    status: &'static str,
    completed: Option<u64>,
    error: Value,
    usage: Option<Usage>,
}

struct Item {
    id: String,
    kind: Kind,
    status: &'static str,
}

enum Kind {
    Reasoning(String),
    Message { text: String, logprobs: Vec<TokenLogprob> },
    Call { call_id: String, name: String, arguments: String },
}

impl Answer {
    /// Before anything is known of it.
    pub fn new(told: Told, created: u64, tokenizer: Arc<Tokenizer>) -> Self {
        Self {
            id: random_id("resp_"),
            created,
            told,
            tokenizer,
            items: Vec::new(),
            open: false,
            tokens: Vec::new(),
            status: "in_progress",
            completed: None,
            error: Value::Null,
            usage: None,
        }
    }

    /// An event that tells all of the answer so far.
    pub fn event(&self, kind: &'static str) -> Value {
        json!({"type": kind, "response": self.to_json()})
    }

    /// A token of what comes next. Those of the thought have no place in an answer.
    pub fn token(&mut self, id: u32, logprobs: &Logprobs, in_thought: bool) {
        if !in_thought {
            self.tokens.push(TokenLogprob::new(id, logprobs, &self.tokenizer));
        }
    }

    /// Adds a piece; gives the events that tell of it.
    pub fn add(&mut self, delta: Delta) -> Vec<Value> {
        let tokens = mem::take(&mut self.tokens);
        match delta {
            Delta::Reasoning(text) => {
                let mut events = self.begin(Kind::Reasoning(String::new()));
                if let Some(Item { kind: Kind::Reasoning(all), .. }) = self.items.last_mut() {
                    all.push_str(&text);
                }
                events.push(self.of_part(json!({"type": "response.reasoning_text.delta", "delta": text})));
                events
            }
            Delta::Text(text) => {
                let mut events = self.begin(Kind::Message { text: String::new(), logprobs: Vec::new() });
                let told = json!({"type": "response.output_text.delta", "delta": text, "logprobs": tokens});
                if let Some(Item { kind: Kind::Message { text: all, logprobs }, .. }) = self.items.last_mut()
                {
                    all.push_str(&text);
                    logprobs.extend(tokens);
                }
                events.push(self.of_part(told));
                events
            }
            Delta::ToolCall { id, name, .. } => {
                self.begin(Kind::Call { call_id: id, name, arguments: String::new() })
            }
            Delta::ToolArguments { fragment, .. } => self.arguments(&fragment),
        }
    }

    fn arguments(&mut self, fragment: &str) -> Vec<Value> {
        let Some(Item { kind: Kind::Call { name, arguments, .. }, .. }) = self.items.last_mut() else {
            return Vec::new();
        };
        arguments.push_str(fragment);
        // The input of a custom tool is inside its JSON: it is told when that is complete.
        if self.told.tools.custom.contains(name) {
            return Vec::new();
        }
        vec![self.of_item(json!({"type": "response.function_call_arguments.delta", "delta": fragment}))]
    }

    /// The end; gives the events that tell of it.
    pub fn end(&mut self, finished: &Finished) -> Vec<Value> {
        let cut = finished.reason == FinishReason::Length;
        self.status = if cut { "incomplete" } else { "completed" };
        let mut events = self.close(self.status);
        self.completed = (!cut).then(unix_time);
        self.usage = Some(finished.usage);
        events.push(self.event(if cut { "response.incomplete" } else { "response.completed" }));
        events
    }

    /// The answer fails.
    pub fn fail(&mut self, error: &ApiError) -> Value {
        self.status = "failed";
        self.error = json!({"code": "server_error", "message": error.message});
        self.event("response.failed")
    }

    /// All of it.
    pub fn to_json(&self) -> Value {
        let incomplete = self.status == "incomplete";
        let mut answer = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": self.completed,
            "status": self.status,
            "error": self.error,
            "incomplete_details": if incomplete { json!({"reason": "max_output_tokens"}) } else { Value::Null },
            "output": self.items.iter().map(|item| self.item_json(item)).collect::<Value>(),
            "usage": self.usage.map(usage_json),
        });
        if let Some(members) = answer.as_object_mut() {
            members.extend(self.told.members.clone());
        }
        answer
    }

    /// Begins an item, unless it is of a kind that the open one is: then that grows.
    fn begin(&mut self, kind: Kind) -> Vec<Value> {
        if self.open
            && let Some(last) = self.items.last()
            && !matches!(kind, Kind::Call { .. })
            && mem::discriminant(&last.kind) == mem::discriminant(&kind)
        {
            return Vec::new();
        }
        let mut events = self.close("completed");
        let item = Item { id: random_id(kind.prefix()), kind, status: "in_progress" };
        let added = self.item_json(&item);
        self.items.push(item);
        self.open = true;
        events
            .push(json!({"type": "response.output_item.added", "output_index": self.last(), "item": added}));
        if let Some(part) = self.items.last().and_then(|item| item.kind.part()) {
            events.push(self.of_part(json!({"type": "response.content_part.added", "part": part})));
        }
        events
    }

    /// Ends the open item, if there is one.
    fn close(&mut self, status: &'static str) -> Vec<Value> {
        if !mem::take(&mut self.open) {
            return Vec::new();
        }
        let Some(item) = self.items.last_mut() else { return Vec::new() };
        item.status = status;
        let (id, done, part) = (item.id.clone(), item.kind.done(&self.told), item.kind.part());
        let index = self.last();
        let placed = |mut event: Value, in_part: bool| {
            event["item_id"] = id.clone().into();
            event["output_index"] = index.into();
            if in_part {
                event["content_index"] = 0.into();
            }
            event
        };
        let in_part = part.is_some();
        let mut events: Vec<Value> = done.into_iter().map(|event| placed(event, in_part)).collect();
        events.extend(
            part.map(|part| placed(json!({"type": "response.content_part.done", "part": part}), true)),
        );
        let item = self.items.last().map(|item| self.item_json(item));
        events.push(json!({"type": "response.output_item.done", "output_index": index, "item": item}));
        events
    }

    /// An event about the last item.
    fn of_item(&self, mut event: Value) -> Value {
        event["item_id"] = self.items.last().map(|item| item.id.clone()).into();
        event["output_index"] = self.last().into();
        event
    }

    /// An event about the one part of the last item.
    fn of_part(&self, event: Value) -> Value {
        let mut event = self.of_item(event);
        event["content_index"] = 0.into();
        event
    }

    fn last(&self) -> usize {
        self.items.len().saturating_sub(1)
    }

    fn item_json(&self, item: &Item) -> Value {
        let Item { id, kind, status } = item;
        // What was begun has no parts yet: they are told of by events of their own.
        let parts = |part: Option<Value>| if *status == "in_progress" { json!([]) } else { json!([part]) };
        match kind {
            Kind::Reasoning(text) => {
                let again = (self.told.encrypted && *status != "in_progress").then_some(text);
                json!({"id": id, "type": "reasoning", "summary": [], "content": parts(kind.part()),
                       "encrypted_content": again, "status": status})
            }
            Kind::Message { .. } => {
                json!({"id": id, "type": "message", "role": "assistant", "status": status,
                                           "content": parts(kind.part())})
            }
            Kind::Call { call_id, name, arguments } => {
                let (namespace, plain) = self.told.tools.split(name);
                let mut call = if self.told.tools.custom.contains(name) {
                    json!({"id": id, "type": "custom_tool_call", "call_id": call_id, "name": plain,
                           "input": custom_input(arguments), "status": status})
                } else {
                    json!({"id": id, "type": "function_call", "call_id": call_id, "name": plain,
                           "arguments": arguments, "status": status})
                };
                if let Some(namespace) = namespace {
                    call["namespace"] = namespace.into();
                }
                call
            }
        }
    }
}

impl Kind {
    fn prefix(&self) -> &'static str {
        match self {
            Self::Reasoning(_) => "rs_",
            Self::Message { .. } => "msg_",
            Self::Call { .. } => "fc_",
        }
    }

    /// Its content so far, if it has content.
    fn part(&self) -> Option<Value> {
        match self {
            Self::Reasoning(text) => Some(json!({"type": "reasoning_text", "text": text})),
            Self::Message { text, logprobs } => {
                Some(json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}))
            }
            Self::Call { .. } => None,
        }
    }

    /// The events that tell that what it holds is complete.
    fn done(&self, told: &Told) -> Vec<Value> {
        match self {
            Self::Reasoning(text) => vec![json!({"type": "response.reasoning_text.done", "text": text})],
            Self::Message { text, logprobs } => {
                vec![json!({"type": "response.output_text.done", "text": text, "logprobs": logprobs})]
            }
            Self::Call { name, arguments, .. } if told.tools.custom.contains(name) => {
                let input = custom_input(arguments);
                vec![
                    json!({"type": "response.custom_tool_call_input.delta", "delta": input}),
                    json!({"type": "response.custom_tool_call_input.done", "input": input}),
                ]
            }
            Self::Call { name, arguments, .. } => {
                let (_, name) = told.tools.split(name);
                vec![
                    json!({"type": "response.function_call_arguments.done", "name": name, "arguments": arguments}),
                ]
            }
        }
    }
}

/// The text that a custom tool is called with. What the model made of it otherwise is passed on as it is.
fn custom_input(arguments: &str) -> String {
    let parsed = serde_json::from_str::<Value>(arguments).unwrap_or_default();
    parsed[CUSTOM_INPUT].as_str().map_or_else(|| arguments.to_owned(), str::to_owned)
}

fn usage_json(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    })
}
