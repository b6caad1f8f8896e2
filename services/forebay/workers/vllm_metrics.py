"""vLLM's own Prometheus metrics, as they are, and the statistics of its steps."""

import os
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

PREFIXES = ("vllm:", "lmcache:")  # LMCache registers its own where vLLM uses it
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"  # where processes share their metrics, if they do


class EngineMetrics(Collector):
    """What vLLM keeps in the process's default registry, or in the folder that all its processes write to.

    Whatever else is there, of Python or of this process, is not the engine's and stays out.
    """

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        registry = REGISTRY
        if os.environ.get(MULTIPROCESS):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        for metric in registry.collect():
            if metric.name.startswith(PREFIXES):
                yield metric


class StepStats:
    """A `StatLoggerBase` of one rank: tells `report` its index, running and waiting requests, and the use of KV blocks.

    That use is a share of the blocks that requests can have. Duck-typed: vLLM's base class is only there with vLLM.
    """

    def __init__(self, engine_index: int, report: Callable[[int, int, int, float], None]) -> None:
        self._engine_index = engine_index
        self._report = report

    def record(self, scheduler_stats: Any, _iteration_stats: Any, **_others: Any) -> None:
        """A step was taken; some answers come without its statistics."""
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._report(self._engine_index, scheduler_stats.num_running_reqs, waiting, scheduler_stats.kv_cache_usage)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say: the worker reports loads."""

    def record_sleep_state(self, _is_awake: int, _level: int) -> None:
        """Nothing to say."""
