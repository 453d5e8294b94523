//! What was read once is not read again: the prefix cache with the demonstration model, through the server.

use serde_json::{Value, json};

use crate::serve::Server;
use crate::{output_with_input, stderr, stdout};

/// Long enough to be worth keeping.
const SYSTEM: &str = "You tell fables. You were asked to be brief, to name the animals in your fables, to say what \
                      they learn, and to end each of them with one short sentence that holds the whole of it. When \
                      nobody asks for a fable, you answer in one sentence.";
/// What the template ends a prompt with, where thinking is on: `<|im_start|>`, `assistant`, newline, `<think>`,
/// newline.
const OPENING: u64 = 5;

/// The answer to a conversation, greedy.
fn ask(server: &Server, messages: &Value, more: Value) -> Value {
    let mut body = json!({"messages": messages, "temperature": 0, "max_tokens": 200});
    for (name, value) in more.as_object().unwrap() {
        body[name] = value.clone();
    }
    let answer = server.answer("POST", "/v1/chat/completions", "", &body.to_string());
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    serde_json::from_str(body).unwrap()
}

fn message(reply: &Value) -> &Value {
    &reply["choices"][0]["message"]
}

fn prompt_tokens(reply: &Value) -> u64 {
    reply["usage"]["prompt_tokens"].as_u64().unwrap()
}

fn cached_tokens(reply: &Value) -> u64 {
    reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

/// Asks with the cache, and checks that the answer is that which the model gives without.
#[track_caller]
fn ask_both(server: &Server, messages: &Value, more: &Value) -> Value {
    let reply = ask(server, messages, more.clone());
    let mut apart = more.clone();
    apart["cache_prompt"] = json!(false);
    let plain = ask(server, messages, apart);
    assert_eq!(message(&reply).to_string(), message(&plain).to_string());
    assert_eq!(cached_tokens(&plain), 0);
    reply
}

/// The next turn's prompt leaves out the thought, so it parts from the last one where the reply opens.
#[test]
fn the_next_turn_reads_only_what_is_new() {
    let server = Server::start(&["--ctx-size", "4096"]);
    let mut messages = json!([
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What is the capital of France?"},
    ]);
    let first = ask_both(&server, &messages, &json!({}));
    assert_eq!(cached_tokens(&first), 0);
    assert!(!message(&first)["reasoning_content"].as_str().unwrap().is_empty(), "{first}");
    let again = ask(&server, &messages, json!({}));
    assert_eq!(cached_tokens(&again), prompt_tokens(&first) - OPENING);
    assert_eq!(message(&again), message(&first));

    let turns = messages.as_array_mut().unwrap();
    turns.push(json!({"role": "assistant", "content": message(&first)["content"]}));
    turns.push(json!({"role": "user", "content": "And of Italy?"}));
    let second = ask_both(&server, &messages, &json!({}));
    assert_eq!(cached_tokens(&second), prompt_tokens(&first) - OPENING);

    // Whoever sends the thought back has it left out all the same.
    messages[2]["reasoning_content"] = message(&first)["reasoning_content"].clone();
    let with_thought = ask_both(&server, &messages, &json!({}));
    assert_eq!(cached_tokens(&with_thought), prompt_tokens(&second) - OPENING);
    assert_eq!(message(&with_thought), message(&second));
}

#[test]
fn a_reply_that_stays_in_the_prompt_is_not_read_again() {
    let server = Server::start(&["--ctx-size", "4096"]);
    let more = json!({"enable_thinking": false, "chat_template_kwargs": {"preserve_thinking": true}});
    let mut messages = json!([{"role": "user", "content": "What is 12 plus 30?"}]);
    let first = ask_both(&server, &messages, &more);
    let turns = messages.as_array_mut().unwrap();
    turns.push(message(&first).clone());
    turns.push(json!({"role": "user", "content": "Tell me a story about a fox"}));
    let second = ask_both(&server, &messages, &more);
    // All of the reply but the token that ended it; that one too where a step is under way before the one before it is read.
    let reply = prompt_tokens(&first) + first["usage"]["completion_tokens"].as_u64().unwrap();
    assert!((reply - 1..=reply).contains(&cached_tokens(&second)), "{second}");
}

#[test]
fn conversations_share_their_system_block() {
    let server = Server::start(&["--ctx-size", "4096"]);
    let about = |question: &str| json!([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]);
    let first = ask_both(&server, &about("Tell me a story about a fox"), &json!({}));
    let second = ask_both(&server, &about("What is the capital of Spain?"), &json!({}));
    let shared = cached_tokens(&second);
    assert!(shared > 40 && shared < prompt_tokens(&first) - OPENING, "{shared}");
    let streamed = json!({"messages": about("Why?"), "max_tokens": 1, "stream": true,
                          "stream_options": {"include_usage": true}});
    let events = server.answer("POST", "/v1/chat/completions", "", &streamed.to_string());
    assert!(
        events.contains(&format!("\"prompt_tokens_details\":{{\"cached_tokens\":{shared}}}")),
        "{events}"
    );
    let health = server.answer("GET", "/health", "", "");
    assert!(health.contains("\"limit_bytes\":2147483648"), "{health}");
}

#[test]
fn the_cache_can_be_off() {
    let server = Server::start(&["--ctx-size", "512", "--cache-ram", "0"]);
    let messages = json!([{"role": "user", "content": "What is the capital of France?"}]);
    let replies = [0, 1].map(|_| ask(&server, &messages, json!({})));
    assert_eq!(replies.each_ref().map(cached_tokens), [0, 0]);
    assert!(server.answer("GET", "/health", "", "").contains("\"snapshots\":0"));
}

#[test]
fn a_chat_does_not_read_the_talk_again() {
    let input = b"What is the capital of France?\nAnd of Italy?\nAnd of Spain?\n";
    let talk =
        |cache: &str| output_with_input(&["chat", "-v", "--temperature", "0", "--cache-ram", cache], input);
    let (with, without) = (talk("64"), talk("0"));
    assert_eq!(stdout(&with), stdout(&without));
    let cached = |log: &str| -> Vec<u32> {
        let numbers = log.split("cached_tokens=").skip(1);
        numbers
            .map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap())
            .collect()
    };
    assert_eq!(cached(stderr(&without)), [0, 0, 0]);
    let [first, second, third] = cached(stderr(&with))[..] else { panic!("{}", stderr(&with)) };
    assert!(first == 0 && second > 0 && third > second, "{}", stderr(&with));
}
