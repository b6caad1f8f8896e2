"""Prometheus metrics of a planner."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.live.planner.planner import Planner

LABELS = ("group", "pool")


class PlannerMetrics(Collector):
    """Metrics of one planner, active or standby, and of the pools that the active planner scales."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    def collect(self) -> Iterator[Metric]:
        planner, state = self._planner, self._planner.topic.state
        yield GaugeMetricFamily(
            "forebay_planner_active", "1 if this planner decides, 0 if it stands by", int(planner.is_active)
        )
        yield GaugeMetricFamily("forebay_planner_paused", "1 if an operator has paused the planner", int(state.paused))
        yield GaugeMetricFamily(
            "forebay_planner_open_changes", "decided changes of pools without reply of an actuator", len(state.open)
        )
        decisions = CounterMetricFamily(
            "forebay_planner_decisions", "decisions of this process by effect", labels=["effect"]
        )
        decisions.add_metric(["applied"], planner.decisions)
        decisions.add_metric(["stale"], planner.stale)
        yield decisions
        yield CounterMetricFamily(
            "forebay_planner_forecast_failures", "intervals in which the predictor failed", planner.forecast_failures
        )
        yield CounterMetricFamily(
            "forebay_planner_simulation_failures",
            "intervals whose forecast could not be simulated",
            planner.simulation_failures,
        )
        size = GaugeMetricFamily("forebay_pool_size", "workers of a pool as decided", labels=LABELS)
        ready = GaugeMetricFamily("forebay_pool_ready", "ready workers of a pool as last observed", labels=LABELS)
        for pool in state.settings.pools if state.settings else ():
            decided, observed = state.size(pool), state.last_observed(pool)
            if decided is not None:
                size.add_metric((pool.group, pool.pool), decided)
            if observed is not None:
                ready.add_metric((pool.group, pool.pool), observed.ready)
        yield size
        yield ready
