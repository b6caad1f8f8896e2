"""Receive the statistics of vLLM's steps, and name the prefixes of its metrics."""

from collections.abc import Callable
from typing import Any

from forebay.workers.engines.vllm.tiers.configuration import CONNECTOR

PREFIXES = ("vllm:", "lmcache:")  # LMCache registers metrics, too, if vLLM uses it


class VllmStepStats:
    """Receives the statistics of one rank from vLLM. It has the methods of vLLM's `StatLoggerBase`.

    It is no subclass, because vLLM may not be installed. For each step it calls `report` with the index of the rank in
    the engine, the numbers of running and waiting requests, and the share of KV blocks in use. It calls `report_tiers`
    with the index and an encoded `TierReport`.
    """

    def __init__(
        self,
        engine_index: int,
        report: Callable[[int, int, int, float], None],
        report_tiers: Callable[[int, bytes], None],
    ) -> None:
        self._engine_index = engine_index
        self._report = report
        self._report_tiers = report_tiers

    def record(self, scheduler_stats: Any, _iteration_stats: Any, **_others: Any) -> None:
        """Report the load after a step. Some outputs of vLLM have no statistics and are ignored."""
        if scheduler_stats is not None:
            waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._report(self._engine_index, scheduler_stats.num_running_reqs, waiting, scheduler_stats.kv_cache_usage)
            connectors = scheduler_stats.kv_connector_stats or {}
            if (encoded := connectors.get(CONNECTOR, connectors).get("report")) is not None:
                self._report_tiers(self._engine_index, encoded)

    def log_engine_initialized(self) -> None:
        """Do nothing, because the worker itself logs its start."""

    def log(self) -> None:
        """Do nothing, because the worker reports loads on the log."""

    def record_sleep_state(self, _is_awake: int, _level: int) -> None:
        """Do nothing, because the worker itself knows whether the engine sleeps."""
