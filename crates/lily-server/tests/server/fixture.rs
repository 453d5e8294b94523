//! A server whose model follows a script.

use std::future::Future;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lily_engine::scheduler::{Engine, Options, Status};
use lily_engine::testing::{Act, FakeBackend, greedy, limits, options, say, tokenizer};
use lily_model::template::ChatTemplate;
use lily_server::app::{Limits, ServerState, unix_time};
use lily_server::metrics::Metrics;
use lily_server::serve::{DEFAULT_HOST, ServeError, bind, serve};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::http::PATIENCE;

const TEMPLATE: &str = include_str!("../../../lily-model/tests/data/qwen3.6/chat_template.jinja");

/// What the model says, and how fast. A prompt ends inside an open thought unless thinking is off.
pub struct Script {
    /// What is said to the first request, the second, ...; the last is said again.
    replies: Vec<Vec<Act>>,
    prefill_delay: Duration,
    step_delay: Duration,
    options: Options,
}

impl Script {
    pub fn new() -> Self {
        let options = Options { prefill_chunk: 64, ..options() };
        Self { replies: Vec::new(), prefill_delay: Duration::ZERO, step_delay: Duration::ZERO, options }
    }

    /// The next request gets this text.
    pub fn reply(mut self, text: &str) -> Self {
        self.replies.push(say(text));
        self
    }

    /// The next request gets text until its context is full.
    pub fn endless(self) -> Self {
        self.reply(&"a".repeat(limits().context as usize))
    }

    /// The last reply breaks off after so many tokens: the next logits are not finite.
    pub fn non_finite_after(self, tokens: usize) -> Self {
        self.break_off(tokens, Act::NonFinite)
    }

    /// The last reply breaks off after so many tokens: the device fails.
    pub fn device_fails_after(self, tokens: usize) -> Self {
        self.device_says_after(tokens, "unplugged")
    }

    /// As that, in these words.
    pub fn device_says_after(self, tokens: usize, message: &str) -> Self {
        self.break_off(tokens, Act::Fail(message.to_owned()))
    }

    fn break_off(mut self, tokens: usize, act: Act) -> Self {
        let reply = self.replies.last_mut().unwrap();
        reply.truncate(tokens);
        reply.push(act);
        self
    }

    /// The step that reads the end of a prompt takes this long.
    pub fn prefill_delay(self, prefill_delay: Duration) -> Self {
        Self { prefill_delay, ..self }
    }

    /// Every step takes this long.
    pub fn step_delay(self, step_delay: Duration) -> Self {
        Self { step_delay, ..self }
    }

    /// Requests that run and that wait.
    pub fn places(mut self, max_sequences: usize, max_queue: usize) -> Self {
        self.options = Options { max_sequences, max_queue, ..self.options };
        self
    }

    /// So many bytes of state may be kept for prompts that start alike; a token takes one.
    pub fn cache(mut self, cache_bytes: u64) -> Self {
        self.options.cache_bytes = cache_bytes;
        self
    }

    fn start(self) -> Engine {
        let (replies, delay) = (self.replies, self.prefill_delay);
        let mut next = 0;
        let script = move |_: &[u32]| {
            let reply = replies.get(next).or(replies.last()).expect("a reply was written").clone();
            next += 1;
            [vec![Act::Pause(delay)], reply].concat()
        };
        let backend = FakeBackend::scripted(limits(), script).with_step_time(self.step_delay);
        Engine::start(Box::new(backend), Arc::new(tokenizer()), self.options)
    }
}

/// A running server.
pub struct TestServer {
    pub address: SocketAddr,
    state: Arc<ServerState>,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Result<(), ServeError>>,
}

impl TestServer {
    pub async fn start(script: Script) -> Self {
        Self::start_with(script, |_| {}).await
    }

    /// `change` changes the state before the server starts.
    pub async fn start_with(script: Script, change: impl FnOnce(&mut ServerState)) -> Self {
        let mut state = ServerState {
            engine: script.start(),
            tokenizer: Arc::new(tokenizer()),
            template: Arc::new(ChatTemplate::new(TEMPLATE).unwrap()),
            model: "scripted".to_owned(),
            defaults: greedy(),
            api_key: None,
            hosts: Vec::new(),
            origins: Vec::new(),
            tls: None,
            traces: None,
            calls: Arc::default(),
            metrics: Metrics::new("scripted").unwrap(),
            created: unix_time(),
            limits: Limits::default(),
        };
        change(&mut state);
        let state = Arc::new(state);
        let listener = bind(DEFAULT_HOST, 0).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let stopped = async {
            let _ = stopped.await;
        };
        let task = tokio::spawn(serve(listener, Arc::clone(&state), stopped));
        Self { address, state, stop: Some(stop), task }
    }

    pub fn model(&self) -> &str {
        &self.state.model
    }

    pub fn engine(&self) -> &Engine {
        &self.state.engine
    }

    /// Waits until the engine's status is as wanted.
    pub fn wait_for(&self, wanted: impl Fn(&Status) -> bool) -> impl Future<Output = ()> {
        let engine = self.engine().clone();
        async move {
            let start = Instant::now();
            while !wanted(&engine.status()) {
                assert!(start.elapsed() < PATIENCE, "the status stays {:?}", engine.status());
                sleep(Duration::from_millis(1)).await;
            }
        }
    }

    /// Begins to stop.
    pub fn tell_to_stop(&mut self) {
        drop(self.stop.take());
    }

    /// Waits until the server ends by itself.
    pub async fn ended(self) -> Result<(), ServeError> {
        self.task.await.unwrap()
    }

    /// Waits for the end.
    pub async fn stop(mut self) -> Result<(), ServeError> {
        self.tell_to_stop();
        self.task.await.unwrap()
    }
}

/// Collects the log lines of this thread, until the guard is dropped.
pub fn log() -> (tracing::subscriber::DefaultGuard, impl Fn() -> String) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let written = Arc::clone(&lines);
    let writer = move || Written(Arc::clone(&written));
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(writer).finish();
    let guard = tracing::subscriber::set_default(subscriber);
    (guard, move || String::from_utf8(lines.lock().unwrap().clone()).unwrap())
}

struct Written(Arc<Mutex<Vec<u8>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The smallest request.
pub fn question() -> Value {
    json!({"messages": [{"role": "user", "content": "Well?"}]})
}
