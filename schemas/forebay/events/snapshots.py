"""Topic `snapshots`: a world's state in chunks of at most 1 MiB, each a list of plain facts.

Valid only once the journal holds the matching `SnapshotTaken`.
"""

from forebay.events.base import U64_BYTES, Count, Event, Name, Part, require_packed
from forebay.events.control import PoolConfigured
from forebay.events.decisions import Run
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import Tier

CHUNK_HASHES_MAX = 131_072 - 64  # packed hashes of one chunk stay below 1 MiB with their envelope


class IndexBlocks(Part, tag_field="type", tag="index_blocks", kw_only=True):
    """Blocks that one (worker, rank) holds in one tier."""

    worker_id: Name
    rank: Count
    tier: Tier
    sequence_hashes: bytes

    def __post_init__(self) -> None:
        require_packed("sequence_hashes", self.sequence_hashes, U64_BYTES)


class IndexCursor(Part, tag_field="type", tag="index_cursor", kw_only=True):
    """The last KV event applied for one (worker, rank)."""

    worker_id: Name
    rank: Count
    last_seq: int


class WorkerState(Part, tag_field="type", tag="worker_state", kw_only=True):
    """One member of the fleet."""

    spec: WorkerSpec
    lease: str
    slot: Count
    worker_epoch: Count
    from_offset: Count
    phase: str


class RequestState(Part, tag_field="type", tag="request_state", kw_only=True):
    """One request that is under way or remembered; `offset` is that of its `RequestSubmitted`."""

    request_id: Name
    phase: str
    content: Count
    deadline_us: int
    forget_us: int
    offset: Count = 0
    attempt: Count = 0
    reply_slot: Count = 0
    prompt_tokens: Count = 0
    max_tokens: Count = 0
    tie_seed: Count = 0
    pool: str = ""
    worker_id: str = ""
    worker_epoch: Count = 0
    rank: Count = 0
    sequence_hashes: bytes = b""


class Booking(Part, tag_field="type", tag="booking", kw_only=True):
    """The load that one routed request puts on one (worker, rank)."""

    request_id: Name
    worker_id: Name
    rank: Count
    prefill_tokens: Count
    sequence_hashes: bytes


class Reported(Part, tag_field="type", tag="reported", kw_only=True):
    """The newest load report of one (worker, rank)."""

    worker_id: Name
    rank: Count
    running: Count
    waiting: Count
    kv_blocks_used: Count
    kv_blocks_total: Count


class WorldState(Part, tag_field="type", tag="world_state", kw_only=True):
    """What the world holds beside its machines. `view` has one run per topic: count is the next offset."""

    now_us: int
    view: tuple[Run, ...]
    pools: tuple[PoolConfigured, ...]
    turns: Count  # decisions made by round robin
    counters: dict[str, int]
    owner_epoch: int = -1
    seq: Count = 0


Chunk = IndexBlocks | IndexCursor | WorkerState | RequestState | Booking | Reported | WorldState


class SnapshotChunk(Event, tag="snapshot.chunk", kw_only=True):
    """Part `number` of a snapshot, counted from 0."""

    owner_epoch: int
    number: Count
    parts: tuple[Chunk, ...]


SnapshotEvent = SnapshotChunk
