"""Topic `snapshots`: a world's state in chunks of at most 1 MiB, each a list of plain facts.

Valid only once the journal holds the matching `SnapshotTaken`.
"""

from forebay.events.base import U64, U64_BYTES, Count, Event, Name, Part, require_packed
from forebay.events.control import BusyThresholds, Command, DisaggConfig, PoolConfigured
from forebay.events.decisions import CommandOutcome, ConsumedRun, Stage
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import AnyKvEvent, Tier
from forebay.events.media import Encoded
from forebay.events.requests import RoutingHints, Task
from forebay.events.transfer import Prefilled

CHUNK_HASHES_MAX = 131_072 - 64  # packed hashes of one chunk stay below 1 MiB with their envelope


class IndexBlocks(Part, tag_field="type", tag="index_blocks", frozen=True, kw_only=True):
    """Blocks that one (worker, rank) holds in one tier. What it is said to hold in another epoch does not count."""

    worker_id: Name
    rank: Count
    tier: Tier
    sequence_hashes: bytes
    worker_epoch: Count = 0

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class IndexChanges(Part, tag_field="type", tag="index_changes", frozen=True, kw_only=True):
    """KV events that were applied while the blocks were written: applied again, in order, they make them exact."""

    events: tuple[AnyKvEvent, ...]


class IndexCursor(Part, tag_field="type", tag="index_cursor", frozen=True, kw_only=True):
    """The last KV event applied for one (worker, rank). `resync`: its worker was asked to say all anew."""

    worker_id: Name
    rank: Count
    last_seq: int
    worker_epoch: Count
    resync: bool = False


class RoutedBlocks(Part, tag_field="type", tag="routed_blocks", frozen=True, kw_only=True):
    """Blocks taken for cached until `due_us`, because a prompt with them was routed to this (worker, rank).

    `predicted`: until its KV events say so; else it has none.
    """

    worker_id: Name
    rank: Count
    due_us: int
    predicted: bool
    sequence_hashes: bytes

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class WorkerState(Part, tag_field="type", tag="worker_state", frozen=True, kw_only=True):
    """One member of the fleet."""

    spec: WorkerSpec
    lease: str
    slot: Count
    worker_epoch: Count
    from_offset: Count
    phase: str
    lease_ttl_ms: Count = 0


class IngressState(Part, tag_field="type", tag="ingress_state", frozen=True, kw_only=True):
    """One ingress that has a lease."""

    ingress_id: Name
    incarnation: Name
    lease_ttl_ms: Count = 0


class RequestState(Part, tag_field="type", tag="request_state", frozen=True, kw_only=True):
    """One request under way; `offset` is that of its `RequestSubmitted`, which holds the prompt.

    Of its media it has how many tokens they are, how often and by whom they were last encoded, and where they lie. Of
    its prompt, how often it was sent to be prefilled, where its KV lies and until when, who was to fetch
    it last, and whether the answer `begun`. Of its time in the queue, since when and until when it may wait there.
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
    """Requests that ended, or `commands`, so that a repeated id is found.

    Packed u64: hashes of id and content (of a command its nonce), and when each is forgotten.
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
    """The load that one routed request puts on one (worker, rank).

    Its blocks are shared with others of the rank if `reuse`. Output is counted in tokens.
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
    """The newest load report of one (worker, rank)."""

    worker_id: Name
    rank: Count
    running: Count
    waiting: Count
    kv_blocks_used: Count
    kv_blocks_total: Count


class ComputedTokens(Part, tag_field="type", tag="computed_tokens", frozen=True, kw_only=True):
    """Prompt tokens that one (worker, rank) was sent to compute since it joined, and a start among the others."""

    worker_id: Name
    rank: Count
    tokens: Count


class PoolTurns(Part, frozen=True, kw_only=True):
    """How many requests a pool has routed: whose turn it is by round robin."""

    pool: Name
    turns: Count


class ClassDeficit(Part, frozen=True, kw_only=True):
    """How far a queue class is behind its share, in tokens."""

    name: Name
    uncached_tokens_min: Count
    deficit: int


class QueueTurns(Part, tag_field="type", tag="queue_turns", frozen=True, kw_only=True):
    """Whose turn it is in a pool's queue; who waits in it stands in `RequestState`."""

    pool: Name
    turn: Count
    classes: tuple[ClassDeficit, ...]


class Sessions(Part, tag_field="type", tag="sessions", frozen=True, kw_only=True):
    """Sessions bound to one (worker, rank), the least lately used first: packed u64 of session keys and ends."""

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
    """A command to which not every worker has answered; `offset` is that of its `WorkerCommanded`."""

    command_id: Name
    nonce: Count
    offset: Count
    command: Command
    reply_slot: Count
    due_us: int
    outcomes: tuple[CommandOutcome, ...]


class PoolBusy(Part, frozen=True, kw_only=True):
    """Thresholds of a pool that were changed while it ran."""

    pool: Name
    thresholds: BusyThresholds


class PoolDisagg(Part, frozen=True, kw_only=True):
    """Which prompts of a pool's requests are computed remotely, as an operator set it."""

    pool: Name
    disagg: DisaggConfig


class WorldState(Part, tag_field="type", tag="world_state", frozen=True, kw_only=True):
    """What the world holds beside its machines. `view` has one run per topic: count is the next offset."""

    now_us: int
    view: tuple[ConsumedRun, ...]
    pools: tuple[PoolConfigured, ...]
    turns: tuple[PoolTurns, ...]
    owner_epoch: int
    fleet_epoch: int  # the newest owner epoch announced on `fleet`, as applied
    seq: Count
    busy: tuple[PoolBusy, ...] = ()
    disagg: tuple[PoolDisagg, ...] = ()


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
    """Part `number` of a snapshot, counted from 0."""

    owner_epoch: int
    number: Count
    parts: tuple[Chunk, ...]


SnapshotEvent = SnapshotChunk
