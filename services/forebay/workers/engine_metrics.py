"""An engine's own Prometheus metrics, as they are: SGLang's, TensorRT-LLM's."""

import os
from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # where an engine's other processes write theirs, if they do


class PrefixedMetrics(Collector):
    """What the engine keeps in this process's default registry, and what its processes write to their folder.

    This process keeps its metrics in memory, whatever the variable says: it read that before the engine set it.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        registries = [REGISTRY]
        if os.environ.get(MULTIPROCESS):
            written = CollectorRegistry()
            MultiProcessCollector(written)  # type: ignore[no-untyped-call]
            registries.append(written)
        seen: set[str] = set()
        for registry in registries:
            for metric in registry.collect():
                if metric.name.startswith(self._prefix) and metric.name not in seen:
                    seen.add(metric.name)
                    yield metric
