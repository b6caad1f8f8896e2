"""After a power loss the log of a running system does not contradict itself, and the system continues from it."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from forebay.events.codec import decode
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import WorkerJoined
from forebay.events.tokens import ResponseEnded, TokensEmitted
from forebay.events.topics import DECISIONS, FLEET, REQUESTS, TOKENS, Topic, work_topic
from forebay.events.work import WorkItem
from forebay.live.owner.owner import Owner
from forebay.transport.sqlite.log import SqliteLog
from tests.depth import sampled
from tests.live.shared import SENT, all_ended, opened_one, proven, scenario
from tests.system import SLOT, System, settings, until
from tests.transport.power_loss import Outage

WORK = work_topic("default")
READ_MAX = 100_000


@pytest.fixture(scope="module")
def outage(tmp_path_factory: pytest.TempPathFactory) -> Outage:
    """Return the log of a system that has served requests with two workers, and still runs."""
    path = tmp_path_factory.mktemp("running") / "log.db"

    async def run() -> Outage:
        with closing(SqliteLog.open(path)) as log:
            async with System(log).started(2) as system, system.owned(snapshot_every=9, fleet=2) as owner:
                await scenario(system)
                await until(lambda: all_ended(system, owner))
                log.topics()  # commits pending records
                return Outage(path)

    return asyncio.run(run())


def events(log: SqliteLog, topic: Topic, partition: int) -> list[object]:
    return [decode(topic, one.value) for one in log.records(topic.name, partition, 0, READ_MAX)]


def require_causes(log: SqliteLog) -> None:
    """Check that each effect on the log has its cause: work its decision, output its work, an end its request."""
    journal = [one for one in events(log, DECISIONS, 0) if isinstance(one, RequestRouted)]
    decided = {(one.request_id, one.attempt, one.owner_epoch) for one in journal}
    requests = {getattr(one, "request_id", "") for one in events(log, REQUESTS, 0)}
    joined = [one for one in events(log, FLEET, 0) if isinstance(one, WorkerJoined)]
    items = [one for member in joined for one in events(log, WORK, member.slot) if isinstance(one, WorkItem)]
    assert {(one.request_id, one.attempt, one.owner_epoch) for one in items} <= decided
    output = events(log, TOKENS, SLOT)
    streamed = {chunk.request_id for one in output if isinstance(one, TokensEmitted) for chunk in one.chunks}
    assert streamed <= {one.request_id for one in items}
    assert {one.request_id for one in output if isinstance(one, ResponseEnded)} <= requests
    assert {name for name, *_ in decided} <= requests


def remains(outage: Outage) -> Iterator[bytes]:
    """Yield write-ahead logs as a power loss may leave them, with and without garbage behind the cut."""
    chance = random.Random(20261124)
    wal = outage.wal
    for end in outage.frame_ends:
        yield wal[:end]
        cut = chance.randrange(end)
        yield wal[:cut] + chance.choice((b"", bytes(len(wal) - cut), chance.randbytes(len(wal) - cut)))


async def test_every_prefix_of_the_commits_is_a_log_from_which_an_owner_continues(
    outage: Outage, tmp_path: Path
) -> None:
    path = tmp_path / "log.db"
    cases = list(remains(outage))
    longest = 0
    for wal in sampled(cases, 20):
        outage.restore(path, wal)
        log, standby = await opened_one(path)
        with closing(log):
            require_causes(log)
            await proven(log)
            longest = max(longest, log.next_offset(DECISIONS.name, 0))
            owner = Owner(log, System(log).leases, settings(owner_id="next"))
            await owner.start(standby)
            await owner.close()
            await proven(log)
    assert longest > len(SENT), "the sample includes long prefixes"
