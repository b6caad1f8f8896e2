"""Prometheus metrics of KV tiers: those of Dynamo's KVBM under its names, and those that KVBM lacks.

KVBM's names abbreviate the tiers. In an offload, `d2h` is device to host, `h2d` host to disk, `d2d` device to disk,
`d2o` device to object, and `h2o` host to object. In an onboard, the last letter is the device: `h2d`, `d2d` for disk,
`o2d`. KVBM calls the shared store `object`. Its counters have no suffix `_total`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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

    Tiers are `device`, `host`, `disk` and `store`.

    Attributes:
        matched_tokens: prompt tokens that were loaded from tiers instead of being computed.
        offloaded_blocks: blocks that were written, by source and tier.
        offloaded_bytes: bytes of these blocks, by tier.
        onboarded_blocks: blocks that were loaded into device memory, by tier.
        onboarded_bytes: bytes of these blocks, by tier.
        prefetched_blocks: blocks that were copied to the host tier for a waiting request, by source.
        load_us: total duration of these loads in microseconds, by tier.
        misses: blocks that a tier was expected to have but could not be read, by tier and reason.
        write_failures: blocks that were not written, by tier and reason.
        skipped: blocks that were not offloaded, by reason: the tier was full or busy, or the filter rejected them. The
            reason `pin` counts blocks that were not pinned, because too many are.
        rejected_blocks: blocks in tiers that were computed, because that was expected to be faster than loading them.
        evicted: blocks that were removed to make room, by tier.
        resident_bytes: bytes of these blocks, by tier.
        pinned_blocks: blocks in host memory and on disk that are not evicted because a request has pinned them.
        hit_rates: share of the blocks of recent prompts that were found in a tier, by tier.
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


class TierMetrics(Collector):
    """Prometheus collector of the tiers of a worker."""

    def __init__(self, worker_id: str, ranks: Mapping[int, Callable[[], TierCounters]]) -> None:
        self._worker_id = worker_id
        self._ranks = ranks

    def collect(self) -> Iterator[Metric]:
        counters = [([self._worker_id, str(rank)], read()) for rank, read in sorted(self._ranks.items())]
        for name, help_text, kind, value in _KVBM:
            metric = Metric(f"kvbm_{name}", help_text, kind)
            for (worker_id, rank), one in counters:
                metric.add_sample(f"kvbm_{name}", {"worker_id": worker_id, "rank": rank}, value(one))
            yield metric
        for name, help_text, labels, values in _OWN:
            family = CounterMetricFamily(f"forebay_tier_{name}", help_text, labels=["worker_id", "rank", *labels])
            for own, one in counters:
                for key, count in sorted(values(one).items()):
                    family.add_metric([*own, *key], count)
            yield family
        for name, help_text, gauges in _GAUGES:
            gauge = GaugeMetricFamily(f"forebay_tier_{name}", help_text, labels=["worker_id", "rank", "tier"])
            for own, one in counters:
                for tier, count in sorted(gauges(one).items()):
                    gauge.add_metric([*own, tier], count)
            yield gauge


Values = Callable[[TierCounters], Mapping[tuple[str, ...], float]]


def _by_tier(values: Callable[[TierCounters], Mapping[str, float]]) -> Values:
    return lambda one: {(tier,): count for tier, count in values(one).items()}


def _by_pair(values: Callable[[TierCounters], Mapping[tuple[str, str], float]]) -> Values:
    return lambda one: {(*pair,): count for pair, count in values(one).items()}


def _offload(route: tuple[str, str]) -> Callable[[TierCounters], float]:
    return lambda one: one.offloaded_blocks[route]


def _onboard(tier: str) -> Callable[[TierCounters], float]:
    return lambda one: one.onboarded_blocks[tier]


def _hit_rate(tier: str) -> Callable[[TierCounters], float]:
    return lambda one: one.hit_rates.get(tier, 0.0)


def _failures(values: Mapping[tuple[str, str], int]) -> int:
    return sum(count for (tier, _), count in values.items() if tier == "store")


# Name without the prefix, help, type of the metric, value. Counters have no suffix, so their type is not `counter`.
_KVBM: tuple[tuple[str, str, str, Callable[[TierCounters], float]], ...] = (
    (
        "matched_tokens",
        "Tokens loaded from tiers instead of being computed.",
        "unknown",
        lambda one: one.matched_tokens,
    ),
    *(
        (f"offload_blocks_{name}", f"Blocks offloaded from {route[0]} to {route[1]}.", "unknown", _offload(route))
        for route, name in OFFLOADS.items()
    ),
    *(
        (f"onboard_blocks_{name}", f"Blocks onboarded from {tier} to device.", "unknown", _onboard(tier))
        for tier, name in ONBOARDS.items()
    ),
    (
        "offload_bytes_object",
        "Bytes offloaded to the shared store.",
        "unknown",
        lambda one: one.offloaded_bytes["store"],
    ),
    (
        "onboard_bytes_object",
        "Bytes onboarded from the shared store.",
        "unknown",
        lambda one: one.onboarded_bytes["store"],
    ),
    (
        "object_read_failures",
        "Blocks that could not be read from the shared store.",
        "unknown",
        lambda one: _failures(one.misses),
    ),
    (
        "object_write_failures",
        "Blocks that could not be written to the shared store.",
        "unknown",
        lambda one: _failures(one.write_failures),
    ),
    *(
        (f"{name}_cache_hit_rate", f"Share of the blocks of recent prompts found in {tier}.", "gauge", _hit_rate(tier))
        for tier, name in HIT_RATES.items()
    ),
)

_OWN: tuple[tuple[str, str, tuple[str, ...], Values], ...] = (
    (
        "offloaded_blocks",
        "Blocks offloaded, by source and tier.",
        ("source", "tier"),
        _by_pair(lambda one: one.offloaded_blocks),
    ),
    ("offloaded_bytes", "Bytes offloaded, by tier.", ("tier",), _by_tier(lambda one: one.offloaded_bytes)),
    ("onboarded_blocks", "Blocks onboarded, by tier.", ("tier",), _by_tier(lambda one: one.onboarded_blocks)),
    ("onboarded_bytes", "Bytes onboarded, by tier.", ("tier",), _by_tier(lambda one: one.onboarded_bytes)),
    (
        "prefetched_blocks",
        "Blocks copied to the host tier for waiting requests, by source.",
        ("tier",),
        _by_tier(lambda one: one.prefetched_blocks),
    ),
    ("loads", "Completed loads, by tier.", ("tier",), _by_tier(lambda one: one.loads)),
    (
        "load_seconds",
        "Total duration of completed loads, by tier.",
        ("tier",),
        _by_tier(lambda one: {tier: us / 1e6 for tier, us in one.load_us.items()}),
    ),
    (
        "misses",
        "Blocks that could not be read, by tier and reason.",
        ("tier", "reason"),
        _by_pair(lambda one: one.misses),
    ),
    (
        "write_failures",
        "Blocks that could not be written, by tier and reason.",
        ("tier", "reason"),
        _by_pair(lambda one: one.write_failures),
    ),
    (
        "skipped_blocks",
        "Blocks not offloaded or not pinned, by reason.",
        ("reason",),
        _by_tier(lambda one: one.skipped),
    ),
    (
        "rejected_blocks",
        "Blocks in tiers that were computed, because loading them was expected to be slower.",
        (),
        lambda one: {(): one.rejected_blocks},
    ),
    ("evicted_blocks", "Blocks removed to make room, by tier.", ("tier",), _by_tier(lambda one: one.evicted)),
)

_GAUGES: tuple[tuple[str, str, Callable[[TierCounters], Mapping[str, float]]], ...] = (
    ("resident_blocks", "Blocks in a tier.", lambda one: one.resident_blocks),
    ("resident_bytes", "Bytes of the blocks in a tier.", lambda one: one.resident_bytes),
    ("pinned_blocks", "Blocks in a tier that requests have pinned.", lambda one: one.pinned_blocks),
)
