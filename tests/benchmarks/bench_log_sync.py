"""Benchmark of `--log-sync full` beside `normal`: appends, and whole requests of a small system in this process.

Each round measures both settings, one directly after the other, on log files in the same folder. The order alternates.
The system has an owner and mock workers whose engine time is near zero, and clients that send their next request when
the previous response has ended. There is no HTTP. The price depends on the disk, so `--folder` selects it.
"""

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import get_args

import uvloop

from forebay.events.codec import decode
from forebay.events.tokens import ResponseEnded
from forebay.events.topics import TOKENS
from forebay.transport.base import Draft, LogSync
from forebay.transport.sqlite.log import SqliteLog
from tests.system import SLOT, System, submitted, until

VALUE = bytes(1_700)  # about the size of a journal record
WORKERS = 4
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 16
CLIENTS = (1, 64)
READ_MAX = 10_000

Measured = dict[str, float]


async def appends(log: SqliteLog, clients: int, seconds: float) -> Measured:
    """Return records per second, and the latency of an append, with this many appends in flight."""
    latencies: list[float] = []
    ends_s = time.perf_counter() + seconds

    async def client() -> None:
        while (began_s := time.perf_counter()) < ends_s:
            await log.append([Draft("decisions", 0, VALUE)])
            latencies.append(time.perf_counter() - began_s)

    await asyncio.gather(*(client() for _ in range(clients)))
    return _measured(latencies, seconds)


async def requests(log: SqliteLog, clients: int, seconds: float) -> Measured:
    """Return requests per second, and the time from the submission of a request to the end of its response."""
    latencies: list[float] = []
    ended: dict[str, asyncio.Event] = {}
    numbers = itertools.count()

    async def follow() -> None:
        wake = asyncio.Event()
        tail = log.tail(TOKENS.name, SLOT, 0, wake)
        while True:
            await wake.wait()
            wake.clear()
            for record in itertools.chain.from_iterable(iter(lambda: tail.take(READ_MAX), [])):
                event = decode(TOKENS, record.value)
                if isinstance(event, ResponseEnded):
                    ended[event.request_id].set()

    async def client(system: System, ends_s: float) -> None:
        while (began_s := time.perf_counter()) < ends_s:
            number = next(numbers)
            name = f"r{number}"
            ended[name] = asyncio.Event()
            prompt = [(number * 7_919 + place) % 50 for place in range(PROMPT_TOKENS)]
            system.send(submitted(name, prompt, OUTPUT_TOKENS))
            await ended[name].wait()
            del ended[name]
            latencies.append(time.perf_counter() - began_s)

    following = asyncio.create_task(follow())
    async with System(log).started(WORKERS) as system, system.owned() as owner:
        await until(lambda: len(owner.world.fleet) == WORKERS)
        ends_s = time.perf_counter() + seconds
        await asyncio.gather(*(client(system, ends_s) for _ in range(clients)))
    following.cancel()
    return _measured(latencies, seconds)


def _measured(latencies: list[float], seconds: float) -> Measured:
    hundredths = statistics.quantiles(latencies, n=100)
    return {"per_s": len(latencies) / seconds, "p50_ms": hundredths[49] * 1e3, "p99_ms": hundredths[98] * 1e3}


CASES: dict[str, Callable[[SqliteLog, int, float], Awaitable[Measured]]] = {"appends": appends, "requests": requests}


def measure(case: str, clients: int, sync: LogSync, folder: Path, seconds: float) -> Measured:
    async def run() -> Measured:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            log = SqliteLog.open(Path(place) / "log.db", sync=sync)
            try:
                return await CASES[case](log, clients, seconds)
            finally:
                log.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def main() -> None:
    """Measure and print a table with the median of all rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    found: dict[tuple[str, int], dict[str, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for number in range(args.rounds):
        for case, clients in itertools.product(CASES, CLIENTS):
            sys.stderr.write(f"round {number + 1} of {args.rounds}: {case}, {clients} at a time\n")
            for sync in get_args(LogSync)[:: 1 if number % 2 else -1]:
                found[case, clients][sync].append(measure(case, clients, sync, args.folder, args.seconds))
    print("| load | at a time | --log-sync | per s | p50 ms | p99 ms |")
    print("|---|---:|---|---:|---:|---:|")
    for (case, clients), by_sync in found.items():
        medians = {
            sync: [statistics.median(one[name] for one in rounds) for name in ("per_s", "p50_ms", "p99_ms")]
            for sync, rounds in by_sync.items()
        }
        for sync in get_args(LogSync):
            per_s, p50, p99 = medians[sync]
            print(f"| {case} | {clients} | {sync} | {per_s:,.0f} | {p50:.3f} | {p99:.2f} |")
        ratios = [full / normal for full, normal in zip(medians["full"], medians["normal"], strict=True)]
        print(f"| | | ratio | {ratios[0]:.2f} | {ratios[1]:.1f} | {ratios[2]:.1f} |")


if __name__ == "__main__":
    main()
