//! From binding to the last answer.

use std::time::{Duration, Instant};

use lily_server::serve::{DEFAULT_HOST, ServeError, bind};
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::fixture::{Script, TestServer, question};
use crate::http::{Connection, chat};

#[tokio::test]
async fn a_port_in_use_is_named() {
    let taken = bind(DEFAULT_HOST, 0).await.unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = bind(DEFAULT_HOST, port).await.unwrap_err();
    assert!(matches!(error, ServeError::PortInUse { .. }), "{error}");
    let words = error.to_string();
    assert!(words.contains(&port.to_string()) && words.contains("--port"), "{words}");
}

#[tokio::test]
async fn an_address_of_another_machine_is_refused_by_name() {
    let error = bind("192.0.2.1", 0).await.unwrap_err();
    assert!(matches!(error, ServeError::Bind { .. }) && error.to_string().contains("192.0.2.1"), "{error}");
}

#[tokio::test]
async fn an_idle_server_stops_at_once() {
    let server = TestServer::start(Script::new()).await;
    let idle = Connection::open(server.address, b"").await;
    let start = Instant::now();
    server.stop().await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    drop(idle);
}

#[tokio::test]
async fn a_running_answer_may_finish_and_nothing_new_is_accepted() {
    let script = Script::new().reply("a</think>the whole answer").step_delay(Duration::from_millis(20));
    let mut server = TestServer::start(script).await;
    let mut body = question();
    body["stream"] = json!(true);
    let mut connection = Connection::open(server.address, &chat(&body)).await;
    connection.read_until("reasoning_content").await;
    server.tell_to_stop();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(TcpStream::connect(server.address).await.is_err(), "the port is closed");
    let chunks = connection.answer().await.chunks();
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn an_answer_that_takes_too_long_is_told_and_cut() {
    for stream in [false, true] {
        let script = Script::new().endless().step_delay(Duration::from_millis(5));
        let mut server = TestServer::start_with(script, |state| {
            state.limits.shutdown_time = Duration::from_millis(200);
        })
        .await;
        let mut body = question();
        body["stream"] = json!(stream);
        let connection = Connection::open(server.address, &chat(&body)).await;
        server.wait_for(|status| status.running == 1).await;
        let start = Instant::now();
        server.tell_to_stop();
        let answer = connection.answer().await;
        if stream {
            let events = answer.events();
            let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
            assert_eq!(last["error"]["code"], "shutdown");
        } else {
            answer.error(503, "shutdown");
        }
        server.stop().await.unwrap();
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    }
}
