"""Checkpoints of the world in a catalog, so that any moment can be derived in a short time.

Theory of operation. A checkpoint is a complete snapshot of the world right before a journal record. Restoring it takes
much longer than taking it, so a checkpoint is due whenever the derivation since the previous one has taken `DERIVE_S`,
or the estimated time of a restore if that is longer. If the catalog reaches its maximum size, every second checkpoint
is removed and the spacing is doubled.
"""

import asyncio
import sqlite3
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from forebay.core.restore import restore
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.world import World
from forebay.events.snapshots import Chunk, IndexBlocks, StoreBlocks
from forebay.events.topics import DECISIONS, SNAPSHOTS
from forebay.journal.start import StoredState
from forebay.replay.at import LOST_MAX
from forebay.replay.moment import LossFacts
from forebay.replay.states import CheckpointStart

DERIVE_S = 0.15  # derivation between two checkpoints, so that a moment is derived well within half a second
RESTORE_PER_TAKE = 8  # measured: a restore takes 54 ms where the snapshot takes 6 ms, encoding included
PART_BYTES = 256 << 10  # encoded between two yields to the event loop, in about 2 ms

LOSSES_MAX = 16_384  # of the whole log, about 1 KB each

SCHEMA = """
CREATE TABLE checkpoints (
    offset INTEGER PRIMARY KEY, now_us INTEGER NOT NULL, owner_epoch INTEGER NOT NULL,
    view TEXT NOT NULL, unverified TEXT NOT NULL, bytes INTEGER NOT NULL
);
CREATE INDEX checkpoints_by_time ON checkpoints (now_us);
CREATE TABLE checkpoint_parts (offset INTEGER NOT NULL, number INTEGER NOT NULL, checksum INTEGER, value BLOB NOT NULL);
CREATE UNIQUE INDEX checkpoint_parts_by_offset ON checkpoint_parts (offset, number);
CREATE TABLE spans (first INTEGER PRIMARY KEY, blocked INTEGER NOT NULL);
CREATE TABLE losses (id INTEGER PRIMARY KEY, journal_offset INTEGER NOT NULL, fact BLOB NOT NULL);
"""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Chunk])


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a world, encoded. `unverified` counts skipped records before the state, as in `Start`."""

    offset: int
    now_us: int
    owner_epoch: int
    view: Mapping[str, int]
    unverified: Mapping[str, int]
    parts: Sequence[bytes]


class Known(NamedTuple):
    """A checkpoint of a catalog, without its content."""

    offset: int
    now_us: int
    view: dict[str, int]

    def is_usable(self, begins: Mapping[str, int]) -> bool:
        """Return whether a log that begins at these offsets holds all records after the state."""
        begins = {**begins, SNAPSHOTS.name: 0}
        after = {**self.view, DECISIONS.name: self.offset}
        return all(after.get(topic, 0) >= begin for topic, begin in begins.items())


async def take(world: World, offset: int, unverified: Mapping[str, int]) -> Checkpoint:
    """Return a checkpoint of a world, which must not change meanwhile. Other tasks run in between."""
    parts = [part async for part in _encode(world)]
    return Checkpoint(
        offset=offset,
        now_us=world.now_us,
        owner_epoch=world.owner_epoch,
        view=dict(world.view),
        unverified=dict(unverified),
        parts=parts,
    )


async def _encode(world: World) -> AsyncIterator[bytes]:
    gathered: list[Chunk] = []
    size = 0
    for chunk in world.snapshot():
        gathered.append(chunk)
        size += len(chunk.sequence_hashes) if isinstance(chunk, IndexBlocks | StoreBlocks) else 256
        if size >= PART_BYTES:
            yield _ENCODER.encode(gathered)
            gathered, size = [], 0
            await asyncio.sleep(0)
    if gathered:
        yield _ENCODER.encode(gathered)


def write(connection: sqlite3.Connection, checkpoint: Checkpoint) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?)",
        (
            checkpoint.offset,
            checkpoint.now_us,
            checkpoint.owner_epoch,
            msgspec.json.encode(checkpoint.view).decode(),
            msgspec.json.encode(checkpoint.unverified).decode(),
            sum(map(len, checkpoint.parts)),
        ),
    )
    connection.executemany(
        "INSERT OR REPLACE INTO checkpoint_parts VALUES (?, ?, ?, ?)",
        [(checkpoint.offset, number, zlib.crc32(part), part) for number, part in enumerate(checkpoint.parts)],
    )


def load(connection: sqlite3.Connection, offset: int, custom: CustomPolicies = ONLY_BUILT_IN) -> CheckpointStart | None:
    """Return the state of the checkpoint at `offset`; None if it is missing or damaged."""
    found = connection.execute("SELECT unverified FROM checkpoints WHERE offset = ?", (offset,)).fetchone()
    if found is None:
        return None
    query = "SELECT checksum, value FROM checkpoint_parts WHERE offset = ? ORDER BY number"
    parts = connection.execute(query, (offset,)).fetchall()
    if not parts or any(zlib.crc32(value) != checksum for checksum, value in parts):
        return None
    world = restore((chunk for _, value in parts for chunk in _DECODER.decode(value)), custom)
    unverified = msgspec.json.decode(found[0], type=dict[str, int])
    lost, begins_span = tuple(losses_before(connection, offset)), span_of(connection, offset) == offset > 0
    return CheckpointStart(world, offset, unverified, begins_span=begins_span, lost=lost)


def newest_before(connection: sqlite3.Connection, offset: int) -> Iterator[Known]:
    """Yield the checkpoints from which the journal record at `offset` can be derived, newest first."""
    query = "SELECT offset, now_us, view FROM checkpoints WHERE offset <= ? ORDER BY offset DESC"
    return map(_known, connection.execute(query, (offset,)))


def oldest_usable(connection: sqlite3.Connection, begins: Mapping[str, int]) -> Known | None:
    """Return the oldest checkpoint after which a log that begins at these offsets holds all records, or None."""
    query = "SELECT offset, now_us, view FROM checkpoints WHERE offset >= ? ORDER BY offset"
    found = map(_known, connection.execute(query, (begins[DECISIONS.name],)))
    return next((known for known in found if known.is_usable(begins)), None)


def first_from(connection: sqlite3.Connection, offset: int) -> Known | None:
    query = "SELECT offset, now_us, view FROM checkpoints WHERE offset >= ? ORDER BY offset LIMIT 1"
    return next(map(_known, connection.execute(query, (offset,))), None)


def _known(row: tuple[int, int, str]) -> Known:
    offset, now_us, view = row
    return Known(offset, now_us, msgspec.json.decode(view, type=dict[str, int]))


def by_time(connection: sqlite3.Connection, time_us: int) -> StoredState | None:
    """Return the newest checkpoint whose clock is set and at most `time_us`."""
    query = """SELECT offset, now_us, owner_epoch FROM checkpoints
        WHERE now_us BETWEEN 1 AND ? ORDER BY now_us DESC, offset DESC LIMIT 1"""
    row = connection.execute(query, (time_us,)).fetchone()
    return None if row is None else StoredState(*row)


def begin_span(connection: sqlite3.Connection, blocked: int, offset: int) -> None:
    """Note that an owner continued from a snapshot, with its claim at `offset`.

    No derivation may begin at a checkpoint before this offset and continue after it. Records in [blocked, offset) are
    those of owners with other decision rules.
    """
    connection.execute("INSERT OR IGNORE INTO spans VALUES (?, ?)", (offset, blocked))


def span_of(connection: sqlite3.Connection, offset: int) -> int:
    """Return where the span of the journal record at `offset` begins; 0 if no owner continued from a snapshot."""
    (first,) = connection.execute("SELECT coalesce(max(first), 0) FROM spans WHERE first <= ?", (offset,)).fetchone()
    return int(first)


def is_of_other_rules(connection: sqlite3.Connection, offset: int) -> bool:
    """Return whether the catalog skipped the journal record at `offset`, as one of an owner with other rules."""
    query = "SELECT blocked FROM spans WHERE first > ? ORDER BY first LIMIT 1"
    row = connection.execute(query, (offset,)).fetchone()
    return row is not None and offset >= row[0]


def add_loss(connection: sqlite3.Connection, journal_offset: int, loss: LossFacts) -> None:
    """Add a lost worker, whose loss is part of the state from the journal record at `journal_offset` on."""
    row = (journal_offset, msgspec.json.encode(loss))
    connection.execute("INSERT INTO losses (journal_offset, fact) VALUES (?, ?)", row)
    connection.execute("DELETE FROM losses WHERE id <= (SELECT max(id) FROM losses) - ?", (LOSSES_MAX,))


def losses_before(connection: sqlite3.Connection, offset: int) -> list[LossFacts]:
    """Return the last workers that were lost before the journal record at `offset`, oldest first."""
    query = "SELECT fact FROM losses WHERE journal_offset < ? ORDER BY id DESC LIMIT ?"
    rows = connection.execute(query, (offset, LOST_MAX)).fetchall()
    return [msgspec.json.decode(fact, type=LossFacts) for (fact,) in reversed(rows)]


def total_bytes(connection: sqlite3.Connection) -> int:
    (total,) = connection.execute("SELECT coalesce(sum(bytes), 0) FROM checkpoints").fetchone()
    return int(total)


def every_second(connection: sqlite3.Connection) -> list[int]:
    """Return the offset of every second checkpoint, beginning with the second newest."""
    rows = connection.execute("SELECT offset FROM checkpoints ORDER BY offset DESC").fetchall()
    return [offset for (offset,) in rows[1::2]]


def remove(connection: sqlite3.Connection, offset: int) -> None:
    connection.execute("DELETE FROM checkpoints WHERE offset = ?", (offset,))
    connection.execute("DELETE FROM checkpoint_parts WHERE offset = ?", (offset,))
