"""Topic `work.<pool>`: effects of decisions; the partition is the worker's slot. Holds prompts."""

from forebay.events.base import U32_BYTES, U64_BYTES, Count, Event, Name, require_packed
from forebay.events.requests import Sampling


class WorkEvent(Event, frozen=True, kw_only=True):
    """Idempotent by (request, stage, attempt); a worker obeys only its own `worker_epoch`."""

    request_id: Name
    attempt: Count
    owner_epoch: Count
    worker_epoch: Count


class WorkItem(WorkEvent, tag="work.item", frozen=True, kw_only=True):
    """Generate for this prompt and answer on `reply_slot`."""

    rank: Count
    token_ids: bytes
    sequence_hashes: bytes
    reply_slot: Count
    sampling: Sampling
    reply_from: Count = 0  # as in `RequestSubmitted`: where a later attempt looks for what was said
    lora_name: str = ""
    cache_namespace: str = ""
    priority: int = 0  # higher is sooner, for engines that order their own queue
    report_output: bool = False

    def __post_init__(self) -> None:
        require_packed("token_ids", self.token_ids, U32_BYTES)
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class WorkCancelled(WorkEvent, tag="work.cancelled", frozen=True, kw_only=True):
    """Stop generating and free the blocks; nobody waits for an answer."""


class ReannounceCache(Event, tag="work.reannounce_cache", frozen=True, kw_only=True):
    """Say anew all that a rank has cached: the owner missed some of its KV events.

    The worker answers with `CacheCleared` and then `BlocksStored`, with the sequence numbers that are next, and above
    `above_seq`: the owner met that one, whoever wrote it, and takes lower ones for redeliveries.
    """

    owner_epoch: Count
    worker_epoch: Count
    rank: Count
    above_seq: Count = 0


AnyWorkEvent = WorkItem | WorkCancelled | ReannounceCache
