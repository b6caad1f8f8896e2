"""One request's life, from the log: derived again from the newest state before it, and told as plain data.

What is told was derived from the recorded events and is equal to what the journal says, or it is not told: a
divergence ends the story and is part of it. Events behind the journal's end are told as what they are: said, and not
applied by an owner yet.
"""

import asyncio
from collections.abc import Callable

import msgspec

from forebay.core.routing.router import Selection
from forebay.core.state.active_request import ActiveRequest
from forebay.core.world import World
from forebay.events.control import PoolConfigured
from forebay.events.fleet import WorkerFact
from forebay.events.progress import ProgressEvent
from forebay.events.requests import RequestCancelled, RouteQueried
from forebay.events.topics import DECISIONS, FLEET, PROGRESS, REQUESTS, Topic
from forebay.replay.explain.explanation import Explanation, Moment
from forebay.replay.explain.find import Found, OnProgress, UnknownRequest, find, submitted_lately
from forebay.replay.explain.timeline import Life
from forebay.replay.explain.timeline_parts import Asked, as_submission
from forebay.replay.verify.divergence import Trail
from forebay.replay.walk import Start, Walk, before, oldest
from forebay.transport.base import Log, Record
from forebay.transport.history.reader import PAGE_RECORDS, decode_or_none

__all__ = ["Explanation", "UnknownRequest", "explain"]

OnChoice = Callable[[PoolConfigured, ActiveRequest, Selection], None]

BREATHE_EVERY = 64  # journal records between two chances for others: a time limit, a signal


async def explain(
    log: Log, partition: int, request_id: str, *, thorough: bool = True, progress: OnProgress | None = None
) -> Explanation:
    """The last use of a request id.

    A thorough search looks through the whole journal for uses before it, too. `progress` is called with the records
    done and their total, first of the search and then of deriving.

    Raises:
        UnknownRequest: nothing on the log is about it.
        OtherRules: the journal was decided by another version of the rules.
        LogError: the log is damaged, or no longer holds a state before the request.
    """
    try:
        found = await find(log, partition, request_id, thorough=thorough, progress=progress)
    except UnknownRequest:
        lately = await submitted_lately(log, partition, request_id)
        if lately is None:
            raise
        return _not_applied(await log.end(DECISIONS.name, partition), *lately)
    start = await _start(log, partition, request_id, found)
    walk = Walk(log, partition, start, await log.end(DECISIONS.name, partition))
    life, trail = Life(request_id, start.world), Trail(walk)
    _look_on(walk.world, life.on_selection)
    done, divergence = start.offset, None
    async for step in walk:
        if step.divergence is not None:
            divergence = await trail.told(log, partition, step.divergence, step)
            break
        trail.passed(step)
        life.take(step, walk.consumed_from(step.record))
        done = step.offset + 1
        if life.over and done > found.last:
            break
        if done % BREATHE_EVERY == 0:
            if progress is not None:
                progress(done - start.offset, walk.end - start.offset)
            await asyncio.sleep(0)
    if divergence is None and not life.over:
        if not life.begun:
            raise UnknownRequest(request_id, ())
        await _tell_tail(log, partition, life, walk)
    told = life.told(diverged=divergence is not None)
    return msgspec.structs.replace(
        told,
        earlier_uses=found.earlier,
        derived_from=start.offset,
        derived_to=done,
        unverified=walk.unverified,
        divergence=divergence,
    )


def _look_on(world: World, also: OnChoice) -> None:
    """Tell of choices to one more, after whoever is told already."""
    first = world.on_selection
    assert first is not None, "the trail looks on"

    def both(pool: PoolConfigured, request: ActiveRequest, choice: Selection) -> None:
        first(pool, request, choice)
        also(pool, request, choice)

    world.on_selection = both


async def _start(log: Log, partition: int, request_id: str, found: Found) -> Start:
    """The newest state before the request, or the oldest one there is, if it was under way already."""
    start = await before(log, partition, found.first)
    while start.world.requests.get(request_id) is not None:
        eldest = await oldest(log, partition, await log.end(DECISIONS.name, partition))
        if eldest.offset >= start.offset:
            break
        start = await before(log, partition, start.offset - 1)
    return start


def _not_applied(end: int, offset: int, event: Asked) -> Explanation:
    """A request that was submitted, and nothing else so far; the journal ends at `end`."""
    text = "written to the log, and not applied by an owner yet"
    moment = Moment(what="submitted", text=text, now_us=None, after_us=None, topic=REQUESTS.name, offset=offset)
    return Explanation(
        request_id=event.request_id,
        kind="query" if isinstance(event, RouteQueried) else "request",
        state="submitted",
        earlier_uses=0,
        derived_from=end,
        derived_to=end,
        submitted=as_submission(event, offset, None),
        held=None,
        routings=(),
        first_token=None,
        output_tokens=None,
        ending=None,
        timeline=(moment,),
    )


async def _tell_tail(log: Log, partition: int, life: Life, walk: Walk) -> None:
    """What stands behind the journal's end about a request under way, in the order of its appends."""
    found: list[tuple[Topic, Record]] = []
    for topic in (REQUESTS, PROGRESS, FLEET):
        needle = b"" if topic is FLEET else life.request_id.encode()
        position = walk.world.view.get(topic.name, 0)
        end = await log.end(topic.name, partition)
        while position < end:
            records = await log.read(topic.name, partition, position, min(PAGE_RECORDS, end - position))
            if not records:
                break
            found += [(topic, record) for record in records if needle in record.value]
            position = records[-1].offset + 1
    for topic, record in sorted(found, key=lambda one: one[1].at_us):
        event = decode_or_none(topic, record.value)
        if isinstance(event, ProgressEvent | WorkerFact | RequestCancelled):
            life.hear(topic.name, record.offset, event, None)
