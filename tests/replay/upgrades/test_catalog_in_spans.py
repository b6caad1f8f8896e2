"""Catalogs of logs whose journal has parts by owners with other decision rules."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from forebay.core.world import CORE_VERSION
from forebay.replay.at import seek
from forebay.replay.at_time import last_time
from forebay.replay.catalog import checkpoints
from forebay.replay.catalog.contents import SCHEMAS, new_observers
from forebay.replay.catalog.facts import Marker, RequestRow
from forebay.replay.catalog.follow import Follower
from forebay.replay.catalog.live import LivePublisher, read_live
from forebay.replay.catalog.markers import markers
from forebay.replay.catalog.requests import RequestFilter, requests
from forebay.replay.catalog.seek import CatalogStates, catalog_explanation, catalog_position
from forebay.replay.catalog.store import Store
from forebay.replay.status import GroupStatus
from forebay.transport.base import Log, NotDerivable
from forebay.transport.history.reader import OtherRules
from forebay.transport.sqlite.log import SqliteLog
from tests.live.programs import OTHER, OTHER_RELEASE, Program
from tests.replay.catalog.following import LogView
from tests.replay.upgrades.upgraded import upgraded
from tests.system import MODEL, System

RULES = f"version {OTHER} of the rules (forebay {OTHER_RELEASE})"
LATEST_US = 1 << 52


@asynccontextmanager
async def followed(log: Log, path: Path) -> AsyncIterator[Follower]:
    """Return a follower that has followed a log to its end, and close its store after the body."""
    store = await Store.open(path, log, 0, SCHEMAS)
    try:
        follower = Follower(log, 0, store, new_observers)
        await follower.catch_up()
        yield follower
    finally:
        store.close()


def rows(follower: Follower) -> list[RequestRow]:
    return sorted(
        requests(follower.store.connection, None, RequestFilter(), None, 100).requests, key=lambda one: one.number
    )


def takeovers(follower: Follower) -> list[Marker]:
    return [one for one in markers(follower.store.connection, 0, LATEST_US, 100) if one.kind == "takeover"]


@pytest.mark.parametrize("owners", ["oxo", "xo", "ox", "oxxo", "xoxo"])
@pytest.mark.parametrize("with_void", [False, True])
async def test_requests_and_takeovers_of_all_versions_are_listed(
    log: SqliteLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owners: str, with_void: bool
) -> None:
    made = await upgraded(monkeypatch, log, owners, with_void=with_void)
    async with followed(log, tmp_path / "catalog") as follower:
        found = rows(follower)
        names = [f"{letter}{number}" for number, letter in enumerate(owners)]
        assert [one.request_id for one in found] == names
        assert {(one.state, one.output_tokens, one.worker_id) for one in found} == {("finished", 3, "w0")}
        assert [one.journal_offset for one in found] == made.routed
        assert all(one.first_token_us is not None and one.ttft_us is not None for one in found)
        assert [one.offset for one in takeovers(follower)] == made.claims
        assert [RULES in one.text for one in takeovers(follower)] == [letter == "x" for letter in owners]
        is_open = owners[-1] == "x"
        assert (follower.state.end_offset, follower.failed) == (made.end, False)
        assert (f"is decided by {RULES}" in follower.error) == is_open
        for number, name in enumerate(names):
            explained = await catalog_explanation(log, 0, follower.store, name, journal_offset=made.routed[number])
            assert bool(explained.recorded) == (owners[number] == "x")
            assert explained.state == "finished"


@pytest.mark.parametrize("owners", ["oxo", "xo", "oxxo"])
async def test_moments_of_own_spans_are_derived(
    log: SqliteLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owners: str
) -> None:
    made = await upgraded(monkeypatch, log, owners)
    async with followed(log, tmp_path / "catalog") as follower:
        store = follower.store
        for number, letter in enumerate(owners):
            offset = made.routed[number]
            time_us = await made.clock(offset)
            if letter == "o":
                expected = (await seek(log, 0, offset)).world.digest()
                assert (await catalog_position(log, 0, store, offset=offset)).world.digest() == expected
                assert (await catalog_position(log, 0, store, time_us=time_us)).world.digest() == expected
                continue
            with pytest.raises(NotDerivable, match=f"use forebay {OTHER_RELEASE}, or show offset"):
                await catalog_position(log, 0, store, offset=offset)
            with pytest.raises(NotDerivable, match=f"offset {made.claims[owners.rindex('x') + 1]} "):
                await catalog_position(log, 0, store, time_us=time_us)


@pytest.mark.parametrize("last_seals", [True, False])
async def test_the_newest_moment_of_another_version_is_shown_if_it_is_sealed(
    log: SqliteLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_seals: bool
) -> None:
    made = await upgraded(monkeypatch, log, "ox", last_seals=last_seals)
    async with followed(log, tmp_path / "catalog") as follower:
        now_us = await last_time(log, 0)
        if last_seals:
            position = await catalog_position(log, 0, follower.store, time_us=now_us)
            assert position.offset == made.seals[1]
            return
        with pytest.raises(NotDerivable, match=rf"or show offset {made.claims[1]} \("):
            await catalog_position(log, 0, follower.store, time_us=now_us)


async def test_no_derivation_crosses_a_gap(log: SqliteLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog may have removed the checkpoint after the gap. Then the snapshot on the log is the only beginning."""
    made = await upgraded(monkeypatch, log, "oxo")
    async with followed(log, tmp_path / "catalog") as follower:
        store = follower.store
        checkpoints.remove(store.connection, made.claims[2])
        checkpoints.write(store.connection, await checkpoints.take((await seek(log, 0, 1)).world, 2, {}))
        states = CatalogStates(store, log, 0)
        assert (await states.before(made.seals[0])).offset == 2
        assert (await states.before(made.routed[2])).offset == made.claims[2]
        with pytest.raises(OtherRules):
            await states.before(made.routed[1])


async def test_a_checkpoint_right_after_a_seal_is_usable(
    log: SqliteLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await upgraded(monkeypatch, log, "oxo")
    async with followed(log, tmp_path / "catalog") as follower:
        store, sealed = follower.store, await seek(log, 0, made.seals[0])
        checkpoints.write(store.connection, await checkpoints.take(sealed.world, made.seals[0] + 1, {}))
        position = await catalog_position(log, 0, store, offset=made.claims[1])
        assert (position.start, position.offset) == (made.seals[0] + 1, made.claims[1])


@pytest.mark.parametrize("owners", ["oxo", "xo"])
async def test_a_catalog_that_is_interrupted_anywhere_has_the_same_rows(
    log: SqliteLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owners: str
) -> None:
    made = await upgraded(monkeypatch, log, owners)
    async with followed(log, tmp_path / "whole") as whole:
        expected = rows(whole), takeovers(whole)
    path = tmp_path / "catalog"
    for end in range(1, made.end + 1):
        async with followed(LogView(log, end), path) as follower:
            assert follower.state.end_offset == end
            assert not follower.failed
    async with followed(log, path) as follower:
        assert (rows(follower), takeovers(follower)) == expected
        assert follower.error == ""


async def test_a_running_console_continues_after_a_rollback(
    log: SqliteLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows why it has no moments, and continues once an owner with its rules has claimed."""
    ours, other = Program(monkeypatch, CORE_VERSION), Program(monkeypatch, OTHER)

    async def status(follower: Follower) -> GroupStatus:
        await publisher.publish()
        live = read_live(follower.store)
        assert live is not None
        return msgspec.json.decode(live[1], type=GroupStatus)

    async with System(log).started(workers=1) as system:
        await ours.serve(system, "a", seals=True)
        async with followed(log, tmp_path / "catalog") as follower:
            publisher = LivePublisher(log, 0, MODEL, follower)
            assert (await status(follower)).problems == []
            await other.serve(system, "b", seals=True)
            await follower.catch_up()
            assert RULES in follower.error
            assert (await status(follower)).problems[0] == follower.error
            await ours.serve(system, "c", seals=True)
            await follower.catch_up()
            assert follower.error == ""
            assert (await status(follower)).problems == []
            assert [(one.request_id, one.state) for one in rows(follower)] == [
                ("a", "finished"),
                ("b", "finished"),
                ("c", "finished"),
            ]
