//! A server for tests of clients: whatever it is asked, its model first calls a tool and then answers.
//! `tests/clients/test_tool_calls.py` knows the words.

use std::sync::Arc;

use lily_engine::scheduler::Engine;
use lily_engine::testing::{FakeBackend, greedy, limits, options, say, tokenizer};
use lily_model::template::ChatTemplate;
use lily_server::app::{Limits, ServerState, unix_time};
use lily_server::metrics::Metrics;
use lily_server::serve::{DEFAULT_HOST, bind, serve};

const TEMPLATE: &str = include_str!("../../lily-model/tests/data/qwen3.6/chat_template.jinja");

const CALL: &str = "I need the weather.\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBrno\n\
    </parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>";
const ANSWER: &str = "Sunny, then.\n</think>\n\nIt is sunny in Brno.";

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let mut replies = [CALL, ANSWER].into_iter();
    let backend = FakeBackend::scripted(limits(), move |_| say(replies.next().unwrap_or(ANSWER)));
    let tokenizer = Arc::new(tokenizer());
    let state = ServerState {
        engine: Engine::start(Box::new(backend), Arc::clone(&tokenizer), options()),
        tokenizer,
        template: Arc::new(ChatTemplate::new(TEMPLATE)?),
        model: "scripted".to_owned(),
        defaults: greedy(),
        api_key: None,
        hosts: Vec::new(),
        origins: Vec::new(),
        tls: None,
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
