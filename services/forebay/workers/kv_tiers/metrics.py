"""Prometheus metrics of KV tiers: those of Dynamo's KVBM under its names, and those that KVBM lacks.

KVBM's names abbreviate the tiers. In an offload, `d2h` is device to host, `h2d` host to disk, `d2d` device to disk,
`d2o` device to object, and `h2o` host to object. In an onboard, the last letter is the device: `h2d`, `d2d` for disk,
`o2d`. KVBM calls the shared store `object`. Its counters have no suffix `_total`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from prometheus_client.core import Metric

from forebay.runtime.metrics import collector

OFFLOADS = {
    ("device", "host"): "d2h",
    ("host", "disk"): "h2d",
    ("device", "disk"): "d2d",
    ("device", "store"): "d2o",
    ("host", "store"): "h2o",
}
ONBOARDS = {"host": "h2d", "disk": "d2d", "store": "o2d"}
HIT_RATES = {"host": "host", "disk": "disk", "store": "object"}


class TierCounters(msgspec.Struct, kw_only=True):
    """What a rank counts about its tiers: counters since the start of the engine, and gauges of the current state.

    Tiers are `device`, `host`, `disk` and `store`. Mappings are by tier, except that offloaded blocks are by source and
    tier, misses and write failures by tier and reason, prefetched blocks by source, and skipped blocks by reason.

    Attributes:
        misses: blocks that a tier was expected to have but could not be read.
        skipped: blocks that were not offloaded, because the tier was full or busy, or the filter rejected them. The
            reason `pin` counts blocks that were not pinned, because too many are.
        rejected_blocks: blocks in tiers that were computed, because that was expected to be faster than loading them.
        pinned_blocks: blocks in host memory and on disk that are not evicted because a request has pinned them.
        hit_rates: share of the blocks of recent prompts that were found in a tier.
    """

    matched_tokens: int = 0
    offloaded_blocks: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    offloaded_bytes: Counter[str] = msgspec.field(default_factory=Counter)
    onboarded_blocks: Counter[str] = msgspec.field(default_factory=Counter)
    onboarded_bytes: Counter[str] = msgspec.field(default_factory=Counter)
    prefetched_blocks: Counter[str] = msgspec.field(default_factory=Counter)
    loads: Counter[str] = msgspec.field(default_factory=Counter)
    load_us: Counter[str] = msgspec.field(default_factory=Counter)
    misses: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    write_failures: Counter[tuple[str, str]] = msgspec.field(default_factory=Counter)
    skipped: Counter[str] = msgspec.field(default_factory=Counter)
    rejected_blocks: int = 0
    evicted: Counter[str] = msgspec.field(default_factory=Counter)
    resident_blocks: dict[str, int] = msgspec.field(default_factory=dict)
    resident_bytes: dict[str, int] = msgspec.field(default_factory=dict)
    pinned_blocks: dict[str, int] = msgspec.field(default_factory=dict)
    hit_rates: dict[str, float] = msgspec.field(default_factory=dict)


@collector
def tier_metrics(worker_id: str, ranks: Mapping[int, Callable[[], TierCounters]]) -> Iterable[Metric]:
    metrics: dict[str, Metric] = {}
    for rank, read in sorted(ranks.items()):
        for row in (*_kvbm_rows(counters := read()), *_forebay_rows(counters)):
            metric = metrics.setdefault(row.name, Metric(row.name, row.help, row.kind))
            for key, value in sorted(row.values.items()):
                labels = dict(zip(row.labels, (key,) if isinstance(key, str) else key, strict=True))
                name = f"{row.name}_total" if row.kind == "counter" else row.name
                metric.add_sample(name, {"worker_id": worker_id, "rank": str(rank), **labels}, value)
    return metrics.values()


class _Row(NamedTuple):
    name: str
    help: str
    kind: str
    values: Mapping[Any, float]
    labels: tuple[str, ...] = ()


def _kvbm_rows(one: TierCounters) -> Iterator[_Row]:
    def row(name: str, text: str, value: float, kind: str = "unknown") -> _Row:
        return _Row(f"kvbm_{name}", text, kind, {(): value})

    def of_store(values: Mapping[tuple[str, str], int]) -> int:
        return sum(count for (tier, _), count in values.items() if tier == "store")

    yield row("matched_tokens", "Tokens loaded from tiers instead of being computed.", one.matched_tokens)
    for route, name in OFFLOADS.items():
        source, tier = route
        yield row(f"offload_blocks_{name}", f"Blocks offloaded from {source} to {tier}.", one.offloaded_blocks[route])
    for tier, name in ONBOARDS.items():
        yield row(f"onboard_blocks_{name}", f"Blocks onboarded from {tier} to device.", one.onboarded_blocks[tier])
    yield row("offload_bytes_object", "Bytes offloaded to the shared store.", one.offloaded_bytes["store"])
    yield row("onboard_bytes_object", "Bytes onboarded from the shared store.", one.onboarded_bytes["store"])
    text = "Blocks that could not be read from the shared store."
    yield row("object_read_failures", text, of_store(one.misses))
    text = "Blocks that could not be written to the shared store."
    yield row("object_write_failures", text, of_store(one.write_failures))
    for tier, name in HIT_RATES.items():
        text = f"Share of the blocks of recent prompts found in {tier}."
        yield row(f"{name}_cache_hit_rate", text, one.hit_rates.get(tier, 0.0), "gauge")


def _forebay_rows(one: TierCounters) -> Iterator[_Row]:
    seconds = {tier: us / 1e6 for tier, us in one.load_us.items()}
    tier, route, reason = ("tier",), ("source", "tier"), ("tier", "reason")
    rejected = "Blocks in tiers that were computed, because loading them was expected to be slower."
    prefetched = "Blocks copied to the host tier for waiting requests, by source."
    for name, text, values, labels in (
        ("offloaded_blocks", "Blocks offloaded, by source and tier.", one.offloaded_blocks, route),
        ("offloaded_bytes", "Bytes offloaded, by tier.", one.offloaded_bytes, tier),
        ("onboarded_blocks", "Blocks onboarded, by tier.", one.onboarded_blocks, tier),
        ("onboarded_bytes", "Bytes onboarded, by tier.", one.onboarded_bytes, tier),
        ("prefetched_blocks", prefetched, one.prefetched_blocks, tier),
        ("loads", "Completed loads, by tier.", one.loads, tier),
        ("load_seconds", "Total duration of completed loads, by tier.", seconds, tier),
        ("misses", "Blocks that could not be read, by tier and reason.", one.misses, reason),
        ("write_failures", "Blocks that could not be written, by tier and reason.", one.write_failures, reason),
        ("skipped_blocks", "Blocks not offloaded or not pinned, by reason.", one.skipped, ("reason",)),
        ("rejected_blocks", rejected, {(): one.rejected_blocks}, ()),
        ("evicted_blocks", "Blocks removed to make room, by tier.", one.evicted, tier),
    ):
        yield _Row(f"forebay_tier_{name}", text, "counter", values, labels)
    for name, text, gauge in (
        ("resident_blocks", "Blocks in a tier.", one.resident_blocks),
        ("resident_bytes", "Bytes of the blocks in a tier.", one.resident_bytes),
        ("pinned_blocks", "Blocks in a tier that requests have pinned.", one.pinned_blocks),
    ):
        yield _Row(f"forebay_tier_{name}", text, "gauge", gauge, tier)
