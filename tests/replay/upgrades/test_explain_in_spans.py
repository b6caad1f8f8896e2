"""Explanations of requests that owners with other decision rules have routed."""

import asyncio
from pathlib import Path

import pytest

from forebay.core.world import CORE_VERSION
from forebay.events.codec import encode
from forebay.events.decisions import Advanced, OwnerClaimed, RequestRouted
from forebay.events.topics import DECISIONS
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import Explanation
from forebay.replay.spans import OtherSpan
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.cli import in_process
from tests.live.programs import OTHER, OTHER_RELEASE, PREFIX, Program
from tests.live.shared import Altered
from tests.replay.upgrades.upgraded import upgraded
from tests.system import System, submitted, until, until_ended

DECIDED_BY = f"decided by version {OTHER} of the rules (forebay {OTHER_RELEASE})"


def kinds(explanation: Explanation) -> list[str]:
    return [entry.what for entry in explanation.timeline]


@pytest.mark.parametrize("owners", ["oxo", "xo", "x"])
async def test_a_request_of_other_rules_is_explained_as_recorded(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, owners: str
) -> None:
    made = await upgraded(monkeypatch, log, owners)
    number = owners.index("x")
    found = await explain(log, 0, f"x{number}")
    assert kinds(found) == ["submitted", "routed", "first_token", "finished"]
    cost = (await made.record(made.routed[number])).terms.cost
    assert found.timeline[1].text == f"routed to w0/0: cost {cost:.2f}, the only candidate, {DECIDED_BY}"
    assert (found.state, found.output_tokens, found.routings) == ("finished", 3, ())
    assert found.derived_from == found.derived_to
    first, end = made.claims[number], made.seals[number]
    assert found.recorded == (OtherSpan(rules=OTHER, release=OTHER_RELEASE, first=first, end=end),)


async def test_a_request_after_the_seal_is_derived(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await upgraded(monkeypatch, log, "oxo")
    found = await explain(log, 0, "o2")
    assert (found.recorded, found.derived_from) == ((), made.claims[2])
    assert [routing.offset for routing in found.routings] == [made.routed[2]]


@pytest.mark.parametrize("versions", [(CORE_VERSION, OTHER), (OTHER, CORE_VERSION)])
async def test_a_request_that_crosses_a_seal_shows_both_parts(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, versions: tuple[int, int]
) -> None:
    """The first owner routes to a worker that never responds. The second owner loses that worker, and routes again."""
    first, second = (Program(monkeypatch, version) for version in versions)
    async with System(log).started(workers=0) as system:
        system.start_worker("w0", speedup=1e-6)
        async with first.owning(system, seals=True):
            system.send(submitted("a", PREFIX))
            await until(lambda: system.decisions(RequestRouted))
        async with second.owning(system, seals=True):
            await system.stop_worker("w0")
            system.start_worker("w1")
            await until_ended(system, "a")
        found = await explain(log, 0, "a")
        offsets = [offset for offset, one in enumerate(system.decisions()) if isinstance(one, RequestRouted)]
    routed = [entry for entry in found.timeline if entry.what == "routed"]
    assert [entry.offset for entry in routed] == offsets
    assert [DECIDED_BY in entry.text for entry in routed] == [version == OTHER for version in versions]
    assert [one.offset for one in found.routings] == [offsets[versions.index(CORE_VERSION)]]
    assert found.state == "finished"
    assert [span.rules for span in found.recorded] == [OTHER]
    taken_over = next(entry.text for entry in found.timeline if entry.what == "owner_claimed")
    assert ("with version" in taken_over) == (versions[1] == OTHER)


async def test_a_void_claim_is_no_takeover(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Program(monkeypatch, CORE_VERSION)
    async with System(log).started(workers=1) as system, ours.owning(system, seals=True):
        system.send(submitted("a", PREFIX))
        await until_ended(system, "a")
        claim = OwnerClaimed(owner_id="void", core_version=OTHER)
        await log.append([Draft(DECISIONS.name, 0, encode(DECISIONS, claim))])
        system.send(submitted("b", PREFIX))
        await until_ended(system, "b")
    for thorough in (True, False):
        found = await explain(log, 0, "b", thorough=thorough)
        assert kinds(found) == ["submitted", "routed", "first_token", "finished"]


async def test_events_of_unknown_records_are_read(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version may write records of types that this one does not know. They count events like all others."""
    await upgraded(monkeypatch, log, "ox")
    tag = f'"type":"{Advanced.__struct_config__.tag}"'.encode()
    altered = Altered(log, DECISIONS.name, lambda value: value.replace(tag, b'"type":"request.postponed"'))
    found = await explain(altered, 0, "x1")
    assert found.state == "finished"
    assert all(entry.now_us is not None for entry in found.timeline)


async def test_the_command_exits_with_3_if_nothing_was_derived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.db"
    log = SqliteLog.open(path)
    made = await upgraded(monkeypatch, log, "oxo")
    log.close()
    ran = await asyncio.to_thread(in_process.forebay, "explain", str(path), "x1")
    text = " ".join(ran.stdout.split())
    assert ran.returncode == 3
    assert DECIDED_BY in text
    parts = f"as recorded: journal offsets {made.claims[1]} to {made.seals[1] - 1} were {DECIDED_BY}"
    assert f"{parts}, this program has version {CORE_VERSION}; use forebay {OTHER_RELEASE} for the reasons" in text
    ran = await asyncio.to_thread(in_process.forebay, "explain", str(path), "o2")
    assert ran.returncode == 0
    assert "recorded" not in ran.stdout
