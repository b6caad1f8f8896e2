"""Processes of one test run, each with its log file, which all end with the run.

A process that ends unexpectedly raises an error that shows the end of its log.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from infra.kafka.kafka import tail, tie

PATIENCE_S = 60.0
POLL_S = 0.05
STOP_S = 20.0  # grace period of a service; then it is killed
Found = TypeVar("Found")


class Started(Protocol):
    """A started process: the part of `subprocess.Popen` that is used here."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """Exit code, None until `poll` or `wait` has seen the end."""

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises subprocess.TimeoutExpired."""

    def kill(self) -> None: ...


# Starts a command as the leader of a process group of its own: the command, and file descriptors for stdout and stderr.
Spawn = Callable[[Sequence[str], int, int], Started]


def spawn(command: Sequence[str], stdout: int, stderr: int) -> Started:
    """Start a command that is killed when this process ends."""
    return subprocess.Popen(
        [*tie(), *command], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )


class ProcessError(Exception):
    """A process ended, or a condition did not become true in time; the message shows the logs."""


@dataclass(slots=True)
class Process:
    """A process that leads its own process group.

    Attributes:
        name: unique among the running processes.
        begin: offset in bytes at which the output of this process starts in `log`.
    """

    name: str
    process: Started
    log: Path
    begin: int
    ends: bool
    paused: bool = False

    def output(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self.begin)
            return file.read().decode(errors="replace")

    def last_line(self) -> str:
        return next(iter(reversed(self.output().splitlines())), "(nothing)")

    def family(self) -> list[int]:
        """Return the process ids of the process and all its descendants. Linux only."""
        return [self.process.pid, *descendants(self.process.pid)]

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)


class Processes:
    """The running processes by name. Logs are in `folder`; `spawn` starts a command."""

    def __init__(self, folder: Path, spawn: Spawn = spawn) -> None:
        self.folder = folder
        self._spawn = spawn
        self._running: dict[str, Process] = {}

    def __getitem__(self, name: str) -> Process:
        return self._running[name]

    def running(self) -> list[Process]:
        """Return the running processes, in the order in which they were started."""
        return list(self._running.values())

    def __contains__(self, name: str) -> bool:
        return name in self._running

    def start(self, name: str, command: Sequence[str], *, ends: bool = False, output: Path | None = None) -> Process:
        """Start a process whose output goes to NAME.log, or its stdout to `output` if given."""
        assert name not in self._running, f"{name} runs already"
        log = self.folder / f"{name}.log"
        with log.open("ab") as errors, (output or log).open("ab") as out:
            begin = errors.tell()  # before the start: the process shares the position in the file
            process = self._spawn(command, out.fileno(), errors.fileno())
            started = self._running[name] = Process(name, process, log, begin, ends)
        return started

    def check(self) -> None:
        for one in self._running.values():
            if not one.ends and one.process.poll() is not None:
                raise ProcessError(f"{one.name} ended with code {one.process.returncode}: {tail(one.log)}")

    def kill(self, name: str, *, alone: bool = False) -> int:
        """Kill a process with SIGKILL; return the wall clock in microseconds.

        Its children are killed too, unless `alone`: then the process itself must have arranged for their end.
        """
        one = self._running.pop(name)
        if alone:
            one.process.kill()
        else:
            one.signal(signal.SIGKILL)
        at_us = time.time_ns() // 1000
        one.process.wait()
        return at_us

    def pause(self, name: str) -> None:
        self._running[name].signal(signal.SIGSTOP)
        self._running[name].paused = True

    def resume(self, name: str) -> None:
        """Resume a paused process (SIGCONT)."""
        self._running[name].signal(signal.SIGCONT)
        self._running[name].paused = False

    async def stop(self, name: str, *, within_s: float = STOP_S) -> None:
        """Terminate the process (SIGTERM) and wait. Raises ProcessError on a timeout or a non-zero exit code."""
        one = self._running[name]
        one.signal(signal.SIGTERM)
        code = await self.ended(name, within_s=within_s)
        if code:
            raise ProcessError(f"{name} ended with code {code} when it was to stop: {tail(one.log)}")

    def ask_to_end(self, name: str) -> None:
        """Send SIGTERM to the process; the caller awaits `ended` later."""
        self._running[name].ends = True
        self._running[name].signal(signal.SIGTERM)

    async def ended(self, name: str, *, within_s: float) -> int:
        """Wait for the end of a process; return its exit code. Raises ProcessError on a timeout."""
        one = self._running[name]
        one.ends = True

        async def code() -> tuple[int] | None:
            ended = one.process.poll()
            return None if ended is None else (ended,)

        (ended,) = await self.until(f"{name} ends", code, within_s=within_s)
        del self._running[name]
        return ended

    async def until(
        self, what: str, condition: Callable[[], Awaitable[Found | None]], *, within_s: float = PATIENCE_S
    ) -> Found:
        """Wait until the condition is truthy; return its value. Raises ProcessError on a timeout or a process's end."""
        deadline = time.monotonic() + within_s
        while True:
            self.check()
            found = await condition()
            if found:
                return found
            if time.monotonic() > deadline:
                logs = "".join(f"\n{one.name}: {one.last_line()}" for one in self._running.values())
                raise ProcessError(f"not within {within_s:g} s: {what}{logs}")
            await asyncio.sleep(POLL_S)

    def tracebacks(self) -> list[str]:
        """Return the names of the processes, ended ones included, whose output has a traceback."""
        return sorted(log.stem for log in self.folder.glob("*.log") if "Traceback (most" in log.read_text())

    def end_all(self) -> None:
        """End every process, with SIGTERM first and SIGKILL after a timeout."""
        for one in self._running.values():
            if one.process.poll() is None:
                one.signal(signal.SIGTERM)
                one.signal(signal.SIGCONT)
        deadline = time.monotonic() + STOP_S
        for one in self._running.values():
            try:
                one.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.signal(signal.SIGKILL)
                one.process.wait()
        self._running.clear()


def still_running(pids: Sequence[int]) -> list[int]:
    """Return the processes of `pids` that have not ended; a zombie counts as ended. Linux only."""
    running = _running()
    return [pid for pid in pids if pid in running]


def descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process that have not ended. Linux only."""
    parents = _running()
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _running() -> dict[int, int]:
    """Return the parent of each process that has not ended."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # the process ended meanwhile
            if entry.name.isdigit():
                state, parent, _ = (entry / "stat").read_text().rpartition(")")[2].split(maxsplit=2)
                if state != "Z":
                    found[int(entry.name)] = int(parent)
    return found
