"""Interfaces that every state machine of the core implements."""

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec
from msgspec.msgpack import encode
from xxhash import xxh3_64_intdigest

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


def digest_of(*fields: Any, seed: int = 0) -> int:
    """Return the XXH3-64 digest of the MessagePack form of plain values: text, numbers, bytes, None and tuples."""
    return xxh3_64_intdigest(encode(fields), seed)


def plain(value: Any) -> Any:
    """Return a struct as the tuple of its fields, and all structs inside it, too.

    An encoded struct omits a field that holds the very object of the default. Equal structs may therefore have
    different encodings.
    """
    if isinstance(value, msgspec.Struct):
        return tuple(map(plain, msgspec.structs.astuple(value)))
    return tuple(map(plain, value)) if isinstance(value, tuple) else value
