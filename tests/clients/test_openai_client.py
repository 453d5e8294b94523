"""The official `openai` package against `lily serve`."""

import openai
import pytest

QUESTION = [{"role": "user", "content": "Hello, who are you?"}]
SEEDED = {"model": "lily", "messages": QUESTION, "max_tokens": 24, "seed": 7}


def folded(chunks):
    """What the deltas of a stream add up to."""
    total = {"content": None, "reasoning_content": None}
    for chunk in chunks:
        for choice in chunk.choices:
            for field in total:
                text = getattr(choice.delta, field, None)
                if text is not None:
                    total[field] = (total[field] or "") + text
    return total


def test_a_plain_chat(lily):
    reply = lily.client().chat.completions.create(**SEEDED)
    choice = reply.choices[0]
    assert reply.object == "chat.completion" and reply.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    assert choice.message.content or choice.message.reasoning_content
    assert choice.finish_reason in ("stop", "length")
    usage = reply.usage
    assert usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= 24
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details.reasoning_tokens <= usage.completion_tokens


def test_a_streamed_chat_adds_up_to_the_plain_one(lily):
    plain = lily.client().chat.completions.create(**SEEDED)
    stream = lily.client().chat.completions.create(
        **SEEDED, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 3, "text comes in pieces"
    message = plain.choices[0].message
    assert folded(chunks) == {
        "content": message.content,
        "reasoning_content": getattr(message, "reasoning_content", None),
    }
    assert chunks[-2].choices[0].finish_reason == plain.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == plain.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_packages_own_accumulator_agrees(lily):
    plain = lily.client().chat.completions.create(**SEEDED)
    with lily.client().chat.completions.stream(**SEEDED) as stream:
        for _ in stream:
            pass
        # `get_final_completion` refuses answers that were cut at max_tokens, as this one may be.
        final = stream.current_completion_snapshot
    assert final.choices[0].message.content == plain.choices[0].message.content
    assert final.choices[0].finish_reason == plain.choices[0].finish_reason


def test_logprobs(lily):
    reply = lily.client().chat.completions.create(**SEEDED, logprobs=True, top_logprobs=3)
    tokens = reply.choices[0].logprobs.content
    # The token that ends the turn is counted and not shown.
    ended = reply.choices[0].finish_reason == "stop"
    assert len(tokens) == reply.usage.completion_tokens - ended
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        falling = [top.logprob for top in token.top_logprobs]
        assert falling == sorted(falling, reverse=True)


def test_thinking_can_be_turned_off(lily):
    reply = lily.client().chat.completions.create(**SEEDED, reasoning_effort="none")
    assert not getattr(reply.choices[0].message, "reasoning_content", None)
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0


def test_the_model_list_has_the_context(lily):
    models = list(lily.client().models.list())
    assert len(models) == 1
    assert models[0].context_length == models[0].max_model_len > 0


def test_a_field_that_cannot_be_honoured_is_named(lily):
    with pytest.raises(openai.BadRequestError) as caught:
        lily.client().chat.completions.create(**SEEDED, store=True)
    assert caught.value.param == "store"
    assert caught.value.code == "unsupported_value"


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(lily):
    context = next(iter(lily.client().models.list())).context_length
    long = [{"role": "user", "content": "lily " * (context + 1)}]
    with pytest.raises(openai.BadRequestError) as caught:
        lily.client().chat.completions.create(model="lily", messages=long)
    assert caught.value.code == "context_length_exceeded"
    assert str(context) in caught.value.message


def test_an_unknown_path_is_a_not_found_error(lily):
    with pytest.raises(openai.NotFoundError):
        lily.client().fine_tuning.jobs.list()


def test_the_key_is_needed(lily_with_key):
    with pytest.raises(openai.AuthenticationError) as caught:
        lily_with_key.client(api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key"
    assert list(lily_with_key.client(api_key="sesame").models.list())
