"""Recordings made without an owner: a history applied event by event, at clock readings that the test chooses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.selection.counterfactual import Alternative
from forebay.core.step import InputEvent, advance, claim
from forebay.core.world import CORE_VERSION
from forebay.events.codec import encode
from forebay.events.control import PoolConfigured
from forebay.events.decisions import JournalRecord, OwnerClaimed, SnapshotTaken
from forebay.events.progress import FirstTokenEmitted, PrefillFinished, RequestFinished
from forebay.events.snapshots import SnapshotChunk
from forebay.events.topics import DECISIONS, SNAPSHOTS, topic_named
from forebay.events.transfer import Prefilled
from forebay.events.versions import EVENTS_VERSION
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import Ending, Explanation, FirstTokenTiming, Submission
from forebay.replay.states import States
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS, Driver, prefilled_by


class Recorder(Driver):
    """Driver that keeps a log of its actions, as an owner would write it."""

    def __init__(self, custom: CustomPolicies = ONLY_BUILT_IN) -> None:
        super().__init__(custom=custom)
        claimed = OwnerClaimed(
            owner_id="test",
            core_version=CORE_VERSION,
            policies=tuple(sorted(custom)),
            events_version=EVENTS_VERSION,
        )
        self.journal: list[JournalRecord] = [claimed]
        self.drafts: list[Draft] = []

    def __call__(
        self, topic: str, event: InputEvent | None, after_us: int = 10, *, journalled: bool = True
    ) -> list[Any]:
        """Apply an event. With `journalled=False` its decisions are lost, as if the owner died before writing them."""
        value = b"\xc1" if event is None else encode(topic_named(topic), event)
        self.drafts.append(Draft(topic, 0, value))
        decided = super().__call__(topic, event, after_us)
        return self._wrote(decided) if journalled else decided

    def wait(self, us: int) -> list[Any]:
        return self._wrote(super().wait(us))

    def of(self, name: str, kind: type[Any], **fields: Any) -> Any:
        """Return a progress event from the worker of an active request."""
        one = self.world.requests.get(name)
        assert one is not None
        if kind is PrefillFinished and "prefilled" not in fields:
            names = [field for field in fields if field in Prefilled.__struct_fields__]
            kept = {"tokens": 34, "bytes": 34_000, **{field: fields.pop(field) for field in names}}
            fields["prefilled"] = prefilled_by(one.worker_id, one.worker_epoch, **kept)
        worker = {"worker_id": one.worker_id, "worker_epoch": one.worker_epoch, "owner_epoch": 0}
        return kind(request_id=name, attempt=one.stage_attempt, **worker, **fields)

    def progress(self, name: str, kind: type[Any], after_us: int = 10, **fields: Any) -> list[Any]:
        """Apply a progress event from the worker of an active request."""
        return self("progress", self.of(name, kind, **fields), after_us)

    def take_over(self, owner_id: str, **fields: Any) -> None:
        """Let another router claim the group."""
        claimed = OwnerClaimed(owner_id=owner_id, core_version=CORE_VERSION, events_version=EVENTS_VERSION, **fields)
        self.journal.append(claimed)
        claim(self.world, len(self.journal) - 1, (), EVENTS_VERSION)

    def seal(self) -> None:
        """Journal the events applied since the last decision."""
        self.journal.append(advance(self.world))

    def snapshot(self) -> None:
        """Write a snapshot, as an owner does when idle."""
        sealed = advance(self.world)
        parts = tuple(self.world.snapshot())
        first = sum(draft.topic == SNAPSHOTS.name for draft in self.drafts)
        chunk = SnapshotChunk(owner_epoch=0, number=0, parts=parts)
        self.drafts.append(Draft(SNAPSHOTS.name, 0, encode(SNAPSHOTS, chunk)))
        self.journal.append(sealed)
        taken = SnapshotTaken(
            **self.world.stamp(),
            first_offset=first,
            chunks=1,
            digest=sealed.digest,
            journal_offset=len(self.journal),
            core_version=CORE_VERSION,
        )
        self.journal.append(taken)

    def records(self) -> list[Draft]:
        """Return the events, then the journal."""
        return [*self.drafts, *self.journal_drafts()]

    def journal_drafts(self) -> list[Draft]:
        return [Draft(DECISIONS.name, 0, encode(DECISIONS, one)) for one in self.journal]

    async def log(self, path: Path | None = None) -> SqliteLog:
        log = SqliteLog.open(path)
        await log.append(self.records())
        return log

    async def explain(self, request_id: str, custom: CustomPolicies = ONLY_BUILT_IN, **options: Any) -> Explanation:
        """Explain a request from the log written so far."""
        log = await self.log()
        try:
            return await explain(States(log, 0, custom), request_id, **options)
        finally:
            log.close()

    def _wrote(self, decided: Sequence[JournalRecord]) -> list[Any]:
        self.journal += decided
        return list(decided)


def fleet(*names: str, custom: CustomPolicies = ONLY_BUILT_IN, **router: Any) -> Recorder:
    """Return a pool with workers, by default a, b and c."""
    made = Recorder(custom)
    made.fleet(*(names or ("a", "b", "c")), **router)
    return made


def outage(seal: int = -1) -> tuple[Recorder, int]:
    """Return a log in which an owner dies, and the time at which the next one claims, after two seconds.

    At the death, `r` has a first token, and `done` has ended. The next owner reads that, and then `late`, which was
    submitted meanwhile.
    """
    made = fleet("a", "b")
    for name in ("r", "done"):
        made.ask(name, PROMPTS[0][:2], timeout_us=60_000_000)
    claimed_us = (begin_us := made.world.now_us) + 3_000_000
    made.take_over("second", at_us=claimed_us, previous_seen_us=begin_us + 1_000_000, seal=seal)
    made.progress("r", FirstTokenEmitted, 3_000_500, at_us=begin_us + 50_000)
    done = made.of("done", RequestFinished, finish_reason="stop", at_us=begin_us + 900_000)
    made("progress", done)
    made("progress", done)  # a repeated record
    made.ask("late", PROMPTS[0][:2], at_us=begin_us + 2_000_000)
    made.progress("r", RequestFinished, finish_reason="stop", at_us=claimed_us + 1_000)
    made.seal()
    return made, claimed_us


def disaggregated(*prefillers: str, **router: Any) -> Recorder:
    """Return a prefill pool, by default of p and q, and a decode pool of d and e."""
    made = Recorder()
    made.disagg(prefillers or ("p", "q"), ("d", "e"), **router)
    return made


def altered(**router: Any) -> Alternative:
    """Return an alternative with other router settings."""

    def alter(pool: PoolConfigured) -> PoolConfigured:
        return msgspec.structs.replace(pool, router=msgspec.structs.replace(pool.router, **router))

    return alter


def words(explanation: Explanation) -> list[str]:
    """Return the identifiers of the timeline entries in order."""
    return [moment.what for moment in explanation.timeline]


def ending_of(explanation: Explanation) -> Ending:
    assert explanation.ending is not None
    return explanation.ending


def first_token_of(explanation: Explanation) -> FirstTokenTiming:
    assert explanation.first_token is not None
    return explanation.first_token


def submission_of(explanation: Explanation) -> Submission:
    assert explanation.submitted is not None
    return explanation.submitted
