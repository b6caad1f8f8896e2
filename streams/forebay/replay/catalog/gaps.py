"""Parts of a journal by owners with other decision rules: a catalog lists their requests, but cannot derive moments.

No derivation may begin at a checkpoint before such a gap and continue after it, because the owner after the gap
continued from a snapshot.
"""

import sqlite3
from typing import NamedTuple

from forebay.events.decisions import Sealed
from forebay.replay.recorded import RecordedStep, RecordedSteps
from forebay.replay.spans import NearMoment, not_derivable
from forebay.replay.walk import Walk
from forebay.transport.base import NotDerivable
from forebay.transport.history.release import rules_text

SCHEMA = """
CREATE TABLE gaps (
    first INTEGER PRIMARY KEY, end INTEGER NOT NULL, rules INTEGER NOT NULL, release TEXT NOT NULL,
    before_us INTEGER NOT NULL, from_us INTEGER NOT NULL, to_us INTEGER NOT NULL,
    is_open INTEGER NOT NULL, is_sealed INTEGER NOT NULL
);
"""


class JournalGap(NamedTuple):
    """A part of a journal by owners with other rules. It is empty if an owner continued from an earlier snapshot.

    Attributes:
        first: journal offset of its first record, which is a claim or the beginning of the log.
        end: journal offset after its last record, as far as read.
        release: version of forebay of the owner; empty if unknown.
        before_us: the owner's clock before the gap.
        from_us: first clock reading in the gap; 0 if there is none.
        to_us: last clock reading in the gap; 0 if there is none.
        is_open: whether no claim with this program's rules follows yet.
        is_sealed: whether the last record is a `Sealed`, whose state any version can show.
    """

    first: int
    end: int
    rules: int
    release: str
    before_us: int
    from_us: int = 0
    to_us: int = 0
    is_open: bool = True
    is_sealed: bool = False

    @classmethod
    def after(cls, walk: Walk, steps: RecordedSteps) -> "JournalGap":
        rules, release = walk.validity.rules, walk.validity.release
        return cls(steps.first, steps.position, rules, release, walk.world.now_us)

    def extended(self, steps: RecordedSteps, step: RecordedStep) -> "JournalGap":
        times = [run.now_us for run in step.consumed] or [self.to_us]
        return self._replace(
            end=steps.position,
            rules=steps.validity.rules,
            release=steps.validity.release,
            from_us=self.from_us or times[0],
            to_us=times[-1],
            is_sealed=isinstance(step.record, Sealed),
        )

    @property
    def text(self) -> str:
        """Why the catalog derives no moments in the gap, as a sentence."""
        remedy = f"use the console of forebay {self.release}" if self.release else "use the console of that version"
        return (
            f"the journal from offset {self.first} on is decided by {rules_text(self.rules, self.release)}, so this"
            f" console lists requests, but shows no moments: {remedy}"
        )

    def error(self, offset: int) -> NotDerivable:
        near = [NearMoment(self.first, self.before_us)] if self.before_us else []
        near += [] if self.is_open else [NearMoment(self.end, self.to_us)]
        return not_derivable(offset, self.first, self.end, self.rules, self.release, near)


def write(connection: sqlite3.Connection, gap: JournalGap) -> None:
    """Add a gap, or replace the gap that begins at the same offset."""
    connection.execute("INSERT OR REPLACE INTO gaps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", gap)


def at_offset(connection: sqlite3.Connection, offset: int) -> JournalGap | None:
    rows = connection.execute("SELECT * FROM gaps WHERE first <= ? AND end > ?", (offset, offset))
    return next(map(_gap, rows), None)


def at_time(connection: sqlite3.Connection, time_us: int) -> JournalGap | None:
    """Return the gap whose owner decided at this time of its clock; None if there is none."""
    query = "SELECT * FROM gaps WHERE from_us BETWEEN 1 AND ? AND (to_us > ? OR (is_open = 1 AND is_sealed = 0))"
    rows = connection.execute(query, (time_us, time_us))
    return next(map(_gap, rows), None)


def last_end(connection: sqlite3.Connection, offset: int) -> int:
    """Return the end of the last gap that ends at or before a journal offset; 0 if there is none."""
    query = "SELECT coalesce(max(end), 0) FROM gaps WHERE end <= ? AND is_open = 0"
    (end,) = connection.execute(query, (offset,)).fetchone()
    return int(end)


def _gap(row: tuple[int, int, int, str, int, int, int, int, int]) -> JournalGap:
    return JournalGap(*row[:-2], is_open=bool(row[-2]), is_sealed=bool(row[-1]))
