#!/usr/bin/env python3
"""Golden logits at prompt lengths that make_tiny.py leaves out, from ref_numpy.py in float64.

  python more_prompts.py FIXTURE      adds FIXTURE/goldens/numpy.safetensors

Per length n and weights w (dense, q4): `prompt.n`, `{w}.n.prefill` (logits of the last up to 6 positions),
`{w}.n.tokens` (32 greedy tokens) and `{w}.n.decode` (logits after every 4th of them).
"""
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ref_numpy import Model

LENGTHS = (2, 3, 4, 65)
STEPS, EVERY = 32, 4


def main():
    fixture = Path(sys.argv[1])
    rng = np.random.default_rng(2024)
    out = {}
    for n in LENGTHS:
        out[f"prompt.{n}"] = rng.integers(0, 352, n).astype(np.int32)
    for tag, folder in (("dense", "hf"), ("q4", "mlx-4bit")):
        model = Model(fixture / folder)
        for n in LENGTHS:
            cache = model.fresh()
            rows = [model.logits(model.hidden(int(t), i, cache)) for i, t in enumerate(out[f"prompt.{n}"])]
            prefill, decode, tokens = rows[-6:], [], []
            for step in range(STEPS):
                tokens.append(int(rows[-1].argmax()))
                rows.append(model.logits(model.hidden(tokens[-1], n + step, cache)))
                if step % EVERY == 0:
                    decode.append(rows[-1])
            out[f"{tag}.{n}.prefill"] = np.stack(prefill).astype(np.float32)
            out[f"{tag}.{n}.decode"] = np.stack(decode).astype(np.float32)
            out[f"{tag}.{n}.tokens"] = np.array(tokens, np.int32)
    save_file(out, str(fixture / "goldens" / "numpy.safetensors"))


if __name__ == "__main__":
    main()
