"""Bytes to events and back, by topic. The only place that knows msgpack from JSON."""

from functools import lru_cache
from types import UnionType
from typing import Any

import msgspec

from forebay.events.base import Event
from forebay.events.topics import Topic


class DecodeError(ValueError):
    """A record that is not an event of its topic. The text names the place and is fit for a dead letter."""


def encode(topic: Topic, event: Event) -> bytes:
    """The wire form of an event. Raises TypeError when the topic carries no events."""
    if topic.codec == "json":
        return _JSON.encode(event)
    if topic.codec == "msgpack":
        return _MSGPACK.encode(event)
    raise TypeError(f"the topic {topic.name} carries no events")


def decode(topic: Topic, value: bytes) -> Any:
    """The event in a record of `topic`. Raises DecodeError for anything else."""
    try:
        return _decoder(topic.codec, topic.events).decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # the last: deep nesting
        raise DecodeError(f"{topic.name}: {error}") from error


_JSON = msgspec.json.Encoder()
_MSGPACK = msgspec.msgpack.Encoder()


@lru_cache(maxsize=64)
def _decoder(codec: str, events: UnionType | type | None) -> "msgspec.json.Decoder[Any] | msgspec.msgpack.Decoder[Any]":
    if events is None:
        raise DecodeError("the topic carries no events")
    return msgspec.json.Decoder(events) if codec == "json" else msgspec.msgpack.Decoder(events)
