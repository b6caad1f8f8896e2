"""Logs on which an operator let an owner continue from an earlier snapshot, so that later records were given up."""

from pathlib import Path

import pytest

from forebay.core.world import CORE_VERSION
from forebay.events.codec import encode
from forebay.events.control import PoolConfigured
from forebay.events.decisions import OwnerClaimed
from forebay.events.topics import DECISIONS
from forebay.replay.at import seek
from forebay.replay.catalog.contents import SCHEMAS, new_observers
from forebay.replay.catalog.follow import Follower
from forebay.replay.catalog.seek import catalog_position
from forebay.replay.catalog.store import Store
from forebay.replay.diff.diff import diff
from forebay.replay.explain.explain import explain
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.live.programs import OTHER, PREFIX, Program
from tests.system import System, submitted, until_ended


@pytest.fixture(params=[OTHER, CORE_VERSION])
async def resumed(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[SqliteLog, int]:
    """Return a log and the offset of the claim that gives up the last owner's records, which nobody sealed."""
    ours, lost = Program(monkeypatch, CORE_VERSION), Program(monkeypatch, request.param)
    async with System(log).started(workers=1) as system:
        await ours.serve(system, "a", seals=True)
        sealed = log.next_offset(DECISIONS.name, 0) - 1
        await lost.serve(system, "b", seals=False)
        nonce = system.decisions()[-1].owner_nonce
        resuming = OwnerClaimed(owner_id="test", core_version=CORE_VERSION, snapshot=sealed, previous_nonce=nonce)
        await log.append([Draft(DECISIONS.name, 0, encode(DECISIONS, resuming))])
        async with ours.owning(system, seals=True):  # "b" stays active, because its worker ignores the second order
            system.send(submitted("c", PREFIX))
            await until_ended(system, "c")
        found = [offset for offset, one in enumerate(system.decisions()) if isinstance(one, OwnerClaimed)]
        (claim,) = [offset for offset in found if system.decisions()[offset].snapshot >= 0]
    return log, claim


async def test_moments_after_the_claim_are_derived(resumed: tuple[SqliteLog, int], tmp_path: Path) -> None:
    log, claim = resumed
    position = await seek(log, 0, claim + 1)
    assert position.start == claim
    last = await seek(log, 0)
    store = await Store.open(tmp_path / "catalog", log, 0, SCHEMAS)
    follower = Follower(log, 0, store, new_observers)
    await follower.catch_up()
    assert follower.error == ""
    assert (await catalog_position(log, 0, store, offset=claim + 1)).world.digest() == position.world.digest()
    assert follower.walk is not None
    assert follower.walk.world.digest() == last.world.digest()
    store.close()


async def test_requests_after_the_claim_are_explained_and_compared(
    resumed: tuple[SqliteLog, int], request: pytest.FixtureRequest
) -> None:
    log, claim = resumed
    found = await explain(log, 0, "c")
    assert found.recorded == ()
    assert found.derived_from >= claim
    report = await diff(log, 0, unchanged)
    assert report.identical
    is_own = request.node.callspec.params["resumed"] == CORE_VERSION
    assert [part.decisions for part in report.left_out] == ([] if is_own else [1])


def unchanged(pool: PoolConfigured) -> PoolConfigured:
    return pool
