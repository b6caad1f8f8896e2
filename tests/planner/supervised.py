"""A supervisor of stub workers, for tests: start it, end it, and see which workers run."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from forebay import runtime
from forebay.planner.actuators.os_processes import is_running, kill_session, recorded_identity
from forebay.planner.actuators.processes import ProcessActuator, ProcessPool, RestartSettings
from forebay.planner.actuators.worker_directory import WorkerDirectory
from tests.harness.fake_runtime import FakeRuntime

STUB = Path(__file__).with_name("stub_worker.py")
GROUP, POOL = "org/llama", "default"
KEY = (GROUP, POOL)
LONG_S = 3_600.0
PATIENCE_S = 50.0
QUICK = RestartSettings(poll_s=0.002, started_s=0.0, wait_s=PATIENCE_S, backoff_s=0.0)


class Supervised:
    """State directory and stub workers of one test.

    Attributes:
        folder: folder of the files that control the workers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "stub"
        self.folder.mkdir()
        self.state = folder / "state"
        self.clock = FakeRuntime()

    def pool(self, *, pool: str = POOL, program: str = sys.executable, kill_after_s: float = LONG_S) -> ProcessPool:
        return ProcessPool(GROUP, pool, (program, "-SE", str(STUB), str(self.folder)), kill_after_s)

    @asynccontextmanager
    async def supervisor(
        self, *pools: ProcessPool, restarts: RestartSettings = QUICK, checks: bool = True
    ) -> AsyncIterator[ProcessActuator]:
        """Run a supervisor, which looks at its workers by itself unless `checks` is False."""
        with runtime.use(self.clock):
            directory = await WorkerDirectory.open(self.state, locked_s=0.0)
            try:
                actuator = ProcessActuator(pools or [self.pool()], directory, {"PATH": "/bin:/usr/bin"}, restarts)
                task = asyncio.create_task(actuator.run()) if checks else None
                try:
                    yield actuator
                finally:
                    if task is not None:
                        task.cancel()
                        await asyncio.gather(task, return_exceptions=True)
            finally:
                directory.close()

    def running(self) -> dict[str, int]:
        """Return the process id of each running worker."""
        found = {}
        for path in self.state.glob("*/*.process"):
            identity = recorded_identity(path)
            if identity is not None and is_running(identity):
                found[path.stem] = identity.pid
        return found

    def starts(self) -> list[str]:
        """Return the id of each worker that has started so far, in order."""
        return [line.split()[0] for line in self.lines("starts")]

    def lines(self, name: str) -> list[str]:
        """Return the lines of a file that workers write."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_text().splitlines()
        return []

    def records(self) -> list[str]:
        return sorted(path.stem for path in self.state.glob("*/*.json"))

    async def started(self, *workers: str) -> None:
        """Wait until exactly these workers have started, in any order."""
        await until(lambda: sorted(self.starts()) == sorted(workers))

    async def started_count(self, count: int) -> None:
        """Wait until workers have started `count` times."""
        await until(lambda: len(self.starts()) == count)

    def kill_all(self) -> None:
        for path in self.state.glob("*/*.process"):
            identity = recorded_identity(path)
            if identity is not None:
                kill_session(identity)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - processes set no event
            await asyncio.sleep(0.002)
