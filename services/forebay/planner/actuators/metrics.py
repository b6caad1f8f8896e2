"""Prometheus metrics of a supervisor, computed from its counters at each scrape."""

from collections.abc import Iterator
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.live.planner.actuator import ActuatorService
from forebay.planner.actuators.processes import ProcessActuator, WorkerStatus


class SupervisorMetrics(Collector):
    """Prometheus collector for the replies of a supervisor, and for the workers that it runs as processes."""

    def __init__(self, service: ActuatorService, processes: ProcessActuator | None) -> None:
        """Read the metrics from `service`, and from `processes` unless the actuator is another one."""
        self._service = service
        self._processes = processes

    def collect(self) -> Iterator[Metric]:
        decisions = CounterMetricFamily(
            "forebay_supervisor_decisions", "decisions that this process executed or refused", labels=["result"]
        )
        for result, count in sorted(self._service.results.items()):
            decisions.add_metric([result], count)
        yield decisions
        if self._processes is None:
            return
        labels = ["group", "pool", "status"]
        workers = GaugeMetricFamily("forebay_supervisor_workers", "workers of this supervisor", labels=labels)
        counts = self._processes.counts()
        for pool in sorted(self._processes.pools):
            for status in get_args(WorkerStatus):
                workers.add_metric([*pool, status], counts[pool, status])
        yield workers
