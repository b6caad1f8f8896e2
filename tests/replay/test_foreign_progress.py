"""`verify` reports progress of workers that were not selected, but not late progress."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from forebay.events.control import Command, WorkerCommanded
from forebay.events.decisions import CommandSent
from forebay.events.fleet import WorkerLost
from forebay.events.progress import CommandDone, FirstTokenEmitted, RequestFinished
from forebay.events.topics import PROGRESS
from tests.core.worlds import PROMPTS, request
from tests.replay.mutations import verify
from tests.replay.recorder import Recorder, fleet


class Reports:
    """A recorder of two workers, of which the test writes the progress."""

    def __init__(self) -> None:
        self.made: Recorder = fleet("a", "b")
        self.epochs = {name: self.made.epoch(name) for name in ("a", "b")}

    def route(self, name: str) -> tuple[str, str]:
        """Route a request; return its worker and the other one."""
        (routed,) = self.made("requests", request(name, PROMPTS[0]))
        return routed.worker_id, "b" if routed.worker_id == "a" else "a"

    def progress(self, kind: type, worker: str, **fields: Any) -> int:
        """Apply an event of a worker, and return its offset."""
        epoch = self.epochs.get(worker, self.epochs["a"])
        self.made("progress", kind(worker_id=worker, worker_epoch=epoch, owner_epoch=0, **fields))
        return self.made.world.view[PROGRESS.name] - 1

    def first_token(self, worker: str, name: str, attempt: int = 1) -> int:
        return self.progress(FirstTokenEmitted, worker, request_id=name, attempt=attempt)

    def finish(self, worker: str, name: str, attempt: int = 1) -> int:
        return self.progress(RequestFinished, worker, request_id=name, attempt=attempt, finish_reason="stop")


def record(path: Path, *, foreign: bool) -> list[int]:
    """Write a log at `path`. Return the offsets of its foreign progress, empty if not `foreign`."""
    reports, offsets = Reports(), list[int]()
    selected, other = reports.route("r")
    if foreign:
        offsets.append(reports.first_token(other, "r"))
    reports.first_token(selected, "r")
    for _ in range(2):  # the second report is late: the request has ended
        reports.finish(selected, "r")
    if foreign:
        offsets += [reports.finish(other, "r"), reports.first_token(other, "of another model")]
    made = reports.made
    first, second = reports.route("moved")
    made("fleet", WorkerLost(owner_epoch=0, worker_id=first, worker_epoch=made.epoch(first)))
    reports.first_token(first, "moved")  # a lost worker reports on its request while another worker runs it
    reports.finish(second, "moved", attempt=2)
    commanded = WorkerCommanded(
        command_id="c", model="m", command=Command(action="pause"), reply_slot=0, timeout_us=60_000_000
    )
    (sent,) = made("control", commanded)
    assert isinstance(sent, CommandSent)
    if foreign:
        offsets.append(reports.progress(CommandDone, "stranger", command_id="c", action="pause"))
        offsets.append(reports.progress(CommandDone, second, command_id="of another model", action="pause"))
    reports.progress(CommandDone, second, command_id="c", action="pause")
    made.seal()
    # The live core forgets ended requests and does not check command responses.
    assert made.world.counts["foreign_progress"] == (2 if foreign else 0)
    asyncio.run(made.log(path)).close()
    return offsets


@pytest.fixture(scope="module")
def foreign_log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Return a log with foreign progress and the offsets of that progress."""
    path = tmp_path_factory.mktemp("foreign") / "strange.db"
    return path, record(path, foreign=True)


def test_foreign_progress_fails_the_verification_and_names_both_workers(foreign_log: tuple[Path, list[int]]) -> None:
    path, offsets = foreign_log
    run = verify(path)
    assert run.returncode == 1
    lines = [line for line in run.stdout.splitlines() if line.startswith("foreign ")]
    assert len(lines) == len(offsets) == 5
    for line, offset in zip(lines, offsets, strict=True):
        assert f"at offset {offset} of progress is from worker " in line
    assert "request r, attempt 1: was sent to " in lines[0]
    assert "request of another model, attempt 1: was sent to no worker of this group" in lines[2]
    assert "command c: was sent to " in lines[3]
    assert "is from worker stranger" in lines[3]
    assert "command of another model: was sent to no worker of this group" in lines[4]
    assert "not verified: 5 foreign-progress" in run.stderr
    assert verify(path, "--allow", "foreign-progress").returncode == 0


def test_the_report_names_the_selected_and_the_reporting_worker(foreign_log: tuple[Path, list[int]]) -> None:
    path, offsets = foreign_log
    report = json.loads(verify(path, "--json").stdout)
    assert (report["divergence"], report["verified"]) == (None, report["decisions"])
    assert report["unverified"] == {"foreign-progress": 5}
    first = report["foreign_progress"][0]
    assert (first["about"], first["attempt"], first["offset"]) == ("r", 1, offsets[0])
    assert first["type"] == "progress.first_token_emitted"
    (selected,) = first["selected"]
    assert {first["reported_by"], selected.split(",")[0]} == {"a", "b"}


def test_late_progress_is_not_reported(tmp_path: Path) -> None:
    path = tmp_path / "late.db"
    assert record(path, foreign=False) == []
    run = verify(path)
    assert (run.returncode, "foreign" in run.stdout) == (0, False), run.stdout
