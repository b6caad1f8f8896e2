"""Topic `work.<pool>`: effects of decisions; the partition is the worker's slot. Holds prompts.

All groups of a namespace share the topic of a pool. Every event names the group and the worker that it is addressed
to, besides the epoch: epochs are offsets of one group's `fleet`, so equal epochs of two groups mean nothing. An event
without these names, from before they existed, is addressed to no worker.
"""

from forebay.events.base import U32_BYTES, U64_BYTES, Count, Event, Name, require_packed
from forebay.events.control import Command
from forebay.events.decisions import Stage
from forebay.events.media import Encoded, Media, require_bounded
from forebay.events.requests import Sampling, Task
from forebay.events.transfer import Prefilled


class WorkEvent(Event, frozen=True, kw_only=True):
    """Idempotent by (request, stage, attempt). A worker runs only what names its group, its id and its epoch."""

    request_id: Name
    attempt: Count
    owner_epoch: Count
    worker_epoch: Count
    group: str = ""
    worker_id: str = ""


class WorkItem(WorkEvent, tag="work.item", frozen=True, kw_only=True):
    """Generate for this prompt and answer on `reply_slot`; in the stage `encode`, encode its media alone.

    With `encoded` the media come without content: their embeddings are to be fetched. In the stage `prefill` the KV of
    the prompt is computed and kept for another worker; in the stage `decode` it is fetched from where `prefilled` says.
    """

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
    task: Task = "generate"
    stage: Stage = "aggregated"
    media: tuple[Media, ...] = ()
    encoded: Encoded | None = None
    prefilled: Prefilled | None = None

    def __post_init__(self) -> None:
        require_packed("token_ids", self.token_ids, U32_BYTES)
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)
        require_bounded(self.media)


class WorkCancelled(WorkEvent, tag="work.cancelled", frozen=True, kw_only=True):
    """Stop generating and free the blocks, also those kept for another worker; nobody waits for an answer."""


class ReleaseKv(WorkEvent, tag="work.release_kv", frozen=True, kw_only=True):
    """Nobody will fetch what is kept of this attempt to compute the prompt, or of an earlier one: give it back.

    A later attempt at the same worker goes on: this may come after it began, said again by a new owner.
    """


class ReannounceCache(Event, tag="work.reannounce_cache", frozen=True, kw_only=True):
    """Say anew all that a rank has cached: the owner missed some of its KV events.

    The worker answers with `CacheCleared` and then `BlocksStored`, with the sequence numbers that are next, and above
    `above_seq`: the owner met that one, whoever wrote it, and takes lower ones for redeliveries.
    """

    owner_epoch: Count
    worker_epoch: Count
    rank: Count
    above_seq: Count = 0
    group: str = ""
    worker_id: str = ""


class WorkerCommand(Event, tag="work.command", frozen=True, kw_only=True):
    """Do this and answer on `progress`; idempotent by command id and nonce, which is that of its `WorkerCommanded`.

    Nobody waits for the answer any longer than `timeout_us`: what was not begun by then is not done.
    """

    command_id: Name
    command: Command
    owner_epoch: Count
    worker_epoch: Count
    timeout_us: Count
    nonce: Count = 0
    group: str = ""
    worker_id: str = ""


AnyWorkEvent = WorkItem | WorkCancelled | ReleaseKv | ReannounceCache | WorkerCommand
