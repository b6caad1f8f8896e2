"""Planners and workloads for tests of simulations with a planner."""

from collections.abc import Sequence
from typing import Any

from forebay.events.scaling import (
    DecodePoint,
    DemandForecast,
    PlannerSettings,
    PoolDemand,
    PoolScaling,
    PrefillPoint,
    ScalingObserved,
)
from forebay.simulate.planned import Planning
from forebay.simulate.workload import Turn
from tests.simulate.fleets import turn

S = 1_000_000
INTERVAL_S = 30.0
GROUP = "simulated"


def expect_the_same(history: Sequence[ScalingObserved], observed: int) -> DemandForecast:
    last = history[-1]
    pools = tuple(
        PoolDemand(
            group=one.group,
            pool=one.pool,
            requests_per_s=one.requests / last.interval_s,
            isl=one.isl or 1.0,
            osl=one.osl or 1.0,
        )
        for one in last.pools
        if one.requests
    )
    return DemandForecast(predictor="constant", observed=observed, pools=pools)


def planning(*, pool: dict[str, Any] | None = None, **settings: Any) -> Planning:
    """Return a planner of the pool `default`. Its profile says that a worker prefills 1,300 tokens per second."""
    described = {
        "group": GROUP,
        "pool": "default",
        "max_size": 8,
        "startup_s": 40.0,
        "prefill": (PrefillPoint(isl=100, ttft_ms=50, tokens_per_s=1_300),),
        "decode": (DecodePoint(context=100, concurrency=1, itl_ms=10, tokens_per_s=1_000_000),),
        **(pool or {}),
    }
    options = {"interval_s": INTERVAL_S, "gpu_budget": 0, "pools": (PoolScaling(**described),), **settings}
    return Planning(PlannerSettings(**options), expect_the_same)


def wave(*rates: int, prompt: int = 1_000, output: int = 4) -> list[Turn]:
    """Return turns that arrive with these rates per second, each for one interval."""
    turns: list[Turn] = []
    for at, rate in enumerate(rates):
        for number in range(int(rate * INTERVAL_S)):
            at_us = round((at * INTERVAL_S + number / rate) * S)
            turns.append(turn(len(turns), prompt, output, at_us=at_us))
    return turns
