"""Derive the state of a recorded group at a point in time, between and after its journal records.

Theory of operation. A journal record counts the events that its owner applied since the previous record, each run of
events with a reading of the owner's clock. So the state at a time follows exactly from the last journal record before
it, and those events of the next record that the owner applied by then.

After the last journal record there are no such counts. An idle owner applies events, for example the ends of requests,
and writes nothing until its next decision. These events are applied in the order in which they were appended to the
log, up to the first event that leads to a decision: an owner that had applied it would have written this decision.
Whether the owner had applied the other events by that time is unknown, so `LaterFacts.unrecorded` counts them.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies, PolicyMissing
from forebay.core.step import CLOCK, AnyDecision, InputEvent, open_run, step
from forebay.core.world import CORE_VERSION, World
from forebay.events.decisions import JournalRecord
from forebay.events.topics import DECISIONS, INPUTS, Topic
from forebay.replay.at import NoSuchRecord, Position, last_clock, offset_at, seek
from forebay.replay.moment import LaterFacts
from forebay.replay.spans import moment_error
from forebay.replay.walk import States
from forebay.transport.base import Log, LogError
from forebay.transport.history.claims import validity_at
from forebay.transport.history.reader import RecordedOrder, decode_or_none, journal, records_of
from forebay.transport.recording.manifest import utc

OnUnrecorded = Callable[[str, int, InputEvent | None, int], None]

BREATHE_EVERY = 128  # events between yields to the event loop


class _LaterEvent(NamedTuple):
    """Event after the last journal record, with its append time, but not before the previous event of its topic."""

    at_us: int
    topic: str
    event: InputEvent | None


async def seek_time(
    log: Log,
    partition: int,
    time_us: int,
    custom: CustomPolicies = ONLY_BUILT_IN,
    states: States | None = None,
) -> Position:
    """Return the position at `time_us`: at the last journal record written by then, with the events applied after it.

    The derivation begins at the newest of `states` before it, by default at the newest snapshot. Raises NoSuchRecord if
    the log begins after `time_us` or ends before it, NotDerivable if an owner with other decision rules decided then.
    """
    offset = await offset_at(log, partition, time_us, states)
    position = await seek(log, partition, offset, custom, states)
    following = await _next_record(log, partition, position)
    if following is not None:
        if following.is_of_other_rules and any(run.now_us <= time_us for run in following.record.consumed):
            raise await moment_error(log, partition, following.offset)
        applied = await _apply_recorded(log, partition, position.world, following.record, time_us)
        position.later = LaterFacts(requested_us=time_us, applied=dict(applied))
        return position
    await _require_not_after_end(log, partition, position.world, time_us)
    applied, left, deciding = await apply_unrecorded(log, partition, position.world, time_us)
    if deciding is not None:  # one event too many: derive the state again, and stop before this event
        position = await seek(log, partition, offset, custom, states)
        applied, left, _ = await apply_unrecorded(log, partition, position.world, time_us, deciding)
    position.later = LaterFacts(requested_us=time_us, unrecorded=dict(applied), not_applied=dict(left))
    return position


async def seek_record(
    log: Log,
    partition: int,
    offset: int | None = None,
    custom: CustomPolicies = ONLY_BUILT_IN,
    states: States | None = None,
) -> Position:
    """Return the position of `seek`. At the last journal record, it has the number of later events on the log."""
    position = await seek(log, partition, offset, custom, states)
    if await _next_record(log, partition, position) is None:
        view = position.world.view
        counts = {topic.name: await log.end(topic.name, partition) - view.get(topic.name, 0) for topic in INPUTS}
        position.later = LaterFacts(not_applied={name: count for name, count in counts.items() if count > 0})
    return position


async def last_time(log: Log, partition: int) -> int:
    """Return when the last event was applied or appended, in microseconds since 1970; 0 if there is none."""
    latest_us = await last_clock(log, partition)
    for topic in INPUTS:
        end = await log.end(topic.name, partition)
        if end > await log.begin(topic.name, partition):
            latest_us = max([latest_us, *(one.at_us for one in await log.read(topic.name, partition, end - 1, 1))])
    return latest_us


class _NextRecord(NamedTuple):
    offset: int
    record: JournalRecord
    is_of_other_rules: bool


async def _next_record(log: Log, partition: int, position: Position) -> _NextRecord | None:
    """Return the first valid journal record after `position` that consumes events."""
    start, end = position.offset + 1, await log.end(DECISIONS.name, partition)
    validity = await validity_at(log, partition, start, position.owner, position.rules)
    async for offset, record in journal(log, partition, start, end, validity):
        if record.consumed:
            return _NextRecord(offset, record, validity.rules != CORE_VERSION)
    return None


async def _apply_recorded(log: Log, partition: int, world: World, record: JournalRecord, time_us: int) -> Counter[str]:
    """Apply the events that the next record counts and its owner applied by `time_us`; return their numbers by topic.

    They lead to no decision, because a record counts events up to the one that leads to its decision, whose clock
    reading is later.
    """
    runs = tuple(run for run in record.consumed if run.now_us <= time_us)
    events = {
        topic: iter(of) for topic, of in (await RecordedOrder(log, partition, world.view).events_of(runs)).items()
    }
    applied: Counter[str] = Counter()
    for run in runs:
        open_run(world, run.now_us)
        for _ in range(run.count if run.topic != CLOCK else 0):
            step(world, run.topic, next(events[run.topic]), run.now_us)
            applied[run.topic] += 1
    return applied


async def apply_unrecorded(
    log: Log,
    partition: int,
    world: World,
    time_us: int,
    most: int | None = None,
    on_event: OnUnrecorded | None = None,
) -> tuple[Counter[str], Counter[str], int | None]:
    """Apply the events on the log that were appended by `time_us`, up to the first one that leads to a decision.

    Unless an event led to a decision, a second call continues with the events that were appended since.

    Args:
        world: state after the last journal record, which changes.
        most: apply at most this many events; None for no limit.
        on_event: called with topic, offset, event and append time in microseconds, after each applied event.

    Returns:
        The number of applied events by topic, the number of other events by `time_us` by topic, and how many events
        come before the first one that leads to a decision. The last number is None if no applied event does.
    """
    applied: Counter[str] = Counter()
    left: Counter[str] = Counter()
    async for at_us, topic, event in _later_events(log, partition, world):
        if at_us > time_us:
            break
        if applied.total() == most:
            left[topic] += 1
        elif _decide(world, topic, event, max(at_us, world.now_us)):
            return applied, left, applied.total()
        else:
            applied[topic] += 1
            if on_event is not None:
                on_event(topic, world.view[topic] - 1, event, at_us)
        if (applied.total() + left.total()) % BREATHE_EVERY == 0:
            await asyncio.sleep(0)
    return applied, left, None


def _decide(world: World, topic: str, event: InputEvent | None, now_us: int) -> bool:
    """Apply an event. Return whether it leads to a decision."""
    decided: list[AnyDecision] = open_run(world, now_us)
    try:
        return bool(decided or step(world, topic, event, now_us))
    except PolicyMissing:  # only a decision runs a policy
        return True


async def _later_events(log: Log, partition: int, world: World) -> AsyncIterator[_LaterEvent]:
    """Yield the events that `world` has not applied, in the order in which they were appended to their topics."""
    sources = [_events_after(log, partition, topic, world.view.get(topic.name, 0)) for topic in INPUTS]
    heads = [await anext(source, None) for source in sources]
    while waiting := [(head.at_us, number) for number, head in enumerate(heads) if head is not None]:
        _, number = min(waiting)
        head, heads[number] = heads[number], await anext(sources[number], None)
        assert head is not None
        yield head


async def _events_after(log: Log, partition: int, topic: Topic, start: int) -> AsyncIterator[_LaterEvent]:
    at_us = 0
    async for record in records_of(log, topic, partition, start, await log.end(topic.name, partition)):
        if record.offset != start:
            raise LogError(f"{topic.name}/{partition}: the records from {start} to {record.offset - 1} are missing")
        start, at_us = start + 1, max(at_us, record.at_us)
        yield _LaterEvent(at_us, topic.name, decode_or_none(topic, record.value))


async def _require_not_after_end(log: Log, partition: int, world: World, time_us: int) -> None:
    end_us = max(world.now_us, await last_time(log, partition))
    if end_us < time_us:
        raise NoSuchRecord(f"the recording ends at {utc(end_us)}, before the requested time; give an earlier time")
