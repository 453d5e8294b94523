//! Requests that take long, and those that take too long.

use std::time::{Duration, Instant};

use lily_server::serve::ServeError;
use serde_json::{Value, json};

use crate::fixture::{Script, TestServer, question};
use crate::http::{Connection, chat, get, post, post_chat};

/// A chat whose prompt takes several steps to read.
fn long_question() -> Value {
    json!({"messages": [{"role": "user", "content": "Well? ".repeat(60)}]})
}

fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_stream_tells_how_far_the_prompt_is_read() {
    let script = Script::new().reply("a</think>b").step_delay(Duration::from_millis(20)).cache(1 << 20);
    let server = TestServer::start(script).await;
    let body = with(long_question(), json!({"stream": true, "return_progress": true}));
    for round in 0..2 {
        let answer = crate::http::exchange(server.address, &chat(&body)).await;
        let chunks = answer.chunks();
        let told: Vec<&Value> =
            chunks.iter().filter(|chunk| chunk.get("prompt_progress").is_some()).collect();
        let number = |chunk: &Value, name: &str| chunk["prompt_progress"][name].as_u64().unwrap();
        assert!(told.iter().all(|chunk| chunk["choices"][0]["delta"] == json!({})));
        let total = number(told[0], "total");
        let processed: Vec<u64> = told.iter().map(|chunk| number(chunk, "processed")).collect();
        assert!(processed.is_sorted() && processed.last() == Some(&total), "{processed:?} of {total}");
        let cached = number(told[0], "cache");
        if round == 0 {
            assert!(told.len() > 3 && cached == 0, "{told:?}");
            assert!(number(told[told.len() - 1], "time_ms") >= 60);
        } else {
            assert!(cached > 0 && processed[0] > cached, "{told:?}");
        }
    }
    let plain =
        crate::http::exchange(server.address, &chat(&with(question(), json!({"stream": true})))).await;
    assert!(plain.chunks().iter().all(|chunk| chunk.get("prompt_progress").is_none()), "only if asked for");
    let body = json!({"prompt": "Well? ".repeat(60), "stream": true, "return_progress": true});
    let answer = post(server.address, "/v1/completions", &body).await;
    assert!(answer.chunks()[0]["prompt_progress"]["total"].as_u64().unwrap() > 64);
    post_chat(server.address, &with(question(), json!({"return_progress": true})))
        .await
        .error(400, "invalid_value");
}

#[tokio::test]
async fn a_request_that_takes_too_long_is_ended() {
    let script = Script::new().endless().step_delay(Duration::from_millis(5));
    let server = TestServer::start_with(script, |state| {
        state.limits.request_time = Some(Duration::from_millis(200));
        state.limits.idle_time = Some(Duration::from_secs(5));
    })
    .await;
    let start = Instant::now();
    let whole = post_chat(server.address, &question()).await;
    let error = whole.error(400, "time_limit_exceeded");
    assert!(error["message"].as_str().unwrap().contains("200ms"), "{error}");
    assert!(start.elapsed() >= Duration::from_millis(200) && start.elapsed() < Duration::from_secs(3));
    let streamed =
        crate::http::exchange(server.address, &chat(&with(question(), json!({"stream": true})))).await;
    let events = streamed.events();
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "time_limit_exceeded");
    server.wait_for(|status| status.running == 0).await;
}

#[tokio::test]
async fn a_request_without_progress_is_ended_but_not_one_that_is_slow() {
    let idle = |state: &mut lily_server::app::ServerState| {
        state.limits.idle_time = Some(Duration::from_millis(300));
    };
    let slow = Script::new().reply("a</think>a slow one").step_delay(Duration::from_millis(60));
    let server = TestServer::start_with(slow, idle).await;
    let start = Instant::now();
    assert_eq!(post_chat(server.address, &long_question()).await.status, 200);
    assert!(start.elapsed() > Duration::from_millis(600), "it took longer than the limit, bit by bit");
    let stuck = Script::new().reply("a</think>b").prefill_delay(Duration::from_secs(2));
    let server = TestServer::start_with(stuck, idle).await;
    post_chat(server.address, &question()).await.error(400, "time_limit_exceeded");
}

#[tokio::test]
async fn a_device_that_does_not_come_back_fails_its_requests_and_ends_the_server() {
    let script = Script::new().reply("a</think>b").prefill_delay(Duration::from_secs(15));
    let server = TestServer::start_with(script, |state| {
        state.limits.stall_time = Some(Duration::from_millis(400));
    })
    .await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(get(server.address, "/health").await.status, 200, "nothing to do is no stall");
    let whole = Connection::open(server.address, &chat(&question())).await;
    let streamed = Connection::open(server.address, &chat(&with(question(), json!({"stream": true})))).await;
    let start = Instant::now();
    let (whole, streamed) = (whole.answer().await, streamed.answer().await);
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    let error = whole.error(500, "device_error");
    assert!(error["message"].as_str().unwrap().contains("400ms"), "{error}");
    let events = streamed.events();
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "device_error");
    let end = server.ended().await;
    assert!(matches!(end, Err(ServeError::Stalled(_))), "{end:?}");
}

#[tokio::test]
async fn the_log_tells_of_a_long_prompt() {
    let (log, lines) = crate::fixture::log();
    let script = Script::new().reply("a</think>b").step_delay(Duration::from_millis(30));
    let server = TestServer::start_with(script, |state| {
        state.limits.progress_time = Duration::from_millis(20);
    })
    .await;
    let headers = [crate::http::JSON, ("x-request-id", "long-one")];
    let body = long_question().to_string();
    let bytes = crate::http::request("POST", "/v1/chat/completions", &headers, body.as_bytes());
    assert_eq!(crate::http::exchange(server.address, &bytes).await.status, 200);
    drop(log);
    let lines = lines();
    let told = lines.lines().filter(|line| line.contains("reading the prompt")).count();
    assert!(told >= 2, "{lines}");
    let own = lines.lines().filter(|line| line.contains("reading")).all(|line| line.contains("long-one"));
    assert!(own, "{lines}");
}
