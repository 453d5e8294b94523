#!/usr/bin/env python3
"""python expand.py MLX HF

Writes the 4-bit checkpoint MLX (../../models/demo) to HF as a bf16 Hugging Face checkpoint: every matrix as the values its
codes stand for, rounded to bf16, `mtp.*` included; norms as Hugging Face stores them. The same MLX gives the same bytes:
scale times code is exact in f32, so adding the bias and the cast to bf16 round once each on any machine."""
import argparse
import json
from pathlib import Path

import export
import measure


def bf16(name, v):
    w = v.bfloat16().contiguous()
    assert v.dim() > 1 or w.float().equal(v), f"{name}: norms and the like are stored in bf16 and must stay exact"
    return w


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("mlx", type=Path)
    ap.add_argument("hf", type=Path)
    a = ap.parse_args()
    c = measure.own_config(a.mlx)
    given = json.loads((a.mlx / "config.json").read_text())
    assert export.config(c)["text_config"] == given["text_config"], f"{a.mlx}/config.json is not one that export.py writes"
    export.write_hf({k: bf16(k, v) for k, v in measure.own_state(a.mlx).items()}, a.hf, c)
    export.report(a.hf)


if __name__ == "__main__":
    main()
