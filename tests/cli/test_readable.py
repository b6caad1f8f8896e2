"""Every record of every topic can be shown as JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.transport.base import Record
from forebay.transport.readable import readable
from tests.harness.samples import SAMPLES

FULL = sorted(path for path in SAMPLES.glob("*/full.*"))


def shown(path: Path) -> dict[str, Any]:
    topic = json.loads((path.parent / "expected.json").read_text())["topic"].replace("<pool>", "default")
    record = Record(topic, 0, 0, 0, path.read_bytes())
    read: dict[str, Any] = json.loads(json.dumps(readable(record)))
    return read


@pytest.mark.parametrize("path", FULL, ids=lambda path: path.parent.name)
def test_every_event_can_be_shown(path: Path) -> None:
    assert "event" in shown(path)


def test_binary_fields_are_shown_as_their_size() -> None:
    event = shown(SAMPLES / "progress.prefill_finished" / "full.json")["event"]
    assert event["prefilled"]["descriptor"].endswith(" bytes")
