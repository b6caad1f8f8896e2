"""What every event on the wire shares: the struct base, packed number lists and digests.

Packed lists are little-endian: token ids as u32, hashes as u64. They stay `bytes` inside events,
because most readers only pass them on; the helpers here are the one place that packs and unpacks.
"""

import sys
from array import array
from collections.abc import Iterable
from typing import Annotated

import msgspec

U64_MASK = (1 << 64) - 1
U32_BYTES = 4
U64_BYTES = 8

# JSON integers have no end of their own; beyond these, what decodes could not be encoded again.
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0)]  # on msgpack topics only, where the wire ends at 64 bits
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Digest = Annotated[
    str,
    msgspec.Meta(
        pattern="^[0-9a-f]{16}$",
        max_length=16,  # `$` alone lets a newline follow
        description="64 bits as 16 hex digits: JSON readers round large numbers.",
    ),
]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """One fact, command or decision. Subclasses give a dotted tag, which never changes its meaning.

    Fields are only ever added, with a default; an unknown field is ignored by readers, an unknown
    tag is a decode error (`forebay.events.codec.DecodeError`).
    """


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A named group of fields inside an event."""


def pack_u32(values: Iterable[int]) -> bytes:
    """Pack integers below 2**32 as little-endian u32. Raises OverflowError for others."""
    return _little_endian(array("I", values)).tobytes()


def unpack_u32(packed: bytes) -> list[int]:
    """The inverse of `pack_u32`. Raises ValueError when the length is no multiple of four."""
    return _unpack("I", packed)


def pack_u64(values: Iterable[int]) -> bytes:
    """Pack integers below 2**64 as little-endian u64. Raises OverflowError for others."""
    return _little_endian(array("Q", values)).tobytes()


def array_u64(packed: bytes) -> "array[int]":
    """Packed u64 as an array: compared and cut without unpacking. Raises ValueError as `unpack_u64` does."""
    return _little_endian(array("Q", packed))


def unpack_u64(packed: bytes) -> list[int]:
    """The inverse of `pack_u64`. Raises ValueError when the length is no multiple of eight."""
    return _unpack("Q", packed)


def require_packed(name: str, packed: bytes, width: int) -> None:
    """Refuse a packed list whose length is no multiple of `width` bytes (ValueError)."""
    if len(packed) % width:
        raise ValueError(f"{name}: {len(packed)} bytes are no whole number of {width}-byte integers")


def hex_digest(value: int) -> str:
    """A 64-bit integer as `Digest`."""
    return f"{value & U64_MASK:016x}"


def _unpack(kind: str, packed: bytes) -> list[int]:
    values: array[int] = array(kind)
    values.frombytes(packed)
    return _little_endian(values).tolist()


def _little_endian(values: "array[int]") -> "array[int]":
    if sys.byteorder == "big":  # pragma: no cover - no such machine runs engines
        values.byteswap()
    return values
