"""Retention and private content of topics: docs/distributed.md has the declared ones, and none is forgotten."""

import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.events.topics import DAY_S, FIXED_TOPICS, FOREVER, MINUTE_S, Content, Topic, work_topic

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
TOPICS = (*FIXED_TOPICS, work_topic("*"))
PRIVATE_FIELDS: dict[str, Content] = {
    "tenant": "identities",
    "key_hash": "identities",
    "sequence_hashes": "prompt hashes",
}


def row_of(topic: Topic) -> str:
    days, minutes = topic.retention_s // DAY_S, topic.retention_s // MINUTE_S
    kept = "for ever" if topic.retention_s == FOREVER else f"{days} days" if days else f"{minutes} minutes"
    kept = "1 day" if days == 1 else kept
    return f"| `{topic.name}` | {kept}{', compacted' * topic.is_compacted} | {', '.join(topic.holds) or 'none'} |"


def field_names(kind: Any, seen: set[Any]) -> set[str]:
    """Return the names of all fields of an event, and of the structs in it."""
    if kind in seen:
        return set()
    seen.add(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return {*hints, *(name for hint in hints.values() for name in field_names(hint, seen))}
    return {name for part in typing.get_args(kind) for name in field_names(part, seen)}


def test_the_documentation_lists_the_retention_of_every_topic() -> None:
    lines = PAGE.read_text().split("\n")
    begin = lines.index("| topic | kept for | private content |") + 2
    assert "\n".join(lines[begin : begin + len(TOPICS) + 1]) == "\n".join([*map(row_of, TOPICS), ""])


@pytest.mark.parametrize("topic", [topic for topic in TOPICS if topic.events is not None], ids=lambda one: one.name)
def test_a_topic_declares_the_private_content_of_its_events(topic: Topic) -> None:
    found = {PRIVATE_FIELDS[name] for name in field_names(topic.events, set()) & PRIVATE_FIELDS.keys()}
    assert found <= set(topic.holds)
