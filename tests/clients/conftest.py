"""Servers for the tests of clients: real processes on real sockets."""

import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import anthropic
import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120
# The clients reach this machine and nothing else: port 9 is the one that discards.
LOOPBACK_ONLY = {
    **dict.fromkeys(["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9"),
    **dict.fromkeys(["no_proxy", "NO_PROXY"], "127.0.0.1,localhost"),
}
os.environ |= LOOPBACK_ONLY
# Node comes with the Python packages.
NODE_PATH = f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"


class Server:
    """A process that says `listening on http://HOST:PORT`, or that after other words, and then serves."""

    def __init__(self, command, says="listening on", variables=None):
        self.lines = []
        self._says = re.compile(says + r" (http://\S+)")
        self.url = None
        self._heard = threading.Event()
        self.process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT, env={**os.environ, **(variables or {})},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )
        threading.Thread(target=self._listen, daemon=True).start()
        self._heard.wait(START_SECONDS)
        if self.url is None:
            self.stop()
            raise RuntimeError(f"{command} did not start:\n" + "".join(self.lines))

    def _listen(self):
        for line in self.process.stdout:
            self.lines.append(line)
            found = self._says.search(line)
            if found and self.url is None:
                self.url = found.group(1)
                self._heard.set()
        self._heard.set()

    @property
    def port(self):
        return int(self.url.rsplit(":", 1)[1])

    def client(self, api_key="none"):
        return openai.OpenAI(base_url=self.url + "/v1", api_key=api_key, max_retries=0, timeout=120)

    def anthropic(self, api_key="none"):
        return anthropic.Anthropic(base_url=self.url, api_key=api_key, max_retries=0, timeout=120)

    def stop(self):
        """Ctrl-C, as at a terminal; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def npm(name):
    """A program that ./test installed with npm."""
    path = ROOT / "tests/clients/node_modules/.bin" / name
    if not path.exists():
        pytest.fail(f"{path} is missing: run ./test, which installs it", pytrace=False)
    return path


def binary(variable, default):
    path = Path(os.environ.get(variable, ROOT / default)).absolute()
    if not path.exists():
        pytest.fail(f"{path} is missing: build it, or name another with {variable}", pytrace=False)
    return path


def serve(*arguments):
    return Server([binary("LILY_BIN", "target/release/lily"), "serve", "--port", "0", *arguments])


@pytest.fixture(scope="session")
def lily():
    """`lily serve` with the model that ships with it."""
    server = serve()
    yield server
    server.stop()


@pytest.fixture
def fresh_lily():
    """One that a test may end."""
    server = serve()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def lily_with_key():
    """The same behind an API key."""
    server = serve("--api-key", "sesame")
    yield server
    server.stop()


@pytest.fixture
def serve_script(tmp_path):
    """Starts a server whose model follows a script, see crates/lily-server/examples/scripted_server.rs."""
    started = []

    def start(*rules):
        script = tmp_path / "script.json"
        script.write_text(json.dumps([{"when": when, "reply": reply} for when, reply in rules]))
        default = "target/release/examples/scripted_server"
        started.append(Server([binary("LILY_SCRIPTED_SERVER", default), script]))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def scripted(serve_script):
    """Its model asks for the weather in Brno, and answers when it was told."""
    arguments = {"city": "Brno", "days": 3}
    return serve_script(
        ("<tool_response>", "Sunny, then.\n</think>\n\nIt is sunny in Brno."),
        ("", "I need the weather.\n</think>\n\n" + call("get_weather", arguments)),
    )


def call(name, arguments):
    """A tool call in the model's words."""
    values = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"
