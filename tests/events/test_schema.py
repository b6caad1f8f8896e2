"""The schema registry and docs/events.md match the event types, and samples of all released types still decode."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.events.codec import decode
from forebay.events.topics import Topic
from tests.harness import schemas
from tests.harness.event_schemas import TOPICS, document, registry
from tests.harness.field_tables import pages
from tests.harness.samples import SAMPLES, event_types, readable, samples, tag_of

STALE = "stale: run `make schemas` and commit what it writes"


def test_the_registry_is_up_to_date() -> None:
    committed = {path.stem: json.loads(path.read_text()) for path in schemas.REGISTRY.glob("*.json")}
    assert committed == json.loads(json.dumps(registry())), STALE


def test_the_document_is_up_to_date() -> None:
    assert schemas.DOCUMENT.read_text() == schemas.page(), STALE
    assert {path: path.read_text() for path in pages()} == pages(), STALE


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_the_document_names_every_topic_and_event(topic: Topic) -> None:
    lines = document().splitlines()
    assert f"## `{topic.name}`" in lines
    for cls in event_types(topic):
        assert f"### `{tag_of(cls)}`" in lines


def test_every_link_in_the_document_has_its_heading() -> None:
    text = schemas.page()
    anchors = {line.strip("# `").lower().replace(".", "") for line in text.splitlines() if line.startswith("#")}
    links = {part.split(")")[0] for part in text.split("](#")[1:]}
    assert links
    assert links <= anchors


def test_schemas_state_tags_requirements_and_bounds() -> None:
    submitted = registry()["requests"]["$defs"]["RequestSubmitted"]
    assert submitted["properties"]["type"] == {"enum": ["request.submitted"]}
    assert submitted["properties"]["timeout_us"]["minimum"] == 1
    assert "token_ids" in submitted["required"]
    assert "at_us" not in submitted["required"]


def test_the_writer_replaces_stale_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "REGISTRY", tmp_path)
    monkeypatch.setattr(schemas, "DOCUMENT", tmp_path / "events.md")
    monkeypatch.setattr(schemas, "pages", dict)
    (tmp_path / "gone.json").write_text("{}")
    schemas.main()
    assert {path.stem for path in tmp_path.glob("*.json")} == set(registry())
    assert (tmp_path / "events.md").read_text() == schemas.page()


def test_the_document_explains_every_field() -> None:
    rows = [line.split("|") for line in document().splitlines() if line.startswith("| `")]
    assert [row[1].strip() for row in rows if not row[-2].strip()] == [], "describe the field in its class docstring"


# Golden wire samples


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
