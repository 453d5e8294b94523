"""Clients that come, go and break off, for as long as asked; then the server must be as it was.

    python tests/clients/load.py --seconds 600 --clients 100

starts `lily serve` (LILY_BIN names another binary) and prints one JSON object with what it saw.
"""

import argparse
import asyncio
import json
import random
import time
import urllib.request
from collections import Counter
from pathlib import Path

from conftest import serve

MIB = 1 << 20

# What differs comes last, so that prompts share beginnings.
SYSTEM = "You answer in one sentence, and never in two. " * 8
WORDS = "fox crow lion mouse farmer river winter bread cheese grape stone tower".split()


def chat(rng, stream):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": words(rng)}]
    return "/v1/chat/completions", {"messages": messages, "stream": stream, **bounds(rng, "max_tokens")}


def completions(rng, stream):
    return "/v1/completions", {"prompt": words(rng), "stream": stream, **bounds(rng, "max_tokens")}


def responses(rng, stream):
    return "/v1/responses", {"input": words(rng), "stream": stream, **bounds(rng, "max_output_tokens")}


def messages(rng, stream):
    said = [{"role": "user", "content": words(rng)}]
    return "/v1/messages", {"system": SYSTEM, "messages": said, "stream": stream, **bounds(rng, "max_tokens")}


def words(rng):
    return "Tell me of " + " and ".join(rng.choices(WORDS, k=rng.randint(1, 60)))


def bounds(rng, name):
    return {name: rng.choice([1, 8, 32, 128]), "ignore_eos": True}


class Load:
    def __init__(self, server, seconds, clients, seed):
        self.server, self.seconds, self.clients, self.seed = server, seconds, clients, seed
        self.idle_threads = self.threads = self.status("Threads")
        self.seen = Counter()
        self.faults = []

    def health(self):
        with urllib.request.urlopen(self.server.url + "/health", timeout=10) as answer:
            return json.load(answer)

    def status(self, name):
        """A number that the system knows of the server."""
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith(name + ":")).split()[1])

    def resident(self):
        """Memory of the server, bytes."""
        return self.status("RssAnon") * 1024

    async def client(self, rng, end):
        while time.monotonic() < end:
            try:
                await asyncio.wait_for(self.request(rng), 120)
            except (OSError, asyncio.IncompleteReadError) as error:
                self.faults.append(f"connection: {error!r}")
            except asyncio.TimeoutError:
                self.faults.append("no end within 120 s")

    async def request(self, rng):
        """One request, half of which break off at a time of their own."""
        path, body = rng.choice([chat, completions, responses, messages])(rng, rng.random() < 0.7)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        leaves = rng.random() < 0.5
        try:
            whole = head.encode() + data
            if leaves and rng.random() < 0.1:
                whole = whole[: rng.randrange(len(whole))]
            writer.write(whole)
            await writer.drain()
            if leaves:
                try:
                    await asyncio.wait_for(reader.read(), rng.expovariate(2))
                except asyncio.TimeoutError:
                    pass
                self.seen["left"] += 1
                return
            answer = await reader.read()
        finally:
            # At once, unread bytes or not: a reset for some, an orderly end for others.
            writer.transport.abort() if rng.random() < 0.5 else writer.close()
        status = answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/1.1 ") else "none"
        self.seen[status] += 1
        if status == "429":
            await asyncio.sleep(rng.uniform(0.2, 2))
        elif status != "200" or b'"error": {' in answer or b'"error":{' in answer:
            self.faults.append(f"{path} {status}: {answer[:300]!r}")

    async def watch(self, end):
        """Memory, forty times in all, and threads."""
        seen = []
        while time.monotonic() < end:
            await asyncio.sleep(self.seconds / 40)
            seen.append(self.resident())
            self.threads = max(self.threads, self.status("Threads"))
        return seen

    async def go(self):
        end = time.monotonic() + self.seconds
        clients = [self.client(random.Random(self.seed + i), end) for i in range(self.clients)]
        memory, *_ = await asyncio.gather(self.watch(end), *clients)
        return memory

    def settled(self):
        """What the server holds when it has had a moment to notice that all have left."""
        end = time.monotonic() + 5
        while (health := self.health())["running"] + health["waiting"] + health["sequences"] > 0:
            if time.monotonic() > end:
                self.faults.append(f"still at work: {health}")
                break
            time.sleep(0.01)
        return health

    def run(self):
        memory = asyncio.run(self.go())
        left = self.settled()
        start = time.monotonic()
        body = {"messages": [{"role": "user", "content": "Are you there?"}], "max_tokens": 8}
        request = urllib.request.Request(
            self.server.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=30).read()
        next_seconds = time.monotonic() - start
        quarter = len(memory) // 4
        return {
            "seconds": self.seconds,
            "clients": self.clients,
            "answers": dict(self.seen),
            "faults": self.faults[:10],
            "sequences_left": left["sequences"],
            "state_bytes": left["state_bytes"],
            "next_request_seconds": round(next_seconds, 3),
            "threads_before": self.idle_threads,
            "threads_most": self.threads,
            # The first quarter fills the caches.
            "memory_mib": [round(bytes / MIB, 1) for bytes in memory[:: max(1, len(memory) // 20)]],
            "memory_second_quarter_mib": round(max(memory[quarter : 2 * quarter]) / MIB, 1),
            "memory_last_quarter_mib": round(max(memory[-quarter:]) / MIB, 1),
        }


def load(seconds, clients, cache_ram, seed=1):
    """What came of it."""
    server = serve("--cache-ram", str(cache_ram), "--ctx-size", "2048")
    try:
        return Load(server, seconds, clients, seed).run()
    finally:
        server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--cache-ram", type=int, default=64, help="MiB of the prefix cache")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    print(json.dumps(load(given.seconds, given.clients, given.cache_ram, given.seed), indent=1))
