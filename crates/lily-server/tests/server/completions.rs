//! Raw text, and tokens.

use lily_engine::testing::tokens;
use serde_json::{Value, json};

use crate::fixture::{Script, TestServer, question};
use crate::http::{post, post_chat};

const PATH: &str = "/v1/completions";

async fn text(server: &TestServer, body: &Value) -> String {
    let answer = post(server.address, PATH, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["choices"][0]["text"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn raw_text_is_continued_as_it_is() {
    let server = TestServer::start(Script::new().reply(" <tool_call> </think>{x} ")).await;
    let body = json!({"prompt": "Once", "max_tokens": 100});
    let answer = post(server.address, PATH, &body).await.json();
    assert_eq!(answer["object"], "text_completion");
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    let choice = &answer["choices"][0];
    assert_eq!(
        (&choice["text"], &choice["finish_reason"]),
        (&json!(" <tool_call> </think>{x} "), &json!("stop"))
    );
    assert_eq!(choice["logprobs"], Value::Null);
    assert_eq!(answer["usage"]["prompt_tokens"], 4);
    let mut stream = body.clone();
    stream["stream"] = json!(true);
    stream["stream_options"] = json!({"include_usage": true});
    let chunks = post(server.address, PATH, &stream).await.chunks();
    let texts: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(choice["text"], texts);
    assert_eq!(chunks.last().unwrap()["usage"], answer["usage"]);
    assert_eq!(chunks[0]["usage"], Value::Null);
}

#[tokio::test]
async fn prompts_are_texts_or_tokens() {
    let server = TestServer::start(Script::new().reply("x")).await;
    for (prompt, count, echo) in [
        (json!("ab<|im_end|>"), 3, "ab<|im_end|>"),
        (json!([97, 98]), 2, "ab"),
        (json!([[97], [98, 99]]), 3, "a"),
        (json!(["ab"]), 2, "ab"),
    ] {
        let body = json!({"prompt": prompt, "echo": true});
        assert_eq!(text(&server, &body).await, format!("{echo}x"));
        assert_eq!(post(server.address, PATH, &body).await.json()["usage"]["prompt_tokens"], count);
    }
    for (body, param) in [
        (json!({}), "prompt"),
        (json!({"prompt": 3}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [[1], {}]}), "prompt[1]"),
        (json!({"prompt": [1, -1]}), "prompt[1]"),
        (json!({"prompt": "a", "n": 99}), "n"),
        (json!({"prompt": "a", "logprobs": 21}), "logprobs"),
        (json!({"prompt": [1, 4_000_000_000u32]}), "prompt"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": "a", "grammar": "x"}), "grammar"),
        (json!({"prompt": "a", "best_of": 3}), "best_of"),
        (json!({"prompt": "a", "echo": true, "logprobs": 1, "suffix": "b"}), "echo"),
        (json!({"prompt": "a", "echo": true, "max_tokens": 0}), "max_tokens"),
        (json!({"prompt": "a", "logprobs": 1, "max_tokens": 0}), "max_tokens"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix"),
    ] {
        let answer = post(server.address, PATH, &body).await;
        assert_eq!(answer.status, 400, "{body}");
        assert_eq!(answer.json()["error"]["param"], param, "{body}");
    }
}

#[tokio::test]
async fn without_a_limit_sixteen_tokens_come() {
    let server = TestServer::start(Script::new().endless()).await;
    assert_eq!(text(&server, &json!({"prompt": "a"})).await.len(), 16);
    assert_eq!(text(&server, &json!({"prompt": "a", "max_tokens": 3})).await.len(), 3);
    let stopped = json!({"prompt": "a", "stop": "aaa"});
    assert_eq!(text(&server, &stopped).await, "");
}

#[tokio::test]
async fn log_probabilities_come_in_columns() {
    let server = TestServer::start(Script::new().reply("aé")).await;
    for stream in [false, true] {
        let body = json!({"prompt": "a", "logprobs": 2, "stream": stream});
        let answer = post(server.address, PATH, &body).await;
        let lists: Vec<Value> = if stream {
            answer.chunks().iter().map(|chunk| chunk["choices"][0]["logprobs"].clone()).collect()
        } else {
            vec![answer.json()["choices"][0]["logprobs"].clone()]
        };
        let column = |name: &str| -> Vec<Value> {
            lists.iter().flat_map(|list| list[name].as_array().unwrap().clone()).collect()
        };
        assert_eq!(column("tokens"), ["a", "\u{FFFD}", "\u{FFFD}", "<|im_end|>"]);
        assert_eq!(column("text_offset"), [0, 1, 2, 3]);
        assert!(column("token_logprobs").iter().all(|logprob| logprob.as_f64().unwrap() <= 0.0));
        assert!(column("top_logprobs").iter().all(|top| !top.as_object().unwrap().is_empty()));
    }
}

/// As lm-evaluation-harness asks: it leaves out the column of the one generated token, whatever that is.
#[tokio::test]
async fn an_echo_has_log_probabilities() {
    let server = TestServer::start(Script::new().reply("").cache(4096)).await;
    for max_tokens in [0, 1] {
        let prompts = json!([tokens("abc"), tokens("xy"), tokens("abc")]);
        let body = json!({"prompt": prompts, "echo": true, "logprobs": 20, "max_tokens": max_tokens});
        let answer = post(server.address, PATH, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let answer = answer.json();
        for (choice, text) in answer["choices"].as_array().unwrap().iter().zip(["abc", "xy", "abc"]) {
            assert_eq!(choice["text"], text);
            let column = |name: &str| choice["logprobs"][name].as_array().unwrap().clone();
            let mut spelled: Vec<String> = text.chars().map(String::from).collect();
            spelled.extend((max_tokens == 1).then(|| "<|im_end|>".to_owned()));
            assert_eq!(column("tokens"), spelled);
            assert_eq!(column("text_offset"), (0..spelled.len()).collect::<Vec<usize>>());
            let (own, top) = (column("token_logprobs"), column("top_logprobs"));
            assert_eq!((own.len(), top.len()), (spelled.len(), spelled.len()));
            assert_eq!((&own[0], &top[0]), (&Value::Null, &Value::Null));
            for i in 1..text.len() {
                let top = top[i].as_object().unwrap();
                let most = top.values().filter_map(Value::as_f64).fold(f64::NEG_INFINITY, f64::max);
                let logprob = own[i].as_f64().unwrap();
                assert!(logprob < 0.0 && logprob <= most, "{choice}");
                assert!(top.get(&spelled[i]).is_none_or(|same| same == &own[i]), "{choice}");
            }
        }
        assert_eq!(answer["choices"][0]["logprobs"], answer["choices"][2]["logprobs"]);
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    }
}

#[tokio::test]
async fn a_grammar_holds_raw_text() {
    let server = TestServer::start(Script::new().reply("Well, 12 or 13")).await;
    let body = json!({"prompt": "How many? ", "grammar": {"syntax": "regex", "definition": "[0-9]{2}"}});
    assert_eq!(text(&server, &body).await, "12");
}

#[tokio::test]
async fn tokens_are_counted_as_they_are_read() {
    let server = TestServer::start(Script::new().reply("a</think>b")).await;
    let of = |body: Value| {
        let address = server.address;
        async move { post(address, "/tokenize", &body).await.json() }
    };
    let answer = of(json!({"prompt": "ab<|im_end|>é", "return_token_strs": true})).await;
    assert_eq!(answer["tokens"], json!(tokens("ab<|im_end|>é")));
    assert_eq!((&answer["count"], &answer["token_strs"][2]), (&json!(5), &json!("<|im_end|>")));
    assert_eq!(answer["max_model_len"], server.engine().status().context);
    let chat = of(question()).await;
    let usage = post_chat(server.address, &question()).await.json()["usage"].clone();
    assert_eq!(chat["count"], usage["prompt_tokens"]);
    let text = post(server.address, "/detokenize", &json!({"tokens": answer["tokens"]})).await.json();
    assert_eq!(text["prompt"], "ab<|im_end|>é");
    assert_eq!(
        post(server.address, "/tokenize", &json!({})).await.error(400, "missing_required_parameter")["param"],
        "prompt"
    );
    assert_eq!(
        post(server.address, "/detokenize", &json!({"tokens": ["x"]})).await.error(400, "invalid_value")["param"],
        "tokens[0]"
    );
}
