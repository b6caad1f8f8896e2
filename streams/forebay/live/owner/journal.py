"""The owner's end of `decisions`: the claim, appends that hold, and how another owner's claim is noticed.

Theory of operation. Several processes may write to one journal partition at once: an owner that was paused, or
cut off from its group, does not know yet that another took over. So an append counts when it is acknowledged at
the offset right after the owner's last record. At any other offset the records between are read: a claim among
them makes what comes after it void, for every reader; void records of an earlier owner change nothing. A claim
after our last record leaves that record valid.
"""

from collections.abc import Sequence

from forebay.events.base import Event
from forebay.events.codec import encode
from forebay.events.decisions import JournalRecord, OwnerClaimed
from forebay.events.topics import DECISIONS
from forebay.transport.base import Draft, Log, LogError
from forebay.transport.history.reader import decode_journal, journal_records


class OwnershipLost(LogError):
    """Another owner claimed the group."""


class Journal:
    """Writes the journal of one group, from `claim` until another claim is found.

    Attributes:
        epoch: the offset of the claim; -1 before it.
        end: the offset after the last valid record of this owner.
        written: records of this owner, its claim aside.
        void: records of earlier owners that stood between them.
        foreign: records that are no journal records, and stood between them.
    """

    def __init__(self, log: Log, partition: int) -> None:
        self._log = log
        self._partition = partition
        self._lost: str | None = None
        self.epoch = -1
        self.end = 0
        self.written = 0
        self.void = 0
        self.foreign = 0

    async def claim(self, claimed: OwnerClaimed) -> None:
        """From here on this owner decides. Raises LogError."""
        (self.epoch,) = await self._append([claimed])
        self.end = self.epoch + 1

    async def append(self, records: Sequence[JournalRecord]) -> None:
        """Append the records in order; when this returns, they are valid and durable.

        Raises OwnershipLost when another owner claimed the group before the last of them, LogError when they are
        not durable. After either nothing more is written.
        """
        if self._lost is not None:
            raise OwnershipLost(self._lost)
        offsets = await self._append(records)
        last = offsets[-1]
        if last - self.end >= len(offsets):
            await self._look_between(offsets)
        self.end = last + 1
        self.written += len(offsets)

    def surrender(self, reason: str) -> None:
        """Write nothing more: raises OwnershipLost, now and at every append."""
        self._lost = reason
        raise OwnershipLost(reason)

    async def _look_between(self, offsets: list[int]) -> None:
        ours = frozenset(offsets)
        seen = 0
        async for record in journal_records(self._log, self._partition, self.end, offsets[-1] + 1):
            seen += 1
            if record.offset in ours:
                continue
            decision = decode_journal(record)
            if isinstance(decision, OwnerClaimed):
                self.surrender(
                    f"the journal has another claim at offset {record.offset}, this owner's is at {self.epoch}"
                )
            if decision is None:
                self.foreign += 1
            else:
                self.void += 1
        if seen < offsets[-1] + 1 - self.end:
            raise LogError(f"the journal ends before offset {offsets[-1]}, where this owner's record was acknowledged")

    async def _append(self, records: Sequence[Event]) -> list[int]:
        return await self._log.append(
            [Draft(DECISIONS.name, self._partition, encode(DECISIONS, event)) for event in records]
        )
