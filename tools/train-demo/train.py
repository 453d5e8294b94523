#!/usr/bin/env python3
"""python train.py DATA WORK [options]

Trains the demo model on one GPU. WORK gets log.jsonl, state.pt (everything, for resuming; written every --save seconds and at the
end) and weights/*.safetensors (bf16, in files of at most 15 MB). Running the same command again resumes."""
import argparse
import contextlib
import json
import math
import os
import pickle
import queue
import shutil
import threading
import time
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

import model as M
from batches import Data, Rows, held_out
from optim import Optimizer

GROUPS = None
# How often a pass over the chats holds each document: while learning the language, and in the last part.
EARLY = {"self-dialogues": 1, "wordnet-qa": 1, "taskmaster": 0.5, "factbook-qa": 1, "chatterbot": 1, "made-here-qa": 1, "talk": 1, "stories": 0.7, "tales": 1,
         "book-tasks": 1, "book-facts": 1, "tools": 1}
LATE = {"self-dialogues": 0.5, "wordnet-qa": 1, "taskmaster": 0.3, "factbook-qa": 2, "chatterbot": 2, "made-here-qa": 1, "talk": 4, "stories": 1.5, "tales": 2,
        "book-tasks": 1, "book-facts": 3, "tools": 1.5}


def options():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("data", type=Path)
    ap.add_argument("work", type=Path)
    ap.add_argument("--steps", type=int, default=2950)
    ap.add_argument("--anneal", type=int, default=300,
                    help="last steps, in which the rates fall to zero and which see the late mix and 4-bit weights")
    ap.add_argument("--rows", type=int, default=32)
    ap.add_argument("--length", type=int, default=2048)
    ap.add_argument("--lr", type=float, default=5e-3, help="Muon")
    ap.add_argument("--adam", type=float, default=3e-3, help="AdamW")
    ap.add_argument("--decay", type=float, default=0.1)
    ap.add_argument("--drop", type=float, default=0.1)
    ap.add_argument("--mtp", type=float, default=0.1, help="weight of the MTP loss")
    ap.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing loss")
    ap.add_argument("--warmup", type=int, default=200)
    ap.add_argument("--book-rows", type=float, nargs=2, default=(0.5, 0.25), help="share of rows that are all book, early and late")
    ap.add_argument("--save", type=float, default=120, help="seconds between checkpoints")
    ap.add_argument("--stop", type=float, default=1e9, help="stop after so many seconds, to be resumed")
    ap.add_argument("--eval", type=int, default=500, help="steps between evaluations")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--eager", action="store_true", help="no torch.compile and no CUDA graph (always so without a GPU)")
    ap.add_argument("--config", type=json.loads, default={}, help="JSON of model dimensions that differ from the default")
    return ap.parse_args()


def rate(a, step):
    """Warm-up, plateau, straight fall to zero."""
    return min(1.0, (step + 1) / a.warmup, (a.steps - step) / a.anneal)


class Prefetch:
    """Builds batches on a thread. Each comes with the pickled state of the stream after it."""

    def __init__(self, rows, a, step, device):
        self.queue = queue.Queue(8)
        names = {n: i for i, n in enumerate(GROUPS)}

        def work():
            for s in range(step, a.steps):
                late = s >= a.steps - a.anneal
                rows.set_mix({names[k]: v for k, v in (LATE if late else EARLY).items()})
                arrays = rows.batch(a.rows, a.book_rows[late])
                tensors = [torch.from_numpy(x) for x in arrays]
                if device.type == "cuda":
                    tensors = [t.pin_memory() for t in tensors]
                self.queue.put((tensors, pickle.dumps(rows) if s % 50 == 49 or s == a.steps - 1 else None))
        threading.Thread(target=work, daemon=True).start()


class Step:
    """One forward and backward; on a GPU recorded as a CUDA graph once for each setting of the 4-bit switch, then replayed."""

    def __init__(self, model, a, device):
        self.model, self.a, self.device, self.graphs = model, a, device, {}
        shape = (a.rows, a.length + 2)
        self.static = [torch.zeros(shape, dtype=d, device=device) for d in (torch.int64, torch.int32, torch.float32)]

    def compute(self):
        main, n, mtp, n2, balance = self.model(*self.static, drop=self.a.drop)
        main, mtp = main / n.clamp_min(1), mtp / n2.clamp_min(1)
        (main + self.a.mtp * mtp + self.a.balance * balance).backward()
        return torch.stack([main.detach(), mtp.detach(), balance.detach()])

    def __call__(self, batch):
        for mine, new in zip(self.static, batch):
            mine.copy_(new, non_blocking=True)
        params = list(self.model.parameters())
        if self.a.eager:
            for p in params:
                p.grad = None
            return self.compute()
        key = M.Weight.quantise
        if key not in self.graphs:                           # compile and settle, then record
            for _ in range(3):
                for p in params:
                    p.grad = None
                self.compute()
            for p in params:
                p.grad = None
            g = torch.cuda.CUDAGraph()
            with torch.cuda.graph(g, stream=torch.cuda.current_stream()):
                out = self.compute()
            self.graphs = {key: (g, out)}                    # the other setting's graph is never needed again
        g, out = self.graphs[key]
        g.replay()
        return out.clone()


@torch.no_grad()
def evaluate(model, sets, device):
    out = {}
    for name, arrays in sets.items():
        main, n, mtp, n2, _ = model(*(torch.from_numpy(x).to(device) for x in arrays))
        out[name] = round((main / n).item(), 4)
        if name == "books":
            out["books-mtp"] = round((mtp / n2).item(), 4)
            out["experts"] = [[round(x, 3) for x in m.share.tolist()] for m in model.experts()]
    return out


def save_weights(model, folder, limit=15_000_000):
    new = folder.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    files, size = [{}], 0
    for k, v in model.state_dict().items():
        v = v.bfloat16().contiguous()
        if size + v.nbytes > limit:
            files.append({})
            size = 0
        files[-1][k] = v
        size += v.nbytes
    for i, f in enumerate(files):
        save_file(f, new / f"weights-{i}.safetensors")
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def save_state(path, **parts):
    torch.save(parts, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def main():
    a = options()
    # Recording a graph needs everything on one stream that is not the default one.
    with torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_available() else contextlib.nullcontext():
        train(a)


def train(a):
    global GROUPS
    begin = time.time()
    a.work.mkdir(parents=True, exist_ok=True)
    GROUPS = json.loads((a.data / "groups.json").read_text())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a.eager |= device.type != "cuda"
    torch.manual_seed(a.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    if not a.eager:
        torch._dynamo.config.recompile_limit = 128
        M.compile_pieces()
    model = M.Model(M.Config(**a.config), torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
    opt = Optimizer(model, a.decay)
    data = Data(a.data)
    rows, step, spent = Rows(data, a.length, a.seed), 0, 0.0
    if (a.work / "state.pt").exists():
        s = torch.load(a.work / "state.pt", map_location=device, weights_only=False)
        model.load_state_dict(s["model"])
        opt.load(s["optimizer"])
        rows, step, spent = pickle.loads(s["rows"]), s["step"], s["spent"]
        rows.data = data
        print(f"resumed at step {step}", flush=True)
    sets = {n: held_out(data, [i], a.length, a.rows) for i, n in enumerate(GROUPS) if n in ("books", "self-dialogues", "wordnet-qa", "stories", "book-tasks", "tools", "talk")}
    log = open(a.work / "log.jsonl", "a")

    def note(**what):
        log.write(json.dumps(what) + "\n")
        log.flush()
        print(json.dumps({k: v for k, v in what.items() if k != "experts"}), flush=True)

    note(parameters=sum(p.numel() for p in model.parameters()), config=asdict(model.c), options={k: str(v) for k, v in vars(a).items()}, device=str(device), torch=torch.__version__)
    source, run = Prefetch(rows, a, step, device), Step(model, a, device)
    sums, count, saved, shown = torch.zeros(3, device=device), 0, time.time(), time.time()
    while step < a.steps:
        M.Weight.quantise = step >= a.steps - a.anneal
        batch, place = source.queue.get()
        sums += run(batch)
        f = rate(a, step)
        opt.step(a.lr * f, a.adam * f)
        step, count = step + 1, count + 1
        if step % 50 == 0 or step == a.steps:
            main, mtp, balance = (sums / count).tolist()
            now = time.time()
            note(step=step, seconds=round(spent + now - begin, 1), loss=round(main, 4), mtp=round(mtp, 4), balance=round(balance, 4), rate=round(f, 4),
                 tokens_per_second=round(count * a.rows * a.length / (now - shown)))
            if not math.isfinite(main):
                raise SystemExit("the loss is not finite")
            sums.zero_()
            count, shown = 0, now
            if step % a.eval == 0 or step == a.steps:
                note(step=step, held_out=evaluate(model, sets, device))
                shown = time.time()
            stop = time.time() - begin > a.stop
            if stop or step == a.steps or time.time() - saved > a.save:
                save_state(a.work / "state.pt", model=model.state_dict(), optimizer=opt.state(), rows=place, step=step,
                           spent=spent + time.time() - begin)
                save_weights(model, a.work / "weights")
                saved = shown = time.time()
            if stop:
                break
    if device.type == "cuda":
        note(memory=torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
