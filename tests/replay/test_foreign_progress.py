"""`verify` reports progress of workers that were not selected, but not late progress."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.state.fleet import FleetWorker
from forebay.events.base import Event
from forebay.events.codec import encode
from forebay.events.control import Command, WorkerCommanded
from forebay.events.decisions import CommandSent, RequestRouted
from forebay.events.progress import CommandDone, FirstTokenEmitted, RequestFinished
from forebay.events.topics import CONTROL, PROGRESS, Topic
from forebay.live.owner.owner import Owner
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import forebay
from tests.system import MODEL, SLOT, System, submitted, until


class ScriptedSystem(System):
    """System whose workers hold leases and do nothing. The test writes their progress."""

    async def appended(self, topic: Topic, event: Event) -> int:
        (offset,) = await self.log.append([Draft(topic.name, 0, encode(topic, event))])
        return offset

    async def reported(self, owner: Owner, kind: type, about: str, worker: FleetWorker, **fields: Any) -> int:
        """Append progress, wait until the owner has applied it, and return its offset."""
        event = kind(
            request_id=about,
            attempt=fields.pop("attempt", 1),
            worker_id=worker.spec.worker_id,
            worker_epoch=worker.worker_epoch,
            owner_epoch=owner.world.owner_epoch,
            **fields,
        )
        offset = await self.appended(PROGRESS, event)
        await until(lambda: owner.world.view.get(PROGRESS.name, 0) > offset)
        return offset

    async def route(self, owner: Owner, name: str, attempt: int = 1) -> tuple[FleetWorker, FleetWorker]:
        """Wait until a request is routed; return its worker and another."""

        def found() -> list[RequestRouted]:
            return [one for one in self.decisions(RequestRouted) if (one.request_id, one.attempt) == (name, attempt)]

        await until(found)
        members = {worker.spec.worker_id: worker for worker in owner.world.fleet.workers()}
        selected = members.pop(found()[0].worker_id)
        return selected, next(iter(members.values()), selected)


async def record(path: Path, *, foreign: bool) -> list[int]:
    """Write a log at `path`. Return the offsets of its foreign progress, empty if not `foreign`."""
    log = SqliteLog.open(path)
    system, offsets = ScriptedSystem(log), []
    for name in ("a", "b"):
        system.join(name)
    async with system.owned() as owner:
        await until(lambda: len(owner.world.fleet) == 2)
        system.send(submitted("r", [1, 2, 3]))
        selected, other = await system.route(owner, "r")
        if foreign:
            offsets.append(await system.reported(owner, FirstTokenEmitted, "r", other))
        await system.reported(owner, FirstTokenEmitted, "r", selected)
        # The second report is late: the request has ended.
        for _ in range(2):
            await system.reported(owner, RequestFinished, "r", selected, finish_reason="stop")
        if foreign:
            offsets.append(await system.reported(owner, RequestFinished, "r", other, finish_reason="stop"))
            offsets.append(await system.reported(owner, FirstTokenEmitted, "of another model", other))
        # A lost worker reports on its request while another worker runs it.
        system.send(submitted("moved", [4, 5, 6]))
        first, second = await system.route(owner, "moved")
        system.leases.release(MODEL, first.spec.worker_id, first.lease)
        await system.route(owner, "moved", attempt=2)
        await system.reported(owner, FirstTokenEmitted, "moved", first)
        await system.reported(owner, RequestFinished, "moved", second, attempt=2, finish_reason="stop")
        await command(system, owner, second, foreign=foreign, offsets=offsets)
        counted = owner.world.counts["foreign_progress"]
    log.close()
    # The live core forgets ended requests and does not check command responses.
    assert counted == (2 if foreign else 0)
    return offsets


async def command(
    system: ScriptedSystem, owner: Owner, member: FleetWorker, *, foreign: bool, offsets: list[int]
) -> None:
    pause = Command(action="pause")
    commanded = WorkerCommanded(command_id="c", model=MODEL, command=pause, reply_slot=SLOT, timeout_us=60_000_000)
    await system.appended(CONTROL, commanded)
    await until(lambda: system.decisions(CommandSent))
    done = CommandDone(
        command_id="c",
        action="pause",
        worker_id=member.spec.worker_id,
        worker_epoch=member.worker_epoch,
        owner_epoch=owner.world.owner_epoch,
    )
    if foreign:
        offsets.append(await system.appended(PROGRESS, msgspec.structs.replace(done, worker_id="stranger")))
        offsets.append(await system.appended(PROGRESS, msgspec.structs.replace(done, command_id="of another model")))
    last = await system.appended(PROGRESS, done)
    await until(lambda: owner.world.view.get(PROGRESS.name, 0) > last)


@pytest.fixture(scope="module")
def foreign_log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Return a log with foreign progress and the offsets of that progress."""
    path = tmp_path_factory.mktemp("foreign") / "strange.db"
    return path, asyncio.run(record(path, foreign=True))


def test_foreign_progress_fails_the_verification_and_names_both_workers(foreign_log: tuple[Path, list[int]]) -> None:
    path, offsets = foreign_log
    run = forebay("verify", str(path))
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
    assert forebay("verify", str(path), "--allow", "foreign-progress").returncode == 0


def test_the_report_names_the_selected_and_the_reporting_worker(foreign_log: tuple[Path, list[int]]) -> None:
    path, offsets = foreign_log
    report = json.loads(forebay("verify", str(path), "--json").stdout)
    assert (report["divergence"], report["verified"]) == (None, report["decisions"])
    assert report["unverified"] == {"foreign-progress": 5}
    first = report["foreign_progress"][0]
    assert (first["about"], first["attempt"], first["offset"]) == ("r", 1, offsets[0])
    assert first["type"] == "progress.first_token_emitted"
    (selected,) = first["selected"]
    assert {first["reported_by"], selected.split(",")[0]} == {"a", "b"}


def test_late_progress_is_not_reported(tmp_path: Path) -> None:
    path = tmp_path / "late.db"
    assert asyncio.run(record(path, foreign=False)) == []
    run = forebay("verify", str(path))
    assert (run.returncode, "foreign" in run.stdout) == (0, False), run.stdout
