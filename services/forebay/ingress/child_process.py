"""A child process that answers messages, so that CPU-bound work does not block the event loop of a service.

The parent writes JSON lines to the child's stdin: a setup message, then one message per line. The child writes each
frame of an answer to stdout, as its length followed by that many bytes. It exits when its stdin ends, because then its
parent is gone.
"""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO

import msgspec

from forebay.ingress.errors import ApiError

NICENESS = 10  # routing and serving have priority
LENGTH_BYTES = 8
EXIT_S = 5.0  # for a killed process to exit
CALLERS_MAX = 8  # concurrent callers, including the one whose message is being answered


class ChildProcess:
    """The parent's side of a child process, which is started at the first message.

    Args:
        module: module that is run as `__main__`; it answers through a `ChildConnection`.
        setup: first message to every new process; JSON without line breaks.
    """

    def __init__(self, module: str, setup: bytes) -> None:
        self._module = module
        self._setup = setup
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False

    async def exchange(self, message: bytes) -> bytes:
        """Send a message and return the single frame of its answer. Raises as `send` and `receive`.

        If this coroutine is cancelled or fails, the process is killed, because a late answer would be read as the
        answer to the next message.
        """
        is_complete = False
        try:
            await self.send(message)
            frame = await self.receive()
            is_complete = True
        finally:
            if not is_complete:
                await self.kill()
        return frame

    async def send(self, message: bytes) -> None:
        """Send JSON without line breaks. Raises OSError if the process cannot be started, EOFError after `close`."""
        if self._closed:
            raise EOFError
        if self._process is None or self._process.returncode is not None:
            self._process = await _start(self._module, self._setup)
            if self._closed:  # while the process was starting
                await self.kill()
                raise EOFError
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(message + b"\n")
        await stdin.drain()

    async def receive(self) -> bytes:
        """Return the next frame. Raises EOFError if the process has exited."""
        if self._process is None:
            raise EOFError
        stdout = self._process.stdout
        assert stdout is not None
        length = int.from_bytes(await stdout.readexactly(LENGTH_BYTES), "big")
        return await stdout.readexactly(length)

    async def kill(self) -> None:
        """Kill the process, if it runs. The next message starts another one."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await _exited(process)

    async def close(self) -> None:
        """Kill the process, if it runs. A later message raises EOFError."""
        self._closed = True
        await self.kill()


async def _start(module: str, setup: bytes) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        module,
        env=_environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C stops this process, which then kills the child
    )
    assert process.stdin is not None
    # Not as an argument, because it may contain a password.
    process.stdin.write(setup + b"\n")
    return process


async def _exited(process: asyncio.subprocess.Process) -> None:
    """Wait for a killed process, even if the caller is cancelled: the event loop may end right after that."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + EXIT_S
    cancelled: asyncio.CancelledError | None = None
    while process.returncode is None:
        try:
            await asyncio.wait_for(process.wait(), until_s - loop.time())
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _environment() -> dict[str, str]:
    """Return an environment with this process's module path and the current directory, for a user's policies."""
    found_in = [*(str(Path(entry).absolute()) for entry in sys.path), str(Path.cwd())]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found_in)}


class ChildResponse(msgspec.Struct, frozen=True):
    """Message from the child process: a result as JSON, or an error for the client with unset `content`."""

    content: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    status: int = 200
    code: str = ""
    message: str = ""


class SharedChild:
    """Passes messages of several callers to a child process, one at a time.

    Args:
        limit_s: maximum seconds from the call to the answer. After that the process is killed.
        work: what the process does, in the plural, for messages: "requests are being explained".
    """

    def __init__(self, child: ChildProcess, *, limit_s: float, work: str, code: str, hint: str) -> None:
        self._child = child
        self._limit_s = limit_s
        self._work = work
        self._code = code
        self._hint = hint
        self._lock = asyncio.Lock()
        self._callers = 0

    async def request(self, message: msgspec.Struct) -> bytes:
        """Return the result for a message as JSON.

        Raises ApiError: 503 if too many callers wait or the process ends, 504 after `limit_s`, or the child's error.
        """
        if self._callers >= CALLERS_MAX:
            raise ApiError(503, f"{self._code}_busy", f"{CALLERS_MAX} {self._work} already; try again later")
        self._callers += 1
        try:
            response = await self._run(msgspec.json.encode(message))
        finally:
            self._callers -= 1
        if response.content is msgspec.UNSET:
            raise ApiError(response.status, response.code, response.message)
        return bytes(response.content)

    async def close(self) -> None:
        await self._child.close()

    async def _run(self, message: bytes) -> ChildResponse:
        is_sent = False
        try:
            async with asyncio.timeout(self._limit_s), self._lock:
                is_sent = True
                return msgspec.json.decode(await self._child.exchange(message), type=ChildResponse)
        except TimeoutError as error:
            if not is_sent:
                raise ApiError(503, f"{self._code}_busy", f"other {self._work}; try again later") from error
            text = f"the answer took longer than {self._limit_s:g} s; {self._hint}"
            raise ApiError(504, f"{self._code}_timeout", text) from error
        except (OSError, EOFError) as error:
            text = "the process that reads the log ended; see the server's log for the reason"
            raise ApiError(503, f"{self._code}_failed", text) from error


class ChildConnection:
    """The child's side of the connection to its parent."""

    def __init__(self) -> None:
        """Read the first message, and reserve stdout for frames. Call this before an event loop runs."""
        os.nice(NICENESS)
        # Output that a user's policy prints must not corrupt the frames.
        self._output: BinaryIO = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        # Not sys.stdin, which the interpreter closes when it ends: it aborts if a thread is reading from it.
        self._input: BinaryIO = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        self.setup = self._input.readline()

    def end_with_parent(self, on_line: Callable[[bytes], object] = lambda _: None) -> None:
        """Start a thread that passes each further message to `on_line`, and ends this process after the last one."""

        def listen() -> None:
            for line in self._input:
                on_line(line)
            os._exit(0)

        threading.Thread(target=listen, name="stdin", daemon=True).start()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield the parent's messages one after another. The process ends when there are no more."""
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self.end_with_parent(lambda line: loop.call_soon_threadsafe(lines.put_nowait, line))
        while True:
            yield await lines.get()

    def send(self, frame: bytes) -> None:
        self._output.write(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
        self._output.flush()
