use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::{RANDOM, assert_refused, lily, output, path, stdout};

/// A server on a free port.
pub struct Server {
    pub process: Child,
    port: u16,
}

impl Server {
    pub fn start(options: &[&str]) -> Self {
        let args = [&["serve", "--port", "0"][..], options].concat();
        Self::started(lily(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap())
    }

    /// Waits until a process that was started says where it listens.
    pub fn started(mut process: Child) -> Self {
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address =
            line.strip_prefix("listening on http://127.0.0.1:").unwrap_or_else(|| panic!("{line:?}"));
        Self { process, port: address.trim().parse().unwrap() }
    }

    /// Sends a request; what comes back can be read from the stream.
    pub fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {length}\r\n\
             Content-Type: application/json\r\n{headers}\r\n{body}"
        )
        .unwrap();
        stream
    }

    /// The whole answer to a request.
    pub fn answer(&self, method: &str, path: &str, headers: &str, body: &str) -> String {
        let mut text = String::new();
        self.send(method, path, headers, body).read_to_string(&mut text).unwrap();
        text
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Fails if it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn it_answers_where_it_says_it_listens() {
    let server = Server::start(&["--ctx-size", "512"]);
    assert!(server.answer("GET", "/health", "", "").starts_with("HTTP/1.1 200"));
    let models = server.answer("GET", "/v1/models", "", "");
    assert!(models.contains("\"lily-demo\"") && models.contains("512"), "{models}");
    let body = r#"{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}"#;
    let reply = server.answer("POST", "/v1/chat/completions", "", body);
    assert!(reply.starts_with("HTTP/1.1 200") && reply.contains("\"completion_tokens\":3"), "{reply}");
}

/// Scoring a text as evaluation harnesses do gives the numbers of the command for it.
#[test]
fn echoed_log_probabilities_are_those_of_eval() {
    let server = Server::start(&["--ctx-size", "512"]);
    let text = "Once upon a time there was a fox who lived by the river. ".repeat(8);
    let body = json!({"prompt": text, "echo": true, "logprobs": 0, "max_tokens": 0}).to_string();
    let answer = server.answer("POST", "/v1/completions", "", &body);
    let answer: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
    let logprobs = answer["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    fs::write(&file, &text).unwrap();
    let eval: Value =
        serde_json::from_str(stdout(&output(&["eval", "--json", "--text", path(&file)]))).unwrap();
    assert!(logprobs.len() > 65, "more than one step reads it");
    assert_eq!((&logprobs[0], &eval["tokens"]), (&Value::Null, &json!(logprobs.len() - 1)));
    let sum: f64 = logprobs[1..].iter().map(|logprob| logprob.as_f64().unwrap()).sum();
    let (mean, expected) = (-sum / (logprobs.len() - 1) as f64, eval["nll_per_token"].as_f64().unwrap());
    assert!((mean - expected).abs() < 1e-4, "{mean} and {expected}");
}

/// Tokens read behind each step of a prompt, as a stream tells them.
fn read_by_steps(options: &[&str]) -> Vec<u64> {
    let server = Server::start(&[&["--ctx-size", "512", "--cache-ram", "0"][..], options].concat());
    let prompt = "Once upon a time there was a fox who lived by the river. ".repeat(8);
    let body =
        json!({"prompt": prompt, "stream": true, "return_progress": true, "max_tokens": 1}).to_string();
    let answer = server.answer("POST", "/v1/completions", "", &body);
    let events = answer.split("data: ").filter_map(|event| {
        let event = event.split("\n\n").next().unwrap();
        serde_json::from_str::<Value>(event).ok()?["prompt_progress"]["processed"].as_u64()
    });
    events.collect()
}

#[test]
fn a_step_reads_as_many_tokens_of_a_prompt_as_was_said() {
    let steps = read_by_steps(&["--ubatch-size", "16"]);
    assert!(steps.len() > 5, "{steps:?}");
    assert!(steps.windows(2).all(|pair| pair[1] > pair[0] && pair[1] - pair[0] <= 16), "{steps:?}");
    assert!(read_by_steps(&[]).len() < steps.len());
    // No more than a sequence can have.
    assert!(!read_by_steps(&["--ubatch-size", "4000000000"]).is_empty());
    assert_refused(&output(&["serve", "--ubatch-size", "0"]), 2, &["--ubatch-size", "0"]);
}

#[test]
fn the_key_is_asked_for() {
    let server = Server::start(&["--api-key", "sesame"]);
    assert!(server.answer("GET", "/v1/models", "", "").starts_with("HTTP/1.1 401"));
    let headers = "Authorization: Bearer sesame\r\n";
    assert!(server.answer("GET", "/v1/models", headers, "").starts_with("HTTP/1.1 200"));
}

#[test]
fn a_port_in_use_is_refused_by_number() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    assert_refused(
        &output(&["serve", "--port", &port]),
        1,
        &[&format!("port {port} on 127.0.0.1 is in use")],
    );
}

#[test]
fn other_machines_are_not_served_without_a_key() {
    let done = output(&["serve", "--host", "0.0.0.0", "--port", "0"]);
    assert_refused(&done, 2, &["0.0.0.0 can be reached from other machines", "--api-key", "--insecure"]);
    let done = output(&["serve", "--port", "0", "--api-key", " "]);
    assert_refused(&done, 2, &["the API key is empty"]);
}

#[test]
fn what_can_not_be_meant_is_refused() {
    let done = output(&["serve", "--port", "0", "--tls-cert", "cert.pem"]);
    assert_refused(&done, 2, &["--tls-key"]);
    let done = output(&["serve", "--port", "0", "--cors-origin", "https://app.example/page"]);
    assert_refused(&done, 2, &["--cors-origin", "without a path"]);
    let pair = ["--tls-cert", "absent.pem", "--tls-key", "absent.pem"];
    let done = output(&[&["serve", "--port", "0"][..], &pair].concat());
    assert_refused(&done, 1, &["absent.pem", "certificates"]);
}

#[test]
fn no_answer_tells_where_the_model_is() {
    let server = Server::start(&["--model", &RANDOM, "--ctx-size", "256"]);
    let folder = Path::new(&*RANDOM).parent().unwrap().to_str().unwrap();
    let chat = "/v1/chat/completions";
    for (method, path, body) in [
        ("GET", "/health", ""),
        ("GET", "/metrics", ""),
        ("GET", "/openapi.json", ""),
        ("GET", "/v1/models", ""),
        ("GET", "/v1/models/absent", ""),
        ("GET", "/nowhere", ""),
        ("POST", chat, "{"),
        ("POST", chat, r#"{"messages": [{"role": "tool", "content": "x"}]}"#),
        ("POST", chat, r#"{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}"#),
        ("POST", chat, r#"{"messages": [{"role": "user", "content": "x"}], "grammar": "start: /x"}"#),
        ("POST", "/v1/messages", r#"{"messages": 3}"#),
    ] {
        let answer = server.answer(method, path, "", body);
        assert!(answer.starts_with("HTTP/1.1 ") && !answer.contains(folder), "{method} {path}: {answer}");
    }
}

#[test]
fn logs_in_json_carry_the_id_of_their_request() {
    let args = ["serve", "--port", "0", "--log-format", "json"];
    let piped = lily(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut server = Server::started(piped);
    let body = r#"{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}"#;
    let reply = server.answer("POST", "/v1/chat/completions", "x-request-id: one-of-mine\r\n", body);
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    server.process.kill().unwrap();
    let mut log = String::new();
    server.process.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    // The notice of the demonstration model is for people.
    let lines = log.lines().filter(|line| !line.starts_with("Using the built-in"));
    let lines: Vec<Value> =
        lines.map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect();
    let finished = lines.iter().find(|line| line["fields"]["message"] == "finished").unwrap();
    assert_eq!(finished["span"]["id"], "one-of-mine");
    assert_eq!(finished["fields"]["completion_tokens"], 3);
}

#[test]
fn a_name_is_answered_to_if_it_is_given() {
    let asked = |server: &Server, host: &str| {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        write!(stream, "GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    let plain = Server::start(&["--model", &RANDOM]);
    let named =
        Server::start(&["--model", &RANDOM, "--allow-host", "lily.test", "--allow-host", "proxy.test"]);
    for host in ["lily.test", "proxy.test:8080"] {
        let refused = asked(&plain, host);
        assert!(refused.starts_with("HTTP/1.1 403") && refused.contains("host_not_allowed"), "{refused}");
        assert!(refused.contains("--allow-host"), "it says what to do: {refused}");
        assert!(asked(&named, host).starts_with("HTTP/1.1 200"));
    }
    assert!(asked(&named, "other.test").starts_with("HTTP/1.1 403"));
    assert!(asked(&named, "localhost").starts_with("HTTP/1.1 200"));
}

#[test]
fn traces_reach_the_collector_that_the_environment_names() {
    let collector = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", collector.local_addr().unwrap());
    let args = ["serve", "--port", "0", "--model", &RANDOM];
    let mut command = lily(&args);
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint);
    command.env("OTEL_SERVICE_NAME", "lily-of-this-test").env("OTEL_BSP_SCHEDULE_DELAY", "50");
    let server = Server::started(command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap());
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}).to_string();
    let reply = server.answer("POST", "/v1/chat/completions", "x-request-id: one-of-mine\r\n", &body);
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    let (mut stream, _) = collector.accept().unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut received = Vec::new();
    let words =
        ["POST /v1/traces ", "lily-of-this-test", "one-of-mine", "gen_ai.usage.output_tokens", "prefill"];
    while !words.iter().all(|word| String::from_utf8_lossy(&received).contains(word)) {
        let mut piece = [0; 4096];
        let length = stream.read(&mut piece).unwrap();
        assert!(length > 0, "{}", String::from_utf8_lossy(&received));
        received.extend_from_slice(&piece[..length]);
    }
}

#[test]
fn a_collector_that_can_not_be_reached_in_plain_http_is_refused() {
    let done = output(&["serve", "--port", "0", "--otlp-endpoint", "https://collector.example"]);
    assert_refused(&done, 2, &["--otlp-endpoint", "expected http://HOST:PORT"]);
}

#[test]
#[cfg(target_os = "linux")]
fn without_a_collector_no_thread_waits_for_spans() {
    let threads = |server: &Server| -> Vec<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", server.process.id())).unwrap();
        tasks.map(|task| fs::read_to_string(task.unwrap().path().join("comm")).unwrap()).collect()
    };
    let exporting = |server: &Server| threads(server).iter().any(|name| name.starts_with("OpenTelemetry"));
    let plain = Server::start(&["--model", &RANDOM]);
    let traced = Server::start(&["--model", &RANDOM, "--otlp-endpoint", "http://127.0.0.1:9"]);
    assert!(!exporting(&plain), "{:?}", threads(&plain));
    assert!(exporting(&traced), "{:?}", threads(&traced));
}
