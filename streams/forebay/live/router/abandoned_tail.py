"""Count what is lost if a group continues from its newest snapshot, without the journal records after it."""

import logging
from typing import NamedTuple

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.step import AnyDecision
from forebay.events.topics import SNAPSHOTS
from forebay.transport.base import Log, LogError
from forebay.transport.history.reader import JournalBroken, decode_journal, journal_records
from forebay.transport.history.snapshots import BEGINNING, load_sealed, newest_snapshot_at
from forebay.transport.history.start import begins_of

logger = logging.getLogger(__name__)


class AbandonedTail(NamedTuple):
    """Part of a journal that a new owner gives up. The new owner decides the counted requests again.

    Attributes:
        snapshot: Journal offset of the record of the snapshot from which the new owner continues. `BEGINNING` if it
            continues from the empty state.
        decisions: Number of decisions among the records, of the types that this version knows.
    """

    partition: int
    snapshot: int
    records: int
    decisions: int
    requests: int

    def text(self) -> str:
        place = f"the snapshot at journal offset {self.snapshot}" if self.snapshot != BEGINNING else "its beginning"
        return (
            f"control partition {self.partition} continues from {place}: the {self.records} journal records after it"
            f" are given up, with {self.decisions} decisions about {self.requests} requests, which are decided again"
        )


async def abandoned_tail(log: Log, partition: int, end: int, custom: CustomPolicies = ONLY_BUILT_IN) -> AbandonedTail:
    """Return what is lost if a journal that ends at `end` is continued from its newest usable snapshot.

    Without one, the journal is continued from its beginning. Raises LogError if the log lacks records of the beginning.
    """
    snapshot, begin = await _newest_usable(log, partition, end, custom)
    records = decisions = 0
    requests: set[str] = set()
    async for record in journal_records(log, partition, begin, end):
        decision = decode_journal(record)
        records += record.offset != snapshot
        if isinstance(decision, AnyDecision):
            decisions += 1
            requests.add(getattr(decision, "request_id", ""))
    return AbandonedTail(partition, snapshot, records, decisions, len(requests - {""}))


async def _newest_usable(log: Log, partition: int, end: int, custom: CustomPolicies) -> tuple[int, int]:
    """Return the offset of the newest snapshot that can be loaded, and the offset after its state."""
    while (found := await newest_snapshot_at(log, partition, end)) is not None:
        end, taken = found
        try:
            await load_sealed(log, partition, taken, custom)
        except JournalBroken as error:
            logger.warning("cannot continue from the snapshot at journal offset %d: %s", end, error)
        else:
            return end, taken.journal_offset
    begins = await begins_of(log, partition)
    if missing := [name for name, begin in begins.items() if begin and name != SNAPSHOTS.name]:
        raise LogError(
            f"control partition {partition} has no snapshot to continue from, and no first records of"
            f" {', '.join(missing)}: use the program that wrote the journal, or start a new namespace"
        )
    return BEGINNING, 0
