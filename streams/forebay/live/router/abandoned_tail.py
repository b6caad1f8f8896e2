"""Count what is lost if a group continues from its newest snapshot, without the journal records after it."""

from typing import NamedTuple

from forebay.core.step import AnyDecision
from forebay.events.topics import DECISIONS
from forebay.transport.base import Log, LogError
from forebay.transport.history.reader import decode_journal, journal_records
from forebay.transport.history.snapshots import newest_snapshot_at


class AbandonedTail(NamedTuple):
    """Part of a journal that a new owner gives up.

    Attributes:
        partition: Control partition of the group.
        snapshot: Journal offset of the record of the snapshot from which the new owner continues.
        records: Number of journal records after the state of the snapshot.
        decisions: Number of decisions among them, of the types that this version knows.
        requests: Number of requests that these decisions name. The new owner decides them again.
    """

    partition: int
    snapshot: int
    records: int
    decisions: int
    requests: int

    def text(self) -> str:
        """Return the loss as one line."""
        return (
            f"control partition {self.partition} continues from the snapshot at journal offset {self.snapshot}: the"
            f" {self.records} journal records after it are given up, with {self.decisions} decisions about"
            f" {self.requests} requests, which are decided again"
        )


async def abandoned_tail(log: Log, partition: int, end: int) -> AbandonedTail:
    """Return what is lost if a journal that ends at offset `end` is continued from its newest snapshot.

    Raises LogError if there is no snapshot.
    """
    found = await newest_snapshot_at(log, partition, end)
    if found is None:
        raise LogError(
            f"the journal of control partition {partition} has no snapshot to continue from: use the program that wrote"
            f" it, or start a new namespace ({DECISIONS.name} has {end} records)"
        )
    snapshot, taken = found
    records = decisions = 0
    requests: set[str] = set()
    async for record in journal_records(log, partition, taken.journal_offset, end):
        decision = decode_journal(record)
        records += record.offset != snapshot
        if isinstance(decision, AnyDecision):
            decisions += 1
            requests.add(getattr(decision, "request_id", ""))
    return AbandonedTail(partition, snapshot, records, decisions, len(requests - {""}))
