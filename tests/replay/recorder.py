"""Recordings made without an owner: a history applied event by event, at clock readings that the test chooses."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.step import InputEvent, advance
from forebay.core.world import CORE_VERSION
from forebay.events.base import pack_u64
from forebay.events.codec import encode
from forebay.events.decisions import JournalRecord, OwnerClaimed, SnapshotTaken
from forebay.events.kv import BlocksStored, Tier
from forebay.events.snapshots import SnapshotChunk
from forebay.events.topics import DECISIONS, SNAPSHOTS, topic_named
from forebay.events.versions import EVENTS_VERSION
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import Explanation
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import Driver


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

    async def log(self, path: Path | None = None) -> SqliteLog:
        """Return a log with all records."""
        log = SqliteLog.open(path)
        await log.append([*self.drafts, *(Draft(DECISIONS.name, 0, encode(DECISIONS, one)) for one in self.journal)])
        return log

    async def explain(self, request_id: str, **options: Any) -> Explanation:
        """Explain a request from the log written so far."""
        log = await self.log()
        try:
            return await explain(log, 0, request_id, **options)
        finally:
            log.close()

    def _wrote(self, decided: Sequence[JournalRecord]) -> list[Any]:
        self.journal += decided
        return list(decided)


def report_progress(made: Driver, name: str, kind: type[Any], **fields: Any) -> Any:
    """Apply a progress event from the worker of an active request."""
    one = made.world.requests.get(name)
    assert one is not None
    return kind(
        request_id=name,
        attempt=one.attempt,
        worker_id=one.worker_id,
        worker_epoch=one.worker_epoch,
        owner_epoch=0,
        **fields,
    )


def fleet(*names: str, custom: CustomPolicies = ONLY_BUILT_IN, **router: Any) -> Recorder:
    """Return a pool with workers, by default a, b and c."""
    made = Recorder(custom)
    made.fleet(*(names or ("a", "b", "c")), **router)
    return made


def stored(made: Recorder, worker: str, blocks: list[int], seq: int = 1, tier: Tier = "device") -> None:
    """Announce that a worker has cached these blocks."""
    event = BlocksStored(
        worker_id=worker, worker_epoch=made.epoch(worker), seq=seq, sequence_hashes=pack_u64(blocks), tier=tier
    )
    made("kv-events", event)


def words(explanation: Explanation) -> list[str]:
    """Return the identifiers of the timeline entries in order."""
    return [moment.what for moment in explanation.timeline]
