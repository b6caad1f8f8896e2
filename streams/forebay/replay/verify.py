"""Every recorded decision derived again from the recorded events, and held against the record.

The log may hold crashes, restarts and take-overs: the journal's order bridges them. What cannot be read or
derived is never skipped: it ends the verification and is reported.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from xxhash import xxh3_64

from forebay.core.rederive import Divergence, Rederivation
from forebay.core.step import Decided
from forebay.core.world import World
from forebay.events.base import hex_digest
from forebay.events.codec import encode
from forebay.events.decisions import JournalRecord, OwnerClaimed, SnapshotTaken
from forebay.events.topics import DECISIONS, INPUTS, SNAPSHOTS
from forebay.transport.base import Log, LogError
from forebay.transport.recorded import RecordedOrder, Validity, decode_journal, journal, journal_records, load_snapshot

PROGRESS_EVERY = 1_000  # journal records between two reports of progress


class Report(msgspec.Struct, kw_only=True):
    """What a verification found.

    Attributes:
        start: the journal offset at which the verification began: 0, or where the oldest usable snapshot stands.
        decisions: what the journal says was decided, up to where verification ended.
        verified: how many of them were derived again, equal in every field.
        records: all valid journal records, `events` the input events applied on the way.
        claims: owners, one for each start or take-over.
        snapshots: snapshots whose chunks give the state sealed in the journal.
        void: records of owners that had lost the group, which count for nothing.
        foreign: records of the journal that no owner wrote.
        digest: 64 bits over every verified journal record in order.
        state: digest of the world at the end.
        divergence: the first record that the events do not lead to; None when there is none.
    """

    start: int = 0
    decisions: int = 0
    verified: int = 0
    records: int = 0
    events: int = 0
    claims: int = 0
    snapshots: int = 0
    void: int = 0
    foreign: int = 0
    digest: str = ""
    state: str = ""
    divergence: dict[str, Any] | None = None


async def verify(log: Log, partition: int = 0, progress: Callable[[int, int], None] | None = None) -> Report:
    """Derive the journal of one group again, from its first record on, or the oldest snapshot that stands for it.

    `progress` is called now and then with the records done and their total.

    Raises:
        OtherRules: the journal was decided by another version of the rules.
        LogError: the log is damaged or misses a part that the journal says was applied.
    """
    end = await log.end(DECISIONS.name, partition)
    world, start = await _oldest(log, partition, end)
    report = Report(start=start)
    hasher = xxh3_64()
    followed = Rederivation(world)
    order = RecordedOrder(log, partition, world.view)
    validity = Validity(world.owner_epoch)
    async for offset, record in journal(log, partition, start, end, validity):
        validity.require_own_rules(record, offset)
        is_decision = isinstance(record, Decided)
        report.decisions += is_decision
        report.events += sum(run.count for run in record.consumed)
        divergence = followed.apply(offset, record, await order.events_of(record.consumed))
        if divergence is not None:
            report.divergence = describe(divergence)
            break
        if isinstance(record, SnapshotTaken):
            await load_snapshot(log, partition, record)
            report.snapshots += 1
        report.claims += isinstance(record, OwnerClaimed)
        report.verified += is_decision
        report.records += 1
        hasher.update(encode(DECISIONS, record))
        if progress is not None and report.records % PROGRESS_EVERY == 0:
            progress(offset + 1, end)
    report.void, report.foreign = validity.void, validity.foreign
    report.digest = hex_digest(hasher.intdigest())
    report.state = hex_digest(followed.world.digest())
    return report


async def _oldest(log: Log, partition: int, end: int) -> tuple[World, int]:
    """The earliest state from which everything after it is still there. Raises LogError when there is none."""
    begins = {topic.name: await log.begin(topic.name, partition) for topic in (*INPUTS, DECISIONS, SNAPSHOTS)}
    if not any(begins.values()):
        return World(), 0
    epoch = -1
    async for record in journal_records(log, partition, begins[DECISIONS.name], end):
        decision = decode_journal(record)
        if isinstance(decision, OwnerClaimed):
            epoch = record.offset
        if not isinstance(decision, SnapshotTaken) or decision.owner_epoch < epoch:
            continue
        if decision.journal_offset < begins[DECISIONS.name] or decision.first_offset < begins[SNAPSHOTS.name]:
            continue
        world = await load_snapshot(log, partition, decision)
        if all(world.view.get(topic.name, 0) >= begins[topic.name] for topic in INPUTS):
            return world, decision.journal_offset
    text = f"control partition {partition} no longer holds its beginning, nor a snapshot with all that came after it"
    raise LogError(text)


def describe(divergence: Divergence) -> dict[str, Any]:
    """A divergence as plain data: where, why, both records and the fields in which they differ."""
    recorded, derived = _plain(divergence.recorded), _plain(divergence.derived)
    return {
        "offset": divergence.offset,
        "reason": divergence.reason,
        "differs": dict(_differences(recorded, derived)),
        "recorded": recorded,
        "derived": derived,
    }


def _plain(record: JournalRecord | None) -> dict[str, Any] | None:
    return None if record is None else msgspec.to_builtins(record)


def _differences(
    recorded: dict[str, Any] | None, derived: dict[str, Any] | None, path: str = ""
) -> Iterator[tuple[str, Any]]:
    for name in sorted({*(recorded or {}), *(derived or {})}):
        left, right = (recorded or {}).get(name), (derived or {}).get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from _differences(left, right, f"{path}{name}.")
        elif left != right:
            yield f"{path}{name}", {"recorded": left, "derived": right}
