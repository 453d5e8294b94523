//! What a reply is held to: grammars, and which tokens they allow next.
//!
//! An [`Outline`] says what a reply may consist of. The [`Compiler`] makes a [`Constraint`] of it, which costs
//! milliseconds and is where a broken schema or grammar shows. While a reply is generated, a copy of the
//! constraint follows the tokens that were drawn ([`masks`]) and gives the mask for the next one.

pub(crate) mod calls;
mod gbnf;
mod lark;
pub(crate) mod masks;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::thread;

use lily_model::tokenizer::Tokenizer;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

pub use calls::{Callable, Calls};

/// What a text must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Rule {
    /// JSON that a JSON schema allows.
    JsonSchema(Value),
    /// Text that a regular expression, in the syntax of the crate `regex`, matches from end to end.
    Regex(String),
    /// Text of a grammar in llguidance's dialect of Lark, whose first rule is `start`.
    Lark(String),
    /// Text of a grammar in llama.cpp's form, whose first rule is `root`.
    Gbnf(String),
}

/// What a reply may consist of, after its thought.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outline {
    /// What the answer must be; `None`: any text.
    pub answer: Option<Rule>,
    /// What calls must be; `None`: none may be made in place of an answer that is held to a rule, and calls
    /// beside free text are not held to anything.
    pub calls: Option<Calls>,
}

/// A rule or a tool that can't be held to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{problem}")]
pub struct ConstraintError {
    /// Index of the tool at fault; `None`: the answer's rule is.
    pub tool: Option<usize>,
    /// Where and what.
    pub problem: String,
}

/// When the grammar begins to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// With the first token that is not part of the thought.
    Answer,
    /// Behind the opening tag of every tool call, to the end of the call.
    Call,
}

/// A compiled [`Outline`]. Clones are independent.
#[derive(Clone)]
pub struct Constraint {
    pub(crate) start: Start,
    /// At its beginning.
    matcher: Arc<Matcher>,
    /// All tokens but those that end a turn.
    pub(crate) unfinished: Arc<[u32]>,
}

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").field("start", &self.start).finish_non_exhaustive()
    }
}

impl Constraint {
    /// A matcher at the beginning of the grammar.
    pub(crate) fn matcher(&self) -> Matcher {
        self.matcher.deep_clone()
    }
}

/// Compiles outlines for one tokenizer. What all grammars share is made when the first one comes.
pub(crate) struct Compiler {
    tokenizer: Arc<Tokenizer>,
    vocab_size: u32,
    eos: Vec<u32>,
    factory: OnceLock<Result<ParserFactory, String>>,
}

/// Longest schema or grammar, bytes, and the stack that is enough for any of this length. (A level of a schema
/// takes some 40 bytes at least, and up to 28 KB of stack were measured for one.)
const MAX_SOURCE: usize = 128 << 10;
const STACK: usize = 256 << 20;

/// The name under which the wrapping grammar refers to the client's.
const ANSWER: &str = "answer";

/// The client's JSON may be spread over lines, but not padded without end: models that have lost the thread
/// would write white space for ever.
const WHITE_SPACE: &str = r"[ \t]{0,2}|\n[ \t]{0,32}";

impl Compiler {
    /// For rows of `vocab_size` logits; a reply may end with any of `eos`.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab_size: u32, mut eos: Vec<u32>) -> Self {
        eos.retain(|id| *id < vocab_size);
        Self { tokenizer, vocab_size, eos, factory: OnceLock::new() }
    }

    /// Compiles an outline; `None`: it holds a reply to nothing. `after_thought`: the reply begins with a thought,
    /// after which the model leaves an empty line.
    pub fn compile(
        &self,
        outline: &Outline,
        after_thought: bool,
    ) -> Result<Option<Constraint>, ConstraintError> {
        if outline.answer.is_none() && outline.calls.is_none() {
            return Ok(None);
        }
        check_size(outline)?;
        // Rules that refer to one another are followed by recursion: how deep is up to who wrote them.
        thread::scope(|scope| {
            let compile = || self.compile_here(outline, after_thought);
            let thread = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, compile);
            let done = thread.map_err(|error| format!("the system refused a thread to compile it: {error}"));
            let done = done.and_then(|thread| thread.join().map_err(|_| "compiling it failed".to_owned()));
            done.unwrap_or_else(|problem| Err(ConstraintError { tool: None, problem }))
        })
    }

    fn compile_here(
        &self,
        outline: &Outline,
        after_thought: bool,
    ) -> Result<Option<Constraint>, ConstraintError> {
        let error = |tool, problem| ConstraintError { tool, problem };
        let calls = outline.calls.as_ref();
        // Parts on their own first: then an error is about what the client wrote.
        let check = |part| self.matcher(vec![part]).map(drop);
        let markup = calls.map(|calls| calls::Markup::new(calls, &self.tokenizer, &check)).transpose()?;
        let gap = if after_thought { "GAP? " } else { "" };
        let (start, mut grammar) = match (&outline.answer, calls, &markup) {
            (None, Some(calls), Some(markup)) if !calls.required => {
                (Start::Call, format!("start: {}\n{}", markup.opened(), markup.rules()))
            }
            (None, Some(_), Some(markup)) => {
                (Start::Answer, format!("start: {gap}{}\n{}", markup.all(), markup.rules()))
            }
            (Some(_), Some(calls), Some(markup)) if !calls.required => {
                let all = markup.all();
                (Start::Answer, format!("start: {gap}(@{ANSWER} | {all})\n{}", markup.rules()))
            }
            (Some(_), Some(_), _) => {
                let problem = "an answer of this form can't be asked for where a tool call is required";
                return Err(error(None, problem.to_owned()));
            }
            (Some(_), None, _) => (Start::Answer, format!("start: {gap}@{ANSWER}\n")),
            (None, ..) => return Ok(None),
        };
        if after_thought {
            grammar.push_str("GAP: \"\\n\\n\"\n");
        }
        let mut grammars = vec![GrammarWithLexer::from_lark(grammar)];
        if let Some(rule) = &outline.answer {
            let answer = rule.grammar().map_err(|problem| error(None, problem))?;
            check(answer.clone()).map_err(|problem| error(None, problem))?;
            grammars.push(GrammarWithLexer { name: Some(ANSWER.to_owned()), ..answer });
        }
        grammars.extend(markup.into_iter().flat_map(|markup| markup.grammars));
        let matcher = self.matcher(grammars).map_err(|problem| error(None, problem))?;
        Ok(Some(Constraint { start, matcher: Arc::new(matcher), unfinished: self.unfinished() }))
    }

    fn matcher(&self, grammars: Vec<GrammarWithLexer>) -> Result<Matcher, String> {
        let factory = self.factory.get_or_init(|| self.factory().map_err(|error| error.to_string()));
        let factory = factory.as_ref().map_err(Clone::clone)?;
        let parser = factory.create_parser(TopLevelGrammar { grammars, max_tokens: None });
        let matcher = Matcher::new(parser);
        matcher.get_error().map_or(Ok(matcher), |error| Err(plain(&error)))
    }

    fn factory(&self) -> anyhow::Result<ParserFactory> {
        let first_eos = self.eos.first().copied().unwrap_or(llguidance::toktrie::INVALID_TOKEN);
        let words: Vec<Vec<u8>> = (0..self.vocab_size).map(|id| self.word(id)).collect();
        let mut trie = TokTrie::from(&TokRxInfo::new(self.vocab_size, first_eos), &words);
        if !self.eos.is_empty() {
            trie = trie.with_eos_tokens(&self.eos);
        }
        let environment: TokEnv = Arc::new(Environment { trie, tokenizer: Arc::clone(&self.tokenizer) });
        let slices = SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(factory)
    }

    /// Bytes of a token. Control tokens are marked, so that no text of a grammar spells one.
    fn word(&self, id: u32) -> Vec<u8> {
        let bytes = self.tokenizer.token_bytes(id);
        if self.tokenizer.is_control(id) {
            [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
        } else {
            bytes.to_vec()
        }
    }

    fn unfinished(&self) -> Arc<[u32]> {
        let mut mask = vec![u32::MAX; self.vocab_size.div_ceil(32) as usize];
        for &id in &self.eos {
            mask[id as usize / 32] &= !(1 << (id % 32));
        }
        mask.into()
    }
}

impl Rule {
    /// Any JSON object.
    pub fn json_object() -> Self {
        Self::JsonSchema(json!({"type": "object"}))
    }

    /// Of its text, bytes.
    fn len(&self) -> usize {
        match self {
            Self::JsonSchema(schema) => schema.to_string().len(),
            Self::Regex(text) | Self::Lark(text) | Self::Gbnf(text) => text.len(),
        }
    }

    fn grammar(&self) -> Result<GrammarWithLexer, String> {
        match self {
            Self::JsonSchema(schema) => Ok(GrammarWithLexer::from_json_schema(settled(schema, false)?)),
            Self::Regex(pattern) => Ok(GrammarWithLexer::from_regex(pattern)),
            Self::Lark(grammar) => Ok(GrammarWithLexer::from_lark(grammar.clone())),
            Self::Gbnf(grammar) => Ok(GrammarWithLexer::from_lark(gbnf::to_lark(grammar)?)),
        }
    }
}

fn check_size(outline: &Outline) -> Result<(), ConstraintError> {
    let mut sizes: Vec<(Option<usize>, usize)> =
        outline.answer.iter().map(|rule| (None, rule.len())).collect();
    for (i, callable) in outline.calls.iter().flat_map(|calls| &calls.tools).enumerate() {
        sizes.push((Some(i), callable.tool.parameters.to_string().len()));
        sizes.extend(callable.text.iter().map(|rule| (Some(i), rule.len())));
    }
    match sizes.into_iter().find(|(_, size)| *size > MAX_SOURCE) {
        None => Ok(()),
        Some((tool, size)) => {
            let problem =
                format!("expected at most {MAX_SOURCE} bytes of a schema or a grammar, found {size}");
            Err(ConstraintError { tool, problem })
        }
    }
}

/// A schema with our settings for it. `lenient`: keywords that can't be held to are passed over.
fn settled(schema: &Value, lenient: bool) -> Result<Value, String> {
    let mut schema = match schema {
        Value::Object(schema) => schema.clone(),
        Value::Bool(true) => serde_json::Map::new(),
        other => return Err(format!("a JSON schema is an object, found {other}")),
    };
    let settings =
        json!({"whitespace_flexible": true, "whitespace_pattern": WHITE_SPACE, "lenient": lenient});
    schema.insert("x-guidance".to_owned(), settings);
    Ok(Value::Object(schema))
}

/// llguidance's words without its markers.
fn plain(error: &str) -> String {
    error.replace("<non-verbose/>", "").trim().to_owned()
}

/// The vocabulary as llguidance sees it.
struct Environment {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    /// As the model would have read it. What the tokenizer would change (it normalises) is cut greedily.
    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let ids = str::from_utf8(bytes).map(|text| self.tokenizer.encode_text(text)).unwrap_or_default();
        let spelled = ids.iter().flat_map(|&id| self.tokenizer.token_bytes(id));
        if spelled.eq(bytes) { ids } else { self.trie.greedy_tokenize(bytes) }
    }
}

#[cfg(test)]
mod tests;
