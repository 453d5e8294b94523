//! What a collector is told of requests: OTLP over HTTP, on a real socket.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::http::HeaderMap;
use axum::routing::post;
use lily_server::traces::Traces;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, Span};
use prost::Message;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::task::{block_in_place, spawn_blocking};

use crate::chat::streamed;
use crate::fixture::{Script, TestServer, log, question};
use crate::http::{Connection, JSON, chat, exchange, post_chat, request};

/// A trace of the client's own.
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// A collector that keeps what it gets.
struct Collector {
    address: SocketAddr,
    received: Arc<Mutex<Vec<ResourceSpans>>>,
}

impl Collector {
    async fn start() -> Self {
        let received = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&received);
        let take = async move |headers: HeaderMap, body: Bytes| {
            assert_eq!(headers["content-type"], "application/x-protobuf");
            let request = ExportTraceServiceRequest::decode(body).unwrap();
            kept.lock().unwrap().extend(request.resource_spans);
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(axum::serve(listener, Router::new().route("/v1/traces", post(take))).into_future());
        Self { address, received }
    }

    fn spans(&self) -> Vec<Span> {
        let received = self.received.lock().unwrap();
        received.iter().flat_map(|spans| &spans.scope_spans).flat_map(|scope| scope.spans.clone()).collect()
    }
}

fn start_traces(address: SocketAddr) -> Arc<Traces> {
    Arc::new(Traces::start(&format!("http://{address}/"), false, Handle::current()).unwrap())
}

async fn server(script: Script, traces: &Arc<Traces>) -> TestServer {
    let traces = Arc::clone(traces);
    TestServer::start_with(script, |state| state.traces = Some(traces)).await
}

/// Sends what is left.
async fn flush(traces: Arc<Traces>) {
    spawn_blocking(move || traces.shutdown()).await.unwrap();
}

/// As JSON would have it.
fn value(any: &AnyValue) -> Value {
    match any.value.as_ref().unwrap() {
        Any::StringValue(text) => json!(text),
        Any::IntValue(number) => json!(number),
        Any::DoubleValue(number) => json!(number),
        Any::ArrayValue(list) => list.values.iter().map(value).collect(),
        other => panic!("{other:?}"),
    }
}

fn attributes(attributes: &[KeyValue]) -> HashMap<&str, Value> {
    attributes.iter().map(|a| (a.key.as_str(), value(a.value.as_ref().unwrap()))).collect()
}

fn named<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no {name} among {names:?}"))
}

fn error_type(span: &Span) -> Value {
    attributes(&span.attributes).get("error.type").cloned().unwrap_or_default()
}

#[tokio::test]
async fn a_request_is_a_span_below_the_clients_with_its_answer_and_the_parts_of_it_below() {
    let collector = Collector::start().await;
    for stream in [false, true] {
        collector.received.lock().unwrap().clear();
        let traces = start_traces(collector.address);
        let script = Script::new().reply("Hm.</think>a b").prefill_delay(Duration::from_millis(20));
        let server = server(script.step_delay(Duration::from_millis(2)).cache(4096), &traces).await;
        let mut body = if stream { streamed(question()) } else { question() };
        body["seed"] = json!(7);
        body["max_tokens"] = json!(100);
        body["stop"] = json!(["x", "y"]);
        body["top_p"] = json!(0.5);
        let parent = format!("00-{TRACE}-{PARENT}-01");
        let headers = [JSON, ("traceparent", &parent), ("x-request-id", "mine-1")];
        let head = request("POST", "/v1/chat/completions", &headers, body.to_string().as_bytes());
        let start = Instant::now();
        assert_eq!(exchange(server.address, &head).await.status, 200);
        let took = start.elapsed();
        flush(traces).await;
        let spans = collector.spans();
        assert_eq!(spans.len(), 5, "{spans:?}");
        assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE));

        let whole = named(&spans, "POST /v1/chat/completions");
        assert_eq!((hex(&whole.parent_span_id).as_str(), whole.kind()), (PARENT, SpanKind::Server));
        let known = attributes(&whole.attributes);
        for (name, value) in [
            ("http.request.method", json!("POST")),
            ("http.route", json!("/v1/chat/completions")),
            ("url.path", json!("/v1/chat/completions")),
            ("url.scheme", json!("http")),
            ("http.response.status_code", json!(200)),
            ("http.response.header.x-request-id", json!(["mine-1"])),
        ] {
            assert_eq!(known[name], value, "{name}");
        }

        let answer = named(&spans, "chat scripted");
        assert_eq!(answer.parent_span_id, whole.span_id);
        let known = attributes(&answer.attributes);
        for (name, value) in [
            ("gen_ai.operation.name", json!("chat")),
            ("gen_ai.provider.name", json!("lily")),
            ("gen_ai.request.model", json!("scripted")),
            ("gen_ai.response.model", json!("scripted")),
            ("gen_ai.request.temperature", json!(0.0)),
            ("gen_ai.request.top_p", json!(0.5)),
            ("gen_ai.request.seed", json!(7)),
            ("gen_ai.request.max_tokens", json!(100)),
            ("gen_ai.request.stop_sequences", json!(["x", "y"])),
            ("gen_ai.response.finish_reasons", json!(["stop"])),
            ("gen_ai.usage.cache_read.input_tokens", json!(0)),
            ("gen_ai.usage.output_tokens", json!(8)),
            ("gen_ai.usage.reasoning.output_tokens", json!(4)),
        ] {
            assert_eq!(known[name], value, "{name}");
        }

        let parts = ["queue", "prefill", "decode"].map(|name| named(&spans, name));
        assert!(parts.iter().all(|part| part.parent_span_id == answer.span_id));
        assert!(parts.windows(2).all(|pair| pair[0].end_time_unix_nano == pair[1].start_time_unix_nano));
        assert_eq!(parts[2].end_time_unix_nano, answer.end_time_unix_nano);
        let time = |span: &Span| Duration::from_nanos(span.end_time_unix_nano - span.start_time_unix_nano);
        assert!(time(parts[1]) >= Duration::from_millis(20) && time(parts[2]) >= Duration::from_millis(14));
        assert!(
            time(answer) <= took && time(whole) <= took && time(whole) >= time(parts[1]) + time(parts[2])
        );
        let [read, written] = [parts[1], parts[2]].map(|part| attributes(&part.attributes));
        assert_eq!(read["gen_ai.usage.input_tokens"], known["gen_ai.usage.input_tokens"]);
        assert_eq!(written["gen_ai.usage.output_tokens"], 8);
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn a_collector_knows_the_servers_name_and_log_lines_the_trace() {
    let collector = Collector::start().await;
    let traces = start_traces(collector.address);
    let server = server(Script::new().reply("a</think>b"), &traces).await;
    let (_guard, lines) = log();
    assert_eq!(post_chat(server.address, &question()).await.status, 200);
    flush(traces).await;
    let received = collector.received.lock().unwrap();
    let resource = attributes(&received[0].resource.as_ref().unwrap().attributes);
    assert_eq!(resource["service.name"], "lily");
    let trace = hex(&received[0].scope_spans[0].spans[0].trace_id);
    assert!(lines().contains(&format!("trace_id={trace}")), "{}", lines());
}

#[tokio::test]
async fn a_trace_that_the_client_does_not_sample_is_not_sent() {
    let collector = Collector::start().await;
    let traces = start_traces(collector.address);
    let server = server(Script::new().reply("a</think>b"), &traces).await;
    for parent in [format!("00-{TRACE}-{PARENT}-00"), "nonsense".to_owned()] {
        let headers = [JSON, ("traceparent", &*parent)];
        let head = request("POST", "/v1/chat/completions", &headers, question().to_string().as_bytes());
        assert_eq!(exchange(server.address, &head).await.status, 200);
    }
    flush(traces).await;
    let spans = collector.spans();
    assert_eq!(spans.len(), 5, "those of the second request");
    assert!(spans.iter().all(|span| hex(&span.trace_id) != TRACE));
}

#[tokio::test]
async fn every_answer_has_a_span_and_so_has_what_fails() {
    let collector = Collector::start().await;
    let traces = start_traces(collector.address);
    let script =
        Script::new().reply("a</think>b").reply("a</think>b").reply("some words").non_finite_after(3);
    let server = server(script, &traces).await;
    let mut two = question();
    two["n"] = json!(2);
    assert_eq!(post_chat(server.address, &two).await.status, 200);
    post_chat(server.address, &question()).await.error(500, "model_error");
    post_chat(server.address, &json!({})).await.error(400, "missing_required_parameter");
    flush(traces).await;
    let spans = collector.spans();
    let answers: Vec<&Span> = spans.iter().filter(|span| span.name == "chat scripted").collect();
    assert_eq!(answers.len(), 3);
    assert_eq!(answers[0].parent_span_id, answers[1].parent_span_id);
    let status = |span: &Span| span.status.as_ref().map_or(StatusCode::Unset, |status| status.code());
    let failed: Vec<&&Span> = answers.iter().filter(|span| status(span) == StatusCode::Error).collect();
    assert_eq!(failed.len(), 1);
    assert_eq!(error_type(failed[0]), "model_error");
    let requests: Vec<&Span> = spans.iter().filter(|span| span.name.starts_with("POST")).collect();
    let codes: Vec<_> = requests
        .iter()
        .map(|span| (attributes(&span.attributes)["http.response.status_code"].clone(), status(span)))
        .collect();
    let expected = [(200, StatusCode::Unset), (500, StatusCode::Error), (400, StatusCode::Unset)];
    assert_eq!(codes, expected.map(|(code, status)| (json!(code), status)));
}

#[tokio::test]
async fn a_client_that_leaves_shows() {
    let collector = Collector::start().await;
    let traces = start_traces(collector.address);
    let server = server(Script::new().endless().step_delay(Duration::from_millis(1)), &traces).await;
    let mut connection = Connection::open(server.address, &chat(&streamed(question()))).await;
    connection.read_until("reasoning_content").await;
    drop(connection);
    server.wait_for(|status| status.running == 0).await;
    // Its connections end with it, and with them what they hold.
    server.stop().await.unwrap();
    flush(traces).await;
    let spans = collector.spans();
    assert_eq!(error_type(named(&spans, "chat scripted")), "cancelled");
    let whole = named(&spans, "POST /v1/chat/completions");
    assert_eq!(attributes(&whole.attributes)["http.response.status_code"], 200);
}

/// One that refuses connections, one that takes them and says nothing, one that refuses spans.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_fails_harms_no_request() {
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refusing = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (silent_address, refusing_address) = (silent.local_addr().unwrap(), refusing.local_addr().unwrap());
    tokio::spawn(axum::serve(refusing, Router::new()).into_future());
    for address in [closed, silent_address, refusing_address] {
        let traces = start_traces(address);
        let server = server(Script::new().reply("a</think>b"), &traces).await;
        for _ in 0..3 {
            let start = Instant::now();
            assert_eq!(post_chat(server.address, &question()).await.status, 200);
            assert!(start.elapsed() < Duration::from_secs(2));
        }
        let start = Instant::now();
        block_in_place(|| traces.shutdown());
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
        server.stop().await.unwrap();
    }
}

#[test]
fn an_endpoint_that_can_not_be_used_is_refused() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for endpoint in ["https://collector.example", "collector:4318", "", "http://", "grpc://127.0.0.1:4317"] {
        let error = Traces::start(endpoint, false, runtime.handle().clone()).unwrap_err().to_string();
        assert!(error.contains("expected http://HOST:PORT") && error.contains(endpoint), "{error}");
    }
}
