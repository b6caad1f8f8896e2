"""Snapshots that hold no decision up, and digests in the journal.

Theory of operation. The blocks of the index are most of a state, and a walk over them goes on beside decisions,
a slice of a millisecond a turn. When it is done the state is sealed: an `Advanced` with its digest is journalled,
and at that very moment everything else is taken as facts that do not change any more. These are then encoded and
written a slice a turn, too. Chunks go to the log one at a time; when all are acknowledged, `SnapshotTaken` says which
seal they belong to. Decisions made meanwhile stand between the two.

A snapshot of this owner begins when the one before is finished, and an owner that fails begins none again. So from
its first chunk on, chunks of its owner with rising numbers are all its own.
"""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Sequence
from typing import get_args

import msgspec

from forebay.core.step import AnyDecision, advance
from forebay.core.world import CORE_VERSION, World
from forebay.events.codec import encode
from forebay.events.decisions import Advanced, JournalRecord, SnapshotTaken
from forebay.events.kv import Tier
from forebay.events.snapshots import Chunk, SnapshotChunk
from forebay.events.topics import SNAPSHOTS
from forebay.transport.base import Draft, Log, Wake

TIERS: tuple[Tier, ...] = get_args(Tier)
DIGEST_EVERY = 1_000  # decisions; a divergence that shows in no decision is at most so far from its cause
SLICE_NS = 500_000  # of a turn: a decision may wait for two of them, before its turn and before its work is sent
WALK_BLOCKS = 2_048  # between two looks at the clock
FREEZE_PAIRS = 100_000  # below it a full collection takes some 2 ms
CHUNK_BYTES = 128 << 10  # encoded and written in one go; a part that is larger gets a chunk of its own


class Snapshots:
    """Takes the snapshots of one owner: after `every` journal records, or after `age_s` with any.

    A turn asks `records` what to journal beside its decisions, tells `journalled` what was, and then gives a
    slice of its time to `work`. `wake` is set when there is more to do.

    Attributes:
        taken: snapshots whose `SnapshotTaken` is in the journal.
        digests: digests that are in the journal.
    """

    def __init__(self, log: Log, partition: int, *, every: int, age_s: float, wake: Wake) -> None:
        self._log = log
        self._partition = partition
        self._every = every
        self._age_s = age_s
        self._wake = wake
        self._current: _Snapshot | None = None
        self._requested = False
        self._sealed_s = time.monotonic()
        self._since_seal = 0
        self._since_digest = 0
        self._frozen_pairs = FREEZE_PAIRS // 2
        self.taken = 0
        self.digests = 0

    @property
    def age_s(self) -> float:
        """How long ago the state was sealed that the next owner would begin with; since the start if none was."""
        return time.monotonic() - self._sealed_s

    @property
    def eager(self) -> bool:
        """Whether another turn would get on with a snapshot now, with nothing to wait for."""
        return self._current is not None and not self._current.waiting

    @property
    def sealed(self) -> bool:
        """Whether the snapshot on its way is of an earlier state."""
        return self._current is not None and self._current.sealed is not None

    def begin(self, world: World) -> None:
        """Begin a snapshot now, unless one is on its way."""
        if self._current is None:
            self._requested = False
            self._current = _Snapshot(self._log, self._partition, world, self._wake)

    def request(self) -> None:
        """Have the next turn begin a snapshot, unless one is on its way."""
        if self._current is None:
            self._requested = True
            self._wake.set()

    def work(self, world: World) -> None:
        """One slice of the snapshot on its way; begins one when it is due. Raises LogError."""
        if self._current is None and self._is_due():
            self.begin(world)
        if self._current is not None:
            self._current.work(time.monotonic_ns() + SLICE_NS)

    def records(self, world: World) -> list[JournalRecord]:
        """What is to be journalled now, after the decisions of a turn."""
        current = self._current
        if current is not None and current.is_written:
            self._current = None
            return [current.taken(world)]
        if current is not None and current.walk.done and current.sealed is None:
            self.keep_collections_short(world)
            return [current.seal(world)]
        if self._since_digest >= DIGEST_EVERY:
            return [advance(world)]
        return []

    def keep_collections_short(self, world: World) -> None:
        """Have the garbage collector pass over a large index: a full collection looks at each of its blocks.

        That takes 17 ms for a million, in the middle of whatever is decided. What is frozen is still freed when
        nobody refers to it, but for cycles; so it is done only when the index has doubled.
        """
        pairs = sum(world.index.blocks_held(*holder, tier) for holder in world.index.holders() for tier in TIERS)
        if pairs >= 2 * self._frozen_pairs:
            self._frozen_pairs = pairs
            gc.freeze()

    def journalled(self, records: Sequence[JournalRecord], end: int) -> None:
        """These records stand in the journal, the last of them right before offset `end`."""
        for record in records:
            self._since_seal += 1
            if isinstance(record, Advanced):
                self.digests += 1
                self._since_digest = 0
            elif isinstance(record, SnapshotTaken):
                self.taken += 1
                self._since_seal -= 1
            elif isinstance(record, AnyDecision):
                self._since_digest += 1
        if self._current is not None and records[-1] is self._current.sealed:
            self._current.journal_offset = end
            self._sealed_s = time.monotonic()
            self._since_seal = 0

    async def settle(self) -> None:
        """Wait for the log, if that is what the snapshot on its way waits for."""
        if self._current is not None and self._current.writing is not None:
            await asyncio.wait([self._current.writing])

    def drop(self) -> None:
        """Write nothing more."""
        if self._current is not None:
            self._current.drop()

    def _is_due(self) -> bool:
        is_old = self._since_seal > 0 and self.age_s >= self._age_s
        return self._requested or self._since_seal >= self._every or is_old


class _Snapshot:
    """One snapshot on its way: walked, sealed, written."""

    def __init__(self, log: Log, partition: int, world: World, wake: Wake) -> None:
        self._log = log
        self._partition = partition
        self._wake = wake
        self._owner_epoch = world.owner_epoch
        self._parts: deque[Chunk] = deque()
        self._gathered: list[Chunk] = []
        self._size = 0
        self._full = False
        self._first_offset = -1
        self._chunks = 0
        self.walk = world.index.begin_scan()
        self.writing: asyncio.Task[list[int]] | None = None
        self.sealed: Advanced | None = None
        self.journal_offset = -1

    @property
    def waiting(self) -> bool:
        """Whether nothing can be done before the log answers."""
        return self.writing is not None and not self.writing.done() and (self._full or self._all_gathered)

    @property
    def is_written(self) -> bool:
        """Whether every chunk is acknowledged, and the seal in the journal."""
        return self.journal_offset >= 0 and self._all_gathered and not self._gathered and self.writing is None

    @property
    def _all_gathered(self) -> bool:
        return self.sealed is not None and not self._parts

    def work(self, ends_ns: int) -> None:
        """Walk, gather and write for a while, one thing at least. Raises LogError."""
        self._take_answer()
        while self._do_one() and time.monotonic_ns() < ends_ns:
            pass

    def seal(self, world: World) -> Advanced:
        """The state is final as it is now; the record that says so goes into the journal next."""
        self.sealed = advance(world)
        self._parts.extend(world.index.end_scan())
        self._parts.extend(world.snapshot_small())
        return self.sealed

    def taken(self, world: World) -> SnapshotTaken:
        """What the journal says when all is written."""
        assert self.sealed is not None
        return SnapshotTaken(
            **world.stamp(),
            first_offset=self._first_offset,
            chunks=self._chunks,
            digest=self.sealed.digest,
            journal_offset=self.journal_offset,
            core_version=CORE_VERSION,
        )

    def drop(self) -> None:
        """Write nothing more; why the last append failed, if it did, the journal has heard as well."""
        if self.writing is not None and not self.writing.cancel() and not self.writing.cancelled():
            self.writing.exception()

    def _take_answer(self) -> None:
        if self.writing is not None and self.writing.done():
            (offset,) = self.writing.result()
            if self._first_offset < 0:
                self._first_offset = offset
            self.writing = None

    def _do_one(self) -> bool:
        """Do the next small thing; whether there was one."""
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

    def _write(self) -> None:
        chunk = SnapshotChunk(owner_epoch=self._owner_epoch, number=self._chunks, parts=tuple(self._gathered))
        draft = Draft(SNAPSHOTS.name, self._partition, encode(SNAPSHOTS, chunk))
        self._chunks += 1
        self._gathered, self._size, self._full = [], 0, False
        self.writing = asyncio.create_task(_append(self._log, draft), name="snapshot")
        self.writing.add_done_callback(lambda _: self._wake.set())


async def _append(log: Log, draft: Draft) -> list[int]:
    return await log.append([draft])
