"""Prometheus metrics of workers, computed from their counters at each scrape, and the probes `/ready` and `/live`."""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, chain
from typing import get_args

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay import runtime
from forebay.runtime.metrics import counter, gauge
from forebay.workers.kv_transfer.api import BUCKETS_S, REASONS, FreeReason, KvMover, Stats
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
    counters, who = worker.counters, worker.spec.worker_id
    text = "1 while the worker is a member of the fleet."
    yield _metric(gauge, "worker_member", text, who, worker.worker_epoch is not None)
    text = "1 for the current state of the worker, 0 for the others."
    states = {str(state): state is worker.life.state for state in State}
    yield _metric(gauge, "worker_state", text, who, states, "state")
    skipped = {
        "dead_letter": counters.dead_letters,
        "other_epoch": counters.other_epoch,
        "other_group": counters.other_group,
        "other_worker": counters.other_worker,
        "repeated": counters.repeated,
        "superseded": counters.superseded,
        "unknown_rank": counters.unknown_rank,
        "repeated_command": worker.commands.repeated,
    }
    text = "Work items that the worker skipped, by reason."
    yield _metric(counter, "worker_items_skipped", text, who, skipped, "reason")
    text = "Responses continued from an earlier attempt."
    yield _metric(counter, "worker_continued", text, who, counters.continued)
    text = "Complete re-announcements of a rank's cache after the owner missed events."
    yield _metric(counter, "worker_caches_reannounced", text, who, counters.reannounced)
    text = "Requests that a drain handed over to other workers."
    yield _metric(counter, "worker_handed_back", text, who, counters.handed_back)
    yield from kv_metrics(worker)


def kv_metrics(worker: Worker) -> Iterator[Metric]:
    layout, who = worker.spec.kv_layout, worker.spec.worker_id
    if layout is None:
        return
    text = "Transport that moves KV blocks; the value is always 1."
    yield _metric(gauge, "kv_transport_info", text, who, {layout.connector: 1}, "transport")
    if not isinstance(worker.engine, KvMover):
        return
    stats = worker.engine.kv_stats()
    counted = {
        "fetches": ("KV transfers completed.", stats.fetched),
        "bytes": ("Bytes of KV fetched.", stats.bytes),
        "blocks": ("KV blocks fetched.", stats.blocks),
        "retries": ("KV transfers repeated because of a wrong checksum.", stats.retries),
        "corrupt_blocks": ("KV blocks received with a wrong checksum.", stats.corrupt),
        "cancelled": ("KV transfers given up.", stats.cancelled),
        "offers": ("Prompts whose KV was kept for another worker.", stats.offered),
    }
    for name, (text, count) in counted.items():
        yield _metric(counter, f"kv_transfer_{name}", text, who, count)
    # Every reason is exported from the start, so that the first event shows as an increase.
    text = "Failed KV transfers, by reason."
    failed = dict.fromkeys(REASONS, 0) | stats.failed
    yield _metric(counter, "kv_transfer_failures", text, who, failed, "reason")
    text = "Prompts whose KV is no longer kept, by the reason for freeing it."
    freed = dict.fromkeys(get_args(FreeReason), 0) | stats.freed
    yield _metric(counter, "kv_transfer_given_back", text, who, freed, "reason")
    yield _seconds(who, stats)
    now = {
        "held": ("Prompts whose KV is currently kept for another worker.", stats.held_offers),
        "held_blocks": ("KV blocks currently kept for other workers.", stats.held_blocks),
        "in_flight": ("KV transfers in flight.", stats.in_flight),
        "in_flight_bytes": ("Bytes of KV in flight.", stats.in_flight_bytes),
        "waiting": ("KV transfers waiting in the queue.", stats.waiting),
        "quarantined_blocks": ("KV blocks that an unresponsive worker may still write to.", stats.quarantined_blocks),
    }
    for name, (text, count) in now.items():
        yield _metric(gauge, f"kv_transfer_{name}", text, who, count)


def _metric(
    kind: Callable[..., Metric],
    name: str,
    text: str,
    worker_id: str,
    values: float | Mapping[str, float],
    label: str = "",
) -> Metric:
    if not isinstance(values, Mapping):
        return kind(f"forebay_{name}", text, {worker_id: values}, "worker_id")
    rows = {(worker_id, key): value for key, value in sorted(values.items())}
    return kind(f"forebay_{name}", text, rows, "worker_id", label)


def _seconds(worker_id: str, stats: Stats) -> Metric:
    text = "Total time of completed fetches, including time in the queue, in seconds."
    histogram = HistogramMetricFamily("forebay_kv_transfer_seconds", text, labels=["worker_id"])
    counts = accumulate(stats.took.get(at, 0) for at in range(len(BUCKETS_S) + 1))
    bounds = [*map(str, BUCKETS_S), "+Inf"]
    histogram.add_metric([worker_id], list(zip(bounds, counts, strict=True)), stats.read_us / 1e6)
    return histogram


LIVE_S = 30.0  # longer than several health checks with their timeouts


class Probes:
    """Readiness and liveness probes of a worker process, for any thread. `worker` is None until it is created.

    `waits_for` says what it waits for to be admitted; empty if that is not known, or it does not wait. `refusal` says
    why its model can get no control partition.
    """

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.waits_for = ""
        self.refusal: str | None = None

    def ready(self) -> tuple[bool, str]:
        """Return whether the worker is a healthy member of the fleet, and a text with its state and KV transport."""
        state, waits_for = self._state(), self.waits_for
        if waits_for and state is not State.HEALTHY:
            return False, f"{state}: {waits_for}"
        layout = None if self.worker is None else self.worker.spec.kv_layout
        return state is State.HEALTHY, state if layout is None else f"{state}, KV transport {layout.connector}"

    def live(self) -> tuple[bool, str]:
        """Return whether the worker is alive, and a text with its state.

        It is not alive once it has released its lease, or if the last health check is more than `LIVE_S` seconds ago.
        """
        state = self._state()
        late = self._late_s()
        if late > LIVE_S:
            return False, f"{state}, no health check for {late:.0f} s"
        return state is not State.DEREGISTERED, state

    def _state(self) -> State:
        return State.CREATED if self.worker is None else self.worker.life.state

    def _late_s(self) -> float:
        """Return the seconds since the last health check; 0 while the engine loads, which may block the event loop."""
        if self.worker is None or self._state() is State.CREATED:
            return 0.0
        return runtime.monotonic_s() - self.worker.health.checked_s
