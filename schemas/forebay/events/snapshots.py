"""Topic `snapshots`: a world's state in chunks of at most 1 MiB, each a list of plain facts.

Valid only once the journal holds the matching `SnapshotTaken`.
"""

from forebay.events.base import U64, U64_BYTES, Count, Event, Name, Part, require_packed
from forebay.events.control import PoolConfigured
from forebay.events.decisions import Run
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import Tier

CHUNK_HASHES_MAX = 131_072 - 64  # packed hashes of one chunk stay below 1 MiB with their envelope


class IndexBlocks(Part, tag_field="type", tag="index_blocks", frozen=True, kw_only=True):
    """Blocks that one (worker, rank) holds in one tier."""

    worker_id: Name
    rank: Count
    tier: Tier
    sequence_hashes: bytes

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class IndexCursor(Part, tag_field="type", tag="index_cursor", frozen=True, kw_only=True):
    """The last KV event applied for one (worker, rank)."""

    worker_id: Name
    rank: Count
    last_seq: int
    worker_epoch: Count


class WorkerState(Part, tag_field="type", tag="worker_state", frozen=True, kw_only=True):
    """One member of the fleet."""

    spec: WorkerSpec
    lease: str
    slot: Count
    worker_epoch: Count
    from_offset: Count
    phase: str


class RequestState(Part, tag_field="type", tag="request_state", frozen=True, kw_only=True):
    """One request under way; `offset` is that of its `RequestSubmitted`, which holds the prompt."""

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

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class Remembered(Part, tag_field="type", tag="remembered", frozen=True, kw_only=True):
    """Requests that ended, so that a repeated id is found.

    Packed u64: hashes of id and content, and when each is forgotten.
    """

    ids: bytes
    contents: bytes
    due_us: bytes

    def __post_init__(self) -> None:
        require_packed("ids", self.ids, U64_BYTES)
        require_packed("contents", self.contents, U64_BYTES)
        require_packed("due_us", self.due_us, U64_BYTES)


class Booking(Part, tag_field="type", tag="booking", frozen=True, kw_only=True):
    """The load that one routed request puts on one (worker, rank)."""

    request_id: Name
    worker_id: Name
    rank: Count
    prefill_tokens: Count
    sequence_hashes: bytes

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


class PoolTurns(Part, frozen=True, kw_only=True):
    """How many requests a pool has routed: whose turn it is by round robin."""

    pool: Name
    turns: Count


class WorldState(Part, tag_field="type", tag="world_state", frozen=True, kw_only=True):
    """What the world holds beside its machines. `view` has one run per topic: count is the next offset."""

    now_us: int
    view: tuple[Run, ...]
    pools: tuple[PoolConfigured, ...]
    turns: tuple[PoolTurns, ...]
    owner_epoch: int
    fleet_epoch: int  # the newest owner epoch announced on `fleet`, as applied
    seq: Count


Chunk = IndexBlocks | IndexCursor | WorkerState | RequestState | Remembered | Booking | Reported | WorldState


class SnapshotChunk(Event, tag="snapshot.chunk", frozen=True, kw_only=True):
    """Part `number` of a snapshot, counted from 0."""

    owner_epoch: int
    number: Count
    parts: tuple[Chunk, ...]


SnapshotEvent = SnapshotChunk
