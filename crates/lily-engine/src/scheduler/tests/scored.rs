//! Log-probabilities of prompts.

use super::*;

fn scored(prompt: Vec<u32>, max_tokens: u32) -> Request {
    let sampling = Sampling { logprobs: Some(2), ..greedy() };
    Request { sampling, prompt_logprobs: Some(2), max_tokens: Some(max_tokens), ..request(prompt) }
}

/// A harness whose backend has logits, two steps of which may be in flight.
fn harness(limits: Limits, options: Options) -> Harness {
    Harness::new(FakeBackend::sampling(limits).with_steps_in_flight(2), options)
}

#[test]
fn a_prompt_scores_as_what_was_generated_did() {
    let limits = Limits { max_batch_tokens: 256, ..limits() };
    for (prefill_chunk, cache_bytes) in [(16, 0), (256, 0), (256, 4096)] {
        let harness = harness(limits.clone(), Options { prefill_chunk, cache_bytes, ..options() });
        let prompt: Vec<u32> = (0..90).collect();
        let sampling = Sampling { logprobs: Some(2), ..greedy() };
        let wrote = harness.run(Request { sampling, max_tokens: Some(60), ..request(prompt.clone()) });
        assert!(wrote.prompt.is_empty() && wrote.tokens.len() > 5, "{wrote:?}");
        let ids: Vec<u32> = prompt.iter().copied().chain(wrote.tokens.iter().copied()).collect();
        for max_tokens in [0, 3] {
            let read = harness.run(scored(ids.clone(), max_tokens));
            let (first, rest) = read.prompt.split_first().unwrap();
            assert_eq!(first, &(ids[0], None));
            assert!(rest.iter().map(|(id, _)| id).eq(&ids[1..]));
            assert!(rest[89..].iter().map(|(_, logprobs)| logprobs.as_ref().unwrap()).eq(&wrote.logprobs));
            let usage = read.finished().usage;
            assert_eq!((usage.cached_tokens, usage.completion_tokens), (0, max_tokens));
            assert_eq!((read.tokens.len() as u32, read.reason()), (max_tokens, FinishReason::Length));
            assert_eq!(read.prefill.last(), Some(&(ids.len() as u32)));
        }
        harness.close();
    }
}

#[test]
fn chunks_stay_small_where_all_logits_are_wanted() {
    let limits = Limits { max_batch_tokens: 256, ..limits() };
    let harness = harness(limits, Options { prefill_chunk: 256, ..options() });
    let outcome = harness.run(scored(vec![7; 200], 1));
    assert_eq!(outcome.prefill, [64, 128, 192, 199, 200]);
    assert_eq!(outcome.prompt.len(), 200);
    harness.close();
}

#[test]
fn one_token_is_a_prompt_too() {
    let harness = harness(limits(), options());
    for max_tokens in [0, 1] {
        let outcome = harness.run(scored(vec![9], max_tokens));
        assert_eq!(outcome.prompt, [(9, None)]);
        assert_eq!(outcome.finished().usage.completion_tokens, max_tokens);
        assert!(outcome.text.is_empty() || max_tokens > 0);
    }
    harness.close();
}

#[test]
fn a_broken_prompt_fails() {
    let harness = Harness::new(FakeBackend::sampling(limits()).with_poison(5), options());
    let outcome = harness.run(scored(vec![1, 2, 5, 6], 0));
    assert!(matches!(outcome.error(), RequestError::Model(SegmentError::NonFinite { position: 2 })));
    harness.close();
}

#[test]
fn the_end_of_the_turn_is_scored_in_raw_output_alone() {
    let harness = Harness::scripted(|_| say("ab"));
    let sampling = Sampling { logprobs: Some(0), ..greedy() };
    for (format, end) in [(OutputFormat::Raw, Some(END_OF_TURN)), (chat(false), None)] {
        let outcome = harness.run(Request { sampling: sampling.clone(), format, ..request(vec![1]) });
        assert_eq!(outcome.tokens, tokens("ab").into_iter().chain(end).collect::<Vec<u32>>());
    }
    harness.close();
}
