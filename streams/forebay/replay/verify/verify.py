"""Derive every recorded decision again from the recorded events, and compare it with the record.

The log may contain crashes, restarts and failovers, because the journal holds the order of events across them. No
unreadable record is skipped silently: it ends the verification or is counted in `VerifyReport.unverified`.
"""

from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import get_args

import msgspec
from xxhash import xxh3_64

from forebay.core.adapter_placement import UNLOAD
from forebay.core.rederive import Divergence
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.step import AnyDecision, InputEvent, is_member
from forebay.events.base import hex_digest
from forebay.events.decisions import (
    AdapterPlaced,
    CommandSent,
    OwnerClaimed,
    RequestAborted,
    RequestRejected,
    RequestRouted,
    SnapshotRecord,
)
from forebay.events.progress import CommandDone, CommandRefused, RequestFailed, RequestFinished, RequestProgress
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import DECISIONS, INPUTS
from forebay.journal.checks import FOREIGN_PROGRESS, MISSING_SNAPSHOTS, SCALING_RULES
from forebay.journal.reader import JournalReader
from forebay.journal.snapshots import MissingChunk, OtherState, check_snapshot
from forebay.journal.spans import OtherSpan, spans_of
from forebay.journal.start import oldest_state
from forebay.replay.scaling.reader import ScalingVerification, verify_scaling
from forebay.replay.verify.divergence import DivergenceReport, DivergenceTrail
from forebay.transport.base import Log

KEPT_US = 600_000_000  # after the end of a request; later progress of its workers counts as foreign
SHOWN_MAX = 20  # further events are only counted

Sent = tuple[int, str, int]


class ForeignEvent(msgspec.Struct, kw_only=True):
    """A progress event from a worker that was not selected.

    `selected` are the workers, with epochs, to which the owner sent this attempt, or those of all attempts if there is
    none. For a command, they are the workers to which the owner sent it. May be empty.
    """

    offset: int
    type: str
    about: str
    attempt: int
    reported_by: str
    reported_epoch: int
    selected: list[str]

    def text(self) -> str:
        subject = f"request {self.about}, attempt {self.attempt}" if self.attempt else f"command {self.about}"
        selected = f"was sent to {', '.join(self.selected)}" if self.selected else "was sent to no worker of this group"
        return (
            f"{subject}: {selected}; {self.type} at offset {self.offset} of progress is from worker "
            f"{self.reported_by}, epoch {self.reported_epoch}"
        )


class ForeignProgress:
    """Collects progress events from workers that were not selected, while `reader` derives the decisions."""

    def __init__(self, reader: JournalReader) -> None:
        """Register with `reader`, which must not have begun."""
        self.count = 0
        self.first: list[ForeignEvent] = []
        self._world = reader.world
        self._from_begin = reader.start == 0
        self._before = {request.submitted.request_id for request in reader.world.requests.active()}
        self._sent: dict[str, list[Sent]] = {}
        self._commands: dict[str, dict[str, int]] = {}
        self._ended: deque[tuple[int, str]] = deque()
        reader.followed.on_applied = self._on_applied

    def _on_applied(self, topic: str, event: InputEvent | None, now_us: int, decided: Sequence[AnyDecision]) -> None:
        if isinstance(event, RequestSubmitted):
            if (
                self._world.requests.get(event.request_id) is not None
            ):  # if not, the event repeats the submission of an ended request
                self._sent.setdefault(event.request_id, [])
        elif isinstance(event, get_args(RequestProgress)):
            self._check_progress(topic, event)
            if isinstance(event, RequestFinished | RequestFailed):
                self._end(event.request_id, now_us)
        elif isinstance(event, CommandDone | CommandRefused):
            self._check_command_result(topic, event)
        for decision in decided:
            match decision:
                case RequestRouted():
                    sent = decision.attempt, decision.worker_id, decision.worker_epoch
                    self._sent.setdefault(decision.request_id, []).append(sent)
                case CommandSent():
                    targets = {target.worker_id: target.worker_epoch for target in decision.targets}
                    self._commands.setdefault(decision.command_id, {}).update(targets)
                case AdapterPlaced():
                    target = {decision.target.worker_id: decision.target.worker_epoch}
                    self._commands[decision.command_id] = self._commands[decision.command_id + UNLOAD] = target
                case RequestAborted() | RequestRejected():
                    self._end(decision.request_id, now_us)
                case _:
                    pass
        self._forget(now_us)

    def _check_progress(self, topic: str, event: RequestProgress) -> None:
        request_id, worker_id, epoch = event.request_id, event.worker_id, event.worker_epoch
        sent = self._sent.get(request_id)
        if request_id in self._before or (event.attempt, worker_id, epoch) in (sent or ()):
            return
        if sent is None:
            is_known = self._world.requests.known_content(request_id) is not None
            if is_known or not is_member(self._world, worker_id, epoch):
                return
        sent = sent or []
        selected = [one for one in sent if one[0] == event.attempt] or sent
        names = [f"{name}, epoch {number}" for _, name, number in selected]
        self._note(topic, event, request_id, event.attempt, names)

    def _check_command_result(self, topic: str, event: CommandDone | CommandRefused) -> None:
        # Compare names only: a worker that was lost and rejoined replies in its new epoch.
        targets = self._commands.get(event.command_id)
        if targets is None:
            if not self._from_begin or not is_member(self._world, event.worker_id, event.worker_epoch):
                return
            targets = {}
        if event.worker_id not in targets:
            names = [f"{name}, epoch {epoch}" for name, epoch in targets.items()]
            self._note(topic, event, event.command_id, 0, names)

    def _note(
        self,
        topic: str,
        event: RequestProgress | CommandDone | CommandRefused,
        about: str,
        attempt: int,
        selected: list[str],
    ) -> None:
        self.count += 1
        if len(self.first) < SHOWN_MAX:
            foreign = ForeignEvent(
                offset=self._world.view[topic] - 1,
                type=str(type(event).__struct_config__.tag),
                about=about,
                attempt=attempt,
                reported_by=event.worker_id,
                reported_epoch=event.worker_epoch,
                selected=selected,
            )
            self.first.append(foreign)

    def _end(self, request_id: str, now_us: int) -> None:
        if self._world.requests.get(request_id) is None:
            self._ended.append((now_us + KEPT_US, request_id))

    def _forget(self, now_us: int) -> None:
        while self._ended and self._ended[0][0] <= now_us:
            _, request_id = self._ended.popleft()
            if self._world.requests.get(request_id) is None:
                self._sent.pop(request_id, None)


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
    reader: JournalReader | None = None
    for span in await spans_of(log, partition, begin, end):
        reader = None
        if not span.is_own:
            other = OtherSpan(rules=span.rules, first=span.first, end=span.end, release=span.release)
            report.others.append(other)
            continue
        reader = JournalReader(log, partition, await span.start(log, partition, custom), span.end)
        await _verify_span(log, partition, reader, report, hasher, progress)
        if report.divergence is not None:
            break
    report.digest = hex_digest(hasher.intdigest())
    if reader is not None:
        await _account_end(log, partition, reader, report)
    return report


async def _verify_span(
    log: Log, partition: int, reader: JournalReader, report: VerifyReport, hasher: xxh3_64, progress: OnProgress | None
) -> None:
    trail = DivergenceTrail(reader)
    foreign = ForeignProgress(reader)
    async for step in reader:
        record = step.record
        is_decision = isinstance(record, AnyDecision)
        report.decisions += is_decision
        report.events += sum(run.count for run in record.consumed)
        divergence = step.divergence
        if divergence is None and isinstance(record, SnapshotRecord):
            divergence = await _check_snapshot(log, partition, step.offset, record, report)
        if divergence is not None:
            report.divergence = trail.report(divergence, step)
            break
        trail.add_verified(step)
        report.claims += isinstance(record, OwnerClaimed)
        report.verified += is_decision
        report.records += 1
        hasher.update(reader.encoded)
        if progress is not None and report.records % PROGRESS_EVERY == 0:
            progress(step.offset + 1, reader.end, report.verified)
    _account(partition, reader, report)
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


def _account(partition: int, reader: JournalReader, report: VerifyReport) -> None:
    report.void += reader.validity.void
    report.repeated += reader.validity.repeated
    for name, count in reader.unverified.items():
        report.unverified[name] = report.unverified.get(name, 0) + count
    for topic in INPUTS:
        events = reader.order.readers.get(topic.name)
        if events is None:
            continue
        report.malformed += events.malformed
        if events.first_unknown is not None and not report.unknown_event:
            offset, tag = events.first_unknown
            report.unknown_event = f"{topic.name}/{partition} offset {offset}: {tag}"
    report.state = hex_digest(reader.world.digest())


async def _account_end(log: Log, partition: int, reader: JournalReader, report: VerifyReport) -> None:
    """Add what the journal's last owner has not applied or written yet. Raises LogError."""
    for topic in INPUTS:
        report.unapplied += await log.end(topic.name, partition) - reader.order.offset(topic.name)
    report.pending = reader.pending
