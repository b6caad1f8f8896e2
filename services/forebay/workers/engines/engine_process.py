"""Run an engine in a process of its own.

Theory of operation. Engines share what belongs to a process: environment variables, signal handlers, default ports,
metrics and globals. So each real engine gets a process, which `forebay.workers.engines.engine_host` runs. The worker
talks to it over a socket pair. Each frame is a pickled tuple, because both ends are the same program and nobody else
can reach the socket. The process leads a session of its own. An interrupt from a terminal therefore reaches only the
worker, and all processes of the engine can be killed together, even if they hang. If the worker dies, the socket
closes, and the process of the engine kills its session.

The worker needs some results at once, such as the blocks in the cache. This class computes them from the batches of
the engine. After a reset it ignores batches that the engine sent before it processed the reset.
"""

import asyncio
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, get_args

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from forebay import runtime
from forebay.engine_model.steps import Removed, Stored
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import Tier
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.runtime.metrics import collector
from forebay.workers.engine import CacheChange, Cleared, EngineBatch, EngineError, EngineRefused, KvEngine, Publish
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.kv_transfer.embeddings import Array
from forebay.workers.runtime.media_feed import MediaEngine

logger = logging.getLogger(__name__)

HOST = "forebay.workers.engines.engine_host"
LENGTH_BYTES = 8
STOP_S = 25.0  # for an engine to stop by itself; the worker waits 30 s
EXIT_S = 1.0  # for a process whose socket is closed to exit, and for the last lines of its output
KILLED_S = 5.0
POLL_S = 0.02
LINE_CHARS_MAX = 500  # of the last log line in an error message
READ_BYTES = 1 << 16
LEVELS = ("", "forebay", "forebay.workers")  # loggers whose levels apply to the process of the engine, too
TIERS: tuple[Tier, ...] = get_args(Tier)


def engine_process(module: str, name: str, settings: EngineSettings) -> "EngineProcess":
    """Return an engine of the class `name` of a module, which `start` runs in a process of its own.

    It accepts images and videos, and transfers KV, if the class does.
    """
    engine = getattr(import_module(module), name)
    parts = [part for part, kind in ((_MediaProcess, MediaEngine), (_KvProcess, KvEngine)) if issubclass(engine, kind)]
    made: EngineProcess = type(name, (*parts, EngineProcess), {})(module, name, settings)
    return made


class EngineProcess:
    def __init__(self, module: str, name: str, settings: EngineSettings) -> None:
        self.settings = settings
        self._target = module, name
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._log: _EngineLog | None = None
        self._resets = 0
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._called = 0
        self._metrics: list[Metric] = []
        self._kept = 0
        self._blocks: dict[tuple[int, Tier], dict[int, None]] = defaultdict(dict)
        self._stored: dict[int, None] = {}

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Start the process and the engine, and return the spec of the worker with the engine's actual sizes.

        Raises EngineError if the engine cannot start, or has not started in time. The message contains the last line of
        the engine's log, unless the engine itself reported the cause.
        """
        self._process, self._log, connection = _spawn()
        self._reader, self._writer = await asyncio.open_connection(sock=connection)
        levels = {name: logging.getLogger(name).getEffectiveLevel() for name in LEVELS}
        self._send("start", *self._target, self.settings, spec, levels)
        within_s = self.settings.start_s
        try:
            async with asyncio.timeout(within_s):
                started: WorkerSpec = await self._next("started")
                return started
        except TimeoutError:
            _kill(self._process)  # an engine that hangs does not stop by itself
            limit = f"{within_s:g} s, which --engine-start-s sets"
            raise EngineError(f"the engine did not start within {limit}{self._log.last_line()}") from None

    async def run(self, publish: Publish) -> None:
        """Publish the batches of the engine until cancelled. Raises EngineError if the engine or its process fails."""
        try:
            while True:
                resets, batch = await self._next("batch")
                if resets == self._resets:
                    self._apply(batch)
                    publish(batch)
        finally:
            self._reader = None
            for call in self._calls.values():
                if not call.done():
                    call.set_exception(EngineRefused("the engine died"))

    async def stop(self) -> None:
        """Stop the engine, then kill what is left of its processes. If cancelled, kill them immediately."""
        process = self._process
        if process is None:
            return
        try:
            self._send("stop")
            async with asyncio.timeout(STOP_S):
                await _exited(process)
        except TimeoutError:
            logger.error("the engine did not stop within %g s, so it is killed", STOP_S)  # noqa: TRY400
        finally:
            _kill(process)
            if self._writer is not None:
                self._writer.close()
            self._process = self._reader = self._writer = None
            try:
                await runtime.offload(self._reap, process)
            except asyncio.CancelledError:
                self._reap(process)  # otherwise it might still be there when the event loop ends
                raise

    def held(self, rank: int) -> Sequence[int]:
        return tuple(self._blocks[rank, "device"])

    def held_in_tiers(self, rank: int) -> Sequence[CacheChange]:
        """Return the blocks of a rank in other tiers, as the engine has reported them."""
        others = [(tier, self._blocks[rank, tier]) for tier in TIERS if tier != "device"]
        return [Stored(None, tuple(blocks), tier) for tier, blocks in others if blocks]

    def submit(self, item: WorkItem) -> None:
        self._send("submit", item)

    def cancel(self, request_id: str) -> None:
        self._send("cancel", request_id)

    def stored(self) -> Sequence[int]:
        return tuple(self._stored)

    def reset(self) -> None:
        """Drop every request and clear the cache. Batches from before the call are ignored."""
        self._resets += 1
        self._blocks.clear()
        self._stored.clear()
        self._kept = 0
        self._send("reset", self._resets)

    async def command(self, command: Command) -> tuple[str, ...]:
        loras: tuple[str, ...] = await self._call("command", command)
        return loras

    async def check(self) -> None:
        self._metrics = await self._call("check")

    def collectors(self) -> Sequence[Collector]:
        return (_collected(self._metrics),)

    def _send(self, *message: Any) -> None:
        # Without flow control: an engine that does not read is broken, and fails its next check.
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    async def _call(self, name: str, *arguments: Any) -> Any:
        if self._reader is None:  # nothing reads the reply
            raise EngineRefused("the engine died")
        number = self._called = self._called + 1
        reply = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send("call", number, name, *arguments)
        try:
            return await reply
        finally:
            del self._calls[number]

    async def _next(self, wanted: str) -> Any:
        """Return the content of the next message of a kind, and apply all others.

        Raises EngineError if the engine or its process fails.
        """
        assert self._reader is not None
        assert self._log is not None
        while True:
            try:
                message = await read_frame(self._reader)
            except (EOFError, OSError):
                raise EngineError(await self._death()) from None
            match message:
                case ("log", record):
                    logging.getLogger(record.name).handle(record)
                case ("kept", kept):
                    self._kept = kept
                case ("reply", number, value, error):
                    if (call := self._calls.get(number)) is not None and not call.done():
                        call.set_result(value) if error is None else call.set_exception(error)
                case ("failed", error, is_start):
                    raise error if is_start else type(error)(f"{error}{self._log.last_line()}")
                case (kind, *content):
                    assert kind == wanted
                    return content[0] if len(content) == 1 else content

    async def _death(self) -> str:
        """Kill what is left of the engine, and return how its process ended."""
        assert self._process is not None
        assert self._log is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(EXIT_S):  # it may close its socket before it exits
                await _exited(self._process)
        _kill(self._process)
        await runtime.offload(self._reap, self._process)
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return f"the process of the engine {how}{self._log.last_line()}"

    def _reap(self, process: "subprocess.Popen[bytes]") -> None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
        if self._log is not None:
            self._log.end()

    def _apply(self, batch: EngineBatch) -> None:
        for change in batch.cache_changes:
            match change:
                case Stored(hashes=hashes, tier=tier):
                    self._blocks[batch.rank, tier].update(dict.fromkeys(hashes))
                case Removed(hashes=hashes, tier=tier):
                    for block in hashes:
                        self._blocks[batch.rank, tier].pop(block, None)
                case Cleared():
                    for tier in TIERS:
                        self._blocks[batch.rank, tier].clear()
        for stored in batch.store_changes:
            self._stored.update(dict.fromkeys(stored.stored))
            for block in (*stored.removed, *stored.stale):
                self._stored.pop(block, None)


class _MediaProcess(EngineProcess):
    def submit_embedded(self, item: WorkItem, embeddings: Array) -> None:
        self._send("submit_embedded", item, embeddings)


class _KvProcess(EngineProcess):
    def release(self, request_id: str) -> None:
        self._send("release", request_id)

    def drop(self, prefilled: Prefilled) -> None:
        self._send("drop", prefilled)

    def kept(self) -> int:
        return self._kept


@collector
def _collected(metrics: Sequence[Metric]) -> Sequence[Metric]:
    return metrics


class _EngineLog:
    """Copies the output of an engine's processes to stderr, line by line, and remembers the last line."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._last = ""
        self._thread = threading.Thread(target=self._copy, name="engine log", daemon=True)
        self._thread.start()

    def last_line(self) -> str:
        """Return the last line as the end of an error message; empty if there is none."""
        return f"; the last line of its log: {self._last[:LINE_CHARS_MAX]}" if self._last else ""

    def end(self) -> None:
        self._thread.join(EXIT_S)

    def _copy(self) -> None:
        rest = b""
        with self._output:
            while chunk := os.read(self._output.fileno(), READ_BYTES):
                # A progress bar ends with a carriage return.
                *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
                self._write(lines)
                if len(rest) > READ_BYTES:
                    self._write([rest])
                    rest = b""
        self._write([rest])

    def _write(self, lines: Sequence[bytes]) -> None:
        texts = [text for line in lines if (text := line.decode(errors="replace").rstrip())]
        if texts:
            self._last = texts[-1].strip()
            with suppress(OSError, ValueError):  # stderr is closed
                sys.stderr.write("".join(f"{text}\n" for text in texts))
                sys.stderr.flush()


def _spawn() -> "tuple[subprocess.Popen[bytes], _EngineLog, socket.socket]":
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: S603 - this program
            [sys.executable, "-P", "-m", HOST, str(theirs.fileno())],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    assert process.stdout is not None
    return process, _EngineLog(process.stdout), ours


def frame(message: tuple[Any, ...]) -> bytes:
    packed = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(packed).to_bytes(LENGTH_BYTES, "big") + packed


async def read_frame(reader: asyncio.StreamReader) -> tuple[Any, ...]:
    """Return the next message. Raises EOFError if the other process has ended."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    message: tuple[Any, ...] = pickle.loads(await reader.readexactly(length))  # noqa: S301 - the same program wrote it
    return message


async def _exited(process: "subprocess.Popen[bytes]") -> None:
    """Wait until a process has exited. It keeps its process id, so that `_kill` cannot hit another process group."""
    while _is_running(process):  # noqa: ASYNC110 - a process id sets no event
        await asyncio.sleep(POLL_S)


def _is_running(process: "subprocess.Popen[bytes]") -> bool:
    is_unknown = process.returncode is None
    return is_unknown and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill all processes of an engine, unless the first one was waited for."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):  # macOS: only zombies are left
            os.killpg(process.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """Return an environment with the module path of this process and the current directory."""
    found_in = [*(str(Path(entry).absolute()) for entry in sys.path), str(Path.cwd())]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found_in)}
