//! Fields that mean the same at several endpoints, and such that change nothing.

use lily_engine::testing::{END_OF_TURN, tokenizer};
use serde_json::{Value, json};

use crate::fixture::{Script, TestServer, question};
use crate::http::post;
use crate::several::random;

/// Tokens of an answer.
const LIMIT: u64 = 24;

/// Path, what a request needs, what its limit of tokens and its stop strings are called.
fn endpoints() -> [(&'static str, Value, &'static str, &'static str); 4] {
    let chat = json!([{"role": "user", "content": "Well?"}]);
    [
        (
            "/v1/chat/completions",
            json!({"messages": chat, "enable_thinking": false}),
            "max_completion_tokens",
            "stop",
        ),
        ("/v1/completions", json!({"prompt": "Well?"}), "max_tokens", "stop"),
        ("/v1/responses", json!({"input": "Well?", "enable_thinking": false}), "max_output_tokens", "stop"),
        ("/v1/messages", json!({"messages": chat}), "max_tokens", "stop_sequences"),
    ]
}

fn merged(mut body: Value, fields: &Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn first<'a>(answer: &'a Value, pointers: &[&str]) -> &'a Value {
    pointers.iter().find_map(|pointer| answer.pointer(pointer)).unwrap_or(&Value::Null)
}

/// The text of an answer and its tokens.
async fn answer(server: &TestServer, path: &str, body: &Value) -> (String, u64) {
    let answer = post(server.address, path, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let json = answer.json();
    let text =
        ["/choices/0/message/content", "/choices/0/text", "/output/0/content/0/text", "/content/0/text"];
    let tokens = first(&json, &["/usage/completion_tokens", "/usage/output_tokens"]).as_u64().unwrap();
    (first(&json, &text).as_str().unwrap_or_default().to_owned(), tokens)
}

#[tokio::test]
async fn sampling_fields_act_at_every_endpoint() {
    let server = random().await;
    for (path, body, limit, _) in endpoints() {
        let usual = json!({"temperature": 1, "seed": 7, "ignore_eos": true, limit: LIMIT});
        let ask = async |fields: Value| {
            answer(&server, path, &merged(merged(body.clone(), &usual), &fields)).await.0
        };
        let free = ask(json!({})).await;
        assert_eq!(ask(json!({})).await, free, "{path}: the seed repeats it");
        assert_ne!(ask(json!({"seed": 8})).await, free, "{path}");
        let likeliest = ask(json!({"temperature": 0})).await;
        assert_ne!(likeliest, free, "{path}");
        for fields in [json!({"top_k": 1}), json!({"top_p": 1e-6})] {
            assert_eq!(ask(fields.clone()).await, likeliest, "{path} {fields}");
        }
        // Of tokens that are equally likely it leaves any.
        assert_ne!(ask(json!({"min_p": 1})).await, free, "{path}");
        let only_a = json!({"logit_bias": {"97": 100}});
        assert_eq!(ask(only_a).await, "a".repeat(LIMIT as usize), "{path}");
        let bias: Value = (97..113).map(|id: u32| (id.to_string(), json!(100))).collect();
        let few = json!({"temperature": 0, "logit_bias": bias});
        let plain = ask(few.clone()).await;
        for (name, value) in [("repetition_penalty", 100), ("presence_penalty", 2), ("frequency_penalty", 2)]
        {
            assert_ne!(ask(merged(few.clone(), &json!({name: value}))).await, plain, "{path} {name}");
        }
    }
}

#[tokio::test]
async fn an_answer_ends_at_its_limit_its_stop_string_or_its_turn() {
    let server = random().await;
    for (path, body, limit, stop) in endpoints() {
        let ask = async |fields: Value| {
            let usual = json!({"temperature": 0, limit: LIMIT});
            answer(&server, path, &merged(merged(body.clone(), &usual), &fields)).await
        };
        let only_a = json!({"logit_bias": {"97": 100}});
        assert_eq!(ask(only_a.clone()).await, ("a".repeat(LIMIT as usize), LIMIT), "{path}");
        assert_eq!(ask(merged(only_a.clone(), &json!({stop: ["aaaa"]}))).await, (String::new(), 4), "{path}");
        let over = json!({"logit_bias": {END_OF_TURN.to_string(): 100}});
        assert_eq!(ask(over.clone()).await, (String::new(), 1), "{path}");
        assert_eq!(ask(merged(over, &json!({"ignore_eos": true}))).await.1, LIMIT, "{path}");
    }
}

#[tokio::test]
async fn a_prompt_that_is_not_to_be_kept_is_read_again_at_every_endpoint() {
    for (path, body, limit, _) in endpoints() {
        let server = TestServer::start(Script::new().reply("a").cache(8192)).await;
        let cached = async |fields: Value| {
            let body = merged(merged(body.clone(), &json!({limit: 8})), &fields);
            let json = post(server.address, path, &body).await.json();
            let pointers = [
                "/usage/prompt_tokens_details/cached_tokens",
                "/usage/input_tokens_details/cached_tokens",
                "/usage/cache_read_input_tokens",
            ];
            first(&json, &pointers).as_u64().unwrap()
        };
        assert_eq!(cached(json!({"cache_prompt": false})).await, 0);
        assert_eq!(cached(json!({})).await, 0, "{path}: nothing was kept");
        assert_eq!(cached(json!({"cache_prompt": false})).await, 0, "{path}: nothing is taken");
        assert!(cached(json!({})).await > 0, "{path}");
    }
}

/// The prompt of a chat request, as text.
async fn prompt(server: &TestServer, body: &Value) -> String {
    let answer = post(server.address, "/tokenize", body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let ids: Vec<u32> = serde_json::from_value(answer.json()["tokens"].clone()).unwrap();
    tokenizer().decode(&ids, false)
}

#[tokio::test]
async fn names_and_call_ids_of_a_chat_are_no_part_of_its_prompt() {
    let server = TestServer::start(Script::new().reply("a")).await;
    let function = json!({"name": "look", "arguments": "{\"at\": \"sky\"}"});
    let labelled = json!({"messages": [
        {"role": "developer", "content": "Be brief.", "name": "boss"},
        {"role": "user", "content": [{"type": "text", "text": "Well"}, {"type": "text", "text": "?"}], "name": "me"},
        {"role": "assistant", "content": null, "reasoning": "Hm.", "refusal": null,
         "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Blue.", "name": "look"},
    ]});
    let plain = json!({"messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "Blue."},
    ]});
    let text = prompt(&server, &labelled).await;
    assert_eq!(text, prompt(&server, &plain).await);
    for part in
        ["Be brief.", "Well?", "<think>\nHm.\n</think>", "<function=look>\n<parameter=at>\nsky\n", "Blue."]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[tokio::test]
async fn what_a_tool_says_of_itself_is_part_of_the_prompt() {
    let server = TestServer::start(Script::new().reply("a")).await;
    let parameters =
        json!({"type": "object", "properties": {"at": {"type": "string", "description": "Where."}}});
    let function = json!({"name": "look", "description": "Looks there.", "parameters": parameters});
    let with = merged(question(), &json!({"tools": [{"type": "function", "function": function}]}));
    let text = prompt(&server, &with).await;
    for part in ["\"look\"", "Looks there.", "Where."] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let chat =
        post(server.address, "/v1/chat/completions", &with).await.json()["usage"]["prompt_tokens"].clone();
    let tool = merged(json!({"type": "function"}), &function);
    let same = json!({"input": "Well?", "tools": [tool]});
    let tokens = post(server.address, "/v1/responses", &same).await.json()["usage"]["input_tokens"].clone();
    assert_eq!(tokens, chat);
    let tool = json!({"name": "look", "description": "Looks there.", "input_schema": parameters});
    let thinking = json!({"type": "adaptive"});
    let same = json!({"messages": question()["messages"], "tools": [tool], "thinking": thinking});
    let tokens =
        post(server.address, "/v1/messages/count_tokens", &same).await.json()["input_tokens"].clone();
    assert_eq!(tokens, chat);
}

#[tokio::test]
async fn labels_of_items_and_blocks_are_no_part_of_the_prompt() {
    let server = TestServer::start(Script::new().reply("a")).await;
    let read = async |fields: Value, items: Value| {
        let body = merged(json!({"input": items, "max_output_tokens": 1}), &fields);
        post(server.address, "/v1/responses", &body).await.json()["usage"]["input_tokens"].clone()
    };
    let item = |labels: Value| json!([merged(json!({"role": "user", "content": "Well?"}), &labels)]);
    let plain = read(json!({}), item(json!({}))).await;
    assert!(plain.as_u64().unwrap() > 0);
    for labels in [json!({"id": "msg_1"}), json!({"status": "completed"}), json!({"phase": "final_answer"})] {
        assert_eq!(read(json!({}), item(labels.clone())).await, plain, "{labels}");
    }
    for fields in [
        json!({"reasoning": {"summary": "auto"}}),
        json!({"reasoning": {"generate_summary": "concise"}}),
        json!({"text": {"verbosity": "low"}}),
        json!({"stream_options": {"include_obfuscation": false}}),
    ] {
        assert_eq!(read(fields.clone(), item(json!({}))).await, plain, "{fields}");
    }

    let count = async |block: Value, fields: Value| {
        let messages = json!([{"role": "user", "content": "Well?"}, {"role": "assistant", "content": [block, {"type": "text", "text": "Yes."}]}, {"role": "user", "content": "And?"}]);
        let body = merged(json!({"messages": messages}), &fields);
        post(server.address, "/v1/messages/count_tokens", &body).await.json()["input_tokens"].clone()
    };
    let mark = json!({"type": "ephemeral"});
    let said = json!({"type": "text", "text": "Hm. "});
    let plain = count(said.clone(), json!({})).await;
    assert_eq!(count(merged(said.clone(), &json!({"cache_control": mark})), json!({})).await, plain);
    assert_eq!(count(said, json!({"cache_control": mark})).await, plain);
    let nothing = json!({"type": "text", "text": ""});
    let hidden = json!({"type": "redacted_thinking", "data": "xyz"});
    assert_eq!(count(hidden, json!({})).await, count(nothing, json!({})).await);
}

#[tokio::test]
async fn a_result_that_is_an_error_says_so() {
    let server = TestServer::start(Script::new().reply("a")).await;
    let count = async |id: &str, failed: bool| {
        let result =
            json!({"type": "tool_result", "tool_use_id": id, "content": "No sky.", "is_error": failed});
        let call = json!({"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}});
        let messages = json!([
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]);
        let answer = post(server.address, "/v1/messages/count_tokens", &json!({"messages": messages})).await;
        answer.json()["input_tokens"].as_u64().unwrap()
    };
    let plain = count("toolu_1", false).await;
    assert_eq!(count("toolu_1", true).await, plain + "Error: ".len() as u64);
    assert_eq!(count("another_name_of_it", false).await, plain, "results belong to calls by their order");
}

#[tokio::test]
async fn a_refusal_is_read_as_text() {
    let server = TestServer::start(Script::new().reply("a")).await;
    let read = async |part: Value, thought: Value| {
        let input = json!([
            {"role": "user", "content": "Well?"},
            thought,
            {"role": "assistant", "content": [part]},
            {"role": "user", "content": "Why?"},
        ]);
        let answer = post(server.address, "/v1/responses", &json!({"input": input})).await;
        answer.json()["usage"]["input_tokens"].as_u64().unwrap()
    };
    let thought = json!({"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]});
    let plain = read(json!({"type": "output_text", "text": "No."}), thought.clone()).await;
    assert_eq!(read(json!({"type": "refusal", "refusal": "No."}), thought.clone()).await, plain);
    let summary = json!({"summary": [{"type": "summary_text", "text": "It thought."}]});
    let text = json!({"type": "output_text", "text": "No."});
    assert_eq!(read(text, merged(thought, &summary)).await, plain, "summaries are not read");
}

#[tokio::test]
async fn a_text_becomes_the_same_tokens_whatever_the_model_is_called() {
    let server = TestServer::start(Script::new().reply("a")).await;
    let ask = async |path: &str, body: Value| post(server.address, path, &body).await.json();
    let plain = ask("/tokenize", json!({"prompt": "ab"})).await;
    assert_eq!(plain["tokens"], json!([97, 98]));
    for fields in
        [json!({"model": "other"}), json!({"add_special_tokens": true}), json!({"add_special_tokens": false})]
    {
        assert_eq!(ask("/tokenize", merged(json!({"prompt": "ab"}), &fields)).await, plain);
    }
    let text = ask("/detokenize", json!({"tokens": [97, 98], "model": "other"})).await;
    assert_eq!(text, ask("/detokenize", json!({"tokens": [97, 98]})).await);
}

#[tokio::test]
async fn streams_are_not_padded() {
    let server = TestServer::start(Script::new().reply("a")).await;
    for (path, body, ..) in endpoints().into_iter().take(3) {
        let padded = json!({"stream": true, "stream_options": {"include_obfuscation": true}});
        let error =
            post(server.address, path, &merged(body.clone(), &padded)).await.error(400, "unsupported_value");
        assert_eq!(error["param"], "stream_options.include_obfuscation", "{path}");
        let plain = json!({"stream": true, "stream_options": {"include_obfuscation": false}});
        assert_eq!(post(server.address, path, &merged(body, &plain)).await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn a_schema_holds_whatever_is_said_about_it() {
    let schema = json!({"type": "object", "properties": {"n": {"enum": [12]}}, "required": ["n"],
                        "additionalProperties": false});
    let held = json!({"type": "json_schema", "schema": schema});
    let mut forms = Vec::new();
    for said in [
        json!({}),
        json!({"strict": false}),
        json!({"strict": true}),
        json!({"name": "n", "description": "d"}),
    ] {
        let inner = merged(json!({"schema": schema}), &said);
        forms.push((
            "/v1/chat/completions",
            json!({"response_format": {"type": "json_schema", "json_schema": inner}}),
        ));
        forms.push(("/v1/responses", json!({"text": {"format": merged(held.clone(), &said)}})));
        forms.push(("/v1/messages", json!({"output_config": {"format": merged(held.clone(), &said)}})));
    }
    let server = TestServer::start(Script::new().reply("It is 1, 2, 3.")).await;
    for (path, form) in forms {
        let (_, body, limit, _) = endpoints().into_iter().find(|(other, ..)| *other == path).unwrap();
        let body = merged(merged(body, &json!({limit: 100})), &form);
        let (text, _) = answer(&server, path, &body).await;
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!({"n": 12}), "{path} {form}");
    }
}

/// A tool of this name in the forms of chat completions, responses and messages.
fn tool(name: &str, parameters: &Value, strict: bool) -> [(&'static str, Value); 3] {
    let function = json!({"name": name, "parameters": parameters, "strict": strict});
    [
        ("/v1/chat/completions", json!({"type": "function", "function": function})),
        ("/v1/responses", merged(json!({"type": "function"}), &function)),
        ("/v1/messages", json!({"name": name, "input_schema": parameters, "strict": strict})),
    ]
}

fn with_tools(path: &str, tools: Value) -> Value {
    let (_, body, limit, _) = endpoints().into_iter().find(|(other, ..)| *other == path).unwrap();
    merged(body, &json!({limit: 1000, "tools": tools}))
}

/// The names of an answer's calls.
fn calls(answer: &Value) -> Vec<&str> {
    let of_chat = answer["choices"][0]["message"]["tool_calls"].as_array().into_iter().flatten();
    let items = [&answer["output"], &answer["content"]].into_iter().filter_map(Value::as_array).flatten();
    let items = items.filter(|item| item["type"] == "function_call" || item["type"] == "tool_use");
    of_chat
        .map(|call| &call["function"]["name"])
        .chain(items.map(|item| &item["name"]))
        .filter_map(Value::as_str)
        .collect()
}

#[tokio::test]
async fn a_strict_tool_is_held_to_its_schema_at_every_endpoint() {
    let server = TestServer::start(Script::new().reply("Well.")).await;
    let parameters = json!({"type": "object", "properties": {"at": {"type": "array", "uniqueItems": true}}});
    for strict in [true, false] {
        for (path, tool) in tool("look", &parameters, strict) {
            let answer = post(server.address, path, &with_tools(path, json!([tool]))).await;
            assert_eq!(answer.status, if strict { 400 } else { 200 }, "{path}: {}", answer.text());
            let text = answer.text();
            assert_eq!(text.contains("tools[0]") && text.contains("uniqueItems"), strict, "{path}: {text}");
        }
    }
}

#[tokio::test]
async fn a_named_tool_is_called_at_every_endpoint() {
    let server = TestServer::start(Script::new().reply("I would rather talk.")).await;
    let parameters = json!({"type": "object", "properties": {"at": {"enum": ["sky"]}}, "required": ["at"]});
    let choices = [
        json!({"type": "function", "function": {"name": "look"}}),
        json!({"type": "function", "name": "look"}),
        json!({"type": "tool", "name": "look"}),
    ];
    let tools = tool("listen", &parameters, false).into_iter().zip(tool("look", &parameters, false));
    for (((path, other), (_, tool)), choice) in tools.zip(choices) {
        let body = merged(with_tools(path, json!([other, tool])), &json!({"tool_choice": choice}));
        let answer = post(server.address, path, &body).await;
        assert_eq!(calls(&answer.json()), ["look"], "{path}: {}", answer.text());
    }
}

#[tokio::test]
async fn one_call_may_be_all_at_every_endpoint() {
    let call = "<tool_call>\n<function=look>\n</function>\n</tool_call>";
    let server = TestServer::start(Script::new().reply(&format!("{call}\n{call}"))).await;
    let one = [
        json!({"parallel_tool_calls": false}),
        json!({"parallel_tool_calls": false}),
        json!({"tool_choice": {"type": "auto", "disable_parallel_tool_use": true}}),
    ];
    for ((path, tool), one) in tool("look", &json!({"type": "object"}), false).into_iter().zip(one) {
        let body = with_tools(path, json!([tool]));
        let both = post(server.address, path, &body).await;
        assert_eq!(calls(&both.json()), ["look", "look"], "{path}: {}", both.text());
        let first = post(server.address, path, &merged(body, &one)).await;
        assert_eq!(calls(&first.json()), ["look"], "{path}: {}", first.text());
    }
}
