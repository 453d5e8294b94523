//! A client of HTTP/1.1 that shows what is on the wire and can misbehave.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// No test waits longer than this for anything.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A response, its body put together.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The error, whose envelope must be complete.
    #[track_caller]
    pub fn error(&self, status: u16, code: &str) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("application/json"));
        let error = self.json()["error"].clone();
        let names: Vec<&String> = error.as_object().unwrap().keys().collect();
        assert_eq!(names, ["message", "type", "param", "code"]);
        assert_eq!(error["code"], code, "{error}");
        assert!(!error["message"].as_str().unwrap().is_empty());
        let kind = match status {
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        assert_eq!(error["type"], kind);
        error
    }

    /// The data of all server-sent events.
    pub fn events(&self) -> Vec<String> {
        assert_eq!(self.status, 200, "{}", self.text());
        assert_eq!(self.header("content-type"), Some("text/event-stream"));
        events(self.text())
    }

    /// The chunks of a stream that ends as it should.
    pub fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"));
        events.iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

/// The data of the complete server-sent events in a text.
pub fn events(text: &str) -> Vec<String> {
    let complete = text.rsplit_once("\n\n").map_or("", |(complete, _)| complete);
    let data = complete.split("\n\n").filter_map(|event| event.strip_prefix("data: "));
    data.map(str::to_owned).collect()
}

/// The bytes of a request. The connection is closed after the answer.
pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    if !body.is_empty() {
        head += &format!("Content-Length: {}\r\n", body.len());
    }
    [head.as_bytes(), b"\r\n", body].concat()
}

pub const JSON: (&str, &str) = ("Content-Type", "application/json");

/// The bytes of a chat request.
pub fn chat(body: &Value) -> Vec<u8> {
    request("POST", "/v1/chat/completions", &[JSON], body.to_string().as_bytes())
}

/// A connection whose other end is looked at byte by byte.
pub struct Connection {
    stream: TcpStream,
    pub received: Vec<u8>,
}

impl Connection {
    /// Connects and sends.
    pub async fn open(address: SocketAddr, bytes: &[u8]) -> Self {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        Self { stream, received: Vec::new() }
    }

    pub async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    /// Reads until what was received contains `text`.
    pub async fn read_until(&mut self, text: &str) {
        let found = async {
            while !String::from_utf8_lossy(&self.received).contains(text) {
                assert_ne!(
                    self.stream.read_buf(&mut self.received).await.unwrap(),
                    0,
                    "closed before {text:?}"
                );
            }
        };
        timeout(PATIENCE, found).await.unwrap_or_else(|_| panic!("no {text:?} came"));
    }

    /// Reads until the server closes the connection.
    pub async fn end(mut self) -> Vec<u8> {
        let end = self.stream.read_to_end(&mut self.received);
        timeout(PATIENCE, end).await.expect("the server closes").unwrap();
        self.received
    }

    /// Reads an answer, after which the server closes the connection.
    pub async fn answer(self) -> Answer {
        parse(&self.end().await)
    }
}

/// Sends a request and reads its answer.
pub async fn exchange(address: SocketAddr, bytes: &[u8]) -> Answer {
    Connection::open(address, bytes).await.answer().await
}

pub async fn get(address: SocketAddr, path: &str) -> Answer {
    exchange(address, &request("GET", path, &[], b"")).await
}

pub async fn post(address: SocketAddr, path: &str, body: &Value) -> Answer {
    exchange(address, &request("POST", path, &[JSON], body.to_string().as_bytes())).await
}

pub async fn post_chat(address: SocketAddr, body: &Value) -> Answer {
    exchange(address, &chat(body)).await
}

fn parse(bytes: &[u8]) -> Answer {
    let split = bytes.windows(4).position(|w| w == b"\r\n\r\n").expect("a head") + 4;
    let head = std::str::from_utf8(&bytes[..split]).unwrap();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers = lines.filter_map(|line| line.split_once(": "));
    let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    let mut answer = Answer { status, headers, body: bytes[split..].to_vec() };
    if answer.header("transfer-encoding") == Some("chunked") {
        answer.body = join_chunks(&bytes[split..]);
    }
    answer
}

/// Undoes `Transfer-Encoding: chunked`; the last chunk must be there.
fn join_chunks(mut bytes: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        let line = bytes.windows(2).position(|w| w == b"\r\n").expect("the length of a chunk");
        let length = usize::from_str_radix(std::str::from_utf8(&bytes[..line]).unwrap(), 16).unwrap();
        if length == 0 {
            return body;
        }
        body.extend_from_slice(&bytes[line + 2..][..length]);
        bytes = &bytes[line + 2 + length + 2..];
    }
}
