//! What a request may ask for.

use lily_model::backend::Limits;
use lily_model::sample::MOST_BIASES;

use crate::request::{Request, Sampling, SubmitError};

/// Checks everything about a request that does not depend on the state of the engine.
pub(crate) fn check(request: &Request, limits: &Limits) -> Result<(), SubmitError> {
    check_prompt(&request.prompt, limits)?;
    check_sampling(&request.sampling, limits)?;
    if request.max_tokens == Some(0) && request.prompt_logprobs.is_none() {
        let problem = "expected at least 1 where the prompt is not asked about, found 0";
        return Err(invalid("max_tokens", problem.to_owned()));
    }
    if request.thinking_budget == Some(0) {
        return Err(invalid("thinking_budget", "expected at least 1, found 0".to_owned()));
    }
    if let Some(i) = request.stop.iter().position(String::is_empty) {
        return Err(invalid(
            "stop",
            format!("string {i} is empty: it would end every answer before it begins"),
        ));
    }
    Ok(())
}

fn invalid(parameter: &'static str, problem: String) -> SubmitError {
    SubmitError::InvalidParameter { parameter, problem }
}

fn check_prompt(prompt: &[u32], limits: &Limits) -> Result<(), SubmitError> {
    if prompt.is_empty() {
        return Err(SubmitError::EmptyPrompt);
    }
    if prompt.len() >= limits.context as usize {
        let tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        return Err(SubmitError::ContextExceeded { prompt: tokens, context: limits.context });
    }
    match prompt.iter().position(|&id| id >= limits.vocab_size) {
        None => Ok(()),
        Some(i) => Err(invalid(
            "prompt",
            format!("token {i} is {}, but the vocabulary has ids below {}", prompt[i], limits.vocab_size),
        )),
    }
}

fn check_sampling(sampling: &Sampling, limits: &Limits) -> Result<(), SubmitError> {
    let range = |parameter, value: f32, low: f32, high: f32| {
        // Neither bound holds for NaN.
        if (low..=high).contains(&value) {
            return Ok(());
        }
        let expected = if high == f32::MAX {
            format!("a finite number, {low} or more")
        } else {
            format!("a number from {low} to {high}")
        };
        Err(invalid(parameter, format!("expected {expected}, found {value}")))
    };
    range("temperature", sampling.temperature, 0.0, f32::MAX)?;
    range("top_p", sampling.top_p, 0.0, 1.0)?;
    range("min_p", sampling.min_p, 0.0, 1.0)?;
    range("presence_penalty", sampling.presence_penalty, -2.0, 2.0)?;
    range("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)?;
    let repetition = sampling.repetition_penalty;
    if !(repetition.is_normal() && repetition > 0.0) {
        let problem = format!("expected a finite number above 0, found {repetition}");
        return Err(invalid("repetition_penalty", problem));
    }
    let biases = sampling.logit_bias.len();
    if biases > MOST_BIASES {
        let problem = format!("expected at most {MOST_BIASES} tokens, found {biases}");
        return Err(invalid("logit_bias", problem));
    }
    for &(token, bias) in sampling.logit_bias.iter() {
        if token >= limits.vocab_size {
            let problem = format!("token {token}: the vocabulary has ids below {}", limits.vocab_size);
            return Err(invalid("logit_bias", problem));
        }
        range("logit_bias", bias, -100.0, 100.0)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{greedy, limits, request};
    use std::sync::Arc;

    fn parameter(change: impl FnOnce(&mut Request)) -> Option<&'static str> {
        let mut request = request(vec![1]);
        change(&mut request);
        match check(&request, &limits()) {
            Ok(()) => None,
            Err(SubmitError::InvalidParameter { parameter, problem }) => {
                assert!(
                    problem.contains("expected") || problem.contains("token") || problem.contains("empty")
                );
                Some(parameter)
            }
            Err(other) => panic!("{other}"),
        }
    }

    fn sampling(change: impl FnOnce(&mut Sampling)) -> Option<&'static str> {
        parameter(|request| change(&mut request.sampling))
    }

    #[test]
    fn numbers_out_of_range_are_refused_by_name() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.1] {
            assert_eq!(sampling(|s| s.temperature = bad), Some("temperature"), "{bad}");
            assert_eq!(sampling(|s| s.top_p = bad), Some("top_p"), "{bad}");
            assert_eq!(sampling(|s| s.min_p = bad), Some("min_p"), "{bad}");
            assert_eq!(sampling(|s| s.repetition_penalty = bad), Some("repetition_penalty"), "{bad}");
        }
        assert_eq!(sampling(|s| s.repetition_penalty = 0.0), Some("repetition_penalty"));
        for bad in [f32::NAN, 2.1, -2.1] {
            assert_eq!(sampling(|s| s.presence_penalty = bad), Some("presence_penalty"), "{bad}");
            assert_eq!(sampling(|s| s.frequency_penalty = bad), Some("frequency_penalty"), "{bad}");
            assert_eq!(sampling(|s| s.logit_bias = Arc::new([(1, bad * 50.0)])), Some("logit_bias"), "{bad}");
        }
        assert_eq!(sampling(|s| s.top_p = 1.1), Some("top_p"));
        assert_eq!(sampling(|s| s.min_p = 1.1), Some("min_p"));
        assert_eq!(sampling(|s| s.logit_bias = Arc::new([(limits().vocab_size, 1.0)])), Some("logit_bias"));
        assert_eq!(sampling(|s| s.logit_bias = vec![(1, 1.0); 2048].into()), None);
        assert_eq!(sampling(|s| s.logit_bias = vec![(1, 1.0); 2049].into()), Some("logit_bias"));
    }

    #[test]
    fn bounds_themselves_are_allowed() {
        for (edge, penalty) in [(0.0, -2.0), (1.0, 2.0)] {
            let allowed = sampling(|s| {
                *s = Sampling {
                    temperature: edge,
                    top_p: edge,
                    min_p: edge,
                    presence_penalty: penalty,
                    frequency_penalty: penalty,
                    logit_bias: Arc::new([(0, penalty * 50.0)]),
                    ..greedy()
                }
            });
            assert_eq!(allowed, None);
        }
    }

    #[test]
    fn other_fields_are_checked() {
        assert_eq!(parameter(|r| r.max_tokens = Some(0)), Some("max_tokens"));
        assert_eq!(parameter(|r| (r.max_tokens, r.prompt_logprobs) = (Some(0), Some(0))), None);
        assert_eq!(parameter(|r| r.thinking_budget = Some(0)), Some("thinking_budget"));
        assert_eq!(parameter(|r| r.stop = vec!["a".into(), String::new()]), Some("stop"));
        assert_eq!(parameter(|r| r.prompt = vec![1, limits().vocab_size]), Some("prompt"));
    }

    #[test]
    fn a_prompt_must_leave_room_for_an_answer() {
        let context = limits().context;
        let error = |length: u32| check(&request(vec![1; length as usize]), &limits()).err();
        assert_eq!(error(0), Some(SubmitError::EmptyPrompt));
        assert_eq!(error(context - 1), None);
        for prompt in [context, context + 1] {
            assert_eq!(error(prompt), Some(SubmitError::ContextExceeded { prompt, context }));
        }
    }
}
