"""Topic `metrics`: load reports of engines. The newest report of a (worker, rank) replaces its earlier reports."""

from forebay.events.base import Count, Event
from forebay.events.privacy import SystemName


class LoadReported(Event, tag="load.reported", frozen=True, kw_only=True):
    """Number of requests and use of the cache of one rank, reported at most ten times a second.

    Attributes:
        worker_id: id of the worker.
        worker_epoch: epoch of the worker.
        running: requests that the engine is computing.
        waiting: requests queued in the engine.
        kv_blocks_used: KV blocks in use.
        kv_blocks_total: KV blocks of the rank.
        rank: rank of the worker.
        at_us: the worker's wall clock in microseconds.
    """

    worker_id: SystemName
    worker_epoch: Count
    running: Count
    waiting: Count
    kv_blocks_used: Count
    kv_blocks_total: Count
    rank: Count = 0
    at_us: int = 0


MetricEvent = LoadReported
