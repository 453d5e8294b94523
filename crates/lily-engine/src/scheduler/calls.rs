//! The tokens of tool calls, as they are sampled.

use lily_model::tokenizer::Tokenizer;

use crate::output::{Delta, tags};
use crate::reply::{Progress, Reply};
use crate::request::SampledCall;

/// Collects the tokens between the tags of a call.
#[derive(Debug, Default)]
pub(super) struct CallTokens(Option<Collected>);

/// Since an opening tag.
#[derive(Debug, Default)]
struct Collected {
    tokens: Vec<u32>,
    /// Ids of the calls that began.
    calls: Vec<String>,
}

impl CallTokens {
    /// Takes a token, what the reply made of it, and the reply behind it; gives the call that it completes. One that
    /// is not alone between its tags, or has control tokens in it, is passed over.
    pub fn push(
        &mut self,
        id: u32,
        progress: &Progress,
        reply: &Reply,
        tokenizer: &Tokenizer,
    ) -> Option<SampledCall> {
        let is = |tag| tokenizer.control_id(tag) == Some(id);
        if reply.in_call() && is(tags::OPEN) {
            self.0 = Some(Collected::default());
            return None;
        }
        let mut collected = self.0.take()?;
        collected.calls.extend(progress.deltas.iter().filter_map(|delta| match delta {
            Delta::ToolCall { id, .. } => Some(id.clone()),
            _ => None,
        }));
        if reply.in_call() {
            collected.tokens.push(id);
            self.0 = Some(collected).filter(|_| !tokenizer.is_control(id));
            return None;
        }
        let id = collected.calls.pop().filter(|_| collected.calls.is_empty() && is(tags::CLOSE))?;
        Some(SampledCall { id, tokens: collected.tokens })
    }
}
