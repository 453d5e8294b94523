"""Tool calls through the official `openai` package. The model's words are scripted: see
`scripted` in conftest.py."""

import json

QUESTION = {"role": "user", "content": "What is the weather in Brno?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = {"city": "Brno", "days": 3}


def check_call(message):
    assert message.content is None
    assert message.reasoning_content.strip() == "I need the weather."
    (call,) = message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == ARGUMENTS
    return call


def answer_after(client, message, call):
    """The second turn: the call goes back with its result."""
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [QUESTION, message.model_dump(exclude_none=True), result]
    return client.chat.completions.create(model="lily", messages=messages, tools=TOOLS).choices[0]


def test_a_tool_call_and_the_answer_to_its_result(scripted):
    client = scripted.client()
    choice = client.chat.completions.create(model="lily", messages=[QUESTION], tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    call = check_call(choice.message)
    final = answer_after(client, choice.message, call)
    assert final.finish_reason == "stop"
    assert final.message.content == "It is sunny in Brno."
    assert final.message.tool_calls is None


def test_a_streamed_tool_call(scripted):
    stream = scripted.client().chat.completions.create(
        model="lily", messages=[QUESTION], tools=TOOLS, stream=True
    )
    names, arguments, reasons = [], "", []
    for chunk in stream:
        choice = chunk.choices[0]
        assert choice.delta.content is None, "markup must not leak into the text"
        for part in choice.delta.tool_calls or []:
            assert part.index == 0
            if part.function.name:
                names.append(part.function.name)
            arguments += part.function.arguments
        if choice.finish_reason:
            reasons.append(choice.finish_reason)
    assert names == ["get_weather"]
    assert json.loads(arguments) == ARGUMENTS
    assert reasons == ["tool_calls"]


def test_the_packages_own_accumulator_reads_the_call(scripted):
    client = scripted.client()
    with client.chat.completions.stream(model="lily", messages=[QUESTION], tools=TOOLS) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.name == "get_weather"
    assert json.loads(message.tool_calls[0].function.arguments) == ARGUMENTS
