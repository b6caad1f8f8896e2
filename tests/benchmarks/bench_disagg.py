"""Compare disaggregated with aggregated serving: the same load on `forebay up` with equally many mock engines, in turn.

The load mixes streamed chats with long prompts that have short responses. Engines run at the speed of the GPU that they
model, and KV moves between them by NIXL. The table shows inter-token latencies and times to first token as seen by the
clients.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from tests.benchmarks.bench_http import URL, up

CHAT_TOKENS, CHAT_OUTPUT = 256, 160
LONG_OUTPUT = 4
HEAD = "| ms | p50 | p90 | p99 | of |\n|---|---|---|---|---|"
VOCABULARY = range(300, 2_000)  # token ids of the default model


@dataclass
class ClientLatencies:
    """Latencies seen by clients, in milliseconds."""

    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    long_ttft: list[float] = field(default_factory=list)


async def answer(client: httpx.AsyncClient, prompt: list[int], output: int) -> tuple[float, list[float]]:
    """Stream one response; return the time to first token and the gaps between chunks, in milliseconds."""
    body = {"model": "forebay-default", "prompt": prompt, "max_tokens": output, "stream": True}
    began, last = time.perf_counter(), 0.0
    first, gaps = 0.0, []
    async with client.stream("POST", f"{URL}/v1/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {") or not json.loads(line[6:])["choices"]:
                continue
            now = time.perf_counter()
            if last:
                gaps.append((now - last) * 1e3)
            else:
                first = (now - began) * 1e3
            last = now
    return first, gaps


async def drive(arguments: argparse.Namespace, seed: int) -> ClientLatencies:
    """Apply the load: chat streams that begin one after another, and a long prompt now and then."""
    chance, seen = random.Random(seed), ClientLatencies()
    words = list(VOCABULARY)

    async def chat(client: httpx.AsyncClient, after_s: float, prompt: list[int]) -> None:
        await asyncio.sleep(after_s)
        first, gaps = await answer(client, prompt, CHAT_OUTPUT)
        seen.ttft.append(first)
        seen.itl.extend(gaps)

    async def long(client: httpx.AsyncClient, after_s: float, prompt: list[int]) -> None:
        await asyncio.sleep(after_s)
        seen.long_ttft.append((await answer(client, prompt, LONG_OUTPUT))[0])

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits) as client, asyncio.TaskGroup() as tasks:
        for number in range(arguments.chats):
            after_s = arguments.seconds * number / arguments.chats
            tasks.create_task(chat(client, after_s, chance.choices(words, k=CHAT_TOKENS)))
        for number in range(arguments.long):
            after_s = arguments.seconds * (number + 0.5) / arguments.long
            tasks.create_task(long(client, after_s, chance.choices(words, k=arguments.long_tokens)))
    return seen


def quantile(values: Sequence[float], share: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


def row(name: str, values: Sequence[float]) -> str:
    shown = " | ".join(f"{quantile(values, share):.2f}" for share in (0.5, 0.9, 0.99))
    return f"| {name} | {shown} | {len(values)} |"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--long", type=int, default=20)
    parser.add_argument("--long-tokens", type=int, default=8_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    fleets = {
        "together": ["--workers", str(arguments.prefill + arguments.decode)],
        "apart": ["--prefill-workers", str(arguments.prefill), "--decode-workers", str(arguments.decode)],
    }
    seen = {name: ClientLatencies() for name in fleets}
    for number in range(arguments.rounds):
        for name, fleet in fleets.items():
            sys.stderr.write(f"round {number + 1} of {arguments.rounds}: {name}\n")
            with tempfile.TemporaryDirectory() as folder, up(f"{folder}/log.db", "--kv-blocks", "8192", *fleet):
                one = asyncio.run(drive(arguments, arguments.seed + number))
            for figure in ("ttft", "itl", "long_ttft"):
                getattr(seen[name], figure).extend(getattr(one, figure))
    print(f"{arguments.seed=}, load average {os.getloadavg()[0]:.1f}\n\n{HEAD}")
    whats = {"itl": "between tokens", "ttft": "first token of a chat", "long_ttft": "first token of a long prompt"}
    for figure, what in whats.items():
        for name, one in seen.items():
            print(row(f"{what}, {name}", getattr(one, figure)))


if __name__ == "__main__":
    main()
