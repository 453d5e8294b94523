#!/usr/bin/env python3
"""python make_tokenizer.py CORPUS QWEN OUT [--vocab 8192]

Trains a byte-level BPE with the pipeline of Qwen3.6's tokenizer (normaliser, split rule, decoder and added tokens are
read from QWEN/tokenizer.json) and writes OUT/tokenizer.json, tokenizer_config.json, generation_config.json and
chat_template.jinja. The added tokens keep their order and stand at the end of the vocabulary."""
import argparse
import json
import random
import re
import shutil
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import corpus
import render
import synth_tools

SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}


def text(folder, control):
    for row in corpus.books(folder):
        yield row["text"]
    for row in corpus.rows(folder, "factbook"):
        yield row["text"]
    for name in corpus.CHATS:
        for row in corpus.rows(folder, name):
            yield "\n".join(m["content"] for m in row["messages"])
    r = random.Random(11)
    for _ in range(1500):
        chat = render.render(**synth_tools.dialogue(r, lambda r: ("Hello.", "Hello! How can I help?", "The user greets me.")))
        yield from re.split("|".join(map(re.escape, control)), chat)     # control tokens are not to be learnt as text


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("corpus", type=Path)
    ap.add_argument("qwen", type=Path)
    ap.add_argument("out", type=Path)
    ap.add_argument("--vocab", type=int, default=8192)
    a = ap.parse_args()
    real = json.loads((a.qwen / "tokenizer.json").read_text())
    added = real["added_tokens"]

    skeleton = {**real, "added_tokens": [], "model": {**real["model"], "vocab": {}, "merges": []}}
    t = Tokenizer.from_str(json.dumps(skeleton))
    t.train_from_iterator(text(a.corpus, [x["content"] for x in added]), trainers.BpeTrainer(
        vocab_size=a.vocab - len(added), special_tokens=[], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), min_frequency=2))
    made = json.loads(t.to_str())["model"]
    base = made["vocab"]
    assert len(base) == a.vocab - len(added) and not any(x["content"] in base for x in added)
    out = {**real, "model": {**real["model"], "vocab": dict(sorted(base.items(), key=lambda kv: kv[1])), "merges": made["merges"]},
           "added_tokens": [{**x, "id": len(base) + i} for i, x in enumerate(added)]}
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "tokenizer.json").write_text(json.dumps(out, ensure_ascii=False, separators=(",", ":")) + "\n")
    ids = {x["content"]: x["id"] for x in out["added_tokens"]}
    config = json.loads((a.qwen / "tokenizer_config.json").read_text())
    config["model_max_length"] = 4096
    config.pop("is_local", None)
    (a.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "pad_token_id": ids["<|endoftext|>"], **SAMPLING}
    (a.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    shutil.copyfile(a.qwen / "chat_template.jinja", a.out / "chat_template.jinja")


if __name__ == "__main__":
    main()
