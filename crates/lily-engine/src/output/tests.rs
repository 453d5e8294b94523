use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

/// Deltas put together as a client does.
#[derive(Debug, Default, PartialEq)]
struct Folded {
    reasoning: String,
    text: String,
    /// Name and arguments.
    calls: Vec<(String, String)>,
}

impl Folded {
    fn add(&mut self, deltas: Vec<Delta>) {
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => self.reasoning += &text,
                Delta::Text(text) => self.text += &text,
                Delta::ToolCall { index, id, name } => {
                    assert_eq!(index as usize, self.calls.len());
                    assert!(id.starts_with("call_") && id.len() == 29, "{id}");
                    self.calls.push((name, String::new()));
                }
                Delta::ToolArguments { index, fragment } => {
                    assert_eq!(index as usize + 1, self.calls.len(), "arguments of a call that is over");
                    assert!(!fragment.is_empty());
                    self.calls[index as usize].1 += &fragment;
                }
            }
        }
    }

    fn arguments(&self, call: usize) -> Value {
        serde_json::from_str(&self.calls[call].1).unwrap_or_else(|e| panic!("{e}: {}", self.calls[call].1))
    }
}

fn tools() -> Arc<[Tool]> {
    let parameters = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "ratio": {"type": "number"},
            "metric": {"type": "boolean"},
            "nothing": {"type": "null"},
            "list": {"type": "array", "items": {"type": "integer"}},
            "filter": {"type": "object"},
            "when": {"type": "datetime"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "either": {"type": ["integer", "string"]},
            "unit": {"$ref": "#/$defs/Unit"},
            "level": {"enum": [1, 2, 3]},
        },
        "required": ["city"],
        "$defs": {"Unit": {"enum": ["C", "F"]}},
    });
    Arc::new([Tool { name: "weather".into(), parameters }])
}

fn parse_pieces<'a>(pieces: impl IntoIterator<Item = &'a str>, thought: bool, cut: bool) -> Folded {
    let mut parser = OutputParser::new(thought, tools(), false);
    let mut folded = Folded::default();
    for piece in pieces {
        folded.add(parser.push(piece));
    }
    folded.add(parser.finish(cut));
    assert_eq!(parser.calls() as usize, folded.calls.len());
    folded
}

fn parse(text: &str) -> Folded {
    parse_pieces([text], false, false)
}

fn call(parameters: &[(&str, &str)]) -> String {
    let parameters: String =
        parameters.iter().map(|(k, v)| format!("<parameter={k}>\n{v}\n</parameter>\n")).collect();
    format!("<tool_call>\n<function=weather>\n{parameters}</function>\n</tool_call>")
}

/// The JSON that a value becomes.
fn value_of(parameter: &str, value: &str) -> Value {
    parse(&call(&[(parameter, value)])).arguments(0)[parameter].clone()
}

#[test]
fn thought_answer_and_calls_are_told_apart() {
    let text = format!(
        "\nLet me see.\n\nRain?\n</think>\n\nI will ask.\n\n{}\n{}\n",
        call(&[("city", "Brno"), ("days", "3")]),
        call(&[("city", "Plzeň")])
    );
    let got = parse_pieces([&*text], true, false);
    assert_eq!(got.reasoning, "Let me see.\n\nRain?");
    assert_eq!(got.text, "I will ask.\n\n");
    assert_eq!(
        got.calls,
        [
            ("weather".to_owned(), r#"{"city":"Brno","days":3}"#.to_owned()),
            ("weather".to_owned(), r#"{"city":"Plzeň"}"#.to_owned()),
        ]
    );
}

#[test]
fn every_two_way_split_and_every_byte_alone_give_the_same() {
    let text = format!(
        "<think>\nWhy? <b> </thin\n\n</think>\n\nLook: <tool <a>\n\n{}\n{}",
        call(&[("city", "a\nb</ </parameter <x> \"q\" \\"), ("list", "[1, 2]"), ("note", "nul")]),
        call(&[("days", "230.0"), ("note", "null")])
    );
    let whole = parse_pieces([&*text], true, false);
    assert_eq!(whole.calls.len(), 2);
    assert_eq!(whole.arguments(0)["city"], "a\nb</ </parameter <x> \"q\" \\");
    for at in (0..text.len()).filter(|&at| text.is_char_boundary(at)) {
        let (a, b) = text.split_at(at);
        assert_eq!(parse_pieces([a, b], true, false), whole, "split at {at}");
    }
    assert_eq!(parse_pieces(text.split("").filter(|piece| !piece.is_empty()), true, false), whole);
}

#[test]
fn blank_text_around_calls_is_dropped() {
    let one = call(&[("city", "x")]);
    for text in [format!("\n\n{one}\n\n{one}\n"), format!(" {one}\n{one}")] {
        let got = parse(&text);
        assert_eq!((got.text.as_str(), got.calls.len()), ("", 2));
    }
    assert_eq!(parse_pieces([&*format!("a</think>\n\n{one}")], true, false).text, "");
    assert_eq!(parse(&format!("{one}\n\nDone.")).text, "\n\nDone.");
    assert_eq!(parse("  indented").text, "  indented");
    assert_eq!(parse(" \n").text, " \n");
}

#[test]
fn a_thought_that_is_cut_is_all_reasoning() {
    let got = parse_pieces(["I wonder </thi"], true, true);
    assert_eq!((got.reasoning.as_str(), got.text.as_str()), ("I wonder </thi", ""));
}

#[test]
fn thinking_tags_outside_a_thought_are_text() {
    assert_eq!(parse("a </think> <think> b").text, "a </think> <think> b");
    assert_eq!(parse_pieces(["t</think>\n a</think>b"], true, false).text, "a</think>b");
}

#[test]
fn an_empty_thought_is_nothing() {
    for text in ["</think>\n\nHi", "\n\n</think>\n\nHi", "<think>\n</think>Hi"] {
        let got = parse_pieces([text], true, false);
        assert_eq!((got.reasoning.as_str(), got.text.as_str()), ("", "Hi"), "{text:?}");
    }
}

#[test]
fn without_tools_markup_is_text() {
    let mut parser = OutputParser::new(false, Arc::new([]), false);
    let text = format!(" {}", call(&[("city", "x")]));
    assert_eq!(parser.push(&text), [Delta::Text(text)]);
    assert_eq!(parser.finish(false), []);
}

#[test]
fn values_get_the_type_of_the_schema() {
    for (parameter, value, expected) in [
        ("days", "230", json!(230)),
        ("days", "-7", json!(-7)),
        ("days", "230.0", json!(230)),
        ("days", "2.3e2", json!(230)),
        ("days", "230.5", json!(230.5)),
        ("days", "1e400", json!("1e400")),
        ("days", "2026-01-15", json!("2026-01-15")),
        ("days", "", json!("")),
        ("days", "007", json!("007")),
        ("days", "null", json!(null)),
        ("ratio", "230.0", json!(230.0)),
        ("ratio", "1", json!(1)),
        ("ratio", "2026-01-15", json!("2026-01-15")),
        ("metric", "true", json!(true)),
        ("metric", "yes", json!("yes")),
        ("nothing", "null", json!(null)),
        ("list", "[1, [2]]", json!([1, [2]])),
        ("list", "[1,", json!("[1,")),
        ("filter", "{\n  \"a\": null\n}", json!({"a": null})),
        ("filter", "2026-01-15", json!("2026-01-15")),
        ("city", "5", json!("5")),
        ("city", "\"quoted\"", json!("\"quoted\"")),
        ("city", "", json!("")),
        ("city", "  two\n\nlines \n", json!("  two\n\nlines \n")),
        ("when", "2026-01-15", json!("2026-01-15")),
        ("note", "null", json!(null)),
        ("note", "nullable", json!("nullable")),
        ("note", "5", json!("5")),
        ("either", "5", json!(5)),
        ("either", "5.5", json!("5.5")),
        ("either", "five", json!("five")),
        ("unit", "C", json!("C")),
        ("unit", "1", json!("1")),
        ("level", "2.0", json!(2)),
        ("unheard", "text", json!("text")),
        ("unheard", "\"quoted\"", json!("\"quoted\"")),
        ("unheard", "[true]", json!([true])),
        ("unheard", "[todo] x", json!("[todo] x")),
        ("unheard", "12", json!(12)),
    ] {
        assert_eq!(value_of(parameter, value), expected, "{parameter} = {value:?}");
    }
    let exact = parse(&call(&[("days", "123456789012345678901234567890")]));
    assert_eq!(exact.calls[0].1, r#"{"days":123456789012345678901234567890}"#);
}

#[test]
fn characters_that_json_escapes_arrive_unchanged() {
    let value = "\" \\ \n \t \0 \u{1b} 👩‍👩‍👧 \u{2028} </ </parameter </function> <tool_call>";
    assert_eq!(value_of("city", value), value);
}

#[test]
fn string_values_stream_as_they_come() {
    let mut parser = OutputParser::new(false, tools(), false);
    parser.push("<tool_call>\n<function=weather>\n<parameter=city>\n");
    let fragment = |text: &str| vec![Delta::ToolArguments { index: 0, fragment: text.into() }];
    assert_eq!(parser.push("Br"), fragment("Br"));
    assert_eq!(parser.push("no\n"), fragment("no"));
    assert_eq!(parser.push("\"x\""), fragment(r#"\n\"x\""#));
    assert_eq!(parser.push("\n</parameter>\n"), fragment("\""));
    assert_eq!(parser.push("<parameter=note>\nnu"), fragment(r#","note":"#));
    assert_eq!(parser.push("ts"), fragment(r#""nuts"#), "no longer the beginning of null");
    assert_eq!(parser.push("\n</parameter>\n</function>"), fragment("\"}"));
}

#[test]
fn long_values_take_linear_time() {
    let text =
        call(&[("city", &"a<\n\"".repeat(100_000)), ("list", &format!("[{}]", "1,\n".repeat(100_000)))]);
    let mut parser = OutputParser::new(false, tools(), false);
    let mut folded = Folded::default();
    let start = std::time::Instant::now();
    for piece in text.as_bytes().chunks(2) {
        folded.add(parser.push(str::from_utf8(piece).unwrap()));
    }
    // Quadratic work over 700 KB would take minutes.
    assert!(start.elapsed() < std::time::Duration::from_secs(20));
    assert_eq!(folded.arguments(0)["city"].as_str().unwrap().len(), 400_000);
}

#[test]
fn parameters_come_in_any_order_and_the_first_of_a_name_counts() {
    let got = parse(&call(&[("days", "1"), ("city", "a"), ("days", "2"), ("city", "b")]));
    assert_eq!(got.calls[0].1, r#"{"days":1,"city":"a"}"#);
}

#[test]
fn missing_closing_tags_do_not_lose_a_call() {
    for text in [
        "<tool_call>\n<function=weather>\n<parameter=city>\nBrno",
        "<tool_call>\n<function=weather>\n<parameter=city>\nBrno\n</param",
        "<tool_call>\n<function=weather>\n<parameter=city>\nBrno\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nBrno\n</parameter>",
        "<tool_call>\n<function=weather>\n<parameter=city>\nBrno\n</parameter>\n</tool_call>",
        "<tool_call><function=weather><parameter=city>Brno</parameter></function>",
        "<tool_call>\n<function=weather\n<parameter=city>\nBrno\n</parameter>\n</function>\n",
    ] {
        let got = parse(text);
        assert_eq!(got.text, "", "{text}");
        assert_eq!(got.calls, [("weather".to_owned(), r#"{"city":"Brno"}"#.to_owned())], "{text}");
    }
    for text in ["<tool_call>\n<function=weather>", "<tool_call><function=weather>\n<parameter=ci"] {
        assert_eq!(parse(text).calls, [("weather".to_owned(), "{}".to_owned())], "{text}");
    }
}

#[test]
fn calls_that_run_into_each_other_are_all_kept() {
    let open = "<tool_call>\n<function=weather>\n<parameter=city>\na\n</parameter>\n";
    let one = r#"{"city":"a"}"#.to_owned();
    for text in [
        format!("{open}{open}</function></tool_call>"),
        format!("{open}</function>\n{open}"),
        format!("{open}{}", &open["<tool_call>".len()..]),
    ] {
        let got = parse(&text);
        let arguments: Vec<_> = got.calls.into_iter().map(|call| call.1).collect();
        assert_eq!(arguments, [one.clone(), one.clone()], "{text}");
    }
}

#[test]
fn an_unknown_function_is_still_a_call() {
    let got =
        parse("<tool_call>\n<function=nope>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>");
    assert_eq!(got.calls, [("nope".to_owned(), r#"{"n":1}"#.to_owned())]);
}

#[test]
fn a_call_in_json_is_understood() {
    for (text, arguments) in [
        (r#"{"name": "weather", "arguments": {"city": "a", "days": 1.0}}"#, r#"{"city": "a", "days": 1.0}"#),
        (r#"{"name": "weather", "arguments": "{\"city\":1}"}"#, r#"{"city":1}"#),
        (r#"{"name": "weather"}"#, "{}"),
    ] {
        for text in [format!("<tool_call>\n{text}\n</tool_call>"), format!("<tool_call>{text}")] {
            let got = parse(&text);
            assert_eq!(got.calls, [("weather".to_owned(), arguments.to_owned())], "{text}");
            assert_eq!(got.text, "");
        }
    }
}

#[test]
fn markup_that_is_no_call_is_text() {
    for text in [
        "<tool_call>hello</tool_call>",
        "<tool_call>\n</tool_call>",
        "<tool_call>{\"name\": }</tool_call> x",
        "<tool_call>[1]",
        "<tool_call>\n<function=>",
        "see <tool_call>",
        "a <tool_ca",
    ] {
        let got = parse(text);
        assert_eq!((got.text.as_str(), got.calls.len()), (text, 0));
    }
}

#[test]
fn a_limit_inside_a_call_leaves_what_was_sent() {
    let cut = |text: &str| parse_pieces([text], false, true);
    let open = "<tool_call>\n<function=weather>\n<parameter=city>\n";
    assert_eq!(cut(&format!("{open}Br")).calls[0].1, r#"{"city":"Br"#);
    assert_eq!(cut(&open[..30]).calls, [("weather".to_owned(), String::new())]);
    for end in [11, 13, 25] {
        assert_eq!(cut(&open[..end]), Folded::default(), "{}", &open[..end]);
    }
}

/// Text that is dense in markup, whole and broken.
fn markup() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "weather",
        ">",
        "</function>",
        "<parameter=",
        "city",
        "days",
        "note",
        "</parameter>",
        "\n",
        " ",
        "<",
        "</",
        "{",
        "}",
        "\"",
        "[1]",
        "null",
        "5.0",
        "é",
        "漢",
        "text",
        "{\"name\": \"f\"}",
    ]);
    let value = prop::sample::select(vec!["x", "5", "null", "a\nb", "<", "</parameter", "[1"]);
    let name = prop::sample::select(vec!["city", "days", "note", "other"]);
    let whole = prop::collection::vec((name, value), 0..3).prop_map(|parameters| call(&parameters));
    let any = prop_oneof![6 => piece.prop_map(str::to_owned), 1 => whole];
    prop::collection::vec(any, 0..30).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn any_pieces_equal_the_whole(
        text in markup(), lengths in prop::collection::vec(1usize..9, 1..20), thought: bool, cut: bool,
    ) {
        let chars: Vec<char> = text.chars().collect();
        let mut pieces = Vec::new();
        let mut rest = chars.as_slice();
        for length in lengths.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (piece, after) = rest.split_at(rest.len().min(*length));
            pieces.push(piece.iter().collect::<String>());
            rest = after;
        }
        let whole = parse_pieces([&*text], thought, cut);
        prop_assert_eq!(parse_pieces(pieces.iter().map(String::as_str), thought, cut), whole);
    }

    #[test]
    fn arguments_of_every_finished_call_are_a_json_object(text in markup(), thought: bool) {
        let got = parse_pieces([&*text], thought, false);
        for (i, call) in got.calls.iter().enumerate() {
            prop_assert!(got.arguments(i).is_object(), "{}", call.1);
        }
    }

    #[test]
    fn what_is_sent_before_a_limit_begins_what_would_be_sent_without(text in markup()) {
        let (cut, whole) = (parse_pieces([&*text], false, true), parse_pieces([&*text], false, false));
        prop_assert!(whole.text.starts_with(&cut.text));
        for (cut, whole) in cut.calls.iter().zip(&whole.calls) {
            prop_assert!(whole.1.starts_with(&cut.1));
        }
    }

    #[test]
    fn any_string_survives(value in any::<String>()) {
        prop_assume!(!value.contains("</parameter>") && !value.contains("</function>"));
        prop_assert_eq!(value_of("city", &value), value.clone());
        let other = value_of("unheard", &value);
        prop_assert!(other == value || serde_json::from_str::<Value>(value.trim()).unwrap() == other);
    }
}
