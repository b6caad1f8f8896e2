"""Recorded decisions of planners: a topic `scaling` with every method and nearly every reason, one record per line."""

import random
from collections.abc import Iterator
from pathlib import Path

from forebay.core.scaling.state import RULES_VERSION
from forebay.events.codec import decode, encode
from forebay.events.scaling import (
    PlannerClaimed,
    PlannerPaused,
    PlannerSettings,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    PoolSizeSet,
    ScalingEvent,
    SimulatedSize,
    SizesSimulated,
    WorkerObserved,
)
from forebay.events.topics import SCALING
from tests.core.scaling.scene import DECODE, PREFILL, Loop, S

PATH = Path(__file__).with_name("scaling.ndjson")
ROUNDS = 9  # per planner
GROUP = "model"
START_US = 1_750_000_000 * S
POOLS = (
    PoolScaling(group=GROUP, pool="prefill", role="prefill", max_size=6, startup_s=15, prefill=PREFILL),
    PoolScaling(
        group=GROUP, pool="decode", role="decode", gpus_per_worker=2, max_size=6, startup_s=0, kv_tokens=60_000,
        decode=DECODE,
    ),
    PoolScaling(group=GROUP, pool="mixed", min_size=2, max_size=8, startup_s=0, prefill=PREFILL, decode=DECODE),
    PoolScaling(group=GROUP, pool="unmeasured", max_size=3, startup_s=0),
)  # fmt: skip
# Settings of one planner after the other. Each one goes on with the sizes of the one before it.
PLANNERS = (
    PlannerSettings(pools=POOLS, interval_s=10, gpu_budget=40, max_change=3),
    PlannerSettings(pools=POOLS, interval_s=10, gpu_budget=14, equations="corrected", ttft_ms=90, cooldown_s=25),
    PlannerSettings(pools=POOLS, interval_s=10, gpu_budget=0, method="load", min_observations=3, ttft_ms=300),
    PlannerSettings(pools=POOLS, interval_s=10, gpu_budget=0, method="both", min_observations=2, action_timeout_s=15),
    PlannerSettings(pools=POOLS, interval_s=10, gpu_budget=3, min_gpus=2),
    PlannerSettings(pools=POOLS, interval_s=10, gpu_budget=0, method="simulate"),
    PlannerSettings(pools=POOLS, interval_s=10, method="load", min_observations=2, gpu_budget=0, advisory=True),
)


def scaling_records() -> list[ScalingEvent]:
    draw = random.Random(5)
    play = Loop(PLANNERS[0], start_us=START_US)
    for number, settings in enumerate(PLANNERS):
        if number:
            claim = PlannerClaimed(
                planner_id=f"p{number}", rules_version=RULES_VERSION, settings=settings, at_us=play.now_us
            )
            play.add(claim)
        for step in range(ROUNDS):
            _orders(play, number, step)
            _round(play, draw, settings, is_idle=step > ROUNDS * 3 // 4)
            _reply(play, draw)
    return play.records


def _orders(play: Loop, number: int, step: int) -> None:
    if number == 0 and step in {5, 8}:
        play.add(PlannerPaused(paused=step == 5, operator="ops", at_us=play.now_us))
    if number == 1 and step in {5, 8}:
        size = 4 if step == 5 else None
        play.add(PoolSizeSet(group=GROUP, pool="decode", size=size, operator="ops", at_us=play.now_us))


def _round(play: Loop, draw: random.Random, settings: PlannerSettings, *, is_idle: bool) -> None:
    rate = 0.0 if is_idle else draw.choice([2.0, 15.0, 40.0, 90.0])
    seen = [_observed(play, draw, settings, pool, rate) for pool in settings.pools]
    play.observe(*(one for one in seen if draw.random() > 0.05))
    isl = draw.choice([300.0, 900.0, 5_000.0])
    demands = [
        PoolDemand(group=GROUP, pool=pool.pool, requests_per_s=rate, isl=isl, osl=150.0, kv_hit_rate=0.25)
        for pool in settings.pools
    ]
    play.forecast(*(one for one in demands if draw.random() > 0.05))
    if settings.method == "simulate":
        sizes = tuple(
            SimulatedSize(group=GROUP, pool="mixed", size=size, attained=min(1.0, 1.3 * draw.random()))
            for size in (2, 3, 4)
        )
        play.add(SizesSimulated(planner_epoch=play.state.epoch, forecast=play.state.end - 1, target=0.9, sizes=sizes))
    play.decide()


def _observed(
    play: Loop, draw: random.Random, settings: PlannerSettings, pool: PoolScaling, rate: float
) -> PoolObserved:
    ready = max(play.state.size(pool) or 2, 1) - (draw.random() < 0.1)
    is_read = settings.method in {"load", "both"} or settings.equations == "corrected"
    workers = tuple(_worker(draw, number, rate) for number in range(ready)) if is_read else ()
    known = rate > 0
    return PoolObserved(
        group=GROUP,
        pool=pool.pool,
        ready=ready,
        requests=int(rate * 10),
        isl=900.0 if known else None,
        osl=150.0 if known else None,
        ttft_ms=draw.choice([40.0, 200.0]) if known else None,
        itl_ms=draw.choice([15.0, 45.0]) if known else None,
        kv_hit_rate=0.25 if known else None,
        workers=workers,
    )


def _worker(draw: random.Random, number: int, rate: float) -> WorkerObserved:
    load = draw.random() * min(rate, 50.0) / 50.0
    return WorkerObserved(
        worker_id=f"w{number}",
        running=int(load * 30),
        waiting=0,
        prefill_tokens=int(load * 6_000),
        kv_tokens=int(load * 40_000),
        kv_tokens_max=60_000,
        ttft_ms=round(30.0 + load * 500.0, 1) if rate else None,
        itl_ms=round(10.0 + load * 60.0, 1) if rate else None,
    )


def _reply(play: Loop, draw: random.Random) -> None:
    if not play.state.open:
        return
    chance = draw.random()
    if chance < 0.1:
        play.refuse()
    elif chance < 0.85:  # otherwise there is no reply in this interval
        play.reply()


def recorded_records() -> Iterator[ScalingEvent]:
    for line in PATH.read_bytes().splitlines():
        yield decode(SCALING, line)


def write_scaling() -> int:
    """Write the file, and return its size in bytes."""
    return PATH.write_bytes(b"".join(encode(SCALING, record) + b"\n" for record in scaling_records()))
