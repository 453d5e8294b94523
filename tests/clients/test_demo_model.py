"""What only a model that has learned something can show, through the official client."""

import json

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
GREEDY = {"model": "lily", "temperature": 0, "extra_body": {"enable_thinking": False}}


def test_a_tool_call_comes_back_as_one(lily):
    messages = [{"role": "user", "content": "What is the weather in Madrid?"}]
    reply = lily.client().chat.completions.create(**GREEDY, messages=messages, tools=[WEATHER])
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Madrid"}

    # And the result goes back: the conversation as any agent sends it.
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}]
    reply = lily.client().chat.completions.create(**GREEDY, messages=messages, tools=[WEATHER], max_tokens=60)
    assert reply.choices[0].finish_reason == "stop"
    assert "21" in reply.choices[0].message.content


def test_a_stop_string_ends_the_answer(lily):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    reply = lily.client().chat.completions.create(**GREEDY, messages=messages, stop=[" Paris"])
    assert reply.choices[0].message.content == "The capital of France is"
    assert reply.choices[0].finish_reason == "stop"


def test_the_next_turn_reads_only_what_is_new(lily):
    messages = [
        {"role": "system", "content": "You are a careful assistant who answers in one sentence, always."},
        {"role": "user", "content": "What is the capital of Norway?"},
    ]
    ask = lily.client().chat.completions.create
    # With its thought, which the next prompt leaves out.
    first = ask(model="lily", temperature=0, messages=messages)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And of Spain?"},
    ]
    apart = ask(model="lily", temperature=0, messages=messages, extra_body={"cache_prompt": False})
    assert apart.usage.prompt_tokens_details.cached_tokens == 0
    second = ask(model="lily", temperature=0, messages=messages)
    # All of the first prompt but the opening of its reply.
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert 0 < first.usage.prompt_tokens - cached < 10
    assert second.choices[0].message == apart.choices[0].message


def test_a_long_text_does_not_decay(lily):
    messages = [{"role": "user", "content": "Tell me a story about a fox"}]
    reply = lily.client().chat.completions.create(
        model="lily", messages=messages, seed=5, max_tokens=2000,
        extra_body={"enable_thinking": False, "ignore_eos": True},
    )
    assert reply.usage.completion_tokens == 2000
    words = reply.choices[0].message.content.split()[-400:]
    assert len(set(words)) > 120, "it repeats itself"
    letters = "".join(words)
    assert sum(c.isascii() and (c.isalpha() or c in ".,;:!?'\"-") for c in letters) > 0.97 * len(letters)
