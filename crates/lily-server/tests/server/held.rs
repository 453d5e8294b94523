//! Answers that are held to a form.

use serde_json::{Value, json};

use crate::chat::{fold, message, streamed, with_tools};
use crate::fixture::{Script, TestServer, question};
use crate::http::post_chat;

fn with(fields: Value) -> Value {
    let mut body = question();
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn schema(schema: Value) -> Value {
    with(json!({"response_format": {
        "type": "json_schema", "json_schema": {"name": "answer", "strict": true, "schema": schema}}}))
}

fn person() -> Value {
    json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
           "required": ["name", "age"], "additionalProperties": false})
}

#[tokio::test]
async fn json_comes_after_the_thought_and_is_what_the_schema_says() {
    let reply = "Let me {think}.</think>\n\nHere you are: {\"name\": \"Ada\", \"born\": 1815, \"age\": 36}";
    for body in [schema(person()), with(json!({"response_format": {"type": "json_object"}}))] {
        let server = TestServer::start(Script::new().reply(reply)).await;
        let whole = message(&post_chat(server.address, &body).await);
        assert_eq!(whole["reasoning_content"], "Let me {think}.");
        let value: Value = serde_json::from_str(whole["content"].as_str().unwrap()).unwrap();
        assert_eq!(value["name"], "Ada", "{value}");
        assert_eq!(value.get("born").is_some(), body["response_format"]["type"] == "json_object");
        assert_eq!(fold(&post_chat(server.address, &streamed(body)).await.chunks()), whole);
    }
}

#[tokio::test]
async fn a_grammar_or_a_regex_holds_with_thinking_off() {
    let reply = "I think it is the 15th: 2026-01-15, a Thursday.";
    for (grammar, expected) in [
        (json!("start: D \"-\" D\nD: /[0-9]{2}/"), "15-01"),
        (json!({"syntax": "lark", "definition": "start: \"a\" | \"it\""}), "it"),
        (json!("root ::= [0-9]{2} | \"it\""), "it"),
        (json!({"syntax": "regex", "definition": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}), "1520-01-15"),
    ] {
        let server = TestServer::start(Script::new().reply(reply)).await;
        let body = with(json!({"enable_thinking": false, "grammar": grammar}));
        assert_eq!(message(&post_chat(server.address, &body).await)["content"], expected);
    }
}

#[tokio::test]
async fn what_can_not_be_held_to_is_refused_by_name() {
    let server = TestServer::start(Script::new().reply("a</think>b")).await;
    let strict = |parameters: Value| {
        let function = json!({"name": "f", "strict": true, "parameters": parameters});
        with(json!({"tools": [{"type": "function", "function": {"name": "g"}},
                              {"type": "function", "function": function}]}))
    };
    let unique = json!({"type": "array", "uniqueItems": true});
    for (body, param, words) in [
        (schema(unique.clone()), "response_format.json_schema.schema", "uniqueItems"),
        (with(json!({"grammar": "start: nothing"})), "grammar", "nothing"),
        (with(json!({"grammar": {"syntax": "regex", "definition": "("}})), "grammar", "group"),
        (
            strict(json!({"type": "object", "properties": {"x": unique}})),
            "tools[1]",
            "parameters.properties.x",
        ),
    ] {
        let error = post_chat(server.address, &body).await.error(400, "unsupported_value");
        assert_eq!(error["param"], param);
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
    for (fields, param) in [
        (json!({"grammar": "start: \"x\"", "response_format": {"type": "json_object"}}), "grammar"),
        (json!({"ignore_eos": true, "response_format": {"type": "json_object"}}), "ignore_eos"),
    ] {
        assert_eq!(
            post_chat(server.address, &with(fields)).await.error(400, "invalid_value")["param"],
            param
        );
    }
}

#[tokio::test]
async fn a_call_that_is_required_is_made() {
    let reply = "Hm.</think>\n\nI would rather talk about the sky 7";
    let named = json!({"type": "function", "function": {"name": "look"}});
    for choice in [json!("required"), named] {
        let server = TestServer::start(Script::new().reply(reply)).await;
        let mut body = with_tools(with(json!({"tool_choice": choice})));
        body["tools"][0]["function"]["parameters"]["required"] = json!(["at", "times"]);
        body["tools"][0]["function"]["parameters"]["properties"]["at"]["maxLength"] = json!(20);
        body["tools"][0]["function"]["parameters"]["properties"]["times"]["maximum"] = json!(99);
        body["tools"][0]["function"]["parameters"]["properties"]["times"]["minimum"] = json!(0);
        let answer = post_chat(server.address, &body).await;
        let message = message(&answer);
        assert_eq!(answer.json()["choices"][0]["finish_reason"], "tool_calls");
        assert_eq!((&message["content"], &message["reasoning_content"]), (&Value::Null, &json!("Hm.")));
        let calls = message["tool_calls"].as_array().unwrap();
        assert_eq!((calls.len(), &calls[0]["function"]["name"]), (1, &json!("look")));
        let arguments: Value =
            serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(arguments["at"].is_string() && arguments["times"].as_i64().is_some(), "{arguments}");
    }
}

#[tokio::test]
async fn without_parallel_calls_the_answer_ends_with_the_first() {
    let call = |at: &str| {
        format!("<tool_call>\n<function=look>\n<parameter=at>\n{at}\n</parameter>\n</function>\n</tool_call>")
    };
    let reply = format!("x</think>\n\n{}\n{}", call("sky"), call("sea"));
    let server = TestServer::start(Script::new().reply(&reply)).await;
    for (parallel, count) in [(false, 1), (true, 2)] {
        let body = with_tools(with(json!({"parallel_tool_calls": parallel})));
        let answer = post_chat(server.address, &body).await;
        assert_eq!(message(&answer)["tool_calls"].as_array().unwrap().len(), count);
        assert_eq!(answer.json()["choices"][0]["finish_reason"], "tool_calls");
    }
}

#[tokio::test]
async fn a_thought_ends_at_its_budget() {
    let thought = "on and on ".repeat(100);
    let server = TestServer::start(Script::new().reply(&format!("{thought}</think>Done."))).await;
    let answer = post_chat(server.address, &with(json!({"thinking_budget": 16}))).await;
    assert_eq!(message(&answer)["content"], "Done.");
    let usage = &answer.json()["usage"];
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], 16);
    assert_eq!(usage["completion_tokens"], 16 + "Done.".len() + 1);
    let off = post_chat(server.address, &with(json!({"thinking_budget": 0}))).await;
    assert_eq!(message(&off).get("reasoning_content"), None);
}
