"""Comparisons of logs whose journal has parts by owners with other decision rules."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from forebay.core.world import CORE_VERSION
from forebay.events.control import PoolConfigured
from forebay.replay.diff.diff import diff
from forebay.replay.diff.span import EmptySpan, span_of
from forebay.replay.spans import OtherSpan
from forebay.transport.base import NotDerivable
from forebay.transport.sqlite.log import SqliteLog
from tests.cli import in_process
from tests.live.programs import OTHER, OTHER_RELEASE
from tests.replay.upgrades.upgraded import Upgraded, upgraded

RULES = f"version {OTHER} of the rules (forebay {OTHER_RELEASE})"


def unchanged(pool: PoolConfigured) -> PoolConfigured:
    return pool


def at_random(pool: PoolConfigured) -> PoolConfigured:
    return pool.with_mode("random")


def left_out(made: Upgraded, number: int) -> OtherSpan:
    first, end = made.claims[number], made.seals[number] + 1
    return OtherSpan(rules=OTHER, release=OTHER_RELEASE, first=first, end=end, decisions=1)


@pytest.mark.parametrize(("owners", "compared"), [("oxo", 2), ("ox", 1), ("xo", 1), ("xoxox", 2), ("oo", 2)])
async def test_only_decisions_with_own_rules_are_compared(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, owners: str, compared: int
) -> None:
    made = await upgraded(monkeypatch, log, owners)
    report = await diff(log, 0, unchanged)
    assert (report.identical, report.moved.compared, report.history.decisions) == (True, compared, compared)
    assert report.left_out == [left_out(made, number) for number, letter in enumerate(owners) if letter == "x"]
    assert report.state == report.other_state
    assert sum("Left out: 1 decision at journal offsets" in note for note in report.notes) == owners.count("x")


async def test_an_alternative_is_compared_in_each_part(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    await upgraded(monkeypatch, log, "oxo")
    report = await diff(log, 0, at_random)
    assert (report.moved.evaluated, report.requests, report.other.decisions) == (2, 2, 2)
    assert report.state != report.other_state
    assert any(f"made by {RULES}" in note for note in report.notes)


async def test_a_window_selects_parts(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await upgraded(monkeypatch, log, "oxox")
    times = [await made.clock(offset) for offset in made.routed]
    only_third = await span_of(log, 0, times[2], times[3])
    assert (only_third.first, only_third.end, only_third.left_out) == (made.routed[2], made.seals[2] + 1, ())
    report = await diff(log, 0, unchanged, span=await span_of(log, 0, times[1]))
    assert (report.moved.compared, report.left_out) == (1, [left_out(made, 1), left_out(made, 3)])
    with pytest.raises(NotDerivable, match="nothing to compare"):
        await span_of(log, 0, times[1], times[2])
    with pytest.raises(EmptySpan):
        await span_of(log, 0, times[3] + 60_000_000)


async def test_the_command_names_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.db"
    log = SqliteLog.open(path)
    await upgraded(monkeypatch, log, "oxo")
    log.close()
    command = ("replay", "diff", str(path), "--policy", "random")
    ran = await asyncio.to_thread(in_process.forebay, *command)
    assert ran.returncode == 0
    assert f"Left out: 1 decision at journal offsets 4 to 7, made by {RULES}" in " ".join(ran.stdout.split())
    ran = await asyncio.to_thread(in_process.forebay, *command, "--json")
    assert msgspec.json.decode(ran.stdout)["left_out"][0]["decisions"] == 1


async def test_the_command_exits_with_3_if_nothing_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.db"
    log = SqliteLog.open(path)
    await upgraded(monkeypatch, log, "xx")
    log.close()
    ran = await asyncio.to_thread(in_process.forebay, "replay", "diff", str(path), "--policy", "random")
    assert (ran.returncode, ran.stdout) == (3, "")
    text = f"nothing to compare: {RULES} made all 2 decisions, this program has version {CORE_VERSION}"
    assert text in ran.stderr
