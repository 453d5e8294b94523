"""LiteLLM: its SDK, and its router in front of two servers."""

import os
import urllib.request

# It would fetch a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*ReadOnly:UserWarning")  # of its own classes

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ASK = {"temperature": 0, "max_tokens": 24, "messages": QUESTION, "extra_body": {"enable_thinking": False}}


def at(server):
    return {"model": "openai/lily", "api_base": server.url + "/v1", "api_key": "none"}


def test_a_chat_and_its_stream(lily):
    plain = litellm.completion(**at(lily), **ASK)
    text = plain.choices[0].message.content
    assert "Paris" in text
    stream = litellm.completion(**at(lily), **ASK, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_a_thought_and_a_call_come_through(scripted):
    tool = {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}, "days": {}}}},
    }
    message = litellm.completion(**at(scripted), messages=QUESTION, tools=[tool]).choices[0].message
    assert message.reasoning_content.strip() == "I need the weather."
    assert message.tool_calls[0].function.name == "get_weather"


def chats(server):
    """How many chats a server has answered."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line for line in lines if line.startswith("http_requests_total") and "/v1/chat/completions" in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in counts)


def test_a_router_spreads_requests_and_survives_the_death_of_a_server(lily, fresh_lily):
    servers = [lily, fresh_lily]
    before = [chats(server) for server in servers]
    router = litellm.Router(
        model_list=[{"model_name": "lily", "litellm_params": at(server)} for server in servers],
        num_retries=3, retry_after=0, allowed_fails=0, cooldown_time=600,
    )
    # It draws a server for each request: that one gets none of 40 has a chance of 2 in 10^12.
    for _ in range(40):
        assert router.completion(model="lily", **ASK).choices[0].message.content
    assert all(chats(server) > was for server, was in zip(servers, before))
    fresh_lily.process.kill()
    fresh_lily.process.wait()
    for _ in range(10):
        assert router.completion(model="lily", **ASK).choices[0].message.content
