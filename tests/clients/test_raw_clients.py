"""Clients that are not Python packages: curl, and a socket that is closed half way."""

import json
import signal
import socket
import subprocess
import time
import urllib.request

# Never ends by itself before the context is full.
ENDLESS = {"messages": [{"role": "user", "content": "Go on."}], "ignore_eos": True, "stream": True}


def health(server):
    with urllib.request.urlopen(server.url + "/health", timeout=10) as answer:
        return json.load(answer)


def open_stream(server, body):
    """A socket on which the answer to a request has begun."""
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    stream = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    stream.sendall(head.encode() + data)
    received = b""
    while received.count(b"data: ") < 4:
        piece = stream.recv(4096)
        assert piece, f"closed after {received!r}"
        received += piece
    return stream


def test_curl_streams(lily):
    body = {**ENDLESS, "ignore_eos": False, "max_tokens": 16}
    command = [
        "curl", "--no-buffer", "--silent", "--show-error", "--fail", lily.url + "/v1/chat/completions",
        "--header", "Content-Type: application/json", "--data", json.dumps(body),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    events = [line for line in done.stdout.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
    assert len(events) > 3


def test_a_client_that_leaves_mid_stream_stops_the_work(lily):
    stream = open_stream(lily, ENDLESS)
    assert health(lily)["running"] == 1
    stream.close()
    deadline = time.monotonic() + 2
    while (now := health(lily))["running"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert now["running"] == 0 and now["waiting"] == 0
    time.sleep(0.2)
    assert health(lily)["steps"] == now["steps"], "nothing is computed for nobody"
    reply = lily.client().chat.completions.create(
        model="lily", messages=ENDLESS["messages"], max_tokens=4
    )
    assert reply.usage.completion_tokens > 0


def test_many_clients_that_leave_do_no_harm(lily):
    for _ in range(20):
        open_stream(lily, ENDLESS).close()
    reply = lily.client().chat.completions.create(
        model="lily", messages=ENDLESS["messages"], max_tokens=4
    )
    assert reply.usage.completion_tokens > 0


def test_ctrl_c_ends_an_idle_server_at_once(fresh_lily):
    assert health(fresh_lily)["status"] == "ok"
    start = time.monotonic()
    fresh_lily.process.send_signal(signal.SIGINT)
    assert fresh_lily.process.wait(10) == 0
    assert time.monotonic() - start < 5
