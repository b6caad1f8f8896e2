"""Transports in this process and in others."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.events.transfer import Prefilled
from forebay.workers.kv_transfer.api import Kind, KvTransport, Stats
from forebay.workers.kv_transfer.transport import open_transport
from tests.workers.kv_transfer.peer import content, fill, packed, unpacked

PATIENCE_S = 30.0
ROOT = Path(__file__).resolve().parents[3]
BLOCK_BYTES = 4096
BLOCKS = 64


class Other:
    """A process with a transport."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line.encode() + b"\n")
        async with asyncio.timeout(PATIENCE_S):
            return (await self.process.stdout.readline()).decode().strip()

    async def offer(self, request_id: str, blocks: Sequence[int], *, checksum: bool = False) -> Prefilled:
        line = f"offer {request_id} {','.join(map(str, blocks))} {'sums' if checksum else '-'}"
        return unpacked(await self.ask(line), Prefilled)  # type: ignore[no-any-return]

    async def fetch(self, prefilled: Prefilled, into: Sequence[int]) -> str:
        return await self.ask(f"fetch {packed(prefilled)} {','.join(map(str, into))}")

    async def stats(self) -> tuple[Stats, dict[str, int]]:
        return unpacked(await self.ask("stats"), tuple[Stats, dict[str, int]])  # type: ignore[no-any-return]

    async def gave_back(self, why: str, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await self.stats())[1].get(why, 0) < count:
                pass

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def other(
    kind: Kind, name: str, *, block_bytes: int = BLOCK_BYTES, blocks: int = BLOCKS, lease_s: float = 60.0
) -> AsyncIterator[Other]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.workers.kv_transfer.peer"),
        cwd=ROOT,
        env={**os.environ, "NIXL_LOG_LEVEL": "ERROR", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    try:
        one = Other(process)
        assert await one.ask(f"open {kind} {name} {block_bytes} {blocks} {lease_s}") == "done"
        yield one
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def transport(kind: Kind, name: str, **changes: Any) -> AsyncIterator[tuple[KvTransport, list[tuple[str, str]]]]:
    """A transport of this process, and what it has given back."""
    given_back: list[tuple[str, str]] = []
    options: dict[str, Any] = {"block_bytes": BLOCK_BYTES, "blocks": BLOCKS, "fetch_s": PATIENCE_S, **changes}
    one = await open_transport(kind, name=name, on_given_back=lambda *what: given_back.append(what), **options)
    try:
        fill(one, 2)
        yield one, given_back
    finally:
        await one.close()


def have(one: KvTransport, into: Sequence[int], blocks: Sequence[int], seed: int = 1) -> bool:
    """Whether what a peer filled with a seed has come."""
    wanted = [content(seed, block, one.memory.block_bytes) for block in blocks]
    return all(np.array_equal(one.memory.view(mine), bytes_) for mine, bytes_ in zip(into, wanted, strict=True))


@pytest.fixture(params=["nixl", "tcp"])
def kind(request: pytest.FixtureRequest) -> Kind:
    """Every way that bytes go."""
    return request.param  # type: ignore[no-any-return]
