"""Base of every event: the struct classes, packed number lists and digests.

A packed list is a `bytes` field with little-endian numbers: token ids as u32, hashes as u64. Most readers only forward
packed lists, so events keep them as `bytes`. The helpers here are the only code that packs and unpacks lists.
"""

import sys
from array import array
from collections.abc import Iterable
from typing import Annotated, ClassVar

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

CHECKSUM_DIGITS = 32
Checksum = Annotated[
    str,
    msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=CHECKSUM_DIGITS, description="128 bits as 32 hex digits."),
]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base class of all events: facts, commands and decisions.

    The field `type` of an encoded event has the dotted tag of its class, for example `request.submitted`. The meaning
    of a tag never changes. New fields always have a default. Readers ignore unknown fields. An unknown tag is a decode
    error (`forebay.events.codec.DecodeError`).

    `SINCE` is the version of the event types that introduced the class (`forebay.events.versions`).
    """

    SINCE: ClassVar[int] = 1


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base class of named groups of fields inside an event. A part has no tag of its own."""


def pack_u32(values: Iterable[int]) -> bytes:
    """Pack integers from 0 to 2**32 - 1 as little-endian u32. Raises OverflowError for other integers."""
    return _little_endian(array("I", values)).tobytes()


def unpack_u32(packed: bytes) -> list[int]:
    """Unpack little-endian u32, as packed by `pack_u32`.

    Raises ValueError if the length is not a multiple of 4 bytes.
    """
    return _unpack("I", packed)


def pack_u64(values: Iterable[int]) -> bytes:
    """Pack integers from 0 to 2**64 - 1 as little-endian u64. Raises OverflowError for other integers."""
    if type(values) is array and values.typecode == "Q" and sys.byteorder == "little":
        return values.tobytes()  # without a copy as an array, which takes longer than the rest for a single block
    return _little_endian(array("Q", values)).tobytes()


def array_u64(packed: bytes) -> "array[int]":
    """Return packed u64 as an array of type "Q", which needs less memory than a list of integers.

    Raises:
        ValueError: the length is not a multiple of 8 bytes.
    """
    return _little_endian(array("Q", packed))


def unpack_u64(packed: bytes) -> list[int]:
    """Unpack little-endian u64, as packed by `pack_u64`.

    Raises ValueError if the length is not a multiple of 8 bytes.
    """
    return _unpack("Q", packed)


def require_packed(name: str, packed: bytes, width: int) -> None:
    """Check that the length of a packed list is a multiple of `width` bytes.

    Args:
        name: name of the field, for the error message.
        packed: the list.
        width: bytes per number.

    Raises:
        ValueError: the length is not a multiple of `width`.
    """
    if len(packed) % width:
        raise ValueError(f"{name}: {len(packed)} bytes are not a multiple of {width}")


def hex_digest(value: int) -> str:
    """Return the lowest 64 bits of an integer as 16 hex digits (`Digest`)."""
    return f"{value & U64_MASK:016x}"


def _unpack(kind: str, packed: bytes) -> list[int]:
    values: array[int] = array(kind)
    values.frombytes(packed)
    return _little_endian(values).tolist()


def _little_endian(values: "array[int]") -> "array[int]":
    if sys.byteorder == "big":  # pragma: no cover - no such machine runs engines
        values.byteswap()
    return values
