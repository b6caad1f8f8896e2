"""Topic `work.<pool>`: effects that the owner sends to the workers of a pool. The events contain prompts.

Each worker of the pool reads one partition, its slot. All groups of a namespace share the topic of a pool, and epochs
are offsets of one group's `fleet`, so workers of two groups may have equal epochs. Every event therefore names the
group and the worker that it is addressed to. An event without these names is from an older version, and every worker
ignores it.
"""

from forebay.events.base import U32_BYTES, U64_BYTES, Count, Event, Name, require_packed
from forebay.events.control import Command
from forebay.events.decisions import Stage
from forebay.events.media import Encoded, Media, require_bounded
from forebay.events.numbers import PinSeconds
from forebay.events.requests import Sampling, Task
from forebay.events.trace_ids import trace_id_of
from forebay.events.transfer import Prefilled


class WorkEvent(Event, frozen=True, kw_only=True):
    """Base class of the owner's orders to a worker about one request.

    A worker ignores an event if group, worker id or worker epoch are not its own. A second event with the same request,
    stage and attempt has no effect.
    """

    request_id: Name
    attempt: Count
    owner_epoch: Count
    worker_epoch: Count
    group: str = ""
    worker_id: str = ""


class WorkItem(WorkEvent, tag="work.item", frozen=True, kw_only=True):
    """Order to compute one stage of a request.

    In the stages `aggregated` and `decode` the worker generates the response and writes it to `reply_slot`. In the
    stage `decode` it first fetches the KV of the prompt from the location in `prefilled`. In the stage `prefill` it
    computes that KV and keeps it for another worker. In the stage `encode` it only encodes the images and videos.

    Attributes:
        attempt: attempt at the stage.
        owner_epoch: epoch of the owner that sent the item.
        worker_epoch: epoch of the addressed worker.
        group: group of the request.
        worker_id: addressed worker.
        rank: rank that runs the item.
        token_ids: prompt tokens, followed by `output_tokens` output tokens, as packed u32.
        sequence_hashes: hashes of the full prompt blocks, as packed u64.
        reply_from: first offset of the reply slot that may have output of an earlier attempt, as in `RequestSubmitted`.
        cache_namespace: requests share cached blocks only if they have the same value.
        priority: for engines that order their own queue; a higher value goes first.
        report_output: whether the worker sends `OutputGrown`.
        media: images and videos of the prompt; without content if `encoded` is set.
        encoded: location of the embeddings to fetch; null if there are none.
        prefilled: location of the KV to fetch; null if there is none.
        output_tokens: number of tokens at the end of `token_ids` that earlier attempts generated. The owner leaves it
            0. A worker that continues a response sets it before it passes the item to its engine.
        store_blocks: number of leading prompt blocks of which the owner expects each in a tier of the rank or in the
            shared store of the worker; 0 if it expects none in the shared store. It is a hint where to look.
        kv_pin_s: seconds for which the worker keeps the KV of the prompt in its host memory and on its disk.
        reply_key: key of the request, which every event in the reply slot must have.
        traceparent: trace context whose span is the attempt, for the engine.
        endpoint: endpoint that a call is for, as in `RoutingHints`.
        payload: argument of a call, as JSON.
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
    output_tokens: Count = 0
    store_blocks: Count = 0
    kv_pin_s: PinSeconds = 0
    reply_key: Count = 0
    traceparent: str = ""
    endpoint: str = ""
    payload: str = ""

    @property
    def log_extra(self) -> dict[str, dict[str, str]]:
        """Argument `extra` of log records about the item."""
        return {"fields": {"trace_id": trace_id_of(self.request_id, self.reply_key, self.traceparent)}}

    def __post_init__(self) -> None:
        require_packed("token_ids", self.token_ids, U32_BYTES)
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)
        require_bounded(self.media)
        if self.output_tokens * U32_BYTES > len(self.token_ids):
            tokens = len(self.token_ids) // U32_BYTES
            raise ValueError(f"output_tokens is {self.output_tokens}, but token_ids has only {tokens} tokens")


class WorkCancelled(WorkEvent, tag="work.cancelled", frozen=True, kw_only=True):
    """Order to stop a request and free its KV blocks, because no client waits any more.

    This includes blocks that the worker keeps for another worker.
    """


class ReleaseKv(WorkEvent, tag="work.release_kv", frozen=True, kw_only=True):
    """Order to free the KV of a prompt that the worker has computed in this attempt or an earlier attempt.

    A later attempt at the same prompt on this worker continues. A new owner may send this event again, even after the
    later attempt has started.
    """


class ReannounceCache(Event, tag="work.reannounce_cache", frozen=True, kw_only=True):
    """Order to publish all blocks that a rank has cached, because the owner missed some of its KV events.

    The worker sends `CacheCleared` and then `BlocksStored`. It continues its sequence numbers, but only uses numbers
    above `above_seq`, because the owner treats all numbers up to `above_seq` as redeliveries.

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
    """Order to execute an operator's command and respond on `progress`.

    A second event with the same command id and nonce has no effect.

    Attributes:
        command: what the worker is to do.
        timeout_us: microseconds after which the worker no longer starts the command, because no client waits any more.
        nonce: nonce of the `WorkerCommanded`; it distinguishes commands with the same id.
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
