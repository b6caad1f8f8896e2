"""Mock engines that run in a process of their own, and misbehave as their arguments say.

Each process imports this module, so it imports little.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import Gauge
from prometheus_client.registry import Collector

from forebay.engine_model.model import EngineConfig
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.workers.engine import EngineError
from forebay.workers.engines.engine_process import EngineProcess, engine_process
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.settings import EngineSettings

VARIABLE = "FOREBAY_TEST_ENGINE"
LINE = "loading shard 3 of 9"
PATIENCE_S = 60.0
HOSTED_SPEC = WorkerSpec(
    worker_id="w1", model="m", block_size=4, kv_blocks_total=1, max_num_seqs=1, max_num_batched_tokens=1
)
INSPECT = Command(action="resume")  # returns what the engine finds in its process


def settings(*, start_s: float = PATIENCE_S, **arguments: Any) -> EngineSettings:
    return EngineSettings(model=Path("/m"), model_name="m", start_s=start_s, arguments=arguments)


def hosted(settings: EngineSettings) -> EngineProcess:
    return engine_process(__name__, "HostedEngine", settings)


class HostedEngine(MockEngine):
    """Mock engine that misbehaves in a `phase`, in a `way`.

    It starts another process, as real engines do.
    """

    def __init__(self, settings: EngineSettings) -> None:
        config = EngineConfig(vocabulary=tuple(range(1000, 1100)), block_size=4, kv_blocks_total=32, max_num_seqs=8)
        super().__init__(
            config,
            dp_size=settings.dp_size,
            dp_start_rank=settings.dp_start_rank,
            speedup=settings.arguments.get("speedup", 1000.0),
        )
        self._arguments = settings.arguments
        self._other: subprocess.Popen[bytes] | None = None

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        os.environ[VARIABLE] = spec.worker_id
        self._other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])  # noqa: ASYNC220
        print(LINE, end="\r", flush=True)
        await self._misbehave("start")
        return await super().start(spec)

    async def check(self) -> None:
        await self._misbehave("check")
        await super().check()

    async def stop(self) -> None:
        await self._misbehave("stop")
        await super().stop()

    async def command(self, command: Command) -> tuple[str, ...]:
        if command.action == "pause":
            await self._misbehave("command")
        if command.action == "resume":
            assert self._other is not None
            return (os.environ[VARIABLE], str(os.getpid()), str(self._other.pid))
        return await super().command(command)

    def collectors(self) -> Sequence[Collector]:
        gauge = Gauge("standin_pid", "Process of the engine.", registry=None)
        gauge.set(os.getpid())
        return (gauge,)

    async def _misbehave(self, phase: str) -> None:
        match self._arguments.get(phase):
            case "hang":
                time.sleep(3600)  # noqa: ASYNC251 - the event loop hangs, too
            case "wait":
                await asyncio.Event().wait()
            case "exit":
                os._exit(3)
            case "fail":
                raise EngineError("the weights are broken")
            case "bug":
                raise ZeroDivisionError("1 / 0")
