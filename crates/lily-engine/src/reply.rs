//! The text of one reply: bytes of tokens in, deltas out.

use std::sync::Arc;

use crate::detokenize::Detokenizer;
use crate::output::{Delta, OutputParser};
use crate::request::OutputFormat;
use crate::stop::StopMatcher;

/// Everything that lies between the tokens of a reply and its deltas.
#[derive(Debug)]
pub(crate) struct Reply {
    detokenizer: Detokenizer,
    /// `None`: all text is the answer.
    parser: Option<OutputParser>,
    stop: StopMatcher,
}

/// What a step of a reply gave.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Progress {
    pub deltas: Vec<Delta>,
    /// A stop string was met; nothing may follow.
    pub stopped: bool,
}

impl Reply {
    pub fn new(format: &OutputFormat, stop: &[String]) -> Self {
        let parser = match format {
            OutputFormat::Raw => None,
            OutputFormat::Chat { starts_in_thought, tools, single_call } => {
                Some(OutputParser::new(*starts_in_thought, Arc::clone(tools), *single_call))
            }
        };
        Self { detokenizer: Detokenizer::default(), parser, stop: StopMatcher::new(stop) }
    }

    /// Whether the reply so far ends inside the thought.
    pub fn in_thought(&self) -> bool {
        self.parser.as_ref().is_some_and(OutputParser::in_thought)
    }

    /// Whether the reply holds a tool call.
    pub fn has_calls(&self) -> bool {
        self.parser.as_ref().is_some_and(|parser| parser.calls() > 0)
    }

    /// Whether the reply so far ends inside a tool call.
    pub fn in_call(&self) -> bool {
        self.parser.as_ref().is_some_and(OutputParser::in_call)
    }

    /// Whether the one call that the reply may have is complete.
    pub fn is_complete(&self) -> bool {
        self.parser.as_ref().is_some_and(OutputParser::is_complete)
    }

    /// The stop string that ended the reply.
    pub fn stop_string(&self) -> Option<&str> {
        self.stop.met()
    }

    /// Takes the bytes of a token.
    pub fn push(&mut self, bytes: &[u8]) -> Progress {
        let text = self.detokenizer.push(bytes);
        self.read(&text)
    }

    /// The reply ends: by a limit (`cut`) or by the model.
    pub fn finish(&mut self, cut: bool) -> Progress {
        let text = self.detokenizer.finish();
        let mut progress = self.read(text);
        if progress.stopped {
            return progress;
        }
        if let Some(parser) = &mut self.parser {
            let deltas = parser.finish(cut);
            self.match_stop(deltas, &mut progress);
        }
        if !progress.stopped {
            push_text(&mut progress.deltas, self.stop.flush());
        }
        progress
    }

    fn read(&mut self, text: &str) -> Progress {
        let deltas = match &mut self.parser {
            Some(parser) => parser.push(text),
            None => vec![Delta::Text(text.to_owned())],
        };
        let mut progress = Progress::default();
        self.match_stop(deltas, &mut progress);
        progress
    }

    /// Passes the answer's text through the stop strings, and everything else on.
    fn match_stop(&mut self, deltas: Vec<Delta>, progress: &mut Progress) {
        for delta in deltas {
            match delta {
                Delta::Text(text) => {
                    let (text, stopped) = self.stop.push(&text);
                    push_text(&mut progress.deltas, text);
                    if stopped {
                        progress.stopped = true;
                        return;
                    }
                }
                other => {
                    push_text(&mut progress.deltas, self.stop.flush());
                    progress.deltas.push(other);
                }
            }
        }
    }
}

fn push_text(deltas: &mut Vec<Delta>, text: String) {
    if !text.is_empty() {
        deltas.push(Delta::Text(text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Tool;
    use proptest::prelude::*;
    use serde_json::Value;

    fn chat(thought: bool) -> OutputFormat {
        let tool = Tool { name: "f".into(), parameters: Value::Null };
        OutputFormat::Chat { starts_in_thought: thought, tools: Arc::new([tool]), single_call: false }
    }

    /// Thought, answer, arguments, and whether a stop string was met.
    fn run(
        format: &OutputFormat,
        stop: &[&str],
        bytes: &[u8],
        length: usize,
    ) -> (String, String, String, bool) {
        let stop: Vec<String> = stop.iter().map(|text| text.to_string()).collect();
        let mut reply = Reply::new(format, &stop);
        let (mut thought, mut text, mut arguments) = (String::new(), String::new(), String::new());
        let mut stopped = false;
        let mut take = |progress: Progress| {
            for delta in progress.deltas {
                match delta {
                    Delta::Reasoning(piece) => thought += &piece,
                    Delta::Text(piece) => text += &piece,
                    Delta::ToolCall { .. } => {}
                    Delta::ToolArguments { fragment, .. } => arguments += &fragment,
                }
            }
            stopped |= progress.stopped;
            progress.stopped
        };
        if !bytes.chunks(length).any(|chunk| take(reply.push(chunk))) {
            take(reply.finish(false));
        }
        (thought, text, arguments, stopped)
    }

    #[test]
    fn stop_strings_act_on_the_answer_alone() {
        let text = "a END b</think>\n\n<tool_call>\n<function=f>\n<parameter=x>\nEND\n</parameter>\n</function>\n\
                    </tool_call>\n\nc END d";
        for length in [1, 3, 1000] {
            let (thought, answer, arguments, stopped) = run(&chat(true), &["END"], text.as_bytes(), length);
            assert_eq!(thought, "a END b");
            assert_eq!(arguments, r#"{"x":"END"}"#);
            assert_eq!((answer.as_str(), stopped), ("\n\nc ", true));
        }
    }

    #[test]
    fn text_held_back_for_a_stop_string_comes_before_the_call_that_follows() {
        let mut reply = Reply::new(&chat(false), &["xyz".to_owned()]);
        assert_eq!(reply.push(b"wxy").deltas, [Delta::Text("w".into())]);
        let deltas = reply.push(b"<tool_call><function=f>").deltas;
        assert_eq!(deltas[0], Delta::Text("xy".into()));
        assert!(matches!(deltas[1], Delta::ToolCall { .. }));
    }

    #[test]
    fn a_stop_string_may_complete_at_the_very_end() {
        let (_, text, _, stopped) = run(&chat(false), &["<tool"], b"see <tool", 1);
        assert_eq!((text.as_str(), stopped), ("see ", true));
    }

    #[test]
    fn an_end_inside_a_character_is_shown() {
        let (_, text, ..) = run(&OutputFormat::Raw, &[], &"é漢".as_bytes()[..4], 1);
        assert_eq!(text, "é\u{FFFD}");
    }

    proptest! {
        #[test]
        fn raw_text_equals_a_search_of_the_whole(text in "[ab<é]{0,30}", stop in "[ab<é]{1,4}", length in 1usize..5) {
            let (_, got, _, stopped) = run(&OutputFormat::Raw, &[&stop], text.as_bytes(), length);
            let end = text.find(&stop);
            prop_assert_eq!(got, &text[..end.unwrap_or(text.len())]);
            prop_assert_eq!(stopped, end.is_some());
        }
    }
}
