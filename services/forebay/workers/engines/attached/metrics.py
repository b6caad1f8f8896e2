"""Prometheus metrics of an attached server."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class AttachedMetrics(Collector):
    """Prometheus collector of an attached server's counters."""

    def __init__(self, worker_id: str, counts: Mapping[str, int]) -> None:
        self._worker_id = worker_id
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "forebay_upstream_events", "Events of an attached server, by kind.", labels=["worker_id", "kind"]
        )
        for kind in ("cut", "continued", "rejected", "metrics_unreadable", "inexact_text", "unfetched_kv"):
            family.add_metric([self._worker_id, kind], self._counts.get(kind, 0))
        yield family
