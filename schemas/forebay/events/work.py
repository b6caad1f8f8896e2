"""Topic `work.<pool>`: effects of decisions; the partition is the worker's slot. Contains prompts.

All groups of a namespace share the topic of a pool. Every event names the group and the worker it is addressed to, in
addition to the epoch. Epochs are offsets of one group's `fleet`, so equal epochs of two groups are unrelated. An event
without these names is from an older version and is addressed to no worker.
"""

from forebay.events.base import U32_BYTES, U64_BYTES, Count, Event, Name, require_packed
from forebay.events.control import Command
from forebay.events.decisions import Stage
from forebay.events.media import Encoded, Media, require_bounded
from forebay.events.requests import Sampling, Task
from forebay.events.transfer import Prefilled


class WorkEvent(Event, frozen=True, kw_only=True):
    """Work event, idempotent by (request, stage, attempt). A worker runs only events with its group, id and epoch."""

    request_id: Name
    attempt: Count
    owner_epoch: Count
    worker_epoch: Count
    group: str = ""
    worker_id: str = ""


class WorkItem(WorkEvent, tag="work.item", frozen=True, kw_only=True):
    """Generate a response and write it to `reply_slot`. In the stage `encode`, only encode the media.

    In the stage `prefill`, compute the KV of the prompt and keep it for another worker. In the stage `decode`, fetch
    that KV from the location in `prefilled`.

    Attributes:
        request_id: id of the request.
        attempt: attempt at the stage.
        owner_epoch: epoch of the owner that sent the item.
        worker_epoch: epoch of the addressed worker.
        group: group of the request.
        worker_id: addressed worker.
        rank: rank that runs the item.
        token_ids: prompt tokens, as packed u32.
        sequence_hashes: hashes of the full prompt blocks, as packed u64.
        reply_slot: partition of the topic `tokens` for the response.
        sampling: sampling parameters.
        reply_from: first offset of the reply slot that may hold output of an earlier attempt, as in `RequestSubmitted`.
        lora_name: adapter.
        cache_namespace: namespace of cached blocks.
        priority: higher goes first, for engines that order their own queue.
        report_output: whether to send `OutputGrown`.
        task: whether to generate a response or an embedding.
        stage: stage to compute.
        media: images and videos of the prompt; without content if `encoded` is set.
        encoded: location of the embeddings to fetch.
        prefilled: location of the KV to fetch.
    """

    rank: Count
    token_ids: bytes
    sequence_hashes: bytes
    reply_slot: Count
    sampling: Sampling
    reply_from: Count = 0
    lora_name: str = ""
    cache_namespace: str = ""
    priority: int = 0
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
    """Stop generating and free the blocks, including those kept for another worker; no client waits any more."""


class ReleaseKv(WorkEvent, tag="work.release_kv", frozen=True, kw_only=True):
    """Release the KV that is kept since this attempt to compute the prompt, or an earlier one.

    A later attempt at the same worker continues. A new owner may send this event again after that attempt started.
    """


class ReannounceCache(Event, tag="work.reannounce_cache", frozen=True, kw_only=True):
    """Re-announce everything that a rank has cached, because the owner missed some of its KV events.

    The worker sends `CacheCleared` and then `BlocksStored`. It uses its next sequence numbers, and only those above
    `above_seq`: the owner has seen that one, and treats lower numbers as redeliveries.

    Attributes:
        above_seq: highest sequence number that the owner has seen.
    """

    owner_epoch: Count
    worker_epoch: Count
    rank: Count
    above_seq: Count = 0
    group: str = ""
    worker_id: str = ""


class WorkerCommand(Event, tag="work.command", frozen=True, kw_only=True):
    """Execute a command and respond on `progress`; idempotent by command id and nonce.

    A command that was not started after `timeout_us` is not executed, because no client waits any more. The nonce is
    that of its `WorkerCommanded`.

    Attributes:
        command: what the worker is to do.
        timeout_us: time after which the command is not started, in microseconds.
        nonce: distinguishes commands with the same id.
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
