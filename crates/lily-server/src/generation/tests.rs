use lily_engine::testing::request;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::openapi::tests::{check_schema, forget};

/// Checks documented fields, each with a value that asks for something: it must act, be refused by name, or be one of
/// the `labels`. `parse` reads a request that has these fields beside those it needs; `schema` is the name of its schema
/// in the OpenAPI document.
pub(crate) fn check_fields(
    schema: &str,
    parse: impl Fn(Value) -> Result<String, ApiError>,
    labels: &[&str],
    fields: &[(&str, Value)],
) {
    forget();
    let usual = parse(json!({})).unwrap();
    for (name, value) in fields {
        match parse(json!({*name: value})) {
            Ok(request) if labels.contains(name) => {
                assert_eq!(request, usual, "{name} is documented as a label");
            }
            Ok(request) => assert_ne!(request, usual, "{name} was accepted and did nothing"),
            Err(error) => {
                let param = error.param.unwrap();
                assert!(param.starts_with(name), "{param} for {name}");
            }
        }
    }
    for label in labels {
        assert!(fields.iter().any(|(name, _)| name == label), "{label} is not among the fields");
    }
    check_schema(schema);
}

/// Any JSON, made of words that requests are made of.
pub(crate) fn any_json() -> impl Strategy<Value = Value> {
    let names = [
        "type",
        "function",
        "name",
        "role",
        "content",
        "text",
        "input",
        "output",
        "call_id",
        "id",
        "arguments",
        "format",
        "schema",
        "json_schema",
        "syntax",
        "definition",
        "effort",
        "budget_tokens",
        "include_usage",
        "thinking",
        "3",
    ];
    let words = [
        "function",
        "user",
        "assistant",
        "system",
        "text",
        "auto",
        "none",
        "any",
        "tool",
        "custom",
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "tool_use",
        "tool_result",
        "input_text",
        "grammar",
        "regex",
        "json_schema",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z<]{0,8}".prop_map(Value::from),
        prop::sample::select(words.to_vec()).prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, move |inner| {
        let name = prop::sample::select(names.to_vec());
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((name, inner), 0..4)
                .prop_map(|members| members.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()),
        ]
    })
}

#[test]
fn answers_differ_in_their_seeds_and_share_their_prompt() {
    let mut one = request(vec![1, 2, 3]);
    one.sampling.seed = Some(7);
    let all = answers(one, 3);
    let seeds: Vec<_> = all.iter().filter_map(|request| request.sampling.seed).collect();
    assert_eq!((all.len(), seeds[0]), (3, 7));
    assert!(seeds[1] != seeds[0] && seeds[2] != seeds[0] && seeds[1] != seeds[2]);
    assert!(all.iter().all(|request| request.boundaries == [2]), "the last token is read by each");
    assert!(answers(request(vec![1]), 2).iter().all(|request| request.sampling.seed.is_none()));
    assert!(answers(request(vec![1, 2]), 1)[0].boundaries.is_empty());
}
