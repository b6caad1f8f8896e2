"""Topic `metrics`: what engines report of their own load. The newest of a (worker, rank) wins."""

from forebay.events.base import Count, Event, Name


class LoadReported(Event, tag="load.reported", frozen=True, kw_only=True):
    """A rank's queue and cache, at most ten times a second."""

    worker_id: Name
    worker_epoch: Count
    running: Count
    waiting: Count
    kv_blocks_used: Count
    kv_blocks_total: Count
    rank: Count = 0
    at_us: int = 0


MetricEvent = LoadReported
