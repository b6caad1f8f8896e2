"""The state directory of a supervisor: which workers it wants, their processes and their output.

Each worker has three files in the folder of its group: `POOL-N.json` with its record, `POOL-N.process` with the
identity of its process, and `POOL-N.log` with its output. A lock ensures that one supervisor uses the directory.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import quote

import msgspec

from forebay import runtime
from forebay.runtime.errors import ConfigError

LOCK = "supervisor.lock"
LOCKED_S = 5.0  # a worker that was starting when its supervisor died keeps the lock until its record is written
LOCK_POLL_S = 0.05
OUTPUT_BYTES_MAX = 16 << 20  # per worker, twice with the previous output

Drain = Literal["none", "requested", "signalled"]


class SupervisedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one worker, which is written before the supervisor acts on it."""

    group: str
    pool: str
    number: Annotated[int, msgspec.Meta(ge=0)]
    # `requested` before the worker gets SIGTERM, `signalled` afterwards. A second signal would end the drain.
    drain: Drain = "none"

    @property
    def worker_id(self) -> str:
        return f"{self.pool}-{self.number}"


class WorkerDirectory:
    def __init__(self, folder: Path, lock: int) -> None:
        """Create the directory object. Use `open` to get the lock."""
        self.lock = lock
        self._folder = folder

    @classmethod
    async def open(cls, folder: Path, locked_s: float = LOCKED_S) -> Self:
        """Create a missing directory, and lock it, waiting at most `locked_s` seconds.

        Raises ConfigError if it cannot be written, or another supervisor uses it.
        """
        lock = _opened_lock(folder)
        ends_s = runtime.monotonic_s() + locked_s
        try:
            while not _is_locked(lock):
                if runtime.monotonic_s() >= ends_s:
                    raise ConfigError(
                        f"another supervisor uses the state directory {folder}; stop it, or choose another `state`"
                    )
                await asyncio.sleep(LOCK_POLL_S)
        except BaseException:
            os.close(lock)
            raise
        return cls(folder, lock)

    def close(self) -> None:
        """Release the lock. Workers continue to run."""
        os.close(self.lock)

    def records(self) -> Iterator[SupervisedWorker]:
        """Yield the record of each worker. Raises ConfigError for an unreadable record."""
        for path in sorted(self._folder.glob("*/*.json")):
            try:
                yield msgspec.json.decode(path.read_bytes(), type=SupervisedWorker)
            except (OSError, msgspec.MsgspecError) as error:
                raise ConfigError(
                    f"{path} is not the record of a worker: {error}; end the process in {path.stem}.process if it"
                    " still runs, then remove the file"
                ) from error

    def write(self, worker: SupervisedWorker) -> None:
        """Write the record of a worker, replacing the previous one as a whole. Raises OSError."""
        path = self._path(worker, "json")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        new = path.with_name(f"{path.name}.new")
        with new.open("wb") as file:
            file.write(msgspec.json.encode(worker))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)

    def remove(self, worker: SupervisedWorker) -> None:
        """Remove the record of a worker. Its output remains. Raises OSError."""
        for path in (self.process(worker), self._path(worker, "json")):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()

    def process(self, worker: SupervisedWorker) -> Path:
        return self._path(worker, "process")

    def output(self, worker: SupervisedWorker) -> Path:
        return self._path(worker, "log")

    def has_long_output(self, worker: SupervisedWorker) -> bool:
        with contextlib.suppress(OSError):
            return self.output(worker).stat().st_size > OUTPUT_BYTES_MAX
        return False

    def rotate(self, worker: SupervisedWorker) -> None:
        """Move the output of a worker to `POOL-N.log.1`. The running worker continues in the emptied file.

        Raises OSError if the output cannot be moved. It is dropped then.
        """
        path = self.output(worker)
        try:
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        finally:
            os.truncate(path, 0)

    def _path(self, worker: SupervisedWorker, kind: str) -> Path:
        return self._folder / quote(worker.group, safe="") / f"{worker.worker_id}.{kind}"


def _opened_lock(folder: Path) -> int:
    """Return the file descriptor of the lock file, which is created if it is missing."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"the state directory {folder} cannot be written: {error.strerror}") from error


def _is_locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
