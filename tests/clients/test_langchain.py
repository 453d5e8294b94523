"""LangChain's ChatOpenAI."""

import pydantic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

QUESTION = "What is the capital of France?"


def chat(server, **options):
    return ChatOpenAI(
        base_url=server.url + "/v1", api_key="none", model="lily", temperature=0, max_retries=0, timeout=120, **options
    )


@tool
def get_weather(city: str, days: int) -> str:
    """The weather in a city."""
    return f"{days} days of sun in {city}."


def test_a_chat_and_its_stream(lily):
    model = chat(lily, extra_body={"enable_thinking": False})
    plain = model.invoke([("system", "Be brief."), ("user", QUESTION)])
    assert "Paris" in plain.content
    assert plain.response_metadata["finish_reason"] == "stop"
    pieces = list(model.stream([("system", "Be brief."), ("user", QUESTION)], stream_usage=True))
    assert len(pieces) > 3
    total = sum(pieces[1:], pieces[0])
    assert total.content == plain.content
    usage = plain.usage_metadata
    assert total.usage_metadata["output_tokens"] == usage["output_tokens"] > 0
    assert total.usage_metadata["input_tokens"] == usage["input_tokens"] > 0


def check_tool_loop(server, first_answer):
    model = chat(server).bind_tools([get_weather])
    conversation = [HumanMessage("What is the weather in Brno?")]
    asked = first_answer(model, conversation)
    (call,) = asked.tool_calls
    assert call["name"] == "get_weather" and call["args"] == {"city": "Brno", "days": 3}
    told = get_weather.invoke(call)
    assert isinstance(told, ToolMessage) and told.content == "3 days of sun in Brno."
    assert model.invoke([*conversation, asked, told]).content == "It is sunny in Brno."


def test_a_tool_loop(scripted):
    check_tool_loop(scripted, lambda model, conversation: model.invoke(conversation))


def test_a_streamed_tool_loop(scripted):
    def streamed(model, conversation):
        pieces = list(model.stream(conversation))
        return sum(pieces[1:], pieces[0])

    check_tool_loop(scripted, streamed)


def test_structured_output_by_schema_and_by_a_call(lily):
    class Animal(pydantic.BaseModel):
        """What is known of an animal."""

        legs: int = pydantic.Field(ge=0, le=9)
        wild: bool

    model = chat(lily, extra_body={"enable_thinking": False}, max_tokens=200)
    for method in ["json_schema", "function_calling"]:
        animal = model.with_structured_output(Animal, method=method).invoke("Tell me about the fox.")
        assert isinstance(animal, Animal), method
