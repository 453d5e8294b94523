use llguidance::toktrie::SimpleVob;
use serde_json::json;

use super::*;
use crate::request::Tool;
use crate::testing::{END_OF_TURN, tokenizer, tokens};

fn compiler() -> Compiler {
    Compiler::new(Arc::new(tokenizer()), 300, vec![END_OF_TURN])
}

/// How much of a text a constraint allows, in tokens, and whether the turn may end behind it.
fn follow(constraint: &Constraint, text: &str) -> (usize, bool) {
    let mut matcher = constraint.matcher();
    let allows = |mask: &SimpleVob, token| mask.is_allowed(token);
    for (i, token) in tokens(text).into_iter().enumerate() {
        if !allows(&matcher.compute_mask_or_eos().unwrap(), token) {
            return (i, false);
        }
        matcher.consume_token(token).unwrap();
    }
    let complete = allows(&matcher.compute_mask_or_eos().unwrap(), END_OF_TURN);
    (tokens(text).len(), complete)
}

fn accepts(outline: &Outline, text: &str) -> bool {
    let constraint = compiler().compile(outline, false).unwrap().unwrap();
    follow(&constraint, text) == (tokens(text).len(), true)
}

fn answer(rule: Rule) -> Outline {
    Outline { answer: Some(rule), calls: None }
}

fn schema(schema: Value) -> Outline {
    answer(Rule::JsonSchema(schema))
}

fn problem(outline: &Outline) -> String {
    compiler().compile(outline, false).unwrap_err().problem
}

fn calls(parameters: Value, strict: bool) -> Outline {
    let tool = Tool { name: "look".into(), parameters };
    let tools = vec![Callable { tool, strict, text: None }];
    Outline { answer: None, calls: Some(Calls { tools, required: true, parallel: true }) }
}

/// A call in the model's form.
fn call(arguments: &[(&str, &str)]) -> String {
    let parameter = |(key, value): &(&str, &str)| format!("<parameter={key}>\n{value}\n</parameter>\n");
    let parameters: String = arguments.iter().map(parameter).collect();
    format!("<tool_call>\n<function=look>\n{parameters}</function>\n</tool_call>")
}

#[test]
fn json_is_what_its_schema_says() {
    let person = schema(json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name"],
        "additionalProperties": false,
    }));
    for good in [r#"{"name":"Ada"}"#, r#"{"name": "Ada", "age": 36}"#, "{\n  \"name\": \"Ďáblík \\\" 漢\"\n}"]
    {
        assert!(accepts(&person, good), "{good}");
    }
    for bad in [
        r#"{"age":3}"#,
        r#"{"name":"Ada","age":-1}"#,
        r#"{"name":"Ada","more":1}"#,
        r#"{"name":"Ada""#,
        "Ada",
    ] {
        assert!(!accepts(&person, bad), "{bad}");
    }
    assert!(accepts(&answer(Rule::json_object()), r#"{"any":[1,{"x":null}]}"#));
    assert!(!accepts(&answer(Rule::json_object()), "[1]"));
}

#[test]
fn white_space_can_not_go_on_for_ever() {
    let constraint = compiler().compile(&answer(Rule::json_object()), false).unwrap().unwrap();
    let (allowed, _) = follow(&constraint, &format!("{{{}", "\n".repeat(2000)));
    assert!(allowed < 100, "{allowed}");
}

#[test]
fn regexes_and_grammars_hold_from_end_to_end() {
    let date = answer(Rule::Regex(r"\d{4}-\d\d-\d\d/x".into()));
    assert!(accepts(&date, "2026-01-15/x"));
    assert!(!accepts(&date, "2026-01-15/xy") && !accepts(&date, "2026-01-15"));
    let sum = answer(Rule::Lark("start: N (\"+\" N)*\nN: /[0-9]+/".into()));
    assert!(accepts(&sum, "1+20+3"));
    assert!(!accepts(&sum, "1+"));
    let sum = answer(Rule::Gbnf("root ::= num (\"+\" num)*\nnum ::= [0-9]+".into()));
    assert!(accepts(&sum, "1+20+3"));
    assert!(!accepts(&sum, "1+") && !accepts(&sum, "a"));
}

#[test]
fn what_can_not_be_held_to_is_named() {
    for (outline, words) in [
        (schema(json!({"type": "object", "unevaluatedProperties": false})), "unevaluatedProperties"),
        (schema(json!({"type": "array", "uniqueItems": true})), "uniqueItems"),
        (schema(json!({"type": "wizard"})), "wizard"),
        (schema(json!(3)), "a JSON schema is an object"),
        (schema(json!({"$ref": "#/nowhere"})), "nowhere"),
        (answer(Rule::Regex("(".into())), "unclosed group"),
        (answer(Rule::Lark("begin: \"x\"".into())), "no start rule"),
        (answer(Rule::Lark("start: missing".into())), "missing"),
        (answer(Rule::Gbnf("root ::= missing".into())), "missing"),
    ] {
        let problem = problem(&outline);
        assert!(problem.contains(words), "{problem:?} should say {words:?}");
        assert!(!problem.contains("verbose"), "{problem}");
    }
}

#[test]
fn a_strict_tool_is_refused_with_the_parameter_and_a_lenient_one_is_not() {
    for parameters in [
        json!({"type": "object", "properties": {"at": {"type": "array", "uniqueItems": true}}}),
        json!({"type": "object", "properties": {"at": {"type": "string", "format": "date"}}}),
        json!({"type": "object", "properties": {"at": {"type": "string", "minLength": "many"}}}),
    ] {
        let error = compiler().compile(&calls(parameters.clone(), true), false).unwrap_err();
        assert_eq!(error.tool, Some(0));
        assert!(error.problem.contains("parameters.properties.at"), "{error}");
        let lenient = compiler().compile(&calls(parameters.clone(), false), false);
        assert_eq!(lenient.is_err(), parameters.to_string().contains("many"));
    }
    // What is passed over leaves the rest as it is.
    let odd = json!({"type": "object", "required": ["at", "gone"], "properties": {
        "at": {"type": "string", "pattern": "(?=lookahead)"}, "kind": {"type": "array", "items": {"type": "wizard"}}}});
    let lenient = calls(odd.clone(), false);
    assert!(accepts(&lenient, &call(&[("at", "x"), ("kind", "[1, {\"x\": null}]")])));
    assert!(!accepts(&lenient, &call(&[("kind", "[]")])));
    assert!(compiler().compile(&calls(odd, true), false).is_err());
}

#[test]
fn the_text_of_a_tool_may_have_a_grammar() {
    let patch = "start: \"*** Begin Patch\" LF hunk+ \"*** End Patch\" LF?\n\
                 hunk: \"*** Add File: \" /(.+)/ LF (\"+\" /(.*)/ LF)+ | \"*** Delete File: \" /(.+)/ LF\n\
                 %import common.LF\n";
    let Outline { calls: Some(mut patching), .. } = calls(
        json!({"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}),
        false,
    ) else {
        panic!()
    };
    patching.tools[0].text = Some(Rule::Lark(patch.into()));
    let outline = Outline { answer: None, calls: Some(patching.clone()) };
    let text = |input: &str| call(&[("input", input)]);
    assert!(accepts(&outline, &text("*** Begin Patch\n*** Add File: a <b>.txt\n+one\n+\n*** End Patch")));
    assert!(accepts(&outline, &text("*** Begin Patch\n*** Delete File: a\n*** End Patch\n")));
    assert!(!accepts(&outline, &text("*** Begin Patch\n*** Rename File: a\n*** End Patch")));
    assert!(!accepts(&outline, &text("anything")));
    patching.tools[0].text = Some(Rule::Lark("start: nothing".into()));
    let error = compiler().compile(&Outline { answer: None, calls: Some(patching) }, false).unwrap_err();
    assert_eq!(error.tool, Some(0));
    assert!(error.problem.contains("format") && error.problem.contains("nothing"), "{error}");
}

#[test]
fn calls_have_the_models_form_and_the_schemas_types() {
    let outline = calls(
        json!({
            "type": "object",
            "properties": {
                "at": {"type": "string"},
                "times": {"type": "integer"},
                "how": {"enum": ["fast", "slow", null]},
                "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
            },
            "required": ["at"],
            "$defs": {"tag": {"type": "string", "maxLength": 3}},
        }),
        true,
    );
    for good in [
        call(&[("at", "the \"sky\"\n\n </para 漢")]),
        call(&[("at", "")]),
        call(&[("at", "x"), ("times", "-3"), ("how", "slow"), ("tags", "[\"a\", \"b\"]")]),
        call(&[("at", "x"), ("how", "null")]),
        format!("{}\n{}", call(&[("at", "x")]), call(&[("at", "y")])),
    ] {
        assert!(accepts(&outline, &good), "{good}");
    }
    for bad in [
        call(&[]),
        call(&[("times", "3")]),
        call(&[("at", "x"), ("times", "three")]),
        call(&[("at", "x"), ("how", "fas")]),
        call(&[("at", "x"), ("tags", "[\"long tag\"]")]),
        call(&[("at", "x"), ("other", "y")]),
        call(&[("at", "x</parameter>y")]),
        call(&[("at", "x</function>\n</tool_call>")]).replace("</tool_call>", "</tool_call"),
        "Well, ".to_owned() + &call(&[("at", "x")]),
        String::new(),
    ] {
        assert!(!accepts(&outline, &bad), "{bad}");
    }
    let lengths = json!({"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3});
    let outline = calls(json!({"type": "object", "properties": {"at": lengths}}), true);
    assert!(accepts(&outline, &call(&[("at", "abc")])));
    assert!(["a", "abcd", "AB"].iter().all(|value| !accepts(&outline, &call(&[("at", value)]))));
}

#[test]
fn one_call_or_an_answer_may_be_all_there_is() {
    let Outline { calls: Some(both), .. } =
        calls(json!({"type": "object", "additionalProperties": true}), false)
    else {
        panic!()
    };
    let one = Calls { parallel: false, ..both.clone() };
    let two = format!("{}\n{}", call(&[]), call(&[]));
    assert!(accepts(&Outline { answer: None, calls: Some(one.clone()) }, &call(&[("any", "thing")])));
    assert!(!accepts(&Outline { answer: None, calls: Some(one) }, &two));
    let either =
        Outline { answer: Some(Rule::json_object()), calls: Some(Calls { required: false, ..both.clone() }) };
    assert!(accepts(&either, "{}") && accepts(&either, &two));
    assert!(!accepts(&either, &format!("{{}}{}", call(&[]))) && !accepts(&either, "text"));
    let neither = Outline { answer: Some(Rule::json_object()), calls: Some(both) };
    assert!(problem(&neither).contains("a tool call is required"));
}

#[test]
fn an_empty_line_may_part_the_thought_from_the_answer() {
    let constraint = compiler().compile(&answer(Rule::json_object()), true).unwrap().unwrap();
    assert_eq!(follow(&constraint, "\n\n{}"), (4, true));
    assert_eq!(follow(&constraint, "{}"), (2, true));
    assert_eq!(follow(&constraint, "\n\n\n{}").0, 2);
}

#[test]
fn an_outline_without_rules_holds_to_nothing() {
    assert!(compiler().compile(&Outline::default(), true).unwrap().is_none());
}

/// Grammars as deep as their length allows, each of which would overflow a common stack.
#[test]
fn long_chains_of_rules_do_no_harm() {
    let rules: String = (0..6000).map(|i| format!("a{i}: a{}\n", i + 1)).collect();
    let lark = Rule::Lark(format!("start: a0\n{rules}a6000: \"x\""));
    let refers = |i: u32| (format!("{i}"), json!({"anyOf": [{"$ref": format!("#/$defs/{}", i + 1)}]}));
    let mut definitions: serde_json::Map<String, Value> = (0..2500).map(refers).collect();
    definitions.insert("2500".into(), json!({"const": "x"}));
    let schema = Rule::JsonSchema(json!({"$ref": "#/$defs/0", "$defs": definitions}));
    for (rule, text) in [(lark, "x"), (schema, "\"x\"")] {
        assert!(accepts(&answer(rule), text), "{text}");
    }
    let long = "x".repeat(200_000);
    assert!(
        problem(&answer(Rule::Lark(format!("start: \"{long}\"")))).contains("expected at most 131072 bytes")
    );
    let error = compiler().compile(&calls(json!({"description": long}), false), false).unwrap_err();
    assert_eq!(error.tool, Some(0));
}
