//! What a client is answered.

use std::mem;
use std::sync::Arc;

use lily_engine::output::Delta;
use lily_engine::request::Request;
use lily_model::sample::Logprobs;
use lily_model::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::chat_completions::UsageReport;
use crate::generation::logprobs::{LOG_ZERO, short};
use crate::generation::replies::{Piece, PromptProgress, reason};

/// The members that an answer and all chunks of a stream begin with.
#[derive(Debug, Serialize)]
pub(super) struct Head {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub system_fingerprint: &'static str,
}

/// An answer, or a chunk of one.
#[derive(Debug, Serialize)]
pub(super) struct Completion<'a> {
    #[serde(flatten)]
    pub head: &'a Head,
    pub choices: &'a [Choice],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<UsageReport>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_progress: Option<PromptProgress>,
}

/// An answer, or what a chunk adds to it.
#[derive(Debug, Default, Serialize)]
pub(super) struct Choice {
    index: usize,
    text: String,
    logprobs: Option<Tokens>,
    finish_reason: Option<&'static str>,
}

/// Tokens, column by column.
#[derive(Clone, Debug, Default, Serialize)]
struct Tokens {
    tokens: Vec<String>,
    /// `None` for the first token of a prompt.
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    /// Where each begins in the text, characters.
    text_offset: Vec<usize>,
}

impl Choice {
    /// Before anything is known of answer `index`.
    pub fn new(index: usize) -> Self {
        Self { index, ..Self::default() }
    }

    /// Adds a piece.
    pub fn add(&mut self, piece: Choice) {
        self.text.push_str(&piece.text);
        if let Some(tokens) = piece.logprobs {
            let all = self.logprobs.get_or_insert_default();
            all.tokens.extend(tokens.tokens);
            all.token_logprobs.extend(tokens.token_logprobs);
            all.top_logprobs.extend(tokens.top_logprobs);
            all.text_offset.extend(tokens.text_offset);
        }
        self.finish_reason = piece.finish_reason;
    }
}

/// Turns pieces of answers into [`Choice`]s.
pub(super) struct Choices {
    tokenizer: Arc<Tokenizer>,
    answers: Vec<Answer>,
}

/// An answer so far.
struct Answer {
    /// What it begins with, until that was given.
    echo: String,
    /// Tokens whose text has not come yet; `None` unless asked for.
    tokens: Option<Tokens>,
    /// Characters of the tokens so far.
    offset: usize,
}

impl Choices {
    /// For the answers to these requests, which begin with `echoes`.
    pub fn new(requests: &[Request], echoes: Vec<String>, tokenizer: Arc<Tokenizer>) -> Self {
        let answer = |(request, echo): (&Request, String)| Answer {
            echo,
            tokens: request.sampling.logprobs.map(|_| Tokens::default()),
            offset: 0,
        };
        Self { tokenizer, answers: requests.iter().zip(echoes).map(answer).collect() }
    }

    /// What a piece of answer `index` adds to it, if anything yet.
    pub fn of(&mut self, index: usize, piece: Piece) -> Option<Choice> {
        let answer = &mut self.answers[index];
        let (text, finish_reason) = match piece {
            Piece::PromptToken { id, logprobs } => {
                answer.token(id, logprobs, &self.tokenizer);
                return None;
            }
            Piece::Token { id, logprobs, .. } => {
                answer.token(id, Some(logprobs), &self.tokenizer);
                return None;
            }
            Piece::Delta(Delta::Text(text)) => (text, None),
            // Raw text has no parts.
            Piece::Delta(_) | Piece::Prefill(_) => return None,
            Piece::End(finished) => (String::new(), Some(reason(finished.reason))),
        };
        let text = mem::take(&mut answer.echo) + &text;
        let logprobs = answer.tokens.as_mut().map(mem::take);
        Some(Choice { index, text, logprobs, finish_reason })
    }
}

impl Answer {
    fn token(&mut self, id: u32, logprobs: Option<Logprobs>, tokenizer: &Tokenizer) {
        let text = |id: u32| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned();
        let tokens = self.tokens.get_or_insert_default();
        let own = text(id);
        tokens.text_offset.push(self.offset);
        self.offset += own.chars().count();
        tokens.tokens.push(own);
        tokens.token_logprobs.push(logprobs.as_ref().map(|logprobs| logprobs.token.max(LOG_ZERO)));
        let entry = |&(id, logprob): &(u32, f32)| (text(id), short(logprob.max(LOG_ZERO)));
        tokens.top_logprobs.push(logprobs.map(|logprobs| logprobs.top.iter().map(entry).collect()));
    }
}
