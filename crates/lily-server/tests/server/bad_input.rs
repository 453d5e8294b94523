//! Bad input: each is answered with the envelope that names it, and harms no one else.

use std::time::Duration;

use serde_json::{Value, json};

use crate::fixture::{Script, TestServer, question};
use crate::http::{Connection, JSON, chat, exchange, get, post_chat, request};

const CHAT: &str = "/v1/chat/completions";

/// The request after a bad one must be served.
async fn check_alive(server: &TestServer) {
    assert_eq!(post_chat(server.address, &question()).await.status, 200);
}

#[tokio::test]
async fn a_body_that_is_not_json_is_refused_with_the_place() {
    let server = TestServer::start(Script::new().reply("a</think>b")).await;
    for (body, code, words) in [
        (&b"{\"messages\": [}"[..], "invalid_json", "line 1 column 15"),
        (b"{\"messages\": \"\xff\xfe\"}", "invalid_json", "byte 14"),
        (b"[1, 2]", "invalid_json", "must be a JSON object"),
        (b"{}", "missing_required_parameter", "messages"),
        (b"{\"messages\"", "invalid_json", "line 1"),
    ] {
        let answer = exchange(server.address, &request("POST", CHAT, &[JSON], body)).await;
        let error = answer.error(400, code);
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    let deep = "[".repeat(100_000);
    let answer = exchange(server.address, &request("POST", CHAT, &[JSON], deep.as_bytes())).await;
    answer.error(400, "invalid_json");
    exchange(server.address, &request("POST", CHAT, &[JSON], b"")).await.error(400, "invalid_json");
    check_alive(&server).await;
}

#[tokio::test]
async fn a_body_that_is_not_called_json_is_refused() {
    let server = TestServer::start(Script::new().reply("a</think>b")).await;
    let body = question().to_string();
    for headers in [&[][..], &[("Content-Type", "text/plain")]] {
        let answer = exchange(server.address, &request("POST", CHAT, headers, body.as_bytes())).await;
        answer.error(415, "unsupported_media_type");
    }
    let with_charset = [("Content-Type", "Application/JSON; charset=utf-8")];
    let answer = exchange(server.address, &request("POST", CHAT, &with_charset, body.as_bytes())).await;
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn a_body_of_ten_megabytes_is_refused_and_the_client_reads_why() {
    let server = TestServer::start(Script::new().reply("a</think>b")).await;
    let body = json!({"messages": [{"role": "user", "content": "x".repeat(10_000_000)}]});
    let error = post_chat(server.address, &body).await.error(413, "request_too_large");
    assert!(error["message"].as_str().unwrap().contains("8388608"), "{error}");
    // Where the body is not wanted for another reason the answer must get through as well.
    let path = request("POST", "/v1/nowhere", &[JSON], body.to_string().as_bytes());
    exchange(server.address, &path).await.error(404, "not_found");
    check_alive(&server).await;
}

#[tokio::test]
async fn unknown_paths_and_methods_get_the_envelope() {
    let server = TestServer::start(Script::new()).await;
    get(server.address, "/v1/nowhere").await.error(404, "not_found");
    get(server.address, "/").await.error(404, "not_found");
    let answer = get(server.address, CHAT).await;
    answer.error(405, "method_not_allowed");
    assert_eq!(answer.header("allow"), Some("POST"));
    exchange(server.address, &request("DELETE", "/health", &[], b"")).await.error(405, "method_not_allowed");
}

#[tokio::test]
async fn conversations_that_cannot_be_rendered_are_refused() {
    let server = TestServer::start(Script::new().reply("a</think>b")).await;
    let text = |role: &str| json!({"role": role, "content": "x"});
    let image = json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]});
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "not json"}});
    for (messages, code, param) in [
        (json!([]), "invalid_value", "messages"),
        (json!([text("wizard")]), "invalid_value", "messages[0].role"),
        (json!([text("user"), "x"]), "invalid_value", "messages[1]"),
        (json!([image]), "unsupported_content", "messages[0].content[0].type"),
        (json!([text("system")]), "template_refused", "messages"),
        (json!([text("assistant")]), "template_refused", "messages"),
        (
            json!([text("user"), {"role": "assistant", "tool_calls": [call]}]),
            "invalid_value",
            "messages[1].tool_calls[0].function.arguments",
        ),
    ] {
        let error = post_chat(server.address, &json!({"messages": messages})).await.error(400, code);
        assert_eq!(error["param"], param, "{error}");
        if code == "template_refused" {
            assert!(error["message"].as_str().unwrap().contains("No user query found"), "{error}");
        }
    }
    for messages in [
        json!([text("system"), text("system"), text("user")]),
        json!([text("user"), text("system"), text("user")]),
        json!([text("system"), text("user"), text("assistant"), text("system"), text("user")]),
        json!([text("developer"), text("user")]),
    ] {
        assert_eq!(post_chat(server.address, &json!({"messages": messages})).await.status, 200, "{messages}");
    }
}

#[tokio::test]
async fn a_field_that_cannot_be_honoured_is_named() {
    let server = TestServer::start(Script::new().reply("a</think>b")).await;
    let mut body = question();
    body["store"] = json!(true);
    assert_eq!(post_chat(server.address, &body).await.error(400, "unsupported_value")["param"], "store");
    body["store"] = Value::Null;
    body["temperature"] = json!("hot");
    let error = post_chat(server.address, &body).await.error(400, "invalid_value");
    assert_eq!(error["param"], "temperature");
    assert_eq!(error["message"], "temperature: expected a number from 0 to 2, found \"hot\"");
    body["temperature"] = Value::Null;
    body["logit_bias"] = json!({"4000000000": 1});
    let error = post_chat(server.address, &body).await.error(400, "invalid_value");
    assert_eq!(error["param"], "logit_bias");
}

#[tokio::test]
async fn a_prompt_longer_than_the_context_is_refused_with_both_numbers() {
    let server = TestServer::start(Script::new().reply("a</think>b")).await;
    let context = server.engine().status().context;
    let long = "word ".repeat(context as usize);
    let body = json!({"messages": [{"role": "user", "content": long}]});
    for stream in [false, true] {
        let mut body = body.clone();
        body["stream"] = json!(stream);
        let error = post_chat(server.address, &body).await.error(400, "context_length_exceeded");
        let message = error["message"].as_str().unwrap();
        let numbers: Vec<u32> =
            message.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok()).collect();
        assert!(numbers.contains(&context) && numbers.iter().any(|n| *n > context), "{message}");
    }
    check_alive(&server).await;
}

#[tokio::test]
async fn a_full_queue_says_when_to_come_back() {
    let script = Script::new().reply("a</think>b").prefill_delay(Duration::from_millis(400));
    let server = TestServer::start(script.places(1, 1)).await;
    let running = Connection::open(server.address, &chat(&question())).await;
    server.wait_for(|status| status.running == 1).await;
    let waiting = Connection::open(server.address, &chat(&question())).await;
    server.wait_for(|status| status.waiting == 1).await;
    let refused = post_chat(server.address, &question()).await;
    refused.error(429, "queue_full");
    assert!(refused.header("retry-after").unwrap().parse::<u32>().unwrap() > 0);
    assert_eq!(running.answer().await.status, 200);
    assert_eq!(waiting.answer().await.status, 200);
}

#[tokio::test]
async fn a_stopped_engine_is_unavailable_and_says_so() {
    let server = TestServer::start(Script::new()).await;
    let health = get(server.address, "/health").await;
    assert_eq!((health.status, &health.json()["status"]), (200, &json!("ok")));
    assert_eq!(health.json()["running"], 0);
    assert!(health.json()["last_step_age_ms"].is_u64());
    let engine = server.engine().clone();
    tokio::task::spawn_blocking(move || engine.shutdown(Duration::ZERO)).await.unwrap();
    post_chat(server.address, &question()).await.error(503, "engine_stopped");
    let health = get(server.address, "/health").await;
    assert_eq!((health.status, &health.json()["status"]), (503, &json!("stopped")));
    assert!(health.json()["reason"].is_string());
}

#[tokio::test]
async fn a_key_is_asked_for_everywhere_but_at_health() {
    let server = TestServer::start_with(Script::new().reply("a</think>b"), |state| {
        state.api_key = Some("sesame".to_owned());
    })
    .await;
    let body = question().to_string();
    for authorization in ["", "Bearer ", "Bearer sesam", "Bearer sesame!", "Basic sesame", "sesame"] {
        let headers = [JSON, ("Authorization", authorization)];
        for bytes in
            [request("POST", CHAT, &headers, body.as_bytes()), request("GET", "/v1/models", &headers, b"")]
        {
            let answer = exchange(server.address, &bytes).await;
            answer.error(401, "invalid_api_key");
            assert_eq!(answer.header("www-authenticate"), Some("Bearer"));
        }
    }
    get(server.address, "/v1/models").await.error(401, "invalid_api_key");
    assert_eq!(get(server.address, "/health").await.status, 200);
    for authorization in ["Bearer sesame", "bearer sesame"] {
        let headers = [JSON, ("Authorization", authorization)];
        let answer = exchange(server.address, &request("POST", CHAT, &headers, body.as_bytes())).await;
        assert_eq!(answer.status, 200);
    }
}

#[tokio::test]
async fn a_slow_body_holds_nothing_else_and_times_out() {
    let server = TestServer::start_with(Script::new().reply("a</think>b"), |state| {
        state.limits.body_time = Duration::from_millis(300);
    })
    .await;
    let body = question().to_string();
    let bytes = request("POST", CHAT, &[JSON], body.as_bytes());
    let mut slow = Connection::open(server.address, &bytes[..bytes.len() - 5]).await;
    slow.send(&bytes[bytes.len() - 5..][..1]).await;
    check_alive(&server).await;
    slow.answer().await.error(408, "request_timeout");
    check_alive(&server).await;
}

#[tokio::test]
async fn a_slow_head_is_cut_off() {
    let server = TestServer::start_with(Script::new().reply("a</think>b"), |state| {
        state.limits.head_time = Duration::from_millis(200);
    })
    .await;
    let slow = Connection::open(server.address, b"POST /v1/chat/comp").await;
    check_alive(&server).await;
    assert!(slow.end().await.is_empty());
}

#[tokio::test]
async fn a_connection_serves_on_after_an_error() {
    let server = TestServer::start(Script::new().reply("a</think>b")).await;
    let keep =
        |bytes: Vec<u8>| String::from_utf8(bytes).unwrap().replace("Connection: close\r\n", "").into_bytes();
    let bad = keep(request("POST", CHAT, &[JSON], b"{"));
    let mut connection = Connection::open(server.address, &bad).await;
    connection.read_until("invalid_json").await;
    connection.received.clear();
    connection.send(&chat(&question())).await;
    assert_eq!(connection.answer().await.status, 200);
}
