"""Every recorded decision derived again from the recorded events, and held against the record.

The log may hold crashes, restarts and take-overs: the journal's order bridges them. What cannot be read or derived is
never skipped: it ends the verification or is counted by name.
"""

from collections.abc import Callable, Set

import msgspec
from xxhash import xxh3_64

from forebay.core.rederive import Divergence
from forebay.core.step import AnyDecision
from forebay.events.base import hex_digest
from forebay.events.decisions import OwnerClaimed, SnapshotTaken
from forebay.events.topics import INPUTS
from forebay.replay.verify.divergence import Told, Trail
from forebay.replay.verify.foreign_progress import Foreign, ForeignProgress
from forebay.replay.walk import FOREIGN_RECORDS, UNKNOWN_EVENTS, UNREAD_FIELDS, Walk, walk_all
from forebay.transport.base import Log
from forebay.transport.history.reader import MissingChunk, OtherState, check_snapshot

PROGRESS_EVERY = 1_000  # journal records between two reports of progress

MISSING_SNAPSHOTS, FOREIGN_PROGRESS = "missing-snapshots", "foreign-progress"
UNVERIFIED = {
    FOREIGN_RECORDS: "records in the journal that no owner wrote",
    UNREAD_FIELDS: "records in the journal that say more than this version reads, or not as it writes it",
    UNKNOWN_EVENTS: "events of kinds that this version does not know",
    MISSING_SNAPSHOTS: "snapshots that the journal names and whose chunks are not there",
    FOREIGN_PROGRESS: "progress events from workers that were not selected; they had no effect here",
}

OnProgress = Callable[[int, int, int], None]


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
        malformed: of the events, those that no version can read; they did nothing when they were applied, either.
        pending: decisions that the events lead to and the journal does not have yet: its writer died, or is at it.
        unapplied: input events that no journal record says were applied.
        unverified: by a name of `UNVERIFIED`, how much could not be verified.
        allowed: those names that do not fail the verification.
        unknown_event: the first of the unknown events: where it is, and its tag.
        foreign_progress: the first progress events from workers that were not selected.
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
    malformed: int = 0
    pending: int = 0
    unapplied: int = 0
    unverified: dict[str, int] = {}
    allowed: list[str] = []
    unknown_event: str = ""
    foreign_progress: list[Foreign] = []
    digest: str = ""
    state: str = ""
    divergence: Told | None = None

    @property
    def failed(self) -> dict[str, int]:
        """What could not be verified and is not allowed."""
        return {name: count for name, count in self.unverified.items() if name not in self.allowed}


async def verify(
    log: Log, partition: int = 0, progress: OnProgress | None = None, allow: Set[str] = frozenset()
) -> Report:
    """Derive the journal of one group again, from its first record on, or the oldest snapshot that stands for it.

    `progress` is called now and then with the journal records done, their total, and the decisions verified.
    `allow` holds names of `UNVERIFIED`.

    Raises:
        OtherRules: the journal was decided by another version of the rules.
        LogError: the log is damaged or misses a part that the journal says was applied.
    """
    walk = await walk_all(log, partition)
    trail = Trail(walk)
    foreign = ForeignProgress(walk)
    report = Report(start=walk.start, allowed=sorted(allow))
    hasher = xxh3_64()
    async for step in walk:
        record = step.record
        is_decision = isinstance(record, AnyDecision)
        report.decisions += is_decision
        report.events += sum(run.count for run in record.consumed)
        divergence = step.divergence
        if divergence is None and isinstance(record, SnapshotTaken):
            divergence = await _check_snapshot(log, partition, step.offset, record, report)
        if divergence is not None:
            report.divergence = await trail.told(log, partition, divergence, step)
            break
        trail.passed(step)
        report.claims += isinstance(record, OwnerClaimed)
        report.verified += is_decision
        report.records += 1
        hasher.update(walk.encoded)
        if progress is not None and report.records % PROGRESS_EVERY == 0:
            progress(step.offset + 1, walk.end, report.verified)
    report.digest = hex_digest(hasher.intdigest())
    await _account(log, partition, walk, report)
    if foreign.count:
        report.unverified[FOREIGN_PROGRESS] = foreign.count
        report.foreign_progress = foreign.first
    return report


async def _check_snapshot(
    log: Log, partition: int, offset: int, taken: SnapshotTaken, report: Report
) -> Divergence | None:
    """Whether the chunks of a snapshot give the state that was sealed. Raises LogError."""
    try:
        await check_snapshot(log, partition, taken)
    except MissingChunk:
        report.unverified[MISSING_SNAPSHOTS] = report.unverified.get(MISSING_SNAPSHOTS, 0) + 1
        return None
    except OtherState as error:
        return Divergence(offset, str(error), taken, None)
    report.snapshots += 1
    return None


async def _account(log: Log, partition: int, walk: Walk, report: Report) -> None:
    """Add what the walk did not verify, and where it ended."""
    report.void = walk.validity.void
    report.unverified |= walk.unverified
    for topic in INPUTS:
        report.unapplied += await log.end(topic.name, partition) - walk.order.offset(topic.name)
        reader = walk.order.readers.get(topic.name)
        if reader is None:
            continue
        report.malformed += reader.malformed
        if reader.first_unknown is not None and not report.unknown_event:
            offset, tag = reader.first_unknown
            report.unknown_event = f"{topic.name}/{partition} offset {offset}: {tag}"
    report.pending = walk.pending
    report.state = hex_digest(walk.world.digest())
