"""Lily beside llama.cpp on one NVIDIA GPU: same shapes, random weights of 4 bits, in one run. Prints a Markdown table.

`tools/gpu/run llama` starts it. It needs CMake, ninja, nvcc and numpy. llama.cpp is built for the
GPU of this machine while its model is written; both take some minutes and stay in the folder given, for the next run.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
BENCH_PEERS = HERE.parent / "bench-peers"
CONFIG = REPOSITORY / "crates/lily-model/presets/35b-a3b/config.json"

# Positions that tokens are written at, and how many; the prompt whose reading is compared.
POSITIONS = [16, 4096, 32768]
PROMPT = 4096
DECODE = 128
RUNS = 3

OFF = ["LLAMA_BUILD_APP", "LLAMA_BUILD_SERVER", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_CURL", "BUILD_SHARED_LIBS"]


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def output(command: list) -> str:
    """Standard output of a program that must succeed; what it says otherwise goes where ours goes."""
    return subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True).stdout


def unpack(archive: Path, source: Path) -> None:
    if not archive.exists():
        sys.exit(f"{archive} is missing: tools/gpu/pack-llama makes it")
    source.mkdir(parents=True, exist_ok=True)
    output(["tar", "-xzf", archive, "-C", source])


def write_model(source: Path, model: Path) -> subprocess.Popen | None:
    """Starts writing the GGUF file, by the package that comes with llama.cpp."""
    if model.exists():
        return None
    command = [sys.executable, BENCH_PEERS / "gguf_model.py", "--config", CONFIG, "--form", "q4_0", "--out", model]
    return subprocess.Popen([str(part) for part in command], env=os.environ | {"PYTHONPATH": str(source / "gguf-py")})


def build(source: Path, folder: Path) -> Path:
    """llama-bench with CUDA."""
    bench = folder / "bin/llama-bench"
    if not bench.exists():
        output(["cmake", "-G", "Ninja", "-S", source, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", "-DGGML_CUDA=ON",
                "-DCMAKE_CUDA_ARCHITECTURES=native", "-DLLAMA_BUILD_TOOLS=ON", *(f"-D{name}=OFF" for name in OFF)])
        output(["cmake", "--build", folder, "--target", "llama-bench"])
    return bench


def run_llama(bench: Path, model: Path) -> dict[str, float]:
    """Tokens a second by test, with flash attention or without: the better."""
    best = {}
    tests = [["-p", 0, "-n", DECODE, "-d", ",".join(map(str, POSITIONS))], ["-p", PROMPT, "-n", 0]]
    for test in tests:
        for row in json.loads(output([bench, "-m", model, "-ngl", 99, "-fa", "on,off", "-r", RUNS, "-o", "json", *test])):
            name = f"decode at {row['n_depth']}" if row["n_gen"] else f"prefill of {row['n_prompt']}"
            best[name] = max(best.get(name, 0.0), row["avg_ts"])
    return best


def run_lily(lily: Path) -> tuple[dict[str, float], str]:
    """The same; and the name of the device."""
    report = json.loads(output([
        lily, "bench", "--json", "--device", "cuda", "--synth", "35b-a3b", "--repeat", RUNS, "--decode-tokens", DECODE,
        "--prompt-tokens", ",".join(map(str, POSITIONS)),
    ]))
    found = {}
    for row in report["results"]:
        found[f"decode at {row['prompt_tokens']}"] = row["decode_tokens_per_s"]
        if row["prompt_tokens"] == PROMPT:
            found[f"prefill of {PROMPT}"] = row["prefill_tokens_per_s"]
    return found, report["device"]


def table(lily: dict[str, float], llama: dict[str, float]) -> str:
    """Rows of tests that both ran."""
    rows = ["| tokens a second | Lily | llama.cpp Q4_0 | ratio |", "|---|---:|---:|---:|"]
    for test in lily:
        rows.append(f"| {test} | {lily[test]:,.0f} | {llama[test]:,.0f} | {lily[test] / llama[test]:.2f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lily", type=Path, required=True, help="the program")
    parser.add_argument("--llama", type=Path, default=REPOSITORY / "target/gpu/llama.tar.gz", help="what tools/gpu/pack-llama made")
    parser.add_argument("--work", type=Path, default=Path("/tmp/lily-llama"), help="20 GB for llama.cpp and its model")
    args = parser.parse_args()
    source, model = args.work / "source", args.work / "35b-a3b-q4_0.gguf"
    unpack(args.llama, source)
    say("building llama.cpp and writing its model")
    writing = write_model(source, model)
    bench = build(source, args.work / "build")
    say("llama.cpp is built")
    if writing and writing.wait():
        sys.exit("the model could not be written: see above")
    say("measuring llama.cpp")
    llama = run_llama(bench, model)
    say("measuring Lily")
    lily, device = run_lily(args.lily)
    print(f"{device}, {time.strftime('%Y-%m-%d')}\n\n{table(lily, llama)}")


if __name__ == "__main__":
    main()
