"""Moments of a log whose journal has parts by owners with other decision rules."""

import asyncio
from pathlib import Path

import pytest

from forebay.core.world import CORE_VERSION
from forebay.replay.at import seek
from forebay.replay.at_time import seek_record, seek_time
from forebay.replay.status import read_status
from forebay.transport.base import NotDerivable
from forebay.transport.history.snapshots import load_sealed
from forebay.transport.recording.manifest import utc
from forebay.transport.sqlite.log import SqliteLog
from tests.cli import in_process
from tests.live.programs import OTHER, OTHER_RELEASE
from tests.replay.upgrades.upgraded import upgraded
from tests.system import MODEL


@pytest.mark.parametrize("with_void", [False, True])
async def test_moments_after_a_seal_are_derived_from_its_snapshot(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, with_void: bool
) -> None:
    made = await upgraded(monkeypatch, log, "oxo", with_void=with_void)
    sealed = await load_sealed(log, 0, await made.record(made.seals[1]))
    at_claim = await seek(log, 0, made.claims[2])
    assert (at_claim.start, at_claim.world.view) == (made.claims[2], sealed.view)
    position = await seek(log, 0, made.routed[2])
    assert (position.offset, position.start) == (made.routed[2], made.claims[2])
    assert position.world.requests.get("o2") is not None
    by_time = await seek_time(log, 0, await made.clock(made.routed[2]))
    assert by_time.world.digest() == position.world.digest()


@pytest.mark.parametrize("with_void", [False, True])
async def test_the_state_at_a_seal_of_other_rules_is_shown(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, with_void: bool
) -> None:
    made = await upgraded(monkeypatch, log, "ox", with_void=with_void)
    sealed = await load_sealed(log, 0, await made.record(made.seals[1]))
    for position in (
        await seek(log, 0, made.seals[1]),
        await seek_record(log, 0),
        await seek_record(log, 0, made.end - 1),
    ):
        assert position.offset == made.seals[1]
        assert position.world.digest() == sealed.digest()
        assert (await position.moment()).now_us == sealed.now_us
    status = await read_status(log, 0, MODEL)
    assert (status.ready, status.owner.epoch) == (True, made.claims[1])


async def test_the_state_right_before_and_after_another_version_is_shown(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await upgraded(monkeypatch, log, "oxo")
    before = await seek_record(log, 0, made.seals[0])
    assert before.offset == made.seals[0]
    claimed = await seek(log, 0, made.claims[1])
    assert (claimed.offset, claimed.world.view) == (made.claims[1], before.world.view)
    between = await seek_time(log, 0, (await made.record(made.routed[1])).consumed[0].now_us - 1)
    assert between.world.view == before.world.view
    times = [run.now_us for run in (await made.record(made.routed[1])).consumed]
    assert times[0] < times[-1], "the other owner had applied events before its first decision"
    with pytest.raises(NotDerivable):
        await seek_time(log, 0, times[0])
    after = await seek_time(log, 0, await made.clock(made.seals[1] - 1))
    assert after.offset in (made.seals[1], made.claims[2])


@pytest.mark.parametrize("owners", ["oxo", "x", "xo", "oxxo", "oxx"])
async def test_a_moment_of_other_rules_names_the_version_and_the_nearest_moments(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, owners: str
) -> None:
    made = await upgraded(monkeypatch, log, owners)
    first, last = owners.index("x"), owners.rindex("x")
    offset = made.routed[first]
    with pytest.raises(NotDerivable) as error:
        await seek(log, 0, offset)
    text = str(error.value)
    assert f"version {OTHER} of the rules (forebay {OTHER_RELEASE}), this program has version {CORE_VERSION}" in text
    assert f"use forebay {OTHER_RELEASE}, or show " in text
    near = [made.claims[first]] if first else []
    near.append(made.claims[last + 1] if last + 1 < len(owners) else made.seals[last])
    clocks = [made.seals[first - 1] - 1] if first else []
    for shown, clock in zip(near, [*clocks, made.seals[last] - 1], strict=True):
        assert f"offset {shown} ({utc(await made.clock(clock))})" in text
        assert (await seek(log, 0, shown)).offset == shown
    with pytest.raises(NotDerivable, match=f"journal offset {offset} is in a part"):
        await seek_time(log, 0, await made.clock(offset))


async def test_an_unsealed_end_of_other_rules_has_no_status(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await upgraded(monkeypatch, log, "ox", last_seals=False)
    with pytest.raises(NotDerivable, match=rf"or show offset {made.claims[1]} \(.*\), the nearest moment that"):
        await read_status(log, 0, MODEL)


@pytest.mark.parametrize("command", [("replay", "at"), ("status",)])
async def test_commands_exit_with_3_at_a_moment_of_other_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    path = tmp_path / "log.db"
    log = SqliteLog.open(path)
    await upgraded(monkeypatch, log, "ox", last_seals=False)
    log.close()
    ran = await asyncio.to_thread(in_process.forebay, *command, str(path))
    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr.count("\n") == 1
    assert f"use forebay {OTHER_RELEASE}" in ran.stderr
