//! A loaded model with its engine.

use std::num::NonZero;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lily_engine::chat::{Chat, chat_request};
use lily_engine::output::Delta;
use lily_engine::request::{Event, Finished, Request, Sampling};
use lily_engine::scheduler::{self, Engine};
use lily_model::config::Config;
use lily_model::generation::GenerationDefaults;
use lily_model::load::Model;

use crate::args::{Generation, Global, UsageError};
use crate::device::{self, Size};
use crate::interrupt::Interrupts;
use crate::progress;
use crate::source::Source;

/// Context unless told otherwise: enough for an agent, 1.4 GB of state a sequence with the real model.
const CONTEXT: u32 = 32_768;
/// Tokens of a prompt that one step reads while others write, at most.
const SHARED_PREFILL_CHUNK: u32 = 128;
/// Tokens between two snapshots of a long prompt: what is read again at most where a text was edited.
const SNAPSHOT_INTERVAL: u32 = 2048;
/// Requests that may wait.
const MAX_QUEUE: usize = 64;

/// A loaded model with its engine.
pub struct Session {
    /// The model.
    pub model: Model,
    /// Its name.
    pub name: String,
    /// The thread that runs it.
    pub engine: Engine,
    /// What loading took.
    pub load_time: Duration,
}

/// How following a generation ended.
pub enum End {
    /// By itself.
    Finished(Finished),
    /// By Ctrl-C.
    Interrupted,
}

impl Session {
    /// Loads the model and starts its engine, with `cache_bytes` for the prefix cache on top of the memory for
    /// `max_sequences` sequences. `chunk`: tokens of a prompt that one step reads, if not what suits the device.
    pub fn start(
        global: &Global,
        ctx_size: Option<u32>,
        chunk: Option<u32>,
        max_sequences: u32,
        cache_bytes: u64,
    ) -> Result<Self> {
        let start = Instant::now();
        let source = Source::new(global)?;
        let context = context(ctx_size, &source.config()?)?;
        let model = source.load()?;
        let size = Size { context, sequences: max_sequences, snapshot_bytes: cache_bytes, chunk };
        let backend = device::open(global, &model.config, &model.weights, size)?;
        let limits = backend.limits();
        let chunk = device::chunk(limits, max_sequences);
        tracing::info!(
            device = limits.name,
            context,
            max_sequences,
            chunk,
            state_bytes = limits.state_budget,
            cache_bytes,
            "{} is loaded",
            source.name
        );
        let options = scheduler::Options {
            max_sequences: max_sequences as usize,
            max_queue: MAX_QUEUE,
            prefill_chunk: chunk,
            shared_prefill_chunk: SHARED_PREFILL_CHUNK.min(chunk),
            cache_bytes,
            snapshot_interval: SNAPSHOT_INTERVAL,
            eos: model.generation.eos_token_ids.clone(),
        };
        let engine = Engine::start(backend, model.tokenizer.clone(), options);
        Ok(Self { model, name: source.name, engine, load_time: start.elapsed() })
    }

    /// Sampling with what the command line leaves open taken from the model.
    pub fn sampling(&self, given: &Generation) -> Sampling {
        let defaults = default_sampling(&self.model.generation);
        Sampling {
            temperature: given.temperature.unwrap_or(defaults.temperature),
            top_k: given.top_k.unwrap_or(defaults.top_k),
            top_p: given.top_p.unwrap_or(defaults.top_p),
            min_p: given.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: given.repeat_penalty.unwrap_or(defaults.repetition_penalty),
            seed: given.seed,
            ..defaults
        }
    }

    /// A request for the next turn of a conversation.
    pub fn chat_request(&self, chat: &Chat, given: &Generation) -> Result<Request> {
        let (template, tokenizer) = (&self.model.template, &self.model.tokenizer);
        let request = chat_request(chat, template, tokenizer, None, self.sampling(given))?;
        Ok(Request { max_tokens: given.max_tokens, stop: given.stop.clone(), ..request })
    }

    /// Generates until the end or Ctrl-C. `sink` gets the output piece by piece.
    pub async fn generate(
        &self,
        request: Request,
        interrupts: &Interrupts,
        mut sink: impl FnMut(Delta) -> Result<()>,
    ) -> Result<End> {
        let reading = progress::counted(request.prompt.len() as u64, "reading the prompt", "tokens");
        let mut generation = self.engine.submit(request)?;
        loop {
            let event = tokio::select! {
                biased;
                () = interrupts.first() => {
                    reading.finish_and_clear();
                    return Ok(End::Interrupted);
                }
                event = generation.events.recv() => event,
            };
            match event {
                Some(Event::Prefill { done, .. }) => reading.set_position(done.into()),
                Some(Event::Delta(delta)) => {
                    reading.finish_and_clear();
                    sink(delta)?;
                }
                Some(
                    Event::Started
                    | Event::InterToken(_)
                    | Event::PromptToken { .. }
                    | Event::Token { .. }
                    | Event::Call(_),
                ) => {}
                Some(Event::Finished(finished)) => {
                    reading.finish_and_clear();
                    log_speed(&finished);
                    return Ok(End::Finished(finished));
                }
                Some(Event::Failed(error)) => bail!(error),
                None => bail!("the engine stopped before the answer was complete"),
            }
        }
    }
}

/// Sampling as the model's makers want it.
pub fn default_sampling(defaults: &GenerationDefaults) -> Sampling {
    Sampling {
        temperature: defaults.temperature,
        top_k: defaults.top_k,
        top_p: defaults.top_p,
        min_p: defaults.min_p,
        repetition_penalty: defaults.repetition_penalty,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: [].into(),
        seed: None,
        logprobs: None,
    }
}

/// The context to use, which must not exceed the model's.
pub fn context(asked: Option<u32>, config: &Config) -> Result<u32> {
    let limit = u32::try_from(config.max_context).unwrap_or(u32::MAX);
    match asked {
        None => Ok(CONTEXT.min(limit)),
        Some(n) if n <= limit => Ok(n),
        Some(n) => bail!(UsageError(format!(
            "a context of {n} tokens is too long: the model was made for at most {limit}"
        ))),
    }
}

/// Tokens a second while reading the prompt, and while writing.
pub fn speeds(finished: &Finished) -> (Option<f64>, Option<f64>) {
    let per_second = |tokens: u32, time: Duration| {
        (tokens > 0 && !time.is_zero()).then(|| f64::from(tokens) / time.as_secs_f64())
    };
    let usage = &finished.usage;
    let read = usage.prompt_tokens - usage.cached_tokens.min(usage.prompt_tokens);
    // The first token comes out of the prefill.
    let written = usage.completion_tokens.saturating_sub(1);
    (per_second(read, finished.timing.prefill), per_second(written, finished.timing.decode))
}

fn log_speed(finished: &Finished) {
    let speed = |speed: Option<f64>| speed.map_or_else(|| "-".to_owned(), |s| format!("{s:.1}"));
    let (prefill, decode) = speeds(finished);
    tracing::info!(
        prompt_tokens = finished.usage.prompt_tokens,
        cached_tokens = finished.usage.cached_tokens,
        completion_tokens = finished.usage.completion_tokens,
        prefill_tokens_per_second = speed(prefill),
        decode_tokens_per_second = speed(decode),
        "finished"
    );
}

/// A runtime for the commands that wait for an engine and for signals. Requests are made ready on its blocking threads,
/// which is computing: more of them than there are cores would only hold memory, each its own.
pub fn runtime() -> Result<tokio::runtime::Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(cores.max(4))
        .enable_all()
        .build();
    runtime.context("can't start threads")
}
