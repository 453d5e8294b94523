#!/usr/bin/env python3
"""python make_data.py CORPUS OUT [--scale 1.0]

Tokenises the training text into OUT/train.npz.xz: `tokens` (u16, all documents end to end), `learn` (packed bits: may this
token be a target), `ends` (u32, end of each document), `group` (u8). OUT/groups.json names the groups; held-out documents of
each group carry group + 100. CORPUS holds the files listed in docs/demo-model.md."""
import argparse
import io
import json
import lzma
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import corpus
import render
import synth_chat
import synth_stories
import synth_tools

DEMO = Path(__file__).parents[2] / "models/demo"
GROUPS = ["books", "factbook", *corpus.CHATS, "talk", "stories", "tales", "book-tasks", "book-facts", "tools"]
SYSTEMS = ["You are a helpful assistant.", "You are a friendly assistant.", "You are Lily's demo model.", "Answer briefly.", "You are a storyteller.", "You are a helpful AI."]


def thought(r, name, row, question):
    """What the assistant may think before it answers the last question of a corpus dialogue."""
    if name == "self-dialogues":
        return f"The user talks about {row['topic'].replace('_', ' ')}. I will answer in a friendly way."
    if name == "taskmaster":
        return r.choice(["The user wants help with an order. I will be polite and short.", "I should help the user with this request."])
    q = question.split("\n")[0].strip()
    return r.choice([f"The user asks: {q} I will answer in one sentence.", f"The question is: {q} I will give a short answer.", "The user has a short question. I will answer it."])


def corpus_chats(r, folder, name, scale):
    for row in corpus.rows(folder, name):
        if r.random() >= scale or row.get("topic") in ("botprofile", "gossip", "politics", "ai"):
            continue
        m = row["messages"]
        if len(m) > 2 and r.random() < 0.5:                  # end at any answer, so that first answers are last ones too
            m = m[:2 * r.randint(1, len(m) // 2)]
        if r.random() < 0.35:
            m = [dict(x) for x in m]
            m[-1]["reasoning_content"] = thought(r, name, row, m[-2]["content"])
        yield {"messages": m}


def pair(q, answer, t, r):
    return {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": answer, "reasoning_content": t if r.random() < 0.4 else ""}]}


def chats(r, folder, scale):
    """(group, dialogue), everything that goes through the chat template."""
    for name in corpus.CHATS:
        for d in corpus_chats(r, folder, name, scale):
            yield name, d
    for _ in range(int(3000 * scale)):
        yield "talk", synth_chat.talk(r)
    for _ in range(int(16000 * scale)):
        yield "stories", synth_stories.dialogue(r)
    books = list(corpus.books(folder))
    for row in books:
        for _ in range(6):
            made = r.random() < scale and synth_chat.whole_tale(r, row)
            if made:
                yield "tales", pair(*made, r)
    young = [b for b in books if b["year"] and b["author"] not in ("Aesop",)]
    for _ in range(int(16000 * scale)):
        made = r.choice([synth_chat.passage, synth_chat.continuation])(r, r.choice(young))
        if made:
            yield "book-tasks", pair(*made, r)
    for row in {b["title"]: b for b in books}.values():
        for _ in range(4):
            yield "book-facts", pair(*synth_chat.about_book(r, row), r)
    for _ in range(int(9000 * scale)):
        yield "tools", synth_tools.dialogue(r, synth_chat.small_talk)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("corpus", type=Path)
    ap.add_argument("out", type=Path)
    ap.add_argument("--scale", type=float, default=1.0, help="share of the chats and of the made-up text to take (for tests)")
    a = ap.parse_args()
    r = random.Random(20)
    tok = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    end = tok.token_to_id("<|endoftext|>")
    pieces, owner, learn, group = [], [], [], []

    def add(name, parts):
        held = 100 if name not in ("books", "factbook") and r.random() < 0.01 else 0
        group.append(GROUPS.index(name) + held)
        for text, wanted in parts:
            pieces.append(text)
            owner.append(len(group) - 1)
            learn.append(wanted)

    for row in corpus.books(a.corpus):
        add("books", [(row["text"] + "<|endoftext|>", True)])
    for row in corpus.books(a.corpus, held=True):
        add("books", [(row["text"] + "<|endoftext|>", True)])
        group[-1] += 100
    for row in corpus.rows(a.corpus, "factbook"):
        add("factbook", [(row["title"] + "\n\n" + row["text"] + "<|endoftext|>", True)])
    for name, d in chats(r, a.corpus, a.scale):
        if d["messages"][0]["role"] == "user" and r.random() < 0.12:
            d["messages"] = [{"role": "system", "content": r.choice(SYSTEMS)}] + d["messages"]
        text = render.render(**d, preserve_thinking=r.random() < 0.5)
        if text.count("<|im_start|>") != text.count("<|im_end|>") or "<|" in "".join(str(m["content"]) for m in d["messages"]):
            continue
        add(name, render.segments(text))

    ids, masks, ends, at = [], [], [], 0
    for i in range(0, len(pieces), 2048):
        for j, e in enumerate(tok.encode_batch_fast(pieces[i:i + 2048], add_special_tokens=False), i):
            if ends and owner[j] != owner[j - 1] or j == 0:
                ends.append(0)
            at += len(e.ids)
            ends[-1] = at
            ids.append(np.array(e.ids, np.uint16))
            masks.append(np.full(len(e.ids), learn[j]))
    tokens, learn_bits = np.concatenate(ids), np.concatenate(masks)
    assert len(ends) == len(group) and tokens.max() < tok.get_vocab_size() and end < tok.get_vocab_size()
    a.out.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, tokens=tokens, learn=np.packbits(learn_bits), ends=np.array(ends, np.uint32), group=np.array(group, np.uint8))
    (a.out / "train.npz.xz").write_bytes(lzma.compress(buffer.getvalue(), preset=4))
    (a.out / "groups.json").write_text(json.dumps(GROUPS) + "\n")
    sizes = np.diff(np.array(ends), prepend=0)
    sums = np.add.reduceat(learn_bits.astype(np.int64), np.array([0, *ends[:-1]]))
    for g in sorted(set(group)):
        at = np.array(group) == g
        print(f"{GROUPS[g % 100]:16s}{'held out' if g >= 100 else '':10s}{at.sum():8d} documents {sizes[at].sum():10d} tokens {sums[at].sum():10d} learnt")
    print(f"{len(tokens)} tokens, {(a.out / 'train.npz.xz').stat().st_size / 1e6:.1f} MB packed")


if __name__ == "__main__":
    main()
