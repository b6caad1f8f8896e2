"""Decode records to events."""

from typing import Any

from forebay.events.codec import DecodeError, decode
from forebay.events.topics import Topic
from forebay.transport.base import Record


def event_of(topic: Topic, record: Record) -> Any:
    """Return the event in a record of `topic`. Raises DecodeError, and no other error, if it does not decode."""
    if record.fault is not None:
        raise DecodeError(f"{topic.name}: {record.fault}")
    return decode(topic, record.value)
