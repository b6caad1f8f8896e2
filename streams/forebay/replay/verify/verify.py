"""Derive every recorded decision again from the recorded events, and compare it with the record.

The log may contain crashes, restarts and failovers, because the journal holds the order of events across them. No
unreadable record is skipped silently: it ends the verification or is counted in `VerifyReport.unverified`.
"""

from collections.abc import Callable, Set

import msgspec
from xxhash import xxh3_64

from forebay.core.rederive import Divergence
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.step import AnyDecision
from forebay.events.base import hex_digest
from forebay.events.decisions import OwnerClaimed, SnapshotRecord
from forebay.events.topics import DECISIONS, INPUTS
from forebay.replay.checks import FOREIGN_PROGRESS, MISSING_SNAPSHOTS, SCALING_RULES
from forebay.replay.scaling.journal import ScalingVerification, verify_scaling
from forebay.replay.spans import OtherSpan, spans_of
from forebay.replay.verify.divergence import DivergenceReport, DivergenceTrail
from forebay.replay.verify.foreign_progress import ForeignEvent, ForeignProgress
from forebay.replay.walk import Walk
from forebay.transport.base import Log
from forebay.transport.history.snapshots import MissingChunk, OtherState, check_snapshot
from forebay.transport.history.start import oldest_state

PROGRESS_EVERY = 1_000  # journal records between two progress reports

OnProgress = Callable[[int, int, int], None]


class VerifyReport(msgspec.Struct, kw_only=True):
    """Result of a verification.

    Attributes:
        start: journal offset at which verification began: 0, or the position of the oldest usable snapshot.
        void: number of stale records: their owner had lost the group.
        malformed: number of input records that no version can decode. They had no effect when the owner read them.
        pending: number of derived decisions that the journal does not hold yet, because the owner died or still writes.
        unapplied: number of input events that the owner has not applied according to the journal.
        others: parts of the journal that this program cannot verify, because their owners had other decision rules.
    """

    start: int = 0
    decisions: int = 0
    verified: int = 0
    records: int = 0
    events: int = 0
    claims: int = 0
    snapshots: int = 0
    void: int = 0
    repeated: int = 0
    malformed: int = 0
    pending: int = 0
    unapplied: int = 0
    unverified: dict[str, int] = {}
    allowed: list[str] = []
    unknown_event: str = ""
    foreign_progress: list[ForeignEvent] = []
    digest: str = ""
    state: str = ""
    divergence: DivergenceReport | None = None
    others: list[OtherSpan] = []
    scaling: ScalingVerification | None = None

    @property
    def diverged(self) -> bool:
        return self.divergence is not None or (self.scaling is not None and self.scaling.different > 0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing could be verified, because only owners with other decision rules wrote the journal."""
        return bool(self.others) and not self.records

    @property
    def failed(self) -> dict[str, int]:
        """The entries of `unverified` that fail the verification."""
        return {name: count for name, count in self.unverified.items() if name not in self.allowed}


async def verify(
    log: Log,
    partition: int = 0,
    progress: OnProgress | None = None,
    allow: Set[str] = frozenset(),
    custom: CustomPolicies = ONLY_BUILT_IN,
) -> VerifyReport:
    """Derive one group's journal again, starting at its first record or at the oldest usable snapshot.

    `progress` is called regularly with the number of journal records done, their total, and the decisions verified.
    `allow` has the names of `UNVERIFIED` that do not fail the verification.
    """
    end = await log.end(DECISIONS.name, partition)
    begin = await oldest_state(log, partition)
    report = VerifyReport(start=begin.offset, allowed=sorted(allow))
    hasher = xxh3_64()
    walk: Walk | None = None
    for span in await spans_of(log, partition, begin, end):
        walk = None
        if not span.is_own:
            other = OtherSpan(rules=span.rules, first=span.first, end=span.end, release=span.release)
            report.others.append(other)
            continue
        walk = Walk(log, partition, await span.start(log, partition, end, custom), span.end)
        await _verify_span(log, partition, walk, report, hasher, progress)
        if report.divergence is not None:
            break
    report.digest = hex_digest(hasher.intdigest())
    if walk is not None:
        await _account_end(log, partition, walk, report)
    return report


async def _verify_span(
    log: Log, partition: int, walk: Walk, report: VerifyReport, hasher: xxh3_64, progress: OnProgress | None
) -> None:
    trail = DivergenceTrail(walk)
    foreign = ForeignProgress(walk)
    async for step in walk:
        record = step.record
        is_decision = isinstance(record, AnyDecision)
        report.decisions += is_decision
        report.events += sum(run.count for run in record.consumed)
        divergence = step.divergence
        if divergence is None and isinstance(record, SnapshotRecord):
            divergence = await _check_snapshot(log, partition, step.offset, record, report)
        if divergence is not None:
            report.divergence = await trail.report(log, partition, divergence, step)
            break
        trail.add_verified(step)
        report.claims += isinstance(record, OwnerClaimed)
        report.verified += is_decision
        report.records += 1
        hasher.update(walk.encoded)
        if progress is not None and report.records % PROGRESS_EVERY == 0:
            progress(step.offset + 1, walk.end, report.verified)
    _account(partition, walk, report)
    if foreign.count:
        report.unverified[FOREIGN_PROGRESS] = report.unverified.get(FOREIGN_PROGRESS, 0) + foreign.count
        report.foreign_progress += foreign.first


async def include_scaling(log: Log, report: VerifyReport) -> None:
    """Verify the topic `scaling`, and add the result to a report."""
    report.scaling = await verify_scaling(log)
    if report.scaling is not None and report.scaling.other_rules:
        report.unverified[SCALING_RULES] = report.scaling.other_rules


async def _check_snapshot(
    log: Log, partition: int, offset: int, taken: SnapshotRecord, report: VerifyReport
) -> Divergence | None:
    """Compare the state that a snapshot's chunks restore with the sealed digest."""
    try:
        await check_snapshot(log, partition, taken)
    except MissingChunk:
        report.unverified[MISSING_SNAPSHOTS] = report.unverified.get(MISSING_SNAPSHOTS, 0) + 1
        return None
    except OtherState as error:
        return Divergence(offset, str(error), taken, None)
    report.snapshots += 1
    return None


def _account(partition: int, walk: Walk, report: VerifyReport) -> None:
    report.void += walk.validity.void
    report.repeated += walk.validity.repeated
    for name, count in walk.unverified.items():
        report.unverified[name] = report.unverified.get(name, 0) + count
    for topic in INPUTS:
        reader = walk.order.readers.get(topic.name)
        if reader is None:
            continue
        report.malformed += reader.malformed
        if reader.first_unknown is not None and not report.unknown_event:
            offset, tag = reader.first_unknown
            report.unknown_event = f"{topic.name}/{partition} offset {offset}: {tag}"
    report.state = hex_digest(walk.world.digest())


async def _account_end(log: Log, partition: int, walk: Walk, report: VerifyReport) -> None:
    """Add what the journal's last owner has not applied or written yet. Raises LogError."""
    for topic in INPUTS:
        report.unapplied += await log.end(topic.name, partition) - walk.order.offset(topic.name)
    report.pending = walk.pending
