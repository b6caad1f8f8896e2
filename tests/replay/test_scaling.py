"""Recorded decisions of planners are derived again by every later version, and show the planner at a moment."""

from typing import get_args

from forebay import runtime
from forebay.core.scaling.rederive import ScalingRederivation
from forebay.core.scaling.state import RULES_VERSION
from forebay.events.codec import encode
from forebay.events.scaling import Method, PlannerClaimed, Reason
from forebay.events.topics import SCALING
from forebay.replay.scaling.reader import PARTITION
from forebay.replay.scaling.status import DECISIONS_MAX, read_planner_status, read_scaling
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.harness.fake_runtime import FakeRuntime
from tests.harness.memory_log import memory_log
from tests.logs.scaling import recorded_records, scaling_records

REWRITE = "raise RULES_VERSION if decisions change, and run `make golden`"


async def recorded(count: int | None = None) -> SqliteLog:
    """Return a log with the first records of a golden topic, each appended a second after the previous one."""
    log, _ = memory_log()
    clock = FakeRuntime(wall_shift_s=-10_000)
    with runtime.use(clock):
        for event in list(recorded_records())[:count]:
            clock.wall_shift_s += 1
            await log.append([Draft(SCALING.name, PARTITION, encode(SCALING, event))])
    return log


async def test_the_newest_moment_has_the_status_and_the_points_of_every_pool() -> None:
    log = await recorded()
    view = await read_scaling(log, None, None)
    assert view.status == await read_planner_status(log)
    assert 50 < len(view.decisions) <= DECISIONS_MAX
    offsets = [one.offset for one in view.decisions]
    assert offsets == sorted(offsets, reverse=True)
    newest = view.decisions[0]
    for pool in newest.pools:
        points = view.history[f"{pool.group}/{pool.pool}"]
        assert (points[-1].at_us, points[-1].size) == (newest.at_us, pool.to_size)
        assert any(point.forecast_per_s is not None for point in points)
        assert any(point.requests_per_s for point in points)


async def test_a_past_moment_equals_the_log_that_ends_there() -> None:
    log = await recorded()
    records = await log.read(SCALING.name, PARTITION, 0, 10_000)
    middle = records[len(records) // 2].at_us
    count = sum(record.at_us <= middle for record in records)
    assert 0 < count < len(records), "the records must have different times"
    past = await read_scaling(log, middle, None)
    assert past == await read_scaling(await recorded(count), None, None)
    assert past.status is not None


async def test_a_log_without_a_planner_is_empty() -> None:
    log, _ = memory_log()
    view = await read_scaling(log, None, None)
    assert (view.status, view.decisions, view.history) == (None, [], {})


def test_recorded_scaling_decisions_are_derived_again() -> None:
    records, rederivation = list(recorded_records()), ScalingRederivation()
    assert records == scaling_records(), REWRITE
    claims = [one for one in records if isinstance(one, PlannerClaimed)]
    assert {one.rules_version for one in claims} == {RULES_VERSION}, REWRITE
    assert {one.settings.method for one in claims} == set(get_args(Method))
    found = [rederivation.apply(offset, event) for offset, event in enumerate(records)]
    decisions = [one for one in found if one is not None]
    assert len(decisions) > 50
    assert [one.offset for one in decisions if one.verification != "equal"] == [], REWRITE
    assert {pool.reason for one in decisions for pool in one.decided.pools} >= set(get_args(Reason))
