"""Logs with a topic `scaling` for tests of commands: a planner of two pools, an actuator, and an operator."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from forebay.events.codec import encode
from forebay.events.scaling import (
    DecodePoint,
    PlannerPaused,
    PlannerSettings,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    PoolSizeSet,
    PrefillPoint,
    ScalingEvent,
)
from forebay.events.topics import SCALING
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.core.scaling.scene import Loop, S

GROUP = "llama"
START_US = 1_780_000_000 * S  # 2026-05-28T20:26:40Z
PREFILL = PoolScaling(
    group=GROUP,
    pool="prefill",
    role="prefill",
    min_size=1,
    max_size=6,
    startup_s=0,
    prefill=(
        PrefillPoint(isl=500, ttft_ms=50, tokens_per_s=10_000),
        PrefillPoint(isl=4_000, ttft_ms=400, tokens_per_s=8_000),
    ),
)
DECODE = PoolScaling(
    group=GROUP,
    pool="decode",
    role="decode",
    gpus_per_worker=2,
    max_size=6,
    startup_s=0,
    decode=(
        DecodePoint(context=1_000, concurrency=1, itl_ms=10, tokens_per_s=100),
        DecodePoint(context=1_000, concurrency=50, itl_ms=50, tokens_per_s=1_000),
    ),
)
SETTINGS = PlannerSettings(pools=(PREFILL, DECODE), interval_s=10.0, gpu_budget=16, max_change=4)


class PlannerDay(Loop):
    """A planner whose clock begins at `START_US`, and one round of which takes 10 s."""

    def __init__(self, settings: PlannerSettings = SETTINGS) -> None:
        super().__init__(settings, start_us=START_US)

    def round(self, requests_per_s: float, prefill: int, decode: int) -> int:
        """Observe both pools with these numbers of ready workers, forecast the same demand, and decide.

        Returns:
            The offset of the decision.
        """
        count = round(requests_per_s * 10)
        seen = {"requests": count, "isl": 1_000.0, "osl": 200.0, "kv_hit_rate": 0.25}
        self.observe(
            PoolObserved(group=GROUP, pool="prefill", ready=prefill, ttft_ms=120.0, **seen),  # type: ignore[arg-type]
            PoolObserved(group=GROUP, pool="decode", ready=decode, itl_ms=25.0, **seen),  # type: ignore[arg-type]
        )
        self.forecast(*(_demand(pool, requests_per_s) for pool in ("prefill", "decode")))
        self.decide()
        return len(self.records) - 1


def _demand(pool: str, requests_per_s: float) -> PoolDemand:
    return PoolDemand(group=GROUP, pool=pool, requests_per_s=requests_per_s, isl=1_000.0, osl=200.0, kv_hit_rate=0.25)


def a_day() -> PlannerDay:
    """Return a journal: scale up, refused, manual size, paused, resumed, stale, and an open decision at its end."""
    day = PlannerDay()
    day.round(20.0, 1, 2)
    day.reply()
    day.round(20.0, 2, 4)
    day.round(70.0, 2, 4)
    day.refuse("no free GPU")
    day.add(PoolSizeSet(group=GROUP, pool="decode", size=5, operator="alice", at_us=day.now_us))
    day.decide()
    day.reply()
    day.add(PlannerPaused(paused=True, operator="bob", at_us=day.now_us))
    day.round(5.0, 2, 5)
    day.add(PlannerPaused(paused=False, operator="bob", at_us=day.now_us))
    last = day.decide()
    day.reply()
    day.add(last)
    day.round(40.0, 1, 5)
    return day


def write_log(path: Path, records: Iterable[ScalingEvent]) -> Path:
    """Write the records to a new log file, and return its path."""
    log = SqliteLog.open(path)
    asyncio.run(log.append([Draft(SCALING.name, 0, encode(SCALING, record)) for record in records]))
    log.close()
    return path
