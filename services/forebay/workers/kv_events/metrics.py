"""What a worker counts of its engine's KV events, shown to Prometheus."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class KvEventMetrics(Collector):
    """Batches and what was odd about them or their blocks, by rank and kind; `totals` gives those of each rank."""

    def __init__(self, worker_id: str, totals: Mapping[int, Callable[[], Mapping[str, int]]]) -> None:
        self._worker_id = worker_id
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        found = CounterMetricFamily(
            "forebay_worker_kv_events",
            "batches of the engine's KV events, and what was odd in them, by kind",
            labels=["worker_id", "rank", "kind"],
        )
        for rank, totals in self._totals.items():
            for kind, count in sorted(totals().items()):
                found.add_metric([self._worker_id, str(rank), kind], count)
        yield found
