"""Benchmark of a shadow on a log file: decisions per CPU second, beside the cost of deriving decisions alone."""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.routing.counterfactual import Alternative
from forebay.events.control import PoolConfigured
from forebay.events.shadow import DecisionShadowed, ShadowEvent
from forebay.events.topics import DECISIONS
from forebay.live.router.standby import Standby
from forebay.live.shadow.shadow import Shadow, ShadowSettings
from forebay.transport.sqlite.log import SqliteLog
from tests.benchmarks.recordings import Shape, write_recording

LOOK_S = 0.001
DECISIONS_BY_WORKERS = {8: 20_000, 64: 10_000}
ALTERNATIVES: dict[str, dict[str, Any]] = {
    "the same": {},
    "credit 0.5, temperature 0.2": {"overlap_score_credit": 0.5, "temperature": 0.2},
    "round-robin": {"mode": "round-robin"},
}


class _Counting:
    """A sink that encodes and counts events."""

    def __init__(self) -> None:
        self.decisions = 0
        self.bytes = 0

    async def last(self) -> ShadowEvent | None:
        return None

    async def write(self, events: Sequence[ShadowEvent]) -> None:
        self.decisions += sum(isinstance(event, DecisionShadowed) for event in events)
        self.bytes += sum(len(msgspec.json.encode(event)) for event in events)


def _alternative(fields: dict[str, Any]) -> Alternative:
    def changed(pool: PoolConfigured) -> PoolConfigured:
        return msgspec.structs.replace(pool, router=msgspec.structs.replace(pool.router, **fields))

    return changed


async def _derived_s(path: Path) -> float:
    """Return the CPU seconds of following the log as a standby."""
    log = SqliteLog.open(path, readonly=True)
    standby = Standby(log, 0)
    end = log.next_offset(DECISIONS.name, 0)
    await standby.catch_up(0)
    began_s = time.process_time()
    await standby.catch_up(end)
    took_s = time.process_time() - began_s
    log.close()
    return took_s


async def _shadowed_s(path: Path, fields: dict[str, Any]) -> tuple[float, Shadow, _Counting]:
    log = SqliteLog.open(path, readonly=True)
    sink = _Counting()
    settings = ShadowSettings(name="bench", text="bench", alternative=_alternative(fields), from_start=True)
    shadow = Shadow(log, 0, settings, sink)
    await shadow.start()
    end = log.next_offset(DECISIONS.name, 0)
    began_s = time.process_time()
    running = asyncio.create_task(shadow.run())
    while shadow.position < end and not running.done():  # noqa: ASYNC110 - it sets no event
        await asyncio.sleep(LOOK_S)
    took_s = time.process_time() - began_s
    await shadow.stop()
    await running
    log.close()
    return took_s, shadow, sink


async def _measure(workers: int, decisions: int, rounds: int, folder: Path) -> None:
    path = folder / f"{workers}.db"
    await write_recording(path, Shape(workers=workers, decisions=decisions))
    alone = [decisions / await _derived_s(path) for _ in range(rounds)]
    print(
        f"{workers} workers, {decisions} decisions: derived alone {statistics.median(alone):,.0f} a CPU second",
        flush=True,
    )
    for name, fields in ALTERNATIVES.items():
        runs = [await _shadowed_s(path, fields) for _ in range(rounds)]
        rate = statistics.median(decisions / took_s for took_s, *_ in runs)
        _, shadow, sink = runs[0]
        size = sink.bytes / sink.decisions
        print(f"  shadow, {name}: {rate:,.0f} a CPU second, {size:.0f} bytes an event; {shadow.statistics}", flush=True)


def main() -> None:
    """Measure for each number of workers, three rounds each."""
    parser = argparse.ArgumentParser(prog="shadow", description=__doc__)
    parser.add_argument("--workers", type=int, action="append", help="number of workers, repeatable (default 8 and 64)")
    parser.add_argument("--decisions", type=int, help="decisions per recording")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for workers in arguments.workers or DECISIONS_BY_WORKERS:
            decisions = arguments.decisions or DECISIONS_BY_WORKERS.get(workers, 10_000)
            asyncio.run(_measure(workers, decisions, arguments.rounds, Path(folder)))
