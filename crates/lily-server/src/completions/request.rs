//! The body of a request, field by field; see `chat_completions/request.rs` for the rules.

use lily_engine::constraint::Outline;
use lily_engine::request::{Request, Sampling};
use lily_model::tokenizer::Tokenizer;
use serde_json::{Map, Value};

use crate::app::ServerState;
use crate::chat_completions::{parse_include_usage, parse_return_progress};
use crate::error::ApiError;
use crate::fields::{Fields, OneValue, expected};
use crate::generation::answers;
use crate::generation::format::refused;
use crate::generation::settings::{Names, Settings, parse_n};

/// Documented fields that Lily honours for some values only.
const ONE_VALUE: &[OneValue] = &[("best_of", &["1"], "use n, which gives all answers")];

/// Documented fields that label a request.
const NO_EFFECT: &[&str] = &["user"];

/// The engine knows when there may be none.
const NAMES: Names = Names { max_tokens: &["max_tokens"], least_tokens: 0, stop: "stop" };

/// Tokens generated unless told otherwise, by OpenAI's schema.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Most prompts of a request.
const MAX_PROMPTS: usize = 32;

/// The control tokens between which the model fills in.
const FILL_IN: [&str; 3] = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];

/// A request that was understood.
#[derive(Debug)]
pub(super) struct CompletionRequest {
    prompts: Vec<Prompt>,
    suffix: Option<String>,
    echo: bool,
    settings: Settings,
    n: u32,
    stream: bool,
    include_usage: bool,
    return_progress: bool,
}

#[derive(Clone, Debug)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// What the engine is asked, and how the answers are to be given.
pub(super) struct Prepared {
    /// `n` for each prompt.
    pub requests: Vec<Request>,
    pub n: usize,
    /// What each answer begins with.
    pub echoes: Vec<String>,
    pub stream: bool,
    pub include_usage: bool,
    /// A stream tells how far the prompts are read.
    pub return_progress: bool,
}

impl CompletionRequest {
    /// Reads a body. `defaults` is what sampling fields mean when they are absent.
    pub fn parse(body: &Map<String, Value>, defaults: &Sampling) -> Result<Self, ApiError> {
        let mut fields = Fields::body(body);
        let prompts = parse_prompts(&mut fields)?;
        let mut settings = Settings::parse(&mut fields, &NAMES, defaults)?;
        settings.max_tokens.get_or_insert(DEFAULT_MAX_TOKENS);
        settings.sampling.logprobs = fields.integer("logprobs", 0..=20)?.map(|n| n as u32);
        let echo = fields.boolean("echo")?.unwrap_or(false);
        let suffix = fields.string("suffix")?.filter(|suffix| !suffix.is_empty()).map(str::to_owned);
        if echo && settings.sampling.logprobs.is_some() && suffix.is_some() {
            let problem = "can't be combined with logprobs and a suffix, which changes what the model reads";
            return Err(ApiError::unsupported("echo", problem));
        }
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let include_usage = parse_include_usage(&mut fields, stream)?;
        let return_progress = parse_return_progress(&mut fields, stream)?;
        let n = parse_n(&mut fields)?;
        fields.settle(ONE_VALUE, NO_EFFECT)?;
        Ok(Self { prompts, suffix, echo, settings, n, stream, include_usage, return_progress })
    }

    /// Tokenises the prompts and compiles the grammar.
    pub fn prepare(self, state: &ServerState) -> Result<Prepared, ApiError> {
        let Self { prompts, suffix, echo, settings, n, stream, include_usage, return_progress } = self;
        let grammar = settings.grammar.clone();
        let prompt_logprobs = settings.sampling.logprobs.filter(|_| echo);
        let plain = Request { prompt_logprobs, ..Request::raw(Vec::new(), state.defaults.clone()) };
        let plain = settings.apply(plain);
        let outline = Outline { answer: grammar, calls: None };
        let constraint = state.engine.compile(&outline, &plain.format);
        let constraint = constraint.map_err(|error| refused(error, "grammar", &[]))?;
        let mut prepared = Prepared {
            requests: vec![],
            n: n as usize,
            echoes: vec![],
            stream,
            include_usage,
            return_progress,
        };
        for prompt in prompts {
            let text = if echo { prompt.text(&state.tokenizer) } else { String::new() };
            prepared.echoes.extend((0..n).map(|_| text.clone()));
            let mut ids = prompt.ids(&state.tokenizer);
            if let Some(suffix) = &suffix {
                ids = fill_in(ids, suffix, &state.tokenizer)?;
            }
            let request = Request { prompt: ids, constraint: constraint.clone(), ..plain.clone() };
            prepared.requests.extend(answers(request, n));
        }
        Ok(prepared)
    }
}

impl Prompt {
    fn text(&self, tokenizer: &Tokenizer) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Ids(ids) => tokenizer.decode(ids, false),
        }
    }

    /// Whoever writes a raw prompt may write control tokens.
    fn ids(self, tokenizer: &Tokenizer) -> Vec<u32> {
        match self {
            Self::Text(text) => tokenizer.encode_with_control(&text),
            Self::Ids(ids) => ids,
        }
    }
}

/// The prompt for what stands between `prefix` and `suffix`.
fn fill_in(prefix: Vec<u32>, suffix: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>, ApiError> {
    let [Some(before), Some(after), Some(middle)] = FILL_IN.map(|name| tokenizer.control_id(name)) else {
        let problem = format!("this model's tokenizer lacks {}", FILL_IN.join(", "));
        return Err(ApiError::unsupported("suffix", problem));
    };
    let suffix = tokenizer.encode_with_control(suffix);
    Ok([vec![before], prefix, vec![after], suffix, vec![middle]].concat())
}

/// A text, ids, or an array of texts or of arrays of ids.
fn parse_prompts(fields: &mut Fields<'_>) -> Result<Vec<Prompt>, ApiError> {
    const WHAT: &str = "a string, token ids, or an array of either";
    let value = fields.any("prompt").ok_or_else(|| fields.missing("prompt"))?;
    let prompts = match value {
        Value::String(text) => vec![Prompt::Text(text.clone())],
        Value::Array(items) if items.first().is_some_and(Value::is_number) => {
            vec![Prompt::Ids(parse_ids("prompt", items)?)]
        }
        Value::Array(items) => {
            let prompt = |(i, item): (usize, &Value)| match item {
                Value::String(text) => Ok(Prompt::Text(text.clone())),
                Value::Array(ids) => Ok(Prompt::Ids(parse_ids(&format!("prompt[{i}]"), ids)?)),
                other => Err(expected(&format!("prompt[{i}]"), "a string or token ids", other)),
            };
            items.iter().enumerate().map(prompt).collect::<Result<_, _>>()?
        }
        other => return Err(expected("prompt", WHAT, other)),
    };
    match prompts.len() {
        1..=MAX_PROMPTS => Ok(prompts),
        found => {
            let problem = format!("expected 1 to {MAX_PROMPTS} prompts, found {found}");
            Err(ApiError::field("prompt", problem))
        }
    }
}

/// Token ids; the engine knows which there are.
pub(crate) fn parse_ids(path: &str, items: &[Value]) -> Result<Vec<u32>, ApiError> {
    let id = |(i, item): (usize, &Value)| {
        let id = item.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| expected(&format!("{path}[{i}]"), "a token id", item))
    };
    items.iter().enumerate().map(id).collect()
}

#[cfg(test)]
mod tests {
    use lily_engine::testing::greedy;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::generation::tests::{any_json, check_fields};

    fn parse(fields: Value) -> Result<String, ApiError> {
        let mut body = json!({"prompt": "x"});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let request = CompletionRequest::parse(body.as_object().unwrap(), &greedy())?;
        Ok(format!("{request:?}"))
    }

    #[test]
    fn every_documented_field_acts_or_is_refused() {
        let fields = [
            ("best_of", json!(2)),
            ("cache_prompt", json!(false)),
            ("echo", json!(true)),
            ("frequency_penalty", json!(1)),
            ("grammar", json!("root ::= \"x\"")),
            ("ignore_eos", json!(true)),
            ("logit_bias", json!({"3": 1})),
            ("logprobs", json!(0)),
            ("max_tokens", json!(3)),
            ("min_p", json!(0.1)),
            ("n", json!(2)),
            ("presence_penalty", json!(1)),
            ("prompt", json!("y")),
            ("repetition_penalty", json!(1.1)),
            ("return_progress", json!(true)),
            ("seed", json!(3)),
            ("stop", json!("x")),
            ("stream", json!(true)),
            ("stream_options", json!({"include_usage": true})),
            ("suffix", json!("y")),
            ("temperature", json!(0.5)),
            ("top_k", json!(3)),
            ("top_p", json!(0.5)),
            ("user", json!("u")),
        ];
        check_fields("CompletionRequest", parse, NO_EFFECT, &fields);
    }

    proptest! {
        #[test]
        fn whatever_a_field_holds_the_error_points_into_it(
            name in prop::sample::select(vec![
                "prompt", "suffix", "echo", "logprobs", "n", "stream_options", "grammar",
            ]),
            value in any_json(),
        ) {
            if let Err(error) = parse(json!({name: value})) {
                let param = error.param.unwrap();
                prop_assert!(param.starts_with(name), "{param} for {name}");
                prop_assert!(error.message.starts_with(&param));
            }
        }
    }
}
