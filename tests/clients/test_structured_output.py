"""Answers that are held to a form, through the official `openai` package, by a model that would rather tell fables."""

import json

import openai
import pydantic
import pytest

QUESTION = [{"role": "user", "content": "Tell me a story about a fox"}]
ASK = {"model": "lily", "messages": QUESTION, "max_tokens": 400}


class Animal(pydantic.BaseModel):
    model_config = {"extra": "forbid"}
    name: str = pydantic.Field(max_length=12)
    legs: int = pydantic.Field(ge=0, le=8)
    wild: bool
    tags: list[str] = pydantic.Field(max_length=2)


SCHEMA = Animal.model_json_schema()
SCHEMA["properties"]["tags"]["items"]["maxLength"] = 8
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA}}


@pytest.mark.parametrize("thinking", [True, False])
def test_json_is_what_the_schema_says(lily, thinking):
    for seed in range(5):
        reply = lily.client().chat.completions.create(
            **ASK, seed=seed, temperature=1.5, response_format=FORMAT,
            extra_body={"enable_thinking": thinking, "thinking_budget": 40 if thinking else None},
        )
        message = reply.choices[0].message
        assert reply.choices[0].finish_reason == "stop"
        Animal.model_validate_json(message.content)
        assert bool(getattr(message, "reasoning_content", None)) == thinking


def test_several_streams_at_once_hold(lily):
    stream = lily.client().chat.completions.create(
        **ASK, n=4, seed=3, temperature=1.2, response_format=FORMAT, stream=True, reasoning_effort="none"
    )
    texts = [""] * 4
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    for text in texts:
        Animal.model_validate_json(text)
    assert len(set(texts)) == 4


def test_any_json_and_a_regex(lily):
    # An object may go on for as long as there is room: what comes is JSON as far as it goes.
    reply = lily.client().chat.completions.create(
        **ASK, temperature=0, reasoning_effort="none", response_format={"type": "json_object"}
    )
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content), dict)
    assert reply.choices[0].message.content.startswith("{")
    reply = lily.client().chat.completions.create(
        **ASK, reasoning_effort="none",
        extra_body={"grammar": {"syntax": "regex", "definition": "(red|grey) fox [0-9]{3}"}},
    )
    assert reply.choices[0].message.content[-7:-3] == "fox "


def test_a_call_is_made_where_it_is_required(lily):
    parameters = {
        "type": "object",
        "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["C", "F"]}},
        "required": ["days", "unit"],
        "additionalProperties": False,
    }
    function = {"name": "forecast", "parameters": parameters, "strict": True}
    for choice in ["required", {"type": "function", "function": {"name": "forecast"}}]:
        reply = lily.client().chat.completions.create(
            **ASK, seed=1, temperature=1, tools=[{"type": "function", "function": function}],
            tool_choice=choice, parallel_tool_calls=False, extra_body={"thinking_budget": 20},
        )
        assert reply.choices[0].finish_reason == "tool_calls"
        (call,) = reply.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert 1 <= arguments["days"] <= 9 and arguments["unit"] in ("C", "F")


def test_a_keyword_that_cannot_be_held_to_is_named(lily):
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(openai.BadRequestError) as caught:
        lily.client().chat.completions.create(
            **ASK, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        )
    assert "uniqueItems" in caught.value.message
    assert caught.value.param == "response_format.json_schema.schema"


def test_a_thought_ends_at_its_budget(lily):
    reply = lily.client().chat.completions.create(**ASK, temperature=0, extra_body={"thinking_budget": 5})
    assert reply.usage.completion_tokens_details.reasoning_tokens == 5
    assert reply.choices[0].message.content
