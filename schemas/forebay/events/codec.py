"""Encode and decode events by topic. Only this module distinguishes msgpack from JSON."""

from functools import lru_cache
from types import UnionType
from typing import Any, get_args

import msgspec

from forebay.events.base import Event
from forebay.events.topics import Topic

# All errors that a msgspec decoder may raise for foreign bytes; RecursionError is for deep nesting.
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class DecodeError(ValueError):
    """A record is not an event of its topic.

    The text names the topic and the place of the error in the record, and may be written to a dead letter.
    """


def encode(topic: Topic, event: Event) -> bytes:
    """Return the bytes of an event as they are written to `topic`.

    Raises TypeError if the topic carries raw records.
    """
    if topic.codec == "json":
        return _JSON.encode(event)
    if topic.codec == "msgpack":
        return _MSGPACK.encode(event)
    raise TypeError(f"cannot encode an event for the topic {topic.name}, which carries raw records")


def decode(topic: Topic, value: bytes | None) -> Any:
    """Return the event in the value of a record of `topic`.

    Raises:
        DecodeError: the value is null, malformed, or not an event of this topic.
    """
    if value is None:
        raise DecodeError(f"{topic.name}: its value is null")
    try:
        return _decoder(topic.codec, topic.events).decode(value)
    except MALFORMED as error:
        raise DecodeError(f"{topic.name}: {error}") from error


def unknown_tag(topic: Topic, value: bytes) -> str | None:
    """Return the tag of a record whose event type this version does not know. A newer version may know it.

    Args:
        topic: topic of the record; it must carry events.
        value: value of the record.

    Returns:
        The tag, or None if this version knows the tag, or if the bytes are no well-formed record with a tag.
    """
    assert topic.events is not None, "a topic without events has no tags"
    decoder = _TAGGED_JSON if topic.codec == "json" else _TAGGED_MSGPACK
    try:
        tag = decoder.decode(value).type
    except MALFORMED:
        return None
    return None if tag in _tags(topic.events) else tag


class _Tagged(msgspec.Struct):
    type: str


_TAGGED_JSON = msgspec.json.Decoder(_Tagged)
_TAGGED_MSGPACK = msgspec.msgpack.Decoder(_Tagged)
_JSON = msgspec.json.Encoder()
_MSGPACK = msgspec.msgpack.Encoder()


@lru_cache(maxsize=64)
def _decoder(codec: str, events: UnionType | type | None) -> "msgspec.json.Decoder[Any] | msgspec.msgpack.Decoder[Any]":
    if events is None:
        raise DecodeError("the topic carries raw records instead of events")
    return msgspec.json.Decoder(events) if codec == "json" else msgspec.msgpack.Decoder(events)


@lru_cache(maxsize=64)
def _tags(events: UnionType | type) -> frozenset[str]:
    return frozenset(kind.__struct_config__.tag for kind in get_args(events) or (events,))
