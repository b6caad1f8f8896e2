"""`forebay bill` on a log: what it prints, what it finds, and its exit codes."""

import asyncio
import csv
import io
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from forebay.events.progress import RequestFinished
from forebay.events.topics import USAGE
from forebay.journal.usage import HOUR_US
from forebay.live.ledger import ChainWriter
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import error_of, forebay, json_of
from tests.replay.recorder import fleet

NOVEMBER = 490_896 * HOUR_US  # Unix time of the 2026-01-01 in hours
DAYS = 31 * 24 * HOUR_US


def log_of(path: Path, *, has_ledger: bool, changed: int = -1) -> Path:
    """Write a log of two tenants in January and February 2026, with a ledger of two records."""
    made = fleet()
    made("control", None, NOVEMBER)
    for number, tenant in enumerate(("acme", "umbrella", "acme")):
        made.ask(f"r{number}", tenant=tenant, key_id=f"k{number}", timeout_us=80_000_000_000)
        made.progress(f"r{number}", RequestFinished, 1_500_000, finish_reason="stop", output_tokens=number + 1)
        made.seal()
    half = len(made.journal)
    made("control", None, DAYS)
    made.ask("later", tenant="acme", key_id="k0")
    made.progress("later", RequestFinished, finish_reason="stop", output_tokens=100)
    made.seal()

    async def write() -> None:
        with closing(SqliteLog.open(path)) as log:
            await log.append(made.drafts)
            journal = made.journal_drafts()
            values: list[bytes] = []
            with closing(SqliteLog.open(None)) as other:
                await other.append(made.drafts)
                for drafts in (journal[:half], journal[half:]):
                    await log.append(drafts)
                    await other.append(drafts)
                    await ChainWriter(other, 0).advance(is_last=True)
                values = [record.value for record in other.records(USAGE.name, 0, 0, 9)]
            assert len(values) == 2
            if changed >= 0:
                values[changed] = values[changed].replace(b'"output_tokens":', b'"output_tokens":1')
            if has_ledger:
                await log.append([Draft(USAGE.name, 0, value) for value in values])

    asyncio.run(write())
    return path


def rows(*arguments: object) -> list[dict[str, str]]:
    run = forebay("bill", *arguments, "--csv")
    assert run.returncode == 0, run.stderr
    return list(csv.DictReader(io.StringIO(run.stdout)))


@pytest.mark.parametrize("has_ledger", [True, False])
def test_the_bill_of_a_month_has_a_row_per_tenant_key_and_model(tmp_path: Path, has_ledger: bool) -> None:
    log = log_of(tmp_path / "log.db", has_ledger=has_ledger)
    found = rows("show", log, "--month", "2026-01")
    assert [(one["tenant"], one["key"], one["model"], one["output_tokens"]) for one in found] == [
        ("acme", "k0", "m", "1"),
        ("acme", "k2", "m", "3"),
        ("umbrella", "k1", "m", "2"),
    ]
    assert {one["prefill_s"] for one in found} == {"1.500000"}
    assert [one["key"] for one in rows(log, "--month", "2026-01", "--tenant", "acme")] == ["k0", "k2"]
    assert [one["output_tokens"] for one in rows("show", log, "--month", "2026-02")] == ["100"]
    assert rows("show", log, "--month", "2025-12") == []
    table = forebay("bill", "--month", "2026-01", "--tenant", "umbrella", log)
    assert "umbrella" in table.stdout
    assert "acme" not in table.stdout
    assert forebay("bill", log, "--tenant", "").stdout == "no usage\n"


def test_a_ledger_is_verified_against_the_log_and_an_anchor(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log.db", has_ledger=True)
    (report,) = json_of("bill", "verify", log)
    assert (report["records"], report["derived"], report["differences"]) == (2, 2, [])
    (anchor := tmp_path / "anchor").write_text(json.dumps([report]))
    run = forebay("bill", "verify", log, "--anchor", anchor)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("partition 0: 2 records, 2 derived again, the journal up to offset ")
    other = {**report, "head": "0" * 64}
    anchor.write_text(json.dumps([other, {**other, "partition": 3}]))
    run = forebay("bill", "verify", log, "--anchor", anchor)
    assert run.returncode == 1
    assert "the ledger differs: the anchor has 2 records, the last one with the hash 000" in run.stderr
    assert "1 other differences" in run.stderr


@pytest.mark.parametrize("changed", [0, 1])
def test_a_changed_record_is_named(tmp_path: Path, changed: int) -> None:
    log = log_of(tmp_path / "log.db", has_ledger=True, changed=changed)
    run = forebay("bill", "verify", log)
    assert run.returncode == 1
    assert f"the ledger differs: record at offset {changed} of usage/0 was changed" in run.stderr
    assert "differs: record at offset" in run.stdout
    assert "the ledger is damaged" in forebay("bill", log, "--month", "2026-01").stderr


def test_wrong_input_has_one_clear_error(tmp_path: Path) -> None:
    log = log_of(tmp_path / "log.db", has_ledger=False)

    def error(*arguments: Any) -> str:
        return error_of("bill", *arguments)

    assert error("verify", log) == f"nothing to verify: {log} has no ledger"
    assert error(log, "--month", "2026-13") == "--month 2026-13: expected YYYY-MM, for example 2026-12"
    assert "expected YYYY-MM" in error(log, "--month", "9999-12")
    for text in ("{}", "[]"):
        (anchor := tmp_path / "anchor").write_text(text)
        assert "expected the output of `forebay bill verify --json`" in error("verify", log, "--anchor", anchor)
    assert "No such file" in error("verify", log, "--anchor", tmp_path / "missing")
    assert error("verify") == "expected either a log file or --kafka"
