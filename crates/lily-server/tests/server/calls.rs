//! Tool calls that clients send back in words of their own.

use lily_engine::testing::tokenizer;
use serde_json::{Value, json};

use crate::chat::fold;
use crate::fixture::{Script, TestServer};
use crate::http::{Answer, post};
use crate::{messages, responses};

/// What the model writes: parameters in an order of its own, JSON without spaces, an integer with a fraction, and the
/// same call once more in another form.
const REPLY: &str = "I look.\n</think>\n\nOne moment.\n\n<tool_call>\n<function=look>\n<parameter=times>\n3.0\n</parameter>\n<parameter=at>\n{\"b\":[1,2],\"a\":{\"d\":\"\u{e9}\",\"c\":null}}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=look>\n<parameter=at>\n{\"a\" : {}}\n</parameter>\n</function>\n</tool_call>";

/// What becomes of the arguments of a call, of which the number is given.
type Change<'a> = &'a dyn Fn(usize, &Value) -> Value;

/// An API, and how a client speaks it.
struct Api {
    path: &'static str,
    /// The fields of a request beside its conversation.
    fields: fn() -> Value,
    /// The member that has the conversation.
    conversation: &'static str,
    /// The answer of a stream, as if it were none.
    fold: fn(&Answer) -> Value,
    /// The items of an answer as they go into the next request, with the arguments of each call changed.
    items: fn(&Value, Change<'_>) -> Vec<Value>,
    /// Tokens of the prompt, of these cached, and generated.
    usage: fn(&Value) -> [u64; 3],
}

fn parameters() -> Value {
    json!({"type": "object", "properties": {"at": {"type": "object"}, "times": {"type": "integer"}}})
}

fn text(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap()
}

fn parsed(text: &Value) -> Value {
    serde_json::from_str(text.as_str().unwrap()).unwrap()
}

const APIS: [Api; 3] = [
    Api {
        path: "/v1/chat/completions",
        fields: || {
            let function = json!({"name": "look", "parameters": parameters()});
            json!({"tools": [{"type": "function", "function": function}]})
        },
        conversation: "messages",
        fold: |answer| {
            let chunks = answer.chunks();
            json!({"choices": [{"message": fold(&chunks)}], "usage": chunks.last().unwrap()["usage"]})
        },
        items: |answer, change| {
            let mut message = answer["choices"][0]["message"].clone();
            let mut results = Vec::new();
            for (i, call) in message["tool_calls"].as_array_mut().unwrap().iter_mut().enumerate() {
                let arguments = &mut call["function"]["arguments"];
                *arguments = text(&change(i, &parsed(arguments))).into();
                results.push(json!({"role": "tool", "tool_call_id": call["id"], "content": "Blue."}));
            }
            [vec![message], results].concat()
        },
        usage: |answer| {
            let usage = &answer["usage"];
            [
                &usage["prompt_tokens"],
                &usage["prompt_tokens_details"]["cached_tokens"],
                &usage["completion_tokens"],
            ]
            .map(|n| n.as_u64().unwrap())
        },
    },
    Api {
        path: "/v1/responses",
        fields: || json!({"tools": [{"type": "function", "name": "look", "parameters": parameters()}]}),
        conversation: "input",
        fold: |answer| responses::events(answer).last().unwrap()["response"].clone(),
        items: |answer, change| {
            let mut items = answer["output"].as_array().unwrap().clone();
            let mut results = Vec::new();
            for item in items.iter_mut().filter(|item| item["type"] == "function_call") {
                item["arguments"] = text(&change(results.len(), &parsed(&item["arguments"]))).into();
                let id = &item["call_id"];
                results.push(json!({"type": "function_call_output", "call_id": id, "output": "Blue."}));
            }
            [items, results].concat()
        },
        usage: |answer| {
            let usage = &answer["usage"];
            [&usage["input_tokens"], &usage["input_tokens_details"]["cached_tokens"], &usage["output_tokens"]]
                .map(|n| n.as_u64().unwrap())
        },
    },
    Api {
        path: "/v1/messages",
        fields: || {
            let thinking = json!({"type": "enabled", "budget_tokens": 1024});
            let tools = json!([{"name": "look", "input_schema": parameters()}]);
            json!({"max_tokens": 2000, "thinking": thinking, "tools": tools})
        },
        conversation: "messages",
        fold: |answer| messages::fold(&messages::events(answer)),
        items: |answer, change| {
            let mut blocks = answer["content"].as_array().unwrap().clone();
            let mut results = Vec::new();
            for block in blocks.iter_mut().filter(|block| block["type"] == "tool_use") {
                block["input"] = change(results.len(), &block["input"]);
                results.push(json!({"type": "tool_result", "tool_use_id": block["id"], "content": "Blue."}));
            }
            vec![json!({"role": "assistant", "content": blocks}), json!({"role": "user", "content": results})]
        },
        usage: |answer| {
            let usage = &answer["usage"];
            let [read, cached, output] = ["input_tokens", "cache_read_input_tokens", "output_tokens"]
                .map(|name| usage[name].as_u64().unwrap());
            [read + cached, cached, output]
        },
    },
];

impl Api {
    fn request(&self, items: &[Value], stream: bool) -> Value {
        let mut body = (self.fields)();
        body[self.conversation] = json!(items);
        body["stream"] = json!(stream);
        if stream && self.path.contains("chat") {
            body["stream_options"] = json!({"include_usage": true});
        }
        body
    }

    async fn ask(&self, server: &TestServer, items: &[Value], stream: bool) -> Value {
        let answer = post(server.address, self.path, &self.request(items, stream)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        if stream { (self.fold)(&answer) } else { answer.json() }
    }
}

/// The same value, its members in the opposite order.
fn reversed(value: &Value) -> Value {
    match value {
        Value::Object(map) => map.iter().rev().map(|(name, value)| (name.clone(), reversed(value))).collect(),
        other => other.clone(),
    }
}

async fn server() -> TestServer {
    TestServer::start(Script::new().reply(REPLY).reply("Well.\n</think>\n\nBlue.").cache(16384)).await
}

fn question() -> Value {
    json!({"role": "user", "content": "What is there?"})
}

#[tokio::test]
async fn a_call_sent_back_in_other_words_is_found_in_the_prefix_cache_to_its_last_token() {
    for api in &APIS {
        for stream in [false, true] {
            let server = server().await;
            let first = api.ask(&server, &[question()], stream).await;
            let [prompt, _, written] = (api.usage)(&first);
            let mut items = vec![question()];
            items.extend((api.items)(&first, &|i, arguments| {
                let told = [
                    json!({"times": 3, "at": {"b": [1, 2], "a": {"d": "\u{e9}", "c": null}}}),
                    json!({"at": {"a": {}}}),
                ];
                assert_eq!(*arguments, told[i]);
                reversed(arguments)
            }));
            let [_, cached, _] = (api.usage)(&api.ask(&server, &items, stream).await);
            // The token that ends the turn was drawn, but not read.
            assert_eq!(cached, prompt + written - 1, "{} stream={stream}", api.path);
        }
    }
}

#[tokio::test]
async fn a_call_whose_arguments_were_changed_is_read_as_the_client_has_it() {
    for api in &APIS {
        let server = server().await;
        let first = api.ask(&server, &[question()], false).await;
        let [prompt, _, written] = (api.usage)(&first);
        let mut items = vec![question()];
        items.extend((api.items)(&first, &|i, arguments| {
            let mut arguments = arguments.clone();
            if i == 0 {
                arguments["at"]["b"] = json!([1, 3]);
            }
            arguments
        }));
        let [_, cached, _] = (api.usage)(&api.ask(&server, &items, false).await);
        assert!(cached < prompt + written - 1, "{}", api.path);
    }
    // What the model reads.
    let (api, server) = (&APIS[0], server().await);
    let first = api.ask(&server, &[question()], false).await;
    let mut items = vec![question()];
    items.extend((api.items)(&first, &|i, arguments| {
        if i == 0 { json!({"at": {}}) } else { reversed(arguments) }
    }));
    let tokens =
        post(server.address, "/tokenize", &api.request(&items, false)).await.json()["tokens"].clone();
    let prompt = tokenizer().decode(&serde_json::from_value::<Vec<u32>>(tokens).unwrap(), false);
    let [changed, kept] = ["{}", "{\"a\" : {}}"].map(|value| {
        format!(
            "<tool_call>\n<function=look>\n<parameter=at>\n{value}\n</parameter>\n</function>\n</tool_call>"
        )
    });
    assert!(prompt.contains(&format!("One moment.\n\n{changed}\n{kept}<|im_end|>")), "{prompt}");
}

#[tokio::test]
async fn a_request_without_the_cache_leaves_no_call_behind() {
    let (api, server) = (&APIS[0], server().await);
    let mut body = api.request(&[question()], false);
    body["cache_prompt"] = json!(false);
    let first = post(server.address, api.path, &body).await.json();
    let mut items = vec![question()];
    items.extend((api.items)(&first, &|_, arguments| arguments.clone()));
    let tokens =
        post(server.address, "/tokenize", &api.request(&items, false)).await.json()["tokens"].clone();
    let prompt = tokenizer().decode(&serde_json::from_value::<Vec<u32>>(tokens).unwrap(), false);
    assert!(prompt.contains("{\"b\": [1, 2]"), "as the template has it: {prompt}");
}
