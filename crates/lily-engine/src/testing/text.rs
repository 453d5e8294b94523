//! A tokenizer with a token for each byte.

use lily_model::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// Id of `<|im_end|>`.
pub const END_OF_TURN: u32 = 257;

/// Control tokens, from id 256 on, and whether they are flagged special.
const CONTROL: [(&str, bool); 9] = [
    ("<|im_start|>", true),
    ("<|im_end|>", true),
    ("<|endoftext|>", true),
    ("<think>", false),
    ("</think>", false),
    ("<tool_call>", false),
    ("</tool_call>", false),
    ("<tool_response>", false),
    ("</tool_response>", false),
];

/// The split into words of the Qwen3.5 family, as its `tokenizer.json` has it.
const SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A tokenizer in which token `n` below 256 is the byte `n`; the control tokens of the Qwen3.5 family that chats
/// need follow.
///
/// # Panics
/// If [`Tokenizer`] refuses it, which is a bug.
pub fn tokenizer() -> Tokenizer {
    let vocab: Map<String, Value> =
        (0..=u8::MAX).map(|byte| (spelled(byte).to_string(), byte.into())).collect();
    let added: Vec<Value> = (256u32..)
        .zip(CONTROL)
        .map(|(id, (content, special))| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": special})
        })
        .collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
                            "use_regex": false});
    let json = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": false},
            byte_level,
        ]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "",
                  "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocab, "merges": []},
    });
    Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap_or_else(|error| panic!("{error}"))
}

/// Ids of a text in [`tokenizer`]: its bytes, and control tokens where it spells them.
pub fn tokens(text: &str) -> Vec<u32> {
    tokenizer().encode_with_control(text)
}

/// The character that stands for a byte in byte-level vocabularies.
fn spelled(byte: u8) -> char {
    let is_itself = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_itself(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&other| !is_itself(other)).count() as u32;
    char::from_u32(0x100 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_bytes_and_control_tokens() {
        let tokenizer = tokenizer();
        assert_eq!(tokens("a\né"), [97, 10, 0xC3, 0xA9]);
        assert_eq!(tokens("x<think></think><|im_end|>"), [120, 259, 260, END_OF_TURN]);
        assert!((0..=255u8).all(|byte| tokenizer.token_bytes(byte.into()) == [byte]));
    }
}
