"""Raw completions, through the official `openai` package."""

import json
import urllib.request

RAW = {"model": "lily", "temperature": 0}


def post(server, path, body):
    request = urllib.request.Request(
        server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_a_text_goes_on(lily):
    prompt = "A Fox and a"
    plain = lily.client().completions.create(**RAW, prompt=prompt, max_tokens=12)
    assert plain.object == "text_completion" and plain.choices[0].text
    assert plain.usage.completion_tokens <= 12
    echoed = lily.client().completions.create(**RAW, prompt=prompt, max_tokens=12, echo=True)
    assert echoed.choices[0].text == prompt + plain.choices[0].text
    stream = lily.client().completions.create(**RAW, prompt=prompt, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == plain.choices[0].text
    ids = post(lily, "/tokenize", {"prompt": prompt})
    assert ids["count"] == plain.usage.prompt_tokens
    assert post(lily, "/detokenize", {"tokens": ids["tokens"]}) == {"prompt": prompt}
    of_ids = lily.client().completions.create(**RAW, prompt=ids["tokens"], max_tokens=12)
    assert of_ids.choices[0].text == plain.choices[0].text


def test_logprobs(lily):
    reply = lily.client().completions.create(**RAW, prompt="A Fox", max_tokens=5, logprobs=3)
    tokens = reply.choices[0].logprobs
    assert "".join(tokens.tokens) == reply.choices[0].text
    assert tokens.text_offset[0] == 0 and len(tokens.text_offset) == 5
    assert all(len(top) == 3 for top in tokens.top_logprobs)
    # Greedy: the token drawn is the most likely one.
    assert all(max(top.values()) == own for top, own in zip(tokens.top_logprobs, tokens.token_logprobs))


def test_a_gap_is_filled_in(lily):
    apart = lily.client().completions.create(**RAW, prompt="A Fox", max_tokens=1)
    filled = lily.client().completions.create(**RAW, prompt="A Fox", suffix=" and a Crow", max_tokens=1)
    # The suffix and three control tokens are read too.
    assert filled.usage.prompt_tokens == apart.usage.prompt_tokens + 3 + post(
        lily, "/tokenize", {"prompt": " and a Crow"}
    )["count"]


def test_several_prompts_with_several_answers(lily):
    reply = lily.client().completions.create(
        model="lily", prompt=["A Fox", "A Crow"], n=2, seed=4, temperature=1, max_tokens=8
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in reply.choices}) > 2
