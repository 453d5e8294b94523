"""The official `anthropic` package against `lily serve` and a scripted model."""

import anthropic
import pytest

QUESTION = [{"role": "user", "content": "Hello, who are you?"}]
ASK = {"model": "lily", "max_tokens": 64, "messages": QUESTION}
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
THINK = {"type": "enabled", "budget_tokens": 1024}


def test_a_plain_message(lily):
    message = lily.anthropic().messages.create(**ASK, extra_body={"seed": 7})
    assert message.type == "message" and message.role == "assistant" and message.id.startswith("msg_")
    assert [block.type for block in message.content] == ["text"]
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 64


def test_a_stream_adds_up_to_the_plain_message(lily):
    asked = {**ASK, "thinking": THINK, "extra_body": {"seed": 7}}
    plain = lily.anthropic().messages.create(**asked)
    with lily.anthropic().messages.stream(**asked) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert [block.model_dump(exclude_none=True) for block in final.content] == [
        block.model_dump(exclude_none=True) for block in plain.content
    ]
    assert "thinking" in [block.type for block in plain.content]
    assert final.stop_reason == plain.stop_reason
    assert final.usage.output_tokens == plain.usage.output_tokens
    assert "".join(texts) == "".join(block.text for block in plain.content if block.type == "text")


def test_tokens_are_counted_as_they_are_read(lily):
    asked = {"model": "lily", "messages": QUESTION, "tools": [WEATHER], "system": "Be brief."}
    count = lily.anthropic().messages.count_tokens(**asked)
    usage = lily.anthropic().messages.create(**asked, max_tokens=4, extra_body={"cache_prompt": False}).usage
    assert count.input_tokens == usage.input_tokens
    # The next one finds most of it read already.
    again = lily.anthropic().messages.create(**asked, max_tokens=4)
    again = lily.anthropic().messages.create(**asked, max_tokens=4)
    assert again.usage.cache_read_input_tokens > 0
    assert again.usage.cache_read_input_tokens + again.usage.input_tokens == count.input_tokens


def test_a_tool_loop(scripted):
    messages = [{"role": "user", "content": "What is the weather in Brno?"}]
    asked = {"model": "any", "max_tokens": 1000, "tools": [WEATHER], "thinking": THINK}
    with scripted.anthropic().messages.stream(**asked, messages=messages) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    thought, call = first.content
    assert thought.thinking == "I need the weather." and call.input == {"city": "Brno", "days": 3}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = scripted.anthropic().messages.create(**asked, messages=messages)
    assert second.stop_reason == "end_turn"
    assert second.content[-1].text == "It is sunny in Brno."


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
def test_an_agents_next_turn_reads_only_what_is_new(lily, thinking):
    weather = {**WEATHER, "description": "Get the current weather"}
    messages = [{"role": "user", "content": f"What is the weather in Madrid? {thinking['type']}"}]
    asked = {"model": "lily", "max_tokens": 300, "tools": [weather], "thinking": thinking}

    def turn(number):
        system = [f"x-anthropic-billing-header: cch={number};", "You are a careful assistant."]
        blocks = [{"type": "text", "text": text} for text in system]
        return lily.anthropic().messages.create(
            **asked, system=blocks, messages=messages, extra_body={"temperature": 0},
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )

    first = turn(1)
    assert first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": '{"temperature": 21}'}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = turn(2).usage
    read_before = first.usage.input_tokens + first.usage.cache_read_input_tokens + first.usage.output_tokens
    # All of the prompt and of the reply to it, but for the token that was drawn last.
    assert second.cache_read_input_tokens == read_before - 1


def test_errors_are_those_of_the_package(lily, lily_with_key):
    with pytest.raises(anthropic.BadRequestError) as caught:
        lily.anthropic().messages.create(**{**ASK, "messages": []})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.AuthenticationError):
        lily_with_key.anthropic(api_key="wrong").messages.create(**ASK)
    assert lily_with_key.anthropic(api_key="sesame").messages.create(**ASK).content
