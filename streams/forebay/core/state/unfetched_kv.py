"""KV that a request leaves behind at a prefill worker without being fetched."""

from dataclasses import dataclass

from forebay.events.decisions import KvReleaseReason


@dataclass(frozen=True, slots=True)
class UnfetchedKv:
    """KV that no worker will fetch, kept by one epoch of a worker since an attempt to compute the prompt."""

    request_id: str
    attempt: int
    worker_id: str
    worker_epoch: int
    reason: KvReleaseReason
