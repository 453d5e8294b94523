"""Reads the training corpus and splits off the held-out books."""
import hashlib
import io
import json

import zstandard

BOOKS = ["books-young-readers", "books-fiction"]
CHATS = ["self-dialogues", "wordnet-qa", "taskmaster", "factbook-qa", "chatterbot", "made-here-qa"]


def rows(folder, name):
    with open(folder / f"{name}.jsonl.zst", "rb") as f:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(f), "utf-8"):
            yield json.loads(line)


def held_out(row):
    """One chapter in a hundred, chosen by its own text, so that no training choice can move it."""
    return hashlib.sha256(row["text"].encode()).digest()[0] * 256 + hashlib.sha256(row["text"].encode()).digest()[1] < 655


def books(folder, held=False):
    for name in BOOKS:
        for row in rows(folder, name):
            if held_out(row) == held:
                yield row
