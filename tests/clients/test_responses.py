"""The responses API, through the official `openai` package."""

import json

import openai
import pydantic
import pytest

ASK = {"model": "lily", "input": "Hello, who are you?", "max_output_tokens": 60}
SEEDED = {**ASK, "extra_body": {"seed": 7}}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "strict": False,
}


def without_ids(items):
    return [{k: v for k, v in item.model_dump().items() if k not in ("id", "call_id")} for item in items]


def test_a_stream_ends_in_the_plain_answer(lily):
    plain = lily.client().responses.create(**SEEDED)
    assert plain.object == "response" and plain.status in ("completed", "incomplete")
    events = list(lily.client().responses.create(**SEEDED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{plain.status}"
    final = events[-1].response
    assert without_ids(final.output) == without_ids(plain.output)
    assert final.output_text == plain.output_text
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == plain.output_text
    assert final.usage.output_tokens == plain.usage.output_tokens


def test_the_packages_own_accumulator_agrees(lily):
    plain = lily.client().responses.create(**SEEDED)
    with lily.client().responses.stream(**SEEDED) as stream:
        for _ in stream:
            pass
        if plain.status == "completed":
            assert stream.get_final_response().output_text == plain.output_text


def test_a_text_is_parsed_into_a_model(lily):
    class Answer(pydantic.BaseModel):
        model_config = {"extra": "forbid"}
        legs: int = pydantic.Field(ge=0, le=9)
        wild: bool

    reply = lily.client().responses.parse(
        **{**ASK, "max_output_tokens": 200}, text_format=Answer, extra_body={"thinking_budget": 10, "seed": 1}
    )
    assert isinstance(reply.output_parsed, Answer)
    assert reply.usage.output_tokens_details.reasoning_tokens <= 10


def test_a_tool_loop(scripted):
    items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "The weather in Brno?"}]
    first = scripted.client().responses.create(model="any", input=items, tools=[TOOL])
    thought, call = first.output
    assert thought.type == "reasoning" and thought.content[0].text == "I need the weather."
    assert json.loads(call.arguments) == {"city": "Brno", "days": 3}
    items += first.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."})
    second = scripted.client().responses.create(model="any", input=items, tools=[TOOL])
    assert second.output_text == "It is sunny in Brno."


def test_there_is_no_memory(lily):
    with pytest.raises(openai.BadRequestError) as caught:
        lily.client().responses.create(**ASK, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
