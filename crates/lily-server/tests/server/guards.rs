//! What keeps a server safe from its clients, and what it tells of itself.

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::time::{sleep, timeout};

use crate::fixture::{Script, TestServer, question};
use crate::http::{PATIENCE, chat, exchange, get, post_chat};

#[tokio::test]
async fn requests_addressed_to_another_name_are_refused() {
    let server = TestServer::start_with(Script::new().reply("a</think>b"), |state| {
        state.hosts = vec!["lily.example".to_owned()];
    })
    .await;
    let to = |host: &str, path: &str| {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        let address = server.address;
        async move { exchange(address, request.as_bytes()).await }
    };
    for path in ["/health", "/v1/models", "/nowhere"] {
        let answer = to("evil.example:8000", path).await;
        let error = answer.error(403, "host_not_allowed");
        assert!(error["message"].as_str().unwrap().contains("--allow-host"), "{error}");
        assert!(answer.header("x-request-id").is_some());
    }
    for host in ["localhost:1", "127.0.0.1", "lily.example:80"] {
        assert_eq!(to(host, "/v1/models").await.status, 200, "{host}");
    }
    let nameless = b"GET /health HTTP/1.0\r\n\r\n";
    assert_eq!(exchange(server.address, nameless).await.status, 200, "no browser sends that");
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_cut_off() {
    let server = TestServer::start_with(Script::new().endless(), |state| {
        state.limits.write_time = Duration::from_millis(200);
    })
    .await;
    // As much output as the context holds, more than the system takes in for a client.
    let mut body = question();
    body.as_object_mut().unwrap().extend(
        json!({"stream": true, "ignore_eos": true, "logprobs": true, "top_logprobs": 20})
            .as_object()
            .unwrap()
            .clone(),
    );
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(server.address).await.unwrap();
    stream.write_all(&chat(&body)).await.unwrap();
    server.wait_for(|status| status.steps > 0 && status.running == 0).await;
    sleep(Duration::from_millis(600)).await;
    let mut received = Vec::new();
    // The end may come as a reset.
    let _ = timeout(PATIENCE, stream.read_to_end(&mut received)).await.expect("the server closes");
    let received = String::from_utf8_lossy(&received);
    assert!(received.starts_with("HTTP/1.1 200"), "{received}");
    assert!(!received.contains("[DONE]"), "{} bytes are all of it", received.len());
    assert_eq!(
        post_chat(server.address, &{
            let mut body = question();
            body["max_tokens"] = json!(3);
            body
        })
        .await
        .status,
        200
    );
}

#[tokio::test]
async fn metrics_count_what_was_done() {
    let server = TestServer::start(Script::new().reply("a</think>some words").cache(4096)).await;
    for _ in 0..2 {
        assert_eq!(post_chat(server.address, &question()).await.status, 200);
    }
    let usage = post_chat(server.address, &question()).await.json()["usage"].clone();
    get(server.address, "/v1/nowhere").await;
    let answer = get(server.address, "/metrics").await;
    assert!(answer.header("content-type").unwrap().starts_with("text/plain"));
    let text = answer.text();
    let value = |name: &str| -> f64 {
        let line =
            text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
        line.rsplit_once(' ').unwrap().1.parse().unwrap()
    };
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    assert_eq!(value("vllm:prompt_tokens_total{"), 3.0 * number(&usage["prompt_tokens"]));
    assert_eq!(value("vllm:generation_tokens_total{"), 3.0 * number(&usage["completion_tokens"]));
    let cached = number(&usage["prompt_tokens_details"]["cached_tokens"]);
    assert!(cached > 0.0);
    assert_eq!(value("vllm:prefix_cache_hits_total{"), 2.0 * cached);
    assert_eq!(value("vllm:request_success_total{finished_reason=\"stop\""), 3.0);
    assert_eq!(value("vllm:time_to_first_token_seconds_count{"), 3.0);
    let generated = 3.0 * number(&usage["completion_tokens"]);
    assert_eq!(
        value("vllm:inter_token_latency_seconds_count{"),
        generated - 3.0,
        "an answer's first has none"
    );
    assert_eq!(value("vllm:request_time_per_output_token_seconds_count{"), 3.0);
    assert_eq!(value("vllm:num_requests_running{"), 0.0);
    assert!(value("vllm:kv_cache_usage_perc{") > 0.0, "the cache holds state");
    let answers = "http_requests_total{handler=\"/v1/chat/completions\",method=\"POST\",status=\"200\"}";
    assert_eq!(value(answers), 3.0);
    assert_eq!(value("http_requests_total{handler=\"none\",method=\"GET\",status=\"404\"}"), 1.0);
}
