"""Processes of a cluster: nothing outlives its run, and what ends by itself is noticed."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.processes import ProcessError, Processes, still_running

SLEEPS = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(600)"]
IGNORES = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
WITH_CHILD = (
    "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print(child.pid, flush=True); time.sleep(600)"
)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    running = Processes(tmp_path)
    yield running
    running.end_all()


async def said(processes: Processes, name: str) -> str:
    """The first line of a process."""

    async def line() -> str | None:
        text = processes[name].said()
        return text.strip() if text.endswith("\n") else None

    return await processes.until(f"{name} speaks", line)


def state(pid: int) -> str:
    """The state letter of a process, empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


async def test_what_ends_by_itself_is_named_with_the_end_of_its_log(processes: Processes) -> None:
    processes.start("fragile", [sys.executable, "-c", "raise SystemExit('the reason')"])

    async def never() -> bool:
        return False

    with pytest.raises(ProcessError, match=r"(?s)fragile ended with code 1: .*the reason"):
        await processes.until("pigs fly", never)


async def test_what_does_not_come_about_is_named(processes: Processes) -> None:
    processes.start("one", SLEEPS)
    await said(processes, "one")

    async def never() -> bool:
        return False

    with pytest.raises(ProcessError, match=r"not within 0 s: pigs fly\none: ready"):
        await processes.until("pigs fly", never, within_s=0)


async def test_a_command_ends_with_its_code_and_output(processes: Processes, tmp_path: Path) -> None:
    output = tmp_path / "out"
    script = "import sys; print('out'); sys.stderr.write('err'); sys.exit(3)"
    process = processes.start("command", [sys.executable, "-c", script], ends=True, output=output)
    assert await processes.ended("command", within_s=30) == 3
    assert (output.read_text(), process.said()) == ("out\n", "err")
    assert "command" not in processes


async def test_a_process_is_paused_and_goes_on(processes: Processes) -> None:
    process = processes.start("one", SLEEPS)
    await said(processes, "one")
    processes.pause("one")

    async def stopped() -> bool:
        return state(process.process.pid) == "T"

    await processes.until("one is stopped", stopped)
    processes.resume("one")

    async def goes_on() -> bool:
        return state(process.process.pid) != "T"

    await processes.until("one goes on", goes_on)


async def test_a_name_is_used_again_and_its_log_goes_on(processes: Processes) -> None:
    first = processes.start("one", SLEEPS)
    await said(processes, "one")
    processes.kill("one")
    second = processes.start("one", SLEEPS)
    await said(processes, "one")
    assert (first.log, second.said()) == (second.log, "ready\n")
    assert second.log.read_text() == "ready\nready\n"


async def test_everything_ends_also_what_is_paused_or_does_not_listen(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.harness.processes.STOP_S", 0.5)
    started = [
        processes.start("polite", SLEEPS),
        processes.start("paused", SLEEPS),
        processes.start("stubborn", [sys.executable, "-c", IGNORES]),
        processes.start("parent", [sys.executable, "-c", WITH_CHILD]),
    ]
    for one in started:
        await said(processes, one.name)
    child = int(processes["parent"].said())
    processes.pause("paused")
    processes.end_all()
    assert {one.process.returncode for one in started} == {-15, -9}
    assert not any(name in processes for name in ("polite", "paused", "stubborn", "parent"))

    async def gone() -> bool:
        return state(child) in {"", "Z"}  # an orphan is buried by somebody else

    await processes.until("the child is gone too", gone)


async def test_a_process_killed_alone_leaves_its_children_to_be_seen(processes: Processes) -> None:
    one = processes.start("parent", [sys.executable, "-c", WITH_CHILD])
    child = int(await said(processes, "parent"))
    family = one.family()
    assert family == [one.process.pid, child] == still_running(family)
    processes.kill("parent", alone=True)
    assert still_running(family) == [child]
    os.kill(child, signal.SIGKILL)

    async def gone() -> bool:
        return not still_running(family)

    await processes.until("the child is gone", gone)


async def test_a_service_that_stops_badly_is_an_error(processes: Processes) -> None:
    processes.start("one", [sys.executable, "-c", "import signal; signal.pause()"])
    with pytest.raises(ProcessError, match="one ended with code -15 when it was to stop"):
        await processes.stop("one")
