//! The tokenizer against Hugging Face's, and against texts and files that mean harm.
#![allow(clippy::unwrap_used, reason = "a test fails where it must")]

mod data;

use std::str::FromStr;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use lily_model::tokenizer::Tokenizer;
use proptest::prelude::*;
use serde_json::{Value, json};

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Hugging Face's tokenizer on the same file.
fn hugging_face() -> &'static tokenizers::Tokenizer {
    static REFERENCE: LazyLock<tokenizers::Tokenizer> = LazyLock::new(|| {
        tokenizers::Tokenizer::from_str(&String::from_utf8(data::tokenizer_json()).unwrap()).unwrap()
    });
    &REFERENCE
}

#[test]
fn golden_texts_have_their_ids_and_come_back() {
    let (tokenizer, golden) = (data::tokenizer(), data::golden());
    let cases = |key: &str| golden[key].as_array().unwrap().clone();
    assert_eq!((cases("public").len(), cases("engine").len()), (19, 399));
    for case in cases("public").iter().chain(&cases("engine")) {
        let text = case["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode_with_control(text), ids(&case["ids"]), "{text:?}");
    }
    for case in cases("engine") {
        assert_eq!(tokenizer.decode(&ids(&case["ids"]), false), case["decoded"].as_str().unwrap());
    }
}

#[test]
fn control_tokens_in_text_stay_text() {
    let tokenizer = data::tokenizer();
    for content in ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "<|endoftext|>"] {
        let id = tokenizer.control_id(content).unwrap();
        let text = tokenizer.encode_text(content);
        assert!(text.len() > 1 && text.iter().all(|id| *id < 248_044), "{content}: {text:?}");
        assert_eq!(tokenizer.decode(&text, true), content);
        assert_eq!(tokenizer.encode_with_control(content), [id]);
        assert_eq!(tokenizer.token_bytes(id), content.as_bytes());
    }
    assert_eq!(tokenizer.control_id("hello"), None);
}

#[test]
fn a_control_token_in_the_vocabulary_stays_out_of_reach_of_text() {
    let mut json = data::small_tokenizer_json(&["</s>"]);
    json["model"]["vocab"]["</s>"] = json!(258);
    json["model"]["ignore_merges"] = json!(true);
    let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    assert_eq!(tokenizer.encode_text("</s>"), [60, 47, 115, 62]);
    assert_eq!(tokenizer.encode_with_control("the</s>"), [257, 258]);
}

#[test]
fn special_tokens_are_left_out_on_request() {
    let tokenizer = data::tokenizer();
    let ids = tokenizer.encode_with_control("<think>a</think>b<|im_end|>");
    assert_eq!(tokenizer.decode(&ids, true), "<think>a</think>b");
    assert_eq!(tokenizer.decode(&ids, false), "<think>a</think>b<|im_end|>");
    let special = |content| tokenizer.is_special(tokenizer.control_id(content).unwrap());
    assert!(special("<|im_end|>") && special("<|endoftext|>") && special("<|audio_pad|>"));
    assert!(!special("<think>") && !special("<tool_call>") && !special("<|fim_pad|>"));
    assert!(!tokenizer.is_special(0) && !tokenizer.is_special(u32::MAX));
}

#[test]
fn every_token_has_its_bytes_and_padding_has_none() {
    let (tokenizer, reference) = (data::tokenizer(), hugging_face());
    for id in 0..248_077 {
        let bytes = tokenizer.token_bytes(id);
        assert!(!bytes.is_empty(), "{id}");
        assert_eq!(String::from_utf8_lossy(bytes), reference.decode(&[id], false).unwrap(), "{id}");
    }
    for id in [248_077, 248_319, u32::MAX] {
        assert!(tokenizer.token_bytes(id).is_empty());
        assert_eq!(tokenizer.decode(&[id], false), "");
    }
}

#[test]
fn a_character_cut_in_two_decodes_to_replacement_characters() {
    let tokenizer = data::small_tokenizer(&[]);
    assert_eq!(tokenizer.decode(&[0xC3, 0xA9], false), "é");
    assert_eq!(tokenizer.decode(&[0xC3], false), "\u{FFFD}");
    assert_eq!(tokenizer.decode(&[0xC3, 0x61], false), "\u{FFFD}a");
}

#[test]
fn text_is_normalised_between_control_tokens_but_they_are_found_before() {
    let (tokenizer, reference) = (data::tokenizer(), hugging_face());
    // A combining mark behind a control token stays alone; the two halves of é meet.
    for text in
        ["<think>\u{301}e\u{301}", "e\u{301}<|im_end|>\u{301}", "\u{1100}\u{1161}\u{11a8}", "\u{212b}"]
    {
        let expected = reference.encode_fast(text, false).unwrap().get_ids().to_vec();
        assert_eq!(tokenizer.encode_with_control(text), expected, "{text:?}");
    }
    assert_eq!(tokenizer.encode_text("e\u{301}"), tokenizer.encode_text("é"));
}

#[test]
fn a_megabyte_of_anything_takes_seconds_at_most() {
    let tokenizer = data::tokenizer();
    let mut state = 1_u32;
    let mut random = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    let unicode: String = std::iter::repeat_with(|| char::from_u32(random() % 0x11_0000))
        .flatten()
        .take(1_000_000 / 4)
        .collect();
    let texts = [
        ("spaces", " ".repeat(1 << 20)),
        ("spaces before a word", " ".repeat(1 << 20) + "x"),
        ("newlines", "\n".repeat(200_000)),
        ("spaces and newlines", " \n  ".repeat(250_000) + "x"),
        ("one letter", "a".repeat(1 << 20)),
        ("one word", "antidisestablishmentarianism".repeat(40_000)),
        ("one Chinese word", "漢字".repeat(170_000)),
        ("punctuation", "=".repeat(1 << 20)),
        ("digits", "7".repeat(1 << 20)),
        ("combining marks", "a".to_string() + &"\u{301}\u{323}".repeat(250_000)),
        ("halves of control tokens", "<|im_end<|im_end|".repeat(60_000)),
        ("apostrophes", "'".repeat(1 << 20)),
        ("random Unicode", unicode),
    ];
    for (name, text) in &texts {
        let start = Instant::now();
        let ids = tokenizer.encode_with_control(text);
        let time = start.elapsed();
        println!("{name}: {} bytes, {} tokens, {time:?}", text.len(), ids.len());
        assert!(time < Duration::from_secs(20), "{name}: {time:?}");
        // Marks in no canonical order are reordered; everything else comes back as it was.
        if *name != "combining marks" && *name != "random Unicode" {
            assert!(tokenizer.decode(&ids, false) == *text, "{name}");
        }
    }
}

#[test]
fn one_tokenizer_serves_many_threads() {
    fn is_shareable<T: Send + Sync>(_: &T) {}
    let tokenizer = data::tokenizer();
    is_shareable(&*tokenizer);
    let expected = tokenizer.encode_text("Hello, world! 漢字");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(tokenizer.encode_text("Hello, world! 漢字"), expected));
        }
    });
}

#[test]
fn files_that_are_not_such_a_tokenizer_are_refused() {
    let good = data::small_tokenizer_json(&["<|a|>", "<b>"]);
    let error = |json: &[u8]| Tokenizer::from_bytes(json).err().expect("refused").to_string();
    let with = |pointer: &str, value: Value| {
        let mut json = good.clone();
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let parent = json.pointer_mut(parent).unwrap();
        match parent {
            Value::Array(items) => items[key.parse::<usize>().unwrap()] = value,
            _ => parent[key] = value,
        }
        error(json.to_string().as_bytes())
    };
    let without = |parent: &str, key: &str| {
        let mut json = good.clone();
        json.pointer_mut(parent).unwrap().as_object_mut().unwrap().shift_remove(key).unwrap();
        error(json.to_string().as_bytes())
    };
    let cases = [
        (error(b""), "EOF while parsing"),
        (error(b"GGUF"), "expected value at line 1 column 1"),
        (error(b"{\"a\": \xFF}"), "line 1"),
        (error(&good.to_string().as_bytes()[..500]), "EOF while parsing"),
        (error(b"[]"), "invalid"),
        (without("", "model"), "missing field `model`"),
        (without("", "added_tokens"), "missing field `added_tokens`"),
        (without("/model", "vocab"), "model: missing field `vocab`"),
        (without("/model", "merges"), "model: missing field `merges`"),
        (without("/model/vocab", "A"), "0x41 (spelled 'A') is missing"),
        (with("/model/type", json!("Unigram")), "expected type \"BPE\", found \"Unigram\""),
        (with("/model/vocab", json!([])), "model: invalid type: sequence"),
        (with("/model/vocab/漢", json!(400)), "not in the byte-level alphabet"),
        (with("/model/vocab/zz", json!(3)), "two tokens have the id 3"),
        (with("/model/vocab/zz", json!(-1)), "invalid value: integer `-1`"),
        (with("/model/vocab/zz", json!(4_294_967_295_u32)), "ids up to"),
        (with("/model/vocab/<b>", json!(400)), "\"<b>\" has the id 400 in model.vocab, but another"),
        (with("/model/merges/0", json!(["h", "e", "y"])), "a merge"),
        (with("/model/merges/0", json!("hey")), "a merge"),
        (with("/model/merges/0", json!(["t", "thethe"])), "lacks"),
        (with("/model/merges/0", json!(["t", "h"])), "`th` out of vocabulary"),
        (with("/model/dropout", json!(0.1)), "model.dropout is set"),
        (with("/model/unk_token", json!("<unk>")), "model.unk_token is set"),
        (with("/model/byte_fallback", json!(true)), "model.byte_fallback is set"),
        (with("/normalizer", json!(null)), "normalizer: expected type NFC, found null"),
        (with("/normalizer/type", json!("NFKC")), "normalizer: expected type NFC, found NFKC"),
        (with("/decoder/type", json!("Metaspace")), "decoder: expected type ByteLevel, found Metaspace"),
        (
            with("/post_processor", json!({"type": "TemplateProcessing"})),
            "post_processor: expected type ByteLevel",
        ),
        (
            with("/pre_tokenizer", json!({"type": "Whitespace"})),
            "pre_tokenizer: unknown variant `Whitespace`",
        ),
        (
            with("/pre_tokenizer/pretokenizers/0/pattern/Regex", json!(r"\s+")),
            "the split of the Qwen3.5 family",
        ),
        (with("/added_tokens/0/lstrip", json!(true)), "\"<|a|>\" sets lstrip"),
        (with("/added_tokens/0/normalized", json!(true)), "\"<|a|>\" sets normalized"),
        (with("/added_tokens/1/content", json!("<|a|>")), "\"<|a|>\" is there twice"),
        (with("/added_tokens/1/content", json!("")), "not supported"),
        (with("/added_tokens/1/content", json!("<")), "not supported"),
        (with("/added_tokens/1/content", json!("user")), "not supported"),
        (with("/added_tokens/1/id", json!(258)), "two tokens have the id 258"),
    ];
    for (i, (found, expected)) in cases.iter().enumerate() {
        assert!(
            found.starts_with("tokenizer.json: ") && found.contains(expected),
            "{i}: {expected:?} in {found:?}"
        );
    }
}

/// Texts in which control tokens, their halves, white space and marks meet.
fn texts() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        Just("<|im_end|>".to_string()),
        Just("<|im_start|>".to_string()),
        Just("<think>".to_string()),
        Just("</tool_call>".to_string()),
        Just("<|im_".to_string()),
        Just("end|>".to_string()),
        "[<>|/ ]{1,3}",
        r"[ \t\r\n\u{a0}\u{3000}]{1,4}",
        "[a-zA-Z']{1,8}",
        "[0-9]{1,4}",
        "[e\u{301}\u{323}\u{1100}\u{1161}漢字ſßéا]{1,4}",
        "\\PC{0,4}",
        any::<char>().prop_map(String::from),
    ];
    proptest::collection::vec(part, 0..16).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_text_has_the_ids_that_hugging_face_gives(text in texts()) {
        let (tokenizer, reference) = (data::tokenizer(), hugging_face());
        let expected = reference.encode_fast(text.as_str(), false).unwrap();
        let ids = tokenizer.encode_with_control(&text);
        prop_assert_eq!(&ids, expected.get_ids());
        prop_assert_eq!(tokenizer.decode(&ids, false), reference.decode(&ids, false).unwrap());
    }

    #[test]
    fn text_comes_back_normalised_and_never_holds_control_tokens(text in texts()) {
        let tokenizer = data::tokenizer();
        let ids = tokenizer.encode_text(&text);
        prop_assert!(ids.iter().all(|id| *id < 248_044));
        prop_assert_eq!(tokenizer.decode(&ids, false), nfc(&text));
    }

    #[test]
    fn no_file_makes_loading_panic(cut in 0_usize..3000, with in any::<u8>()) {
        let mut json = data::small_tokenizer_json(&["<|a|>"]).to_string().into_bytes();
        let at = cut % json.len();
        json[at] = with;
        let _ = Tokenizer::from_bytes(&json);
    }
}

fn nfc(text: &str) -> String {
    use tokenizers::Normalizer;
    let mut normalized = tokenizers::NormalizedString::from(text);
    tokenizers::normalizers::NFC.normalize(&mut normalized).unwrap();
    normalized.get().to_string()
}
