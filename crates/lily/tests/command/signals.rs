//! Ctrl-C, and readers that leave.
#![cfg(unix)]

use std::io::{Read, Write};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use crate::serve::Server;
use crate::{RANDOM, lily};

/// Longer than any of these should take, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Starts an answer that would take minutes.
fn endless() -> Child {
    spawn(&["run", "--model", &RANDOM, "--raw", "Hello", "--temperature", "0"])
}

fn spawn(args: &[&str]) -> Child {
    let piped = Stdio::piped;
    lily(args).stdin(piped()).stdout(piped()).stderr(piped()).spawn().unwrap()
}

fn interrupt(process: &Child) {
    let id = process.id().to_string();
    assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
}

/// How the process ends, if it does soon.
#[track_caller]
fn end(process: &mut Child) -> ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = process.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > PATIENCE {
            process.kill().unwrap();
            panic!("it goes on");
        }
        sleep(Duration::from_millis(10));
    }
}

/// Waits for the first byte on standard output, and returns the rest of it.
#[track_caller]
fn first_byte(process: &mut Child) -> ChildStdout {
    let mut stdout = process.stdout.take().unwrap();
    let (sender, receiver) = channel();
    thread::spawn(move || {
        stdout.read_exact(&mut [0]).unwrap();
        sender.send(stdout)
    });
    receiver.recv_timeout(PATIENCE).expect("nothing is printed")
}

#[test]
fn an_answer_is_stopped_and_its_line_ended() {
    let mut process = endless();
    let mut stdout = first_byte(&mut process);
    interrupt(&process);
    assert_eq!(end(&mut process).code(), Some(130));
    let (mut out, mut err) = (Vec::new(), String::new());
    stdout.read_to_end(&mut out).unwrap();
    process.stderr.unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(out.last(), Some(&b'\n'));
    assert!(!err.contains("error") && !err.contains("panicked"), "{err}");
}

#[test]
fn a_reader_that_leaves_ends_the_command_quietly() {
    let mut process = endless();
    drop(first_byte(&mut process));
    assert!(end(&mut process).success());
    let mut err = String::new();
    process.stderr.unwrap().read_to_string(&mut err).unwrap();
    assert!(!err.contains("error") && !err.contains("panicked"), "{err}");
}

#[test]
fn a_chat_asks_twice() {
    let mut process = spawn(&["chat", "--model", &RANDOM, "--no-think", "-n", "2"]);
    let mut stdin = process.stdin.take().unwrap();
    // The answer shows that it listens.
    stdin.write_all(b"Hello\n").unwrap();
    let _stdout = first_byte(&mut process);
    sleep(Duration::from_millis(500));
    interrupt(&process);
    sleep(Duration::from_millis(500));
    assert!(process.try_wait().unwrap().is_none(), "once is not enough");
    interrupt(&process);
    assert_eq!(end(&mut process).code(), Some(130));
}

#[test]
fn an_idle_server_stops_at_once() {
    let mut server = Server::start(&[]);
    interrupt(&server.process);
    assert_eq!(end(&mut server.process).code(), Some(0));
}

#[test]
fn a_busy_server_lets_answers_finish_unless_asked_twice() {
    let mut server = Server::start(&[]);
    let body = r#"{"messages": [{"role": "user", "content": "Hello"}], "stream": true, "ignore_eos": true}"#;
    let mut stream = server.send("POST", "/v1/chat/completions", "", body);
    stream.read_exact(&mut [0; 512]).unwrap();
    interrupt(&server.process);
    // Two signals of which the first is not looked at yet are one.
    sleep(Duration::from_millis(500));
    stream.read_exact(&mut [0; 512]).unwrap();
    assert!(server.process.try_wait().unwrap().is_none(), "the answer goes on");
    interrupt(&server.process);
    let start = Instant::now();
    assert_eq!(end(&mut server.process).code(), Some(130));
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

#[test]
fn a_collector_that_says_nothing_does_not_keep_a_server_from_ending() {
    let collector = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", collector.local_addr().unwrap());
    let mut server = Server::start(&["--model", &RANDOM, "--otlp-endpoint", &endpoint]);
    let body = r#"{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}"#;
    let reply = server.answer("POST", "/v1/chat/completions", "", body);
    assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
    let start = Instant::now();
    interrupt(&server.process);
    assert_eq!(end(&mut server.process).code(), Some(0));
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}
