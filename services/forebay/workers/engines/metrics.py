"""Export the Prometheus metrics of an engine unchanged."""

import os
from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # directory in which other processes of an engine write their metrics


class PrefixedMetrics(Collector):
    """Prometheus collector that exports the metrics of an engine whose names start with one of `prefixes`.

    It reads them from the directory in `PROMETHEUS_MULTIPROC_DIR`, which contains the sums over all processes of the
    engine. Metrics that are not there are read from the default registry of this process: it contains them if
    prometheus_client was imported before the engine set that variable.
    """

    def __init__(self, *prefixes: str) -> None:
        self._prefixes = prefixes

    def collect(self) -> Iterator[Metric]:
        registries: list[CollectorRegistry] = [REGISTRY]
        if os.environ.get(MULTIPROCESS):
            written = CollectorRegistry()
            MultiProcessCollector(written)  # type: ignore[no-untyped-call]
            registries.insert(0, written)
        seen: set[str] = set()
        for registry in registries:
            for metric in registry.collect():
                if metric.name.startswith(self._prefixes) and metric.name not in seen:
                    seen.add(metric.name)
                    yield metric
