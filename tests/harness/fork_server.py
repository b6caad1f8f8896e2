"""Start `forebay` processes by forking a process that has already imported the modules they need.

Importing what `forebay up` needs costs about two seconds of CPU time, and a test run starts more than a hundred
processes. A forked process runs `main` of the command line with its own arguments, environment, working directory and
standard streams; it can be signalled, killed and waited for like any other. It shares the hash seed and `sys.path` of
the server, so a test whose subject is one of these, or the start itself, uses `subprocess` instead.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from forebay.cli.app import main
from tests.command_line import commands
from tests.harness import processes
from tests.harness.processes import Started

ROOT = Path(__file__).resolve().parents[2]
FOREBAY = str(Path(sys.executable).with_name("forebay"))  # `argv[0]` of the processes
START_TIMEOUT_S = 120.0
MESSAGE_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1
# Imported by commands only when they run.
MODULES = (
    "forebay.processes.embedded",
    "forebay.processes.ingress",
    "forebay.processes.router",
    "forebay.cli.simulate.against",
    "forebay.cli.trace.run",
    "forebay.ingress.http.app",
    "forebay.ingress.http.server",
)
LIBRARIES = (
    "aiokafka",
    "fakeredis",
    "fastapi.openapi.utils",
    "faust",
    "httptools",
    "httpx",
    "lupa",
    "numpy",
    "tokenizers",
    "uvicorn",
    "uvloop",
)


class ForkedProcess:
    """A process forked by the server, with the methods of `subprocess.Popen` that tests use.

    Attributes:
        returncode: exit code, negative for a signal; None until `poll`, `wait` or `communicate` has seen the end.
        stdout: reader of the output; None if the output goes to a file.
        stderr: reader of the errors; None unless requested.
    """

    def __init__(self, pid: int, status: int, stdout: io.TextIOWrapper | None, stderr: io.TextIOWrapper | None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = stdout
        self.stderr = stderr
        self._status = status

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("forebay", timeout or 0.0)
            self.returncode = int(os.read(self._status, 20) or b"-9")  # the server is gone, and with it the process
            os.close(self._status)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read stdout and stderr to their ends, wait for the exit, and return what was read."""
        found = {stream: io.StringIO() for stream in (self.stdout, self.stderr) if stream}
        readers = [threading.Thread(target=_drain, args=pair, daemon=True) for pair in found.items()]
        for reader in readers:
            reader.start()
        ends_s = None if timeout is None else time.monotonic() + timeout
        for reader in readers:
            reader.join(None if ends_s is None else max(0.0, ends_s - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("forebay", timeout or 0.0)
        self.wait(None if ends_s is None else max(0.0, ends_s - time.monotonic()))
        for stream in found:
            stream.close()
        out, errors = (found[stream].getvalue() if stream else "" for stream in (self.stdout, self.stderr))
        return out, errors

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _drain(stream: io.TextIOWrapper, into: io.StringIO) -> None:
    into.write(stream.read())


class ForkServer:
    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(START_TIMEOUT_S)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                # Threads of a numerical library do not survive a fork.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )

    def start(
        self,
        arguments: Sequence[str],
        *,
        stdout: int | None = None,
        stderr: int | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        new_session: bool = False,
    ) -> ForkedProcess:
        """Start `forebay` with these arguments.

        Args:
            stdout: file descriptor for the output; None for a pipe.
            stderr: file descriptor for the errors, `subprocess.PIPE`, or None for the same as the output.
            folder: working directory; None for that of the test.
            new_session: whether the process leads a session and process group of its own.
        """
        order = {
            "arguments": list(arguments),
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(Path.cwd() if folder is None else folder),
            "new_session": new_session,
        }
        with contextlib.ExitStack() as stack:
            status, status_end = os.pipe()
            stack.callback(os.close, status_end)
            output: io.TextIOWrapper | None = None
            errors: io.TextIOWrapper | None = None
            if stdout is None:
                output, stdout = self._pipe(stack)
            if stderr == subprocess.PIPE:
                errors, stderr = self._pipe(stack)
            with self._lock:
                message = json.dumps(order).encode() + b"\n"
                fds = [stdout, stdout if stderr is None else stderr, status_end]
                sent = socket.send_fds(self._channel, [message], fds)
                self._channel.sendall(message[sent:])
                pid = int(self._channel.recv(20))
        return ForkedProcess(pid, status, output, errors)

    def close(self) -> None:
        """End the server and the processes that still run."""
        self._channel.close()
        self._process.wait()

    @staticmethod
    def _pipe(stack: contextlib.ExitStack) -> tuple[io.TextIOWrapper, int]:
        reading, writing = os.pipe()
        stack.callback(os.close, writing)
        return io.TextIOWrapper(io.FileIO(reading), encoding="utf-8", errors="replace"), writing


@functools.cache
def server() -> ForkServer:
    """Return the server of this process, started at the first call."""
    made = ForkServer()
    atexit.register(made.close)
    return made


def start(*arguments: str, **options: Any) -> ForkedProcess:
    """Start `forebay`, as `ForkServer.start`."""
    return server().start(arguments, **options)


def run(*arguments: str, timeout_s: float, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run `forebay` to its end and return exit code, output and errors, as `subprocess.run`."""
    process = server().start(arguments, stderr=subprocess.PIPE, **options)
    try:
        out, errors = process.communicate(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode is not None
    return subprocess.CompletedProcess([FOREBAY, *arguments], process.returncode, out, errors)


def spawn(command: Sequence[str], stdout: int, stderr: int) -> Started:
    """Start a command for `tests.harness.processes`: `forebay` by the server, any other as a process of its own."""
    if command[0] != FOREBAY:
        return processes.spawn(command, stdout, stderr)
    return server().start(command[1:], stdout=stdout, stderr=stderr, new_session=True)


def _serve(channel: socket.socket) -> dict[str, Any]:
    """Fork a process for each order; returns the order, in the forked process only."""
    wake, wake_end = os.pipe()
    os.set_blocking(wake_end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
    running: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([channel.fileno(), wake], [], [])
        if wake in readable:
            os.read(wake, 1_000)
            _reap(running)
        if channel.fileno() not in readable:
            continue
        message, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
        while message and not message.endswith(b"\n"):
            message += channel.recv(MESSAGE_BYTES)
        if not message:
            _end(running)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (wake, wake_end, *running.values()):
                os.close(fd)
            channel.close()
            order: dict[str, Any] = json.loads(message)
            _become(order, *fds)
            return order
        running[pid] = fds[2]
        os.close(fds[0])
        os.close(fds[1])
        channel.sendall(str(pid).encode())


def _reap(running: dict[int, int]) -> None:
    """Report the exit code of each process that ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(BrokenPipeError):  # the test process no longer waits
            os.write(running[pid], str(os.waitstatus_to_exitcode(status)).encode())
        os.close(running.pop(pid))


def _end(running: dict[int, int]) -> NoReturn:
    """End with the test process: whatever it left running is killed."""
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _become(order: dict[str, Any], stdout: int, stderr: int, status: int) -> None:
    """Give the forked process the streams, environment and folder of the order."""
    os.close(status)
    if order["new_session"]:
        os.setsid()
    if sys.platform == "linux":  # die with the server, which dies with the tests
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for fd, number in ((stdout, 1), (stderr, 2)):
        os.dup2(fd, number)
    for fd in {stdout, stderr} - {1, 2}:
        os.close(fd)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - ends with the process
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = [FOREBAY, *order["arguments"]]
    sys.modules["__main__"] = types.ModuleType("__main__")  # not this module: processes that it spawns import theirs


def _main() -> None:
    list(commands())
    for name in MODULES:
        import_module(name)
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):  # not installed everywhere
            import_module(name)
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    # Still frozen: to free a thousand modules one by one would cost each process a second.
    main()


if __name__ == "__main__":
    _main()
