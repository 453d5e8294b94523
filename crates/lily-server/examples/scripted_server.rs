//! A server for tests of clients: `scripted_server FILE` answers from a script, a JSON array of
//! `{"when": TEXT, "reply": TEXT}`. A prompt gets the first reply whose `when` it contains, both with control tokens
//! spelled out; a thought is open where the reply begins, unless the request turns thinking off. What is asked in
//! which order doesn't matter, since agents also ask on the side.

use std::error::Error;
use std::sync::Arc;
use std::{env, fs};

use lily_engine::scheduler::{Engine, Options};
use lily_engine::testing::{Act, FakeBackend, greedy, limits, options, say, tokenizer, tokens};
use lily_model::backend::Limits as BackendLimits;
use lily_model::template::ChatTemplate;
use lily_server::app::{Limits, ServerState, unix_time};
use lily_server::metrics::Metrics;
use lily_server::serve::{DEFAULT_HOST, bind, serve};
use serde_json::Value;

const TEMPLATE: &str = include_str!("../../lily-model/tests/data/qwen3.6/chat_template.jinja");

/// Tokens of the longest conversation: a token is a byte, and agents send long instructions.
const CONTEXT: u32 = 1 << 20;
/// Tokens of all requests that run.
const RUNNING: u64 = 4 * CONTEXT as u64;
/// Tokens of the prefix cache.
const CACHE: u64 = 32 * CONTEXT as u64;

/// What a prompt must contain, and the reply to it.
type Rules = Vec<(Vec<u32>, Vec<Act>)>;

fn rules(script: &str) -> Result<Rules, Box<dyn Error>> {
    let script: Vec<Value> = serde_json::from_str(script)?;
    let text = |rule: &Value, name: &str| {
        rule[name].as_str().map(str::to_owned).ok_or_else(|| format!("{rule} has no text `{name}`"))
    };
    script.iter().map(|rule| Ok((tokens(&text(rule, "when")?), say(&text(rule, "reply")?)))).collect()
}

/// The reply to a prompt. One that no rule is for is a failure of the device, which the client is told.
fn reply(rules: &Rules, prompt: &[u32]) -> Vec<Act> {
    let contained = |text: &[u32]| text.is_empty() || prompt.windows(text.len()).any(|part| part == text);
    match rules.iter().find(|(when, _)| contained(when)) {
        Some((_, reply)) => reply.clone(),
        None => vec![Act::Fail("the script has no reply to this prompt".to_owned())],
    }
}

fn engine(rules: Rules) -> Engine {
    let chunk = 2048;
    let limits = BackendLimits {
        context: CONTEXT,
        max_batch_tokens: 2 * chunk,
        state_budget: RUNNING + CACHE,
        ..limits()
    };
    let options = Options {
        prefill_chunk: chunk,
        shared_prefill_chunk: chunk,
        cache_bytes: CACHE,
        snapshot_interval: chunk,
        ..options()
    };
    let backend = FakeBackend::scripted(limits, move |prompt| reply(&rules, prompt));
    Engine::start(Box::new(backend), Arc::new(tokenizer()), options)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stderr).init();
    let file = env::args().nth(1).ok_or("usage: scripted_server FILE")?;
    let state = ServerState {
        engine: engine(rules(&fs::read_to_string(file)?)?),
        tokenizer: Arc::new(tokenizer()),
        template: Arc::new(ChatTemplate::new(TEMPLATE)?),
        model: "scripted".to_owned(),
        defaults: greedy(),
        api_key: None,
        hosts: Vec::new(),
        origins: Vec::new(),
        tls: None,
        traces: None,
        calls: Arc::default(),
        metrics: Metrics::new("scripted")?,
        created: unix_time(),
        limits: Limits::default(),
    };
    let listener = bind(DEFAULT_HOST, 0).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let interrupted = async {
        if let Err(error) = tokio::signal::ctrl_c().await {
            tracing::error!(%error, "Ctrl-C can't be waited for");
        }
    };
    serve(listener, Arc::new(state), interrupted).await?;
    Ok(())
}
