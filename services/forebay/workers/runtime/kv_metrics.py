"""What a worker shows to Prometheus of KV that travels between workers."""

from collections.abc import Iterator
from itertools import accumulate
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from forebay.events.transfer import KvLayout
from forebay.workers.engine import KvMover
from forebay.workers.kv_transfer.api import BUCKETS_S, REASONS, GivenBack, Stats
from forebay.workers.runtime.worker import Worker

PLAIN = "tcp"  # the path without NIXL


def kv_path(layout: KvLayout) -> str:
    """What moves KV blocks, in words: plainly so where it is not what one would expect."""
    return f"{layout.connector}, the plain path without NIXL" if layout.connector == PLAIN else layout.connector


def kv_metrics(worker: Worker) -> Iterator[Metric]:
    """The metrics as they are now; none where KV does not travel."""
    layout = worker.spec.kv_layout
    if layout is None:
        return
    labels = [worker.spec.worker_id]
    info = GaugeMetricFamily(
        "forebay_kv_transport_info", "1 for what moves KV blocks", labels=["worker_id", "transport", "plain"]
    )
    info.add_metric([*labels, layout.connector, str(layout.connector == PLAIN).lower()], 1)
    yield info
    if isinstance(worker.engine, KvMover):
        stats = worker.engine.kv_stats()
        yield from _counters(labels, stats)
        yield _seconds(labels, stats)
        yield from _gauges(labels, stats)


def _counters(labels: list[str], stats: Stats) -> Iterator[Metric]:
    counted = {
        "fetches": ("transfers of a prompt's KV that came", stats.fetched),
        "bytes": ("bytes of KV fetched", stats.bytes),
        "blocks": ("KV blocks fetched", stats.blocks),
        "retries": ("transfers repeated because a checksum was wrong", stats.retries),
        "corrupt_blocks": ("KV blocks that came with a wrong checksum", stats.corrupt),
        "cancelled": ("transfers that were given up", stats.cancelled),
        "offers": ("prompts whose KV was kept for another worker", stats.offered),
    }
    for name, (text, count) in counted.items():
        counter = CounterMetricFamily(f"forebay_kv_transfer_{name}", text, labels=["worker_id"])
        counter.add_metric(labels, count)
        yield counter
    by_reason = {
        "failures": ("transfers that failed, by reason", REASONS, stats.failed),
        "given_back": ("prompts whose KV is kept no longer, by what ended that", get_args(GivenBack), stats.given_back),
    }
    for name, (text, reasons, counts) in by_reason.items():
        counter = CounterMetricFamily(f"forebay_kv_transfer_{name}", text, labels=["worker_id", "reason"])
        for reason in sorted({*reasons, *counts}):  # from the start, so that the first event is seen as a rise
            counter.add_metric([*labels, reason], counts.get(reason, 0))
        yield counter


def _seconds(labels: list[str], stats: Stats) -> Metric:
    text = "time that fetches which came took, waiting for others included"
    histogram = HistogramMetricFamily("forebay_kv_transfer_seconds", text, labels=["worker_id"])
    counts = accumulate(stats.took.get(at, 0) for at in range(len(BUCKETS_S) + 1))
    bounds = [*map(str, BUCKETS_S), "+Inf"]
    histogram.add_metric(labels, list(zip(bounds, counts, strict=True)), stats.read_us / 1e6)
    return histogram


def _gauges(labels: list[str], stats: Stats) -> Iterator[Metric]:
    now = {
        "held": ("prompts whose KV is kept for another worker", stats.held_offers),
        "held_blocks": ("KV blocks that are kept for other workers", stats.held_blocks),
        "in_flight": ("transfers under way", stats.in_flight),
        "in_flight_bytes": ("bytes of KV under way", stats.in_flight_bytes),
        "waiting": ("transfers that wait for others", stats.waiting),
        "quarantined_blocks": (
            "KV blocks that a worker that does not answer may still write to",
            stats.quarantined_blocks,
        ),
    }
    for name, (text, count) in now.items():
        gauge = GaugeMetricFamily(f"forebay_kv_transfer_{name}", text, labels=["worker_id"])
        gauge.add_metric(labels, count)
        yield gauge
