#!/usr/bin/env python3
"""How often Lily's most likely token is another program's, and how far their logits lie apart, along a text.

  python agree.py LILY RUNNER FOLDER FILE [--window 1024] [--max-tokens N]

LILY is the `lily` command, computing in f32 (--cpu-exact) beside a RUNNER of measure.py (torch, transformers, mlx), f32 too.
With RUNNER lily-exact the other program is Lily itself in f32, and what is held against it is Lily as it runs by default."""
import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

import measure


def lily_rows(lily, folder, ids, *options):
    with tempfile.TemporaryDirectory() as tmp:
        file, out = Path(tmp) / "ids", Path(tmp) / "logits.safetensors"
        file.write_text(" ".join(map(str, ids)))
        subprocess.run([lily, "logits", *options, "--model", folder, "--ids", file, "--out", out], check=True)
        return load_file(out)["logits"]


@torch.no_grad()
def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("lily", type=Path)
    ap.add_argument("runner", choices=["torch", "transformers", "mlx", "lily-exact"])
    ap.add_argument("folder", type=Path)
    ap.add_argument("file", type=Path)
    ap.add_argument("--window", type=int, default=1024)
    ap.add_argument("--max-tokens", type=int, default=8192)
    a = ap.parse_args()
    torch.set_num_threads(2)

    def exact(ids):
        return lily_rows(a.lily, a.folder, ids, "--cpu-exact")

    if a.runner == "lily-exact":
        own_rows, other_rows = lambda ids: lily_rows(a.lily, a.folder, ids), exact
    else:
        own_rows, other_rows = exact, getattr(measure, a.runner + "_rows")(a.folder)
    same = n = worst = 0
    for ids in measure.windows(a):
        own, other = own_rows(ids), other_rows(ids).float()
        same += (own.argmax(-1) == other.argmax(-1)).sum().item()
        worst = max(worst, (own - other).abs().max().item())
        n += len(ids)
    print(json.dumps({"runner": a.runner, "tokens": n, "top_1_agreement": same / n, "max_logit_difference": worst}))


if __name__ == "__main__":
    main()
