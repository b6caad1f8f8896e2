"""Prometheus metrics of an engine, passed on unchanged."""

import os
from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # directory in which other processes of an engine write their metrics


class PrefixedMetrics(Collector):
    """Collector of an engine's metrics from its multiprocess directory and from this process's default registry.

    The directory has precedence, because it contains the sum over processes. The registry is needed for a process that
    read the variable before the engine set it. Only metrics whose name starts with one of `prefixes` are yielded.
    """

    def __init__(self, *prefixes: str) -> None:
        self._prefixes = prefixes

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
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
