"""A journal of another rules version is rejected with both versions named, and stays unchanged."""

import asyncio
from pathlib import Path

import pytest

from forebay.core.world import CORE_VERSION
from forebay.events.decisions import OwnerClaimed
from forebay.events.topics import DECISIONS
from forebay.live.owner import owner as owner_module
from forebay.live.owner import snapshots
from forebay.live.owner.owner import Owner
from forebay.live.router.standby import Standby
from forebay.replay.verify.verify import verify
from forebay.transport.history import reader as recorded
from forebay.transport.history import snapshots as recorded_snapshots
from forebay.transport.history.reader import OtherRules
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.up import forebay
from tests.live.shared import proven
from tests.system import System, settings, submitted, until, until_ended

OTHER = CORE_VERSION + 1
REFUSAL = f"decided by version {OTHER} of the rules, this program has version {CORE_VERSION}: use the program"


@pytest.fixture(params=["sealed", "unsealed"])
def other_rules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> "OtherProgram":
    """Return a program with another rules version, with or without a final snapshot."""
    return OtherProgram(monkeypatch, sealed=request.param == "sealed")


class OtherProgram:
    """Writes a journal as a program with another rules version; `sealed` adds a final snapshot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, sealed: bool) -> None:
        self._monkeypatch = monkeypatch
        self._sealed = sealed

    async def serve(self, system: System, *names: str) -> None:
        with self._monkeypatch.context() as patch:
            for module in (owner_module, recorded, recorded_snapshots, snapshots):
                patch.setattr(module, "CORE_VERSION", OTHER)
            owner = Owner(system.log, system.leases, settings())
            await owner.start()
            running = asyncio.create_task(owner.run())
            await until(lambda: len(owner.world.fleet) == 1)
            for name in names:
                system.send(submitted(name, list(range(12))))
                await until_ended(system, name)
            await owner.stop()
            await running
            if self._sealed:
                await owner.close()
            owner.drop()
            await proven(system.log)


async def test_an_owner_does_not_start_and_the_other_program_continues(
    log: SqliteLog, other_rules: OtherProgram
) -> None:
    async with System(log).started(workers=1) as system:
        await other_rules.serve(system, "a")
        for _ in range(2):
            owner = Owner(log, system.leases, settings())
            with pytest.raises(OtherRules, match=REFUSAL):
                await owner.start()
            owner.drop()
        assert [claim.core_version for claim in system.decisions(OwnerClaimed)] == [OTHER]
        await other_rules.serve(system, "b")


async def test_a_standby_does_not_follow_other_rules(log: SqliteLog, other_rules: OtherProgram) -> None:
    async with System(log).started(workers=1) as system:
        await other_rules.serve(system, "a")
    standby = Standby(log, 0)
    await standby.run()
    assert standby.failed is not None
    assert REFUSAL in standby.failed
    with pytest.raises(OtherRules, match="version"):
        await Standby(log, 0).catch_up(log.next_offset(DECISIONS.name, 0))


async def test_verify_names_the_rules_version_that_can_verify(tmp_path: Path, other_rules: OtherProgram) -> None:
    path = tmp_path / "log.db"
    log = SqliteLog.open(path)
    async with System(log).started(workers=1) as system:
        await other_rules.serve(system, "a")
    with pytest.raises(OtherRules, match=REFUSAL):
        await verify(log)
    log.close()
    run = await asyncio.to_thread(forebay, "replay", "verify", str(path))
    assert (run.returncode, REFUSAL in run.stderr) == (2, True)
