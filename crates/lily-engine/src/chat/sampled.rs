//! Tool calls as the model wrote them.
//!
//! A client sends a call back as JSON, and what the template makes of that is not always what the model wrote: the
//! order of the parameters, the spaces in a value, the form of a number may be others. The prompt would part there
//! from what was read, and all behind it would be read again. So the tokens of a call are remembered by its id, and
//! take its place in the next prompt, if the parser reads the same call in both.

use std::sync::{Arc, Mutex, PoisonError};

use lily_model::tokenizer::Tokenizer;
use lru::LruCache;
use serde_json::Value;

use crate::output::{integral, read_call, tags};
use crate::request::{SampledCall, Tool};

/// Bytes that a call takes beside its tokens, roughly.
const OVERHEAD: usize = 200;

/// Tool calls by their ids, in bounded memory: those that were not asked for the longest go first.
#[derive(Debug)]
pub struct SampledCalls {
    calls: Mutex<Kept>,
    /// Most bytes.
    limit: usize,
}

#[derive(Debug)]
struct Kept {
    tokens: LruCache<String, Arc<[u32]>>,
    bytes: usize,
}

/// A call that a conversation has, as it was sampled.
struct Remembered {
    tokens: Arc<[u32]>,
    call: (String, Value),
}

impl Default for SampledCalls {
    /// Room for the calls of many conversations: those of one as long as the context take 1 MiB.
    fn default() -> Self {
        Self::new(16 << 20)
    }
}

impl SampledCalls {
    /// None yet. They may take `limit` bytes; 0: none are kept.
    pub fn new(limit: usize) -> Self {
        Self { calls: Mutex::new(Kept { tokens: LruCache::unbounded(), bytes: 0 }), limit }
    }

    /// Keeps a call.
    pub fn remember(&self, call: SampledCall) {
        let mut kept = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let size = |tokens: &[u32]| OVERHEAD + size_of_val(tokens);
        kept.bytes += size(&call.tokens);
        if let Some(before) = kept.tokens.put(call.id, call.tokens.into()) {
            kept.bytes -= size(&before);
        }
        while kept.bytes > self.limit
            && let Some((_, oldest)) = kept.tokens.pop_lru()
        {
            kept.bytes -= size(&oldest);
        }
    }

    /// A prompt with the calls of its messages as they were sampled, where these are remembered and mean the same.
    /// `tools` are those of the request.
    pub(super) fn restore(
        &self,
        prompt: Vec<u32>,
        messages: &[Value],
        tools: &Arc<[Tool]>,
        tokenizer: &Tokenizer,
    ) -> Vec<u32> {
        let remembered = self.of(messages, tools, tokenizer);
        let mut left = remembered.as_slice();
        let (Some(open), Some(close)) = (tokenizer.control_id(tags::OPEN), tokenizer.control_id(tags::CLOSE))
        else {
            return prompt;
        };
        let mut restored = Vec::with_capacity(prompt.len());
        let mut rest = prompt.as_slice();
        // Only a template writes these tokens: text that spells them stays text.
        while !left.is_empty()
            && let Some(start) = rest.iter().position(|&id| id == open)
            && let Some(length) = rest[start + 1..].iter().position(|&id| id == close)
        {
            let (before, after) = rest.split_at(start + 1);
            let (rendered, after) = after.split_at(length);
            let call = read_call(&tokenizer.decode(rendered, false), tools);
            let found = call.and_then(|call| left.iter().position(|other| is_same(&call, &other.call)));
            restored.extend_from_slice(before);
            restored.extend_from_slice(found.map_or(rendered, |i| &*left[i].tokens));
            left = found.map_or(left, |i| &left[i + 1..]);
            rest = after;
        }
        restored.extend_from_slice(rest);
        restored
    }

    /// Those of the messages' calls that are remembered, in order.
    fn of(&self, messages: &[Value], tools: &Arc<[Tool]>, tokenizer: &Tokenizer) -> Vec<Remembered> {
        let calls = messages.iter().filter_map(|message| message["tool_calls"].as_array()).flatten();
        let mut kept = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let tokens = calls.filter_map(|call| kept.tokens.get(call["id"].as_str()?).map(Arc::clone));
        let tokens: Vec<Arc<[u32]>> = tokens.collect();
        drop(kept);
        let read = |tokens: Arc<[u32]>| {
            let call = read_call(&tokenizer.decode(&tokens, false), tools)?;
            Some(Remembered { tokens, call })
        };
        tokens.into_iter().filter_map(read).collect()
    }
}

/// Whether two calls have the same name and equal arguments.
fn is_same(one: &(String, Value), other: &(String, Value)) -> bool {
    one.0 == other.0 && are_equal(&one.1, &other.1)
}

/// Whether two values are equal as JSON has it: the order of members means nothing, nor does the form of a number.
fn are_equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| are_equal(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            let is_in_other = |(name, value)| other.get(name).is_some_and(|other| are_equal(value, other));
            one.len() == other.len() && one.iter().all(is_in_other)
        }
        (Value::Number(_), Value::Number(_)) => {
            let integer = |number: &Value| integral(number).or_else(|| number.as_i64());
            one == other || integer(one).is_some_and(|value| integer(other) == Some(value))
        }
        _ => one == other,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::{tokenizer, tokens};

    fn call(id: &str, text: &str) -> SampledCall {
        SampledCall { id: id.to_owned(), tokens: tokens(text) }
    }

    /// Messages with calls of these ids.
    fn messages(ids: &[&str]) -> Vec<Value> {
        ids.iter().map(|id| json!({"role": "assistant", "tool_calls": [{"id": id}]})).collect()
    }

    fn restored(calls: &SampledCalls, ids: &[&str], prompt: &str) -> String {
        let (tokenizer, tools): (_, Arc<[Tool]>) = (tokenizer(), Arc::new([]));
        let prompt = calls.restore(tokens(prompt), &messages(ids), &tools, &tokenizer);
        tokenizer.decode(&prompt, false)
    }

    fn markup(name: &str, parameters: &[(&str, &str)]) -> String {
        let parameters: String =
            parameters.iter().map(|(k, v)| format!("<parameter={k}>\n{v}\n</parameter>\n")).collect();
        format!("\n<function={name}>\n{parameters}</function>\n")
    }

    #[test]
    fn values_are_equal_in_any_order_and_form() {
        let equal = |one: &str, other: &str| {
            let [one, other] = [one, other].map(|text| serde_json::from_str::<Value>(text).unwrap());
            are_equal(&one, &other)
        };
        for (one, other) in [
            (r#"{"a": 1, "b": [{"c": 2, "d": "\u00e9"}]}"#, r#"{"b":[{"d":"é","c":2.0}],"a":1e0}"#),
            ("-3", "-3.0"),
            ("0.1", "1e-1"),
            ("18446744073709551615", "18446744073709551615"),
        ] {
            assert!(equal(one, other) && equal(other, one), "{one} {other}");
        }
        for (one, other) in [
            (r#"{"a": 1}"#, r#"{"a": 1, "b": null}"#),
            (r#"{"a": 1}"#, r#"{"b": 1}"#),
            ("[1, 2]", "[2, 1]"),
            ("[1]", "[1, 2]"),
            ("1", r#""1""#),
            ("9007199254740993", "9007199254740992.0"),
            ("1", "1.5"),
            ("null", "{}"),
        ] {
            assert!(!equal(one, other) && !equal(other, one), "{one} {other}");
        }
    }

    #[test]
    fn a_call_is_restored_where_the_prompt_has_it_in_other_words() {
        let calls = SampledCalls::new(1 << 20);
        let sampled = markup("f", &[("b", "[1,2]"), ("a", "x")]);
        calls.remember(call("one", &sampled));
        let rendered = markup("f", &[("a", "x"), ("b", "[1, 2]")]);
        let changed = markup("f", &[("a", "y"), ("b", "[1, 2]")]);
        let other = markup("g", &[("a", "x"), ("b", "[1, 2]")]);
        let prompt = |text: &str| format!("see <tool_call></tool_call> <tool_call>{text}</tool_call> done");
        assert_eq!(restored(&calls, &["one"], &prompt(&rendered)), prompt(&sampled));
        for unlike in [&changed, &other] {
            assert_eq!(restored(&calls, &["one"], &prompt(unlike)), prompt(unlike));
        }
        assert_eq!(
            restored(&calls, &["two"], &prompt(&rendered)),
            prompt(&rendered),
            "an id that is not known"
        );
        assert_eq!(restored(&calls, &[], &prompt(&rendered)), prompt(&rendered));
    }

    #[test]
    fn calls_that_mean_the_same_are_told_apart_by_their_order() {
        let calls = SampledCalls::new(1 << 20);
        let forms = ["{\"x\":1}", "{\"x\" :1}", "{ \"x\":1}"].map(|value| markup("f", &[("a", value)]));
        for (id, form) in ["1", "2", "3"].into_iter().zip(&forms) {
            calls.remember(call(id, form));
        }
        let rendered = markup("f", &[("a", "{\"x\": 1}")]);
        let changed = markup("f", &[("a", "{\"x\": 2}")]);
        let prompt = |calls: [&str; 3]| calls.map(|call| format!("<tool_call>{call}</tool_call>")).concat();
        assert_eq!(
            restored(&calls, &["1", "2", "3"], &prompt([&rendered; 3])),
            prompt(forms.each_ref().map(|form| &**form))
        );
        assert_eq!(
            restored(&calls, &["1", "2", "3"], &prompt([&rendered, &changed, &rendered])),
            prompt([&forms[0], &changed, &forms[1]]),
            "any that means the same will do"
        );
    }

    #[test]
    fn memory_is_bounded_and_what_is_used_stays() {
        let size = OVERHEAD + 100 * size_of::<u32>();
        let calls = SampledCalls::new(2 * size);
        let kept = || {
            let kept = calls.calls.lock().unwrap();
            let mut ids: Vec<String> = kept.tokens.iter().map(|(id, _)| id.clone()).collect();
            assert_eq!(kept.bytes, ids.len() * size);
            ids.sort();
            ids
        };
        for id in ["a", "b", "b"] {
            calls.remember(call(id, &"x".repeat(100)));
        }
        assert_eq!(kept(), ["a", "b"]);
        restored(&calls, &["a"], "");
        calls.remember(call("c", &"x".repeat(100)));
        assert_eq!(kept(), ["a", "c"]);
        calls.remember(call("long", &"x".repeat(1000)));
        assert_eq!(kept(), [""; 0], "one that never fits leaves nothing behind");
        let none = SampledCalls::new(0);
        none.remember(call("a", "x"));
        assert!(none.calls.lock().unwrap().tokens.is_empty());
    }
}
