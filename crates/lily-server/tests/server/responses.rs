//! What a client of the responses API gets.

use std::time::Duration;

use serde_json::{Value, json};

use crate::fixture::{Script, TestServer};
use crate::http::{Answer, post};

const PATH: &str = "/v1/responses";
const CALL: &str =
    "<tool_call>\n<function=look>\n<parameter=at>\nthe sky\n</parameter>\n</function>\n</tool_call>";
const CUSTOM: &str = "<tool_call>\n<function=patch>\n<parameter=input>\n*** Begin\n{\"x\": 1}\n</parameter>\n</function>\n</tool_call>";

fn ask(fields: Value) -> Value {
    let mut body = json!({"input": "Well?"});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"at": {"type": "string"}}});
    json!([{"type": "function", "name": "look", "parameters": parameters, "strict": false},
           {"type": "custom", "name": "patch", "description": "Patch."}])
}

fn plain(answer: &Answer) -> Value {
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

pub fn events(answer: &Answer) -> Vec<Value> {
    assert_eq!(answer.header("content-type"), Some("text/event-stream"), "{}", answer.text());
    let event = |(i, text): (usize, &str)| {
        let (name, data) = text.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name, format!("event: {}", data["type"].as_str().unwrap()));
        assert_eq!(data["sequence_number"], i);
        data
    };
    answer.text().split_terminator("\n\n").enumerate().map(event).collect()
}

fn types(events: &[Value]) -> Vec<&str> {
    let mut types: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    types.dedup();
    types
}

async fn streamed(server: &TestServer, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    events(&post(server.address, PATH, &body).await)
}

/// The same answer under other ids and times.
fn anonymous(mut answer: Value) -> Value {
    for name in ["id", "created_at", "completed_at"] {
        answer[name] = Value::Null;
    }
    for item in answer["output"].as_array_mut().unwrap() {
        item["id"] = Value::Null;
        if item.get("call_id").is_some() {
            item["call_id"] = Value::Null;
        }
    }
    answer
}

#[tokio::test]
async fn events_come_in_full_and_in_order() {
    let reply = format!("Let me see.</think>\n\nOne moment.{CALL}");
    let server = TestServer::start(Script::new().reply(&reply)).await;
    let body = ask(json!({"tools": tools()}));
    let events = streamed(&server, &body).await;
    assert_eq!(
        types(&events),
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let whole = plain(&post(server.address, PATH, &body).await);
    let last = events.last().unwrap()["response"].clone();
    assert_eq!(anonymous(last.clone()), anonymous(whole.clone()));
    assert_eq!(whole["output"][0]["content"][0], json!({"type": "reasoning_text", "text": "Let me see."}));
    assert_eq!(whole["output"][1]["content"][0]["text"], "One moment.");
    assert_eq!(whole["output"][2]["arguments"], "{\"at\":\"the sky\"}");
    // What is told piece by piece adds up, and every piece says where it belongs.
    for (i, item) in last["output"].as_array().unwrap().iter().enumerate() {
        let own = || events.iter().filter(|event| event["output_index"] == i);
        assert!(own().all(|event| event["item_id"] == item["id"] || event["item"]["id"] == item["id"]));
        let deltas: String = own().filter_map(|event| event["delta"].as_str()).collect();
        let text = item["arguments"].as_str().or(item["content"][0]["text"].as_str()).unwrap();
        assert_eq!(deltas, text);
        let done = own().find(|event| event["type"] == "response.output_item.done").unwrap();
        assert_eq!(done["item"], *item);
    }
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!(events[0]["response"]["id"], last["id"]);
}

#[tokio::test]
async fn an_answer_says_how_it_ended_and_what_it_took() {
    let server = TestServer::start(Script::new().reply("a</think>some words")).await;
    let whole = plain(
        &post(server.address, PATH, &ask(json!({"instructions": "Be brief.", "temperature": 0.7}))).await,
    );
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("completed")));
    assert_eq!((&whole["temperature"], &whole["instructions"]), (&json!(0.7), &json!("Be brief.")));
    assert_eq!((&whole["store"], &whole["error"]), (&json!(false), &Value::Null));
    let usage = &whole["usage"];
    assert_eq!(usage["output_tokens_details"]["reasoning_tokens"], 2);
    assert_eq!(
        usage["total_tokens"].as_u64(),
        Some(usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap())
    );
    let cut = plain(&post(server.address, PATH, &ask(json!({"max_output_tokens": 5}))).await);
    assert_eq!((&cut["status"], &cut["completed_at"]), (&json!("incomplete"), &Value::Null));
    assert_eq!(cut["incomplete_details"], json!({"reason": "max_output_tokens"}));
    let cut = streamed(&server, &ask(json!({"max_output_tokens": 5}))).await;
    assert_eq!(cut.last().unwrap()["type"], "response.incomplete");
}

#[tokio::test]
async fn a_custom_tool_gets_its_input_as_text() {
    let server = TestServer::start(Script::new().reply(&format!("x</think>{CUSTOM}"))).await;
    let body = ask(json!({"tools": tools(), "include": ["reasoning.encrypted_content"]}));
    let whole = plain(&post(server.address, PATH, &body).await);
    let call = &whole["output"][1];
    assert_eq!((&call["type"], &call["name"]), (&json!("custom_tool_call"), &json!("patch")));
    assert_eq!(call["input"], "*** Begin\n{\"x\": 1}");
    let events = streamed(&server, &body).await;
    let kinds = types(&events);
    let at = kinds.iter().position(|kind| *kind == "response.custom_tool_call_input.delta").unwrap();
    assert_eq!(
        kinds[at + 1..],
        ["response.custom_tool_call_input.done", "response.output_item.done", "response.completed"]
    );
    assert_eq!(whole["output"][0]["encrypted_content"], "x");
    // All of it goes back.
    let mut input = vec![json!({"role": "user", "content": "Well?"})];
    input.extend(whole["output"].as_array().unwrap().clone());
    input.push(json!({"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}));
    let next = plain(&post(server.address, PATH, &json!({"input": input, "tools": tools()})).await);
    let chat = json!({
        "chat_template_kwargs": {"preserve_thinking": true},
        "tools": [
            {"type": "function", "function": {"name": "look", "parameters": tools()[0]["parameters"]}},
            {"type": "function", "function": {"name": "patch", "description": "Patch.", "parameters":
                {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}}},
        ],
        "messages": [
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": "", "reasoning_content": "x", "tool_calls": [
                {"type": "function", "function": {"name": "patch", "arguments": {"input": "*** Begin\n{\"x\": 1}"}}}]},
            {"role": "tool", "content": "done"},
        ],
    });
    let count = plain(&post(server.address, "/tokenize", &chat).await)["count"].clone();
    assert_eq!(next["usage"]["input_tokens"], count);
}

#[tokio::test]
async fn a_custom_tool_is_held_to_its_grammar() {
    let call = CUSTOM.replace("*** Begin\n{\"x\": 1}", "Begin: 12 then 34");
    let server = TestServer::start(Script::new().reply(&format!("x</think>Patching. {call}"))).await;
    let format = json!({"type": "grammar", "syntax": "regex", "definition": "[0-9]{4}"});
    let body = ask(json!({"tools": [{"type": "custom", "name": "patch", "format": format}]}));
    let whole = plain(&post(server.address, PATH, &body).await);
    assert_eq!(whole["output"][1]["content"][0]["text"], "Patching. ");
    assert_eq!(whole["output"][2]["input"], "1234");
    let broken = json!({"type": "grammar", "syntax": "lark", "definition": "start: nothing"});
    let body = ask(json!({"tools": [{"type": "custom", "name": "patch", "format": broken}]}));
    assert_eq!(post(server.address, PATH, &body).await.error(400, "unsupported_value")["param"], "tools[0]");
}

#[tokio::test]
async fn tools_in_a_namespace_are_called_by_both_names() {
    let words = CUSTOM.replace("patch", "files.patch");
    let calls = format!("{}\n{words}", CALL.replace("look", "files.look"));
    let server = TestServer::start(Script::new().reply(&format!("x</think>{calls}"))).await;
    let tools = json!([{"type": "namespace", "name": "files", "description": "Of files.", "tools": tools()}]);
    let body = ask(json!({"tools": tools}));
    let whole = plain(&post(server.address, PATH, &body).await);
    let named = |item: &Value| json!([item["type"], item["namespace"], item["name"]]);
    assert_eq!(named(&whole["output"][1]), json!(["function_call", "files", "look"]));
    assert_eq!(named(&whole["output"][2]), json!(["custom_tool_call", "files", "patch"]));
    let events = streamed(&server, &body).await;
    let done = events.iter().find(|event| event["type"] == "response.function_call_arguments.done").unwrap();
    assert_eq!(done["name"], "look");
    // The model reads functions of the full names, and its calls as it wrote them.
    let mut input = vec![json!({"role": "user", "content": "Well?"})];
    input.extend(whole["output"].as_array().unwrap().clone());
    let next = plain(&post(server.address, PATH, &json!({"input": &input, "tools": tools})).await);
    let parameters = [
        tools[0]["tools"][0]["parameters"].clone(),
        json!({"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}),
    ];
    let chat = json!({
        "chat_template_kwargs": {"preserve_thinking": true},
        "tools": [
            {"type": "function", "function":
                {"name": "files.look", "description": "Of files.", "parameters": parameters[0]}},
            {"type": "function", "function":
                {"name": "files.patch", "description": "Of files.\n\nPatch.", "parameters": parameters[1]}},
        ],
        "messages": [
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": "", "reasoning_content": "x", "tool_calls": [
                {"type": "function", "function": {"name": "files.look", "arguments": {"at": "the sky"}}},
                {"type": "function", "function":
                    {"name": "files.patch", "arguments": {"input": "*** Begin\n{\"x\": 1}"}}}]},
        ],
    });
    let count = plain(&post(server.address, "/tokenize", &chat).await)["count"].clone();
    assert_eq!(next["usage"]["input_tokens"], count);
    // They may come in an item of the input.
    let item = |tools: &Value| json!({"type": "additional_tools", "role": "developer", "tools": tools});
    input.insert(0, item(&tools));
    let from_item = post(server.address, PATH, &json!({"input": input})).await;
    assert_eq!(from_item.header("x-lily-warning"), None);
    assert_eq!(anonymous(plain(&from_item))["output"], anonymous(next.clone())["output"]);
    assert_eq!(plain(&from_item)["usage"]["input_tokens"], next["usage"]["input_tokens"]);
    let broken = json!([{"type": "custom", "name": "f", "format":
        {"type": "grammar", "syntax": "lark", "definition": "start: nothing"}}]);
    let refused = post(server.address, PATH, &json!({"input": [item(&broken), input[1]]})).await;
    assert_eq!(refused.error(400, "unsupported_value")["param"], "input[0].tools[0]");
}

/// The shape of what Codex sends.
#[tokio::test]
async fn an_agents_request_is_taken_as_it_is() {
    let server = TestServer::start(Script::new().reply("x</think>Yes.")).await;
    let text = |kind: &str, text: &str| json!([{"type": kind, "text": text}]);
    let body = json!({
        "model": "any", "instructions": "You are an agent.", "stream": false, "store": false,
        "tool_choice": "auto", "parallel_tool_calls": false, "prompt_cache_key": "k",
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "medium", "summary": "auto"},
        "text": {"verbosity": "low"}, "service_tier": "auto", "client_metadata": {"a": "b"},
        "tools": [
            {"type": "function", "name": "shell", "strict": false, "parameters": {"type": "object", "properties": {}}},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"x\""}},
            {"type": "web_search", "external_web_access": false},
            {"type": "namespace", "name": "n", "description": "", "tools": [{"type": "tool_search"}]},
            {"type": "local_shell"},
        ],
        "input": [
            {"type": "message", "role": "developer", "content": text("input_text", "<permissions>")},
            {"type": "message", "role": "developer", "content": text("input_text", "<instructions>")},
            {"type": "message", "role": "developer", "content": text("input_text", "<collaboration>")},
            {"type": "message", "role": "user", "content": text("input_text", "<environment>")},
            {"type": "message", "role": "user", "content": text("input_text", "List the files.")},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": null, "encrypted_content": "I list them."},
            {"type": "message", "role": "assistant", "content": text("output_text", "Listing."), "phase": "commentary"},
            {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{\"command\": \"ls\"}"},
            {"type": "function_call", "call_id": "c2", "name": "shell", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
            {"type": "function_call_output", "call_id": "c2", "output": text("input_text", "b.txt")},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        ],
    });
    let answer = post(server.address, PATH, &body).await;
    let whole = plain(&answer);
    assert_eq!(whole["output"][1]["content"][0]["text"], "Yes.");
    let warnings: Vec<&str> =
        answer.headers.iter().filter(|(name, _)| name == "x-lily-warning").map(|(_, v)| v.as_str()).collect();
    for path in ["tools[2].type", "tools[3].tools[0].type", "tools[4].type", "input[11]"] {
        assert!(warnings.iter().any(|warning| warning.starts_with(path)), "{path}: {warnings:?}");
    }
    assert_eq!(warnings.len(), 4, "{warnings:?}");
}

#[tokio::test]
async fn what_would_need_a_memory_is_refused_by_name() {
    let server = TestServer::start(Script::new().reply("x</think>b")).await;
    for (body, param) in [
        (ask(json!({"previous_response_id": "resp_1"})), "previous_response_id"),
        (ask(json!({"conversation": "c"})), "conversation"),
        (ask(json!({"background": true})), "background"),
        (ask(json!({"truncation": "auto"})), "truncation"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
        (json!({}), "input"),
        (json!({"input": 3}), "input"),
        (json!({"input": [{"role": "developer", "content": "x"}]}), "input"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
            "input[0].content[0].type",
        ),
        (
            json!({"input": [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "no"}]}),
            "input[1].tool_calls[0].function.arguments",
        ),
        (ask(json!({"tool_choice": {"type": "function", "name": "f"}})), "tool_choice"),
        (ask(json!({"tool_choice": {"type": "mcp"}})), "tool_choice.type"),
        (ask(json!({"reasoning": {"effort": "huge"}})), "reasoning.effort"),
        (ask(json!({"reasoning": {"effort": "none"}, "enable_thinking": true})), "reasoning.effort"),
        (
            ask(
                json!({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"uniqueItems": true, "type": "array"}}}}),
            ),
            "text.format.schema",
        ),
    ] {
        let answer = post(server.address, PATH, &body).await;
        assert_eq!(answer.status, 400, "{body}: {}", answer.text());
        assert_eq!(answer.json()["error"]["param"], param, "{}", answer.text());
    }
}

#[tokio::test]
async fn the_text_is_held_to_its_format_and_has_log_probabilities() {
    let server = TestServer::start(Script::new().reply("x</think>Say {\"n\": 12}!")).await;
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "name": "answer", "strict": true, "schema": schema});
    let body = ask(
        json!({"text": {"format": format}, "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    );
    let whole = plain(&post(server.address, PATH, &body).await);
    let part = &whole["output"][1]["content"][0];
    assert_eq!(serde_json::from_str::<Value>(part["text"].as_str().unwrap()).unwrap(), json!({"n": 12}));
    let tokens: String =
        part["logprobs"].as_array().unwrap().iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(tokens, part["text"].as_str().unwrap(), "those of the answer alone");
    assert_eq!(whole["text"]["format"], format);
}

#[tokio::test]
async fn a_silent_stream_is_kept_alive_by_events_and_a_failure_is_told() {
    let script =
        Script::new().reply("some words").non_finite_after(3).prefill_delay(Duration::from_millis(400));
    let server = TestServer::start_with(script, |state| {
        state.limits.keep_alive = Duration::from_millis(50);
    })
    .await;
    let events = streamed(&server, &ask(json!({}))).await;
    assert!(events.iter().filter(|event| event["type"] == "response.in_progress").count() > 3);
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")));
    assert_eq!(last["response"]["error"]["code"], "server_error");
}
