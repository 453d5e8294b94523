//! The spans of answers.

use std::time::{Duration, SystemTime};

use lily_engine::request::{Finished, OutputFormat, Request};
use opentelemetry::trace::{Span, SpanKind, Status, TraceContextExt, Tracer};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::SdkTracer;

use super::{ERROR_TYPE, NAME, Traces, list};
use crate::generation::replies::reason;

/// The spans of the answers to one request.
#[derive(Debug)]
pub(crate) struct AnswerSpans {
    tracer: SdkTracer,
    submitted: SystemTime,
    /// `None`: it has ended.
    answers: Vec<Option<Context>>,
    /// Held, since the request's span ends when nobody has it any more.
    _request: Context,
}

impl AnswerSpans {
    /// Begins them, below the span of the request that is being answered.
    pub fn begin(traces: &Traces, requests: &[Request], model: &str) -> Self {
        let (tracer, request_context) = (&traces.tracer, Context::current());
        let begin = |request: &Request| {
            let operation = match request.format {
                OutputFormat::Chat { .. } => "chat",
                OutputFormat::Raw => "text_completion",
            };
            let span = tracer
                .span_builder(format!("{operation} {model}"))
                .with_kind(SpanKind::Internal)
                .with_attributes(asked(request, operation, model))
                .start_with_context(tracer, &request_context);
            Some(request_context.with_span(span))
        };
        let answers = requests.iter().map(begin).collect();
        Self { tracer: tracer.clone(), submitted: SystemTime::now(), answers, _request: request_context }
    }

    /// An answer is complete.
    pub fn finished(&mut self, i: usize, finished: &Finished) {
        let Some(answer) = self.answers.get_mut(i).and_then(Option::take) else { return };
        let (usage, timing) = (&finished.usage, &finished.timing);
        let count = |name, tokens: u32| KeyValue::new(name, i64::from(tokens));
        let input = count("gen_ai.usage.input_tokens", usage.prompt_tokens);
        let cached = count("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens);
        let output = count("gen_ai.usage.output_tokens", usage.completion_tokens);
        let reasons = list(vec![reason(finished.reason).to_owned()]);
        let span = answer.span();
        span.set_attributes([
            KeyValue::new("gen_ai.response.finish_reasons", reasons),
            input.clone(),
            cached.clone(),
            output.clone(),
            count("gen_ai.usage.reasoning.output_tokens", usage.reasoning_tokens),
        ]);
        let mut start = self.submitted;
        let mut part = |name: &'static str, time: Duration, attributes: Vec<KeyValue>| {
            let part = self.tracer.span_builder(name).with_start_time(start).with_attributes(attributes);
            start += time;
            part.start_with_context(&self.tracer, &answer).end_with_timestamp(start);
        };
        part("queue", timing.queued, Vec::new());
        part("prefill", timing.prefill, vec![input, cached]);
        if usage.completion_tokens > 0 {
            part("decode", timing.decode, vec![output]);
        }
        span.end_with_timestamp(start);
    }

    /// All answers that have not ended fail, for a reason of which the name is `kind`.
    pub fn failed(&mut self, kind: &'static str, problem: &str) {
        for answer in self.answers.iter_mut().filter_map(Option::take) {
            answer.span().set_attribute(KeyValue::new(ERROR_TYPE, kind));
            answer.span().set_status(Status::error(problem.to_owned()));
        }
    }
}

/// What a request asks for.
fn asked(request: &Request, operation: &'static str, model: &str) -> Vec<KeyValue> {
    let sampling = &request.sampling;
    let number = |name, value: f32| KeyValue::new(name, f64::from(value));
    let mut attributes = vec![
        KeyValue::new("gen_ai.operation.name", operation),
        KeyValue::new("gen_ai.provider.name", NAME),
        KeyValue::new("gen_ai.request.model", model.to_owned()),
        KeyValue::new("gen_ai.response.model", model.to_owned()),
        number("gen_ai.request.temperature", sampling.temperature),
        number("gen_ai.request.top_p", sampling.top_p),
        number("gen_ai.request.top_k", sampling.top_k as f32),
        number("gen_ai.request.presence_penalty", sampling.presence_penalty),
        number("gen_ai.request.frequency_penalty", sampling.frequency_penalty),
    ];
    let max_tokens = request.max_tokens.map(|n| KeyValue::new("gen_ai.request.max_tokens", i64::from(n)));
    let seed = sampling.seed.map(|seed| KeyValue::new("gen_ai.request.seed", seed.cast_signed()));
    attributes.extend([max_tokens, seed].into_iter().flatten());
    if !request.stop.is_empty() {
        attributes.push(KeyValue::new("gen_ai.request.stop_sequences", list(request.stop.clone())));
    }
    attributes
}
