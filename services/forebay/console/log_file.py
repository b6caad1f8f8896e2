"""Notice that the file of a log was replaced while a console reads it.

A process that has the file open would read the previous log forever, because a replaced file exists until it is closed.
"""

import asyncio
from pathlib import Path
from typing import NoReturn

from forebay.ingress.explain_worker import LogSource
from forebay.transport.base import LogError

WATCH_EVERY_S = 1.0


class LogFile:
    """The file at the path of a log, as of the creation of this object."""

    def __init__(self, source: LogSource) -> None:
        self._path = None if source.path is None else Path(source.path)
        self._identity = self._read()

    @property
    def is_replaced(self) -> bool:
        """Whether the path now has another file. False for Kafka, and while there is no file."""
        return self._read() not in (None, self._identity)

    async def watch(self) -> NoReturn:
        """Wait until the file is replaced, and raise LogError then."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            if self.is_replaced:
                raise LogError(f"{self._path}: another file has replaced the log; it is read from the beginning")

    def _read(self) -> tuple[int, int] | None:
        """Return device and inode of the file; None if there is none."""
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino
