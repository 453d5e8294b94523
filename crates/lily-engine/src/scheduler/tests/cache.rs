//! What the prefix cache saves, and what it must never do.

use proptest::prelude::*;

use super::*;

/// With room for everything.
fn caching() -> Options {
    Options { cache_bytes: 1 << 20, ..options() }
}

/// A budget that leaves the same room.
fn roomy() -> Limits {
    Limits { state_budget: 1 << 21, ..limits() }
}

fn harness(script: impl FnMut(&[u32]) -> Vec<Act> + Send + 'static) -> Harness {
    Harness::new(FakeBackend::scripted(roomy(), script), caching())
}

/// `length` tokens that begin like those of any other `branch` up to position `fork`.
fn prompt(fork: u32, branch: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| if i < fork { i % 50 } else { 100 + (i + branch * 7) % 50 }).collect()
}

fn with_boundaries(prompt: Vec<u32>, boundaries: &[u32]) -> Request {
    Request { boundaries: boundaries.to_vec(), max_tokens: Some(8), ..request(prompt) }
}

impl Outcome {
    /// The end of a request whose beginning was heard already.
    fn end_of(mut generation: Generation) -> FinishReason {
        loop {
            match next(&mut generation) {
                Some(Event::Finished(finished)) => return finished.reason,
                Some(Event::Failed(error)) => panic!("{error}"),
                Some(_) => {}
                None => panic!("the events end without an end"),
            }
        }
    }

    fn cached(&self) -> u32 {
        self.finished().usage.cached_tokens
    }
}

#[test]
fn a_prompt_is_read_from_where_it_parts_from_an_earlier_one() {
    let harness = harness(|_| say("x"));
    let first = harness.run(with_boundaries(prompt(30, 1, 40), &[30, 10]));
    assert_eq!((first.cached(), &*first.prefill), (0, &[10, 26, 30, 40][..]), "chunks end at boundaries");
    let second = harness.run(with_boundaries(prompt(30, 2, 50), &[10, 30]));
    assert_eq!((second.cached(), &*second.prefill), (30, &[46, 50][..]));
    let third = harness.run(with_boundaries(prompt(29, 3, 50), &[10, 30]));
    assert_eq!((third.cached(), &*third.prefill), (10, &[26, 30, 46, 50][..]));
    let fourth = harness.run(with_boundaries(prompt(9, 4, 20), &[]));
    assert_eq!(fourth.cached(), 0);
    harness.close();
}

#[test]
fn the_same_prompt_again_costs_one_token() {
    let harness = harness(|_| say("x"));
    for (cached, read) in [(0, vec![16, 32, 39, 40]), (39, vec![40]), (39, vec![40])] {
        let outcome = harness.run(request(prompt(0, 1, 40)));
        assert_eq!((outcome.cached(), outcome.prefill.clone()), (cached, read));
        assert_eq!(outcome.text, "x");
    }
    assert_eq!(harness.run(request(vec![7])).cached(), 0);
    assert_eq!(harness.run(request(vec![7])).cached(), 0, "a single token must be fed");
    harness.close();
}

#[test]
fn a_conversation_goes_on_at_the_end_of_the_reply() {
    // The device may be some steps past the end when it is seen.
    for (in_flight, expected) in [(1, 43), (2, 44), (3, 39)] {
        let backend = FakeBackend::scripted(roomy(), |_| say("abc")).with_steps_in_flight(in_flight);
        let harness = Harness::new(backend, caching());
        let first = prompt(0, 1, 40);
        assert_eq!(harness.run(request(first.clone())).text, "abc");
        let next = [first, tokens("abc<|im_end|>"), prompt(0, 2, 20)].concat();
        assert_eq!(harness.run(request(next)).cached(), expected, "{in_flight} steps in flight");
        harness.close();
    }
}

#[test]
fn a_reply_cut_by_a_limit_or_a_stop_string_is_kept_as_well() {
    let harness = harness(|_| say("abcdef"));
    let first = prompt(0, 1, 40);
    let cut = Request { max_tokens: Some(3), ..request(first.clone()) };
    assert_eq!(harness.run(cut).text, "abc");
    let next = [first, tokens("abcd")].concat();
    assert_eq!(harness.run(request(next.clone())).cached(), 42, "the last token was not fed");
    let stopped = Request { stop: vec!["cd".into()], ..request(next.clone()) };
    assert_eq!(harness.run(stopped).text, "ab");
    let next = [next, tokens("abcdef")].concat();
    assert!(harness.run(request(next)).cached() >= 47);
    harness.close();
}

#[test]
fn a_long_prompt_leaves_snapshots_at_regular_distances() {
    let harness = harness(|_| say("x"));
    harness.run(request(prompt(250, 1, 350)));
    wait_until("it is freed", || harness.audit().freed.len() == 1);
    assert_eq!(harness.audit().snapshots, [100, 200, 300, 349, 351]);
    assert_eq!(harness.run(request(prompt(250, 2, 350))).cached(), 200);
    harness.close();
}

#[test]
fn requests_that_come_together_share_what_the_first_has_read() {
    for in_flight in [1, 2] {
        let backend = FakeBackend::scripted(roomy(), |prompt| vec![Act::Token(*prompt.last().unwrap()); 5]);
        let harness = Harness::new(backend.with_steps_in_flight(in_flight), caching());
        let ask = |branch| harness.submit(with_boundaries(prompt(60, branch, 90), &[60]));
        let generations: Vec<_> = (0..4).map(|branch| (branch, ask(branch))).collect();
        for (branch, generation) in generations {
            let outcome = Outcome::of(generation);
            let last = *prompt(60, branch, 90).last().unwrap() as u8;
            assert_eq!(outcome.text, String::from_utf8_lossy(&[last; 5]));
            assert_eq!(outcome.cached(), if branch == 0 { 0 } else { 60 });
        }
        harness.close();
    }
}

#[test]
fn a_request_may_keep_out_of_the_cache() {
    let harness = harness(|_| say("x"));
    let apart = || Request { cache_prompt: false, ..request(prompt(0, 1, 40)) };
    assert_eq!(harness.run(apart()).prefill, [16, 32, 40]);
    wait_until("it is freed", || harness.audit().freed.len() == 1);
    assert!(harness.audit().snapshots.is_empty());
    harness.run(request(prompt(0, 1, 40)));
    let taken = harness.audit().snapshots.len();
    assert_eq!(harness.run(apart()).cached(), 0);
    wait_until("it is freed", || harness.audit().freed.len() == 3);
    assert_eq!(harness.audit().snapshots.len(), taken.max(2));
    harness.close();
}

#[test]
fn without_room_for_a_cache_nothing_is_frozen() {
    let harness = Harness::scripted(|_| say("x"));
    for _ in 0..2 {
        let outcome = harness.run(with_boundaries(prompt(0, 1, 40), &[10]));
        assert_eq!((outcome.cached(), &*outcome.prefill), (0, &[16, 32, 40][..]));
    }
    assert!(harness.audit().snapshots.is_empty());
    harness.close();
}

#[test]
fn what_a_client_left_behind_is_not_lost() {
    for in_flight in [1, 2] {
        let backend = FakeBackend::scripted(roomy(), |_| endless()).with_steps_in_flight(in_flight);
        let harness = Harness::new(
            backend.with_step_time(Duration::from_millis(1)),
            Options { prefill_chunk: 1, ..caching() },
        );
        let ask = || Request { max_tokens: Some(1), ..request(prompt(0, 1, 90)) };
        let mut reading = harness.submit(ask());
        while !matches!(next(&mut reading), Some(Event::Prefill { done: 37, .. })) {}
        drop(reading);
        let again = harness.run(ask());
        assert!((37..89).contains(&again.cached()), "{}", again.cached());
        assert_eq!(again.prefill.first(), Some(&(again.cached() + 1)));

        let mut writing = harness.submit(Request { max_tokens: None, ..ask() });
        while !matches!(next(&mut writing), Some(Event::Delta(_))) {}
        drop(writing);
        let next = [prompt(0, 1, 90), tokens("aa")].concat();
        assert!(harness.run(with_boundaries(next, &[])).cached() >= 90);
        harness.close();
    }
}

#[test]
fn a_prompt_may_be_cut_off_before_a_snapshot_that_came_meanwhile() {
    let script = |prompt: &[u32]| if prompt.len() == 40 { say("abcdefghij") } else { endless() };
    let backend = FakeBackend::scripted(roomy(), script).with_step_time(Duration::from_millis(5));
    let harness = Harness::new(backend, Options { prefill_chunk: 1, ..caching() });
    let mut first = harness.submit(request(prompt(0, 1, 40)));
    (0..5).for_each(|_| while !matches!(next(&mut first), Some(Event::Delta(_))) {});
    let goes_on = [prompt(0, 1, 40), tokens("abcdefghij<|im_end|>"), prompt(0, 2, 90)].concat();
    let reading = harness.submit(request(goes_on.clone()));
    assert_eq!(Outcome::end_of(first), FinishReason::Stop);
    drop(reading);
    assert!(harness.run(Request { max_tokens: Some(1), ..request(goes_on) }).cached() >= 50);
    harness.close();
}

#[test]
fn a_broken_state_is_never_kept() {
    for in_flight in [1, 2, 3] {
        let mut replies = [say("fine"), [say("ab"), vec![Act::NonFinite]].concat(), say("fine")].into_iter();
        let script = move |_: &[u32]| replies.next().unwrap_or_default();
        let backend = FakeBackend::scripted(roomy(), script).with_steps_in_flight(in_flight);
        let harness = Harness::new(backend, caching());
        let ask = || with_boundaries(prompt(30, 1, 40), &[30]);
        assert_eq!(harness.run(ask()).cached(), 0);
        let broken = harness.run(ask());
        assert!(matches!(broken.error(), RequestError::Model(_)), "{broken:?}");
        // It may have been broken from its first token on.
        let again = harness.run(ask());
        assert_eq!((again.cached(), &*again.text), (0, "fine"));
        harness.close();
    }
}

#[test]
fn a_snapshot_counts_only_when_its_step_went_well() {
    for in_flight in [1, 2, 3] {
        let backend = FakeBackend::scripted(roomy(), |_| say("fine")).with_poison(299);
        let harness = Harness::new(backend.with_steps_in_flight(in_flight), caching());
        let mut poisoned = prompt(30, 1, 60);
        poisoned[35] = 299;
        for _ in 0..2 {
            let broken = harness.run(with_boundaries(poisoned.clone(), &[10, 30, 40]));
            assert_eq!(*broken.error(), RequestError::Model(SegmentError::NonFinite { position: 35 }));
        }
        assert!(harness.audit().resumed.is_empty(), "what led there is not trusted either");
        assert_eq!(harness.run(with_boundaries(prompt(30, 2, 60), &[30])).text, "fine");
        harness.close();
    }
}

#[test]
fn a_failed_device_gets_its_snapshots_back() {
    let mut replies = [say("fine"), vec![Act::Token(65), Act::Fail("gone".into())]].into_iter();
    let harness = harness(move |_| replies.next().unwrap_or_default());
    harness.run(request(prompt(0, 1, 40)));
    assert_eq!(
        *harness.run(request(prompt(0, 1, 50))).error(),
        RequestError::Device("device error: gone".into())
    );
    harness.close();
}

#[test]
fn the_least_recently_used_goes_first() {
    for in_flight in [1, 2] {
        let backend = FakeBackend::scripted(roomy(), |_| say("x")).with_steps_in_flight(in_flight);
        // Each request leaves 39 and 41 tokens (42 if the device runs on): three fit.
        let harness = Harness::new(backend, Options { cache_bytes: 250, ..options() });
        let ask = |branch| harness.run(request(prompt(0, branch, 40))).cached();
        assert_eq!([1, 2, 3].map(ask), [0; 3]);
        assert_eq!(ask(1), 39);
        assert_eq!(ask(4), 0);
        assert_eq!([1, 3, 4].map(ask), [39; 3]);
        assert_eq!(ask(2), 0, "the one that was not used");
        let status = harness.engine.status();
        assert_eq!(status.cache_limit, 250);
        assert!(status.cache_bytes <= 250 && status.cache_snapshots > 0, "{status:?}");
        harness.close();
    }
}

#[test]
fn a_reply_does_not_drive_out_the_prompt_that_it_answers() {
    let harness =
        Harness::new(FakeBackend::scripted(roomy(), |_| say("x")), Options { cache_bytes: 60, ..options() });
    harness.run(request(prompt(0, 1, 40)));
    assert_eq!(harness.run(request(prompt(0, 1, 40))).cached(), 39);
    // A prompt too long for the cache drives out nothing.
    harness.run(request(prompt(0, 2, 70)));
    assert_eq!(harness.run(request(prompt(0, 1, 40))).cached(), 39);
    harness.close();
}

/// Turns of one conversation, each the last one's prompt and 20 tokens more.
fn turns(backend: FakeBackend, cache_bytes: u64) -> Vec<u32> {
    let backend = backend.with_recurrent_bytes(10);
    let harness = Harness::new(backend, Options { cache_bytes, max_sequences: 1, ..options() });
    let turn = |i: u32| with_boundaries(prompt(1000, 0, 20 * i), &[20 * i - 5]);
    (1..=10).for_each(|i| drop(harness.run(turn(i))));
    // And then each is edited.
    let edited = |i: u32| with_boundaries(prompt(20 * i - 5, 1, 20 * i), &[20 * i - 5]);
    let cached = (1..=10).map(|i| harness.run(edited(i)).cached()).collect();
    harness.close();
    cached
}

#[test]
fn state_that_snapshots_share_counts_once_where_the_backend_counts_it_once() {
    let backend = || FakeBackend::scripted(roomy(), |_| Vec::new());
    let all: Vec<u32> = (1..=10).map(|i| 20 * i - 5).collect();
    assert_eq!(turns(backend().charging_shared_state_once(), 600), all);
    let alone = turns(backend(), 600);
    assert!(alone.iter().zip(&all).any(|(alone, once)| alone < once), "{alone:?}");
}

#[test]
fn snapshots_give_way_to_requests() {
    for once in [false, true] {
        let backend = FakeBackend::scripted(Limits { state_budget: 200, ..limits() }, |_| say("x"));
        let backend = if once { backend.charging_shared_state_once() } else { backend };
        let harness = Harness::new(backend, Options { cache_bytes: 200, ..options() });
        let ask =
            |branch, max| harness.run(Request { max_tokens: Some(max), ..request(prompt(0, branch, 40)) });
        ask(1, 5);
        ask(2, 5);
        wait_until("both are kept", || harness.engine.status().cache_bytes > 80);
        // As large as the budget: not even the snapshot that it starts from can stay, unless it is shared.
        let large = ask(2, 160);
        assert_eq!((large.text.as_str(), large.cached()), ("x", if once { 39 } else { 0 }));
        assert_eq!(ask(1, 5).cached(), 0, "it had to go");
        harness.close();
    }
}

/// Where recurrent state has places of its own, they may be gone while bytes are free.
#[test]
fn snapshots_give_way_to_requests_that_lack_a_place() {
    let backend = FakeBackend::scripted(roomy(), |_| say("x")).with_slots(3);
    let harness = Harness::new(backend, Options { max_sequences: 3, ..caching() });
    harness.run(request(prompt(0, 1, 40)));
    wait_until("both are kept", || harness.engine.status().cache_snapshots == 2);
    let all: Vec<_> = (2..5).map(|branch| harness.submit(request(prompt(0, branch, 40)))).collect();
    for generation in all {
        assert_eq!(Outcome::of(generation).text, "x");
    }
    wait_until("something is kept", || harness.engine.status().cache_snapshots > 0);
    harness.close();
}

#[test]
fn a_request_that_must_wait_costs_the_cache_nothing() {
    let limits = Limits { state_budget: 200, ..limits() };
    let script = |prompt: &[u32]| if prompt[0] == 0 { endless() } else { say("x") };
    let backend = FakeBackend::scripted(limits, script).with_step_time(Duration::from_millis(1));
    let harness = Harness::new(backend, Options { cache_bytes: 100, ..options() });
    harness.run(Request { max_tokens: Some(5), ..request(prompt(0, 1, 30)) });
    let running = harness.submit(Request { max_tokens: Some(90), cache_prompt: false, ..request(vec![0]) });
    wait_until("it runs", || harness.engine.status().running == 1);
    let waiting = harness.submit(Request { max_tokens: Some(100), ..request(prompt(0, 1, 30)) });
    let steps = harness.engine.status().steps;
    wait_until("it has waited a while", || harness.engine.status().steps > steps + 5);
    assert_eq!((harness.engine.status().waiting, harness.engine.status().cache_snapshots), (1, 2));
    drop(running);
    assert_eq!(Outcome::of(waiting).cached(), 29);
    harness.close();
}

#[test]
fn the_text_is_the_same_with_and_without() {
    let run = |options: Options, in_flight| {
        let backend = FakeBackend::sampling(roomy()).with_steps_in_flight(in_flight);
        let harness = Harness::new(backend, options);
        let mut history = Vec::new();
        let mut texts = Vec::new();
        let mut cached = 0;
        for turn in 0..6 {
            history.extend(prompt(0, turn, 30));
            let mut asked = Request { max_tokens: Some(12), ..request(history.clone()) };
            asked.sampling.logprobs = Some(0);
            let outcome = harness.run(asked);
            cached += outcome.cached();
            history.extend(&outcome.tokens);
            texts.push(outcome.tokens);
        }
        harness.close();
        (texts, cached)
    };
    let (plain, none) = run(options(), 1);
    assert_eq!(none, 0);
    for in_flight in 1..4 {
        let (texts, cached) = run(caching(), in_flight);
        assert_eq!(texts, plain);
        assert!(cached > 300, "{cached}");
    }
}

/// A request among many whose prompts begin alike.
#[derive(Clone, Debug)]
struct Plan {
    /// Two prompts share as many blocks as they have in common from the start.
    blocks: Vec<u8>,
    boundaries: Vec<u32>,
    max_tokens: u32,
    cache_prompt: bool,
    cancel_after: Option<usize>,
    pause_us: u64,
}

fn plan() -> impl Strategy<Value = Plan> {
    let kind = prop_oneof![20 => 0u8..3, 1 => Just(3)];
    let blocks = prop::collection::vec(kind, 1..6);
    let cancel = prop::option::weighted(0.3, 0usize..12);
    let boundaries = prop::collection::vec(0u32..70, 0..3);
    (blocks, boundaries, 1u32..30, prop::bool::weighted(0.9), cancel, 0u64..300).prop_map(
        |(blocks, boundaries, max_tokens, cache_prompt, cancel_after, pause_us)| Plan {
            blocks,
            boundaries,
            max_tokens,
            cache_prompt,
            cancel_after,
            pause_us,
        },
    )
}

impl Plan {
    fn request(&self) -> Request {
        // The last kind ends in poison.
        let block = |&block: &u8| {
            (0..12).map(move |i| if block == 3 && i == 11 { 299 } else { u32::from(block) * 12 + i })
        };
        Request {
            boundaries: self.boundaries.clone(),
            max_tokens: Some(self.max_tokens),
            cache_prompt: self.cache_prompt,
            ..request(self.blocks.iter().flat_map(block).collect())
        }
    }
}

/// The reply to a prompt depends on all of it; some prompts break the model.
fn reply(prompt: &[u32]) -> Vec<Act> {
    let hash = prompt.iter().fold(7u64, |hash, &token| hash.wrapping_mul(31).wrapping_add(token.into()));
    let end = if hash.is_multiple_of(7) { Act::NonFinite } else { Act::Token(END_OF_TURN) };
    [say(&format!("{hash:016x}")), vec![end]].concat()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_reply_is_that_to_its_own_prompt_and_nothing_leaks(
        plans in prop::collection::vec(plan(), 1..24),
        max_sequences in 1usize..6, prefill_chunk in 1u32..30, budget in 150u64..1500, cache_bytes in 0u64..800,
        in_flight in 1usize..4, charges_once in any::<bool>(), recurrent_bytes in 0u64..40, spare in 0usize..8,
    ) {
        let limits = Limits { state_budget: budget, ..limits() };
        let backend = FakeBackend::scripted(limits, reply)
            .with_steps_in_flight(in_flight)
            .with_recurrent_bytes(recurrent_bytes)
            .with_slots(max_sequences + spare)
            .with_poison(299);
        let backend = if charges_once { backend.charging_shared_state_once() } else { backend };
        let options =
            Options { max_sequences, prefill_chunk, cache_bytes, snapshot_interval: 20, ..options() };
        let harness = Harness::new(backend, options);
        thread::scope(|scope| {
            for plan in &plans {
                thread::sleep(Duration::from_micros(plan.pause_us));
                let request = plan.request();
                let prompt = request.prompt.clone();
                let mut generation = harness.submit(request);
                scope.spawn(move || match plan.cancel_after {
                    Some(events) => drop((0..events).map_while(|_| next(&mut generation)).count()),
                    None => check(plan, &prompt, &Outcome::of(generation)),
                });
            }
        });
        wait_until("all have ended", || harness.engine.status().running + harness.engine.status().waiting == 0);
        prop_assert!(harness.engine.status().cache_bytes <= cache_bytes);
        harness.close();
    }
}

fn check(plan: &Plan, prompt: &[u32], outcome: &Outcome) {
    let poisoned = prompt.contains(&299);
    let mut full = if poisoned { Vec::new() } else { reply(prompt) };
    let fails = poisoned || full.pop() == Some(Act::NonFinite) && plan.max_tokens as usize > full.len();
    full.truncate(plan.max_tokens as usize);
    assert_eq!(say(&outcome.text), full);
    match &outcome.end {
        Some(Ok(finished)) => {
            assert!(!fails);
            assert!(finished.usage.cached_tokens < finished.usage.prompt_tokens);
            assert!(plan.cache_prompt || finished.usage.cached_tokens == 0);
        }
        other => assert!(fails && matches!(other, Some(Err(RequestError::Model(_)))), "{other:?}"),
    }
}
