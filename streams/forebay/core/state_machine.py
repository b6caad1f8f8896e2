"""Interface and digest of the state machines of the core.

A state machine is a fold over the log and nothing else. Its digest is maintained incrementally as a sum whose terms
have no order, so reading it visits no blocks or requests. `snapshot` yields the state as facts, each below 1 MiB when
encoded. A machine restored from them has the same digest.
"""

from typing import Any, Protocol

import msgspec
from msgspec.msgpack import encode
from xxhash import xxh3_64_intdigest


class IllegalTransition(Exception):
    """Event that the current state does not allow; the state is unchanged."""


class Digested(Protocol):
    """State with a digest."""

    def digest(self) -> int:
        """Return a 64-bit digest of the state."""


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
