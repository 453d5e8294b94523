"""LiteLLM's proxy, a process of its own, in front of two servers of which one dies."""

import json
import socket
import sys
from pathlib import Path

import httpx
import pytest
from conftest import Server
from test_litellm import chats

KEY = "sk-for-this-test-and-no-other-0123456789"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ASK = {"model": "lily", "temperature": 0, "max_tokens": 24, "messages": QUESTION}
ASK |= {"extra_body": {"enable_thinking": False}}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}, "days": {}}}},
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start_proxy(tmp_path):
    """Starts a proxy before servers; the one that gets a request is drawn."""
    started = []

    def start(*servers):
        def deployment(server):
            at = {"model": "openai/lily", "api_base": server.url + "/v1", "api_key": "none"}
            return {"model_name": "lily", "litellm_params": at, "model_info": {"health_check_max_tokens": 8}}

        settings = {
            "model_list": [deployment(server) for server in servers],
            "router_settings": {"num_retries": 3, "retry_after": 0, "allowed_fails": 0, "cooldown_time": 600},
            "general_settings": {"master_key": KEY},
            "litellm_settings": {"telemetry": False},
        }
        file = tmp_path / "proxy.yaml"
        file.write_text(json.dumps(settings))  # which is YAML too
        command = [Path(sys.executable).with_name("litellm"), "--config", file, "--host", "127.0.0.1"]
        # It would fetch a list of prices.
        variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        started.append(Server([*command, "--port", free_port()], "running on", variables))
        return started[-1]

    yield start
    for proxy in started:
        proxy.stop()


def health(proxy):
    """How many servers the proxy finds well, and how many not, when it asks them."""
    answer = httpx.get(proxy.url + "/health", headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    assert answer.status_code in (200, 503), answer.text
    report = answer.json()
    return report["healthy_count"], report["unhealthy_count"]


def test_it_spreads_requests_and_survives_the_death_of_a_server(start_proxy, lily, fresh_lily):
    servers = [lily, fresh_lily]
    proxy = start_proxy(*servers)
    assert health(proxy) == (2, 0), "".join(proxy.lines)
    client = proxy.client(KEY)
    before = [chats(server) for server in servers]
    # That one gets none of 40 has a chance of 2 in 10^12.
    for _ in range(40):
        assert "Paris" in client.chat.completions.create(**ASK).choices[0].message.content
    assert all(chats(server) > was for server, was in zip(servers, before))
    fresh_lily.process.kill()
    fresh_lily.process.wait()
    for _ in range(10):
        stream = client.chat.completions.create(**ASK, stream=True)
        assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert health(proxy) == (1, 1), "".join(proxy.lines)


def test_thoughts_calls_and_the_other_apis_come_through(start_proxy, scripted):
    proxy = start_proxy(scripted)
    chat = proxy.client(KEY).chat.completions.create(model="lily", messages=QUESTION, tools=[TOOL])
    message = chat.choices[0].message
    assert message.reasoning_content.strip() == "I need the weather."
    called = message.tool_calls[0].function
    assert (called.name, json.loads(called.arguments)) == ("get_weather", {"city": "Brno", "days": 3})
    again = [*QUESTION, message.model_dump(exclude_none=True)]
    again.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"})
    chat = proxy.client(KEY).chat.completions.create(model="lily", messages=again, tools=[TOOL])
    assert chat.choices[0].message.content == "It is sunny in Brno."
    response = proxy.client(KEY).responses.create(
        model="lily", input="And the weather?", tools=[{"type": "function", **TOOL["function"]}]
    )
    assert [item.name for item in response.output if item.type == "function_call"] == ["get_weather"]
    tool = {"name": "get_weather", "input_schema": TOOL["function"]["parameters"]}
    client = proxy.anthropic(KEY)
    answer = client.messages.create(model="lily", max_tokens=500, messages=QUESTION, tools=[tool])
    assert [block.input for block in answer.content if block.type == "tool_use"] == [{"city": "Brno", "days": 3}]
