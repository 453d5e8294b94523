//! What a chat client gets.

use std::time::Duration;

use lily_engine::testing::tokens;
use serde_json::{Value, json};

use crate::fixture::{Script, TestServer, question};
use crate::http::{Answer, Connection, chat, events, exchange, get, post_chat, request};

const TOOL_CALLS: &str = "I must look.\n</think>\n\n<tool_call>\n<function=look>\n<parameter=at>\nthe \"sky\" \u{1F319}\n</parameter>\n<parameter=times>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=look>\n<parameter=at>\nground\n</parameter>\n</function>\n</tool_call>";

/// A request whose tools the scripts call.
pub fn with_tools(mut body: Value) -> Value {
    let properties = json!({"at": {"type": "string"}, "times": {"type": "integer"}});
    let parameters = json!({"type": "object", "properties": properties});
    body["tools"] = json!([{"type": "function", "function": {"name": "look", "parameters": parameters}}]);
    body
}

pub fn streamed(mut body: Value) -> Value {
    body["stream"] = json!(true);
    body
}

pub fn message(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["choices"][0]["message"].clone()
}

/// Adds up the deltas of a stream the way a client does, without knowing how the server does it.
pub fn fold(chunks: &[Value]) -> Value {
    let mut message = json!({"role": null, "content": null, "refusal": null});
    let mut calls: Vec<Value> = Vec::new();
    for delta in chunks.iter().filter_map(|chunk| chunk["choices"].get(0)).map(|choice| &choice["delta"]) {
        if let Some(role) = delta.get("role") {
            message["role"] = role.clone();
        }
        for field in ["content", "reasoning_content"] {
            if let Some(text) = delta.get(field).and_then(Value::as_str) {
                let before = message.get(field).and_then(Value::as_str).unwrap_or_default();
                message[field] = json!(format!("{before}{text}"));
            }
        }
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = part["index"].as_u64().unwrap() as usize;
            if part.get("id").is_some() {
                assert_eq!(index, calls.len());
                let mut call = part.clone();
                call.as_object_mut().unwrap().shift_remove("index");
                calls.push(call);
            } else {
                let arguments = &mut calls[index]["function"]["arguments"];
                let more = part["function"]["arguments"].as_str().unwrap();
                *arguments = json!(format!("{}{more}", arguments.as_str().unwrap()));
            }
        }
    }
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
    }
    message
}

#[tokio::test]
async fn an_answer_has_its_parts_in_their_fields() {
    let server = TestServer::start(Script::new().reply("Let me see.\n</think>\n\nHello!")).await;
    let answer = post_chat(server.address, &question()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let json = answer.json();
    assert!(json["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(json["object"], "chat.completion");
    assert_eq!(json["model"], server.model());
    assert!(json["created"].as_u64().unwrap() > 1_700_000_000);
    assert!(json["system_fingerprint"].as_str().unwrap().starts_with("lily-"));
    let choice = &json["choices"][0];
    assert_eq!(choice["index"], 0);
    assert_eq!(choice["logprobs"], Value::Null);
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["message"]["content"], "Hello!");
    assert_eq!(choice["message"]["reasoning_content"].as_str().unwrap().trim(), "Let me see.");
    assert_eq!(choice["message"]["refusal"], Value::Null);
    assert_eq!(choice["message"].get("tool_calls"), None);
    let usage = &json["usage"];
    let number = |value: &Value| value.as_u64().unwrap();
    assert_eq!(
        number(&usage["total_tokens"]),
        number(&usage["prompt_tokens"]) + number(&usage["completion_tokens"])
    );
    let reasoning = number(&usage["completion_tokens_details"]["reasoning_tokens"]);
    assert!(reasoning > 0 && reasoning < number(&usage["completion_tokens"]));
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
}

#[tokio::test]
async fn a_stream_adds_up_to_the_plain_message_byte_for_byte() {
    let thinking_off = |mut body: Value| {
        body["enable_thinking"] = json!(false);
        body
    };
    let limited = |mut body: Value, tokens: u32| {
        body["max_tokens"] = json!(tokens);
        body
    };
    let stopping = |mut body: Value| {
        body["stop"] = json!(["beta gamma", "never"]);
        body
    };
    let plain = || question();
    for (reply, body, reason) in [
        ("A thought.\n</think>\n\nAn answer.", plain(), "stop"),
        ("A thought.\n</think>\n\n", plain(), "stop"),
        ("\u{1F469}\u{200D}\u{1F469}\u{200D}\u{1F467} \u{10F}ábelské\n</think>\n\n漢字", plain(), "stop"),
        ("No thought at all.", thinking_off(plain()), "stop"),
        ("A thought that is cut off before it ends", limited(plain(), 9), "length"),
        ("x</think>alpha beta gamma delta", stopping(plain()), "stop"),
        (TOOL_CALLS, with_tools(plain()), "tool_calls"),
        (TOOL_CALLS, plain(), "stop"),
    ] {
        let server = TestServer::start(Script::new().reply(reply)).await;
        let whole = post_chat(server.address, &body).await;
        let stream = post_chat(server.address, &streamed(body)).await;
        let (expected, mut found) = (message(&whole), fold(&stream.chunks()));
        // Ids of calls are random, so they can't be equal.
        for (i, call) in
            found.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten().enumerate()
        {
            let id = &expected["tool_calls"][i]["id"];
            assert!(id.is_string() && call["id"] != *id);
            call["id"] = id.clone();
        }
        assert_eq!(found.to_string(), expected.to_string(), "{reply:?}");
        assert_eq!(whole.json()["choices"][0]["finish_reason"], reason, "{reply:?}");
        let reasons: Vec<Value> =
            stream.chunks().iter().map(|chunk| chunk["choices"][0]["finish_reason"].clone()).collect();
        let (last, others) = reasons.split_last().unwrap();
        assert_eq!(*last, reason, "{reply:?}");
        assert!(others.iter().all(Value::is_null));
    }
}

#[tokio::test]
async fn a_thought_may_be_part_of_the_content() {
    let inside = |mut body: Value| {
        body["reasoning_format"] = json!("none");
        body
    };
    for (reply, content, calls) in [
        ("A thought.</think>\n\nAn answer.", "<think>\nA thought.\n</think>\n\nAn answer.", 0),
        ("A thought.</think>", "<think>\nA thought.", 0),
        (TOOL_CALLS, "<think>\nI must look.\n</think>\n\n", 2),
    ] {
        let server = TestServer::start(Script::new().reply(reply)).await;
        let body = inside(with_tools(question()));
        let whole = message(&post_chat(server.address, &body).await);
        assert_eq!(whole["content"], content);
        assert_eq!(whole.get("reasoning_content"), None);
        assert_eq!(whole["tool_calls"].as_array().map_or(0, Vec::len), calls);
        let folded = fold(&post_chat(server.address, &streamed(body)).await.chunks());
        assert_eq!(folded["content"], content);
        let apart = message(&post_chat(server.address, &with_tools(question())).await);
        assert!(apart["reasoning_content"].is_string());
    }
}

#[tokio::test]
async fn all_chunks_of_a_stream_carry_the_same_head() {
    let server = TestServer::start(Script::new().reply("a</think>b")).await;
    let answer = post_chat(server.address, &streamed(question())).await;
    assert_eq!(answer.header("cache-control"), Some("no-cache"));
    let chunks = answer.chunks();
    for chunk in &chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], chunks[0]["id"]);
        assert_eq!(chunk["created"], chunks[0]["created"]);
        assert_eq!(chunk["model"], server.model());
        assert_eq!(chunk.get("usage"), None);
    }
}

#[tokio::test]
async fn usage_comes_in_a_last_chunk_of_its_own_when_asked_for() {
    let server = TestServer::start(Script::new().reply("a</think>some words")).await;
    for limit in [2, 1000] {
        let mut body = streamed(question());
        body["max_tokens"] = json!(limit);
        body["stream_options"] = json!({"include_usage": true});
        let chunks = post_chat(server.address, &body).await.chunks();
        let (last, others) = chunks.split_last().unwrap();
        assert_eq!(last["choices"], json!([]));
        assert!(last["usage"]["completion_tokens"].as_u64().unwrap() > 0);
        assert!(others.iter().all(|chunk| chunk.get("usage") == Some(&Value::Null)));
        body["stream_options"] = Value::Null;
        body["stream"] = json!(false);
        assert_eq!(post_chat(server.address, &body).await.json()["usage"], last["usage"]);
    }
}

#[tokio::test]
async fn cached_tokens_are_those_that_were_not_read() {
    let server = TestServer::start(Script::new().reply("a</think>b").cache(4096)).await;
    let cached = |usage: &Value| usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let mut apart = question();
    apart["cache_prompt"] = json!(false);
    for body in [question(), apart.clone()] {
        assert_eq!(cached(&post_chat(server.address, &body).await.json()["usage"]), 0);
    }
    let whole = post_chat(server.address, &question()).await.json()["usage"].clone();
    let opening = tokens("<|im_start|>assistant\n<think>\n").len() as u64;
    assert_eq!(cached(&whole), whole["prompt_tokens"].as_u64().unwrap() - opening);
    let mut body = streamed(question());
    body["stream_options"] = json!({"include_usage": true});
    let chunks = post_chat(server.address, &body).await.chunks();
    assert_eq!(chunks.last().unwrap()["usage"], whole);
    assert_eq!(cached(&post_chat(server.address, &apart).await.json()["usage"]), 0);
    server.wait_for(|status| status.running == 0 && status.cache_snapshots > 0).await;
    let health = get(server.address, "/health").await.json();
    assert_eq!(health["prefix_cache"]["limit_bytes"], 4096);
    assert!(health["prefix_cache"]["snapshots"].as_u64().unwrap() > 0, "{health}");
    assert!(health["prefix_cache"]["bytes"].as_u64().unwrap() > 0, "{health}");
}

#[tokio::test]
async fn a_call_streams_its_arguments_as_they_come() {
    let server = TestServer::start(Script::new().reply(TOOL_CALLS)).await;
    let chunks = post_chat(server.address, &streamed(with_tools(question()))).await.chunks();
    let parts: Vec<&Value> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].get(0)).collect();
    let first = parts[0];
    assert_eq!((&first["index"], &first["type"]), (&json!(0), &json!("function")));
    assert!(first["id"].as_str().unwrap().starts_with("call_"));
    assert_eq!(first["function"], json!({"name": "look", "arguments": ""}));
    let fragments = parts.iter().filter(|part| part["index"] == 0 && part.get("id").is_none()).count();
    assert!(fragments > 3, "{fragments} fragments");
    let message = fold(&chunks);
    assert_eq!(message["content"], Value::Null);
    let arguments = |i: usize| {
        let text = message["tool_calls"][i]["function"]["arguments"].as_str().unwrap();
        serde_json::from_str::<Value>(text).unwrap()
    };
    assert_eq!(arguments(0), json!({"at": "the \"sky\" \u{1F319}", "times": 3}));
    assert_eq!(arguments(1), json!({"at": "ground"}));
}

#[tokio::test]
async fn the_role_comes_before_the_prompt_is_read_and_comments_keep_the_stream_alive() {
    let script = Script::new().reply("a</think>b").prefill_delay(Duration::from_millis(600));
    let server = TestServer::start_with(script, |state| {
        state.limits.keep_alive = Duration::from_millis(50);
    })
    .await;
    let mut connection = Connection::open(server.address, &chat(&streamed(question()))).await;
    connection.read_until("\"role\":\"assistant\"").await;
    server.wait_for(|status| status.running == 1).await;
    for _ in 0..4 {
        connection.read_until(": keep-alive\n\n").await;
        assert_eq!(events(&String::from_utf8_lossy(&connection.received)).len(), 0, "nothing but comments");
        connection.received.clear();
    }
    connection.read_until("[DONE]").await;
}

#[tokio::test]
async fn log_probabilities_are_reported_for_every_token() {
    let server = TestServer::start(Script::new().reply("ab</think>cd")).await;
    let mut body = question();
    body["logprobs"] = json!(true);
    body["top_logprobs"] = json!(2);
    let whole = post_chat(server.address, &body).await.json();
    let tokens = whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    let texts: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(texts, "ab</think>cd", "all but the end of the turn");
    for token in &tokens {
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        let bytes: Vec<u8> = serde_json::from_value(token["bytes"].clone()).unwrap();
        assert_eq!(String::from_utf8_lossy(&bytes), token["token"].as_str().unwrap());
    }
    let chunks = post_chat(server.address, &streamed(body)).await.chunks();
    let lists = chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(lists.flatten().cloned().collect::<Vec<_>>(), tokens);
}

#[tokio::test]
async fn a_broken_logit_fails_its_request_with_the_position_and_no_other() {
    let server =
        TestServer::start(Script::new().reply("some words").non_finite_after(3).reply("a</think>b")).await;
    let whole = post_chat(server.address, &question()).await;
    let error = whole.error(500, "model_error");
    assert!(error["message"].as_str().unwrap().contains("position"), "{error}");
    assert_eq!(message(&post_chat(server.address, &question()).await)["content"], "b");
}

#[tokio::test]
async fn a_failed_device_fails_the_request_and_shows_in_health() {
    let server = TestServer::start(Script::new().reply("some words").device_fails_after(3)).await;
    let whole = post_chat(server.address, &question()).await;
    let error = whole.error(500, "device_error");
    assert!(error["message"].as_str().unwrap().contains("unplugged"), "{error}");
    server.wait_for(|status| status.stopped.is_some()).await;
    assert_eq!(get(server.address, "/health").await.status, 503);
    post_chat(server.address, &question()).await.error(503, "engine_stopped");
}

#[tokio::test]
async fn an_error_after_the_start_is_the_last_event() {
    let server = TestServer::start(Script::new().reply("some words").non_finite_after(3)).await;
    let events = post_chat(server.address, &streamed(question())).await.events();
    let error: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "model_error");
    assert_eq!(error["error"]["type"], "server_error");
    assert!(events.len() > 1 && !events.iter().any(|data| data == "[DONE]"));
}

#[tokio::test]
async fn any_model_name_is_answered_by_the_one_there_is() {
    let server = TestServer::start(Script::new().reply("a</think>b")).await;
    let mut body = question();
    body["model"] = json!("gpt-9");
    assert_eq!(post_chat(server.address, &body).await.json()["model"], server.model());
    let list = get(server.address, "/v1/models").await.json();
    assert_eq!(list["object"], "list");
    let context = server.engine().status().context;
    let model = &list["data"][0];
    assert_eq!((&model["id"], &model["object"]), (&json!(server.model()), &json!("model")));
    assert_eq!(model["context_length"], context);
    assert_eq!(model["max_model_len"], context);
    assert!(model["created"].is_u64() && model["owned_by"].is_string());
    assert!(model["capabilities"].as_array().unwrap().contains(&json!("tools")));
    let one = get(server.address, &format!("/v1/models/{}", server.model())).await.json();
    assert_eq!(one, *model);
    get(server.address, "/v1/models/other").await.error(404, "model_not_found");
}

#[tokio::test]
async fn every_answer_carries_a_request_id() {
    let server = TestServer::start(Script::new()).await;
    let given = request("GET", "/health", &[("x-request-id", "mine-1")], b"");
    assert_eq!(exchange(server.address, &given).await.header("x-request-id"), Some("mine-1"));
    let (first, second) = (get(server.address, "/health").await, get(server.address, "/nowhere").await);
    let ids = [first.header("x-request-id").unwrap(), second.header("x-request-id").unwrap()];
    assert!(ids.iter().all(|id| id.starts_with("req_") && id.len() > 20));
    assert_ne!(ids[0], ids[1]);
    let long = "x".repeat(500);
    let answer = exchange(server.address, &request("GET", "/health", &[("x-request-id", &long)], b"")).await;
    assert!(answer.header("x-request-id").unwrap().starts_with("req_"));
}
