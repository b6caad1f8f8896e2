"""Pools with profiles, demand and observations for tests of the sizing rules."""

from forebay.events.scaling import (
    DecodePoint,
    PlannerSettings,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    PrefillPoint,
    WorkerObserved,
)
from tests.core.scaling.records import GROUP, POOL

# One worker prefills 12,500 tokens per second up to 1,000 tokens, and 8,000 at 4,000 tokens.
PREFILL = (
    PrefillPoint(isl=4_000, ttft_ms=500, tokens_per_s=8_000),
    PrefillPoint(isl=250, ttft_ms=30, tokens_per_s=12_500),
    PrefillPoint(isl=1_000, ttft_ms=80, tokens_per_s=12_500),
)
DECODE = (
    DecodePoint(context=1_000, concurrency=1, itl_ms=10, tokens_per_s=100),
    DecodePoint(context=1_000, concurrency=50, itl_ms=50, tokens_per_s=1_000),
    DecodePoint(context=1_000, concurrency=10, itl_ms=20, tokens_per_s=500),
    DecodePoint(context=3_000, concurrency=1, itl_ms=30, tokens_per_s=33),
    DecodePoint(context=3_000, concurrency=10, itl_ms=40, tokens_per_s=250),
)


def pool(**fields: object) -> PoolScaling:
    return PoolScaling(**{"group": GROUP, "pool": POOL, "prefill": PREFILL, "decode": DECODE, **fields})  # type: ignore[arg-type]


def settings(*pools: PoolScaling, **fields: object) -> PlannerSettings:
    return PlannerSettings(pools=pools, **fields)  # type: ignore[arg-type]


def demand(requests_per_s: float, isl: float = 1_000, osl: float = 200, kv_hit_rate: float = 0.0) -> PoolDemand:
    return PoolDemand(group=GROUP, pool=POOL, requests_per_s=requests_per_s, isl=isl, osl=osl, kv_hit_rate=kv_hit_rate)


def observation(ready: int = 2, workers: tuple[WorkerObserved, ...] = (), **fields: object) -> PoolObserved:
    return PoolObserved(group=GROUP, pool=POOL, ready=ready, workers=workers, **fields)  # type: ignore[arg-type]


def worker(
    prefill_tokens: int = 0,
    kv_tokens: int = 0,
    ttft_ms: float | None = None,
    itl_ms: float | None = None,
    running: int = 1,
    waiting: int = 0,
    kv_tokens_max: int = 0,
) -> WorkerObserved:
    return WorkerObserved(
        worker_id="w",
        running=running,
        waiting=waiting,
        prefill_tokens=prefill_tokens,
        kv_tokens=kv_tokens,
        kv_tokens_max=kv_tokens_max,
        ttft_ms=ttft_ms,
        itl_ms=itl_ms,
    )
