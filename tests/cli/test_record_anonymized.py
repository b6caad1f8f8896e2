"""The `forebay record --anonymize` command."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from forebay.cli.app import app
from forebay.events.codec import decode
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import REQUESTS
from forebay.transport.sqlite.log import SqliteLog
from tests.replay.slices import OTHER, join, run
from tests.system import MODEL

READ_MAX = 10_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a log of a run with several owners, snapshots and a lost worker."""
    path = tmp_path_factory.mktemp("source") / "run.db"
    asyncio.run(run(path))
    return path


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def requests(path: Path) -> list[RequestSubmitted]:
    log = SqliteLog.open(path, readonly=True)
    first = next(one.first for one in log.recording.extents if one.topic == REQUESTS.name) if log.recording else 0
    events = [decode(REQUESTS, record.value) for record in log.records(REQUESTS.name, 0, first, READ_MAX)]
    log.close()
    return [event for event in events if isinstance(event, RequestSubmitted)]


def test_a_log_is_recorded_without_client_content(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.rec"
    result = invoke("record", source, out, "--anonymize", "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert made["anonymized"] is True
    report = made["verified"][MODEL]
    assert report["verified"] == report["decisions"] > 20
    before, after = requests(source), requests(out)
    assert [one.prompt_tokens for one in before] == [one.prompt_tokens for one in after]
    assert all(one.request_id.startswith("request-") and not one.token_ids for one in after)
    data = out.read_bytes()
    assert str(source).encode() not in data
    verified = invoke("verify", out)
    assert verified.exit_code == 0, verified.output


def test_a_recording_can_be_anonymised_later(source: Path, tmp_path: Path) -> None:
    assert invoke("record", source, tmp_path / "raw.rec").exit_code == 0
    result = invoke("record", tmp_path / "raw.rec", tmp_path / "out.rec", "--anonymize")
    assert result.exit_code == 0, result.output
    assert "anonymised prompts, texts, keys and headers removed, names and hashes masked\n" in result.stdout
    # An anonymised recording stays anonymised when it is recorded again.
    result = invoke("record", tmp_path / "out.rec", tmp_path / "again.rec", "--json")
    assert json.loads(result.stdout)["anonymized"] is True


def test_a_window_is_anonymised(source: Path, tmp_path: Path) -> None:
    result = invoke("record", source, tmp_path / "out.rec", "--anonymize", "--last", "1s", "--json")
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.stdout)["verified"].values()
    assert report["verified"] == report["decisions"] > 0


def test_several_groups_are_anonymised(source: Path, tmp_path: Path) -> None:
    asyncio.run(run(tmp_path / "other.db", owners=2, requests=8))
    asyncio.run(join(source, tmp_path / "other.db", tmp_path / "both.db"))
    result = invoke("record", tmp_path / "both.db", tmp_path / "out.rec", "--anonymize", "--json")
    assert result.exit_code == 0, result.output
    reports = json.loads(result.stdout)["verified"]
    assert set(reports) == {MODEL, OTHER}
    assert all(report["verified"] == report["decisions"] > 0 for report in reports.values())


def test_an_anonymised_recording_is_always_verified(source: Path, tmp_path: Path) -> None:
    result = invoke("record", source, tmp_path / "out.rec", "--anonymize", "--no-verify")
    assert result.exit_code == 2
    assert result.stderr == "forebay: an anonymised recording is always verified; remove --no-verify\n"
    assert not (tmp_path / "out.rec").exists()
