//! Text to token ids and back.
//!
//! Byte-level BPE as the Qwen3.5 family has it: NFC, a fixed split into words ([`split`]), merges inside a word
//! (the `tokenizers` crate). Control tokens are kept out of that pipeline altogether: its vocabulary does not
//! hold them, so no text can be merged into one. They enter a prompt only through [`Tokenizer::encode_chat`],
//! where a chat template wrote them, and through [`Tokenizer::encode_with_control`].

mod bytes;
mod file;
mod split;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::Model;
use tokenizers::models::bpe::BPE;
use unicode_normalization_alignments::UnicodeNormalization;

use crate::template::RenderedChat;
use bytes::{CHAR_OF_BYTE, TokenBytes};
use split::Splitter;

/// Errors of loading a tokenizer.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// tokenizer.json can't be used; says where, what was expected and what was found.
    #[error("tokenizer.json: {0}")]
    Invalid(String),
}

/// Words whose merges each thread remembers. They are the first it meets, are never dropped, and take up to 8 KB
/// each: so not many.
const CACHED_WORDS: usize = 1000;

/// The byte-level BPE tokenizer of a checkpoint (`tokenizer.json`).
pub struct Tokenizer {
    bpe: BPE,
    splitter: Splitter,
    bytes: TokenBytes,
    controls: Vec<ControlToken>,
    /// Finds the texts of `controls`; pattern `i` is `controls[i]`.
    control_matcher: AhoCorasick,
}

/// An entry of `added_tokens`.
#[derive(Clone, Debug)]
struct ControlToken {
    id: u32,
    content: String,
    special: bool,
}

/// A piece of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptPiece<'a> {
    /// One control token.
    Control {
        /// Its id.
        id: u32,
        /// Its text.
        text: &'a str,
    },
    /// Text: whatever it spells, it stays text.
    Text(&'a str),
}

impl Tokenizer {
    /// Reads `tokenizer.json`. A file that asks for anything this tokenizer does not do is refused.
    pub fn from_bytes(json: &[u8]) -> Result<Self, TokenizerError> {
        let file = file::read(json)?;
        let bytes = TokenBytes::new(&file.vocab, &file.controls)?;
        let control_matcher = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(file.controls.iter().map(|token| &token.content))
            .map_err(|e| TokenizerError::Invalid(format!("added_tokens: {e}")))?;
        let splitter =
            Splitter::new().map_err(|e| TokenizerError::Invalid(format!("the split rule: {e}")))?;
        let bpe = BPE::builder()
            .vocab_and_merges(file.vocab.into_iter().collect::<tokenizers::models::bpe::Vocab>(), file.merges)
            .ignore_merges(file.ignore_merges)
            .cache_capacity(CACHED_WORDS)
            .build()
            .map_err(|e| TokenizerError::Invalid(format!("model.merges: {e}")))?;
        Ok(Self { bpe, splitter, bytes, controls: file.controls, control_matcher })
    }

    /// Ids of a text. Control tokens spelled out in it are parsed as such: only for text that Lily itself wrote,
    /// or whose author may write a raw prompt.
    pub fn encode_with_control(&self, text: &str) -> Vec<u32> {
        self.encode_pieces(self.pieces(text))
    }

    /// Ids of a text, in which control tokens are ordinary text.
    pub fn encode_text(&self, text: &str) -> Vec<u32> {
        self.encode_pieces([PromptPiece::Text(text)])
    }

    /// Ids of a rendered conversation: control tokens where the template wrote them, text everywhere else.
    pub fn encode_chat(&self, chat: &RenderedChat) -> Vec<u32> {
        self.encode_pieces(chat.pieces())
    }

    /// The exact bytes that a token stands for; empty for ids that stand for nothing (padding of the vocabulary).
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id)
    }

    /// The text of ids; bytes that aren't UTF-8 become U+FFFD. `skip_special` leaves out tokens flagged special.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(self.token_bytes(id));
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Whether the token is flagged special (`<|im_end|>` is, `<think>` and `<tool_call>` are not).
    pub fn is_special(&self, id: u32) -> bool {
        self.controls.iter().any(|token| token.id == id && token.special)
    }

    /// Whether the token is an entry of `added_tokens`, flagged special or not.
    pub fn is_control(&self, id: u32) -> bool {
        self.controls.iter().any(|token| token.id == id)
    }

    /// Id of a control token (any entry of `added_tokens`, flagged special or not) by its exact text.
    pub fn control_id(&self, content: &str) -> Option<u32> {
        self.controls.iter().find(|token| token.content == content).map(|token| token.id)
    }

    /// Texts of all control tokens.
    pub(crate) fn controls(&self) -> impl Iterator<Item = &str> {
        self.controls.iter().map(|token| token.content.as_str())
    }

    /// Splits a text at the control tokens spelled out in it, leftmost and longest first.
    pub(crate) fn pieces<'t>(&self, text: &'t str) -> impl Iterator<Item = PromptPiece<'t>> {
        let mut end = 0;
        let mut matches = self.control_matcher.find_iter(text);
        let mut pending = None;
        std::iter::from_fn(move || {
            if let Some(control) = pending.take() {
                return Some(control);
            }
            let Some(found) = matches.next() else {
                let rest = &text[end..];
                end = text.len();
                return (!rest.is_empty()).then_some(PromptPiece::Text(rest));
            };
            let before = &text[end..found.start()];
            end = found.end();
            let id = self.controls[found.pattern().as_usize()].id;
            let control = PromptPiece::Control { id, text: &text[found.range()] };
            if before.is_empty() {
                return Some(control);
            }
            pending = Some(control);
            Some(PromptPiece::Text(before))
        })
    }

    fn encode_pieces<'t>(&self, pieces: impl IntoIterator<Item = PromptPiece<'t>>) -> Vec<u32> {
        let mut ids = Vec::new();
        for piece in pieces {
            match piece {
                PromptPiece::Control { id, .. } => ids.push(id),
                PromptPiece::Text(text) => self.push_text(text, &mut ids),
            }
        }
        ids
    }

    fn push_text(&self, text: &str, ids: &mut Vec<u32>) {
        let normalized;
        let text = if is_plainly_nfc(text) {
            text
        } else {
            normalized = text.nfc().map(|(c, _)| c).collect::<String>();
            &normalized
        };
        let mut word = String::new();
        for piece in self.splitter.pieces(text) {
            word.clear();
            word.extend(piece.bytes().map(|b| CHAR_OF_BYTE[usize::from(b)]));
            // `BPE::tokenize` fails only over an unknown token, and this model has none: its vocabulary holds
            // all 256 bytes (`TokenBytes::new` sees to it).
            let tokens = self.bpe.tokenize(&word).expect("byte-level BPE without an unknown token is total");
            ids.extend(tokens.into_iter().map(|token| token.id));
        }
    }
}

/// Whether all characters are below U+0300 (UTF-8: CC 80), the first that NFC can change.
fn is_plainly_nfc(text: &str) -> bool {
    text.bytes().all(|b| b < 0xCC)
}
