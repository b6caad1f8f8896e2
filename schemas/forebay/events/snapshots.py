"""Topic `snapshots`: the state of a world in chunks of at most 1 MiB, each a list of plain facts.

A snapshot is valid only once the journal has the matching `SnapshotTaken`.
"""

from forebay.events.base import U64, U64_BYTES, Count, Event, Name, Part, require_packed
from forebay.events.control import BusyThresholds, Command, DisaggConfig, PoolConfigured
from forebay.events.decisions import CommandOutcome, ConsumedRun, Stage
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import AnyKvEvent, Tier
from forebay.events.media import Encoded
from forebay.events.requests import RoutingHints, Task
from forebay.events.transfer import Prefilled

CHUNK_HASHES_MAX = 131_072 - 64  # keeps the packed hashes of a chunk and their envelope below 1 MiB


class IndexBlocks(Part, tag_field="type", tag="index_blocks", frozen=True, kw_only=True):
    """Blocks that one (worker, rank) has in one tier. Blocks of another worker epoch are ignored."""

    worker_id: Name
    rank: Count
    tier: Tier
    sequence_hashes: bytes
    worker_epoch: Count = 0

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class IndexChanges(Part, tag_field="type", tag="index_changes", frozen=True, kw_only=True):
    """KV events applied while the blocks were written; applying them again in order makes the blocks exact.

    Attributes:
        events: the KV events, in order.
    """

    events: tuple[AnyKvEvent, ...]


class IndexCursor(Part, tag_field="type", tag="index_cursor", frozen=True, kw_only=True):
    """Last KV event applied for one (worker, rank). `resync`: its worker was asked to re-announce its cache.

    Attributes:
        last_seq: sequence number of that event.
        resync: whether the worker was asked to re-announce its cache.
    """

    worker_id: Name
    rank: Count
    last_seq: int
    worker_epoch: Count
    resync: bool = False


class RoutedBlocks(Part, tag_field="type", tag="routed_blocks", frozen=True, kw_only=True):
    """Blocks assumed to be cached until `due_us`, because a prompt with them was routed to this (worker, rank).

    Attributes:
        worker_id: id of the worker.
        rank: rank of the worker.
        due_us: when the assumption ends, in microseconds.
        predicted: whether KV events will confirm the blocks; otherwise the rank sends none.
        sequence_hashes: hashes of the blocks, as packed u64.
    """

    worker_id: Name
    rank: Count
    due_us: int
    predicted: bool
    sequence_hashes: bytes

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class WorkerState(Part, tag_field="type", tag="worker_state", frozen=True, kw_only=True):
    """One worker of the fleet.

    Attributes:
        spec: description of the worker.
        lease: token of its lease.
        from_offset: first offset of its work topic slot that may be work for it.
        phase: state of its life cycle.
        lease_ttl_ms: time to live of the lease in milliseconds; 0 if unknown.
    """

    spec: WorkerSpec
    lease: str
    slot: Count
    worker_epoch: Count
    from_offset: Count
    phase: str
    lease_ttl_ms: Count = 0


class IngressState(Part, tag_field="type", tag="ingress_state", frozen=True, kw_only=True):
    """One ingress with a lease.

    Attributes:
        lease_ttl_ms: time to live of the lease in milliseconds; 0 if unknown.
    """

    ingress_id: Name
    incarnation: Name
    lease_ttl_ms: Count = 0


class RequestState(Part, tag_field="type", tag="request_state", frozen=True, kw_only=True):
    """One active request; its prompt is in its `RequestSubmitted`.

    Attributes:
        request_id: id of the request.
        phase: phase of the request (`forebay.core.phases`).
        content: hash of the content.
        due_us: deadline in microseconds.
        offset: offset of its `RequestSubmitted`.
        attempt: last attempt at the response.
        worker_id: worker of the last routing.
        worker_epoch: epoch of that worker.
        rank: rank of that worker.
        queue_class: class in which it is or was queued.
        uncached_tokens: prompt tokens that the best rank had not cached when it was queued.
        queued_at_us: when it was queued.
        media_tokens: placeholder tokens of its media.
        stage: stage of the last routing.
        encodings: last attempt to encode its media.
        encoder_id: worker of that attempt.
        encoded: location of the embeddings.
        prefills: last attempt to compute its prompt in a prefill pool.
        prefiller_id: worker of that attempt.
        prefilled: location of its KV.
        prefilled_due_us: when the lease of that KV expires.
        begun: whether output tokens exist.
        decoder_id: worker that was last sent to fetch the KV.
        ingress: incarnation of the ingress whose HTTP client waits.
        queue_due_us: when it times out in the queue; 0 if only its deadline applies.
        tie_seed: seed for tie-breaking and sampling.
        lora_name: adapter; empty for none.
        routing: routing hints of the client.
        task: what the request asks for: a response or an embedding.
    """

    request_id: Name
    phase: str
    content: U64
    due_us: int
    offset: Count
    reply_slot: Count
    prompt_tokens: Count
    tie_seed: U64
    pool: Name
    attempt: Count
    worker_id: str
    worker_epoch: Count
    rank: Count
    sequence_hashes: bytes
    lora_name: str = ""
    routing: RoutingHints = RoutingHints()
    queue_class: str = ""
    uncached_tokens: Count = 0
    queued_at_us: int = 0
    task: Task = "generate"
    media_tokens: Count = 0
    stage: Stage = "aggregated"
    encodings: Count = 0
    encoder_id: str = ""
    encoded: Encoded | None = None
    prefills: Count = 0
    prefiller_id: str = ""
    prefilled: Prefilled | None = None
    prefilled_due_us: int = 0
    begun: bool = False
    decoder_id: str = ""
    ingress: str = ""
    queue_due_us: int = 0

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class Remembered(Part, tag_field="type", tag="remembered", frozen=True, kw_only=True):
    """Recently ended requests, or `commands`, to recognize a repeated id.

    Attributes:
        ids: hashes of the ids, as packed u64.
        contents: hashes of the contents, or nonces of commands, as packed u64.
        due_us: when each id is forgotten, as packed u64 in microseconds.
        commands: whether these are commands.
    """

    ids: bytes
    contents: bytes
    due_us: bytes
    commands: bool = False

    def __post_init__(self) -> None:
        require_packed("ids", self.ids, U64_BYTES)
        require_packed("contents", self.contents, U64_BYTES)
        require_packed("due_us", self.due_us, U64_BYTES)


class Booking(Part, tag_field="type", tag="booking", frozen=True, kw_only=True):
    """Load that one routed request puts on one (worker, rank).

    Attributes:
        request_id: id of the request.
        worker_id: id of the worker.
        rank: rank of the worker.
        prefill_tokens: uncached prompt tokens.
        sequence_hashes: hashes of the prompt blocks, as packed u64.
        prompt_tokens: length of the prompt.
        reuse: whether its blocks are shared with other requests of the rank.
        output_tokens: output tokens so far.
        expected_output_tokens: expected length of the response; 0 if unknown.
    """

    request_id: Name
    worker_id: Name
    rank: Count
    prefill_tokens: Count
    sequence_hashes: bytes
    prompt_tokens: Count = 0
    reuse: bool = True
    output_tokens: Count = 0
    expected_output_tokens: Count = 0

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class Reported(Part, tag_field="type", tag="reported", frozen=True, kw_only=True):
    """The newest load report of one (worker, rank).

    Attributes:
        running: running requests.
        waiting: requests queued in the engine.
        kv_blocks_used: KV blocks in use.
        kv_blocks_total: KV blocks of the rank.
    """

    worker_id: Name
    rank: Count
    running: Count
    waiting: Count
    kv_blocks_used: Count
    kv_blocks_total: Count


class ComputedTokens(Part, tag_field="type", tag="computed_tokens", frozen=True, kw_only=True):
    """Prompt tokens sent to one (worker, rank) to compute, plus the lowest total of any rank when it joined.

    Attributes:
        tokens: the total, in prompt tokens.
    """

    worker_id: Name
    rank: Count
    tokens: Count


class PoolTurns(Part, frozen=True, kw_only=True):
    """Number of requests a pool has routed, which decides whose turn it is in round robin.

    Attributes:
        turns: number of requests routed so far.
    """

    pool: Name
    turns: Count


class ClassDeficit(Part, frozen=True, kw_only=True):
    """Deficit counter of one queue class, in tokens.

    Attributes:
        name: name of the queue class.
        uncached_tokens_min: lower bound of the class, in uncached prompt tokens.
        deficit: deficit counter, in tokens.
    """

    name: Name
    uncached_tokens_min: Count
    deficit: int


class QueueTurns(Part, tag_field="type", tag="queue_turns", frozen=True, kw_only=True):
    """Deficit round robin state of a pool's queue; queued requests are in `RequestState`.

    Attributes:
        turn: position of the class whose turn it is.
        classes: deficit of each class, in configured order.
    """

    pool: Name
    turn: Count
    classes: tuple[ClassDeficit, ...]


class Sessions(Part, tag_field="type", tag="sessions", frozen=True, kw_only=True):
    """Sessions bound to one (worker, rank), in order of expiry: packed u64 of session keys and expiry times.

    Attributes:
        keys: hashes of pool and session, as packed u64.
    """

    pool: Name
    worker_id: Name
    worker_epoch: Count
    rank: Count
    keys: bytes
    due_us: bytes

    def __post_init__(self) -> None:
        require_packed("keys", self.keys, U64_BYTES)
        require_packed("due_us", self.due_us, U64_BYTES)


class CommandState(Part, tag_field="type", tag="command_state", frozen=True, kw_only=True):
    """Command that is pending at some worker; `offset` is that of its `WorkerCommanded`.

    Attributes:
        nonce: distinguishes commands with the same id.
        offset: offset of the `WorkerCommanded` on `control`.
        command: what the workers are to do.
        outcomes: outcome at each worker so far.
    """

    command_id: Name
    nonce: Count
    offset: Count
    command: Command
    reply_slot: Count
    due_us: int
    outcomes: tuple[CommandOutcome, ...]


class PoolBusy(Part, frozen=True, kw_only=True):
    """Busy thresholds of a pool that an operator changed.

    Attributes:
        thresholds: busy thresholds set at run time.
    """

    pool: Name
    thresholds: BusyThresholds


class PoolDisagg(Part, frozen=True, kw_only=True):
    """Disaggregation of a pool that an operator changed.

    Attributes:
        disagg: disaggregation settings set at run time.
    """

    pool: Name
    disagg: DisaggConfig


class WorldState(Part, tag_field="type", tag="world_state", frozen=True, kw_only=True):
    """State of the world outside its state machines.

    Attributes:
        now_us: the owner's clock in microseconds.
        view: next offset per topic, as `count`.
        pools: configuration of each pool.
        turns: number of routings per pool.
        owner_epoch: epoch of the owner.
        fleet_epoch: newest owner epoch that was announced on `fleet`, as applied.
        seq: sequence number of the next decision.
        busy: busy thresholds that an operator changed.
        disagg: disaggregation that an operator changed.
        owner_policies: custom policies that the owner's operator allowed.
    """

    now_us: int
    view: tuple[ConsumedRun, ...]
    pools: tuple[PoolConfigured, ...]
    turns: tuple[PoolTurns, ...]
    owner_epoch: int
    fleet_epoch: int
    seq: Count
    busy: tuple[PoolBusy, ...] = ()
    disagg: tuple[PoolDisagg, ...] = ()
    owner_policies: tuple[str, ...] = ()


Chunk = (
    IndexBlocks
    | IndexChanges
    | IndexCursor
    | RoutedBlocks
    | WorkerState
    | IngressState
    | RequestState
    | Remembered
    | Booking
    | Reported
    | ComputedTokens
    | QueueTurns
    | Sessions
    | CommandState
    | WorldState
)


class SnapshotChunk(Event, tag="snapshot.chunk", frozen=True, kw_only=True):
    """Part `number` of a snapshot, counted from 0.

    Attributes:
        number: number of the chunk, counted from 0.
        parts: facts of the state.
    """

    owner_epoch: int
    number: Count
    parts: tuple[Chunk, ...]


SnapshotEvent = SnapshotChunk
