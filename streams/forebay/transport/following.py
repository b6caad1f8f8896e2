"""Append records only after other records are durable, for logs whose partitions are acknowledged independently."""

from collections import deque
from collections.abc import Callable, Sequence

from forebay.transport.base import Draft

Write = Callable[[Sequence[Draft], Callable[[], None] | None], None]
"""Appends drafts without waiting, and calls the second argument later, once all of them are durable or were dropped.

It never calls that argument if the log fails."""
WriteFollowers = Callable[[Sequence[Draft]], None]
"""Appends drafts that waited. It must not raise, because no caller waits for them any more."""


class _Entry:
    __slots__ = ("drafts", "is_due")

    def __init__(self, drafts: Sequence[Draft], *, is_due: bool) -> None:
        self.drafts = drafts
        self.is_due = is_due


class Following:
    """Queue of records that wait until earlier records are durable. They are appended in the order of the calls."""

    def __init__(self, write: Write, write_followers: WriteFollowers) -> None:
        self._write = write
        self._write_followers = write_followers
        self._waiting: deque[_Entry] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def append(self, drafts: Sequence[Draft], then: Sequence[Draft]) -> None:
        """Append `drafts` now, and `then` once they and the `then` of all earlier calls are durable or appended."""
        if not then:
            self._write(drafts, None)
            return
        entry = _Entry(then, is_due=not drafts)
        if drafts:
            self._write(drafts, lambda: self._on_durable(entry))
        self._waiting.append(entry)  # after the write, which may raise
        self._append_due()

    def clear(self) -> None:
        self._waiting.clear()

    def _on_durable(self, entry: _Entry) -> None:
        entry.is_due = True
        self._append_due()

    def _append_due(self) -> None:
        while self._waiting and self._waiting[0].is_due:
            self._write_followers(self._waiting.popleft().drafts)
