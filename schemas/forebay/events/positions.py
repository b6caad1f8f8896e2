"""Positions of programs that read a journal without deriving its decisions."""

from typing import Annotated

from forebay.events.base import Count, Part
from forebay.events.privacy import KEPT


class JournalPosition(Part, frozen=True, kw_only=True):
    """Position from which a program can read a journal with the events that the owner applied, in their order.

    Attributes:
        journal_offset: offset of the next journal record.
        requests_offset: offset of the next event on `requests` that the owner applies.
        progress_offset: offset of the next event on `progress` that the owner applies.
        submitted: offset after the newest event on `requests` so far. It is above `requests_offset` after an operator
            let an owner continue from a snapshot.
        now_us: clock of the owner, in microseconds.
        owner_epoch: epoch of the owner; -1 before the first claim.
        owner_nonce: random text in the claim of the owner; null if it is unknown.
        seq: sequence number of the owner's next record; null if it is unknown.
        core_version: version of the owner's decision rules.
        fleet_offset: offset of the next event on `fleet` that the owner applies.
        fleet_epoch: highest owner epoch that `fleet` has announced; -1 before the first one.
    """

    journal_offset: Count
    requests_offset: Count
    progress_offset: Count
    submitted: Count = 0
    now_us: int = 0
    owner_epoch: int = -1
    owner_nonce: Annotated[str, KEPT] | None = ""
    seq: Count | None = 0
    core_version: Count = 0
    fleet_offset: Count = 0
    fleet_epoch: int = -1
