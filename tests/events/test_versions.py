"""Writers use an event type only once the owner can read it."""

import pytest

from forebay.events.base import Event
from forebay.events.schema import TOPICS
from forebay.events.versions import EVENTS_VERSION, may_write
from tests.harness.samples import event_types

TYPES = [kind for topic in TOPICS for kind in event_types(topic)]


class Added(Event, tag="test.added", frozen=True):
    SINCE = 3


@pytest.mark.parametrize(("owner_events", "expected"), [(1, False), (2, False), (3, True), (4, True)])
def test_a_type_is_written_if_the_owner_has_its_version_or_a_later_one(owner_events: int, expected: bool) -> None:
    assert may_write(Added, owner_events) is expected


def test_a_type_without_a_version_is_written_to_every_owner() -> None:
    assert may_write(Event, 1)


def test_the_version_grows_with_each_added_type() -> None:
    assert sorted({kind.SINCE for kind in TYPES}) == list(range(1, EVENTS_VERSION + 1))
