//! A message of the model, block by block. Streamed or not, it is put together here.

use lily_engine::output::Delta;
use lily_engine::request::{FinishReason, Finished, Usage};
use serde_json::{Value, json};

use crate::trace::random_id;

/// This API signs thoughts so that they can't be made up. Ours need no proof, but clients expect a text here. That
/// of a thought whose text is omitted is the thought itself: clients send it back.
pub(super) const SIGNATURE: &str = "unsigned";

/// A message so far.
pub(super) struct Message {
    id: String,
    model: String,
    prompt_tokens: usize,
    omits_thought: bool,
    blocks: Vec<Block>,
    /// The last block may grow.
    open: bool,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
    usage: Option<Usage>,
}

enum Block {
    Thinking(String),
    Text(String),
    ToolUse { id: String, name: String, input: String },
}

/// What is new about a message: an event's name and its data.
pub(super) type Change = (&'static str, Value);

impl Message {
    /// Before anything is known of it.
    pub fn new(model: String, prompt_tokens: usize, omits_thought: bool) -> Self {
        let id = random_id("msg_");
        Self {
            id,
            model,
            prompt_tokens,
            omits_thought,
            blocks: Vec::new(),
            open: false,
            stop_reason: None,
            stop_sequence: None,
            usage: None,
        }
    }

    /// The first event of a stream.
    pub fn start(&self) -> Change {
        ("message_start", json!({"type": "message_start", "message": self.to_json()}))
    }

    /// Adds a piece; gives the events that tell of it.
    pub fn add(&mut self, delta: Delta) -> Vec<Change> {
        let mut changes = Vec::new();
        let delta = match delta {
            Delta::Reasoning(text) => {
                if !(self.open && matches!(self.blocks.last(), Some(Block::Thinking(_)))) {
                    changes = self.begin(Block::Thinking(String::new()));
                }
                if let Some(Block::Thinking(all)) = self.blocks.last_mut() {
                    all.push_str(&text);
                }
                if self.omits_thought {
                    return changes;
                }
                json!({"type": "thinking_delta", "thinking": text})
            }
            Delta::Text(text) => {
                if !(self.open && matches!(self.blocks.last(), Some(Block::Text(_)))) {
                    changes = self.begin(Block::Text(String::new()));
                }
                if let Some(Block::Text(all)) = self.blocks.last_mut() {
                    all.push_str(&text);
                }
                json!({"type": "text_delta", "text": text})
            }
            Delta::ToolCall { id, name, .. } => {
                return self.begin(Block::ToolUse { id, name, input: String::new() });
            }
            Delta::ToolArguments { fragment, .. } => {
                if let Some(Block::ToolUse { input, .. }) = self.blocks.last_mut() {
                    input.push_str(&fragment);
                }
                json!({"type": "input_json_delta", "partial_json": fragment})
            }
        };
        changes.push(self.delta(&delta));
        changes
    }

    /// The end; gives the events that tell of it.
    pub fn end(&mut self, finished: &Finished) -> Vec<Change> {
        let mut changes = self.close();
        let reason = match finished.reason {
            FinishReason::Stop if finished.stop.is_some() => "stop_sequence",
            FinishReason::Stop => "end_turn",
            FinishReason::Length => "max_tokens",
            FinishReason::ToolCalls => "tool_use",
        };
        self.stop_reason = Some(reason);
        self.stop_sequence = finished.stop.clone();
        self.usage = Some(finished.usage);
        let delta = json!({"stop_reason": reason, "stop_sequence": self.stop_sequence});
        let data = json!({"type": "message_delta", "delta": delta, "usage": self.usage()});
        changes.push(("message_delta", data));
        changes.push(("message_stop", json!({"type": "message_stop"})));
        changes
    }

    /// All of it.
    pub fn to_json(&self) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self.blocks.iter().map(|block| block.to_json(self.omits_thought)).collect::<Value>(),
            "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": self.usage(),
        })
    }

    /// What was read again and what was not are counted apart in this API.
    fn usage(&self) -> Value {
        let usage =
            self.usage.unwrap_or(Usage { prompt_tokens: self.prompt_tokens as u32, ..Usage::default() });
        json!({
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        })
    }

    fn begin(&mut self, block: Block) -> Vec<Change> {
        let mut changes = self.close();
        let index = self.blocks.len();
        let start = json!({"type": "content_block_start", "index": index, "content_block": block.started()});
        changes.push(("content_block_start", start));
        self.blocks.push(block);
        self.open = true;
        changes
    }

    fn close(&mut self) -> Vec<Change> {
        if !std::mem::take(&mut self.open) {
            return Vec::new();
        }
        let mut changes = Vec::new();
        if let Some(Block::Thinking(text)) = self.blocks.last() {
            let signature = if self.omits_thought { text } else { SIGNATURE };
            changes.push(self.delta(&json!({"type": "signature_delta", "signature": signature})));
        }
        let stop = json!({"type": "content_block_stop", "index": self.last()});
        changes.push(("content_block_stop", stop));
        changes
    }

    fn delta(&self, delta: &Value) -> Change {
        let data = json!({"type": "content_block_delta", "index": self.last(), "delta": delta});
        ("content_block_delta", data)
    }

    fn last(&self) -> usize {
        self.blocks.len().saturating_sub(1)
    }
}

impl Block {
    fn to_json(&self, omits_thought: bool) -> Value {
        match self {
            Self::Thinking(text) if omits_thought => {
                json!({"type": "thinking", "thinking": "", "signature": text})
            }
            Self::Thinking(text) => json!({"type": "thinking", "thinking": text, "signature": SIGNATURE}),
            Self::Text(text) => json!({"type": "text", "text": text}),
            Self::ToolUse { id, name, input } => {
                // One that was cut by a limit is not JSON; the reason of the end tells.
                let input: Value = serde_json::from_str(input).unwrap_or_else(|_| json!({}));
                json!({"type": "tool_use", "id": id, "name": name, "input": input})
            }
        }
    }

    /// As it begins.
    fn started(&self) -> Value {
        match self {
            Self::Thinking(_) => json!({"type": "thinking", "thinking": "", "signature": ""}),
            Self::Text(_) => json!({"type": "text", "text": ""}),
            Self::ToolUse { id, name, .. } => {
                json!({"type": "tool_use", "id": id, "name": name, "input": {}})
            }
        }
    }
}
