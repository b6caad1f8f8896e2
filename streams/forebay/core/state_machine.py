"""Interfaces that every state machine of the core implements."""

from collections.abc import Iterator
from typing import Protocol

from forebay.events.snapshots import Chunk


class IllegalTransition(Exception):
    """Event that the current state does not allow; the state is unchanged."""


class Digested(Protocol):
    """State with a digest."""

    def digest(self) -> int:
        """Return a 64-bit digest of the state."""


class Machine(Digested, Protocol):
    """State that is a fold over the log and nothing else.

    The digest is maintained incrementally as a sum whose terms have no order, so reading it visits no blocks or
    requests. `snapshot` yields plain facts. A machine restored from them has the same digest.
    """

    def snapshot(self) -> Iterator[Chunk]:
        """Yield the state as facts, each below 1 MiB when encoded."""
