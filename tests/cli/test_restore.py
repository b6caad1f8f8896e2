"""`forebay restore` without a broker: what it refuses before it connects, and what it prints."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from forebay.cli import restore
from forebay.events.base import Event
from forebay.events.codec import encode
from forebay.events.control import PolicySet, PoolConfigured
from forebay.events.groups import GroupPlaced
from forebay.events.pools import PoolDrainSet
from forebay.events.topics import CONTROL, GROUPS
from forebay.replay.restore import RestoredGroup
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.cli import in_process, up
from tests.cli.logs import made
from tests.harness.local import free_ports
from tests.replay.slices import source_log

POOL = PoolConfigured(pool="default", model="m", block_size=16)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


def write(path: Path, partition: int, *events: Event) -> None:
    """Write a log with a group and its settings."""

    async def append() -> None:
        with closing(SqliteLog.open(path)) as log:
            placed = GroupPlaced(group="m", partition=partition)
            await log.append([Draft(GROUPS.name, 0, encode(GROUPS, placed))])
            await log.append([Draft(CONTROL.name, partition, encode(CONTROL, event)) for event in events])

    asyncio.run(append())


def error(path: Path, *options: str) -> str:
    """Run a restore that fails, and return its error line."""
    run = in_process.forebay("restore", str(path), "--namespace", "new", *options)
    assert (run.returncode, run.stdout) == (2, "")
    (line,) = run.stderr.splitlines()
    return line.removeprefix("forebay: ")


def test_more_control_partitions_than_planned_are_required(path: Path) -> None:
    write(path, 5, POOL)
    assert error(path) == "--partitions groups=4: m uses the control partition 5; expected at least 6"


def test_an_unreachable_broker_and_a_missing_log_are_named(path: Path) -> None:
    assert "no such log file" in error(path)
    write(path, 0, POOL)
    address = f"127.0.0.1:{free_ports(1)}"
    assert error(path, "--kafka", address).startswith(f"Kafka at {address} cannot be used")


def test_an_anonymised_recording_is_refused(tmp_path: Path) -> None:
    made("--anonymize", source_log(tmp_path), tmp_path / "masked.rec")
    assert error(tmp_path / "masked.rec") == (
        "an anonymised recording has masked names of models and pools; use the original recording"
    )


def test_the_report_counts_what_is_restored(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    custom = "package.Policy"
    write(
        path,
        1,
        POOL,
        POOL.with_mode("random"),
        PolicySet(model="m", pool="default", mode=custom),
        PoolDrainSet(model="m", pool="old", drained=True),
    )
    written: list[RestoredGroup] = []

    async def restored(groups: list[RestoredGroup], *_: object) -> int:
        written.extend(groups)
        return 17

    monkeypatch.setattr(restore, "restore_into", restored)
    run = in_process.forebay("restore", str(path), "--namespace", "new")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == [
        "namespace new: 17 topics created, 1 group",
        "group     m: control partition 1, pools default",
        "  restored 1 pools, 1 policies, 0 busy thresholds, 0 disaggregation settings, 0 routing rules, 0 canaries,"
        " 1 drains",
        "  from     4 changes of settings; skipped 0 commands",
        f"  start every router with --allow-policy {custom}",
        "not restored: workers, leases, requests, sessions, caches, and the journal of the planner",
        "next: start routers, workers and ingresses with --namespace new",
    ]
    assert [group.name for group in written] == ["m"]


def test_the_command_runs_as_a_process(path: Path) -> None:
    SqliteLog.open(path).close()
    run = up.forebay("restore", str(path), "--namespace", "new")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "forebay: the log has no group, so there is nothing to restore\n"
