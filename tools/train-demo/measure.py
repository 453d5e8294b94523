#!/usr/bin/env python3
"""Measures a checkpoint on the CPU, in f32 arithmetic. FOLDER is the 4-bit one or a bf16 one in Hugging Face form.

  python measure.py text RUNNER FOLDER FILE [--window 1024] [--max-tokens N]
      how well FILE is predicted, in the definition of `lily eval`; RUNNER is torch (model.py), mlx or
      transformers (bf16 only)
  python measure.py drafts FOLDER FILE [--window 1024] [--max-tokens N]
      how often the MTP head's first draft is the main model's own most likely token, along the text of FILE
  python measure.py experts FOLDER FILE [--window 1024] [--max-tokens N]
      the share of the experts' work that each expert of each layer does, in percent
  python measure.py held-out CORPUS FILE
      writes the held-out chapters of the books to FILE"""
import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

import model as M


# ------------------------------------------------------------------ loading
def own_config(folder):
    t = json.loads((folder / "config.json").read_text())["text_config"]
    return M.Config(vocab=t["vocab_size"], hidden=t["hidden_size"], layers=t["num_hidden_layers"], heads=t["num_attention_heads"], kv_heads=t["num_key_value_heads"],
                    head_dim=t["head_dim"], key_heads=t["linear_num_key_heads"], value_heads=t["linear_num_value_heads"], key_dim=t["linear_key_head_dim"],
                    value_dim=t["linear_value_head_dim"], experts=t["num_experts"], top_k=t["num_experts_per_tok"], moe=t["moe_intermediate_size"],
                    shared=t["shared_expert_intermediate_size"])


def own_state(folder):
    """The folder's tensors as f32 by the names of model.py; 4-bit matrices are unpacked, norms centred on zero again.
    `mtp.*` has its Hugging Face form in both exports, so there only matrices are unpacked."""
    import mlx.core as mx
    mx.set_default_device(mx.cpu)
    raw = mx.load(str(folder / "model.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    out = {}
    for k, v in raw.items():
        path = k.removesuffix(".weight")
        if k.endswith((".scales", ".biases")):
            continue
        if path + ".scales" in raw:
            q = config["quantization"].get(path, config["quantization"])
            v = mx.dequantize(v, raw[path + ".scales"].astype(mx.float32), raw[path + ".biases"].astype(mx.float32), q["group_size"], q["bits"])
        t = torch.from_numpy(np.array(v.astype(mx.float32)))
        name = k.replace("language_model.model.", "model.").replace("model.language_model.", "model.").replace("language_model.lm_head", "lm_head")
        if "quantization" in config and not name.startswith("mtp."):
            if name.endswith("conv1d.weight"):
                t = t.movedim(-1, 1)
            if name.endswith(("layernorm.weight", "_norm.weight", "model.norm.weight")):
                t = t - 1
        out[name] = t
    for k in [k for k in out if k.endswith("switch_mlp.gate_proj.weight")]:
        b = k.removesuffix("switch_mlp.gate_proj.weight")
        parts = [out.pop(f"{b}switch_mlp.{n}_proj.weight") for n in ("gate", "up", "down")]
        out[b + "experts.gate_up_proj"], out[b + "experts.down_proj"] = torch.cat(parts[:2], 1), parts[2]
    return out


def own_model(folder):
    m = M.Model(own_config(folder))
    m.load_state_dict(own_state(folder))
    return m.eval()


def pad(ids):
    return torch.tensor(ids + [0] * (-len(ids) % M.CHUNK))[None]


def torch_rows(folder):
    m = own_model(folder)

    def rows(ids):
        t = pad(ids)
        return m.lm_head(m.hidden(t, M.Documents(torch.zeros_like(t)))[0])[0, :len(ids)]
    return rows


def transformers_rows(folder):
    from transformers import Qwen3_5MoeForCausalLM
    m, info = Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {k: v for k, v in info.items() if v}
    if wrong:
        sys.exit(f"{folder}: not a bf16 checkpoint that transformers takes whole (expand.py makes one of a 4-bit one): {wrong}")
    m.eval()
    return lambda ids: m(torch.tensor([ids])).logits[0]


def mlx_rows(folder):
    import mlx.core as mx
    from mlx_lm import load
    mx.set_default_device(mx.cpu)
    m, _ = load(str(folder))
    m.set_dtype(mx.float32)
    return lambda ids: torch.from_numpy(np.array(m(mx.array([ids]))[0]))


# ------------------------------------------------------------------ commands
def windows(a):
    tok = Tokenizer.from_file(str(a.folder / "tokenizer.json"))
    ids = tok.encode(a.file.read_text(), add_special_tokens=False).ids[:a.max_tokens]
    for i in range(0, len(ids), a.window):
        if len(ids[i:i + a.window]) > 1:
            yield ids[i:i + a.window]


def token_bytes(folder):
    """Bytes that each token stands for: in the byte-level alphabet one character is one byte."""
    t = json.loads((folder / "tokenizer.json").read_text())
    return {i: len(k) for k, i in t["model"]["vocab"].items()} | {x["id"]: len(x["content"].encode()) for x in t["added_tokens"]}


def text(a):
    rows = {"torch": torch_rows, "transformers": transformers_rows, "mlx": mlx_rows}[a.runner](a.folder)
    size, n, nll, right, data = token_bytes(a.folder), 0, 0.0, 0, 0
    for ids in windows(a):
        logits, want = rows(ids)[:-1].double(), torch.tensor(ids[1:])
        nll += torch.nn.functional.cross_entropy(logits, want, reduction="sum").item()
        right += (logits.argmax(-1) == want).sum().item()
        n += len(want)
        data += sum(size[i] for i in ids[1:])
        print(f"\r{n} {nll / n:.4f}", end="", file=sys.stderr, flush=True)
    print(json.dumps({"runner": a.runner, "tokens": n, "bytes": data, "nll_per_token": nll / n, "perplexity": math.exp(nll / n),
                      "bits_per_byte": nll / math.log(2) / data, "top_1": right / n}))


def drafts(a):
    m, same, n = own_model(a.folder), 0, 0
    for ids in windows(a):
        t = pad(ids)
        doc = M.Documents(torch.zeros_like(t))
        h, table = m.hidden(t, doc)
        d = m.draft_hidden(h, table, torch.roll(t, -1, 1), doc)
        own, draft = m.lm_head(h)[0, 1:len(ids)].argmax(-1), m.lm_head(d)[0, :len(ids) - 1].argmax(-1)
        same, n = same + (own == draft).sum().item(), n + len(own)
    print(json.dumps({"drafts": n, "accepted": same / n}))


def experts(a):
    m, total, n = own_model(a.folder), None, 0
    for ids in windows(a):
        if len(ids) % M.CHUNK == 0:                          # whole windows only, so that padding routes nothing
            t = torch.tensor(ids)[None]
            doc = M.Documents(torch.zeros_like(t))
            h, table = m.hidden(t, doc)
            m.draft_hidden(h, table, torch.roll(t, -1, 1), doc)
            share = torch.stack([x.share for x in m.experts()])
            total, n = share * len(ids) + (0 if total is None else total), n + len(ids)
    for i, row in enumerate((total / n / m.c.top_k * 100).tolist()):
        print(("mtp" if i == m.c.layers else f"{i:3d}"), " ".join(f"{x:4.1f}" for x in sorted(row, reverse=True)))


def held_out(a):
    import corpus
    a.file.write_text("\n\n".join(row["text"] for row in corpus.books(a.corpus, held=True)) + "\n")


@torch.no_grad()
def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    sub = ap.add_subparsers(required=True)

    def command(run, *names):
        p = sub.add_parser(run.__name__.replace("_", "-"))
        p.set_defaults(run=run)
        for n in names:
            p.add_argument(n, type=str if n == "runner" else Path)
        p.add_argument("--window", type=int, default=1024)
        p.add_argument("--max-tokens", type=int)
    command(text, "runner", "folder", "file")
    command(drafts, "folder", "file")
    command(experts, "folder", "file")
    command(held_out, "corpus", "file")
    a = ap.parse_args()
    torch.set_num_threads(2)
    a.run(a)


if __name__ == "__main__":
    main()
