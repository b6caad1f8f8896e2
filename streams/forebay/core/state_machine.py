"""Common parts of the state machines of the core: the error of an illegal transition, and the digest.

A state machine is a state that only events of the log change. Its digest is a sum with one term per item, which every
change updates, so reading it does not visit all blocks or requests. `snapshot` yields the state as parts, each below 1
MiB when encoded. A state machine that is restored from these parts has the same digest.
"""

from typing import Any, Protocol

import msgspec
from msgspec.msgpack import encode
from xxhash import xxh3_64_intdigest


class IllegalTransition(Exception):
    """The current state does not allow the event. The event has not changed the state."""


class Digested(Protocol):
    """State with a 64-bit digest."""

    def digest(self) -> int:
        """Return a 64-bit digest of the state."""


def digest_of(*fields: Any, seed: int = 0) -> int:
    """Return the XXH3-64 digest of plain values (text, numbers, bytes, None, tuples), encoded as MessagePack."""
    return xxh3_64_intdigest(encode(fields), seed)


def plain(value: Any) -> Any:
    """Return a struct as a tuple of its fields, recursively. Other values are returned unchanged.

    `digest_of` needs this, because equal structs may have different encodings: an encoded struct omits a field only if
    its value is the same object as the default. The tuple omits fields in `ADDED` of the class that have the default
    given there, so that older logs keep their digests.
    """
    if isinstance(value, msgspec.Struct):
        added: dict[str, Any] | None = getattr(value, "ADDED", None)
        if added is None:  # the usual case, which takes half the time
            return tuple(map(plain, msgspec.structs.astuple(value)))
        names = [name for name in value.__struct_fields__ if name not in added]
        changed = [(name, one) for name, default in added.items() if (one := getattr(value, name)) != default]
        return tuple(map(plain, (*(getattr(value, name) for name in names), *changed)))
    return tuple(map(plain, value)) if isinstance(value, tuple) else value
