"""Base of every event: the struct classes, packed number lists and digests.

Packed lists are little-endian: token ids as u32, hashes as u64. They stay `bytes` inside events, because most readers
only forward them. The helpers here are the only code that packs and unpacks.
"""

import sys
from array import array
from collections.abc import Iterable
from typing import Annotated

import msgspec

U64_MASK = (1 << 64) - 1
U32_BYTES = 4
U64_BYTES = 8

# JSON integers are unbounded. Without these limits, a decoded event might not be encodable again.
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0)]  # for msgpack topics only, where the wire format ends at 64 bits
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Digest = Annotated[
    str,
    msgspec.Meta(
        pattern="^[0-9a-f]{16}$",
        max_length=16,  # `$` also matches before a trailing newline
        description="64 bits as 16 hex digits, because JSON readers round large numbers.",
    ),
]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Fact, command or decision. Each subclass has a dotted tag whose meaning never changes.

    New fields always have a default. Readers ignore unknown fields. An unknown tag is a decode error
    (`forebay.events.codec.DecodeError`).
    """


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Named group of fields inside an event."""


def pack_u32(values: Iterable[int]) -> bytes:
    """Pack integers below 2**32 as little-endian u32. Raises OverflowError for others."""
    return _little_endian(array("I", values)).tobytes()


def unpack_u32(packed: bytes) -> list[int]:
    """Unpack the result of `pack_u32`. Raises ValueError if the length is not a multiple of four."""
    return _unpack("I", packed)


def pack_u64(values: Iterable[int]) -> bytes:
    """Pack integers below 2**64 as little-endian u64. Raises OverflowError for others."""
    return _little_endian(array("Q", values)).tobytes()


def array_u64(packed: bytes) -> "array[int]":
    """Return packed u64 as an array, without unpacking it. Raises ValueError as `unpack_u64` does."""
    return _little_endian(array("Q", packed))


def unpack_u64(packed: bytes) -> list[int]:
    """Unpack the result of `pack_u64`. Raises ValueError if the length is not a multiple of eight."""
    return _unpack("Q", packed)


def require_packed(name: str, packed: bytes, width: int) -> None:
    """Check that the length of a packed list is a multiple of `width` bytes. Raises ValueError otherwise."""
    if len(packed) % width:
        raise ValueError(f"{name}: {len(packed)} bytes are not a multiple of {width}")


def hex_digest(value: int) -> str:
    """Return a 64-bit integer as `Digest`."""
    return f"{value & U64_MASK:016x}"


def _unpack(kind: str, packed: bytes) -> list[int]:
    values: array[int] = array(kind)
    values.frombytes(packed)
    return _little_endian(values).tolist()


def _little_endian(values: "array[int]") -> "array[int]":
    if sys.byteorder == "big":  # pragma: no cover - no such machine runs engines
        values.byteswap()
    return values
