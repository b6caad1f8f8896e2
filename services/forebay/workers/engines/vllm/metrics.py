"""The statistics of vLLM's steps, and what its metrics are called."""

from collections.abc import Callable
from typing import Any

PREFIXES = ("vllm:", "lmcache:")  # LMCache registers its own where vLLM uses it


class VllmStepStats:
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
