//! Replies that are held to a grammar or to a length of their thought.

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::constraint::{Callable, Calls, Rule};

const SCHEMA: &str = r#"{"type": "object", "properties": {
    "mood": {"enum": ["good", "bad"]}, "level": {"type": "integer", "minimum": 0, "maximum": 99},
    "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["mood", "level", "tags"], "additionalProperties": false}"#;

fn schema() -> Rule {
    Rule::JsonSchema(serde_json::from_str(SCHEMA).unwrap())
}

fn check(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
    assert!(value["mood"] == "good" || value["mood"] == "bad", "{value}");
    assert!(value["level"].as_u64().unwrap() <= 99, "{value}");
    assert!(value["tags"].as_array().unwrap().iter().all(Value::is_boolean), "{value}");
}

impl Harness {
    /// A request for what `outline` allows.
    fn held(&self, format: OutputFormat, answer: Option<Rule>, calls: Option<Calls>) -> Request {
        let constraint = self.engine.compile(&Outline { answer, calls }, &format).unwrap();
        Request { format, constraint, ..request(vec![1, 2, 3]) }
    }
}

#[test]
fn the_grammar_begins_behind_the_thought() {
    for depth in [1, 2] {
        let text = "I say {no}.</think>\n\nSure! {\"mood\": \"fine\", \"mood\": \"good\",\"level\":7,\"tags\":[]} Bye.";
        let backend = FakeBackend::scripted(limits(), move |_| say(text)).with_steps_in_flight(depth);
        let harness = Harness::new(backend, options());
        let request = harness.held(chat(true), Some(schema()), None);
        let outcome = harness.run(Request { max_tokens: Some(500), ..request });
        assert_eq!(outcome.reasoning, "I say {no}.");
        check(&outcome.text);
        assert_eq!(outcome.reason(), FinishReason::Stop);
        harness.close();
    }
}

#[test]
fn a_turn_does_not_end_inside_the_thought_of_an_answer_that_is_due() {
    let harness = Harness::scripted(|_| {
        let mut acts = say("Hm.");
        acts.push(Act::Token(END_OF_TURN));
        acts.extend(say("</think>{}"));
        acts
    });
    let request = harness.held(chat(true), Some(Rule::json_object()), None);
    let outcome = harness.run(request);
    assert_eq!((outcome.reasoning.as_str(), outcome.text.as_str()), ("Hm.", "{}"));
}

#[test]
fn several_sequences_follow_their_own_grammars_beside_free_ones() {
    for depth in [1, 3] {
        let backend = FakeBackend::sampling(limits()).with_steps_in_flight(depth);
        let harness = Harness::new(backend, options());
        let sampling = |seed| Sampling { temperature: 1.0, seed: Some(seed), ..greedy() };
        let held = harness.held(OutputFormat::Raw, Some(schema()), None);
        let alone: Vec<String> = (0..6)
            .map(|seed| harness.run(Request { sampling: sampling(seed), ..held.clone() }).text)
            .collect();
        let free = harness.submit(Request { max_tokens: Some(60), ..request(vec![9]) });
        let together: Vec<_> =
            (0..6).map(|seed| harness.submit(Request { sampling: sampling(seed), ..held.clone() })).collect();
        let together: Vec<String> =
            together.into_iter().map(|generation| Outcome::of(generation).text).collect();
        assert_eq!(alone, together);
        together.iter().for_each(|text| check(text));
        assert_eq!(Outcome::of(free).finished().usage.completion_tokens, 60);
        harness.close();
    }
}

#[test]
fn stop_strings_and_log_probabilities_go_with_a_grammar() {
    let harness = Harness::scripted(|_| say(r#"{"a":"one two three"}"#));
    let held = harness.held(OutputFormat::Raw, Some(Rule::json_object()), None);
    let sampling = Sampling { logprobs: Some(2), ..greedy() };
    let outcome = harness.run(Request { stop: vec!["two".into()], sampling, ..held });
    assert_eq!(outcome.text, r#"{"a":"one "#);
    assert_eq!(outcome.finished().stop.as_deref(), Some("two"));
    assert_eq!(outcome.tokens, tokens(r#"{"a":"one two"#));
}

fn tool(strict: bool) -> Callable {
    let parameters = json!({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]});
    Callable { tool: Tool { name: "f".into(), parameters }, strict, text: None }
}

#[test]
fn a_required_call_is_made() {
    let harness = Harness::scripted(|_| say("Hm.</think>\n\nI would rather talk: 17"));
    let calls = Calls { tools: vec![tool(false)], required: true, parallel: false };
    let outcome = harness.run(harness.held(chat(true), None, Some(calls)));
    assert_eq!((outcome.reasoning.as_str(), outcome.text.as_str()), ("Hm.", ""));
    assert_eq!(outcome.calls.len(), 1);
    let arguments: Value = serde_json::from_str(&outcome.calls[0].1).unwrap();
    assert!(arguments["x"].is_number(), "{arguments}");
    assert_eq!(outcome.reason(), FinishReason::ToolCalls);
}

#[test]
fn a_strict_call_is_held_to_its_schema_and_the_text_around_it_is_free() {
    let text =
        "A call: <tool_call>\n<function=f>\n<parameter=x>\nseven 7\n</parameter>\n</function>\n</tool_call>";
    let harness = Harness::scripted(move |_| say(&format!("{text}\n{text} Done.")));
    let calls = Calls { tools: vec![tool(true)], required: false, parallel: true };
    let outcome = harness.run(harness.held(chat(false), None, Some(calls)));
    let call = ("f".to_owned(), r#"{"x":7}"#.to_owned());
    assert_eq!(outcome.calls, [call.clone(), call]);
    assert!(outcome.text.starts_with("A call: ") && outcome.text.ends_with("Done."), "{}", outcome.text);
}

#[test]
fn a_reply_that_may_have_one_call_ends_with_it() {
    let call = "<tool_call>\n<function=f>\n<parameter=x>\n7\n</parameter>\n</function>\n</tool_call>";
    for after in ["", "\n", " More.", "\n<tool_call>\n<function=f>\n</function>\n</tool_call>"] {
        let harness = Harness::scripted(move |_| say(&format!("One: {call}{after}")));
        let OutputFormat::Chat { starts_in_thought, tools, .. } = chat(false) else { panic!() };
        let format = OutputFormat::Chat { starts_in_thought, tools, single_call: true };
        let outcome = harness.run(Request { format, ..request(vec![1]) });
        assert_eq!((outcome.text.as_str(), outcome.calls.len()), ("One: ", 1));
        assert_eq!(outcome.reason(), FinishReason::ToolCalls);
    }
}

#[test]
fn a_thought_ends_at_its_budget() {
    for (depth, budget) in [(1, 16), (3, 16), (2, 1)] {
        let script = |_: &[u32]| [endless(), say("</think>The answer.")].concat();
        let backend = FakeBackend::scripted(limits(), script).with_steps_in_flight(depth);
        let harness = Harness::new(backend, options());
        let request = Request { format: chat(true), thinking_budget: Some(budget), ..request(vec![1]) };
        let outcome = harness.run(request);
        assert_eq!(outcome.reasoning.len() as u32, budget - 1);
        assert_eq!(outcome.text, "The answer.");
        let usage = outcome.finished().usage;
        assert_eq!(usage.reasoning_tokens, budget, "the closing tag is one of them");
        assert_eq!(usage.completion_tokens, budget + "The answer.".len() as u32 + 1);
        harness.close();
    }
}

#[test]
fn a_thought_within_its_budget_is_left_alone() {
    let harness = Harness::scripted(|_| say("Short.</think>a much longer answer than the budget"));
    let request = Request { format: chat(true), thinking_budget: Some(20), ..request(vec![1]) };
    let outcome = harness.run(request);
    assert_eq!(outcome.reasoning, "Short.");
    assert_eq!(outcome.text, "a much longer answer than the budget");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn whatever_the_model_would_say_it_says_what_it_may(seed: u64, thinks: bool, temperature in 0f32..2.0) {
        let backend = FakeBackend::sampling(limits());
        let harness = Harness::new(backend, options());
        let request = harness.held(chat(thinks), Some(schema()), None);
        let sampling = Sampling { temperature, seed: Some(seed), ..greedy() };
        let outcome = harness.run(Request { sampling, thinking_budget: Some(9), ..request });
        check(&outcome.text);
        prop_assert_eq!(outcome.reason(), FinishReason::Stop);
    }
}
