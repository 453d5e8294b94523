use std::sync::MutexGuard;

use lily_model::backend::SegmentError;
use lily_model::sample::Logprobs;
use serde_json::Value;
use tokio::sync::mpsc::error::TryRecvError;

use super::*;
use crate::output::Delta;
use crate::request::{FinishReason, Finished, OutputFormat, RequestError, SampledCall, Sampling, Tool};
use crate::testing::{
    Act, Audit, END_OF_TURN, FakeBackend, greedy, limits, options, request, say, tokenizer, tokens,
};

mod arrivals;
mod cache;
mod guided;
mod scored;

/// Nothing in these tests takes this long unless something hangs.
const PATIENCE: Duration = Duration::from_secs(20);

struct Harness {
    engine: Engine,
    audit: Arc<Mutex<Audit>>,
}

impl Harness {
    fn new(backend: FakeBackend, options: Options) -> Self {
        let audit = backend.audit();
        let tokenizer = Arc::new(tokenizer());
        Self { engine: Engine::start(Box::new(backend), tokenizer, options), audit }
    }

    fn scripted(script: impl FnMut(&[u32]) -> Vec<Act> + Send + 'static) -> Self {
        Self::new(FakeBackend::scripted(limits(), script), options())
    }

    fn submit(&self, request: Request) -> Generation {
        self.engine.submit(request).unwrap()
    }

    fn run(&self, request: Request) -> Outcome {
        Outcome::of(self.submit(request))
    }

    fn audit(&self) -> MutexGuard<'_, Audit> {
        self.audit.lock().unwrap()
    }

    /// Ends the engine and checks that every sequence was given back once, and all memory.
    fn close(self) {
        self.engine.shutdown(PATIENCE);
        assert_eq!((self.engine.status().running, self.engine.status().waiting), (0, 0));
        let audit = self.audit();
        let mut created: Vec<_> = audit.created.iter().map(|(seq, _)| *seq).collect();
        let mut freed = audit.freed.clone();
        created.sort_unstable();
        freed.sort_unstable();
        assert_eq!(created, freed);
        assert_eq!(audit.held, 0);
    }
}

/// Waits for a condition that another thread brings about.
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "waited too long until {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

fn next(generation: &mut Generation) -> Option<Event> {
    let start = Instant::now();
    loop {
        match generation.events.try_recv() {
            Ok(event) => return Some(event),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) => {
                assert!(start.elapsed() < PATIENCE, "no event comes");
                thread::sleep(Duration::from_micros(200));
            }
        }
    }
}

/// All that a request reported; the order of the events is checked on the way.
#[derive(Debug, Default)]
struct Outcome {
    text: String,
    reasoning: String,
    calls: Vec<(String, String)>,
    sampled_calls: Vec<SampledCall>,
    prefill: Vec<u32>,
    prompt: Vec<(u32, Option<Logprobs>)>,
    tokens: Vec<u32>,
    logprobs: Vec<Logprobs>,
    inter_token: Vec<Duration>,
    end: Option<Result<Finished, RequestError>>,
}

impl Outcome {
    fn of(mut generation: Generation) -> Self {
        let mut outcome = Self::default();
        let mut started = false;
        while let Some(event) = next(&mut generation) {
            assert!(outcome.end.is_none(), "{event:?} after the end");
            assert!(
                started || matches!(event, Event::Started | Event::Failed(_)),
                "{event:?} before the start"
            );
            match event {
                Event::Started => assert!(!std::mem::replace(&mut started, true)),
                Event::Prefill { done, total, .. } => {
                    assert!(outcome.prefill.last().is_none_or(|&last| last < done) && done <= total);
                    outcome.prefill.push(done);
                }
                Event::InterToken(time) => outcome.inter_token.push(time),
                Event::PromptToken { id, logprobs } => outcome.prompt.push((id, logprobs)),
                Event::Token { id, logprobs, .. } => {
                    outcome.tokens.push(id);
                    outcome.logprobs.push(logprobs);
                }
                Event::Delta(Delta::Text(text)) => outcome.text += &text,
                Event::Delta(Delta::Reasoning(text)) => outcome.reasoning += &text,
                Event::Delta(Delta::ToolCall { name, .. }) => outcome.calls.push((name, String::new())),
                Event::Delta(Delta::ToolArguments { index, fragment }) => {
                    outcome.calls[index as usize].1 += &fragment;
                }
                Event::Call(call) => outcome.sampled_calls.push(call),
                Event::Finished(finished) => outcome.end = Some(Ok(finished)),
                Event::Failed(error) => outcome.end = Some(Err(error)),
            }
        }
        assert!(outcome.end.is_some(), "the events end without an end");
        outcome
    }

    fn finished(&self) -> &Finished {
        self.end.as_ref().unwrap().as_ref().unwrap()
    }

    fn reason(&self) -> FinishReason {
        self.finished().reason
    }

    fn error(&self) -> &RequestError {
        self.end.as_ref().unwrap().as_ref().unwrap_err()
    }
}

fn chat(starts_in_thought: bool) -> OutputFormat {
    let tool = Tool { name: "f".into(), parameters: Value::Null };
    OutputFormat::Chat { starts_in_thought, tools: Arc::new([tool]), single_call: false }
}

fn endless() -> Vec<Act> {
    vec![Act::Token(u32::from(b'a')); 100_000]
}

#[test]
fn a_request_is_answered() {
    let harness = Harness::scripted(|_| say("Čau, světe"));
    let outcome = harness.run(request(vec![1; 40]));
    assert_eq!(outcome.text, "Čau, světe");
    assert_eq!(outcome.prefill, [16, 32, 40]);
    assert!(outcome.tokens.is_empty());
    let Finished { reason, stop, usage, timing } = outcome.finished();
    assert_eq!((*reason, stop), (FinishReason::Stop, &None));
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (40, "Čau, světe".len() as u32 + 1));
    assert_eq!((usage.reasoning_tokens, usage.cached_tokens), (0, 0));
    assert!(timing.queued + timing.prefill + timing.decode < PATIENCE);
    assert_eq!(harness.engine.status().steps, 3 + "Čau, světe".len() as u64);
    harness.close();
}

#[test]
fn every_time_between_two_tokens_is_reported() {
    let pause = Duration::from_millis(30);
    let harness = Harness::scripted(move |_| [say("ab"), vec![Act::Pause(pause)], say("cd")].concat());
    let outcome = harness.run(request(vec![1; 40]));
    let Finished { usage, timing, .. } = outcome.finished();
    let times = &outcome.inter_token;
    assert_eq!((times.len(), usage.completion_tokens), (4, 5), "before b, c, d and the end of the turn");
    assert_eq!(times.iter().sum::<Duration>(), timing.decode);
    assert!(times[1] >= pause, "{times:?}");
    harness.close();
}

#[test]
fn thought_answer_and_calls_are_reported_apart() {
    let text = "Hm.\n</think>\n\nOne moment.<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n\
                </function>\n</tool_call>";
    let harness = Harness::scripted(move |_| say(text));
    let outcome = harness.run(Request { format: chat(true), ..request(vec![1]) });
    assert_eq!((outcome.reasoning.as_str(), outcome.text.as_str()), ("Hm.", "One moment."));
    assert_eq!(outcome.calls, [("f".to_owned(), r#"{"x":1}"#.to_owned())]);
    assert_eq!(outcome.reason(), FinishReason::ToolCalls);
    let usage = outcome.finished().usage;
    assert_eq!(usage.reasoning_tokens, "Hm.\n".len() as u32 + 1, "the closing tag is one token");
    assert_eq!(usage.completion_tokens, tokens(text).len() as u32 + 1);
}

#[test]
fn the_tokens_of_whole_calls_are_reported_as_they_were_sampled() {
    let markup = |value: &str| format!("\n<function=f>\n<parameter=x>\n{value}\n</parameter>\n</function>\n");
    let reply = |parts: &[&str]| -> Vec<Vec<u32>> {
        let text = parts.concat();
        let outcome =
            Harness::scripted(move |_| say(&text)).run(Request { format: chat(false), ..request(vec![1]) });
        assert!(!outcome.calls.is_empty());
        outcome.sampled_calls.into_iter().map(|call| call.tokens).collect()
    };
    let (one, two) = (markup("{\"a\":1}"), markup("\u{e9} <tool"));
    let call = |markup: &str| format!("<tool_call>{markup}</tool_call>");
    assert_eq!(reply(&["Well.", &call(&one), "\n", &call(&two)]), [tokens(&one), tokens(&two)]);
    // In JSON, the call is known when it is over.
    let json = "\n{\"name\": \"f\", \"arguments\": {\"x\":1}}\n";
    assert_eq!(reply(&[&call(json), &call(&one)]), [tokens(json), tokens(&one)]);
    let none: [Vec<u32>; 0] = [];
    assert_eq!(reply(&["<tool_call>", &one]), none, "not closed");
    assert_eq!(reply(&["<tool_call>", &one, &call(&two)]), [tokens(&two)], "the first one is not closed");
    assert_eq!(reply(&[&call(&format!("{one}{two}"))]), none, "two between the tags");
    assert_eq!(reply(&[&call(&markup("a</think>b"))]), none, "a control token");
    let whole = call(&one);
    let format = chat(false);
    let outcome = Harness::scripted(move |_| say(&whole)).run(Request {
        format,
        cache_prompt: false,
        ..request(vec![1])
    });
    assert!(outcome.sampled_calls.is_empty(), "nothing is kept of it");
}

#[test]
fn a_thought_cut_by_max_tokens_is_reasoning() {
    let harness = Harness::scripted(|_| endless());
    let outcome = harness.run(Request { format: chat(true), max_tokens: Some(20), ..request(vec![1]) });
    assert_eq!((outcome.reasoning.len(), outcome.text.as_str()), (20, ""));
    assert_eq!(outcome.reason(), FinishReason::Length);
    assert_eq!(outcome.finished().usage.reasoning_tokens, 20);
}

#[test]
fn a_call_cut_by_max_tokens_is_no_reason_to_call() {
    let harness = Harness::scripted(|_| say("<tool_call><function=f><parameter=x>\nabc"));
    let all = tokens("<tool_call><function=f><parameter=x>\nabc").len() as u32;
    let cut = harness.run(Request { format: chat(false), max_tokens: Some(all), ..request(vec![1]) });
    assert_eq!(cut.reason(), FinishReason::Length);
    let whole = harness.run(Request { format: chat(false), ..request(vec![1]) });
    assert_eq!((whole.reason(), whole.calls[0].1.as_str()), (FinishReason::ToolCalls, r#"{"x":"abc"}"#));
}

#[test]
fn limits_end_a_reply() {
    let harness = Harness::scripted(|_| endless());
    let few = harness.run(Request { max_tokens: Some(3), ..request(vec![1]) });
    assert_eq!((few.text.as_str(), few.reason()), ("aaa", FinishReason::Length));
    let context = limits().context;
    let prompt = vec![1; context as usize - 5];
    let full = harness.run(Request { max_tokens: Some(100), ..request(prompt) });
    assert_eq!((full.text.as_str(), full.reason()), ("aaaaa", FinishReason::Length));
    let capacities: Vec<u32> = harness.audit().created.iter().map(|(_, capacity)| *capacity).collect();
    assert_eq!(capacities, [4, context]);
    harness.close();
}

#[test]
fn a_stop_string_ends_a_reply_at_once() {
    let harness = Harness::scripted(|_| [say("alpha beta gamma delta"), endless()].concat());
    let outcome = harness.run(Request { stop: vec!["beta gamma".into()], ..request(vec![1]) });
    assert_eq!((outcome.text.as_str(), outcome.reason()), ("alpha ", FinishReason::Stop));
    assert_eq!(outcome.finished().usage.completion_tokens, "alpha beta gamma".len() as u32);
}

#[test]
fn control_tokens_are_not_text() {
    let harness = Harness::scripted(|_| say("a<|im_start|>b<|im_end|>c<think>"));
    assert_eq!(harness.run(request(vec![1])).text, "ab");
    let on = Request { ignore_eos: true, max_tokens: Some(6), ..request(vec![1]) };
    let outcome = harness.run(on);
    assert_eq!((outcome.text.as_str(), outcome.reason()), ("abc<think>", FinishReason::Length));
}

#[test]
fn sequences_decode_side_by_side_with_one_chunk_of_prefill() {
    let backend = FakeBackend::scripted(limits(), |_| endless()).with_step_time(Duration::from_millis(1));
    let harness = Harness::new(backend, options());
    let long = harness.submit(request(vec![1]));
    wait_until("it decodes", || harness.audit().steps.len() > 2);
    let late: Vec<Generation> =
        (0..3).map(|_| harness.submit(Request { max_tokens: Some(9), ..request(vec![1; 50]) })).collect();
    for generation in late {
        let outcome = Outcome::of(generation);
        assert_eq!((outcome.text.len(), outcome.reason()), (9, FinishReason::Length));
        assert_eq!(outcome.prefill, [16, 32, 48, 50]);
    }
    drop(long);
    let audit = harness.audit().clone();
    let decoding = audit.created[0].0;
    let mut widest = 0;
    for step in audit.steps.iter().filter(|step| step.len() > 1) {
        assert!(step.iter().filter(|segment| segment.1 > 1).count() <= 1, "one chunk in a step: {step:?}");
        assert!(step.contains(&(decoding, 1, true)), "the first never stalls: {step:?}");
        widest = widest.max(step.len());
    }
    assert!(widest >= 3, "{widest}");
    harness.close();
}

#[test]
fn the_queue_is_bounded() {
    let options = Options { max_sequences: 1, max_queue: 2, ..options() };
    let harness = Harness::new(FakeBackend::scripted(limits(), |_| endless()), options);
    let mut first = harness.submit(request(vec![1]));
    assert!(matches!(next(&mut first), Some(Event::Started)));
    let waiting: Vec<Generation> = (0..2).map(|_| harness.submit(request(vec![1]))).collect();
    let refused = harness.engine.submit(request(vec![1]));
    assert_eq!(refused.unwrap_err(), SubmitError::QueueFull { waiting: 2 });
    assert_eq!((harness.engine.status().running, harness.engine.status().waiting), (1, 2));
    drop(waiting);
    wait_until("the queue is empty", || harness.engine.status().waiting == 0);
    drop(first);
    let outcome = harness.run(Request { max_tokens: Some(1), ..request(vec![1]) });
    assert_eq!(outcome.text, "a");
    harness.close();
}

#[test]
fn a_place_is_free_when_the_end_is_told() {
    let options = Options { max_sequences: 1, max_queue: 0, ..options() };
    let harness = Harness::new(FakeBackend::scripted(limits(), |_| say("x")), options);
    for _ in 0..200 {
        assert_eq!(harness.run(request(vec![1])).text, "x");
        assert_eq!(harness.engine.status().running, 0);
    }
    harness.close();
}

#[test]
fn a_request_waits_for_memory_and_those_behind_it_too() {
    let limits = Limits { state_budget: 100, ..limits() };
    let backend = FakeBackend::scripted(limits, |prompt| say(&"x".repeat(prompt.len())));
    let harness = Harness::new(backend.with_step_time(Duration::from_millis(1)), options());
    let sized = |prompt: usize| Request { max_tokens: Some(30), ..request(vec![1; prompt]) };
    let generations = [sized(30), sized(50), sized(10)].map(|request| harness.submit(request));
    for (generation, prompt) in generations.into_iter().zip([30, 50, 10]) {
        let outcome = Outcome::of(generation);
        assert_eq!(outcome.text.len(), prompt.min(30));
    }
    let started: Vec<u32> = harness.audit().created.iter().map(|(_, capacity)| *capacity).collect();
    assert_eq!(started, [60, 80, 40]);
    harness.close();
}

#[test]
fn a_request_that_never_fits_is_refused_at_once() {
    let limits = Limits { state_budget: 100, ..limits() };
    let harness = Harness::new(FakeBackend::scripted(limits, |_| say("x")), options());
    let ask = |max_tokens| harness.engine.submit(Request { max_tokens, ..request(vec![1; 50]) });
    let error = |tokens: u32| SubmitError::TooLarge { tokens, needed: tokens.into(), budget: 100 };
    assert_eq!(ask(Some(51)).unwrap_err(), error(101));
    assert_eq!(ask(None).unwrap_err(), error(4096));
    assert_eq!(Outcome::of(ask(Some(50)).unwrap()).text, "x");
}

#[test]
fn dropping_a_generation_cancels_it_wherever_it_is() {
    let options = Options { max_sequences: 1, prefill_chunk: 1, ..options() };
    for steps_in_flight in [1, 2] {
        let backend = FakeBackend::scripted(limits(), |_| endless())
            .with_step_time(Duration::from_millis(1))
            .with_steps_in_flight(steps_in_flight);
        let harness = Harness::new(backend, options.clone());
        let mut decoding = harness.submit(request(vec![1]));
        while !matches!(next(&mut decoding), Some(Event::Delta(_))) {}
        let mut reading = harness.submit(request(vec![1; 4000]));
        drop(harness.submit(request(vec![1])));
        wait_until("the queued one is gone", || harness.engine.status().waiting == 1);

        drop(decoding);
        while !matches!(next(&mut reading), Some(Event::Prefill { done: 3, .. })) {}
        drop(reading);
        wait_until("both are freed", || harness.audit().freed.len() == 2);
        let steps = harness.engine.status().steps;
        thread::sleep(Duration::from_millis(20));
        assert_eq!(harness.engine.status().steps, steps, "the device is idle");
        assert!(steps < 1000, "{steps}");
        assert_eq!(harness.audit().created.len(), 2);
        harness.close();
    }
}

#[test]
fn a_value_that_is_not_finite_fails_one_request_only() {
    for steps_in_flight in [1, 3] {
        let script = |prompt: &[u32]| match prompt {
            [0] => [say("ab"), vec![Act::NonFinite]].concat(),
            _ => say(&"x".repeat(50)),
        };
        let backend = FakeBackend::scripted(limits(), script).with_steps_in_flight(steps_in_flight);
        let harness = Harness::new(backend, options());
        let [good, bad] = [vec![1], vec![0]].map(|prompt| harness.submit(request(prompt)));
        let bad = Outcome::of(bad);
        assert_eq!(*bad.error(), RequestError::Model(SegmentError::NonFinite { position: 2 }));
        assert_eq!(bad.text, "ab");
        assert_eq!(Outcome::of(good).text.len(), 50);
        assert_eq!(harness.run(request(vec![2])).text.len(), 50);
        assert_eq!(harness.engine.status().stopped, None);
        harness.close();
    }
}

#[test]
fn a_failing_device_stops_the_engine_and_fails_everything() {
    for (act, cause) in [
        (Act::Fail("bus error".into()), "device error: bus error"),
        (Act::Panic("out of bounds".into()), "the engine panicked: out of bounds"),
    ] {
        let script = move |prompt: &[u32]| match prompt {
            [0] => vec![Act::Pause(Duration::from_millis(20)), act.clone()],
            _ => endless(),
        };
        let options = Options { max_sequences: 2, ..options() };
        let harness = Harness::new(FakeBackend::scripted(limits(), script), options);
        let requests = [vec![1], vec![0], vec![2], vec![3]];
        let generations = requests.map(|prompt| harness.submit(request(prompt)));
        for generation in generations {
            assert_eq!(*Outcome::of(generation).error(), RequestError::Device(cause.to_owned()));
        }
        wait_until("the engine says so", || harness.engine.status().stopped.is_some());
        assert_eq!(harness.engine.status().stopped.as_deref(), Some(cause));
        let refused = harness.engine.submit(request(vec![1])).unwrap_err();
        assert_eq!(refused, SubmitError::Stopped(cause.to_owned()));
        harness.engine.shutdown(Duration::ZERO);
        assert_eq!(harness.engine.status().running, 0);
    }
}

#[test]
fn a_device_error_gives_back_all_sequences() {
    let harness = Harness::scripted(|_| vec![Act::Token(65), Act::Fail("gone".into())]);
    let outcome = harness.run(request(vec![1]));
    assert_eq!(outcome.text, "A");
    harness.close();
}

#[test]
fn the_same_seed_gives_the_same_text_alone_and_in_a_batch() {
    let mut asked = request(tokens("Tell me"));
    asked.sampling = Sampling {
        temperature: 1.2,
        top_p: 0.95,
        presence_penalty: 0.5,
        repetition_penalty: 1.1,
        seed: Some(7),
        ..greedy()
    };
    asked.max_tokens = Some(40);
    asked.sampling.logprobs = Some(0);
    let alone = Harness::new(FakeBackend::sampling(limits()), options()).run(asked.clone());
    assert!(!alone.tokens.is_empty());
    for steps_in_flight in [1, 2] {
        let backend = FakeBackend::sampling(limits()).with_steps_in_flight(steps_in_flight);
        let harness = Harness::new(backend, Options { prefill_chunk: 3, ..options() });
        let others: Vec<Generation> = (0..4)
            .map(|i| {
                let mut other = asked.clone();
                other.prompt.truncate(i as usize + 2);
                other.sampling.seed = Some(i);
                harness.submit(other)
            })
            .collect();
        let [a, b] = [asked.clone(), asked.clone()].map(|request| harness.submit(request));
        for again in [Outcome::of(a), Outcome::of(b)] {
            assert_eq!((&again.tokens, &again.text), (&alone.tokens, &alone.text));
        }
        assert!(others.into_iter().map(Outcome::of).any(|other| other.tokens != alone.tokens));
        harness.close();
    }
}

#[test]
fn seeds_of_the_engines_choice_differ() {
    let harness = Harness::scripted(|_| say("x"));
    for _ in 0..20 {
        harness.run(request(vec![1]));
    }
    assert_eq!(harness.audit().seeds.len(), 20);
    let mut asked = request(vec![1]);
    asked.sampling.seed = Some(99);
    harness.run(asked);
    assert!(harness.audit().seeds.contains(&99));
}

#[test]
fn shutdown_lets_running_requests_finish_and_fails_the_rest() {
    let options = Options { max_sequences: 1, ..options() };
    let backend = FakeBackend::scripted(limits(), |_| say(&"x".repeat(30)));
    let harness = Harness::new(backend.with_step_time(Duration::from_millis(1)), options);
    let mut running = harness.submit(request(vec![1]));
    assert!(matches!(next(&mut running), Some(Event::Started)));
    let queued = harness.submit(request(vec![1]));
    let engine = harness.engine.clone();
    let closing = thread::spawn(move || engine.shutdown(PATIENCE));
    assert_eq!(*Outcome::of(queued).error(), RequestError::Shutdown);
    let refused = harness.engine.submit(request(vec![1])).unwrap_err();
    assert_eq!(refused, SubmitError::Stopped("it was shut down".into()));
    let mut text = String::new();
    while let Some(event) = next(&mut running) {
        match event {
            Event::Delta(Delta::Text(piece)) => text += &piece,
            Event::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    assert_eq!(text.len(), 30);
    closing.join().unwrap();
    harness.close();
}

#[test]
fn shutdown_fails_running_requests_at_the_deadline() {
    for in_flight in [1, 2] {
        let backend = FakeBackend::scripted(limits(), |_| endless());
        let backend = backend.with_step_time(Duration::from_millis(1)).with_steps_in_flight(in_flight);
        let harness = Harness::new(backend, options());
        let [a, b] = [vec![1], vec![1; 4000]].map(|prompt| harness.submit(request(prompt)));
        let start = Instant::now();
        harness.engine.shutdown(Duration::from_millis(30));
        assert!(start.elapsed() < Duration::from_secs(5));
        for generation in [a, b] {
            assert_eq!(*Outcome::of(generation).error(), RequestError::Shutdown);
        }
        harness.engine.shutdown(Duration::ZERO);
        harness.close();
    }
}

#[test]
fn requests_outlive_the_last_handle() {
    let harness = Harness::scripted(|_| say("still here"));
    let generation = harness.submit(request(vec![1]));
    drop(harness);
    assert_eq!(Outcome::of(generation).text, "still here");
}

#[test]
fn status_and_submit_do_not_wait_for_the_device() {
    let pause = Duration::from_millis(300);
    let harness = Harness::scripted(move |_| vec![Act::Pause(pause), Act::Token(65)]);
    let first = harness.submit(request(vec![1]));
    wait_until("the device works", || harness.audit().steps.len() == 1);
    let start = Instant::now();
    let second = harness.submit(request(vec![1]));
    let status = harness.engine.status();
    assert!(start.elapsed() < pause / 3);
    assert_eq!((status.running, status.waiting, status.context), (1, 1, limits().context));
    wait_until("age grows", || harness.engine.status().last_step_age > pause / 3);
    for generation in [first, second] {
        assert_eq!(Outcome::of(generation).text, "A");
    }
    assert!(harness.engine.status().last_step_age < pause);
}

#[test]
fn requests_may_come_from_many_threads() {
    let harness = Harness::scripted(|prompt| say(&"x".repeat(prompt.len())));
    thread::scope(|scope| {
        for i in 1..=16 {
            let harness = &harness;
            scope.spawn(move || assert_eq!(harness.run(request(vec![1; i])).text.len(), i));
        }
    });
    harness.close();
}

#[test]
fn an_invalid_request_takes_no_place() {
    let options = Options { max_sequences: 1, max_queue: 0, ..options() };
    let harness = Harness::new(FakeBackend::scripted(limits(), |_| say("x")), options);
    for _ in 0..3 {
        assert_eq!(harness.engine.submit(request(vec![])).unwrap_err(), SubmitError::EmptyPrompt);
    }
    assert_eq!(harness.run(request(vec![1])).text, "x");
}
