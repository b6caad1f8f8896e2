"""What every state machine of the core offers, and how a refused transition is named."""

from collections.abc import Iterator
from typing import Protocol

from forebay.events.snapshots import Chunk


class IllegalTransition(Exception):
    """An event that the state does not allow. The state is unchanged."""


class Digested(Protocol):
    """State with a name."""

    def digest(self) -> int:
        """64 bits that name the state."""


class Machine(Digested, Protocol):
    """State that is a fold over the log, and nothing else.

    `digest` is kept incrementally: sums that do not depend on the order of their terms, so reading it
    costs no walk over blocks or requests. `snapshot` yields plain facts; a machine that restored them has
    the same digest.
    """

    def snapshot(self) -> Iterator[Chunk]:
        """The state as facts, each below 1 MiB encoded."""
