//! Reads `tokenizer.json` and refuses what this tokenizer does not do.

use std::collections::{HashMap, HashSet};
use std::fmt;

use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use super::{ControlToken, TokenizerError, split};

/// Ids up to here are believed; a table is made of them.
const MAX_ID: u32 = 1 << 24;

/// What a tokenizer is made from. No entry of `vocab` is a control token.
pub(super) struct File {
    pub(super) vocab: Vec<(String, u32)>,
    pub(super) merges: Vec<(String, String)>,
    pub(super) ignore_merges: bool,
    pub(super) controls: Vec<ControlToken>,
}

pub(super) fn read(json: &[u8]) -> Result<File, TokenizerError> {
    let parts: Parts<'_> =
        serde_json::from_slice(json).map_err(|e| TokenizerError::Invalid(e.to_string()))?;
    check_pipeline(&parts)?;
    let model = read_model(parts.model)?;
    let mut vocab = model.vocab;
    let controls = read_controls(parts.added_tokens)?;
    separate(&mut vocab, &controls)?;
    let merges: Vec<_> = model.merges.into_iter().map(|merge| (merge.0, merge.1)).collect();
    check_merges(&vocab, &merges)?;
    Ok(File { vocab, merges, ignore_merges: model.ignore_merges, controls })
}

fn invalid<T>(message: String) -> Result<T, TokenizerError> {
    Err(TokenizerError::Invalid(message))
}

#[derive(Deserialize)]
struct Parts<'a> {
    #[serde(borrow)]
    model: &'a RawValue,
    #[serde(borrow)]
    added_tokens: &'a RawValue,
    #[serde(borrow)]
    normalizer: &'a RawValue,
    #[serde(borrow)]
    pre_tokenizer: &'a RawValue,
    #[serde(borrow)]
    post_processor: Option<&'a RawValue>,
    #[serde(borrow)]
    decoder: &'a RawValue,
}

fn part<T: DeserializeOwned>(name: &str, raw: &RawValue) -> Result<T, TokenizerError> {
    serde_json::from_str(raw.get()).map_err(|e| TokenizerError::Invalid(format!("{name}: {e}")))
}

// --- normaliser, split, decoder ---

#[derive(Deserialize, Debug, PartialEq)]
#[serde(tag = "type")]
enum PreTokenizer {
    Sequence {
        pretokenizers: Vec<PreTokenizer>,
    },
    Split {
        pattern: SplitPattern,
        behavior: String,
        invert: bool,
    },
    ByteLevel {
        add_prefix_space: bool,
        #[serde(default = "yes")]
        use_regex: bool,
    },
}

#[derive(Deserialize, Debug, PartialEq)]
enum SplitPattern {
    Regex(String),
    String(String),
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
struct Typed {
    r#type: String,
}

fn check_pipeline(parts: &Parts<'_>) -> Result<(), TokenizerError> {
    let types = [
        ("normalizer", Some(parts.normalizer), "NFC"),
        ("post_processor", parts.post_processor, "ByteLevel"),
        ("decoder", Some(parts.decoder), "ByteLevel"),
    ];
    for (name, raw, expected) in types {
        let Some(raw) = raw else { continue };
        match part::<Option<Typed>>(name, raw)?.map(|found| found.r#type) {
            Some(found) if found == expected => {}
            found => {
                let found = found.as_deref().unwrap_or("null");
                return invalid(format!("{name}: expected type {expected}, found {found}"));
            }
        }
    }
    let expected = PreTokenizer::Sequence {
        pretokenizers: vec![
            PreTokenizer::Split {
                pattern: SplitPattern::Regex(split::RULE.into()),
                behavior: "Isolated".into(),
                invert: false,
            },
            PreTokenizer::ByteLevel { add_prefix_space: false, use_regex: false },
        ],
    };
    let found: PreTokenizer = part("pre_tokenizer", parts.pre_tokenizer)?;
    if found != expected {
        return invalid(format!(
            "pre_tokenizer: expected the split of the Qwen3.5 family, {expected:?}, found {found:?}"
        ));
    }
    Ok(())
}

// --- model ---

#[derive(Deserialize)]
struct Model {
    #[serde(deserialize_with = "pairs")]
    vocab: Vec<(String, u32)>,
    merges: Vec<Merge>,
    #[serde(default)]
    ignore_merges: bool,
}

/// Options of other BPE models, which would change the ids.
#[derive(Deserialize)]
struct ModelOptions {
    r#type: String,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
}

fn read_model(raw: &RawValue) -> Result<Model, TokenizerError> {
    let options: ModelOptions = part("model", raw)?;
    if options.r#type != "BPE" {
        return invalid(format!("model: expected type \"BPE\", found {:?}", options.r#type));
    }
    let set = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    let unsupported = [
        ("dropout", options.dropout.is_some_and(|p| p != 0.0)),
        ("unk_token", options.unk_token.is_some()),
        ("continuing_subword_prefix", set(&options.continuing_subword_prefix)),
        ("end_of_word_suffix", set(&options.end_of_word_suffix)),
        ("byte_fallback", options.byte_fallback),
    ];
    if let Some((name, _)) = unsupported.iter().find(|(_, is_set)| *is_set) {
        return invalid(format!("model.{name} is set: byte-level BPE leaves it unset"));
    }
    part("model", raw)
}

/// A pair of tokens, spelled `["a", "b"]` or `"a b"`.
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MergeVisitor;
        impl<'de> Visitor<'de> for MergeVisitor {
            type Value = Merge;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a merge: [\"a\", \"b\"] or \"a b\"")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Merge, E> {
                match text.split_once(' ') {
                    Some((a, b)) if !b.contains(' ') => Ok(Merge(a.into(), b.into())),
                    _ => Err(E::invalid_value(serde::de::Unexpected::Str(text), &self)),
                }
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Merge, A::Error> {
                let a = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(0, &self))?;
                let b = seq.next_element()?.ok_or_else(|| A::Error::invalid_length(1, &self))?;
                match seq.next_element::<serde::de::IgnoredAny>()? {
                    None => Ok(Merge(a, b)),
                    Some(_) => Err(A::Error::invalid_length(3, &self)),
                }
            }
        }
        deserializer.deserialize_any(MergeVisitor)
    }
}

/// A JSON object as pairs.
fn pairs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(String, u32)>, D::Error> {
    struct PairsVisitor;
    impl<'de> Visitor<'de> for PairsVisitor {
        type Value = Vec<(String, u32)>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object of tokens and their ids")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut pairs = Vec::new();
            while let Some(pair) = map.next_entry()? {
                pairs.push(pair);
            }
            Ok(pairs)
        }
    }
    deserializer.deserialize_map(PairsVisitor)
}

/// Checks what `BpeBuilder::build` would panic over.
fn check_merges(vocab: &[(String, u32)], merges: &[(String, String)]) -> Result<(), TokenizerError> {
    let longest = vocab.iter().map(|(text, _)| text.len()).max().unwrap_or(0);
    match merges.iter().find(|(a, b)| a.len() + b.len() > longest) {
        None => Ok(()),
        Some((a, b)) => {
            invalid(format!("model.merges: {a:?} and {b:?} merge to a token that model.vocab lacks"))
        }
    }
}

// --- added tokens ---

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

fn read_controls(raw: &RawValue) -> Result<Vec<ControlToken>, TokenizerError> {
    let tokens: Vec<AddedToken> = part("added_tokens", raw)?;
    let mut seen = HashSet::new();
    for token in &tokens {
        let content = &token.content;
        let flags = [
            ("single_word", token.single_word),
            ("lstrip", token.lstrip),
            ("rstrip", token.rstrip),
            ("normalized", token.normalized),
        ];
        if let Some((flag, _)) = flags.iter().find(|(_, is_set)| *is_set) {
            return invalid(format!("added_tokens: {content:?} sets {flag}, which is not supported"));
        }
        // Text from outside is told from control tokens by their first character (see `template::guard`).
        let first = content.chars().next().unwrap_or(' ');
        if first.is_alphanumeric() || first.is_whitespace() || content.len() == first.len_utf8() {
            return invalid(format!(
                "added_tokens: {content:?} is not supported: expected a punctuation mark (such as '<') and more"
            ));
        }
        if !seen.insert(content) {
            return invalid(format!("added_tokens: {content:?} is there twice"));
        }
    }
    let control =
        |token: AddedToken| ControlToken { id: token.id, content: token.content, special: token.special };
    Ok(tokens.into_iter().map(control).collect())
}

/// Takes the control tokens out of the vocabulary, and checks that each id stands for one token.
fn separate(vocab: &mut Vec<(String, u32)>, controls: &[ControlToken]) -> Result<(), TokenizerError> {
    let control_ids: HashMap<&str, u32> =
        controls.iter().map(|token| (token.content.as_str(), token.id)).collect();
    let base = vocab.len();
    vocab.retain(|(text, id)| control_ids.get(text.as_str()) != Some(id));

    let mut seen = vec![false; base + controls.len()];
    let ids = vocab.iter().map(|(text, id)| (text.as_str(), *id));
    for (text, id) in ids.chain(controls.iter().map(|token| (token.content.as_str(), token.id))) {
        if id > MAX_ID {
            return invalid(format!("token {text:?} has id {id}: ids up to {MAX_ID} are supported"));
        }
        if id as usize >= seen.len() {
            seen.resize(id as usize + 1, false);
        }
        if std::mem::replace(&mut seen[id as usize], true) {
            return invalid(format!("two tokens have the id {id}; one is {text:?}"));
        }
    }
    if let Some((text, id)) = vocab.iter().find(|(text, _)| control_ids.contains_key(text.as_str())) {
        return invalid(format!("{text:?} has the id {id} in model.vocab, but another in added_tokens"));
    }
    Ok(())
}
