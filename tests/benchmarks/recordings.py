"""Create seeded recordings of a busy group by driving the core as an owner does, without waiting.

Conversations share system prompts and grow by one turn at a time. Workers cache computed blocks, evict the least
recently used, and emit KV events. Caches and client state are bounded, so a longer recording has no larger state.
"""

import asyncio
import random
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.block_hashes import block_hashes, extend_chain
from forebay.core.state.index_scan import IndexScan
from forebay.core.step import CONSUMED_RUNS_MAX, InputEvent, advance, claim, open_run, step
from forebay.core.world import CORE_VERSION, World
from forebay.events.base import U32_BYTES, Event, pack_u64
from forebay.events.codec import encode
from forebay.events.control import PoolConfigured
from forebay.events.decisions import Advanced, JournalRecord, OwnerClaimed, RequestRouted, SnapshotTaken
from forebay.events.fleet import OwnershipAnnounced, WorkerJoined, WorkerSpec
from forebay.events.kv import BlocksRemoved, BlocksStored
from forebay.events.metrics import LoadReported
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.requests import RequestSubmitted, Sampling
from forebay.events.snapshots import Chunk, SnapshotChunk
from forebay.events.topics import CONTROL, DECISIONS, FLEET, KV_EVENTS, METRICS, PROGRESS, REQUESTS, SNAPSHOTS, Topic
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog

MODEL, POOL = "bench", "default"
BLOCK_SIZE = 64
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 32, 8
TURN_BLOCKS, TURNS_MAX = 4, 8
TALKS = 20  # conversations per worker
IN_FLIGHT = 6  # requests in flight per worker
RATE = 20  # requests per second and worker, by the recorded clock
TURN_REQUESTS_MAX = 4  # requests that a loaded owner reads in one turn
DIGEST_EVERY = 1_000  # decisions per digest, as in an owner
WALK_BLOCKS = 4_096  # snapshot blocks per turn
CHUNK_BYTES = 128 << 10
TIMEOUT_US = 600_000_000
FLUSH_RECORDS = 5_000
LIVE_FLUSH_S = 0.05
SEED = 20_261_122


@dataclass(frozen=True, slots=True)
class Shape:
    """The contents of a recording.

    Attributes:
        cached_blocks: capacity of a worker's cache.
        stored_more: additional KV events per decision, each of `TURN_BLOCKS` * `TURNS_MAX` new blocks.
        tokens: whether prompts have tokens, as in a live recording but not in an anonymised one.
        snapshot_every: journal records per snapshot.
    """

    workers: int
    decisions: int
    cached_blocks: int = 4_096
    stored_more: int = 0
    tokens: bool = True
    snapshot_every: int = 5_000


@dataclass(frozen=True, slots=True)
class WrittenCounts:
    """Counts of a recording; `blocks` counts the stored and removed blocks of its KV events."""

    decisions: int
    events: int
    blocks: int


async def write_recording(path: Path, shape: Shape, rate: float | None = None) -> WrittenCounts:
    """Write a recording to `path`, which must not exist.

    Args:
        path: path of the log.
        rate: highest number of decisions per second, as of a live system; None for no limit.
    """
    log = SqliteLog.open(path)
    try:
        group = _Group(log, shape)
        began_s = flushed_s = time.monotonic()
        while group.decisions < shape.decisions:
            await group.turn()
            now_s = time.monotonic()
            if rate is not None and now_s - flushed_s >= LIVE_FLUSH_S:
                flushed_s = now_s
                await group.flush()
                await asyncio.sleep(max(0.0, group.decisions / rate - (now_s - began_s)))
        await group.end()
    finally:
        log.close()
    return WrittenCounts(group.decisions, group.events, group.blocks)


class _Conversation:
    """A conversation: the prompt of each turn contains all earlier turns."""

    def __init__(self, system: tuple[bytes, list[int]], chance: random.Random) -> None:
        self._chance = chance
        self.tokens, chain = system
        self.chain = list(chain)
        self.turns = 0

    def grow(self) -> None:
        more = self._chance.randbytes(TURN_BLOCKS * BLOCK_SIZE * U32_BYTES)
        self.tokens += more
        self.chain += extend_chain(self.chain[-1], block_hashes(more, BLOCK_SIZE))
        self.turns += 1


class _Cache:
    """The cache of one worker, least recently used first, which emits KV events."""

    def __init__(self, name: str, epoch: int, blocks_max: int) -> None:
        self._where: dict[str, Any] = {"worker_id": name, "worker_epoch": epoch}
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._blocks_max = blocks_max
        self._seq = 0

    def use(self, chain: Sequence[int]) -> list[BlocksStored | BlocksRemoved]:
        held = self._blocks
        known = next((at for at, block in enumerate(chain) if block not in held), len(chain))
        for block in reversed(chain):  # a prefix is evicted last
            held[block] = None
            held.move_to_end(block)
        events: list[BlocksStored | BlocksRemoved] = []
        if known < len(chain):
            parent = chain[known - 1] if known else None
            events.append(
                BlocksStored(
                    **self._where, seq=self._next(), sequence_hashes=pack_u64(chain[known:]), parent_hash=parent
                )
            )
        if len(held) > self._blocks_max:
            evicted = [held.popitem(last=False)[0] for _ in range(len(held) - self._blocks_max)]
            events.append(BlocksRemoved(**self._where, seq=self._next(), sequence_hashes=pack_u64(evicted)))
        return events

    def report(self, running: int) -> LoadReported:
        return LoadReported(
            **self._where,
            running=running,
            waiting=0,
            kv_blocks_used=len(self._blocks),
            kv_blocks_total=self._blocks_max,
        )

    def _next(self) -> int:
        self._seq += 1
        return self._seq


class _Group:
    """An owner, its workers and its clients, advanced turn by turn."""

    def __init__(self, log: SqliteLog, shape: Shape) -> None:
        self._log = log
        self._shape = shape
        self._chance = random.Random(SEED)
        self._world = World()
        self._now_us = 0
        self._drafts: list[Draft] = []
        self._journal_end = 0
        self._chunks_end = 0
        self._since_digest = self._since_snapshot = 0
        self._parts: list[Chunk] = []
        self._walk: IndexScan | None = None
        self._pending: deque[tuple[Topic, InputEvent]] = deque()
        self._in_flight: deque[RequestRouted] = deque()
        self._chains: dict[str, list[int]] = {}
        self.decisions = self.events = self.blocks = 0
        systems = [self._chance.randbytes(SYSTEM_BLOCKS * BLOCK_SIZE * U32_BYTES) for _ in range(SYSTEM_PROMPTS)]
        self._systems = [(tokens, extend_chain(None, block_hashes(tokens, BLOCK_SIZE))) for tokens in systems]
        self._conversations = [self._new_conversation() for _ in range(TALKS * shape.workers)]
        self._journal(OwnerClaimed(owner_id="bench", core_version=CORE_VERSION))
        claim(self._world, 0)
        self._apply(FLEET, OwnershipAnnounced(owner_epoch=0))
        self._apply(CONTROL, PoolConfigured(pool=POOL, model=MODEL, block_size=BLOCK_SIZE))
        self._caches = {worker_name(number): self._join(number) for number in range(shape.workers)}

    async def turn(self) -> None:
        """Submit new requests, and emit workers' events of earlier ones."""
        count = self._chance.randint(1, TURN_REQUESTS_MAX)
        self._now_us += count * 1_000_000 // (RATE * self._shape.workers)
        for _ in range(min(count, self._shape.decisions - self.decisions)):
            self._submit()
        for _ in range(len(self._pending)):
            self._apply(*self._pending.popleft())
        while len(self._in_flight) > IN_FLIGHT * self._shape.workers:
            routed = self._in_flight.popleft()
            self._pending.append((PROGRESS, RequestFinished(**attempt_of(routed), finish_reason="length")))
            self._pending.append((METRICS, self._caches[routed.worker_id].report(IN_FLIGHT)))
        self._seal()
        if len(self._drafts) >= FLUSH_RECORDS:
            await self.flush()

    async def end(self) -> None:
        """Seal the last applied events."""
        self._journal(advance(self._world))
        await self.flush()

    def _submit(self) -> None:
        at = self._chance.randrange(len(self._conversations))
        conversation = self._conversations[at]
        if conversation.turns == TURNS_MAX:
            conversation = self._conversations[at] = self._new_conversation()
        conversation.grow()
        name = f"request-{self.decisions:08}"
        self._chains[name] = list(conversation.chain)
        tokens = len(conversation.tokens) // U32_BYTES
        self._apply(
            REQUESTS,
            RequestSubmitted(
                request_id=name,
                model=MODEL,
                token_ids=conversation.tokens if self._shape.tokens else b"",
                withheld_tokens=0 if self._shape.tokens else tokens,
                sequence_hashes=pack_u64(conversation.chain),
                reply_slot=0,
                timeout_us=TIMEOUT_US,
                tie_seed=self._chance.getrandbits(64),
                sampling=Sampling(max_tokens=128),
                nonce=self._chance.getrandbits(64),
            ),
        )

    def _answer(self, routed: RequestRouted) -> None:
        """Simulate the selected worker: update its cache and emit the first token."""
        cache = self._caches[routed.worker_id]
        events: list[BlocksStored | BlocksRemoved] = cache.use(self._chains.pop(routed.request_id))
        for _ in range(self._shape.stored_more):
            events += cache.use([self._chance.getrandbits(64) for _ in range(TURN_BLOCKS * TURNS_MAX)])
        self.blocks += sum(len(event.sequence_hashes) // 8 for event in events)
        self._pending.extend((KV_EVENTS, event) for event in events)
        self._pending.append((PROGRESS, FirstTokenEmitted(**attempt_of(routed))))
        self._in_flight.append(routed)

    def _join(self, number: int) -> _Cache:
        name = worker_name(number)
        spec = worker_spec(name, kv_blocks_total=self._shape.cached_blocks)
        epoch = self._world.view[FLEET.name]
        self._apply(FLEET, WorkerJoined(owner_epoch=0, spec=spec, lease="lease", slot=number, from_offset=0))
        return _Cache(name, epoch, self._shape.cached_blocks)

    def _new_conversation(self) -> _Conversation:
        return _Conversation(self._chance.choice(self._systems), self._chance)

    def _apply(self, topic: Topic, event: InputEvent) -> None:
        self._write(topic, event)
        self.events += 1
        decided = open_run(self._world, self._now_us)
        decided += step(self._world, topic.name, event, self._now_us)
        for record in decided:
            assert isinstance(record, RequestRouted), record
            self._journal(record)
            self._answer(record)
            self.decisions += 1
            self._since_digest += 1
        if len(self._world.consumed) >= CONSUMED_RUNS_MAX:
            self._journal(advance(self._world))

    def _seal(self) -> None:
        """Journal digests and snapshots, as an owner does beside its decisions."""
        if self._walk is None and self._since_snapshot >= self._shape.snapshot_every:
            self._walk = self._world.index.begin_scan()
            self._parts = []
        if self._walk is not None and not self._walk.done:
            self._parts += self._walk.advance(WALK_BLOCKS)
        elif self._walk is not None:
            self._walk = None
            sealed = advance(self._world)
            self._journal(sealed)
            self._parts += [*self._world.index.end_scan(), *self._world.snapshot_small()]
            self._snapshot(sealed)
        elif self._since_digest >= DIGEST_EVERY:
            self._journal(advance(self._world))

    def _snapshot(self, sealed: Advanced) -> None:
        journal_offset, first = self._journal_end, self._chunks_end
        gathered: list[Chunk] = []
        size = 0
        for part in self._parts:
            gathered.append(part)
            size += len(msgspec.msgpack.encode(part))
            if size >= CHUNK_BYTES or part is self._parts[-1]:
                chunk = SnapshotChunk(owner_epoch=0, number=self._chunks_end - first, parts=tuple(gathered))
                self._write(SNAPSHOTS, chunk)
                self._chunks_end += 1
                gathered, size = [], 0
        taken = SnapshotTaken(
            **self._world.stamp(),
            first_offset=first,
            chunks=self._chunks_end - first,
            digest=sealed.digest,
            journal_offset=journal_offset,
            core_version=CORE_VERSION,
        )
        self._journal(taken)
        self._since_snapshot = 0

    def _journal(self, record: JournalRecord) -> None:
        self._write(DECISIONS, record)
        self._journal_end += 1
        self._since_snapshot += 1
        if isinstance(record, Advanced):
            self._since_digest = 0

    def _write(self, topic: Topic, event: Event) -> None:
        self._drafts.append(Draft(topic.name, 0, encode(topic, event)))

    async def flush(self) -> None:
        await self._log.append(self._drafts)
        self._drafts = []


def worker_spec(worker_id: str, **changes: Any) -> WorkerSpec:
    spec = WorkerSpec(
        worker_id=worker_id,
        model=MODEL,
        pool=POOL,
        block_size=BLOCK_SIZE,
        kv_blocks_total=1 << 20,
        max_num_seqs=256,
        max_num_batched_tokens=8_192,
    )
    return msgspec.structs.replace(spec, **changes)


def attempt_of(routed: RequestRouted) -> dict[str, Any]:
    """Return the fields that every progress event of this attempt has."""
    names = ("request_id", "attempt", "worker_id", "worker_epoch", "owner_epoch")
    return {name: getattr(routed, name) for name in names}


def worker_name(number: int) -> str:
    return f"w{number:04}"
