"""A moment derived from a checkpoint of a catalog equals the moment derived from the beginning of the log."""

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from forebay.core.routing.policies import ONLY_BUILT_IN
from forebay.events.topics import DECISIONS
from forebay.replay.at import NoSuchRecord, Position
from forebay.replay.at_time import last_time, seek_record, seek_time
from forebay.replay.catalog import checkpoints
from forebay.replay.catalog.follow import Follower
from forebay.replay.catalog.seek import catalog_position
from forebay.replay.moment import Moment
from forebay.replay.walk import Start, StateTime, oldest
from forebay.transport.base import Log
from forebay.transport.sqlite.log import SqliteLog
from tests.logs.own_policy import CUSTOM
from tests.replay import incident
from tests.replay.catalog.following import RECORDINGS, busy, index, offsets, timed

MOMENTS = 50
GOLDEN_MOMENTS = 6  # of each recording


class OldestState:
    """Begins every derivation at the beginning of the log."""

    def __init__(self, log: Log, partition: int) -> None:
        self._log = log
        self._partition = partition

    async def before(self, offset: int) -> Start:
        end = await self._log.end(DECISIONS.name, self._partition)
        return await oldest(self._log, self._partition, end, CUSTOM)

    def by_time(self, time_us: int) -> StateTime | None:
        return None


async def compare(log: SqliteLog, partition: int, follower: Follower, moments: int) -> None:
    """Compare moments at random times and offsets, derived from checkpoints and from the beginning."""
    state, rng = follower.state, random.Random(19)
    last_us = await last_time(log, partition)
    from_begin = OldestState(log, partition)
    for offset in [state.end_offset - 1, *rng.choices(range(state.begin_offset, state.end_offset), k=moments // 2)]:
        one = await catalog_position(log, partition, follower.store, offset=offset, custom=CUSTOM)
        if known := [at for at in offsets(follower.store) if at <= offset]:
            assert one.start == known[-1]
        other = await seek_record(log, partition, offset, CUSTOM, from_begin)
        await require_equal(one, other)
        time_us = rng.randint(state.begin_us, last_us)
        one = await catalog_position(log, partition, follower.store, time_us=time_us, custom=CUSTOM)
        other = await seek_time(log, partition, time_us, CUSTOM, from_begin)
        await require_equal(one, other)
        plain = await (await seek_time(log, partition, time_us, CUSTOM)).moment()
        found = await one.moment()
        assert (found.digest, found.now_us, found.later) == (plain.digest, plain.now_us, plain.later)


async def require_equal(one: Position, other: Position) -> None:
    assert comparable(await one.moment()) == comparable(await other.moment())


def comparable(moment: Moment) -> Moment:
    return msgspec.structs.replace(moment, start=0)


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
@timed
async def test_moments_of_golden_recordings_are_equal(recording: Path, tmp_path: Path) -> None:
    log = SqliteLog.open(recording, readonly=True)
    assert log.recording is not None
    (group,) = log.recording.groups
    follower = await index(log, tmp_path / "catalog", group.partition)
    assert follower.error == ""
    await compare(log, group.partition, follower, GOLDEN_MOMENTS)


@pytest.fixture
def incident_log(tmp_path: Path) -> Path:
    asyncio.run(incident.record(tmp_path / "incident.db"))
    return tmp_path / "incident.db"


@timed
async def test_moments_of_a_system_are_equal(incident_log: Path, tmp_path: Path) -> None:
    log = SqliteLog.open(incident_log, readonly=True)
    follower = await index(log, tmp_path / "catalog")
    await compare(log, 0, follower, MOMENTS)
    lost = checkpoints.losses_before(follower.store.connection, follower.state.end_offset)
    assert [(one.worker_id, one.requests is None) for one in lost] == [(incident.SLOW, False)]
    for offset in (-1, follower.state.end_offset):
        with pytest.raises(NoSuchRecord):
            await catalog_position(log, 0, follower.store, offset=offset, custom=ONLY_BUILT_IN)


@timed
async def test_a_damaged_checkpoint_is_not_used(tmp_path: Path) -> None:
    log = await busy(60).log()
    follower = await index(log, tmp_path / "catalog")
    newest = offsets(follower.store)[-1]
    end = follower.state.end_offset
    assert (await catalog_position(log, 0, follower.store, offset=end - 1)).start == newest
    follower.store.connection.execute("UPDATE checkpoint_parts SET value = zeroblob(9) WHERE offset = ?", (newest,))
    position = await catalog_position(log, 0, follower.store, offset=end - 1)
    assert position.start == offsets(follower.store)[-2]
    await require_equal(position, await seek_record(log, 0, end - 1, CUSTOM, OldestState(log, 0)))
