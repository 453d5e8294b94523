//! One accepted request, from the queue to its last event.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use lily_model::sample::{SampleParams, Sampled, logprobs};
use lily_model::tokenizer::Tokenizer;
use tokio::sync::mpsc::UnboundedSender;

use super::calls::CallTokens;
use super::{Shared, Stopped};
use crate::guide::{Choice, Guide};
use crate::output::Delta;
use crate::reply::{Progress, Reply};
use crate::request::{Event, FinishReason, Finished, OutputFormat, Request, RequestError, Timing, Usage};

/// A request. However it goes, its last event is `Finished` or `Failed`: dropped before that, it fails with the
/// reason why the engine stopped. (When the client is gone, nobody hears it.)
pub(super) struct Job {
    pub prompt: Vec<u32>,
    params: Arc<SampleParams>,
    /// Tokens that it may grow to, the prompt included.
    pub capacity: u32,
    /// As in [`Request`].
    pub boundaries: Vec<u32>,
    /// As in [`Request`].
    pub cache_prompt: bool,
    prompt_logprobs: Option<u32>,
    ignore_eos: bool,
    /// The token that ends the turn is reported too.
    reports_end: bool,
    reply: Reply,
    calls: CallTokens,
    guide: Option<Guide>,
    usage: Usage,
    submitted: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    events: UnboundedSender<Event>,
    /// `None` after the last event.
    place: Option<Place>,
}

/// A place among the open requests; dropping it gives it back.
pub(super) struct Place {
    shared: Arc<Shared>,
    running: bool,
}

impl Place {
    /// A place that was counted in `open` already.
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared, running: false }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.running {
            self.shared.running.fetch_sub(1, Ordering::Relaxed);
        }
        self.shared.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Job {
    pub fn new(
        request: Request,
        capacity: u32,
        seed: u64,
        mut guide: Option<Guide>,
        events: UnboundedSender<Event>,
        place: Place,
    ) -> Self {
        let prompt_tokens = request.prompt.len() as u32;
        let sampling = request.sampling;
        let params = SampleParams {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            generated_from: prompt_tokens,
            logit_bias: sampling.logit_bias,
            mask: None,
            seed,
            logprobs: sampling.logprobs,
        };
        let reply = Reply::new(&request.format, &request.stop);
        if let Some(guide) = &mut guide {
            guide.begin(&reply);
        }
        Self {
            prompt: request.prompt,
            params: Arc::new(params),
            capacity,
            boundaries: request.boundaries,
            cache_prompt: request.cache_prompt,
            prompt_logprobs: request.prompt_logprobs,
            ignore_eos: request.ignore_eos,
            reports_end: matches!(request.format, OutputFormat::Raw),
            reply,
            calls: CallTokens::default(),
            guide,
            usage: Usage { prompt_tokens, ..Usage::default() },
            submitted: Instant::now(),
            started: None,
            first_token: None,
            last_token: None,
            events,
            place: Some(place),
        }
    }

    /// Tokens that may be generated.
    pub fn max_tokens(&self) -> u32 {
        self.capacity - self.usage.prompt_tokens
    }

    /// Whether log-probabilities of the prompt are asked for.
    pub fn scores_prompt(&self) -> bool {
        self.prompt_logprobs.is_some()
    }

    /// What of the prompt may come from the cache: the last token never, since its logits are needed.
    pub fn reusable(&self) -> &[u32] {
        match self.prompt.split_last() {
            Some((_, reusable)) if self.cache_prompt && !self.scores_prompt() => reusable,
            _ => &[],
        }
    }

    /// Whether the next token can only be drawn when the one before it is known.
    pub fn is_guided(&self) -> bool {
        self.guide.as_ref().is_some_and(|guide| guide.acts(&self.reply))
    }

    fn choice(&self) -> Choice {
        let of = |guide: &Guide| guide.choice(&self.reply, self.usage.reasoning_tokens);
        self.guide.as_ref().map_or(Choice::Any, of)
    }

    /// Whether it is known how the next token is drawn. [`Job::wait`] waits for that.
    pub fn is_ready(&self) -> bool {
        !matches!(self.choice(), Choice::Unknown)
    }

    /// How the next token is drawn, if it is known.
    pub fn params(&self) -> Option<Arc<SampleParams>> {
        match self.choice() {
            Choice::Any => Some(Arc::clone(&self.params)),
            Choice::Of(mask) => Some(Arc::new(SampleParams { mask: Some(mask), ..(*self.params).clone() })),
            Choice::Unknown => None,
        }
    }

    /// Waits until it is known how the next token is drawn; gives whether it is at the deadline. Fails if the
    /// reply can't be what it is held to.
    pub fn wait(&mut self, deadline: Option<Instant>) -> Result<bool, RequestError> {
        match self.guide.as_mut().map(|guide| guide.wait(deadline)) {
            None | Some(Some(Ok(()))) => Ok(true),
            Some(None) => Ok(false),
            Some(Some(Err(problem))) => Err(RequestError::Constraint(problem)),
        }
    }

    /// Whether nobody waits for the reply any more.
    pub fn is_cancelled(&self) -> bool {
        self.events.is_closed()
    }

    /// The request leaves the queue, with the first `cached` tokens of the prompt from the cache.
    pub fn start(&mut self, cached: u32) {
        self.usage.cached_tokens = cached;
        self.started = Some(Instant::now());
        if let Some(place) = &mut self.place {
            place.running = true;
            place.shared.running.fetch_add(1, Ordering::Relaxed);
        }
        self.send(Event::Started);
        if let (true, Some(&id)) = (self.scores_prompt(), self.prompt.first()) {
            self.send(Event::PromptToken { id, logprobs: None });
        }
    }

    /// The next token of the prompt, and the logits that predict it.
    pub fn prompt_token(&self, id: u32, logits: &[f32]) {
        if let Some(n) = self.prompt_logprobs {
            self.send(Event::PromptToken { id, logprobs: Some(logprobs(logits, id, n)) });
        }
    }

    /// So many tokens of the prompt are read; gives whether nothing is to follow, and then the last event was sent.
    pub fn prefilled(&mut self, done: u32) -> bool {
        let Usage { prompt_tokens: total, cached_tokens: cached, .. } = self.usage;
        self.send(Event::Prefill { done, total, cached });
        let ends = done == total && self.max_tokens() == 0;
        if ends {
            self.finish(FinishReason::Length);
        }
        ends
    }

    /// Takes a token; gives whether it was the last one, and then the last event was sent.
    pub fn token(&mut self, sampled: Sampled, tokenizer: &Tokenizer, eos: &[u32]) -> bool {
        let now = Instant::now();
        self.first_token.get_or_insert(now);
        if let Some(last) = self.last_token.replace(now) {
            self.send(Event::InterToken(now.saturating_duration_since(last)));
        }
        self.usage.completion_tokens += 1;
        let id = sampled.token;
        if eos.contains(&id) && !self.ignore_eos {
            if let Some(logprobs) = sampled.logprobs.filter(|_| self.reports_end) {
                self.send(Event::Token { id, logprobs, in_thought: false });
            }
            self.finish(if self.reply.has_calls() { FinishReason::ToolCalls } else { FinishReason::Stop });
            return true;
        }
        let in_thought = self.reply.in_thought();
        self.usage.reasoning_tokens += u32::from(in_thought);
        if let Some(logprobs) = sampled.logprobs {
            self.send(Event::Token { id, logprobs, in_thought });
        }
        let bytes = if tokenizer.is_special(id) { &[] } else { tokenizer.token_bytes(id) };
        let progress = self.reply.push(bytes);
        if !progress.stopped
            && let Some(guide) = &mut self.guide
        {
            guide.accept(id, &self.reply, || tokenizer.encode_text(&answer(&progress)));
        }
        let call = self.calls.push(id, &progress, &self.reply, tokenizer);
        if self.send_deltas(progress) {
            self.end(FinishReason::Stop);
            return true;
        }
        if let Some(call) = call.filter(|_| self.cache_prompt) {
            self.send(Event::Call(call));
        }
        if self.reply.is_complete() {
            self.finish(FinishReason::ToolCalls);
            return true;
        }
        if self.usage.completion_tokens >= self.max_tokens() {
            self.finish(FinishReason::Length);
            return true;
        }
        false
    }

    /// The request fails.
    pub fn fail(mut self, error: RequestError) {
        self.last_event(Event::Failed(error));
    }

    /// Gives out what was held back, then ends.
    fn finish(&mut self, reason: FinishReason) {
        let progress = self.reply.finish(reason == FinishReason::Length);
        let stopped = self.send_deltas(progress);
        self.end(if stopped { FinishReason::Stop } else { reason });
    }

    fn end(&mut self, reason: FinishReason) {
        let between = |a: Option<Instant>, b: Option<Instant>| match (a, b) {
            (Some(a), Some(b)) => b.saturating_duration_since(a),
            _ => Duration::ZERO,
        };
        let timing = Timing {
            queued: between(Some(self.submitted), self.started),
            prefill: between(self.started, self.first_token.or_else(|| Some(Instant::now()))),
            decode: between(self.first_token, self.last_token),
        };
        let stop = self.reply.stop_string().map(str::to_owned);
        self.last_event(Event::Finished(Finished { reason, stop, usage: self.usage, timing }));
    }

    /// Whoever hears of the end finds the place free.
    fn last_event(&mut self, event: Event) {
        if self.place.take().is_some() {
            self.send(event);
        }
    }

    fn send_deltas(&self, progress: Progress) -> bool {
        for delta in progress.deltas {
            self.send(Event::Delta(delta));
        }
        progress.stopped
    }

    /// A client that has left is noticed between two steps, not here.
    fn send(&self, event: Event) {
        let _ = self.events.send(event);
    }
}

/// The text of the answer in a piece of a reply.
fn answer(progress: &Progress) -> String {
    let text = |delta: &Delta| if let Delta::Text(text) = delta { text.clone() } else { String::new() };
    progress.deltas.iter().map(text).collect()
}

impl Drop for Job {
    fn drop(&mut self) {
        let Some(place) = &self.place else { return };
        let error = match place.shared.stopped.get() {
            Some(Stopped::Shutdown) => RequestError::Shutdown,
            Some(Stopped::Failed(message)) => RequestError::Device(message.clone()),
            None => RequestError::Device("the engine lost the request: please report it".to_owned()),
        };
        self.last_event(Event::Failed(error));
    }
}
