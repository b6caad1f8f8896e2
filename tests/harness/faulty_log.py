"""Simulate the crash of a process at its k-th append, for tests.

The underlying log stays intact, like a file after a crash, so that a test can restart on it.
"""

from collections.abc import Sequence

from forebay.transport.base import Draft, Log, Record, Tail, Wake


class Crashed(Exception):
    """Simulated death of the process. Not a LogError, so that no code handles it and continues."""


class FaultyLog:
    """Log that passes on the first `crash_after` calls of `append` and `append_soon`, then raises Crashed."""

    def __init__(self, log: Log, crash_after: int) -> None:
        assert crash_after >= 0
        self.crashed = False
        self._log = log
        self._appends_left = crash_after

    async def append(self, drafts: Sequence[Draft]) -> list[int]:
        self._spend_append()
        return await self._log.append(drafts)

    def append_soon(self, drafts: Sequence[Draft], then: Sequence[Draft] = ()) -> None:
        self._spend_append()
        self._log.append_soon(drafts, then)

    async def flush(self) -> None:
        self.require_alive()
        await self._log.flush()

    def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> Tail:
        """Return a tail of the underlying log, which fails after the crash."""
        self.require_alive()
        return _FaultyTail(self, self._log.tail(topic, partition, offset, wake))

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        self.require_alive()
        return await self._log.read(topic, partition, offset, limit)

    async def begin(self, topic: str, partition: int) -> int:
        self.require_alive()
        return await self._log.begin(topic, partition)

    async def end(self, topic: str, partition: int) -> int:
        self.require_alive()
        return await self._log.end(topic, partition)

    def require_alive(self) -> None:
        if self.crashed:
            raise Crashed

    def _spend_append(self) -> None:
        self.crashed = self.crashed or self._appends_left == 0
        self.require_alive()
        self._appends_left -= 1


class _FaultyTail:
    """Tail of a log that may crash. Closing it always works."""

    def __init__(self, owner: FaultyLog, tail: Tail) -> None:
        self._owner = owner
        self._tail = tail

    def take(self, limit: int) -> list[Record]:
        self._owner.require_alive()
        return self._tail.take(limit)

    def __len__(self) -> int:
        self._owner.require_alive()
        return len(self._tail)

    def close(self) -> None:
        self._tail.close()
