"""Prometheus metrics of KV transfers between workers."""

from collections.abc import Iterator
from itertools import accumulate
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from forebay.workers.engine import KvMover
from forebay.workers.kv_transfer.api import BUCKETS_S, REASONS, FreeReason, Stats
from forebay.workers.runtime.worker import Worker


def kv_metrics(worker: Worker) -> Iterator[Metric]:
    """Yield the current metrics of the KV transfers of a worker. There are none if its engine transfers no KV."""
    layout = worker.spec.kv_layout
    if layout is None:
        return
    labels = [worker.spec.worker_id]
    info = GaugeMetricFamily(
        "forebay_kv_transport_info",
        "Transport that moves KV blocks; the value is always 1.",
        labels=["worker_id", "transport"],
    )
    info.add_metric([*labels, layout.connector], 1)
    yield info
    if isinstance(worker.engine, KvMover):
        stats = worker.engine.kv_stats()
        yield from _counters(labels, stats)
        yield _seconds(labels, stats)
        yield from _gauges(labels, stats)


def _counters(labels: list[str], stats: Stats) -> Iterator[Metric]:
    counted = {
        "fetches": ("KV transfers completed.", stats.fetched),
        "bytes": ("Bytes of KV fetched.", stats.bytes),
        "blocks": ("KV blocks fetched.", stats.blocks),
        "retries": ("KV transfers repeated because of a wrong checksum.", stats.retries),
        "corrupt_blocks": ("KV blocks received with a wrong checksum.", stats.corrupt),
        "cancelled": ("KV transfers given up.", stats.cancelled),
        "offers": ("Prompts whose KV was kept for another worker.", stats.offered),
    }
    for name, (text, count) in counted.items():
        counter = CounterMetricFamily(f"forebay_kv_transfer_{name}", text, labels=["worker_id"])
        counter.add_metric(labels, count)
        yield counter
    by_reason = {
        "failures": ("Failed KV transfers, by reason.", REASONS, stats.failed),
        "given_back": (
            "Prompts whose KV is no longer kept, by the reason for freeing it.",
            get_args(FreeReason),
            stats.freed,
        ),
    }
    for name, (text, reasons, counts) in by_reason.items():
        counter = CounterMetricFamily(f"forebay_kv_transfer_{name}", text, labels=["worker_id", "reason"])
        for reason in sorted(
            {*reasons, *counts}
        ):  # exported from the start, so that the first event shows as an increase
            counter.add_metric([*labels, reason], counts.get(reason, 0))
        yield counter


def _seconds(labels: list[str], stats: Stats) -> Metric:
    text = "Total time of completed fetches, including time in the queue, in seconds."
    histogram = HistogramMetricFamily("forebay_kv_transfer_seconds", text, labels=["worker_id"])
    counts = accumulate(stats.took.get(at, 0) for at in range(len(BUCKETS_S) + 1))
    bounds = [*map(str, BUCKETS_S), "+Inf"]
    histogram.add_metric(labels, list(zip(bounds, counts, strict=True)), stats.read_us / 1e6)
    return histogram


def _gauges(labels: list[str], stats: Stats) -> Iterator[Metric]:
    now = {
        "held": ("Prompts whose KV is currently kept for another worker.", stats.held_offers),
        "held_blocks": ("KV blocks currently kept for other workers.", stats.held_blocks),
        "in_flight": ("KV transfers in flight.", stats.in_flight),
        "in_flight_bytes": ("Bytes of KV in flight.", stats.in_flight_bytes),
        "waiting": ("KV transfers waiting in the queue.", stats.waiting),
        "quarantined_blocks": (
            "KV blocks that an unresponsive worker may still write to.",
            stats.quarantined_blocks,
        ),
    }
    for name, (text, count) in now.items():
        gauge = GaugeMetricFamily(f"forebay_kv_transfer_{name}", text, labels=["worker_id"])
        gauge.add_metric(labels, count)
        yield gauge
