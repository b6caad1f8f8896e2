"""Prometheus metrics of an engine's KV events."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class KvEventMetrics(Collector):
    """Prometheus collector that counts batches of KV events and anomalies in them, by rank and kind.

    Args:
        totals: for each rank, a function that returns its counters by kind.
    """

    def __init__(self, worker_id: str, totals: Mapping[int, Callable[[], Mapping[str, int]]]) -> None:
        self._worker_id = worker_id
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        found = CounterMetricFamily(
            "forebay_worker_kv_events",
            "Batches of the engine's KV events, and anomalies in them, by kind.",
            labels=["worker_id", "rank", "kind"],
        )
        for rank, totals in self._totals.items():
            for kind, count in sorted(totals().items()):
                found.add_metric([self._worker_id, str(rank), kind], count)
        yield found
