"""Generated histories in the form an owner writes to the log: inputs, journal, digests and snapshots."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.core.step import AnyDecision, advance, claim, open_run, step
from forebay.core.world import World
from forebay.events.codec import DecodeError, decode
from forebay.events.decisions import Advanced, OwnerClaimed, SnapshotTaken
from forebay.events.topics import DECISIONS, INPUTS, topic_named
from forebay.replay.verify.verify import VerifyReport, verify
from forebay.transport.base import Draft
from forebay.transport.history.reader import decode_or_none
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import perform
from tests.replay.owner_histories import WrittenDriver

DIGEST_EVERY, SNAPSHOT_EVERY, CLAIM_EVERY = 7, 25, 40  # actions

Topics = dict[str, list[bytes]]


def written(history: Sequence[tuple[str, Any]], name: str = "history") -> Topics:
    """Return the log of a history, sealed at its end. Histories with other names have other owners."""
    drive = WrittenDriver(name=name)
    for number, action in enumerate(history):
        perform(drive, number, action)
        if number % DIGEST_EVERY == 0:
            drive.write(advance(drive.world))
        if number % SNAPSHOT_EVERY == SNAPSHOT_EVERY - 1:
            drive.seal()
            drive.finish_snapshot()
        if number % CLAIM_EVERY == CLAIM_EVERY - 1:
            drive.take_over()
    drive.seal()
    drive.finish_snapshot()
    topics: Topics = {}
    for draft in drive.drafts:
        topics.setdefault(draft.topic, []).append(draft.value)
    return topics


async def put(log: SqliteLog, topics: Mapping[str, Sequence[bytes]]) -> None:
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
