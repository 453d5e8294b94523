"""From samples to one Markdown table."""

from statistics import median

LLAMA = ("llama.cpp Q4_0", "llama.cpp Q4_K")
MLX = "mlx-lm"
LILY = "Lily"


def best_variant(samples: list[dict], **where) -> list[float]:
    """Speeds of the variant (flash attention on, off) with the best median, among the samples that match."""
    variants: dict[str, list[float]] = {}
    for s in samples:
        if all(s[key] == value for key, value in where.items()):
            variants.setdefault(s.get("variant", ""), []).append(s["tokens_per_s"])
    return max(variants.values(), key=median, default=[])


def cell(speeds: list[float]) -> str:
    """`120 (98–125)`: median, lowest and highest."""
    if not speeds:
        return "–"
    if len(speeds) == 1:
        return number(speeds[0])
    return f"{number(median(speeds))} ({number(min(speeds))}–{number(max(speeds))})"


def number(x: float) -> str:
    """Three digits, or all of a whole number that has more."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def ratio(lily: list[float], peers: list[list[float]]) -> str:
    """Lily's median over the best median of the peers that were measured."""
    medians = [median(speeds) for speeds in peers if speeds]
    return f"{median(lily) / max(medians):.2f}" if lily and medians else "–"


def markdown(report: dict) -> str:
    """Table and heading of a report, as bench_peers.py writes it."""
    samples = report["samples"]
    lines = [
        report["heading"],
        "",
        "| model | threads | test | Lily | of the machine's best | llama.cpp Q4_0 | llama.cpp Q4_K | mlx-lm "
        "| **Lily / better llama.cpp** | Lily / mlx-lm |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows = dict.fromkeys((s["size"], s["threads"], s["test"]) for s in samples)
    for size, threads, test in rows:
        speeds = {
            program: best_variant(samples, size=size, threads=threads, test=test, program=program)
            for program in (LILY, *LLAMA, MLX)
        }
        shares = [
            s["share"] for s in samples
            if (s["size"], s["threads"], s["test"]) == (size, threads, test) and "share" in s
        ]
        of = "int8 peak" if test.startswith("pp") else "bandwidth"
        share = f"{100 * median(shares):.0f} % of {of}" if shares else "–"
        lines.append(
            f"| {size} | {threads} | {test} | {cell(speeds[LILY])} | {share} | "
            + " | ".join(cell(speeds[program]) for program in (*LLAMA, MLX))
            + f" | **{ratio(speeds[LILY], [speeds[p] for p in LLAMA])}** | {ratio(speeds[LILY], [speeds[MLX]])} |"
        )
    return "\n".join([*lines, "", *(f"* {note}" for note in report["notes"]), ""])
