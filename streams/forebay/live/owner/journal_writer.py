"""Append decisions to the journal, and detect that another owner claimed the group.

Theory of operation. Several processes may write to one journal partition at once, because an owner that was paused or
partitioned does not know yet that another owner took over. Therefore an append is valid if it is acknowledged at the
offset right after the owner's previous record. At any other offset the owner reads the records between the two. If one
of them is a valid claim, every reader ignores this owner's records after that claim. All other records change nothing,
because every reader skips them: stale records of an earlier owner, void claims, repeated records and foreign records. A
claim after this owner's last record leaves that record valid.
"""

from collections.abc import Sequence

from forebay.events.base import Event
from forebay.events.codec import encode
from forebay.events.decisions import JournalRecord, OwnerClaimed
from forebay.events.topics import DECISIONS
from forebay.journal.records import Validity, journal_records
from forebay.transport.base import Draft, Log, LogError

SEQ_END = 1 << 63  # above all sequence numbers, so every other record with this owner's nonce repeats one of its own


class OwnershipLost(LogError):
    """Another owner claimed the group."""


class JournalWriter:
    """Writer of the journal of one group, from `claim` until it finds another owner's claim.

    Attributes:
        epoch: Offset of this owner's claim, -1 before the claim.
        end: Offset after the last valid record of this owner.
        void: Number of stale records, invalid claims and repeated records that this owner skipped.
        foreign: Number of skipped records that are not journal records of this group.
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
        self._nonce = ""

    async def claim(self, claimed: OwnerClaimed) -> None:
        """Append the claim, which makes this process the owner of the group. Raises LogError."""
        self._nonce = claimed.owner_nonce
        (self.epoch,) = await self._append([claimed])
        self.end = self.epoch + 1

    async def append(self, records: Sequence[JournalRecord]) -> None:
        """Append the records in order. When this returns, they are valid and durable."""
        if self._lost is not None:
            raise OwnershipLost(self._lost)
        offsets = await self._append(records)
        last = offsets[-1]
        if offsets[0] < self.end:
            raise LogError(
                f"the log acknowledged a record of this owner at journal offset {offsets[0]}, although it had"
                f" acknowledged an earlier one at {self.end - 1}: the log lost records; check the broker or the file"
            )
        if last - self.end >= len(offsets):
            await self._look_between(offsets)
        self.end = last + 1
        self.written += len(offsets)

    def add_skipped(self, validity: Validity) -> None:
        self.void += validity.void + validity.repeated
        self.foreign += validity.foreign

    def surrender(self, reason: str) -> None:
        """Give up the ownership. Raises OwnershipLost, now and at every later append."""
        self._lost = reason
        raise OwnershipLost(reason)

    async def _look_between(self, offsets: list[int]) -> None:
        ours = frozenset(offsets)
        seen = 0
        validity = Validity(self.epoch, nonce=self._nonce, seq=SEQ_END)
        validity.warns = True
        async for record in journal_records(self._log, self._partition, self.end, offsets[-1] + 1):
            seen += 1
            if record.offset in ours:
                continue
            validity.read(record)
            if validity.epoch != self.epoch:
                self.surrender(
                    f"another owner claimed the group at journal offset {record.offset}, after this owner's claim at"
                    f" {self.epoch}"
                )
        self.add_skipped(validity)
        if seen < offsets[-1] + 1 - self.end:
            raise LogError(
                f"the journal ends before offset {offsets[-1]}, at which the log acknowledged a record of this owner:"
                " the log lost records; check the broker or the file"
            )

    async def _append(self, records: Sequence[Event]) -> list[int]:
        return await self._log.append(
            [Draft(DECISIONS.name, self._partition, encode(DECISIONS, event)) for event in records]
        )
