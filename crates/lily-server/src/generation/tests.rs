use lily_engine::testing::request;
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
