"""Take snapshots in small slices between decisions, and journal digests of the state.

A walk visits the blocks of the prefix index in slices of half a millisecond per turn. Then the state is sealed: the
owner journals an `Advanced` record with the digest, and copies the rest of the state at the same moment. The copy is
written one slice per turn, one chunk at a time. Once all are acknowledged, the owner journals `SnapshotTaken`, which
names the seal. At a planned stop it applies nothing after the seal, writes the rest at once, and journals `Sealed`.

An owner takes one snapshot at a time, and an owner that failed takes none. The chunks of a snapshot are therefore all
chunks of its owner from the first chunk on, with increasing numbers.
"""

import asyncio
import gc
from collections import deque
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from xxhash import xxh3_128

from forebay import runtime
from forebay.core.step import AnyDecision, advance
from forebay.core.world import CORE_VERSION, World
from forebay.events.codec import encode
from forebay.events.decisions import Advanced, JournalRecord, Sealed, SnapshotRecord, SnapshotTaken
from forebay.events.kv import Tier
from forebay.events.snapshots import Chunk, SnapshotChunk
from forebay.events.topics import SNAPSHOTS
from forebay.transport.base import Draft, Log, Wake

TIERS: tuple[Tier, ...] = get_args(Tier)
DIGEST_EVERY = 1_000  # decisions between digests, so that a difference that changes no decision is found soon
SLICE_NS = 500_000  # per turn; a decision waits for at most two slices, before its turn and before its work is sent
WALK_BLOCKS = 2_048  # blocks between two readings of the clock
FREEZE_PAIRS = 100_000  # with fewer pairs of block and rank, a full garbage collection takes about 2 ms
ID_BYTES = 8  # no two snapshots of a group have the same random id
CHUNK_BYTES = 128 << 10  # encoded and appended at once; a larger part becomes a chunk of its own


class Snapshots:
    """Takes a snapshot of an owner's world every `every` journal records, or `age_s` seconds after the previous one.

    If nothing was journalled since the previous snapshot, `age_s` has no effect.

    In each turn the owner first appends the result of `records` to the journal. Then it calls `journalled` with all
    records that it has appended in this turn. At last it calls `work`, which continues the snapshot for `SLICE_NS`. The
    event `wake` is set when the snapshot can continue. `taken` counts the snapshots completed in the journal.
    """

    def __init__(self, log: Log, partition: int, *, every: int, age_s: float, wake: Wake) -> None:
        self._log = log
        self._partition = partition
        self._every = every
        self._age_s = age_s
        self._wake = wake
        self._current: _Snapshot | None = None
        self._requested = False
        self._stopping = False
        self._sealed_s = runtime.monotonic_s()
        self._since_seal = 0
        self._since_digest = 0
        self._frozen_pairs = FREEZE_PAIRS // 2
        self.taken = 0
        self.digests = 0

    @property
    def age_s(self) -> float:
        """Seconds since this owner sealed its newest snapshot, or since its start."""
        return runtime.monotonic_s() - self._sealed_s

    @property
    def eager(self) -> bool:
        """Whether a snapshot is in progress and does not wait for an append."""
        return self._current is not None and not self._current.waiting

    @property
    def sealed(self) -> bool:
        """Whether the snapshot in progress is sealed, so that later events are not part of it."""
        return self._current is not None and self._current.sealed is not None

    @property
    def can_stop(self) -> bool:
        """Whether all blocks are walked for the last snapshot, so that the owner may seal it."""
        return self._stopping and self._current is not None and self._current.walk.done and not self.sealed

    def prepare_stop(self) -> None:
        """Walk the blocks for the last snapshot, after one that is sealed. No turn seals it before `seal_last`."""
        self._stopping = True
        self._wake.set()

    def seal_last(self, world: World) -> Advanced:
        """Seal the state of an owner that stops. The owner journals the record next."""
        assert self.can_stop, "the blocks are not walked"
        assert self._current is not None
        return self._current.seal(world)

    async def finish(self, world: World) -> Sealed:
        """Write the rest of the last snapshot, and return the record that ends the journal. Raises LogError."""
        assert self._current is not None
        await self._current.finish()
        current, self._current = self._current, None
        return Sealed(**current.fields(world), at_us=runtime.wall_us())

    def begin(self, world: World) -> None:
        """Begin a snapshot now, unless one is in progress."""
        if self._current is None:
            self._requested = False
            self._current = _Snapshot(self._log, self._partition, world, self._wake)

    def request(self) -> None:
        """Make the next turn begin a snapshot, unless one is in progress."""
        if self._current is None:
            self._requested = True
            self._wake.set()

    def work(self, world: World) -> None:
        """Run one slice of the snapshot in progress, and begin a snapshot if one is due. Raises LogError."""
        if self._current is None and self._is_due():
            self.begin(world)
        if self._current is not None:
            self._current.work(runtime.monotonic_ns() + SLICE_NS)

    def records(self, world: World) -> list[JournalRecord]:
        """Return the record to append after the decisions of this turn, if any: a seal, `SnapshotTaken` or a digest."""
        current = self._current
        if current is not None and current.is_written:
            self._current = None
            return [SnapshotTaken(**current.fields(world))]
        if current is not None and current.walk.done and current.sealed is None and not self._stopping:
            self.freeze_large_index(world)
            return [current.seal(world)]
        if self._since_digest >= DIGEST_EVERY:
            return [advance(world)]
        return []

    def freeze_large_index(self, world: World) -> None:
        """Exclude a large index from garbage collection, because a full collection visits each of its blocks.

        A full collection takes 17 ms for a million blocks and delays decisions. Frozen objects are still freed by
        reference counting, but frozen cycles are not. The index is therefore frozen only when its size has doubled.
        """
        pairs = sum(world.index.blocks_held(*holder, tier) for holder in world.index.holders() for tier in TIERS)
        if pairs >= 2 * self._frozen_pairs:
            self._frozen_pairs = pairs
            gc.freeze()

    def journalled(self, records: Sequence[JournalRecord], end: int) -> None:
        """Count records that the owner has just appended to the journal. The last one is right before offset `end`."""
        for record in records:
            self._since_seal += 1
            if isinstance(record, Advanced):
                self.digests += 1
                self._since_digest = 0
            elif isinstance(record, SnapshotRecord):
                self.taken += 1
                self._since_seal -= 1
            elif isinstance(record, AnyDecision):
                self._since_digest += 1
        if self._current is not None and records[-1] is self._current.sealed:
            self._current.journal_offset = end
            self._sealed_s = runtime.monotonic_s()
            self._since_seal = 0

    async def settle(self) -> None:
        if self._current is not None and self._current.writing is not None:
            await asyncio.wait([self._current.writing])

    def drop(self) -> None:
        if self._current is not None:
            self._current.drop()

    def _is_due(self) -> bool:
        is_old = self._since_seal > 0 and self.age_s >= self._age_s
        return self._stopping or self._requested or self._since_seal >= self._every or is_old


class _Snapshot:
    def __init__(self, log: Log, partition: int, world: World, wake: Wake) -> None:
        self._log = log
        self._partition = partition
        self._wake = wake
        self._owner_epoch = world.owner_epoch
        self._id = runtime.random_bytes(ID_BYTES).hex()
        self._parts: deque[Chunk] = deque()
        self._gathered: list[Chunk] = []
        self._size = 0
        self._full = False
        self._first_offset = -1
        self._chunks = 0
        self._checksum = xxh3_128()
        self.walk = world.index.begin_scan()
        self.writing: asyncio.Task[list[int]] | None = None
        self.sealed: Advanced | None = None
        self.journal_offset = -1

    @property
    def waiting(self) -> bool:
        return self.writing is not None and not self.writing.done() and (self._full or self._all_gathered)

    @property
    def is_written(self) -> bool:
        """Whether every chunk is acknowledged and the seal is in the journal."""
        return self.journal_offset >= 0 and self._all_gathered and not self._gathered and self.writing is None

    @property
    def _all_gathered(self) -> bool:
        return self.sealed is not None and not self._parts

    def work(self, ends_ns: int) -> None:
        """Walk, gather and write until `ends_ns`, at least one step. Raises LogError."""
        self._take_offset()
        while self._do_one() and runtime.monotonic_ns() < ends_ns:
            pass

    def seal(self, world: World) -> Advanced:
        """Seal the state. The owner journals the record next."""
        self.sealed = advance(world)
        self._parts.extend(world.index.end_scan())
        self._parts.extend(world.snapshot_small())
        return self.sealed

    async def finish(self) -> None:
        """Write all chunks that are left. Raises LogError.

        Unlike `work`, this does not wait for the acknowledgement of each chunk, because the owner makes no decision
        until all are acknowledged.
        """
        assert self.sealed is not None
        if self.writing is not None:
            await self.writing
            self._take_offset()
        drafts: list[Draft] = []
        while self._parts or self._gathered:
            while self._parts and not self._full:
                self._gather()
            drafts.append(self._take_chunk())
            await asyncio.sleep(0)
        first, *_ = await self._log.append(drafts)
        if self._first_offset < 0:
            self._first_offset = first

    def fields(self, world: World) -> dict[str, Any]:
        """Return the fields of the record that names this snapshot."""
        assert self.sealed is not None
        return {
            **world.stamp(),
            "first_offset": self._first_offset,
            "chunks": self._chunks,
            "digest": self.sealed.digest,
            "journal_offset": self.journal_offset,
            "core_version": CORE_VERSION,
            "snapshot_id": self._id,
            "checksum": self._checksum.hexdigest(),
        }

    def drop(self) -> None:
        """Cancel the pending append. A failed append also fails the journal, so its exception is ignored here."""
        if self.writing is not None and not self.writing.cancel() and not self.writing.cancelled():
            self.writing.exception()

    def _take_offset(self) -> None:
        if self.writing is not None and self.writing.done():
            (offset,) = self.writing.result()
            if self._first_offset < 0:
                self._first_offset = offset
            self.writing = None

    def _do_one(self) -> bool:
        """Do the next step, if there is one."""
        if self._gathered and (self._full or self._all_gathered):
            if self.writing is not None:
                return False
            self._write()
        elif self._parts:
            self._gather()
        elif not self.walk.done:
            self._parts.extend(self.walk.advance(WALK_BLOCKS))
        else:
            return False
        return True

    def _gather(self) -> None:
        size = len(msgspec.msgpack.encode(self._parts[0]))
        if self._gathered and self._size + size > CHUNK_BYTES:
            self._full = True
            return
        self._gathered.append(self._parts.popleft())
        self._size += size

    def _take_chunk(self) -> Draft:
        chunk = SnapshotChunk(
            owner_epoch=self._owner_epoch, number=self._chunks, parts=tuple(self._gathered), snapshot_id=self._id
        )
        value = encode(SNAPSHOTS, chunk)
        self._checksum.update(value)
        self._chunks += 1
        self._gathered, self._size, self._full = [], 0, False
        return Draft(SNAPSHOTS.name, self._partition, value)

    def _write(self) -> None:
        self.writing = asyncio.create_task(_append(self._log, self._take_chunk()), name="snapshot")
        self.writing.add_done_callback(lambda _: self._wake.set())


async def _append(log: Log, draft: Draft) -> list[int]:
    return await log.append([draft])
