"""Statistics of vLLM's steps, and the prefixes of its metrics."""

from collections.abc import Callable
from typing import Any

PREFIXES = ("vllm:", "lmcache:")  # LMCache registers metrics, too, if vLLM uses it


class VllmStepStats:
    """`StatLoggerBase` of one rank, duck-typed because vLLM may not be installed.

    `report` receives the index of the engine, the running and waiting requests, and the share of KV blocks in use.
    """

    def __init__(self, engine_index: int, report: Callable[[int, int, int, float], None]) -> None:
        self._engine_index = engine_index
        self._report = report

    def record(self, scheduler_stats: Any, _iteration_stats: Any, **_others: Any) -> None:
        """Report the load after a step. Some outputs have no statistics."""
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._report(self._engine_index, scheduler_stats.num_running_reqs, waiting, scheduler_stats.kv_cache_usage)

    def log_engine_initialized(self) -> None:
        """Do nothing."""

    def log(self) -> None:
        """Do nothing: the worker reports loads."""

    def record_sleep_state(self, _is_awake: int, _level: int) -> None:
        """Do nothing."""
