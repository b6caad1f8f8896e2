"""Process of one engine, started by `forebay.workers.engines.engine_process`, which describes the messages."""

import asyncio
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from logging.handlers import QueueHandler
from typing import Any

import uvloop

from forebay.engine_model.steps import EngineLoad, Stored
from forebay.events.fleet import WorkerSpec
from forebay.runtime.errors import cause_of
from forebay.workers.engine import EngineBatch, EngineError, EngineRefused, KvEngine, one_line
from forebay.workers.engines.engine_process import HOST, frame, read_frame
from forebay.workers.engines.settings import EngineSettings

KEPT_S = 0.1  # interval at which a worker that drains looks whether KV is kept


class _Host:
    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._engine: Any = None
        self._spec: WorkerSpec | None = None
        self._resets = 0
        self._serving: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()

    async def follow(self, reader: asyncio.StreamReader) -> None:
        """Apply the messages of the other process until it requests a stop."""
        while True:
            match await read_frame(reader):
                case ("start", module, name, settings, spec, levels):
                    self._configure_logs(levels)
                    self._serving = asyncio.create_task(self._serve(module, name, settings, spec))
                case ("call", number, name, *arguments):
                    task = asyncio.create_task(self._call(number, name, arguments))
                    self._calls.add(task)
                    task.add_done_callback(self._calls.discard)
                case ("reset", resets):
                    self._reset(resets)
                case ("stop",):
                    return
                case (name, *arguments):
                    getattr(self._engine, name)(*arguments)

    async def stop(self) -> None:
        for task in (self._serving, *self._calls):
            if task is not None:
                task.cancel()
        await asyncio.gather(*filter(None, (self._serving, *self._calls)), return_exceptions=True)
        if self._engine is not None:
            await self._engine.stop()

    def send(self, *message: Any) -> None:
        """Send a message. Call this method on the event loop."""
        self._writer.write(frame(message))

    def _configure_logs(self, levels: dict[str, int]) -> None:
        send, loop, own_thread = self.send, self._loop, threading.get_ident()

        class Handler(QueueHandler):
            """Sends each record to the worker, which writes it in its own format."""

            def enqueue(self, record: logging.LogRecord) -> None:
                """Send a record from any thread, on the thread of the event loop before any later message."""
                if threading.get_ident() == own_thread:
                    send("log", record)
                    return
                with suppress(RuntimeError):  # the event loop has ended
                    loop.call_soon_threadsafe(send, "log", record)

        logging.basicConfig(handlers=[Handler(None)])  # type: ignore[arg-type]  # there is no queue
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)

    async def _serve(self, module: str, name: str, settings: EngineSettings, spec: WorkerSpec) -> None:
        is_start = True
        try:
            engine = getattr(import_module(module), name)(settings)
            self._engine = engine
            self._spec = await engine.start(spec)
            self.send("started", self._spec)
            is_start = False
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(engine.run(self._publish))
                if isinstance(engine, KvEngine):
                    tasks.create_task(self._report_kept(engine.kept))
        except Exception as error:  # noqa: BLE001 - engines raise what they like, and this process ends
            self.send("failed", _portable(error), is_start)

    def _publish(self, batch: EngineBatch) -> None:
        self.send("batch", self._resets, batch)

    async def _report_kept(self, kept: Callable[[], int]) -> None:
        reported = 0
        while True:
            if (now := kept()) != reported:
                reported = now
                self.send("kept", now)
            await asyncio.sleep(KEPT_S)

    def _reset(self, resets: int) -> None:
        self._engine.reset()
        self._resets = resets
        assert self._spec is not None
        for rank in self._spec.ranks:
            if held := tuple(self._engine.held(rank)):
                load = EngineLoad(0, 0, 0, self._spec.kv_blocks_total)
                self._publish(EngineBatch(rank=rank, load=load, cache_changes=[Stored(None, held)]))

    async def _call(self, number: int, name: str, arguments: list[Any]) -> None:
        try:
            value = await getattr(self._engine, name)(*arguments)
            if name == "check":
                value = [metric for collector in self._engine.collectors() for metric in collector.collect()]
        except Exception as error:  # noqa: BLE001 - engines raise what they like
            self.send("reply", number, None, _portable(error))
        else:
            self.send("reply", number, value, None)


def _portable(error: BaseException) -> Exception:
    """Return an error that the other process can raise, which may not have the packages of the engine."""
    error = cause_of(error, EngineError)
    if isinstance(error, EngineError | EngineRefused):
        return type(error)(str(error))
    logging.getLogger(HOST).error("the engine failed unexpectedly", exc_info=error)
    return EngineError(f"the engine failed unexpectedly: {type(error).__name__}: {one_line(error)}")


def _end_with_worker(connection: socket.socket) -> None:
    """Kill all processes of the engine once the worker is dead. A thread notices that while the event loop is busy."""
    hang_up = select.poll()
    hang_up.register(connection, 0)  # only the end of the connection
    hang_up.poll()
    os.killpg(0, signal.SIGKILL)


async def _host(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):  # a supervisor may signal every process; the worker stops this one
        loop.add_signal_handler(number, lambda: None)
    reader, writer = await asyncio.open_connection(sock=connection)
    host = _Host(writer)
    try:
        await host.follow(reader)
    except (EOFError, ConnectionError):
        os.killpg(0, signal.SIGKILL)  # the worker is dead
    await host.stop()


def main() -> None:
    """Run the engine of the worker at the other end of the socket whose number is the argument."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    watched = connection.dup()
    threading.Thread(target=_end_with_worker, args=[watched], name="end-with-worker", daemon=True).start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_host(connection))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of the engine may hang


if __name__ == "__main__":
    main()
