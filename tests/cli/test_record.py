"""`forebay record` and `forebay restore`."""

import asyncio
import json
import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from forebay.cli import restore
from forebay.core.scaling.decide import decide
from forebay.core.step import AnyDecision
from forebay.events.base import Event
from forebay.events.codec import decode, encode
from forebay.events.control import PolicySet, PoolConfigured
from forebay.events.groups import GroupPlaced
from forebay.events.pools import PoolDrainSet
from forebay.events.requests import RequestSubmitted
from forebay.events.scaling import PoolScaling
from forebay.events.topics import CONTROL, DECISIONS, GROUPS, REQUESTS, SCALING
from forebay.replay.group_settings import RestoredGroup
from forebay.replay.record import slice as record
from forebay.replay.verify.golden import check_recording
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from forebay.transport.sqlite.recording import utc
from forebay.transport.sqlite.recording_writer import part_of
from forebay.transport.sqlite.schema import checksum
from tests.cli.in_process import error_of, forebay
from tests.cli.logs import US, at, invoke, made
from tests.cli.up import verified
from tests.core.scaling.scene import GROUP, POOL, Journal, applied, observed
from tests.harness.local import free_ports
from tests.harness.scaling_decisions import decisions_of
from tests.live.planning import append
from tests.replay.mutations import replace_record
from tests.replay.slices import OTHER, joined_log, journal_of, opened, source_log
from tests.system import MODEL


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_log(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def joined(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return joined_log(source, tmp_path_factory.mktemp("joined"))


def test_a_whole_log_is_recorded(source: Path, tmp_path: Path) -> None:
    result = invoke("record", source, tmp_path / "rec")
    assert result.exit_code == 0, result.output
    journal = journal_of(source)
    fields = dict(re.findall(r"^ *(\w+) +(.*)$", result.stdout, re.MULTILINE))
    assert fields["window"] == f"{utc(journal[0].at_us)} to {utc(journal[-1].at_us)}"
    assert fields["group"] == f"{MODEL}: control partition 0, pools default"
    assert f"offsets 0 to {len(journal) - 1}, starting at the log's beginning" in fields["journal"]
    assert f"decisions {len(journal)}" in fields["records"]
    assert re.fullmatch(r"(\d+) of \1 decisions, digest of the final state [0-9a-f]{16}", fields["verified"])
    assert re.fullmatch(rf"{tmp_path}/rec, \d\.\d MB, digest of all records [0-9a-f]{{32}}", fields["recorded"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rec"]
    # Events not yet applied at the end of the log are not recorded.
    assert verified(tmp_path / "rec") == {**verified(source), "unapplied": 0}


def test_windows_by_time(source: Path, tmp_path: Path) -> None:
    journal = journal_of(source)
    first, last = journal[len(journal) // 2], journal[-3]
    by_time = made("--from", at(first.at_us), "--to", at(last.at_us), source, tmp_path / "a")
    assert (by_time["from"], by_time["source"], by_time["anonymized"]) == (utc(first.at_us), "log", False)
    assert by_time["groups"][0]["start"] > 0
    assert by_time["groups"][0]["end"] == next(one.offset for one in journal if one.at_us == last.at_us)
    newest_us = max(one.at_us for one in journal if isinstance(decode(DECISIONS, one.value), AnyDecision))
    span_s = (newest_us - first.at_us) / US
    by_span = made("--last", f"{span_s:.6f}s", source, tmp_path / "b")
    inside = [one for one in journal if one.at_us > newest_us - round(span_s * US)]
    assert by_span["groups"][0]["first"] == inside[0].offset
    assert by_span["groups"][0]["end"] == journal[-1].offset + 1
    again = made(tmp_path / "a", tmp_path / "c")
    assert again["source"] == "recording"
    assert again["groups"][0]["first"] == by_time["groups"][0]["start"] == again["groups"][0]["start"]
    # A window that starts before the log would be incomplete.
    earliest = utc(journal[again["groups"][0]["start"]].at_us)
    text = error_of("record", "--from", "-1d", tmp_path / "a", tmp_path / "d")
    assert text.startswith("the window begins too early: control partition ")
    assert f" can be recorded from {earliest} on" in text
    assert ", no decisions before offset" in text


def test_scaling_decisions_are_recorded_from_the_first_one_to_the_end_of_the_window(
    source: Path, tmp_path: Path
) -> None:
    log = Path(shutil.copy(source, tmp_path / "log.db"))
    before = at(journal_of(log)[-1].at_us + 1)
    asyncio.run(scaled(log))
    made("--last", "1s", log, tmp_path / "a")
    made(tmp_path / "a", tmp_path / "b")
    for path in (tmp_path / "a", tmp_path / "b"):
        with opened(path) as recorded:
            events = [(one.offset, decode(SCALING, one.value)) for one in recorded.records(SCALING.name, 0, 0, 100)]
        (decision,) = decisions_of(events)
        assert decision.is_verified
        assert (decision.decided.pools[0].to_size, len(events)) == (6, 4)
    shown = invoke("record", log, tmp_path / "shown").stdout
    assert "scaling    4 records of the planner\nscaling    1 of 1 decisions derived again: equal\n" in shown
    for number, options in enumerate((["--to", before], ["--anonymize"])):
        fields = made(*options, log, tmp_path / f"without-{number}")
        assert SCALING.name not in {one["topic"] for one in fields["extents"]}


def test_a_scaling_decision_that_does_not_follow_fails_the_recording(source: Path, tmp_path: Path) -> None:
    log, out = Path(shutil.copy(source, tmp_path / "log.db")), tmp_path / "rec"
    asyncio.run(scaled(log, size=7))
    result = invoke("record", log, out)
    assert result.exit_code == 1
    assert "llama/default to_size: recorded 7, derived 6" in result.output
    with pytest.raises(AssertionError, match="1 scaling decisions do not follow"):
        check_recording(out)


async def scaled(path: Path, size: int = 6) -> None:
    """Append a decision of a planner and its reply to a log. The planner would decide the size 6."""
    with closing(SqliteLog.open(path)) as log:
        journal = Journal()
        epoch = journal.claim(pools=(PoolScaling(group=GROUP, pool=POOL, min_size=6),))
        journal.add(observed(epoch, ready=2))
        decision = decide(journal.state)
        assert decision is not None
        pool = msgspec.structs.replace(decision.pools[0], to_size=size)
        journal.add(msgspec.structs.replace(decision, pools=(pool,)))
        journal.add(applied(decision=2, size=6))
        await append(log, *journal.records)


def test_last_is_relative_to_the_newest_decision(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle owner keeps writing digests and snapshots."""
    monkeypatch.setattr(record, "PAGE_RECORDS", 2)
    idle = Path(shutil.copy(source, tmp_path / "idle.db"))
    offsets = [one.offset for one in journal_of(idle) if isinstance(decode(DECISIONS, one.value), AnyDecision)]
    later(idle, offsets[-1] + 1, 3_600 * US)
    fields = made("--last", "30s", idle, tmp_path / "rec")
    assert fields["groups"][0]["decisions"] == len(offsets)
    later(idle, 0, 1 << 62)
    assert "invalid append time" in error_of("record", "--last", "30s", idle, tmp_path / "again")


def later(path: Path, first: int, by_us: int) -> None:
    """Shift the times of journal records from an offset on by `by_us`."""
    with closing(sqlite3.connect(path)) as db, db:
        for row_id, at_us, value in db.execute(
            "SELECT id, at_us, value FROM decisions WHERE id >= ?", (first,)
        ).fetchall():
            sealed = checksum(DECISIONS.name, 0, row_id, at_us + by_us, None, None, value)
            db.execute("UPDATE decisions SET at_us = ?, checksum = ? WHERE id = ?", (at_us + by_us, sealed, row_id))


def test_verification_can_be_skipped(source: Path, tmp_path: Path) -> None:
    result = invoke("record", "--no-verify", source, tmp_path / "rec")
    assert result.exit_code == 0, result.output
    assert f"not verified; run `forebay verify {tmp_path}/rec`" in result.stdout
    assert made("--no-verify", tmp_path / "rec", tmp_path / "again")["verified"] == {}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--last", "5"], "--last 5: not a duration; expected a number above 0 with s, m, h or d"),
        (["--last", "-5m"], "--last -5m: not a duration"),
        (["--last", "0s"], "--last 0s: not a duration"),
        (["--last", "5m", "--from", "-1h"], "--last cannot be combined with --from or --to"),
        (["--from", "yesterday"], "--from yesterday: not a time; expected 2026-01-31T12:00:00Z (local time"),
        (["--to", "-5"], "--to 5: not a duration"),
        (["--from", "2026-01-02", "--to", "2026-01-01"], "--from 2026-01-02 is not before --to 2026-01-01"),
        (["--from", "-5m", "--to", "-5m"], "--from -5m is not before --to -5m"),
        (["--from", "2999-01-01"], "--from 2999-01-01 is in the future"),
        (["--to", "2020-01-01"], f"group {MODEL} made no decision in the window; its journal covers 20"),
        (["--group", "nobody"], f"SOURCE: unknown group 'nobody'; groups are: {MODEL}"),
    ],
)
def test_invalid_options_are_rejected(source: Path, tmp_path: Path, options: list[str], text: str) -> None:
    assert error_of("record", *options, source, tmp_path / "rec").startswith(text.replace("SOURCE", str(source)))
    assert list(tmp_path.iterdir()) == []


def test_invalid_output_paths_are_rejected(source: Path, tmp_path: Path) -> None:
    assert error_of("record", tmp_path / "rec") == "expected LOG and OUT, or OUT and --kafka"
    assert (
        error_of("record", "--kafka", "127.0.0.1:1", source, tmp_path / "rec")
        == "expected LOG and OUT, or OUT and --kafka"
    )
    assert "cannot be used" in error_of("record", "--kafka", "127.0.0.1:1", tmp_path / "rec")
    assert "there is no directory" in error_of("record", source, tmp_path / "deeper" / "rec")
    (tmp_path / "text").write_text("hello, world\n" * 99)
    assert "is not a forebay log" in error_of("record", tmp_path / "text", tmp_path / "rec")
    SqliteLog.open(tmp_path / "empty.db").close()
    assert "journal of group 0 is empty" in error_of("record", tmp_path / "empty.db", tmp_path / "rec")
    assert error_of("record", source, tmp_path / "text").endswith(
        "text: exists already; remove it or choose another path"
    )
    assert error_of("record", source, source).endswith("exists already; remove it or choose another path")
    assert (tmp_path / "text").read_text().startswith("hello")
    os.mkfifo(tmp_path / "pipe")  # opening it would block until a writer opens it
    assert (
        error_of("record", tmp_path / "pipe", tmp_path / "rec")
        == f"{tmp_path}/pipe: is not a regular file; choose another path"
    )
    os.mkfifo(part_of(tmp_path / "rec"))
    assert "rec.part: is not a regular file" in error_of("record", source, tmp_path / "rec")
    for length in (252, 300):
        assert "cannot be accessed (File name too long)" in error_of("record", source, tmp_path / ("x" * length))


def test_groups_are_selected_by_name(joined: Path, tmp_path: Path) -> None:
    both = made(joined, tmp_path / "both")
    assert [(one["name"], one["partition"], one["pools"]) for one in both["groups"]] == [
        (MODEL, 0, ["default"]),
        (OTHER, 1, ["default"]),
    ]
    assert set(both["verified"]) == {MODEL, OTHER}
    one = made("--group", OTHER, joined, tmp_path / "one")
    assert [group["name"] for group in one["groups"]] == [OTHER]
    repeated = made("--group", OTHER, "--group", MODEL, joined, tmp_path / "repeated")
    assert repeated["groups"] == both["groups"]
    # With several groups, the other commands need a selection. A recording lists its groups.
    assert "--group is required; " in invoke("verify", tmp_path / "both").stderr
    for name in (MODEL, OTHER):
        assert invoke("verify", "--group", name, tmp_path / "both").exit_code == 0
    assert invoke("verify", tmp_path / "one").exit_code == 0
    result = invoke("verify", "--group", MODEL, tmp_path / "one")
    assert (result.exit_code, result.stderr) == (
        2,
        f"forebay: {tmp_path}/one: unknown group '{MODEL}'; groups are: {OTHER}\n",
    )


def test_a_group_without_decisions_is_excluded_and_reported(joined: Path, tmp_path: Path) -> None:
    """The run of the other group started after the end of this one."""
    newest = journal_of(joined)[-1].at_us
    result = invoke("record", "--from", at(newest + 1), joined, tmp_path / "rec")
    assert result.exit_code == 0, result.output
    assert result.stderr == f"skipped: {MODEL} made no decision in the window\n"
    assert f"group      {OTHER}" in result.stdout
    assert f"group      {MODEL}" not in result.stdout
    for options in (["--group", MODEL], ["--group", MODEL, "--group", OTHER]):
        text = error_of("record", *options, "--from", at(newest + 1), joined, tmp_path / "named")
        assert f"group {MODEL} made no decision in the window" in text
    text = error_of("record", "--to", "2020-01-01", joined, tmp_path / "none")
    assert text == (
        f"no selected group made a decision in the window; choose another window (groups: {MODEL}, {OTHER})"
    )


def test_every_command_works_on_a_slice(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "rec"
    held = made("--from", at(journal_of(source)[-6].at_us), source, out)
    starts = {extent["topic"]: extent for extent in held["extents"]}
    assert invoke("verify", out).exit_code == 0
    assert invoke("index", out).stdout == invoke("index", source).stdout != ""
    listed = invoke("topics", "list", out).stdout.splitlines()
    assert f"decisions/0\t{starts['decisions']['end']}" in listed
    assert not [line for line in listed if line.startswith("control")]
    tail = invoke("topics", "tail", out, "requests", "--offset", "0").stdout.splitlines()
    assert [json.loads(line)["offset"] for line in tail] == list(
        range(starts["requests"]["first"], starts["requests"]["end"])
    )
    assert len(invoke("topics", "tail", out, "decisions", "-n", "1000").stdout.splitlines()) == len(
        range(starts["decisions"]["first"], starts["decisions"]["end"])
    )
    assert invoke("topics", "tail", out, "tokens").exit_code == 2


def test_a_recording_that_does_not_verify_is_kept_and_the_exit_code_is_1(source: Path, tmp_path: Path) -> None:
    lied = tmp_path / "lied.db"
    lied.write_bytes(source.read_bytes())
    offset = next(one.offset for one in reversed(journal_of(lied)) if b'"request.routed"' in one.value)
    replace_record(lied, DECISIONS, offset, lambda value: value.replace(b'"cost":', b'"cost":1'))
    result = invoke("record", lied, tmp_path / "rec")
    assert result.exit_code == 1
    assert f"DIVERGENCE at journal offset {offset}: differs in terms" in result.stdout
    again = invoke("verify", "--json", tmp_path / "rec")
    assert (again.exit_code, json.loads(again.stdout)["divergence"]["offset"]) == (1, offset)


def requests(path: Path) -> list[RequestSubmitted]:
    with opened(path) as log:
        first = asyncio.run(log.begin(REQUESTS.name, 0))
        events = [decode(REQUESTS, record.value) for record in log.records(REQUESTS.name, 0, first, 10_000)]
    return [event for event in events if isinstance(event, RequestSubmitted)]


def test_a_log_is_recorded_without_client_content(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.rec"
    fields = made("--anonymize", source, out)
    assert fields["anonymized"] is True
    assert fields["verified"][MODEL]["verified"] > 20
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
    assert made(tmp_path / "out.rec", tmp_path / "again.rec")["anonymized"] is True


def test_several_groups_are_anonymised(joined: Path, tmp_path: Path) -> None:
    assert set(made("--anonymize", joined, tmp_path / "out.rec")["verified"]) == {MODEL, OTHER}


def test_an_anonymised_recording_is_always_verified(source: Path, tmp_path: Path) -> None:
    text = error_of("record", source, tmp_path / "out.rec", "--anonymize", "--no-verify")
    assert text == "an anonymised recording is always verified; remove --no-verify"
    assert not (tmp_path / "out.rec").exists()


RESTORED_POOL = PoolConfigured(pool="default", model="m", block_size=16)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


def write(path: Path, partition: int, *events: Event) -> None:
    """Write a log with a group and its settings."""

    async def append() -> None:
        with closing(SqliteLog.open(path)) as log:
            placed = GroupPlaced(group="m", partition=partition)
            await log.append([Draft(GROUPS.name, 0, encode(GROUPS, placed))])
            await log.append([Draft(CONTROL.name, partition, encode(CONTROL, event)) for event in events])

    asyncio.run(append())


def test_more_control_partitions_than_planned_are_required(path: Path) -> None:
    write(path, 5, RESTORED_POOL)
    assert (
        error_of("restore", path, "--namespace", "new")
        == "--partitions groups=4: m uses the control partition 5; expected at least 6"
    )


def test_an_unreachable_broker_and_a_missing_log_are_named(path: Path) -> None:
    assert "no such log file" in error_of("restore", path, "--namespace", "new")
    write(path, 0, RESTORED_POOL)
    address = f"127.0.0.1:{free_ports(1)}"
    assert error_of("restore", path, "--namespace", "new", "--kafka", address).startswith(
        f"Kafka at {address} cannot be used"
    )


def test_an_anonymised_recording_is_refused(tmp_path: Path) -> None:
    made("--anonymize", source_log(tmp_path), tmp_path / "masked.rec")
    assert error_of("restore", tmp_path / "masked.rec", "--namespace", "new") == (
        "an anonymised recording has masked names of models and pools; use the original recording"
    )


def test_the_report_counts_what_is_restored(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    custom = "package.Policy"
    write(
        path,
        1,
        RESTORED_POOL,
        RESTORED_POOL.with_mode("random"),
        PolicySet(model="m", pool="default", mode=custom),
        PoolDrainSet(model="m", pool="old", drained=True),
    )
    written: list[RestoredGroup] = []

    async def restored(groups: list[RestoredGroup], *_: object) -> int:
        written.extend(groups)
        return 17

    monkeypatch.setattr(restore, "restore_into", restored)
    run = forebay("restore", path, "--namespace", "new")
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines() == [
        "namespace new: 17 topics created, 1 group",
        "group     m: control partition 1, pools default",
        "  restored 1 pools, 1 policies, 0 busy thresholds, 0 disaggregation settings, 0 routing rules, 0 canaries,"
        " 1 drains",
        "  from     4 changes of settings; skipped 0 commands",
        f"  start every router with --allow-policy {custom}",
        "not restored: workers, leases, requests, sessions, caches, and the journal of the planner",
        "next: start routers, workers and ingresses with --namespace new",
    ]
    assert [group.name for group in written] == ["m"]
