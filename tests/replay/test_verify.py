"""Verification gives the same result in other processes and hash seeds, and detects every change."""

import asyncio
import json
import sqlite3
import subprocess
from pathlib import Path

import msgspec
import pytest

from forebay.events.codec import encode
from forebay.events.decisions import RequestRouted
from forebay.events.kv import BlocksStored
from forebay.events.topics import DECISIONS, KV_EVENTS
from forebay.replay.verify.verify import VerifyReport, verify
from forebay.transport.base import LogError
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import forebay
from tests.replay.rewriting import find, rewrite
from tests.system import System, submitted, until, until_ended

PREFIX = list(range(16))
REQUESTS_SENT = 12


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Return a log with two owners, a lost worker, a snapshot and prefix reuse."""
    path = tmp_path / "recording.db"
    asyncio.run(_record(path))
    return path


async def _record(path: Path) -> None:
    log = SqliteLog.open(path)
    async with System(log).started(workers=3) as system:
        for life in range(2):
            async with system.owned() as owner:
                await until(lambda: len(owner.world.fleet) >= 2)
                for number in range(life * REQUESTS_SENT, (life + 1) * REQUESTS_SENT):
                    system.send(submitted(f"r{number}", [*PREFIX, *[number % 5] * 8]))
                    await until_ended(system, f"r{number}")
                await until(lambda: not len(owner.world.requests))
            if not life:
                await system.stop_worker("w0")
    log.close()


def command(recording: Path) -> subprocess.CompletedProcess[str]:
    return forebay("verify", str(recording), "--json")


def test_every_decision_of_two_owners_is_derived_again(recording: Path) -> None:
    run = command(recording)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["decisions"] == report["verified"] >= 2 * REQUESTS_SENT
    assert report["claims"] == 2
    assert report["snapshots"] == 2
    assert report["divergence"] is None


def report_of(path: Path) -> VerifyReport:
    log = SqliteLog.open(path, readonly=True)
    try:
        return asyncio.run(verify(log))
    finally:
        log.close()


def test_a_changed_decision_is_the_first_divergence(recording: Path) -> None:
    offset, event = find(recording, DECISIONS, lambda event: isinstance(event, RequestRouted) and event.seq > 5)
    assert isinstance(event, RequestRouted)
    terms = msgspec.structs.replace(event.terms, cost=event.terms.cost + 1)
    lie = msgspec.structs.replace(event, terms=terms)
    rewrite(recording, DECISIONS, offset, lambda _: encode(DECISIONS, lie))
    report = report_of(recording)
    assert report.divergence is not None
    assert report.divergence.offset == offset
    assert list(report.divergence.differs) == ["terms.cost"]
    assert report.verified == report.decisions - 1
    run = command(recording)
    assert run.returncode == 1
    assert json.loads(run.stdout)["divergence"]["offset"] == offset


def test_a_changed_kv_event_that_alters_an_overlap_is_detected(recording: Path) -> None:
    offset, event = find(recording, KV_EVENTS, lambda event: isinstance(event, BlocksStored))
    assert isinstance(event, BlocksStored)
    lie = msgspec.structs.replace(event, sequence_hashes=bytes(len(event.sequence_hashes)))
    rewrite(recording, KV_EVENTS, offset, lambda _: encode(KV_EVENTS, lie))
    report = report_of(recording)
    assert report.divergence is not None
    assert report.divergence.recorded["type"] == "request.routed"
    assert "table_digest" in report.divergence.reason


@pytest.mark.parametrize("topic", ["decisions", "requests", "kv-events", "snapshots"])
def test_error_names_a_flipped_byte(recording: Path, topic: str) -> None:
    db = sqlite3.connect(recording)
    (value,) = db.execute(f'SELECT value FROM "{topic}" WHERE id = 0').fetchone()
    flipped = bytes([value[0], value[1] ^ 1, *value[2:]])
    db.execute(f'UPDATE "{topic}" SET value = ? WHERE id = 0', (flipped,))
    db.commit()
    db.close()
    with pytest.raises(LogError, match=topic):
        report_of(recording)
    assert command(recording).returncode == 2


def test_a_journal_that_applies_more_events_than_exist_is_rejected(recording: Path) -> None:
    db = sqlite3.connect(recording)
    db.execute('DELETE FROM "progress" WHERE id > 3')
    db.commit()
    db.close()
    with pytest.raises(LogError, match="progress"):
        report_of(recording)


def test_an_empty_log_verifies_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    SqliteLog.open(path).close()
    run = command(path)
    assert run.returncode == 0
    assert json.loads(run.stdout)["decisions"] == 0
