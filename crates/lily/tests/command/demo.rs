//! What only a model that has learned something can show. Greedy where a fact is asked for.

use serde_json::{Value, json};

use crate::{assert_refused, output, path, stdout};

/// The demonstration model's reply as JSON.
fn ask(prompt: &str, options: &[&str]) -> Value {
    let args = [&["run", "--json", "--temperature", "0", prompt], options].concat();
    serde_json::from_str(stdout(&output(&args))).unwrap()
}

#[test]
fn it_tells_a_story_to_its_end() {
    let reply = ask("Tell me a story about a fox", &["--no-think", "-n", "600"]);
    let story = reply["text"].as_str().unwrap();
    assert_eq!(reply["finish_reason"], "stop", "{story}");
    assert!(story.contains("Fox") && story.split_whitespace().count() > 40, "{story}");
    let plain = |c: char| c.is_ascii_alphabetic() || c.is_whitespace() || c.is_ascii_punctuation();
    assert!(story.chars().all(plain), "{story}");
}

#[test]
fn a_thought_comes_before_the_answer_and_apart_from_it() {
    let reply = ask("What is the capital of France?", &[]);
    assert_eq!(reply["text"], "The capital of France is Paris.");
    let thought = reply["reasoning"].as_str().unwrap();
    assert!(thought.contains("capital of France") && !thought.contains('<'), "{thought}");
    let without = ask("What is the capital of France?", &["--no-think"]);
    assert_eq!((&without["reasoning"], &without["reasoning_tokens"]), (&json!(""), &json!(0)));
}

/// int8 activations and a bf16 cache move logits a little, and what the model has learned well not at all.
#[test]
fn the_exact_mode_says_the_same() {
    for prompt in ["Tell me a story about a fox", "What is 7 plus 5?", "What is the capital of France?"] {
        let options = ["--no-think", "-n", "40"];
        let exact = ask(prompt, &[&options[..], &["--cpu-exact"]].concat());
        assert_eq!(ask(prompt, &options)["text"], exact["text"]);
    }
}

#[test]
fn the_exact_mode_is_not_for_gpus() {
    for command in [&["run", "hello"][..], &["inspect"]] {
        let options = ["--cpu-exact", "--device", "cuda:1"];
        assert_refused(&output(&[command, &options].concat()), 2, &["--cpu-exact", "--device"]);
    }
}

#[test]
fn a_stop_string_cuts_exactly() {
    let whole = ask("What is 12 plus 30?", &["--no-think"]);
    let whole = whole["text"].as_str().unwrap();
    assert!(whole.contains("42"), "{whole}");
    let cut = ask("What is 12 plus 30?", &["--no-think", "--stop", "42"]);
    assert_eq!(cut["text"], whole[..whole.find("42").unwrap()]);
    assert_eq!(cut["finish_reason"], "stop");
}

#[test]
fn a_tool_is_called() {
    let tools = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("tools.json");
    let city = json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    let function =
        json!({"name": "get_weather", "description": "Get the current weather", "parameters": city});
    std::fs::write(&tools, json!([{"type": "function", "function": function}]).to_string()).unwrap();
    let reply = ask("What is the weather in Madrid?", &["--no-think", "--tools", path(&tools)]);
    assert_eq!(reply["finish_reason"], "tool_calls", "{reply}");
    let call = &reply["tool_calls"][0]["function"];
    assert_eq!(call["name"], "get_weather");
    let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"city": "Madrid"}));
}

/// Shuffled words are harder to predict than a text, and eval is the same however the text is cut into steps.
#[test]
fn eval_tells_english_from_shuffled_words() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let text = "There was once a poor man who lived with his wife in a small house by the edge of the forest. \
                Every morning he went out to cut wood, and every evening he came home tired and hungry. ";
    let mut words: Vec<&str> = text.split_whitespace().collect();
    words.sort_by_key(|word| word.bytes().rev().collect::<Vec<u8>>());
    let eval = |name: &str, text: &str| -> Value {
        let file = folder.join(name);
        std::fs::write(&file, text).unwrap();
        serde_json::from_str(stdout(&output(&["eval", "--json", "--text", path(&file)]))).unwrap()
    };
    let (told, shuffled) = (eval("told.txt", text), eval("shuffled.txt", &words.join(" ")));
    let bits = |reply: &Value| reply["bits_per_byte"].as_f64().unwrap();
    assert!(bits(&told) < 1.5 && bits(&shuffled) > bits(&told) + 0.5, "{told} {shuffled}");
    assert_eq!(told["perplexity"].as_f64().unwrap(), told["nll_per_token"].as_f64().unwrap().exp());
}

#[test]
fn bench_measures_every_prompt_length_and_batch() {
    let shape = ["--prompt-tokens", "8,300", "--decode-tokens", "4", "--repeat", "2", "--batch", "1,3"];
    let args = [&["bench", "--json"], &shape[..]].concat();
    let reply: Value = serde_json::from_str(stdout(&output(&args))).unwrap();
    let results = reply["results"].as_array().unwrap();
    let row = |r: &Value| (r["prompt_tokens"].as_u64().unwrap(), r["batch"].as_u64().unwrap());
    assert_eq!(results.iter().map(row).collect::<Vec<_>>(), [(8, 1), (8, 3), (300, 1), (300, 3)]);
    for result in results {
        assert!(result["prefill_tokens_per_s"].as_f64().unwrap() > 0.0);
        assert_eq!(result["decode_tokens_per_s_runs"].as_array().unwrap().len(), 2);
    }
}
