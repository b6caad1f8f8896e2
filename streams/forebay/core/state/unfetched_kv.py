"""KV of a prompt that a prefill worker keeps, although no worker will fetch it."""

from dataclasses import dataclass

from forebay.events.decisions import KvReleaseReason


@dataclass(frozen=True, slots=True)
class UnfetchedKv:
    """KV that a prefill worker must free, because no worker will fetch it.

    Attributes:
        attempt: attempt in which the worker computed the prompt.
        reason: why no worker will fetch the KV.
    """

    request_id: str
    attempt: int
    worker_id: str
    worker_epoch: int
    reason: KvReleaseReason
