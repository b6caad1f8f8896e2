"""An event type that the owner could not read has no effect, although this program knows the type."""

import pytest

from forebay.core.restore import restore
from forebay.core.step import claim
from forebay.core.world import World
from forebay.events.requests import RequestSubmitted
from tests.core.worlds import Driver, request


@pytest.mark.parametrize(("owner_events", "decisions"), [(1, 0), (2, 1), (3, 1)])
def test_the_version_of_the_owner_decides_whether_an_event_has_an_effect(
    monkeypatch: pytest.MonkeyPatch, owner_events: int, decisions: int
) -> None:
    drive = Driver().fleet("a")
    claim(drive.world, 7, (), owner_events)
    monkeypatch.setattr(RequestSubmitted, "SINCE", 2)
    assert len(drive("requests", request("one", ()))) == decisions
    assert drive.world.view["requests"] == 1
    assert drive.world.counts["undecodable"] == 1 - decisions


def test_a_snapshot_keeps_the_version_of_its_owner() -> None:
    world = World()
    claim(world, 7, (), 5)
    assert restore(world.snapshot()).owner_events == 5
    claim(world, 9)
    assert restore(world.snapshot()).owner_events == 1
