"""An engine's own Prometheus metrics, as they are."""

import os
from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # where an engine's other processes write theirs, if they do


class PrefixedMetrics(Collector):
    """What an engine's processes write to their folder, and what it keeps in this process's default registry alone.

    The folder comes first: it has the sum over processes, where this one may have a part. A process that read the
    variable before the engine set it keeps its own metrics in memory, so both are looked at. What begins with none of
    `prefixes` is not the engine's and stays out.
    """

    def __init__(self, *prefixes: str) -> None:
        self._prefixes = prefixes

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
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
