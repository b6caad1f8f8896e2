"""Logs whose journal was written by programs with different decision rules: moments, comparisons and explanations.

A letter per owner: `o` has the rules of this program, `x` has other rules. Each owner serves one request, whose ID is
its letter and its number, and stops as planned.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.cli.console.run import WHAT_IF
from forebay.console.jobs import WhatIf, WhatIfJobs
from forebay.core.world import CORE_VERSION
from forebay.events.codec import decode, encode
from forebay.events.control import PoolConfigured
from forebay.events.decisions import OwnerClaimed, RequestRouted, Sealed
from forebay.events.topics import DECISIONS
from forebay.ingress.errors import ApiError
from forebay.ingress.explain_worker import LogSource
from forebay.ingress.explainer import Explainer
from forebay.journal.records import OtherRules, journal_records
from forebay.journal.snapshots import load_sealed, load_snapshot
from forebay.replay.at import seek, seek_record, seek_time
from forebay.replay.catalog import checkpoints, follow
from forebay.replay.catalog.contents import SCHEMAS, new_observers
from forebay.replay.catalog.facts import Marker, RequestRow
from forebay.replay.catalog.follow import Follower
from forebay.replay.catalog.live import LivePublisher, read_live
from forebay.replay.catalog.markers import markers
from forebay.replay.catalog.request_queries import requests
from forebay.replay.catalog.seek import CatalogStates
from forebay.replay.catalog.store import Store
from forebay.replay.diff.diff import diff, span_of
from forebay.replay.explain.explain import explain
from forebay.replay.states import States
from forebay.replay.status import GroupStatus
from forebay.transport.base import Draft, Log, LogError, NotDerivable, Record
from forebay.transport.sqlite.log import SqliteLog
from tests.cli import in_process
from tests.console.serving import console_settings
from tests.live.shared import OTHER, OTHER_RELEASE, PREFIX, Program
from tests.replay.catalog.scene import LogView, catalog_explanation
from tests.replay.recorder import words
from tests.system import MODEL, System, submitted, until, until_ended

RULES = f"version {OTHER} of the rules (forebay {OTHER_RELEASE})"
DECIDED_BY = f"decided by {RULES}"
SERVED = ["submitted", "routed", "first_token", "finished"]
LATEST_US = 1 << 52


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[SqliteLog]:
    opened = SqliteLog.open(tmp_path / "log.db")
    yield opened
    opened.close()


@dataclass(slots=True)
class Upgraded:
    """A log with several owners.

    Attributes:
        claims: journal offset of the claim of each owner.
        routed: journal offset of the routing decision of each owner.
        seals: journal offset of the `Sealed` of each owner that has written one.
        void: journal offsets of void claims.
    """

    log: SqliteLog
    claims: list[int] = field(default_factory=list)
    routed: list[int] = field(default_factory=list)
    seals: list[int] = field(default_factory=list)
    void: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.log.next_offset(DECISIONS.name, 0)

    async def record(self, offset: int) -> Any:
        (record,) = [one async for one in journal_records(self.log, 0, offset, offset + 1)]
        return decode(DECISIONS, record.value)

    async def clock(self, offset: int) -> int:
        """Return the owner's clock after a journal record that has a clock reading."""
        return int((await self.record(offset)).consumed[-1].now_us)


async def upgraded(log: SqliteLog, owners: str, *, last_seals: bool = True, with_void: bool = False) -> Upgraded:
    """Fill an empty log with the journal of one owner per letter.

    Args:
        last_seals: whether the last owner stops as planned; otherwise it dies.
        with_void: whether a router of the other rules claims in vain after each decision.
    """
    made = Upgraded(log)
    async with System(log).started(workers=1) as system:
        for number, letter in enumerate(owners):
            seals = last_seals or number < len(owners) - 1
            with pytest.MonkeyPatch.context() as patch:
                program = Program(patch, CORE_VERSION if letter == "o" else OTHER)
                await program.serve(system, f"{letter}{number}", seals=seals)
            if with_void:
                made.void += await log.append([claim_of(OTHER if letter == "o" else CORE_VERSION, seal=0)])
        for offset, record in enumerate(system.decisions()):
            for kind, offsets in ((OwnerClaimed, made.claims), (RequestRouted, made.routed), (Sealed, made.seals)):
                if isinstance(record, kind) and offset not in made.void:
                    offsets.append(offset)
    return made


def claim_of(rules: int, **fields: Any) -> Draft:
    return Draft(DECISIONS.name, 0, encode(DECISIONS, OwnerClaimed(owner_id="another", core_version=rules, **fields)))


async def upgraded_file(path: Path, owners: str, **options: Any) -> Upgraded:
    """Write such a log to a file, and close it."""
    with closing(SqliteLog.open(path)) as log:
        return await upgraded(log, owners, **options)


async def forebay(*arguments: object) -> Any:
    """Run a command, and return it with its output in one line."""
    ran = await asyncio.to_thread(in_process.forebay, *map(str, arguments))
    return ran.returncode, " ".join(ran.stdout.split()), ran.stderr


# Moments


@pytest.mark.parametrize("with_void", [False, True])
async def test_moments_after_a_seal_are_derived_from_its_snapshot(log: SqliteLog, with_void: bool) -> None:
    made = await upgraded(log, "oxo", with_void=with_void)
    sealed = await load_sealed(log, 0, await made.record(made.seals[1]))
    at_claim = await seek(States(log, 0), made.claims[2])
    assert (at_claim.start, at_claim.world.view) == (made.claims[2], sealed.view)
    position = await seek(States(log, 0), made.routed[2])
    assert (position.offset, position.start) == (made.routed[2], made.claims[2])
    assert position.world.requests.get("o2") is not None
    by_time = await seek_time(States(log, 0), await made.clock(made.routed[2]))
    assert by_time.world.digest() == position.world.digest()


async def test_the_state_right_before_and_after_another_version_is_shown(log: SqliteLog) -> None:
    made = await upgraded(log, "oxo")
    before = await seek_record(States(log, 0), made.seals[0])
    assert before.offset == made.seals[0]
    claimed = await seek(States(log, 0), made.claims[1])
    assert (claimed.offset, claimed.world.view) == (made.claims[1], before.world.view)
    times = [run.now_us for run in (await made.record(made.routed[1])).consumed]
    assert (await seek_time(States(log, 0), times[0] - 1)).world.view == before.world.view
    assert times[0] < times[-1], "the other owner had applied events before its first decision"
    with pytest.raises(NotDerivable):
        await seek_time(States(log, 0), times[0])


@pytest.mark.parametrize("owners", ["oxo", "x", "xo", "oxxo", "oxx"])
async def test_a_moment_of_other_rules_names_the_version(log: SqliteLog, owners: str) -> None:
    made = await upgraded(log, owners)
    offset, seal = made.routed[owners.index("x")], made.seals[owners.index("x")]
    text = re.escape(f"{DECIDED_BY}, this program has version {CORE_VERSION}: use the program that wrote it")
    states = States(log, 0)
    for seeking in (seek(states, offset), seek_time(states, await made.clock(offset)), seek(states, seal)):
        with pytest.raises(NotDerivable, match=text):
            await seeking
    with pytest.raises(OtherRules, match=re.escape(DECIDED_BY)):
        await load_snapshot(log, 0, await made.record(seal))


async def test_a_log_that_ends_with_other_rules_has_no_status(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    await upgraded_file(path, "ox", last_seals=False)
    for command in (("replay", "at"), ("status",)):
        code, shown, error = await forebay(*command, path)
        assert (code, shown, error.count("\n")) == (3, "", 1)
        assert DECIDED_BY in error


# Comparisons


def unchanged(pool: PoolConfigured) -> PoolConfigured:
    return pool


@pytest.mark.parametrize("owners", ["ox", "oxo", "oo"])
async def test_a_comparison_covers_one_part(log: SqliteLog, owners: str) -> None:
    made = await upgraded(log, owners)
    times = [await made.clock(offset) for offset in made.routed]
    for at, (letter, from_us, to_us) in enumerate(zip(owners, times, [*times[1:], LATEST_US], strict=True)):
        if letter == "o":
            report = await diff(log, 0, unchanged, span=await span_of(log, 0, from_us, to_us - at))
            assert (report.identical, report.history.decisions) == (True, 1)
    if "x" in owners:
        with pytest.raises(OtherRules):
            await diff(log, 0, unchanged)
    else:
        assert (await diff(log, 0, unchanged)).history.decisions == 2


async def test_the_command_names_the_version_of_another_part(tmp_path: Path) -> None:
    await upgraded_file(tmp_path / "log.db", "oxo")
    code, shown, error = await forebay("replay", "diff", tmp_path / "log.db", "--policy", "random")
    assert (code, shown, error.count("\n")) == (3, "", 1)
    assert DECIDED_BY in error
    assert "To compare only a part of the log, give --from and --to" in error
    jobs = WhatIfJobs(WHAT_IF, msgspec.json.encode(console_settings(tmp_path / "log.db")))
    job = jobs.start(WhatIf(policy="random")).job
    await until(lambda: jobs.status(job).state == "failed")
    assert "To compare only a part of the log, choose a span" in jobs.status(job).error


# Explanations


async def test_a_request_after_the_seal_is_derived(log: SqliteLog) -> None:
    made = await upgraded(log, "oxo")
    found = await explain(States(log, 0), "o2")
    assert found.derived_from == made.claims[2]
    assert [routing.offset for routing in found.routings] == [made.routed[2]]


async def test_a_request_that_an_owner_continues_is_explained_from_there(
    log: SqliteLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first owner routes to a worker that never responds. The second owner loses that worker, and routes again."""
    first, second = (Program(monkeypatch, version) for version in (OTHER, CORE_VERSION))
    async with System(log).started(workers=0) as system:
        system.start_worker("w0", speedup=1e-6)
        async with second.owning(system, seals=True):
            pass
        async with first.owning(system, seals=True):
            system.send(submitted("a", PREFIX))
            await until(lambda: system.decisions(RequestRouted))
        async with second.owning(system, seals=True):
            await system.stop_worker("w0")
            system.start_worker("w1")
            await until_ended(system, "a")
        found = await explain(States(log, 0), "a")
        offsets = [offset for offset, one in enumerate(system.decisions()) if isinstance(one, RequestRouted)]
        async with followed(log, tmp_path / "catalog") as follower:
            early = await checkpoints.take((await seek(States(log, 0), 0)).world, 1, {})
            checkpoints.write(follower.store.connection, early)
            assert await catalog_explanation(log, 0, follower.store, "a") == found
    assert (words(found)[0], found.state) == ("taken_up", "finished")
    assert [one.offset for one in found.routings] == offsets[1:]


@pytest.mark.parametrize("owners", ["oxo", "xo", "x"])
async def test_a_request_of_other_rules_names_the_version(tmp_path: Path, owners: str) -> None:
    await upgraded_file(tmp_path / "log.db", owners)
    code, shown, error = await forebay("explain", tmp_path / "log.db", f"x{owners.index('x')}")
    assert (code, shown, error.count("\n")) == (3, "", 1)
    assert DECIDED_BY in error


async def test_an_ingress_names_the_version_of_other_rules(tmp_path: Path) -> None:
    await upgraded_file(tmp_path / "log.db", "x", last_seals=False)
    explainer = Explainer(LogSource(path=str(tmp_path / "log.db")))
    for derivation in (explainer.explain("x0", 0), explainer.status("m", 0)):
        with pytest.raises(ApiError, match=re.escape(DECIDED_BY)) as refused:
            await derivation
        assert (refused.value.status, refused.value.code) == (409, "other_rules")
    await explainer.close()


async def test_a_void_claim_is_no_takeover(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Program(monkeypatch, CORE_VERSION)
    async with System(log).started(workers=1) as system, ours.owning(system, seals=True):
        await system.serve("a", PREFIX)
        await log.append([claim_of(OTHER)])
        await system.serve("b", PREFIX)
    for thorough in (True, False):
        assert words(await explain(States(log, 0), "b", thorough=thorough)) == SERVED


# Catalogs


@asynccontextmanager
async def followed(log: Log, path: Path) -> AsyncIterator[Follower]:
    """Return a follower that has followed a log to its end, and close its store after the body."""
    store = await Store.open(path, log, 0, SCHEMAS)
    with closing(store):
        follower = Follower(log, 0, store, new_observers)
        await follower.catch_up()
        yield follower


def rows(follower: Follower) -> list[RequestRow]:
    return sorted(requests(follower.store.connection, limit=100).requests, key=lambda one: one.number)


def takeovers(follower: Follower) -> list[Marker]:
    return [one for one in markers(follower.store.connection, 0, LATEST_US, 100) if one.kind == "takeover"]


@pytest.mark.parametrize("owners", ["oxo", "xo", "ox", "oxxo", "xoxo"])
@pytest.mark.parametrize("with_void", [False, True])
async def test_requests_of_own_rules_are_listed(log: SqliteLog, tmp_path: Path, owners: str, with_void: bool) -> None:
    made = await upgraded(log, owners, with_void=with_void)
    async with followed(log, tmp_path / "catalog") as follower:
        found = rows(follower)
        own = [number for number, letter in enumerate(owners) if letter == "o"]
        assert [(one.request_id, one.state, one.journal_offset) for one in found] == [
            (f"o{number}", "finished", made.routed[number]) for number in own
        ]
        assert {made.claims[number] for number in own} <= {one.offset for one in takeovers(follower)}
        assert (DECIDED_BY in follower.error, follower.failed) == (owners[-1] == "x", False)
        for number in own:
            offset = made.routed[number]
            explained = await catalog_explanation(log, 0, follower.store, f"o{number}", journal_offset=offset)
            assert explained.state == "finished"


@pytest.mark.parametrize("owners", ["oxo", "xo", "oxxo"])
async def test_moments_of_own_spans_are_derived(log: SqliteLog, tmp_path: Path, owners: str) -> None:
    made = await upgraded(log, owners)
    async with followed(log, tmp_path / "catalog") as follower:
        store = follower.store
        for letter, offset in zip(owners, made.routed, strict=True):
            time_us = await made.clock(offset)
            if letter == "o":
                expected = (await seek(States(log, 0), offset)).world.digest()
                assert (await seek_record(CatalogStates(store, log, 0), offset)).world.digest() == expected
                assert (await seek_time(CatalogStates(store, log, 0), time_us)).world.digest() == expected
                continue
            with pytest.raises(NotDerivable, match=rf"decided by version {OTHER} of the rules"):
                await seek_record(CatalogStates(store, log, 0), offset)
            with pytest.raises(NotDerivable, match=rf"decided by version {OTHER} of the rules"):
                await seek_time(CatalogStates(store, log, 0), time_us)


async def test_no_derivation_crosses_a_gap(log: SqliteLog, tmp_path: Path) -> None:
    """The catalog may have removed the checkpoint after the gap. Then the snapshot on the log is the only beginning."""
    made = await upgraded(log, "oxo")
    async with followed(log, tmp_path / "catalog") as follower:
        store = follower.store
        checkpoints.remove(store.connection, made.claims[2])
        checkpoints.write(store.connection, await checkpoints.take((await seek(States(log, 0), 1)).world, 2, {}))
        states = CatalogStates(store, log, 0)
        assert (await states.before(made.seals[0])).offset == 2
        assert (await states.before(made.routed[2])).offset == made.claims[2]


async def test_a_checkpoint_right_after_a_seal_is_usable(log: SqliteLog, tmp_path: Path) -> None:
    made = await upgraded(log, "oxo")
    async with followed(log, tmp_path / "catalog") as follower:
        sealed = await seek(States(log, 0), made.seals[0])
        checkpoints.write(follower.store.connection, await checkpoints.take(sealed.world, made.seals[0] + 1, {}))
        position = await seek_record(CatalogStates(follower.store, log, 0), made.claims[1])
        assert (position.start, position.offset) == (made.seals[0] + 1, made.claims[1])


@pytest.mark.parametrize("owners", ["oxo", "xo"])
async def test_a_catalog_that_is_interrupted_anywhere_has_the_same_rows(
    log: SqliteLog, tmp_path: Path, owners: str
) -> None:
    made = await upgraded(log, owners)
    async with followed(log, tmp_path / "whole") as whole:
        expected = rows(whole), takeovers(whole)
    path = tmp_path / "catalog"
    for end in range(1, made.end + 1):
        async with followed(LogView(log, end), path) as follower:
            assert not follower.failed
    async with followed(log, path) as follower:
        assert (rows(follower), takeovers(follower)) == expected
        assert follower.error == ""


async def test_a_console_reads_each_record_of_other_rules_once(
    log: SqliteLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await upgraded(log, "oxox")
    for name in ("BREATHE_S", "PAUSE_S"):
        monkeypatch.setattr(follow, name, 0)
    view, read = LogView(log, 0), list[int]()
    pauses: list[tuple[int, bool]] = []
    async with followed(view, tmp_path / "catalog") as follower:

        async def pause() -> None:
            pauses.append((follower.position, follower.state.behind_s < 60))

        follower.on_pause, view.journal_end = pause, made.end - 1
        await follower.catch_up()
        assert pauses.count((made.claims[1] + 1, True)) > 1
        assert {is_near for _, is_near in pauses} == {True}
        assert follower.is_blocked
        view.journal_end, view.is_away = made.end, True
        await follower.catch_up()
        assert (follower.error, follower.is_blocked) == ("the broker is away", False)
        view.is_away, read_log = False, log.read

        async def reading(topic: str, partition: int, offset: int, limit: int) -> list[Record]:
            read.append(offset)
            return await read_log(topic, partition, offset, limit)

        monkeypatch.setattr(log, "read", reading)
        await follower.catch_up()
        assert (RULES in follower.error, follower.is_blocked, read) == (True, True, [made.end - 1])


async def test_a_running_console_continues_after_a_rollback(
    log: SqliteLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows why it has no moments, and continues once an owner with its rules has claimed."""
    ours, other = Program(monkeypatch, CORE_VERSION), Program(monkeypatch, OTHER)

    async def problems() -> list[str]:
        await publisher.publish()
        live = read_live(follower.store)
        assert live is not None
        return msgspec.json.decode(live[1], type=GroupStatus).problems

    async with System(log).started(workers=1) as system:
        await ours.serve(system, "a", seals=True)
        async with followed(log, tmp_path / "catalog") as follower:
            publisher = LivePublisher(log, 0, MODEL, follower)
            assert await problems() == []
            await other.serve(system, "b", seals=True)
            await follower.catch_up()
            assert RULES in follower.error
            assert (await problems())[0] == follower.error
            await ours.serve(system, "c", seals=True)
            await follower.catch_up()
            assert (follower.error, await problems()) == ("", [])
            assert [(one.request_id, one.state) for one in rows(follower)] == [(name, "finished") for name in "ac"]


async def test_a_request_that_ended_in_another_part_is_not_listed(
    log: SqliteLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = Program(monkeypatch, CORE_VERSION), Program(monkeypatch, OTHER)
    async with System(log).started(workers=0) as system:
        system.start_worker("w0", speedup=1e-6)
        async with ours.owning(system, seals=True):
            system.send(submitted("a", PREFIX))
            await until(lambda: system.decisions(RequestRouted))
        async with followed(log, tmp_path / "catalog") as follower:
            assert [(one.request_id, one.state) for one in rows(follower)] == [("a", "prefill")]
            async with other.owning(system, seals=True):
                await system.stop_worker("w0")
                system.start_worker("w1")
                await until_ended(system, "a")
            await ours.serve(system, "b", seals=True)
            await follower.catch_up()
            async with followed(log, tmp_path / "another") as at_once:
                for one in (follower, at_once):
                    assert [(row.request_id, row.state) for row in rows(one)] == [("b", "finished")]


# Logs on which an operator let an owner continue from an earlier snapshot, so that later records were given up


async def fail(*arguments: object) -> None:
    raise LogError("the broker is away")


@pytest.mark.parametrize("lost_rules", [OTHER, CORE_VERSION])
async def test_what_follows_given_up_records_is_derived(
    log: SqliteLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost_rules: int
) -> None:
    ours, lost = Program(monkeypatch, CORE_VERSION), Program(monkeypatch, lost_rules)
    async with System(log).started(workers=1) as system:
        await ours.serve(system, "a", seals=True)
        sealed = log.next_offset(DECISIONS.name, 0) - 1
        await lost.serve(system, "b", seals=False)
        last = system.decisions()[-1]
        foreign = encode(DECISIONS, msgspec.structs.replace(last, owner_nonce="of another journal"))
        ours_again = claim_of(CORE_VERSION, snapshot=sealed, previous_nonce=last.owner_nonce)
        _, claim = await log.append([Draft(DECISIONS.name, 0, foreign), ours_again])
        async with ours.owning(system, seals=True):  # "b" stays active, because its worker ignores the second order
            await system.serve("c", PREFIX)
    position, newest = await seek(States(log, 0), claim + 1), await seek(States(log, 0))
    assert position.start == claim
    view = LogView(log, claim)
    async with followed(view, tmp_path / "interrupted") as follower:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "take", fail)  # so that the next commit has "b" as forgotten and as submitted
            view.journal_end = None
            await follower.catch_up()
        await follower.catch_up()
        assert {("b", "prefill"), ("c", "finished")} <= {(one.request_id, one.state) for one in rows(follower)}
    for _ in range(2):  # the second follower begins at the checkpoint
        async with followed(log, tmp_path / "catalog") as follower:
            assert follower.error == ""
            found = await seek_record(CatalogStates(follower.store, log, 0), claim + 1)
            assert found.world.digest() == position.world.digest()
            assert ((await found.moment()).unverified, (await position.moment()).unverified) == ({}, {})
            assert follower.reader is not None
            assert follower.reader.world.digest() == newest.world.digest()
    explained = await explain(States(log, 0), "c")
    assert explained.derived_from >= claim
    code, _, error = await forebay("replay", "diff", tmp_path / "log.db", "--policy", "random")
    assert (code, "give --from and --to" in error) == (2 if lost_rules == CORE_VERSION else 3, True)
    routed_us = system.decisions(RequestRouted)[-1].consumed[-1].now_us
    assert (await diff(log, 0, unchanged, span=await span_of(log, 0, routed_us))).identical


async def test_a_claim_of_other_rules_after_given_up_records_is_derived(
    log: SqliteLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Program(monkeypatch, CORE_VERSION)
    async with System(log).started(workers=1) as system:
        await ours.serve(system, "a", seals=True)
        sealed = log.next_offset(DECISIONS.name, 0) - 1
        await ours.serve(system, "b", seals=False)
        await log.append([claim_of(OTHER, snapshot=sealed, previous_nonce=system.decisions()[-1].owner_nonce)])
    async with followed(log, tmp_path / "catalog") as follower:
        assert any("Router another took over" in one.text for one in takeovers(follower))
    path = tmp_path / "log.db"
    ran = [await forebay("explain", path, "b"), await forebay("replay", "diff", path, "--policy", "random")]
    assert [code for code, *_ in ran] == [0, 2]
