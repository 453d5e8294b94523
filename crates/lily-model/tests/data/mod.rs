//! Test data shared by the crates' tests: `#[path = "../../lily-model/tests/data/mod.rs"] mod data;`
//! (needs `ruzstd` and `serde_json` as dev-dependencies). See `qwen3.6/README.md` for what the files are.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses its part, and fails where it must")]

use std::io::Read;
use std::sync::{Arc, LazyLock};

use lily_model::template::ChatTemplate;
use lily_model::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// The chat template of Qwen3.6-35B-A3B.
pub const CHAT_TEMPLATE: &str = include_str!("qwen3.6/chat_template.jinja");

/// The `tokenizer.json` of Qwen3.6-35B-A3B, 20 MB.
pub fn tokenizer_json() -> Vec<u8> {
    decompressed(include_bytes!("qwen3.6/tokenizer.json.zst"))
}

/// The `model.safetensors.index.json` of the MLX 4-bit conversion.
pub fn mlx_index() -> Vec<u8> {
    decompressed(include_bytes!("qwen3.6/model.safetensors.index.json.zst"))
}

/// Every tensor of the MLX 4-bit conversion, a line each: name, type, shape, bytes, shard.
pub fn mlx_tensors() -> String {
    String::from_utf8(decompressed(include_bytes!("qwen3.6/tensors-mlx-4bit.tsv.zst"))).unwrap()
}

/// Every tensor of the Hugging Face checkpoint, a line each: name, type, shape, bytes.
pub fn hf_tensors() -> String {
    String::from_utf8(decompressed(include_bytes!("qwen3.6/tensors-bf16.tsv.zst"))).unwrap()
}

fn decompressed(compressed: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    ruzstd::decoding::StreamingDecoder::new(compressed).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

/// The tokenizer of Qwen3.6-35B-A3B, loaded once a process.
pub fn tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: LazyLock<Arc<Tokenizer>> =
        LazyLock::new(|| Arc::new(Tokenizer::from_bytes(&tokenizer_json()).unwrap()));
    TOKENIZER.clone()
}

/// The chat template of Qwen3.6-35B-A3B, compiled.
pub fn chat_template() -> ChatTemplate {
    ChatTemplate::new(CHAT_TEMPLATE).unwrap()
}

/// What Hugging Face's tokenizers and transformers make of texts and conversations: `tokenizer_golden.json`.
pub fn golden() -> Value {
    serde_json::from_str(include_str!("qwen3.6/tokenizer_golden.json")).unwrap()
}

/// A `tokenizer.json` of the family's form: ids 0..256 are the bytes, 256 is "he", 257 "the", and `controls`
/// follow (the first one flagged special).
pub fn small_tokenizer_json(controls: &[&str]) -> Value {
    let printable = |b: u32| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut substitutes = 0x100..;
    let spelled = (0..256).map(|b| if printable(b) { b } else { substitutes.next().unwrap() });
    let mut vocab: Map<String, Value> =
        spelled.map(|c| char::from_u32(c).unwrap().to_string()).zip((0..256).map(Value::from)).collect();
    vocab.extend([("he".into(), json!(256)), ("the".into(), json!(257))]);
    let added = |(i, content)| json!({"id": 258 + i, "content": content, "special": i == 0});
    let rule = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    json!({
        "version": "1.0",
        "added_tokens": controls.iter().enumerate().map(added).collect::<Value>(),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        ]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["h", "e"], ["t", "he"]]},
    })
}

/// [`small_tokenizer_json`], loaded.
pub fn small_tokenizer(controls: &[&str]) -> Tokenizer {
    Tokenizer::from_bytes(small_tokenizer_json(controls).to_string().as_bytes()).unwrap()
}
