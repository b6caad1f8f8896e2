"""Recordings of logs whose snapshots were not finished."""

from pathlib import Path

from forebay.replay.verify.verify import verify
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS, request
from tests.replay.owner_histories import WrittenDriver, log_with
from tests.replay.slices import sliced


async def test_chunks_of_an_abandoned_snapshot_are_not_a_missing_head(tmp_path: Path) -> None:
    drive = WrittenDriver().fleet("a")
    drive("requests", request("one", PROMPTS[0]))
    drive.seal()
    drive.take_over()
    drive("requests", request("two", PROMPTS[0]))
    drive.seal()
    drive.finish_snapshot()
    log = await log_with(drive)
    held = await sliced(log, tmp_path / "out")
    log.close()
    assert (held.groups[0].start, held.groups[0].decisions) == (0, 2)
    copy = SqliteLog.open(tmp_path / "out", readonly=True)
    report = await verify(copy)
    copy.close()
    assert (report.start, report.verified, report.snapshots, report.divergence) == (0, 2, 1, None)
