"""Moments and explanations derived from a checkpoint of a catalog equal those derived from the log alone."""

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from forebay.core.routing.policies import ONLY_BUILT_IN
from forebay.events.decisions import RequestRejected, RequestRouted
from forebay.events.progress import RequestFinished
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import REQUESTS
from forebay.journal.start import Start, oldest
from forebay.replay.at import NoSuchRecord, Position, last_time, seek_record, seek_time
from forebay.replay.catalog import checkpoints
from forebay.replay.catalog.follow import Follower
from forebay.replay.catalog.seek import CatalogStates
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import Explanation
from forebay.replay.explain.find import UnknownRequest
from forebay.replay.moment import Moment
from forebay.replay.states import States
from forebay.transport.base import events_of
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import request
from tests.depth import sampled
from tests.logs.own_policy import CUSTOM
from tests.replay import incident
from tests.replay.catalog.scene import RECORDINGS, LogView, busy, catalog_explanation, index, offsets, timed
from tests.replay.recorder import Recorder, fleet, submission_of

SEEDS = range(25)  # two moments each
GOLDEN_SEEDS = range(3)
EXPLAINED = 4  # requests of each recording
DAY_US = 86_400_000_000


class OldestState(States):
    """Begins every derivation at the beginning of the log."""

    async def before(self, offset: int) -> Start:
        return await oldest(self.log, self.partition, CUSTOM)


async def compare(log: SqliteLog, partition: int, follower: Follower, count: int) -> None:
    """Compare the moments at random times and offsets, derived from checkpoints and from the beginning."""
    state, rng = follower.state, random.Random(19)
    last_us = await last_time(log, partition)
    from_begin = OldestState(log, partition)
    for offset in [state.end_offset - 1, *rng.choices(range(state.begin_offset, state.end_offset), k=count)]:
        one = await seek_record(CatalogStates(follower.store, log, partition, CUSTOM), offset)
        if known := [at for at in offsets(follower.store) if at <= offset]:
            assert one.start == known[-1]
        await require_equal(one, await seek_record(from_begin, offset))
        time_us = rng.randint(state.begin_us, last_us)
        one = await seek_time(CatalogStates(follower.store, log, partition, CUSTOM), time_us)
        await require_equal(one, await seek_time(from_begin, time_us))
        plain = await (await seek_time(States(log, partition, CUSTOM), time_us)).moment()
        found = await one.moment()
        assert (found.digest, found.now_us, found.later) == (plain.digest, plain.now_us, plain.later)


async def require_equal(one: Position, other: Position) -> None:
    def comparable(moment: Moment) -> Moment:
        return msgspec.structs.replace(moment, start=0)

    assert comparable(await one.moment()) == comparable(await other.moment())


def comparable(explanation: Explanation) -> Explanation:
    return msgspec.structs.replace(explanation, derived_from=0, unverified={})


@pytest.mark.parametrize("recording", sampled(RECORDINGS, 8), ids=lambda path: path.stem)
@timed
async def test_moments_and_explanations_of_golden_recordings_are_equal(recording: Path, tmp_path: Path) -> None:
    log = SqliteLog.open(recording, readonly=True)
    assert log.recording is not None
    (group,) = log.recording.groups
    partition = group.partition
    follower = await index(log, tmp_path / "catalog", partition)
    assert follower.error == ""
    await compare(log, partition, follower, len(sampled(GOLDEN_SEEDS, 2)))
    submitted = {one.request_id async for _, one in events_of(log, REQUESTS, partition) if is_submission(one)}
    for request_id in sampled(sorted(submitted), EXPLAINED):
        try:
            expected = await explain(States(log, partition, CUSTOM), request_id)
        except UnknownRequest:
            continue
        found = await catalog_explanation(log, partition, follower.store, request_id, custom=CUSTOM)
        assert comparable(found) == comparable(expected)


def is_submission(event: object) -> bool:
    return isinstance(event, RequestSubmitted)


@timed
async def test_moments_of_a_system_are_equal(incident_log: Path, tmp_path: Path) -> None:
    log = SqliteLog.open(incident_log, readonly=True)
    follower = await index(log, tmp_path / "catalog")
    await compare(log, 0, follower, len(sampled(SEEDS, 6)))
    lost = checkpoints.losses_before(follower.store.connection, follower.state.end_offset)
    assert [(one.worker_id, one.requests is None) for one in lost] == [(incident.SLOW, False)]
    for offset in (-1, follower.state.end_offset):
        with pytest.raises(NoSuchRecord):
            await seek_record(CatalogStates(follower.store, log, 0, ONLY_BUILT_IN), offset)


@pytest.fixture
def incident_log(tmp_path: Path) -> Path:
    asyncio.run(incident.record(tmp_path / "incident.db"))
    return tmp_path / "incident.db"


@timed
async def test_a_damaged_checkpoint_is_not_used(tmp_path: Path) -> None:
    log = await busy(60).log()
    follower = await index(log, tmp_path / "catalog")
    *_, previous, newest = offsets(follower.store)
    end = follower.state.end_offset
    assert (await seek_record(CatalogStates(follower.store, log, 0), end - 1)).start == newest
    follower.store.connection.execute("UPDATE checkpoint_parts SET value = zeroblob(9) WHERE offset = ?", (newest,))
    position = await seek_record(CatalogStates(follower.store, log, 0), end - 1)
    assert position.start == previous
    await require_equal(position, await seek_record(OldestState(log, 0), end - 1))


def used_twice() -> Recorder:
    """Return a recorder with two requests of one ID, a day apart, and a rejected duplicate of each."""
    made = fleet("a")
    for number in range(30):
        made.ask(f"request-{number}", [number])
    for number in range(2):
        made("requests", request(f"between-{number}", [number]), after_us=DAY_US)
        assert isinstance(made("requests", request("again", [1, 2, 3]), after_us=DAY_US)[-1], RequestRouted)
        assert isinstance(made.ask("again", [4, 5]), RequestRejected)
        made.progress("again", RequestFinished, finish_reason="stop", output_tokens=1)
    made.seal()
    return made


@timed
async def test_an_id_that_was_used_twice_is_explained_per_use(tmp_path: Path) -> None:
    made = used_twice()
    log = await made.log()
    follower = await index(log, tmp_path / "catalog")
    found = await catalog_explanation(log, 0, follower.store, "again~0.1f")  # the id of its response
    assert comparable(found) == comparable(await explain(States(log, 0), "again"))
    assert (found.earlier_uses, found.derived_from > 0) == (1, True)
    routed = [(at, one) for at, one in enumerate(made.journal) if isinstance(one, RequestRouted)]
    first_use = next(at for at, one in routed if one.request_id == "again")
    first = await catalog_explanation(log, 0, follower.store, "again", journal_offset=first_use)
    assert submission_of(first).offset < submission_of(found).offset
    assert [one.offset for one in first.timeline if one.what == "routed"] == [first_use]
    assert first.earlier_uses == 0


@timed
async def test_records_after_the_end_of_the_catalog_are_found(tmp_path: Path) -> None:
    made = used_twice()
    log = await made.log()
    expected = comparable(await explain(States(log, 0), "again"))
    for end in range(len(made.journal) - 8, len(made.journal)):
        follower = await index(LogView(log, end), tmp_path / f"catalog-{end}")
        assert follower.state.end_offset == end
        assert comparable(await catalog_explanation(log, 0, follower.store, "again")) == expected
        follower.store.close()


@timed
async def test_an_unknown_id_is_compared_with_existing_ids(tmp_path: Path) -> None:
    log = await busy(30).log()
    follower = await index(log, tmp_path / "catalog")
    with pytest.raises(UnknownRequest, match="request-29"):
        await catalog_explanation(log, 0, follower.store, "request-")
