"""The supervisor starts, restarts and drains processes, and finds them again."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from forebay.planner.actuators import processes, worker_directory
from forebay.planner.actuators.os_processes import PROC, exit_code, recorded_identity, start_process
from forebay.planner.actuators.worker_directory import SupervisedWorker, WorkerDirectory
from forebay.runtime.errors import ConfigError
from tests.planner.stub_worker import CRASH_CODE
from tests.planner.supervised import KEY, LONG_S, PATIENCE_S, POOL, QUICK, Supervised, until

pytestmark = pytest.mark.asyncio

# A worker counts as started or failed only after the test has moved the clock, or after three ends.
UNDECIDED = replace(QUICK, started_s=LONG_S)
GROUP_FOLDER = "org%2Fllama"


async def test_scaling_up_starts_workers_in_their_own_sessions_and_a_repetition_starts_none(
    supervised: Supervised,
) -> None:
    async with supervised.supervisor() as actuator:
        assert (await actuator.scale({KEY: 2})).sizes == {KEY: 2}
        await supervised.started("default-0", "default-1")
        reached = await actuator.scale({KEY: 2})
    assert (reached.sizes, reached.message) == ({KEY: 2}, "")
    running = supervised.running()
    assert sorted(running) == ["default-0", "default-1"]
    assert {os.getsid(pid) for pid in running.values()} == set(running.values())
    output = supervised.state / GROUP_FOLDER / "default-0.log"
    assert output.read_text() == "worker default-0 is running\n"


async def test_scaling_down_drains_the_newest_workers_once(supervised: Supervised) -> None:
    (supervised.folder / "hold").touch()
    async with supervised.supervisor() as actuator:
        for size in (1, 2, 3):
            await actuator.scale({KEY: size})
            await supervised.started_count(size)
        assert (await actuator.scale({KEY: 1})).sizes == {KEY: 1}
        await until(lambda: sorted(supervised.lines("signals")) == ["default-1", "default-2"])
        assert (await actuator.scale({KEY: 1})).sizes == {KEY: 1}, "draining workers do not count"
        await actuator.scale({KEY: 2})
        await supervised.started_count(4)
        assert supervised.starts()[3] == "default-3", "the ids of draining workers are in use"
        (supervised.folder / "hold").unlink()
        await until(lambda: supervised.records() == ["default-0", "default-3"])
        await actuator.scale({KEY: 3})
        await supervised.started_count(5)
        assert supervised.starts()[4] == "default-1"
    assert sorted(supervised.lines("signals")) == ["default-1", "default-2"]
    assert sorted(supervised.running()) == ["default-0", "default-1", "default-3"]


async def test_pools_are_scaled_independently(supervised: Supervised) -> None:
    decode = (KEY[0], "decode")
    async with supervised.supervisor(supervised.pool(), supervised.pool(pool="decode")) as actuator:
        assert actuator.pools == {KEY, decode}
        assert (await actuator.scale({KEY: 1, decode: 2})).sizes == {KEY: 1, decode: 2}
        await supervised.started("default-0", "decode-0", "decode-1")
        assert (await actuator.scale({decode: 0})).sizes == {decode: 0}
        await until(lambda: supervised.records() == ["default-0"])
    assert list(supervised.running()) == ["default-0"]


async def test_the_next_supervisor_finds_workers_and_continues_drains_without_a_second_signal(
    supervised: Supervised,
) -> None:
    (supervised.folder / "hold").touch()
    async with supervised.supervisor() as actuator:
        await actuator.scale({KEY: 3})
        await supervised.started_count(3)
        await actuator.scale({KEY: 2})
        await until(lambda: supervised.lines("signals"))
    before = supervised.running()
    (drained,) = supervised.lines("signals")
    async with supervised.supervisor() as actuator:
        assert actuator.running == 3
        assert (await actuator.scale({KEY: 2})).sizes == {KEY: 2}
        assert supervised.running() == before
        (supervised.folder / "hold").unlink()
        await until(lambda: drained not in supervised.records())
        await actuator.scale({KEY: 3})
        await supervised.started_count(4)
    assert supervised.lines("signals") == [drained]
    assert {name: pid for name, pid in supervised.running().items() if name != drained} == {
        name: pid for name, pid in before.items() if name != drained
    }


async def test_a_drain_that_was_recorded_but_not_signalled_is_done_after_a_restart(supervised: Supervised) -> None:
    async with supervised.supervisor() as actuator:
        await actuator.scale({KEY: 1})
        await supervised.started("default-0")
    directory = await WorkerDirectory.open(supervised.state)
    directory.write(SupervisedWorker(group=KEY[0], pool=POOL, number=0, drain="requested"))
    directory.close()
    async with supervised.supervisor():
        await until(lambda: supervised.records() == [])
    assert supervised.lines("signals") == ["default-0"]


@pytest.mark.parametrize("drain", ["none", "signalled"])
async def test_a_worker_that_ended_without_a_supervisor_is_started_again_unless_it_drained(
    supervised: Supervised, drain: str
) -> None:
    async with supervised.supervisor() as actuator:
        await actuator.scale({KEY: 1})
        await supervised.started("default-0")
        if drain == "signalled":
            (supervised.folder / "hold").touch()
            await actuator.scale({KEY: 0})
    supervised.kill_all()
    await until(lambda: not supervised.running())
    async with supervised.supervisor() as actuator:
        expected = ["default-0"] if drain == "none" else []
        await until(lambda: (supervised.records(), len(supervised.starts())) == (expected, 1 + len(expected)))


@pytest.mark.parametrize("other", ["start time", "boot"])
async def test_a_process_that_reuses_the_pid_of_a_worker_is_not_signalled(supervised: Supervised, other: str) -> None:
    async with supervised.supervisor() as actuator:
        await actuator.scale({KEY: 1})
        await supervised.started("default-0")
    supervised.kill_all()
    await until(lambda: not supervised.running())
    file = supervised.state / GROUP_FOLDER / "default-0.process"
    boot, stat = file.read_text().splitlines()
    with waiting_process() as innocent:
        if other == "boot":
            boot, stat = "another", (PROC / str(innocent.pid) / "stat").read_text()
        else:
            stat = f"{innocent.pid} {stat.partition(' ')[2]}"
        file.write_text(f"{boot}\n{stat}\n")
        async with supervised.supervisor(supervised.pool(kill_after_s=0.0)) as actuator:
            await supervised.started_count(2)
            assert supervised.running()["default-0"] != innocent.pid
            await actuator.scale({KEY: 0})
            await until(lambda: supervised.records() == [])
        assert innocent.poll() is None


@contextmanager
def waiting_process() -> "Iterator[subprocess.Popen[bytes]]":
    with subprocess.Popen([sys.executable, "-SEc", "import signal; signal.pause()"]) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_a_worker_that_does_not_end_is_killed_with_its_children_after_the_limit(supervised: Supervised) -> None:
    (supervised.folder / "hold").touch()
    script = f'sleep 1000 & echo $! >{supervised.folder}/child; exec "$0" "$@"'
    pool = replace(supervised.pool(kill_after_s=LONG_S))
    pool = replace(pool, command=("/bin/sh", "-c", script, *pool.command))
    async with supervised.supervisor(pool, checks=False) as actuator:
        await actuator.scale({KEY: 1})
        await supervised.started("default-0")
        await actuator.scale({KEY: 0})
        await until(lambda: supervised.lines("signals"))
        supervised.clock.monotonic_shift_s += LONG_S / 2
        actuator.check()
        await responds(supervised)
        supervised.clock.monotonic_shift_s += LONG_S
        actuator.check()
        (child,) = supervised.lines("child")
        await until(lambda: not supervised.running() and not Path(f"/proc/{child}/exe").exists())
        actuator.check()
        actuator.check()
    assert supervised.records() == []


async def test_the_next_supervisor_gives_a_drain_the_whole_time_again(supervised: Supervised) -> None:
    (supervised.folder / "hold").touch()
    async with supervised.supervisor(checks=False) as actuator:
        await actuator.scale({KEY: 1})
        await supervised.started("default-0")
        await actuator.scale({KEY: 0})
        await until(lambda: supervised.lines("signals"))
    supervised.clock.monotonic_shift_s += LONG_S / 2
    async with supervised.supervisor(checks=False) as actuator:
        supervised.clock.monotonic_shift_s += LONG_S / 2
        actuator.check()
        await responds(supervised)
        supervised.clock.monotonic_shift_s += LONG_S
        actuator.check()
        await until(lambda: not supervised.running())


async def responds(supervised: Supervised) -> None:
    """Check that the draining worker handles a signal, which it would not do after SIGKILL."""
    os.kill(supervised.running()["default-0"], signal.SIGTERM)
    await until(lambda: len(supervised.lines("signals")) == 2)


async def test_a_worker_that_ends_is_started_again_after_a_growing_bounded_time(supervised: Supervised) -> None:
    restarts = replace(QUICK, backoff_s=1_000.0, backoff_s_max=1_500.0, stable_s=10_000.0)
    async with supervised.supervisor(restarts=restarts, checks=False) as actuator:
        await actuator.scale({KEY: 1})
        await supervised.started("default-0")
        for count, after_s in enumerate((1_000.0, 1_500.0, 1_500.0), start=1):
            os.kill(supervised.running()["default-0"], signal.SIGKILL)
            await until(lambda: not supervised.running())
            for early in (True, False):
                actuator.check()
                assert actuator.running == 0, "too early"
                supervised.clock.monotonic_shift_s += after_s - LONG_S / 10 if early else LONG_S / 10
            actuator.check()
            await supervised.started_count(count + 1)
        assert (await actuator.scale({KEY: 1})).sizes == {KEY: 1}, "it runs at the moment"
        assert supervised.lines("signals") == []
        supervised.clock.monotonic_shift_s += 10_000.0
        actuator.check()
        os.kill(supervised.running()["default-0"], signal.SIGKILL)
        await until(lambda: not supervised.running())
        actuator.check()
        supervised.clock.monotonic_shift_s += 1_000.0
        actuator.check()
        await supervised.started_count(5)


async def test_workers_that_end_at_once_are_given_up_and_the_reply_names_the_cause(supervised: Supervised) -> None:
    async with supervised.supervisor(restarts=UNDECIDED) as actuator:
        await until_started(supervised, actuator, 1)
        (supervised.folder / "crash-default-1").touch()
        supervised.clock.monotonic_shift_s += LONG_S
        reached = await actuator.scale({KEY: 2})
        assert reached.sizes == {KEY: 1}
        assert f"default-1 failed 3 times: it ended with code {CRASH_CODE}" in reached.message
        assert str(supervised.state / GROUP_FOLDER / "default-1.log") in reached.message
        assert supervised.starts().count("default-1") == 3
        await until(lambda: supervised.records() == ["default-0"])
    assert list(supervised.running()) == ["default-0"]


async def until_started(supervised: Supervised, actuator: processes.ProcessActuator, size: int) -> None:
    """Scale up and move the clock, so that the new workers count as started."""
    scaling = asyncio.create_task(actuator.scale({KEY: size}))
    await supervised.started_count(size)
    supervised.clock.monotonic_shift_s += LONG_S
    assert (await scaling).sizes == {KEY: size}


@pytest.mark.parametrize("cause", ["program", "directory"])
async def test_workers_that_cannot_be_started_are_given_up(supervised: Supervised, cause: str) -> None:
    pool = supervised.pool(program="/nowhere/python")
    if cause == "directory":
        supervised.state.mkdir()
        (supervised.state / GROUP_FOLDER).touch()
    async with supervised.supervisor(pool, restarts=UNDECIDED) as actuator:
        reached = await actuator.scale({KEY: 2})
        assert reached.sizes == {KEY: 0}
        expected = "ended with code 127" if cause == "program" else "cannot be started"
        assert reached.message.count(expected) == 2
        await until(lambda: supervised.records() == [])


async def test_workers_that_fail_leave_first(supervised: Supervised) -> None:
    restarts = replace(QUICK, backoff_s=LONG_S, backoff_s_max=LONG_S)
    async with supervised.supervisor(restarts=restarts, checks=False) as actuator:
        await actuator.scale({KEY: 1})
        await supervised.started("default-0")
        await actuator.scale({KEY: 2})
        await supervised.started_count(2)
        os.kill(supervised.running()["default-0"], signal.SIGKILL)
        await until(lambda: list(supervised.running()) == ["default-1"])
        actuator.check()
        assert (await actuator.scale({KEY: 1})).sizes == {KEY: 1}
    assert list(supervised.running()) == supervised.records() == ["default-1"]


async def test_a_supervisor_limits_its_processes(supervised: Supervised, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "WORKERS_MAX", 2)
    async with supervised.supervisor() as actuator:
        reached = await actuator.scale({KEY: 9_999})
        assert reached.sizes == {KEY: 2}
        assert "at most 2 workers" in reached.message
        await supervised.started("default-0", "default-1")


async def test_long_output_is_rotated_while_the_worker_continues(
    supervised: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_directory, "OUTPUT_BYTES_MAX", 5)
    (supervised.folder / "hold").touch()
    async with supervised.supervisor() as actuator:
        await actuator.scale({KEY: 1})
        output = supervised.state / GROUP_FOLDER / "default-0.log"
        await until(lambda: supervised.starts() and output.exists() and not output.stat().st_size)
        assert output.with_name("default-0.log.1").read_text() == "worker default-0 is running\n"
        assert list(supervised.running()) == ["default-0"]


async def test_one_supervisor_uses_a_state_directory(supervised: Supervised) -> None:
    async with supervised.supervisor():
        with pytest.raises(ConfigError, match="another supervisor uses"):
            async with supervised.supervisor():
                pass
    async with supervised.supervisor():
        pass


async def test_a_starting_worker_keeps_the_lock_until_its_identity_is_recorded(tmp_path: Path) -> None:
    directory = await WorkerDirectory.open(tmp_path / "state")
    record = tmp_path / "w.process"
    os.mkfifo(tmp_path / "w.process.new")  # the worker waits here until the test reads
    identity = start_process(
        [sys.executable, "-SEc", ""],
        record=record,
        output=tmp_path / "w.log",
        lock=directory.lock,
        environment={"PATH": "/bin:/usr/bin"},
    )
    directory.close()  # as the end of the supervisor does
    with pytest.raises(ConfigError):
        await WorkerDirectory.open(tmp_path / "state", locked_s=0.0)
    written = tmp_path / "copy"
    written.write_text((tmp_path / "w.process.new").read_text())
    assert recorded_identity(written) == identity
    (await WorkerDirectory.open(tmp_path / "state", locked_s=PATIENCE_S)).close()
    await until(lambda: exit_code(identity) == 0)


async def test_an_unusable_state_directory_is_named(supervised: Supervised) -> None:
    supervised.state.mkdir()
    (supervised.state / "g").mkdir()
    broken = supervised.state / "g" / "default-0.json"
    broken.write_bytes(msgspec.json.encode({"group": "g", "pool": "default"}))
    with pytest.raises(ConfigError, match=r"default-0\.json is not the record of a worker"):
        async with supervised.supervisor():
            pass
    broken.unlink()
    async with supervised.supervisor() as actuator:
        await actuator.scale({KEY: 1})
        await supervised.started("default-0")
    with pytest.raises(ConfigError, match=r"default-0 \(pid \d+\) of an earlier run belongs to the pool"):
        async with supervised.supervisor(supervised.pool(pool="other")):
            pass
    supervised.kill_all()
    await until(lambda: not supervised.running())
    async with supervised.supervisor(supervised.pool(pool="other")) as actuator:
        assert (await actuator.scale({(KEY[0], "other"): 1})).sizes == {(KEY[0], "other"): 1}
        await supervised.started("default-0", "other-0")
    (supervised.folder.parent / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        await WorkerDirectory.open(supervised.folder.parent / "file")
