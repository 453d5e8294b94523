"""Chats through the chat template, and which characters of the result are the assistant's own words."""
import json
import re
from functools import lru_cache
from pathlib import Path

import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE = Path(__file__).parents[2] / "models/demo/chat_template.jinja"
TURN = re.compile(r"<\|im_start\|>assistant\n(<think>\n(?:\n</think>\n\n)?)?")
EMPTY = "<think>\n\n</think>\n\n"


@lru_cache(1)
def _template():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])

    def fail(message):
        raise ValueError(message)
    env.globals["raise_exception"] = fail
    env.filters["tojson"] = lambda x, **k: json.dumps(x, ensure_ascii=False)
    return env.from_string(TEMPLATE.read_text())


def render(messages, tools=None, **flags):
    return _template().render(messages=messages, tools=tools, **flags)


def segments(text):
    """Splits a rendered chat into (piece, learn) pairs. A piece that the generation prompt would have given, the opening of
    the thought or a whole empty thought included, is not learnt; the words after it up to and with <|im_end|> are.
    Pieces are cut where the prompt ends, so that tokenising them one by one gives what generation sees."""
    at, out = 0, []
    for m in TURN.finditer(text):
        end = text.index("<|im_end|>", m.end()) + len("<|im_end|>")
        out += [(text[at:m.end()], False), (text[m.end():end], True)]
        at = end
    if text[at:].strip():
        raise ValueError(f"the chat does not end with the assistant: {text[at:]!r}")
    return out
