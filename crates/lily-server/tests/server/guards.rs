//! What keeps a server safe from its clients, and what it tells of itself.

use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
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

#[tokio::test]
async fn web_pages_from_elsewhere_get_nothing_unless_listed() {
    let preflight = "Origin: https://app.example\r\nAccess-Control-Request-Method: POST\r\n\
        Access-Control-Request-Headers: authorization, content-type\r\n";
    let ask = |address, method: &str, origin: &str| {
        let request =
            format!("{method} /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{origin}\r\n");
        async move { exchange(address, request.as_bytes()).await }
    };
    let of_app = "Origin: https://app.example\r\n";
    let shut = TestServer::start(Script::new()).await;
    for (method, origin) in [("GET", of_app), ("OPTIONS", preflight)] {
        let answer = ask(shut.address, method, origin).await;
        let cors = answer.headers.iter().find(|(name, _)| name.starts_with("access-control"));
        assert_eq!(cors, None, "{method}");
    }
    let open = TestServer::start_with(Script::new(), |state| {
        state.origins = vec!["https://app.example".parse().unwrap()];
        state.api_key = Some("sesame".to_owned());
    })
    .await;
    let answer = ask(open.address, "OPTIONS", preflight).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.header("access-control-allow-origin"), Some("https://app.example"));
    assert_eq!(answer.header("access-control-allow-headers"), Some("authorization, content-type"));
    let answer = ask(open.address, "GET", &format!("{of_app}x-api-key: sesame\r\n")).await;
    assert_eq!(
        (answer.status, answer.header("access-control-allow-origin")),
        (200, Some("https://app.example"))
    );
    assert!(answer.header("access-control-expose-headers").unwrap().contains("x-request-id"));
    assert_eq!(ask(open.address, "GET", of_app).await.status, 401, "the key is still needed");
    let other = ask(open.address, "GET", "Origin: https://evil.example\r\nx-api-key: sesame\r\n").await;
    assert_eq!(other.header("access-control-allow-origin"), None);
}

#[tokio::test]
async fn heads_that_are_too_large_are_refused() {
    let server = TestServer::start(Script::new()).await;
    let with = |headers: String| {
        let request =
            format!("GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n");
        let address = server.address;
        async move { exchange(address, request.as_bytes()).await.status }
    };
    let lines = |n: usize| (0..n).map(|i| format!("x-{i}: y\r\n")).collect();
    assert_eq!(with(lines(90)).await, 200);
    assert_eq!(with(lines(110)).await, 431);
    assert_eq!(with(format!("x: {}\r\n", "y".repeat(32 << 10))).await, 200);
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let endless = format!("GET /health HTTP/1.1\r\nHost: localhost\r\nx: {}", "y".repeat(1 << 20));
    // The server closes before it has all, and the answer may be lost to that.
    let _ = stream.write_all(endless.as_bytes()).await;
    let mut received = Vec::new();
    let _ = timeout(PATIENCE, stream.read_to_end(&mut received)).await.expect("the server closes");
    assert!(received.is_empty() || received.starts_with(b"HTTP/1.1 431"), "{received:?}");
}

#[tokio::test]
async fn what_a_device_says_of_paths_stays_in_the_log() {
    let fault = "can't load /usr/lib/libdevice.so";
    let server = TestServer::start(Script::new().reply("ab").device_says_after(1, fault)).await;
    let answer = post_chat(server.address, &question()).await;
    answer.error(500, "device_error");
    let refused = post_chat(server.address, &question()).await;
    refused.error(503, "engine_stopped");
    let health = get(server.address, "/health").await;
    assert_eq!(health.status, 503);
    for answer in [answer, refused, health] {
        let text = answer.text();
        assert!(text.contains("can't load") && !text.contains("/usr"), "{text}");
    }
}
