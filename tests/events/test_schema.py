"""The schema registry and docs/events.md match the event types."""

import json
from pathlib import Path

import pytest

from forebay.events.schema import TOPICS, document, registry
from forebay.events.topics import Topic
from tests.harness import schemas
from tests.harness.samples import event_types, tag_of

STALE = "stale: run `make schemas` and commit what it writes"


def test_the_registry_is_up_to_date() -> None:
    committed = {path.stem: json.loads(path.read_text()) for path in schemas.REGISTRY.glob("*.json")}
    assert committed == json.loads(json.dumps(registry())), STALE


def test_the_document_is_up_to_date() -> None:
    assert schemas.DOCUMENT.read_text() == schemas.page(), STALE


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
    (tmp_path / "gone.json").write_text("{}")
    schemas.main()
    assert {path.stem for path in tmp_path.glob("*.json")} == set(registry())
    assert (tmp_path / "events.md").read_text() == schemas.page()


def test_the_document_explains_every_field() -> None:
    rows = [line.split("|") for line in document().splitlines() if line.startswith("| `")]
    assert [row[1].strip() for row in rows if not row[-2].strip()] == [], "describe the field in its class docstring"
