"""Every edit of a recording is reported in full as the first divergence."""

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.events.base import U64_BYTES
from forebay.events.codec import encode
from forebay.events.control import PoolConfigured
from forebay.events.decisions import Advanced, ConsumedRun, RequestRouted
from forebay.events.kv import BlocksStored
from forebay.events.topics import CONTROL, DECISIONS, KV_EVENTS, REQUESTS, SNAPSHOTS, Topic
from tests.benchmarks.recordings import Shape, write_recording
from tests.cli.up import forebay as process
from tests.replay.mutations import find, replace_record, rewrite_topic, verify

WORKERS, DECISIONS_MADE = 4, 200
Divergence = dict[str, Any]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log with shared prompts whose journal ends with a digest."""
    path = tmp_path_factory.mktemp("recordings") / "original.db"
    asyncio.run(write_recording(path, Shape(WORKERS, DECISIONS_MADE, snapshot_every=100)))
    return path


@pytest.fixture
def recording(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(original, tmp_path / "changed.db"))


def divergence(path: Path) -> Divergence:
    run = verify(path, "--json")
    assert run.returncode == 1, run.stderr
    result = json.loads(run.stdout)
    report: Divergence = result["divergence"]
    assert result["verified"] == result["decisions"] - (report["recorded"]["type"].startswith("request."))
    return report


def routed(path: Path, after: int = 60) -> tuple[int, RequestRouted]:
    """Return the first decision after `seq` `after` that had another candidate."""

    def wanted(event: object) -> bool:
        return isinstance(event, RequestRouted) and event.seq > after and event.runner_up is not None

    return find(path, DECISIONS, wanted)


def edit(path: Path, topic: Topic, offset: int, event: Any, **changes: Any) -> None:
    replace_record(path, topic, offset, lambda _: encode(topic, msgspec.structs.replace(event, **changes)))


def test_the_original_is_verified(original: Path) -> None:
    run = process("verify", str(original))
    assert run.returncode == 0
    assert f"decisions  {DECISIONS_MADE}, verified {DECISIONS_MADE}" in run.stdout


def test_changed_kv_event_that_alters_an_overlap(recording: Path) -> None:
    offset, stored = find(
        recording, KV_EVENTS, lambda event: isinstance(event, BlocksStored) and event.parent_hash is None
    )
    edit(recording, KV_EVENTS, offset, stored, sequence_hashes=stored.sequence_hashes[: 2 * U64_BYTES])
    report = divergence(recording)
    assert report["recorded"]["type"] == report["derived"]["type"] == "request.routed"
    table = report["table"]
    assert table["digest"] != table["recorded_digest"]
    assert len(table["rows"]) == table["recorded_candidates"] == WORKERS
    differing = [row for row in table["rows"] if "device_overlap" in row["differs"]]
    assert [row["worker_id"] for row in differing] == [stored.worker_id]
    assert differing[0]["derived"]["device_overlap"] < differing[0]["recorded"]["device_overlap"]
    suspects = [*report["suspicion"]["likely"], *report["suspicion"]["others"]]
    assert ("kv-events", offset) in [(one["topic"], one["offset"]) for one in suspects]
    assert report["events"][-1]["type"] == "request.submitted"
    assert report["events"][-1]["now_us"] == report["recorded"]["consumed"][-1]["now_us"]
    assert report["previous"]["offset"] == report["offset"] - 1
    assert report["held"]["since"]["kv-events"][0] <= offset < report["held"]["since"]["kv-events"][1]
    shown = verify(recording)
    assert shown.returncode == 1
    for words in ("DIVERGENCE", "Cost table", "!=", "holds only the terms of the winner", "Suspected events"):
        assert words in shown.stdout, shown.stdout


def test_changed_cost_weight(recording: Path) -> None:
    offset, pool = find(recording, CONTROL, lambda event: isinstance(event, PoolConfigured))
    router = msgspec.structs.replace(pool.router, overlap_score_credit=0.5)
    edit(recording, CONTROL, offset, pool, router=router)
    report = divergence(recording)
    assert any("overlap_credit" in row["differs"] for row in report["table"]["rows"])
    texts = [one["text"] for one in report["suspicion"]["others"]]
    assert any("overlap_score_credit 0.5" in text for text in texts)


def test_changed_worker(recording: Path) -> None:
    offset, event = routed(recording)
    assert event.runner_up is not None
    edit(recording, DECISIONS, offset, event, worker_id=event.runner_up.worker_id)
    report = divergence(recording)
    assert report["offset"] == offset
    assert list(report["differs"]) == ["worker_id"]
    assert "equal digests" in report["hint"]


def test_changed_table_digest(recording: Path) -> None:
    offset, event = routed(recording)
    edit(recording, DECISIONS, offset, event, table_digest="0" * 16)
    report = divergence(recording)
    assert (report["offset"], list(report["differs"])) == (offset, ["table_digest"])
    assert "the digest or a candidate" in report["hint"]


def test_removed_decision(recording: Path) -> None:
    offset, event = routed(recording)

    def remove(values: list[bytes]) -> list[bytes]:
        del values[offset]
        return values

    rewrite_topic(recording, DECISIONS, remove)
    report = divergence(recording)
    assert report["offset"] == offset
    assert f"its seq is {event.seq + 1}, that of the previous record is {event.seq - 1}: 1 records" in report["hint"]


def test_repeated_decision(recording: Path) -> None:
    """It has no effect, so it is counted and does not fail the verification."""
    offset, _ = routed(recording)
    before = json.loads(process("verify", "--json", str(recording)).stdout)
    rewrite_topic(recording, DECISIONS, lambda values: [*values, values[offset]])
    run = process("verify", "--json", str(recording))
    after = json.loads(run.stdout)
    assert (run.returncode, after["repeated"]) == (0, 1)
    assert after | {"repeated": 0} == before
    assert "repeated   1 records that repeat an earlier record" in process("verify", str(recording)).stdout


def test_swapped_decisions(recording: Path) -> None:
    offset, _ = routed(recording)

    def swap(values: list[bytes]) -> list[bytes]:
        values[offset], values[offset + 1] = values[offset + 1], values[offset]
        return values

    rewrite_topic(recording, DECISIONS, swap)
    report = divergence(recording)
    assert report["offset"] == offset
    assert "are missing or were moved" in report["hint"]


def test_changed_clock_reading(recording: Path) -> None:
    """Decisions are equal but deadlines differ, so the next digest diverges."""
    offset, event = routed(recording)
    *runs, last = event.consumed
    later = ConsumedRun(topic=last.topic, count=last.count, now_us=last.now_us + 1)
    edit(recording, DECISIONS, offset, event, consumed=(*runs, later))
    report = divergence(recording)
    assert report["offset"] > offset
    assert report["recorded"]["type"] in {"advanced", "request.routed"}
    assert "digest" in report["differs"] or "backwards" in report["reason"]


def test_changed_state_digest(recording: Path) -> None:
    offset, event = find(recording, DECISIONS, lambda event: isinstance(event, Advanced))
    edit(recording, DECISIONS, offset, event, digest="0" * 16)
    report = divergence(recording)
    assert (report["offset"], list(report["differs"])) == (offset, ["digest"])
    assert report["table"] is None
    shown = verify(recording)
    assert "differs from the sealed digest" in shown.stdout


def test_a_later_divergence_is_bracketed_by_the_previous_digest(recording: Path) -> None:
    digest, _ = find(recording, DECISIONS, lambda event: isinstance(event, Advanced))
    offset, event = routed(recording, after=digest + 5)
    edit(recording, DECISIONS, offset, event, ties=event.ties + 1)
    report = divergence(recording)
    assert report["held"]["sealed"]
    assert report["held"]["journal_offset"] == digest


@pytest.mark.parametrize("topic", [DECISIONS, REQUESTS, KV_EVENTS, SNAPSHOTS], ids=lambda topic: topic.name)
def test_a_flipped_byte_is_reported_as_damage(recording: Path, topic: Topic) -> None:
    with closing(sqlite3.connect(recording)) as db, db:
        (value,) = db.execute(f'SELECT value FROM "{topic.name}" WHERE id = 0').fetchone()
        flipped = value[:-1] + bytes([value[-1] ^ 1])
        db.execute(f'UPDATE "{topic.name}" SET value = ? WHERE id = 0', (flipped,))
    run = verify(recording)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert f"{topic.name}/0: the record at offset 0 does not match its checksum" in run.stderr
