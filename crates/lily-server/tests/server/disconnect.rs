//! A client that leaves ends the work for it, wherever it was.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::fixture::{Script, TestServer, question};
use crate::http::{Connection, JSON, chat, post_chat, request};

/// Time within which the engine must be idle after the client has gone.
const WITHIN: Duration = Duration::from_millis(200);

async fn check_idle_soon(server: &TestServer) {
    let gone = Instant::now();
    server.wait_for(|status| status.running == 0 && status.waiting == 0).await;
    assert!(gone.elapsed() < WITHIN, "idle after {:?}", gone.elapsed());
}

async fn leave_in_decode(stream: bool) {
    let script = Script::new().endless().step_delay(Duration::from_millis(5));
    let server = TestServer::start(script).await;
    let mut body = question();
    body["stream"] = json!(stream);
    let mut connection = Connection::open(server.address, &chat(&body)).await;
    server.wait_for(|status| status.running == 1).await;
    if stream {
        connection.read_until("reasoning_content").await;
    }
    let steps = server.engine().status().steps;
    server.wait_for(|status| status.steps > steps + 3).await;
    drop(connection);
    check_idle_soon(&server).await;
    let steps = server.engine().status().steps;
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(server.engine().status().steps, steps, "no work for nobody");
}

#[tokio::test]
async fn in_decode_of_a_stream() {
    leave_in_decode(true).await;
}

#[tokio::test]
async fn in_decode_of_a_whole_answer() {
    leave_in_decode(false).await;
}

/// Many chunks of prefill, each short: the client leaves between two of them.
async fn leave_in_prefill(stream: bool) {
    let script = Script::new().reply("a</think>b").step_delay(Duration::from_millis(20));
    let server = TestServer::start(script).await;
    let words = "word ".repeat(800);
    let body = json!({"messages": [{"role": "user", "content": words}], "stream": stream});
    let connection = Connection::open(server.address, &chat(&body)).await;
    server.wait_for(|status| status.steps > 2).await;
    assert_eq!(server.engine().status().running, 1);
    drop(connection);
    check_idle_soon(&server).await;
}

#[tokio::test]
async fn in_prefill_of_a_stream() {
    leave_in_prefill(true).await;
}

#[tokio::test]
async fn in_prefill_of_a_whole_answer() {
    leave_in_prefill(false).await;
}

#[tokio::test]
async fn in_the_queue() {
    let script = Script::new().endless().step_delay(Duration::from_millis(5)).places(1, 4);
    let server = TestServer::start(script).await;
    let first = Connection::open(server.address, &chat(&question())).await;
    server.wait_for(|status| status.running == 1).await;
    let second = Connection::open(server.address, &chat(&question())).await;
    server.wait_for(|status| status.waiting == 1).await;
    drop(second);
    server.wait_for(|status| status.waiting == 0).await;
    assert_eq!(server.engine().status().running, 1);
    drop(first);
    check_idle_soon(&server).await;
}

#[tokio::test]
async fn a_crowd_that_leaves_at_any_time_does_no_harm() {
    let script = Script::new().endless().step_delay(Duration::from_millis(1)).places(4, 400);
    let server = TestServer::start(script).await;
    let mut crowd = Vec::new();
    let user = json!([{"role": "user", "content": "Well?"}]);
    let letters = json!({"syntax": "regex", "definition": "a{1000}"});
    let requests = [
        ("/v1/chat/completions", json!({"messages": user, "n": 3})),
        ("/v1/chat/completions", json!({"messages": user, "enable_thinking": false, "grammar": letters})),
        ("/v1/completions", json!({"prompt": ["a", "b"], "max_tokens": 900})),
        ("/v1/responses", json!({"input": "Well?", "thinking_budget": 20})),
        ("/v1/messages", json!({"messages": user, "max_tokens": 900})),
    ];
    for i in 0..100u64 {
        let (path, mut body) = requests[i as usize % requests.len()].clone();
        body["stream"] = json!(i % 2 == 0);
        let bytes = request("POST", path, &[JSON], body.to_string().as_bytes());
        let connection = Connection::open(server.address, &bytes).await;
        crowd.push(tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(i * 7 % 97)).await;
            drop(connection);
        }));
    }
    for client in crowd {
        client.await.unwrap();
    }
    let mut body = question();
    body["max_tokens"] = json!(3);
    body["n"] = json!(2);
    let start = Instant::now();
    assert_eq!(post_chat(server.address, &body).await.status, 200);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    server.wait_for(|status| status.running == 0 && status.waiting == 0).await;
}
