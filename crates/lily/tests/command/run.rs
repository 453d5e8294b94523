use std::process::Output;

use serde_json::Value;

use crate::{RANDOM, assert_refused, output, output_with_input, path, stderr, stdout};

/// The random model's reply as JSON.
fn json(args: &[&str]) -> Value {
    serde_json::from_str(stdout(&output(&[&["run", "--json", "--model", &RANDOM][..], args].concat())))
        .unwrap()
}

/// The random model's reply.
fn run(args: &[&str]) -> Output {
    output(&[&["run", "--model", &RANDOM][..], args].concat())
}

#[test]
fn the_built_in_model_answers_and_says_what_it_is() {
    let done = output(&["run", "Hello", "-n", "8", "--no-think"]);
    let text = stdout(&done);
    assert!(text.trim().len() > 1 && text.ends_with('\n'), "{text:?}");
    assert!(stderr(&done).contains("demonstration model"), "{done:?}");
}

#[test]
fn a_prompt_on_standard_input_is_the_same_prompt() {
    let options = ["-n", "8", "--seed", "3", "--no-think"];
    let argument = output(&[&["run", "Hello"][..], &options].concat());
    let input = output_with_input(&[&["run"][..], &options].concat(), b"Hello\n");
    assert_eq!(stdout(&argument), stdout(&input));
}

#[test]
fn json_has_the_text_and_what_it_took() {
    let args = ["Hello", "-n", "12", "--seed", "3", "--no-think"];
    let reply = json(&args);
    assert_eq!(reply["finish_reason"], "length");
    assert_eq!(reply["completion_tokens"], 12);
    assert_eq!(reply["model"], "random");
    assert_eq!((&reply["reasoning"], &reply["tool_calls"]), (&"".into(), &Value::Array(Vec::new())));
    assert!(reply["prompt_tokens"].as_u64().unwrap() > 4);
    for time in ["load_seconds", "prefill_seconds", "decode_seconds"] {
        assert!(reply[time].as_f64().unwrap() > 0.0, "{time}");
    }
    let speed = reply["decode_tokens_per_second"].as_f64().unwrap();
    assert!((speed * reply["decode_seconds"].as_f64().unwrap() - 11.0).abs() < 1e-6);
    assert_eq!(json(&args)["text"], reply["text"], "the same seed, the same text");
    let plain = run(&args);
    assert_eq!(stdout(&plain).trim_end_matches('\n'), reply["text"].as_str().unwrap().trim_end_matches('\n'));
    assert_eq!(stderr(&plain), "");
}

#[test]
fn the_thought_is_not_on_standard_output() {
    let args = ["Hello", "-n", "8", "--seed", "3"];
    let (done, reply) = (run(&args), json(&args));
    let thought = reply["reasoning"].as_str().unwrap();
    assert!(!thought.is_empty() && reply["reasoning_tokens"] == 8, "{reply}");
    assert_eq!(stderr(&done), format!("<think>\n{thought}\n</think>\n"));
    assert_eq!(stdout(&done), "");
}

#[test]
fn sampling_options_act() {
    let text = |options: &[&str]| {
        let reply = json(&[&["Hello", "-n", "12", "--raw"][..], options].concat());
        reply["text"].as_str().unwrap().to_owned()
    };
    let greedy = text(&["--temperature", "0"]);
    assert_eq!(text(&["--top-k", "1"]), greedy);
    assert_eq!(text(&["--top-p", "0"]), greedy);
    assert_eq!(text(&["--min-p", "1"]), greedy);
    let hot = |seed| text(&["--temp", "5", "--top-k", "0", "--top-p", "1", "--seed", seed]);
    assert!(hot("5") != greedy && hot("5") != hot("6") && hot("5") == hot("5"));
    let cut = greedy.chars().skip(greedy.chars().count() / 2).take(3).collect::<String>();
    let stopped = text(&["--temperature", "0", "--stop", &cut]);
    assert_eq!(stopped, greedy[..greedy.find(&cut).unwrap()]);
}

/// A penalty this strong forbids every token that has occurred. The demonstration model can't write English without.
#[test]
fn the_repetition_penalty_acts() {
    let text = |penalty: &str| {
        let options = ["--raw", "-n", "40", "--temperature", "0", "--repeat-penalty", penalty];
        stdout(&output(&[&["run", "The Fox and the Lion"][..], &options].concat())).to_owned()
    };
    assert_ne!(text("1"), text("1000"));
}

#[test]
fn raw_text_is_not_wrapped_in_a_template() {
    let raw = json(&["Hello", "--raw", "-n", "1"]);
    let chat = json(&["Hello", "-n", "1"]);
    assert!(raw["prompt_tokens"].as_u64().unwrap() + 4 < chat["prompt_tokens"].as_u64().unwrap());
    let control = json(&["<|im_start|>", "--raw", "-n", "1"]);
    assert_eq!(control["prompt_tokens"], 1);
}

#[test]
fn a_system_message_is_part_of_the_prompt() {
    let with = json(&["Hello", "--system", "Be brief.", "-n", "1"]);
    let without = json(&["Hello", "-n", "1"]);
    assert!(with["prompt_tokens"].as_u64() > without["prompt_tokens"].as_u64());
}

#[test]
fn tools_are_part_of_the_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tools.json");
    std::fs::write(&file, r#"[{"type": "function", "function": {"name": "f", "parameters": {}}}]"#).unwrap();
    let with = json(&["Hello", "--tools", path(&file), "-n", "1"]);
    let without = json(&["Hello", "-n", "1"]);
    assert!(with["prompt_tokens"].as_u64() > without["prompt_tokens"].as_u64());
    std::fs::write(&file, "{}").unwrap();
    let bad = output(&["run", "Hello", "--tools", path(&file)]);
    assert_refused(&bad, 1, &["tools.json", "expected a JSON list of tool definitions"]);
}

#[test]
fn an_empty_prompt_is_refused() {
    assert_refused(&output(&["run", ""]), 2, &["the prompt is empty"]);
    assert_refused(&output(&["run", " \n"]), 2, &["the prompt is empty"]);
    assert_refused(&output(&["run"]), 2, &["the prompt is empty"]);
    assert_refused(&output(&["run", "--raw", ""]), 2, &["the prompt is empty"]);
    assert_refused(&output_with_input(&["run"], b"\n"), 2, &["the prompt is empty"]);
}

#[test]
fn input_that_is_not_text_is_refused() {
    assert_refused(&output_with_input(&["run"], b"caf\xe9"), 1, &["standard input is not UTF-8"]);
}

#[test]
fn a_prompt_longer_than_the_context_is_refused_with_both_numbers() {
    let long = output(&["run", "--raw", &"word ".repeat(200), "--ctx-size", "64"]);
    assert_refused(&long, 1, &["tokens, but the context is 64 tokens", "--ctx-size"]);
}

#[test]
fn a_context_longer_than_the_models_is_refused_with_both_numbers() {
    let huge = output(&["run", "Hello", "--ctx-size", "1000000"]);
    assert_refused(&huge, 2, &["a context of 1000000 tokens is too long: the model was made for at most"]);
}

#[test]
fn an_option_out_of_range_is_refused_by_name() {
    assert_refused(&output(&["run", "Hello", "--top-p", "1.5"]), 1, &["top_p", "found 1.5"]);
    assert_refused(&output(&["run", "Hello", "--max-tokens", "0"]), 2, &["--max-tokens"]);
    assert_refused(&output(&["run", "Hello", "--threads", "0"]), 2, &["--threads"]);
}

#[test]
fn a_model_folder_that_is_none_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = |model: &str| output(&["run", "Hello", "--model", model]);
    let missing = folder.path().join("missing");
    assert_refused(&run(path(&missing)), 1, &["missing does not exist: check --model"]);
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert_refused(&run(path(&file)), 1, &["file is not a folder"]);
    assert_refused(&run(path(folder.path())), 1, &["config.json is missing"]);
    std::fs::write(folder.path().join("config.json"), r#"{"model_type": "llama"}"#).unwrap();
    assert_refused(&run(path(folder.path())), 1, &["config.json: `model_type` is \"llama\""]);
}
