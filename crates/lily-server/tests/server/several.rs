//! Several answers to one request.

use std::collections::HashSet;
use std::sync::Arc;

use lily_engine::scheduler::{Engine, Options};
use lily_engine::testing::{FakeBackend, greedy, limits, options, tokenizer};
use serde_json::{Value, json};

use crate::chat::{fold, message, streamed};
use crate::fixture::{Script, TestServer, question};
use crate::http::{get, post, post_chat};

/// A server whose model draws at random.
pub async fn random() -> TestServer {
    TestServer::start_with(Script::new().reply(""), |state| {
        let options = Options { cache_bytes: 8192, prefill_chunk: 64, ..options() };
        state.engine =
            Engine::start(Box::new(FakeBackend::sampling(limits())), Arc::new(tokenizer()), options);
        state.defaults = greedy();
    })
    .await
}

fn several(n: u32, seed: Value) -> Value {
    let mut body = question();
    body.as_object_mut().unwrap().extend(
        json!({"n": n, "seed": seed, "temperature": 1, "max_tokens": 20, "ignore_eos": true})
            .as_object()
            .unwrap()
            .clone(),
    );
    body
}

fn messages(body: &Value) -> Vec<String> {
    let choices = body["choices"].as_array().unwrap();
    for (i, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], i);
    }
    choices.iter().map(|choice| choice["message"].to_string()).collect()
}

#[tokio::test]
async fn answers_differ_and_a_seed_repeats_them() {
    let server = random().await;
    let first = post_chat(server.address, &several(3, json!(7))).await.json();
    let second = post_chat(server.address, &several(3, json!(7))).await.json();
    assert_eq!(messages(&first), messages(&second));
    assert_eq!(messages(&first).into_iter().collect::<HashSet<_>>().len(), 3);
    let one = post_chat(server.address, &several(1, json!(7))).await;
    assert_eq!(message(&one).to_string(), messages(&first)[0], "the first answer has the seed itself");
    let free = post_chat(server.address, &several(3, Value::Null)).await.json();
    assert_eq!(messages(&free).into_iter().collect::<HashSet<_>>().len(), 3);
}

#[tokio::test]
async fn the_prompt_counts_once_and_is_read_once() {
    let server = random().await;
    let usage = post_chat(server.address, &several(4, json!(1))).await.json()["usage"].clone();
    let one = post_chat(server.address, &several(1, json!(1))).await.json()["usage"].clone();
    assert_eq!(usage["prompt_tokens"], one["prompt_tokens"]);
    assert_eq!(usage["completion_tokens"], 80);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    let prompt = one["prompt_tokens"].as_u64().unwrap();
    assert_eq!(one["prompt_tokens_details"]["cached_tokens"], prompt - 1);
    // All but the first of five sequences read the last token alone.
    let metrics = get(server.address, "/metrics").await;
    let found = metrics.text().lines().find(|line| line.starts_with("vllm:prefix_cache_hits_total{"));
    let hits = found.and_then(|line| line.rsplit_once(' ')).unwrap().1;
    assert_eq!(hits, (4 * (prompt - 1)).to_string());
}

#[tokio::test]
async fn a_stream_has_each_answer_under_its_index() {
    let server = random().await;
    let whole = post_chat(server.address, &several(3, json!(7))).await.json();
    let chunks = post_chat(server.address, &streamed(several(3, json!(7)))).await.chunks();
    for (i, expected) in messages(&whole).into_iter().enumerate() {
        let own: Vec<Value> =
            chunks.iter().filter(|chunk| chunk["choices"][0]["index"] == i).cloned().collect();
        assert_eq!(fold(&own).to_string(), expected);
        assert_eq!(own.last().unwrap()["choices"][0]["finish_reason"], "length");
    }
}

#[tokio::test]
async fn more_answers_than_can_ever_be_open_are_refused_for_good() {
    let server = TestServer::start(Script::new().reply("a</think>b").places(1, 2)).await;
    assert_eq!(post_chat(server.address, &several(3, Value::Null)).await.status, 200);
    let refused = post_chat(server.address, &several(4, Value::Null)).await;
    assert_eq!(refused.error(400, "invalid_value")["param"], "n");
}

#[tokio::test]
async fn several_answers_to_several_prompts_are_in_order() {
    let server = random().await;
    let body = json!({"prompt": ["one", "another"], "n": 2, "seed": 5, "temperature": 1, "max_tokens": 8, "ignore_eos": true, "echo": true});
    let answer = post(server.address, "/v1/completions", &body).await.json();
    let texts: Vec<&str> =
        answer["choices"].as_array().unwrap().iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts.len(), 4);
    assert!(texts[..2].iter().all(|text| text.starts_with("one")), "{texts:?}");
    assert!(texts[2..].iter().all(|text| text.starts_with("another")), "{texts:?}");
    assert_ne!(texts[0], texts[1]);
    assert_eq!(answer["usage"]["prompt_tokens"], "oneanother".len());
    assert_eq!(answer["usage"]["completion_tokens"], 32);
}
