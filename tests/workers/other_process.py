"""Another process, controlled by a test: one line on a socket, one line back.

The processes are forked from a server that has imported what they need. Starting an interpreter and importing NumPy,
NIXL and forebay for each of them costs more CPU time than most of their tests.
"""

import asyncio
import multiprocessing
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from multiprocessing.process import BaseProcess

from tests.harness.hosts import Host

# Only a hang lasts so long: on a busy machine the start of a process alone, with its imports, has taken 40 s.
PATIENCE_S = 150.0
TIMEOUT_S = 400  # of a test that starts some processes, one after another
LINE_BYTES = 1 << 20
# UCX reads the level when it is loaded, which the server does not do.
QUIET = {"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "FATAL"}
MODULES = ["tests.workers.kv_transfer.peer", "nixl_cu12"]

# What a process does with a line: it returns the reply.
Obey = Callable[[str], Awaitable[str]]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(MODULES)


class OtherProcess:
    """Client of the other process, which leads a process group."""

    def __init__(self, process: BaseProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    async def ask(self, line: str) -> str:
        self._writer.write(line.encode() + b"\n")
        async with asyncio.timeout(PATIENCE_S):
            return (await self._reader.readline()).decode().strip()

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.killpg(self._process.pid, number)  # on another host there are two processes

    async def kill(self) -> None:
        if self._process.is_alive():
            self.signal(signal.SIGKILL)
        await asyncio.to_thread(self._process.join)


@asynccontextmanager
async def running(
    module: str, *arguments: str, on: Host | None = None, environment: Mapping[str, str] = QUIET
) -> AsyncIterator[tuple[BaseProcess, asyncio.StreamReader, asyncio.StreamWriter]]:
    """Run `main` of a module in a process of its own, which is killed in the end.

    Args:
        module: has an async function `main`, which is called with the arguments and a socket.
        arguments: of `main`.
        on: host of the process; None for this one.
        environment: variables that are set in addition to those of the test.

    Yields:
        The arguments of `OtherProcess`.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = CONTEXT.Process(
            target=_become, args=(module, arguments, theirs, {**os.environ, **environment}, on), daemon=True
        )
        await asyncio.to_thread(process.start)  # the first start waits for the imports of the server
    reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)
    try:
        # A process that has replied leads its group. One that has ended did not reply.
        if await reader.readline():
            yield process, reader, writer
        else:
            raise AssertionError(f"{module} did not start")
    finally:
        await OtherProcess(process, reader, writer).kill()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def _become(
    module: str, arguments: tuple[str, ...], channel: socket.socket, environment: dict[str, str], on: Host | None
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    if on is not None:
        on.enter()
    channel.sendall(b"ready\n")
    asyncio.run(import_module(module).main(*arguments, channel))


async def serve(channel: socket.socket, obey: Obey) -> None:
    """Reply to each line until the other end is closed."""
    reader, writer = await asyncio.open_connection(sock=channel, limit=LINE_BYTES)
    while line := (await reader.readline()).decode().strip():
        writer.write((await obey(line)).encode() + b"\n")
        await writer.drain()
    writer.close()
