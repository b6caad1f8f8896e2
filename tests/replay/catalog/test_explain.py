"""An explanation derived from a checkpoint of a catalog equals the one derived from a snapshot of the log."""

from pathlib import Path

import msgspec
import pytest

from forebay.events.decisions import RequestRejected, RequestRouted
from forebay.events.progress import RequestFinished
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import REQUESTS
from forebay.replay.catalog.seek import catalog_explanation
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import Explanation
from forebay.replay.explain.find import UnknownRequest
from forebay.transport.history.reader import events_of
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import request
from tests.depth import sampled
from tests.logs.own_policy import CUSTOM
from tests.replay.catalog.following import RECORDINGS, LogView, busy, index, timed
from tests.replay.recorder import Recorder, fleet, submission_of

EXPLAINED = 6  # of each recording
DAY_US = 86_400_000_000


def comparable(explanation: Explanation) -> Explanation:
    return msgspec.structs.replace(explanation, derived_from=0, unverified={})


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
@timed
async def test_explanations_of_golden_recordings_are_equal(recording: Path, tmp_path: Path) -> None:
    log = SqliteLog.open(recording, readonly=True)
    assert log.recording is not None
    (group,) = log.recording.groups
    partition = group.partition
    follower = await index(log, tmp_path / "catalog", partition)
    submitted = [one.request_id async for _, one in events_of(log, REQUESTS, partition) if has_id(one)]
    for request_id in sampled(sorted(set(submitted)), EXPLAINED):
        for thorough in (False, True):
            try:
                expected = await explain(log, partition, request_id, thorough=thorough, custom=CUSTOM)
            except UnknownRequest:
                continue
            found = await catalog_explanation(
                log, partition, follower.store, request_id, thorough=thorough, custom=CUSTOM
            )
            if not thorough:
                found = msgspec.structs.replace(found, others=expected.others)
            assert comparable(found) == comparable(expected)


def has_id(event: object) -> bool:
    return isinstance(event, RequestSubmitted)


def used_twice() -> Recorder:
    """Return a recorder with two requests of one ID, a day apart, and a rejected duplicate of each."""
    made = fleet("a")
    for number in range(30):
        made("requests", request(f"request-{number}", [number]))
    for number in range(2):
        made("requests", request(f"between-{number}", [number]), after_us=DAY_US)
        (routed,) = made("requests", request("again", [1, 2, 3]), after_us=DAY_US)[-1:]
        assert isinstance(routed, RequestRouted)
        (duplicate,) = made("requests", request("again", [4, 5]))
        assert isinstance(duplicate, RequestRejected)
        made.progress("again", RequestFinished, finish_reason="stop", output_tokens=1)
    made.seal()
    return made


@timed
async def test_an_id_that_was_used_twice(tmp_path: Path) -> None:
    made = used_twice()
    log = await made.log()
    follower = await index(log, tmp_path / "catalog")
    expected = await explain(log, 0, "again")
    found = await catalog_explanation(log, 0, follower.store, "again")
    assert comparable(found) == comparable(expected)
    assert (found.earlier_uses, found.derived_from > 0) == (1, True)
    uses = [
        at
        for at, record in enumerate(made.journal)
        if isinstance(record, RequestRouted) and record.request_id == "again"
    ]
    first = await catalog_explanation(log, 0, follower.store, "again", journal_offset=uses[0])
    assert submission_of(first).offset < submission_of(found).offset
    assert [one.offset for one in first.timeline if one.what == "routed"] == [uses[0]]
    assert first.earlier_uses == 0


@timed
async def test_records_after_the_end_of_the_catalog_are_found(tmp_path: Path) -> None:
    made = used_twice()
    log = await made.log()
    for end in range(len(made.journal) - 8, len(made.journal)):
        follower = await index(LogView(log, end), tmp_path / f"catalog-{end}")
        assert follower.state.end_offset == end
        found = await catalog_explanation(log, 0, follower.store, "again")
        assert comparable(found) == comparable(await explain(log, 0, "again"))
        follower.store.close()


@timed
async def test_an_unknown_id_is_compared_with_existing_ids(tmp_path: Path) -> None:
    log = await busy(30).log()
    follower = await index(log, tmp_path / "catalog")
    with pytest.raises(UnknownRequest, match="request-29"):
        await catalog_explanation(log, 0, follower.store, "request-")
