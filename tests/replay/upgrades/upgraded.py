"""Logs whose journal was written by programs with different decision rules, for tests.

A letter per owner: `o` has the rules of this program, `x` has other rules. Each owner serves one request, whose ID is
its letter and its number, and stops as planned.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from forebay.core.world import CORE_VERSION
from forebay.events.codec import decode, encode
from forebay.events.decisions import OwnerClaimed, RequestRouted, Sealed
from forebay.events.topics import DECISIONS
from forebay.transport.base import Draft
from forebay.transport.history.reader import journal_records
from forebay.transport.sqlite.log import SqliteLog
from tests.live.programs import OTHER, Program
from tests.system import System


@dataclass(slots=True)
class Upgraded:
    """A log with several owners.

    Attributes:
        claims: journal offset of the claim of each owner.
        routed: journal offset of the routing decision of each owner.
        seals: journal offset of the `Sealed` of each owner that has written one.
        void: journal offsets of void claims.
    """

    log: SqliteLog
    claims: list[int] = field(default_factory=list)
    routed: list[int] = field(default_factory=list)
    seals: list[int] = field(default_factory=list)
    void: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Offset after the last journal record."""
        return self.log.next_offset(DECISIONS.name, 0)

    async def record(self, offset: int) -> Any:
        (record,) = [one async for one in journal_records(self.log, 0, offset, offset + 1)]
        return decode(DECISIONS, record.value)

    async def clock(self, offset: int) -> int:
        """Return the owner's clock after a journal record that has a clock reading."""
        return int((await self.record(offset)).consumed[-1].now_us)


async def upgraded(
    monkeypatch: pytest.MonkeyPatch, log: SqliteLog, owners: str, *, last_seals: bool = True, with_void: bool = False
) -> Upgraded:
    """Fill a log.

    Args:
        monkeypatch: changes the version of the rules meanwhile.
        log: an empty log.
        owners: a letter per owner.
        last_seals: whether the last owner stops as planned; otherwise it dies.
        with_void: whether a router of the other rules claims in vain after each decision.
    """
    programs = {"o": Program(monkeypatch, CORE_VERSION), "x": Program(monkeypatch, OTHER)}
    made = Upgraded(log)
    async with System(log).started(workers=1) as system:
        for number, letter in enumerate(owners):
            seals = last_seals or number < len(owners) - 1
            await programs[letter].serve(system, f"{letter}{number}", seals=seals)
            if with_void:
                rules = OTHER if letter == "o" else CORE_VERSION
                claim = OwnerClaimed(owner_id="void", core_version=rules, seal=0)
                made.void += await log.append([Draft(DECISIONS.name, 0, encode(DECISIONS, claim))])
        for offset, record in enumerate(system.decisions()):
            for kind, offsets in ((OwnerClaimed, made.claims), (RequestRouted, made.routed), (Sealed, made.seals)):
                if isinstance(record, kind) and offset not in made.void:
                    offsets.append(offset)
    return made
