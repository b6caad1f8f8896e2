"""Prometheus metrics of workers, computed from their counters at each scrape."""

from collections.abc import Iterator
from itertools import chain

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.workers.runtime.kv_metrics import kv_metrics
from forebay.workers.runtime.life_cycle import State
from forebay.workers.runtime.worker import Worker


class WorkerMetrics(Collector):
    """Prometheus collector for the workers of a process. Metrics of the same name are merged.

    If the process has several workers, only those metrics of engines are included that have a label for the worker.
    """

    def __init__(self, *workers: Worker) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for worker in self._workers:
            for metric in chain(_worker_metrics(worker), self._engine_metrics(worker)):
                if metric.name in found:
                    found[metric.name].samples += metric.samples
                else:
                    found[metric.name] = metric
        yield from found.values()

    def _engine_metrics(self, worker: Worker) -> Iterator[Metric]:
        for collector in worker.engine.collectors():
            for metric in collector.collect():
                if len(self._workers) == 1 or all("worker_id" in sample.labels for sample in metric.samples):
                    yield metric


def _worker_metrics(worker: Worker) -> Iterator[Metric]:
    """Yield the state of a worker, its counters and its KV transfers."""
    counters = worker.counters
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
