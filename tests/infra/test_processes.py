"""Processes of a cluster end with their run, and an unexpected end is detected."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.processes import ProcessError, Processes

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


async def first_output(processes: Processes, name: str) -> str:
    """Wait for the first output line of a process and return it."""

    async def line() -> str | None:
        text = processes[name].output()
        return text.strip() if text.endswith("\n") else None

    return await processes.until(f"{name} writes a line", line)


def state(pid: int) -> str:
    """Return the state letter of a process, or an empty string if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


async def test_an_unexpected_end_is_reported_with_the_end_of_the_log(processes: Processes) -> None:
    processes.start("fragile", [sys.executable, "-c", "raise SystemExit('the reason')"])

    async def never() -> bool:
        return False

    with pytest.raises(ProcessError, match=r"(?s)fragile ended with code 1: .*the reason"):
        await processes.until("pigs fly", never)


async def test_a_command_ends_with_its_code_and_output(processes: Processes, tmp_path: Path) -> None:
    output = tmp_path / "out"
    script = "import sys; print('out'); sys.stderr.write('err'); sys.exit(3)"
    process = processes.start("command", [sys.executable, "-c", script], ends=True, output=output)
    assert await processes.ended("command", within_s=30) == 3
    assert (output.read_text(), process.output()) == ("out\n", "err")
    assert "command" not in processes


async def test_all_processes_end_even_paused_ones_and_those_that_ignore_sigterm(
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
        await first_output(processes, one.name)
    child = int(processes["parent"].output())
    processes.pause("paused")
    processes.end_all()
    assert {one.process.returncode for one in started} == {-15, -9}
    assert not any(name in processes for name in ("polite", "paused", "stubborn", "parent"))

    async def ended() -> bool:
        return state(child) in {"", "Z"}  # another process reaps an orphan

    await processes.until("the child has ended too", ended)
