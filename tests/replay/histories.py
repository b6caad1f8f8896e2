"""Generated histories in the form an owner writes to the log: inputs, journal, digests and snapshots."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.core.step import AnyDecision, advance, claim, open_run, step
from forebay.core.world import CORE_VERSION, World
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.decisions import Advanced, JournalRecord, OwnerClaimed, SnapshotTaken
from forebay.events.snapshots import SnapshotChunk
from forebay.events.topics import DECISIONS, INPUTS, SNAPSHOTS, topic_named
from forebay.events.versions import EVENTS_VERSION
from forebay.replay.verify.verify import VerifyReport, verify
from forebay.transport.base import Draft
from forebay.transport.history.reader import decode_or_none
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import Driver, perform

GARBAGE = b"\xc1 no event"
DIGEST_EVERY, SNAPSHOT_EVERY, CLAIM_EVERY = 7, 25, 40  # actions

Topics = dict[str, list[bytes]]


class Written:
    """The records of each topic while a history is generated. Histories with other names have other owners."""

    def __init__(self, name: str = "history") -> None:
        self.name = name
        self.topics: Topics = {}
        self.drive = Driver()
        self._claim("one")
        self._applied = self._decided = 0

    def apply_action(self, number: int, action: tuple[str, Any]) -> None:
        """Apply an action and write the records an owner would write for it."""
        perform(self.drive, number, action)
        for topic, event, _ in self.drive.applied[self._applied :]:
            value = GARBAGE if event is None else encode(topic_named(topic), event)
            self.topics.setdefault(topic, []).append(value)
        self._applied = len(self.drive.applied)
        for record in self.drive.decided[self._decided :]:
            self._journal(record)
        self._decided = len(self.drive.decided)
        if number % DIGEST_EVERY == 0:
            self._journal(advance(self.drive.world))
        if number % SNAPSHOT_EVERY == SNAPSHOT_EVERY - 1:
            self.seal()
        if number % CLAIM_EVERY == CLAIM_EVERY - 1:
            self._claim("another")

    def _claim(self, owner_id: str) -> None:
        world, offset = self.drive.world, len(self.topics.get(DECISIONS.name, ()))
        claimed = OwnerClaimed(
            owner_id=owner_id,
            core_version=CORE_VERSION,
            events_version=EVENTS_VERSION,
            owner_nonce=f"{self.name}-{offset}",
            previous_nonce=world.owner_nonce,
        )
        claim(world, offset, (), EVENTS_VERSION, claimed.owner_nonce)
        self._journal(claimed)

    def seal(self) -> None:
        """Write a snapshot of the current state."""
        world, chunks = self.drive.world, self.topics.setdefault(SNAPSHOTS.name, [])
        sealed = advance(world)
        self._journal(sealed)
        journal_offset, first = len(self.topics[DECISIONS.name]), len(chunks)
        for number, part in enumerate(world.snapshot()):
            chunk = SnapshotChunk(
                owner_epoch=world.owner_epoch, number=number, parts=(part,), snapshot_id=sealed.digest
            )
            chunks.append(encode(SNAPSHOTS, chunk))
        taken = SnapshotTaken(
            **world.stamp(),
            first_offset=first,
            chunks=len(chunks) - first,
            digest=sealed.digest,
            journal_offset=journal_offset,
            core_version=CORE_VERSION,
            snapshot_id=sealed.digest,
        )
        self._journal(taken)

    def _journal(self, record: JournalRecord) -> None:
        self.topics.setdefault(DECISIONS.name, []).append(encode(DECISIONS, record))


def written(history: Sequence[tuple[str, Any]], name: str = "history") -> Topics:
    """Return the log of a history, sealed at its end."""
    happening = Written(name)
    for number, action in enumerate(history):
        happening.apply_action(number, action)
    happening.seal()
    return happening.topics


async def put(log: SqliteLog, topics: Mapping[str, Sequence[bytes]]) -> None:
    """Write topics to a log."""
    for topic, values in topics.items():
        await log.append([Draft(topic, 0, value) for value in values])


def verified(topics: Mapping[str, Sequence[bytes]]) -> VerifyReport:
    """Return the verification report of these topics.

    Raises:
        LogError: the log is incomplete.
    """

    async def run() -> VerifyReport:
        log = SqliteLog.open(None)
        try:
            await put(log, topics)
            return await verify(log)
        finally:
            log.close()

    return asyncio.run(run())


def journal_follows(topics: Mapping[str, Sequence[bytes]]) -> bool:
    """Return whether the journal follows from the events in the recorded order, checked by an independent loop."""
    world = World()
    ahead = {topic.name: deque(topics.get(topic.name, ())) for topic in INPUTS}
    expected: deque[AnyDecision] = deque()
    for offset, value in enumerate(topics[DECISIONS.name]):
        try:
            record = decode(DECISIONS, value)
        except DecodeError:
            return False
        if isinstance(record, OwnerClaimed):
            if record.previous_nonce == world.owner_nonce:
                claim(world, offset, (), record.events_version, record.owner_nonce)
            continue
        number = expected[0].seq if expected else world.seq
        if (record.owner_epoch, record.owner_nonce) != (world.owner_epoch, world.owner_nonce) or record.seq < number:
            continue
        for run in record.consumed:
            expected += open_run(world, run.now_us)
            for _ in range(run.count):
                if not ahead[run.topic]:
                    return False
                event = decode_or_none(topic_named(run.topic), ahead[run.topic].popleft())
                expected += step(world, run.topic, event, run.now_us)
        if isinstance(record, Advanced):
            if record != advance(world):
                return False
        elif isinstance(record, SnapshotTaken):
            if any(getattr(record, name) != value for name, value in world.stamp().items()):
                return False
        elif not expected or expected.popleft() != record:
            return False
    return True
