use lily_model::template::ChatTemplate;
use serde_json::json;

use super::*;
use crate::testing::{greedy, tokenizer};

/// What matters here of the model's own template.
const TEMPLATE: &str = "{%- for m in messages -%}\
{%- if m.role == 'system' and not loop.first -%}{{- raise_exception('System message must be at the beginning.') -}}\
{%- endif -%}\
{{- '<|im_start|>' + m.role + '\n' + m.content -}}\
{%- for c in m.tool_calls or [] -%}{%- for k, v in c.function.arguments|items -%}{{- k -}}={{- v -}}{%- endfor -%}\
{%- endfor -%}\
{{- '<|im_end|>\n' -}}\
{%- endfor -%}\
{{- '<|im_start|>assistant\n<think>\n' -}}\
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '\n</think>\n\n' -}}{%- endif -%}";

fn normal(messages: Value) -> Vec<Value> {
    normalize(messages.as_array().unwrap()).unwrap()
}

fn roles_and_texts(messages: Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    normal(messages).iter().map(|m| (text(&m["role"]), text(&m["content"]))).collect()
}

fn owned(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(role, text)| (role.to_string(), text.to_string())).collect()
}

fn request_of(chat: &Chat) -> Result<Request, ChatError> {
    chat_request(chat, &ChatTemplate::new(TEMPLATE).unwrap(), &tokenizer(), None, greedy())
}

#[test]
fn leading_system_messages_become_one_and_later_ones_the_users() {
    let of = |role: &str, text: &str| json!({"role": role, "content": text});
    for (given, expected) in [
        (
            json!([of("system", "a"), of("developer", "b"), of("system", " "), of("user", "q")]),
            owned(&[("system", "a\n\nb"), ("user", "q")]),
        ),
        (
            json!([of("system", ""), of("system", "b"), of("user", "q")]),
            owned(&[("system", "b"), ("user", "q")]),
        ),
        (json!([of("user", "q"), of("system", "a")]), owned(&[("user", "q"), ("user", "a")])),
        (
            json!([
                of("developer", "a"),
                of("user", "q"),
                of("assistant", "r"),
                of("developer", "b"),
                of("user", "s")
            ]),
            owned(&[("system", "a"), ("user", "q"), ("assistant", "r"), ("user", "b"), ("user", "s")]),
        ),
        (
            json!([of("user", "q"), of("system", "\n"), of("user", "r")]),
            owned(&[("user", "q"), ("user", "r")]),
        ),
    ] {
        assert_eq!(roles_and_texts(given.clone()), expected, "{given}");
    }
}

#[test]
fn every_shape_of_content_becomes_a_string() {
    for (content, expected) in [
        (json!("a"), "a"),
        (json!(null), ""),
        (json!([]), ""),
        (json!([{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]), "a b"),
    ] {
        assert_eq!(normal(json!([{"role": "user", "content": content}]))[0]["content"], expected);
    }
    assert_eq!(normal(json!([{"role": "user"}]))[0]["content"], "");
}

#[test]
fn arguments_become_objects_and_reasoning_has_one_name() {
    let with = |arguments: Value| {
        json!([{"role": "assistant", "content": null, "reasoning": "why", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]}])
    };
    for (given, expected) in [
        (json!("{\"b\":3,\"a\":[1]}"), json!({"b": 3, "a": [1]})),
        (json!("{}"), json!({})),
        (json!(" "), json!({})),
        (json!(null), json!({})),
        (json!({"a": 1}), json!({"a": 1})),
    ] {
        let messages = normal(with(given));
        let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": expected}});
        assert_eq!(messages[0]["tool_calls"], json!([call]));
        assert_eq!(messages[0]["reasoning_content"], "why");
        assert_eq!(messages[0].get("reasoning"), None);
        assert_eq!(normalize(&messages).unwrap(), messages, "normal already");
    }
    for absent in [json!(null), json!([])] {
        let messages =
            normal(json!([{"role": "assistant", "tool_calls": absent, "reasoning_content": null}]));
        assert_eq!(messages, [json!({"role": "assistant", "content": ""})]);
    }
}

#[test]
fn errors_name_the_place() {
    let call = |function: Value| json!({"role": "assistant", "tool_calls": [{"function": function}]});
    for (message, param) in [
        (json!("hello"), "messages[1]"),
        (json!({"content": "a"}), "messages[1].role"),
        (json!({"role": "function"}), "messages[1].role"),
        (json!({"role": "user", "content": 3}), "messages[1].content"),
        (json!({"role": "user", "content": ["a"]}), "messages[1].content[0]"),
        (json!({"role": "user", "content": [{"text": "a"}]}), "messages[1].content[0].type"),
        (json!({"role": "user", "content": [{"type": "text"}]}), "messages[1].content[0].text"),
        (json!({"role": "user", "content": [{"type": "image_url"}]}), "messages[1].content[0].type"),
        (json!({"role": "assistant", "reasoning": 1}), "messages[1].reasoning"),
        (json!({"role": "assistant", "tool_calls": {}}), "messages[1].tool_calls"),
        (json!({"role": "assistant", "tool_calls": ["f"]}), "messages[1].tool_calls[0].function"),
        (call(json!({"arguments": "{}"})), "messages[1].tool_calls[0].function.name"),
        (call(json!({"name": "f", "arguments": "not json"})), "messages[1].tool_calls[0].function.arguments"),
        (call(json!({"name": "f", "arguments": "[1]"})), "messages[1].tool_calls[0].function.arguments"),
        (call(json!({"name": "f", "arguments": 3})), "messages[1].tool_calls[0].function.arguments"),
    ] {
        let error = normalize(&[json!({"role": "user", "content": "q"}), message.clone()]).unwrap_err();
        assert_eq!(error.param(), param, "{message}");
        assert!(error.to_string().starts_with(&format!("{param}: ")), "{error}");
    }
}

#[test]
fn a_request_knows_its_prompt_its_tools_and_whether_it_starts_in_a_thought() {
    let parameters = json!({"type": "object", "properties": {}});
    let mut chat = Chat {
        messages: vec![
            json!({"role": "user", "content": "<think>"}),
            json!({"role": "system", "content": "b"}),
        ],
        tools: vec![json!({"type": "function", "function": {"name": "f", "parameters": parameters}})],
        ..Chat::default()
    };
    let request = request_of(&chat).unwrap();
    let text = tokenizer().decode(&request.prompt, false);
    assert_eq!(
        text,
        "<|im_start|>user\n<think><|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\n"
    );
    let opened = tokenizer().control_id("<think>").unwrap();
    assert_eq!(request.prompt.iter().filter(|&&id| id == opened).count(), 1, "a user's tag is text");
    let OutputFormat::Chat { starts_in_thought, tools, .. } = request.format else { panic!() };
    assert!(starts_in_thought);
    assert_eq!(*tools, [Tool { name: "f".into(), parameters }]);

    chat.enable_thinking = Some(false);
    let OutputFormat::Chat { starts_in_thought, .. } = request_of(&chat).unwrap().format else { panic!() };
    assert!(!starts_in_thought);
}

#[test]
fn faults_of_tools_and_refusals_of_the_template_are_errors() {
    let nameless = Chat { tools: vec![json!({"function": {}})], ..Chat::default() };
    assert_eq!(request_of(&nameless).unwrap_err().param(), "tools[0]");
    let refused = request_of(&Chat::default()).unwrap_err();
    assert!(matches!(refused, ChatError::Template(TemplateError::Refused(_))), "{refused}");
    assert_eq!(refused.param(), "messages");
}

#[test]
fn boundaries_are_where_conversations_part() {
    let message = |role: &str, text: &str| json!({"role": role, "content": text});
    let system = message("system", "Be brief.");
    let first = Chat { messages: vec![system.clone(), message("user", "a")], ..Chat::default() };
    let other = Chat { messages: vec![system, message("user", "b")], ..Chat::default() };
    let mut next = first.clone();
    next.messages.extend([message("assistant", "c"), message("user", "d")]);
    let [first, other, next] = [first, other, next].map(|chat| request_of(&chat).unwrap());
    let shared = |a: &[u32], b: &[u32]| a.iter().zip(b).take_while(|(a, b)| a == b).count() as u32;
    let [system_end, reply_start] = first.boundaries[..] else { panic!("{:?}", first.boundaries) };
    // Both prompts go on with the opening of a turn, so they share that, too.
    let opening = crate::testing::tokens("<|im_start|>user\n").len() as u32;
    assert_eq!(shared(&first.prompt, &other.prompt), system_end + opening);
    let opening = crate::testing::tokens("<|im_start|>assistant\n").len() as u32;
    assert_eq!(shared(&first.prompt, &next.prompt), reply_start + opening, "the thought is left out");
    assert_eq!(next.boundaries[0], system_end);
    assert!(next.boundaries[1] > reply_start);
}
