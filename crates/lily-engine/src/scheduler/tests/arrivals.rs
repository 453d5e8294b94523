//! Requests of all kinds that come and go at random times.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
struct Plan {
    prompt: usize,
    reply: usize,
    fails: bool,
    max_tokens: Option<u32>,
    /// Dropped after so many events.
    cancel_after: Option<usize>,
    pause_us: u64,
}

fn plan() -> impl Strategy<Value = Plan> {
    let limit = prop::option::of(1u32..60);
    let cancel = prop::option::weighted(0.3, 0usize..12);
    (1usize..60, 0usize..40, prop::bool::weighted(0.1), limit, cancel, 0u64..400).prop_map(
        |(prompt, reply, fails, max_tokens, cancel_after, pause_us)| Plan {
            prompt,
            reply,
            fails,
            max_tokens,
            cancel_after,
            pause_us,
        },
    )
}

impl Plan {
    fn request(&self, index: usize) -> Request {
        Request { max_tokens: self.max_tokens, ..request(vec![index as u32; self.prompt]) }
    }

    fn acts(&self) -> Vec<Act> {
        let end = if self.fails { Act::NonFinite } else { Act::Token(END_OF_TURN) };
        [vec![Act::Token(u32::from(b'r')); self.reply], vec![end]].concat()
    }

    fn check(&self, outcome: &Outcome) {
        let room =
            (limits().context as usize - self.prompt).min(self.max_tokens.map_or(usize::MAX, |n| n as usize));
        assert_eq!(outcome.text, "r".repeat(self.reply.min(room)));
        let fails_in_prefill = self.fails && self.reply == 0;
        assert_eq!(outcome.prefill.last() == Some(&(self.prompt as u32)), !fails_in_prefill);
        match &outcome.end {
            Some(Err(RequestError::Model(_))) => assert!(self.fails && room > self.reply),
            Some(Ok(end)) if room <= self.reply => assert_eq!(end.reason, FinishReason::Length),
            Some(Ok(end)) => assert_eq!((end.reason, self.fails), (FinishReason::Stop, false)),
            other => panic!("{other:?}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_request_ends_once_and_nothing_leaks(
        plans in prop::collection::vec(plan(), 1..24),
        max_sequences in 1usize..6, prefill_chunk in 1u32..30, budget in 4200u64..9000, in_flight in 1usize..4,
    ) {
        let limits = Limits { state_budget: budget, ..limits() };
        let acts: Vec<Vec<Act>> = plans.iter().map(Plan::acts).collect();
        let backend = FakeBackend::scripted(limits, move |prompt| acts[prompt[0] as usize].clone())
            .with_steps_in_flight(in_flight);
        let harness = Harness::new(backend, Options { max_sequences, prefill_chunk, ..options() });
        thread::scope(|scope| {
            for (index, plan) in plans.iter().enumerate() {
                thread::sleep(Duration::from_micros(plan.pause_us));
                let mut generation = harness.submit(plan.request(index));
                scope.spawn(move || match plan.cancel_after {
                    None => plan.check(&Outcome::of(generation)),
                    Some(events) => {
                        let mut left = events;
                        while left > 0 && next(&mut generation).is_some() {
                            left -= 1;
                        }
                    }
                });
            }
        });
        wait_until("all have ended", || harness.engine.status().running + harness.engine.status().waiting == 0);
        harness.close();
    }
}

#[test]
fn a_device_that_does_not_come_back_is_told_from_one_without_work() {
    let pause = Duration::from_millis(600);
    let harness = Harness::scripted(move |_| vec![Act::Pause(pause), Act::Token(1)]);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(harness.engine.status().stalled, Duration::ZERO, "nothing was asked");
    let generation = harness.submit(request(vec![1]));
    assert!(harness.engine.status().stalled < Duration::from_millis(200), "it has just begun");
    std::thread::sleep(Duration::from_millis(400));
    let stalled = harness.engine.status().stalled;
    assert!(stalled >= Duration::from_millis(300) && stalled < pause, "{stalled:?}");
    Outcome::of(generation).finished();
    assert_eq!(harness.engine.status().stalled, Duration::ZERO);
    harness.close();
}
