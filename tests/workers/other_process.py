"""Another process, controlled by a test: one line to its standard input, one line back."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

# Only a hang lasts so long: on a busy machine the start of a process alone, with its imports, has taken 40 s.
PATIENCE_S = 150.0
TIMEOUT_S = 400  # of a test that starts some processes, one after another
ROOT = Path(__file__).resolve().parents[2]


class OtherProcess:
    """Client of the other process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line.encode() + b"\n")
        async with asyncio.timeout(PATIENCE_S):
            return (await self.process.stdout.readline()).decode().strip()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


@asynccontextmanager
async def running(module: str, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A module of the tests as a process of its own, which is killed in the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        cwd=ROOT,
        env={**os.environ, "NIXL_LOG_LEVEL": "ERROR"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
