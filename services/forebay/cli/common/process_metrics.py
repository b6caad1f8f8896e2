"""Prometheus metrics that every process of forebay exports: its resources and its version."""

import platform
from collections.abc import Iterator
from importlib.metadata import version

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


def process_registry() -> CollectorRegistry:
    """Return a registry with `process_*`, which only Linux has, and `forebay_build_info`."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_BuildInfo())
    return registry


class _BuildInfo(Collector):
    """Prometheus collector for the versions of forebay and Python."""

    def __init__(self) -> None:
        self._labels = {"version": version("forebay"), "python_version": platform.python_version()}

    def collect(self) -> Iterator[Metric]:
        text = "Versions of forebay and Python in this process; the value is always 1."
        info = GaugeMetricFamily("forebay_build_info", text, labels=list(self._labels))
        info.add_metric(list(self._labels.values()), 1)
        yield info
