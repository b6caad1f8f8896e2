"""Compare disaggregated with aggregated serving: the same load on `forebay up` with equally many mock engines, in turn.

The load mixes streamed chats with long prompts that have short responses. Engines run at the speed of the GPU that they
model, and KV moves between them by NIXL. The tables show inter-token latencies and times to first token as seen by the
chat clients, and the parts between the end of prefill and the first token, from the log, whose events carry the clock
of one machine.
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
from pathlib import Path
from typing import Any

import httpx

from forebay.events.codec import decode
from forebay.events.decisions import RequestRouted
from forebay.events.progress import FirstTokenEmitted, PrefillFinished
from forebay.events.topics import DECISIONS, PROGRESS, Topic
from forebay.transport.sqlite.log import SqliteLog
from tests.benchmarks.bench_http import URL, up

READ_MAX = 1_000
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


async def events(log: SqliteLog, topic: Topic) -> list[Any]:
    found: list[Any] = []
    offset, end = await log.begin(topic.name, 0), await log.end(topic.name, 0)
    while offset < end:
        page = await log.read(topic.name, 0, offset, min(READ_MAX, end - offset))
        found += [decode(topic, record.value) for record in page]
        offset = page[-1].offset + 1
    return found


async def parts(path: Path) -> dict[str, list[float]]:
    """Return the durations of each part between the end of prefill and the first token, in milliseconds."""
    log = SqliteLog.open(path)
    try:
        progress = await events(log, PROGRESS)
        decided = {
            one.request_id: one.consumed[-1].now_us
            for one in await events(log, DECISIONS)
            if isinstance(one, RequestRouted) and one.stage == "decode" and one.consumed
        }
    finally:
        log.close()
    computed = {one.request_id: one.at_us for one in progress if isinstance(one, PrefillFinished)}
    found: dict[str, list[float]] = {
        "prefill reported -> applied by the owner": [],
        "applied -> first byte requested, and after the last: journal, work hop, engine's turn, one step": [],
        "transfer: first byte requested -> last byte checked": [],
        "prefill reported -> first token reported": [],
    }
    names = list(found)
    for one in progress:
        if not isinstance(one, FirstTokenEmitted) or one.request_id not in computed or one.request_id not in decided:
            continue
        began, taken = computed[one.request_id], decided[one.request_id]
        figures = taken - began, one.at_us - taken - one.transfer_us, one.transfer_us, one.at_us - began
        for name, figure in zip(names, figures, strict=True):
            found[name].append(figure / 1e3)
    return found


def quantile(values: Sequence[float], share: float) -> float:
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


def row(name: str, values: Sequence[float]) -> str:
    shown = " | ".join(f"{quantile(values, share):.2f}" for share in (0.5, 0.9, 0.99))
    return f"| {name} | {shown} | {len(values)} |"


def main() -> None:
    """Measure and print tables."""
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
    passed: dict[str, list[float]] = {}
    for number in range(arguments.rounds):
        for name, fleet in fleets.items():
            sys.stderr.write(f"round {number + 1} of {arguments.rounds}: {name}\n")
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder) / "log.db"
                with up(log, "--kv-blocks", "8192", *fleet):
                    one = asyncio.run(drive(arguments, arguments.seed + number))
                if name == "apart":
                    for part, figures in asyncio.run(parts(log)).items():
                        passed.setdefault(part, []).extend(figures)
            for figure in ("ttft", "itl", "long_ttft"):
                getattr(seen[name], figure).extend(getattr(one, figure))
    print(f"{arguments.seed=}, load average {os.getloadavg()[0]:.1f}\n\n{HEAD}")
    whats = {"itl": "between tokens", "ttft": "first token of a chat", "long_ttft": "first token of a long prompt"}
    for figure, what in whats.items():
        for name, one in seen.items():
            print(row(f"{what}, {name}", getattr(one, figure)))
    print(f"\n{HEAD}")
    for part, figures in passed.items():
        print(row(part, figures))


if __name__ == "__main__":
    main()
