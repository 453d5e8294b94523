"""mlx-lm on the CPU, for one model and one prompt: prints a JSON object. Started by bench_peers.py."""

import argparse
import json
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model


def seconds(model, ids: list[int], tokens: int) -> tuple[float, float]:
    """Time to the first token, and of the `tokens` after it."""
    start = time.perf_counter()
    steps = generate_step(mx.array(ids), model, max_tokens=tokens + 1)
    next(steps)
    first = time.perf_counter()
    if sum(1 for _ in steps) != tokens:
        raise RuntimeError("mlx-lm wrote another number of tokens than it was asked for")
    return first - start, time.perf_counter() - first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--decode", type=int, required=True)
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    model, config = load_model(args.model)
    vocab = config["text_config"]["vocab_size"]
    ids = [(i * 2654435761) % 2**32 % vocab for i in range(args.prompt)]
    # What was compiled and read stays: the second run is the one that counts.
    seconds(model, ids, args.decode)
    prefill, decode = seconds(model, ids, args.decode)
    print(json.dumps({"prefill": args.prompt / prefill, "decode": args.decode / decode}))


if __name__ == "__main__":
    main()
