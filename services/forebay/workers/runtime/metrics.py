"""Prometheus metrics of a worker, collected from its counters."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.workers.runtime.kv_metrics import kv_metrics
from forebay.workers.runtime.life_cycle import State
from forebay.workers.runtime.worker import Worker


class WorkerMetrics(Collector):
    """State and counters of one worker, and the metrics of its engine."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        worker, counters = self._worker, self._worker.counters
        labels = [worker.spec.worker_id]
        member = GaugeMetricFamily(
            "forebay_worker_member", "1 while the worker is a member of the fleet.", labels=["worker_id"]
        )
        member.add_metric(labels, worker.worker_epoch is not None)
        yield member
        state = GaugeMetricFamily(
            "forebay_worker_state",
            "1 for the current state of the worker, 0 for the others.",
            labels=["worker_id", "state"],
        )
        for one in State:
            state.add_metric([*labels, one], one is worker.life.state)
        yield state
        skipped = CounterMetricFamily(
            "forebay_worker_items_skipped",
            "Work items that the worker skipped, by reason.",
            labels=["worker_id", "reason"],
        )
        reasons = {
            "dead_letter": counters.dead_letters,
            "other_epoch": counters.other_epoch,
            "other_group": counters.other_group,
            "other_worker": counters.other_worker,
            "repeated": counters.repeated,
            "superseded": counters.superseded,
            "unknown_rank": counters.unknown_rank,
            "repeated_command": worker.commands.repeated,
        }
        for reason, count in reasons.items():
            skipped.add_metric([*labels, reason], count)
        yield skipped
        continued = CounterMetricFamily(
            "forebay_worker_continued", "Responses continued from an earlier attempt.", labels=["worker_id"]
        )
        continued.add_metric(labels, counters.continued)
        yield continued
        reannounced = CounterMetricFamily(
            "forebay_worker_caches_reannounced",
            "Complete re-announcements of a rank's cache after the owner missed events.",
            labels=["worker_id"],
        )
        reannounced.add_metric(labels, counters.reannounced)
        yield reannounced
        handed_back = CounterMetricFamily(
            "forebay_worker_handed_back", "Requests that a drain handed over to other workers.", labels=["worker_id"]
        )
        handed_back.add_metric(labels, counters.handed_back)
        yield handed_back
        yield from kv_metrics(worker)
        for collector in worker.engine.collectors():
            yield from collector.collect()
