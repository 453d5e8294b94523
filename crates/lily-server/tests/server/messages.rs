//! What a client of Anthropic's API gets.

use std::time::Duration;

use lily_engine::testing::tokens;
use serde_json::{Value, json};

use crate::fixture::{Script, TestServer};
use crate::http::{Answer, Connection, JSON, exchange, post, request};

const PATH: &str = "/v1/messages";
const CALL: &str = "<tool_call>\n<function=look>\n<parameter=at>\nthe sky\n</parameter>\n<parameter=times>\n3\n</parameter>\n</function>\n</tool_call>";

fn question(fields: Value) -> Value {
    let mut body = json!({"max_tokens": 500, "messages": [{"role": "user", "content": "Well?"}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn thinking(fields: Value) -> Value {
    let mut body = question(fields);
    body["thinking"] = json!({"type": "enabled", "budget_tokens": 1024});
    body
}

fn tools() -> Value {
    let schema =
        json!({"type": "object", "properties": {"at": {"type": "string"}, "times": {"type": "integer"}}});
    json!([{"name": "look", "description": "Look.", "input_schema": schema, "cache_control": {"type": "ephemeral"}}])
}

fn plain(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

/// Names and data of the events of a stream, whose names must be the types of their data.
pub fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    let event = |text: &str| {
        let (name, data) = text.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name, format!("event: {}", data["type"].as_str().unwrap()));
        data
    };
    answer.text().split_terminator("\n\n").map(event).collect()
}

/// Puts a message together from its events as clients do.
pub fn fold(events: &[Value]) -> Value {
    let mut message = Value::Null;
    let mut input = String::new();
    for event in events {
        let index = event["index"].as_u64().unwrap_or_default() as usize;
        match event["type"].as_str().unwrap() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                assert_eq!(message["content"].as_array().unwrap().len(), index);
                message["content"].as_array_mut().unwrap().push(event["content_block"].clone());
                input.clear();
            }
            "content_block_delta" => {
                let (block, delta) = (&mut message["content"][index], &event["delta"]);
                let mut append = |name: &str| {
                    let all = format!("{}{}", block[name].as_str().unwrap(), delta[name].as_str().unwrap());
                    block[name] = all.into();
                };
                match delta["type"].as_str().unwrap() {
                    "text_delta" => append("text"),
                    "thinking_delta" => append("thinking"),
                    "signature_delta" => append("signature"),
                    _ => input += delta["partial_json"].as_str().unwrap(),
                }
            }
            "content_block_stop" if !input.is_empty() => {
                message["content"][index]["input"] = serde_json::from_str(&input).unwrap();
            }
            "message_delta" => {
                for (name, value) in event["delta"].as_object().unwrap() {
                    message[name] = value.clone();
                }
                message["usage"] = event["usage"].clone();
            }
            "content_block_stop" | "message_stop" | "ping" => {}
            other => panic!("{other}"),
        }
    }
    message
}

#[tokio::test]
async fn a_stream_adds_up_to_the_plain_message() {
    let call = format!("I must look.</think>\n\nOne moment.{CALL}");
    for (reply, body, reason, kinds) in [
        ("Let me see.</think>\n\nHello!", thinking(json!({})), "end_turn", &["thinking", "text"][..]),
        ("Hello!", question(json!({})), "end_turn", &["text"]),
        (&call, thinking(json!({"tools": tools()})), "tool_use", &["thinking", "text", "tool_use"]),
        ("one two three", question(json!({"stop_sequences": ["two"]})), "stop_sequence", &["text"]),
        ("one two three", question(json!({"max_tokens": 5})), "max_tokens", &["text"]),
    ] {
        let server = TestServer::start(Script::new().reply(reply)).await;
        let whole = plain(&post(server.address, PATH, &body).await);
        assert_eq!((&whole["type"], &whole["role"]), (&json!("message"), &json!("assistant")));
        assert_eq!((&whole["stop_reason"], &whole["model"]), (&json!(reason), &json!(server.model())));
        assert_eq!(
            whole["stop_sequence"],
            if reason == "stop_sequence" { json!("two") } else { Value::Null }
        );
        let found: Vec<&Value> =
            whole["content"].as_array().unwrap().iter().map(|block| &block["type"]).collect();
        assert_eq!(found, kinds);
        let mut stream = body.clone();
        stream["stream"] = json!(true);
        let events = events(&post(server.address, PATH, &stream).await);
        assert_eq!((&events[0]["type"], &events[1]["type"]), (&json!("message_start"), &json!("ping")));
        assert_eq!(events.last().unwrap()["type"], "message_stop");
        let mut folded = fold(&events);
        folded["id"] = whole["id"].clone();
        let ids = |message: &mut Value| {
            for block in message["content"].as_array_mut().unwrap() {
                if block.get("id").is_some() {
                    block["id"] = json!("id");
                }
            }
        };
        let mut expected = whole.clone();
        ids(&mut folded);
        ids(&mut expected);
        assert_eq!(folded, expected);
    }
}

#[tokio::test]
async fn a_call_has_its_input_as_json() {
    let server = TestServer::start(Script::new().reply(CALL)).await;
    let whole = plain(&post(server.address, PATH, &question(json!({"tools": tools()}))).await);
    let call = &whole["content"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("tool_use"), &json!("look")));
    assert_eq!(call["input"], json!({"at": "the sky", "times": 3}));
    // And goes back with its result.
    let messages = json!([
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, call]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "blue"}]},
            {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}},
        ]},
    ]);
    let body = question(json!({"tools": tools(), "messages": messages}));
    let count = plain(&post(server.address, "/v1/messages/count_tokens", &body).await);
    let usage = &plain(&post(server.address, PATH, &body).await)["usage"];
    assert_eq!(count["input_tokens"], usage["input_tokens"]);
    let chat = json!({"chat_template_kwargs": {"preserve_thinking": true}, "enable_thinking": false,
    "tools": [{"type": "function", "function": {"name": "look", "description": "Look.",
               "parameters": tools()[0]["input_schema"]}}],
    "messages": [
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "look", "arguments": "{\"at\": \"the sky\", \"times\": 3}"}}]},
        {"role": "tool", "tool_call_id": "x", "content": "blue"},
        {"role": "user", "content": "Go on."},
    ]});
    assert_eq!(post_tokens(&server, &chat).await, count["input_tokens"], "as chat completions render it");
}

async fn post_tokens(server: &TestServer, body: &Value) -> Value {
    plain(&post(server.address, "/tokenize", body).await)["count"].clone()
}

#[tokio::test]
async fn thinking_is_off_unless_asked_for_and_keeps_to_its_budget() {
    let thought = "on and on ".repeat(30);
    let server = TestServer::start(Script::new().reply(&format!("{thought}</think>Done."))).await;
    let mut body = question(json!({}));
    body["thinking"] = json!({"type": "enabled", "budget_tokens": 12});
    let whole = plain(&post(server.address, PATH, &body).await);
    assert_eq!(whole["content"][0]["thinking"], thought[..11]);
    assert_eq!(whole["content"][1]["text"], "Done.");
    assert_eq!(whole["usage"]["output_tokens"], 12 + "Done.".len() + 1);
    let count = |body: Value| post_count(&server, body);
    let off = count(question(json!({}))).await;
    assert_eq!(count(question(json!({"thinking": {"type": "disabled"}}))).await, off);
    assert_eq!(
        count(question(json!({"thinking": {"type": "adaptive"}}))).await,
        count(thinking(json!({}))).await
    );
    assert_ne!(count(thinking(json!({}))).await, off);
}

async fn post_count(server: &TestServer, body: Value) -> Value {
    plain(&post(server.address, "/v1/messages/count_tokens", &body).await)["input_tokens"].clone()
}

#[tokio::test]
async fn an_omitted_thought_comes_back_all_the_same() {
    let server = TestServer::start(Script::new().reply("Hm.</think>\n\nYes.")).await;
    let asked = json!({"thinking": {"type": "adaptive", "display": "omitted"}});
    let whole = plain(&post(server.address, PATH, &question(asked.clone())).await);
    assert_eq!(
        (&whole["content"][0]["thinking"], &whole["content"][1]["text"]),
        (&json!(""), &json!("Yes."))
    );
    let mut stream = question(asked);
    stream["stream"] = json!(true);
    let events = events(&post(server.address, PATH, &stream).await);
    assert_eq!(fold(&events)["content"], whole["content"]);
    let turn = |content: Value| {
        question(
            json!({"messages": [{"role": "user", "content": "Well?"}, {"role": "assistant", "content": content},
                                     {"role": "user", "content": "And?"}]}),
        )
    };
    let shown = json!([{"type": "thinking", "thinking": "Hm.", "signature": "unsigned"}, {"type": "text", "text": "Yes."}]);
    assert_eq!(
        post_count(&server, turn(whole["content"].clone())).await,
        post_count(&server, turn(shown)).await
    );
    let unknown = json!([{"type": "thinking", "thinking": "", "signature": "unsigned"}, {"type": "text", "text": "Yes."}]);
    assert_ne!(
        post_count(&server, turn(whole["content"].clone())).await,
        post_count(&server, turn(unknown)).await
    );
}

#[tokio::test]
async fn a_line_that_changes_with_every_request_is_no_part_of_the_prompt() {
    let server = TestServer::start(Script::new().reply("Yes.").cache(4096)).await;
    let body = |hash: &str| {
        let billing = format!("x-anthropic-billing-header: cc_version=2; cch={hash};");
        let block =
            |text: &str| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}});
        question(
            json!({"system": [block(&billing), block("Be brief."), block("Be kind.")], "metadata": {"user_id": "x"}}),
        )
    };
    let first = plain(&post(server.address, PATH, &body("11111")).await)["usage"].clone();
    let second = plain(&post(server.address, PATH, &body("2222")).await)["usage"].clone();
    assert_eq!(first["cache_read_input_tokens"], 0);
    assert!(second["cache_read_input_tokens"].as_u64().unwrap() > 0, "{second}");
    let total = |usage: &Value| {
        usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap()
    };
    assert_eq!(total(&first), total(&second));
    let plain_text = question(json!({"system": "Be brief.\n\nBe kind."}));
    assert_eq!(post_count(&server, plain_text).await, total(&first));
}

#[tokio::test]
async fn calls_can_be_asked_for_and_answers_held_to_a_schema() {
    let server = TestServer::start(Script::new().reply("Look at 1 2 3")).await;
    let body = question(json!({"tools": tools(), "tool_choice": {"type": "any"}}));
    let whole = plain(&post(server.address, PATH, &body).await);
    assert_eq!((&whole["stop_reason"], &whole["content"][0]["name"]), (&json!("tool_use"), &json!("look")));
    let schema = json!({"type": "object", "properties": {"n": {"enum": [12]}}, "required": ["n"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "schema": schema});
    for fields in
        [json!({"output_config": {"format": format, "effort": "high"}}), json!({"output_format": format})]
    {
        let whole = plain(&post(server.address, PATH, &question(fields)).await);
        let text = whole["content"][0]["text"].as_str().unwrap();
        assert_eq!(serde_json::from_str::<Value>(text).unwrap(), json!({"n": 12}));
    }
}

#[tokio::test]
async fn tools_of_other_kinds_are_passed_over_with_a_warning() {
    let server = TestServer::start(Script::new().reply("Yes.")).await;
    let mut all = tools();
    all.as_array_mut().unwrap().insert(0, json!({"type": "web_search_20250305", "name": "web_search"}));
    let answer = post(server.address, PATH, &question(json!({"tools": all}))).await;
    assert_eq!(answer.status, 200);
    let warning = answer.header("x-lily-warning").unwrap();
    assert!(warning.contains("tools[0].type") && warning.contains("web_search_20250305"), "{warning}");
}

#[tokio::test]
async fn errors_have_this_apis_form() {
    let server = TestServer::start_with(Script::new().reply("Yes."), |state| {
        state.api_key = Some("sesame".to_owned());
    })
    .await;
    let send = |body: Value, key: &'static str| {
        let bytes = request("POST", PATH, &[JSON, ("x-api-key", key)], body.to_string().as_bytes());
        let address = server.address;
        async move { exchange(address, &bytes).await }
    };
    assert_eq!(send(question(json!({})), "sesame").await.status, 200);
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    let ended = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    for (body, key, status, kind, words) in [
        (question(json!({})), "open", 401, "authentication_error", "API key"),
        (json!({"messages": []}), "sesame", 400, "invalid_request_error", "messages"),
        (question(json!({"max_tokens": null})), "sesame", 400, "invalid_request_error", "max_tokens"),
        (
            question(json!({"messages": image})),
            "sesame",
            400,
            "invalid_request_error",
            "messages[0].content[0].type",
        ),
        (question(json!({"messages": ended})), "sesame", 400, "invalid_request_error", "messages[1]"),
        (
            question(json!({"tools": [{"name": "x"}]})),
            "sesame",
            400,
            "invalid_request_error",
            "tools[0].input_schema",
        ),
        (question(json!({"mcp_servers": [{}]})), "sesame", 400, "invalid_request_error", "mcp_servers"),
        (
            question(json!({"system": [{"type": "text", "text": "a"}, {"type": "x"}]})),
            "sesame",
            400,
            "invalid_request_error",
            "system[1].type",
        ),
    ] {
        let answer = send(body, key).await;
        assert_eq!(answer.status, status, "{}", answer.text());
        let body = answer.json();
        assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!(kind)), "{body}");
        assert!(body["error"]["message"].as_str().unwrap().contains(words), "{body}");
        assert!(answer.header("x-request-id").is_some());
    }
}

#[tokio::test]
async fn pings_keep_a_silent_stream_alive_and_an_error_ends_it() {
    let script =
        Script::new().reply("some words").non_finite_after(3).prefill_delay(Duration::from_millis(400));
    let server = TestServer::start_with(script, |state| {
        state.limits.keep_alive = Duration::from_millis(50);
    })
    .await;
    let body = question(json!({"stream": true})).to_string();
    let bytes = request("POST", PATH, &[JSON], body.as_bytes());
    let answer = Connection::open(server.address, &bytes).await.answer().await;
    let events = events(&answer);
    assert!(events.iter().filter(|event| event["type"] == "ping").count() > 3);
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")));
    assert_eq!(events[0]["message"]["usage"]["input_tokens"].as_u64().unwrap() as usize, {
        tokens("<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n").len()
    });
}
