"""Processes of one run, each with its log file: started, killed, paused, and ended whatever happens.

A process that ends by itself is an error, which shows the end of its log.
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
STOP_S = 20.0  # a service finishes what is under way; then it is killed
Found = TypeVar("Found")


class Started(Protocol):
    """A process that was started: the part of `subprocess.Popen` that is used here."""

    @property
    def pid(self) -> int:
        """Process id."""

    @property
    def returncode(self) -> int | None:
        """Exit code, None until `poll` or `wait` has seen the end."""

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises subprocess.TimeoutExpired."""

    def kill(self) -> None:
        """Send SIGKILL."""


# Starts a command as the leader of a process group of its own: the command, and file descriptors for stdout and stderr.
Spawn = Callable[[Sequence[str], int, int], Started]


def spawn(command: Sequence[str], stdout: int, stderr: int) -> Started:
    """Start a command that is killed when this process ends."""
    return subprocess.Popen(
        [*tie(), *command], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )


class ProcessError(Exception):
    """A process ended, or something did not come about; the text says what, and shows logs."""


@dataclass(slots=True)
class Process:
    """One process, the leader of a group of its own.

    Attributes:
        name: unique among those that run.
        log: what it says; `begin` is where its own part of the file starts, in bytes.
        ends: whether it may end by itself.
    """

    name: str
    process: Started
    log: Path
    begin: int
    ends: bool
    paused: bool = False

    def said(self) -> str:
        """All that this process wrote so far."""
        with self.log.open("rb") as file:
            file.seek(self.begin)
            return file.read().decode(errors="replace")

    def last_line(self) -> str:
        """The last thing that it said."""
        return next(iter(reversed(self.said().splitlines())), "(nothing)")

    def family(self) -> list[int]:
        """The process and all that it started, and what those started, as process ids. Linux only."""
        parents = _running()
        found = [self.process.pid]
        for one in found:
            found += [pid for pid, parent in parents.items() if parent == one]
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children."""
        os.killpg(self.process.pid, number)


class Processes:
    """The processes that run, by name; logs lie in `folder`, and `spawn` starts a command."""

    def __init__(self, folder: Path, spawn: Spawn = spawn) -> None:
        self.folder = folder
        self._spawn = spawn
        self._running: dict[str, Process] = {}

    def __getitem__(self, name: str) -> Process:
        return self._running[name]

    def running(self) -> list[Process]:
        """What runs now, in the order in which it was started."""
        return list(self._running.values())

    def __contains__(self, name: str) -> bool:
        return name in self._running

    def start(self, name: str, command: Sequence[str], *, ends: bool = False, output: Path | None = None) -> Process:
        """Start a process; what it writes goes to NAME.log, its stdout to `output` when given."""
        assert name not in self._running, f"{name} runs already"
        log = self.folder / f"{name}.log"
        with log.open("ab") as errors, (output or log).open("ab") as out:
            process = self._spawn(command, out.fileno(), errors.fileno())
            started = self._running[name] = Process(name, process, log, errors.tell(), ends)
        return started

    def check(self) -> None:
        """Raise ProcessError if one ended that should not have."""
        for one in self._running.values():
            if not one.ends and one.process.poll() is not None:
                raise ProcessError(f"{one.name} ended with code {one.process.returncode}: {tail(one.log)}")

    def kill(self, name: str, *, alone: bool = False) -> int:
        """Kill -9; the wall clock in microseconds when that was done.

        Its children die with it, unless it is killed `alone`: then they are for it to have provided for.
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
        """Stop the process where it is (SIGSTOP)."""
        self._running[name].signal(signal.SIGSTOP)
        self._running[name].paused = True

    def resume(self, name: str) -> None:
        """Let a paused process go on (SIGCONT)."""
        self._running[name].signal(signal.SIGCONT)
        self._running[name].paused = False

    async def stop(self, name: str, *, within_s: float = STOP_S) -> None:
        """Ask the process to end (SIGTERM) and wait for it. Raises ProcessError if it does not end, or ends badly."""
        one = self._running[name]
        one.signal(signal.SIGTERM)
        code = await self.ended(name, within_s=within_s)
        if code:
            raise ProcessError(f"{name} ended with code {code} when it was to stop: {tail(one.log)}")

    def ask_to_end(self, name: str) -> None:
        """Ask the process to end (SIGTERM); await `ended` for it, sooner or later."""
        self._running[name].ends = True
        self._running[name].signal(signal.SIGTERM)

    async def ended(self, name: str, *, within_s: float) -> int:
        """Wait for the end of a process: its exit code. Raises ProcessError when it does not come."""
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
        """Wait until the condition gives something true. Raises ProcessError: too late, or a process ended."""
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

    def end_all(self) -> None:
        """End every process: politely, then by force."""
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
    """Those of these processes that have not ended; a zombie has. Linux only."""
    running = _running()
    return [pid for pid in pids if pid in running]


def _running() -> dict[int, int]:
    """The parent of each process that has not ended."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if entry.name.isdigit():
                state, parent, _ = (entry / "stat").read_text().rpartition(")")[2].split(maxsplit=2)
                if state != "Z":
                    found[int(entry.name)] = int(parent)
    return found
