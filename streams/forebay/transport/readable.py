"""Conversion of log records to JSON values that a person can read, for every codec."""

from typing import Any

import msgspec

from forebay.events.base import U32_BYTES, unpack_u32, unpack_u64
from forebay.events.codec import DecodeError, decode
from forebay.events.topics import topic_named
from forebay.transport.base import Record

OPAQUE_FIELDS = frozenset({"descriptor", "content", "vector"})  # bytes that mean nothing to a person
HEX_FIELDS = frozenset({"parent_hash", "tie_seed", "nonce", "content"})  # 64-bit integers, which JSON readers round


def readable(record: Record) -> dict[str, Any]:
    """Return a record as JSON values: hashes in hexadecimal, token ids as numbers, images and descriptors as sizes."""
    line: dict[str, Any] = {"offset": record.offset, "at_us": record.at_us}
    if record.key is not None:
        line["key"] = record.key.decode(errors="replace")
    if record.headers:
        line["headers"] = dict(record.headers)
    try:
        topic = topic_named(record.topic)
        if topic.events is not None:
            line["event"] = plain(decode(topic, record.value))
            return line
        line["value"] = msgspec.json.decode(record.value)
    except (DecodeError, KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        line["value"] = record.value.decode(errors="backslashreplace")
    if record.fault is not None:
        line["fault"] = record.fault
    return line


def plain(value: Any, name: str = "") -> Any:
    """Return an event, or the value of one of its fields, as JSON values.

    The name of the field determines how bytes and integers are formatted.
    """
    if isinstance(value, msgspec.Struct):
        tag = type(value).__struct_config__.tag
        fields = {} if tag is None else {"type": tag}
        for field in value.__struct_fields__:
            fields[field] = plain(getattr(value, field), field)
        return fields
    if isinstance(value, bytes):
        if name == "token_ids":
            assert len(value) % U32_BYTES == 0
            return unpack_u32(value)
        if name in OPAQUE_FIELDS:
            return f"{len(value)} bytes"
        return [f"{number:016x}" for number in unpack_u64(value)]
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, int) and name in HEX_FIELDS:
        return f"{value:016x}"
    return value
