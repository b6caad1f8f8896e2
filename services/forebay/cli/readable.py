"""Records as JSON can show them, whatever their codec."""

from typing import Any

import msgspec

from forebay.events.base import U32_BYTES, unpack_u32, unpack_u64
from forebay.events.codec import DecodeError, decode
from forebay.events.topics import topic_named
from forebay.transport.base import Record


def readable(record: Record) -> dict[str, Any]:
    """A record as JSON can show it: packed hashes as hex strings, token ids as numbers."""
    line: dict[str, Any] = {"offset": record.offset, "at_us": record.at_us}
    if record.key is not None:
        line["key"] = record.key.decode(errors="replace")
    if record.headers:
        line["headers"] = dict(record.headers)
    try:
        topic = topic_named(record.topic)
        if topic.events is not None:
            line["event"] = _plain(decode(topic, record.value))
            return line
        line["value"] = msgspec.json.decode(record.value)
    except (DecodeError, KeyError, msgspec.DecodeError, UnicodeDecodeError):
        line["value"] = record.value.decode(errors="backslashreplace")
    return line


def _plain(value: Any, name: str = "") -> Any:
    if isinstance(value, msgspec.Struct):
        tag = type(value).__struct_config__.tag
        fields = {field: _plain(getattr(value, field), field) for field in value.__struct_fields__}
        return fields if tag is None else {"type": tag, **fields}
    if isinstance(value, bytes):
        if name == "token_ids":
            assert len(value) % U32_BYTES == 0
            return unpack_u32(value)
        return [f"{number:016x}" for number in unpack_u64(value)]
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, int) and name in ("parent_hash", "tie_seed", "nonce", "content"):
        return f"{value:016x}"
    return value
