"""Lily beside llama.cpp and mlx-lm on this machine's processor: same shapes, same threads, in turns.

Prints a Markdown table; --json keeps every sample. What a run makes it deletes again, except programs that it built and,
with --keep, models. Models that were there before are used and left.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import gguf_model
import table

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
SEED = 1

# What `lily synth` makes, and what is measured: lengths of prompts, tokens written, rounds. `together`: both
# GGUF files may lie on the disk at once, so that all programs take turns in every round.
SIZES = {
    "demo": {"synth": ["demo"], "prompts": [128, 512], "decode": 64, "rounds": 5, "together": True},
    "4-layer": {
        "synth": ["35b-a3b", "--layers", "4"], "prompts": [128, 512], "decode": 64, "rounds": 5, "together": True,
    },
    "full": {"synth": ["35b-a3b"], "prompts": [128], "decode": 32, "rounds": 3, "together": False},
}

# Its quantised products are slow on processors: a short prompt, few tokens, one run a round, and not the full
# size, whose 19.5 GB it would have to hold beside the system.
MLX = {"sizes": ["demo", "4-layer"], "prompt": 128, "decode": 16, "rounds": 2, "limit_s": 300}

FORMS = {"q4_0": "llama.cpp Q4_0", "q4_k": "llama.cpp Q4_K"}


class Failure(Exception):
    """Something that the person at the keyboard can mend."""


def say(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def output(command: list, **options) -> str:
    """Standard output of a program that must succeed."""
    command = [str(part) for part in command]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    if done.returncode:
        raise Failure(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


# --- The programs.


def build_lily(args) -> Path:
    """`lily`, in the release profile."""
    if args.lily:
        return args.lily
    say("building Lily")
    output(["cargo", "build", "--release", "-p", "lily"], cwd=REPOSITORY)
    target = json.loads(output(["cargo", "metadata", "--format-version=1", "--no-deps"], cwd=REPOSITORY))
    return Path(target["target_directory"]) / "release" / "lily"


def build_llama_bench(args) -> Path:
    """`llama-bench`, from the pinned source package, for this very processor."""
    build = args.llama_build or args.work / "llama.cpp"
    bench = build / "bin" / "llama-bench"
    if bench.exists():
        return bench
    if args.llama_build:
        raise Failure(f"{bench} does not exist: give --llama-build a CMake build folder with llama-bench in it")
    say("building llama.cpp (some minutes)")
    bin_folder = Path(sys.executable).parent
    download = args.work / "download"
    # No isolation: pip would otherwise install the package's build requirements just to read its name.
    path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
    output([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:",
            "--require-hashes", "-r", HERE / "llama-cpp.txt", "-d", download], env=os.environ | {"PATH": path})
    archive = next(download.glob("llama_cpp_python-*.tar.gz"))
    shutil.unpack_archive(archive, args.work / "source", filter="data")
    source = args.work / "source" / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    off = ["LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_SERVER", "LLAMA_BUILD_MTMD", "LLAMA_BUILD_UI",
           "LLAMA_BUILD_APP", "LLAMA_CURL", "BUILD_SHARED_LIBS"]
    output([bin_folder / "cmake", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={bin_folder / 'ninja'}", "-S", source, "-B", build,
            "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TOOLS=ON", *(f"-D{name}=OFF" for name in off)])
    output([bin_folder / "cmake", "--build", build, "--target", "llama-bench"])
    return bench


# --- The models.


def lily_model(args, lily: Path, size: str) -> Path:
    """A random checkpoint for Lily and mlx-lm."""
    folder = args.models / size
    if (folder / "model.safetensors.index.json").exists():
        return folder
    say(f"writing the {size} model for Lily")
    shutil.rmtree(folder, ignore_errors=True)
    output([lily, "synth", "--preset", *SIZES[size]["synth"], "--seed", SEED, "--out", folder])
    return folder


def gguf_file(args, config: dict, size: str, form: str) -> Path:
    """A random model of the same shapes for llama.cpp."""
    path = args.models / f"{size}-{form}.gguf"
    if path.exists():
        return path
    needed = sum(t.nbytes for t in gguf_model.tensors(config, form)) + (2 << 30)
    free = shutil.disk_usage(args.models).free
    if free < needed:
        raise Failure(f"{path} needs {needed >> 20} MiB of disk and {free >> 20} are free: free some, or leave out {size}")
    say(f"writing {path.name}")
    gguf_model.write(config, form, path, SEED)
    return path


def read_through(folder: Path) -> None:
    """Brings a mapped model back into the page cache, out of which a larger program may have pushed it."""
    buffer = bytearray(1 << 24)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


# --- One run each. A sample is one speed: program, test, tokens a second.


def run_lily(lily: Path, model: Path, size: str, threads: int) -> list[dict]:
    """Prefill of every prompt; decode after the first one."""
    wanted = SIZES[size]
    read_through(model)
    report = json.loads(output([
        lily, "bench", "--json", "--repeat", 1, "--threads", threads, "--model", model, "--decode-tokens", wanted["decode"],
        "--prompt-tokens", ",".join(map(str, wanted["prompts"])),
    ]))
    def sample(test, speed, share):
        return {"program": table.LILY, "test": test, "tokens_per_s": speed, "share": share}
    found = [
        sample(f"pp{r['prompt_tokens']}", r["prefill_tokens_per_s"], r["prefill_share_of_int8_peak"])
        for r in report["results"]
    ]
    first = report["results"][0]
    decode = sample(f"tg{wanted['decode']}", first["decode_tokens_per_s"], first["decode_share_of_bandwidth"])
    return [*found, {**decode, "machine": report["machine"]}]


def run_llama(bench: Path, model: Path, form: str, size: str, threads: int) -> list[dict]:
    """Prefill of every prompt, and decode from an empty context, with flash attention and without."""
    wanted = SIZES[size]
    rows = json.loads(output([
        bench, "-m", model, "-o", "json", "-r", 1, "-t", threads, "-fa", "on,off", "-n", wanted["decode"],
        "-p", ",".join(map(str, wanted["prompts"])), "--repack", int(repack_fits(model)),
    ]))
    return [
        {
            "program": FORMS[form],
            "test": f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}",
            "variant": f"flash attention {'on' if row['flash_attn'] else 'off'}, repack {'on' if row['repack'] else 'off'}",
            "tokens_per_s": row["avg_ts"],
            "build": row["build_commit"],
        }
        for row in rows
    ]


def repack_fits(model: Path) -> bool:
    """Whether memory takes llama.cpp's copy of the weights in the order that its kernels like best (its default).
    Without it the system would kill something."""
    available = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text())
    return int(available.group(1)) * 1024 > model.stat().st_size + (2 << 30)


def run_mlx(model: Path, size: str, threads: int) -> list[dict]:
    """Prefill of a short prompt and decode of few tokens; nothing if that takes too long."""
    limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    cores = sorted(os.sched_getaffinity(0))[:threads]
    command = [sys.executable, HERE / "mlx_bench.py", "--model", model, "--prompt", MLX["prompt"], "--decode", MLX["decode"]]
    try:
        text = output(command, env=os.environ | limits, timeout=MLX["limit_s"],
                      preexec_fn=lambda: os.sched_setaffinity(0, cores))
    except subprocess.TimeoutExpired:
        return []
    speeds = json.loads(text)
    return [
        {"program": table.MLX, "test": f"pp{MLX['prompt']}", "tokens_per_s": speeds["prefill"]},
        # In the row of the other programs' test, which has more tokens.
        {"program": table.MLX, "test": f"tg{SIZES[size]['decode']}", "tokens_per_s": speeds["decode"]},
    ]


# --- All of it.


def measure(args, size: str, lily: Path, bench: Path, samples: list[dict], notes: list[str]) -> None:
    """All programs on one size, in turns."""
    existing = set(args.models.iterdir())
    model = lily_model(args, lily, size)
    config = json.loads((model / "config.json").read_text())
    groups = [list(FORMS)] if SIZES[size]["together"] else [[form] for form in FORMS]
    mlx = args.mlx and size in MLX["sizes"]
    try:
        for group in groups:
            files = {form: gguf_file(args, config, size, form) for form in group}
            for threads in args.threads:
                for i in range(args.rounds or SIZES[size]["rounds"]):
                    say(f"{size}, {threads} threads, round {i + 1}")
                    runs = [lambda: run_lily(lily, model, size, threads)]
                    runs += [lambda f=f: run_llama(bench, files[f], f, size, threads) for f in group]
                    if mlx and i < MLX["rounds"]:
                        runs.append(lambda: run_mlx(model, size, threads))
                    for run in runs:
                        found = run()
                        if not found:
                            notes.append(f"mlx-lm took more than {MLX['limit_s']} s on the {size} model, {threads} threads.")
                            mlx = False
                        samples += [{"size": size, "threads": threads, "round": i, **s} for s in found]
            delete(args, existing, [path for path in files.values()])
    finally:
        delete(args, existing, list(args.models.iterdir()))


def delete(args, existing: set[Path], paths: list[Path]) -> None:
    for path in paths:
        if not args.keep and path not in existing and path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def processor() -> str:
    """Its name, and which of the instructions that matter here it has."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    name = re.search(r"model name\s*: (.*)", text)
    numbers = [re.search(rf"^{key}\s*: (\d+)", text, re.M) for key in ("cpu family", "model", "stepping")]
    flags = set(re.search(r"flags\s*: (.*)", text).group(1).split()) if "flags" in text else set()
    has = [flag for flag in ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8") if flag in flags]
    parts = " ".join(n.group(1) for n in numbers if n)
    return f"{name.group(1) if name else platform.machine()} (family, model, stepping {parts}; {', '.join(has)})"


def heading(args, lily: Path, samples: list[dict], load: float) -> str:
    builds = sorted({s["build"] for s in samples if "build" in s})
    origin = "a given binary" if args.lily else f"at {lily_commit()}"
    programs = [f"{output([lily, '--version']).strip()}, {origin}"]
    programs.append(f"llama.cpp {', '.join(builds)} (llama-cpp-python {pinned_llama()}, GGML_NATIVE)")
    if any(s["program"] == table.MLX for s in samples):
        programs.append(f"mlx {version('mlx')} and mlx-lm {version('mlx-lm')} on its CPU device")
    rounds = ", ".join(f"{size} {1 + max(s['round'] for s in samples if s['size'] == size)}" for size in args.sizes)
    machines = [s["machine"] for s in samples if "machine" in s]
    best = "; ".join(
        f"{t} threads: {max(m['read_bytes_per_s'] for m in machines if m['threads'] == t) / 1e9:.1f} GB/s, "
        f"{max(m['int8_multiply_adds_per_s'] for m in machines if m['threads'] == t) / 1e9:.0f} G int8 multiply-adds/s"
        for t in args.threads
    )
    return (
        f"{datetime.date.today()}, {processor()}, {len(os.sched_getaffinity(0))} cores, load average {load:.1f} before the "
        f"run. {'; '.join(programs)}. The machine at its best, as `lily bench --probe` measures it: {best}. "
        f"Rounds: {rounds}."
    )


def lily_commit() -> str:
    try:
        return output(["git", "describe", "--always", "--dirty", "--abbrev=10"], cwd=REPOSITORY).strip()
    except (Failure, OSError):
        return "an unknown commit"


def pinned_llama() -> str:
    return re.search(r"==(\S+)", (HERE / "llama-cpp.txt").read_text()).group(1)


def fixed_notes() -> list[str]:
    return [
        "Tokens a second: median (lowest–highest) of runs in turns; each program warms up in each of its runs.",
        "pp: reading a prompt of so many tokens. tg: writing so many, greedy. llama-bench writes from an empty context, Lily "
        "after the first prompt of the list. llama.cpp has the better one of flash attention on and off.",
        "Q4_0 has 4.5 bits in every matrix, as Lily's weights have. Q4_K: every matrix, with the output in Q6_K. "
        "llama-quantize's Q4_K_M also raises other matrices to Q5_K and Q6_K, so it has more to read.",
    ]


def parse() -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    def numbers(text):
        return [int(n) for n in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="demo,4-layer,full", help="which models (default: %(default)s)")
    parser.add_argument("--threads", type=numbers, default=[cores], metavar="N,...", help="threads of all programs")
    parser.add_argument("--rounds", type=int, help="rounds of every size (default: 5, full 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--lily", type=Path, metavar="FILE", help="use this binary (default: build it)")
    parser.add_argument("--llama-build", type=Path, metavar="FOLDER", help="use this CMake build of llama.cpp")
    parser.add_argument("--no-mlx", dest="mlx", action="store_false", help="leave out mlx-lm")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="where models are (default: beside the programs)")
    parser.add_argument("--keep", action="store_true", help="keep the models: 66 GB for all sizes")
    parser.add_argument("--work", type=Path, required=True, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.sizes = args.sizes.split(",")
    if unknown := set(args.sizes) - set(SIZES):
        parser.error(f"--sizes: {', '.join(unknown)}: there are {', '.join(SIZES)}")
    args.work = args.work.resolve()
    args.models = args.models or args.work / "models"
    args.models.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = parse()
    lily, bench = build_lily(args), build_llama_bench(args)
    load = os.getloadavg()[0]
    if load > 0.3:
        say(f"warning: load average is {load:.1f}: other programs are running, the numbers will be worth little")
    samples, notes = [], fixed_notes()
    for size in args.sizes:
        measure(args, size, lily, bench, samples, notes)
    notes += [
        f"llama.cpp, {size}: run without its repacked copy of the weights, for which memory did not suffice."
        for size in args.sizes
        if any(s["size"] == size and s.get("variant", "").endswith("repack off") for s in samples)
    ]
    if any(s["program"] == table.MLX for s in samples):
        notes.append(
            f"mlx-lm: the same checkpoint as Lily, {MLX['prompt']} tokens of prompt, {MLX['decode']} written; not run at the "
            "full size, which would not fit into memory beside its buffers."
        )
    report = {"heading": heading(args, lily, samples, load), "notes": notes, "samples": samples}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table.markdown(report))


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.exit(f"error: {failure}")
