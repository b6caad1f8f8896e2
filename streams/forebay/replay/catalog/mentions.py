"""Find the journal records about a request ID without a search.

Theory of operation. IDs are random, so an index over them would change a page per request. Instead, the hashes of some
thousand mentions are sorted and stored together in one row, with their offsets. A look-up bisects each row, which takes
about 20 us per row. The newest row is rewritten until it is full.
"""

import sqlite3
from bisect import bisect_left
from collections.abc import Sequence
from typing import ClassVar

from xxhash import xxh3_64_intdigest

from forebay.core.step import AnyDecision, InputEvent
from forebay.core.world import World
from forebay.events.base import array_u64, pack_u64
from forebay.events.decisions import JournalRecord
from forebay.events.request_ids import aliases_of, log_id_of
from forebay.events.requests import RequestSubmitted, RouteQueried
from forebay.replay.catalog.observer import CatalogObserver
from forebay.replay.catalog.store import Store
from forebay.replay.explain.find import Mentions, RequestRecord

ROW_MENTIONS = 4_096
FOUND_MAX = 10_000  # newest mentions of one ID
END_MAX = 1 << 62


class MentionTable(CatalogObserver):
    """Observer that notes which journal records are about which request ID."""

    schema: ClassVar[str] = """
    CREATE TABLE mentions (
        id INTEGER PRIMARY KEY, last_offset INTEGER NOT NULL, hashes BLOB NOT NULL, offsets BLOB NOT NULL
    );
    """

    def __init__(self) -> None:
        self._row = 1
        self._mentions: list[tuple[int, int]] = []
        self._submitted: list[str] = []
        self._last_offset = -1
        self._is_changed = False

    def open(self, connection: sqlite3.Connection, world: World) -> None:
        row = connection.execute("SELECT * FROM mentions ORDER BY id DESC LIMIT 1").fetchone()
        if row is not None:
            self._row, self._last_offset, hashes, offsets = row
            self._mentions = list(zip(array_u64(hashes), array_u64(offsets), strict=True))

    def on_applied(
        self, topic: str, event: InputEvent | None, now_us: int, decisions: Sequence[AnyDecision], world: World
    ) -> None:
        if isinstance(event, RequestSubmitted | RouteQueried):
            self._submitted.append(event.request_id)

    def on_record(self, offset: int, record: JournalRecord, world: World) -> None:
        for request_id in self._submitted:
            self._add(request_id, offset, is_submission=True)
        self._submitted.clear()
        if isinstance(record, RequestRecord):
            self._add(record.request_id, offset, is_submission=False)

    def write(self, connection: sqlite3.Connection) -> None:
        if not self._is_changed:
            return
        self._is_changed = False
        ordered = sorted(self._mentions)
        row = (
            self._row,
            self._last_offset,
            pack_u64([mentioned for mentioned, _ in ordered]),
            pack_u64([at for _, at in ordered]),
        )
        connection.execute("INSERT OR REPLACE INTO mentions VALUES (?, ?, ?, ?)", row)
        if len(ordered) >= ROW_MENTIONS:
            self._row += 1
            self._mentions.clear()

    def remove_before(self, connection: sqlite3.Connection, offset: int, now_us: int) -> None:
        connection.execute("DELETE FROM mentions WHERE last_offset < ?", (offset,))

    def _add(self, request_id: str, offset: int, *, is_submission: bool) -> None:
        at = offset << 1 | is_submission
        self._mentions += [(_hash(alias), at) for alias in aliases_of(request_id)]
        self._last_offset, self._is_changed = offset, True


def find_mentions(store: Store, request_id: str, journal_offset: int | None = None) -> Mentions:
    """Return the journal records about an ID, on the log or as a client chose it, for `explain`.

    `journal_offset` is that of the newest decision about one of several requests with this ID; None for the newest one.
    """
    wanted = _hash(log_id_of(request_id))
    offsets: list[int] = []
    for hashes, packed in store.connection.execute("SELECT hashes, offsets FROM mentions ORDER BY id DESC"):
        known = array_u64(hashes)
        at = bisect_left(known, wanted)
        if at == len(known) or known[at] != wanted:
            continue
        found = array_u64(packed)
        while at < len(known) and known[at] == wanted:
            offsets.append(found[at])
            at += 1
        if len(offsets) >= FOUND_MAX:
            break
    committed = store.committed
    end = 0 if committed is None else committed.position
    if journal_offset is not None:
        offsets, end = [one for one in offsets if one >> 1 <= journal_offset], END_MAX
    offsets.sort(reverse=True)
    return Mentions(
        end=end,
        decisions=[one >> 1 for one in offsets if not one & 1],
        submissions=[one >> 1 for one in offsets if one & 1],
    )


def _hash(request_id: str) -> int:
    return xxh3_64_intdigest(request_id.encode())
