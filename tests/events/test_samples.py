"""Golden wire samples: records of every released event type still decode to the same values."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.events.codec import decode
from forebay.events.schema import TOPICS
from tests.harness.samples import SAMPLES, readable, samples

BY_NAME = {topic.name: topic for topic in TOPICS}
FOLDERS = sorted(SAMPLES.iterdir()) if SAMPLES.exists() else []


def known_fields(value: Any, expected: Any) -> Any:
    """Return the part of a decoded value that existed when the sample was written; later fields are ignored."""
    if isinstance(expected, dict):
        return {key: known_fields(value[key], expected[key]) for key in expected if key in value}
    if isinstance(expected, list) and len(expected) == len(value):
        return [known_fields(item, then) for item, then in zip(value, expected, strict=True)]
    return value


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("extent", ["full", "least"])
def test_a_sample_decodes_to_its_recorded_value(folder: Path, extent: str) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    topic = BY_NAME[expected["topic"]]
    event = decode(topic, (folder / f"{extent}.{topic.codec}").read_bytes())
    assert known_fields(readable(event), expected[extent]) == expected[extent]


def test_every_tag_has_a_sample_and_every_sample_a_tag() -> None:
    names = {name for name, *_ in samples()}
    assert {folder.name for folder in FOLDERS} == names, (
        "run `make schemas`; samples of old tags are kept, with their tag"
    )


def test_a_lost_or_changed_field_is_detected() -> None:
    expected = {"type": "t", "kept": 1, "parts": [{"a": 1}]}
    assert known_fields({"type": "t", "kept": 1, "parts": [{"a": 1, "new": 2}], "new": 3}, expected) == expected
    assert known_fields({"type": "t", "parts": [{"a": 1}]}, expected) != expected
    assert known_fields({"type": "t", "kept": 1, "parts": []}, expected) != expected
