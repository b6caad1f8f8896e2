"""Explain one request from the log: derive its history again, starting at the newest state before it.

All decisions in an explanation were derived from the recorded events and equal the journal. A divergence ends the
explanation and is part of it. Events after the end of the journal are listed as not yet applied by an owner.
"""

import asyncio
from collections.abc import Callable

import msgspec

from forebay.core.routing.plan import Plan
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.world import World
from forebay.events.fleet import WorkerFact
from forebay.events.progress import ProgressEvent
from forebay.events.requests import RequestCancelled, RouteQueried
from forebay.events.topics import DECISIONS, FLEET, PROGRESS, REQUESTS, Topic
from forebay.replay.explain.explanation import Explanation, TimelineEntry
from forebay.replay.explain.find import Mentions, OnProgress, UnknownRequest, find, find_unapplied_submission
from forebay.replay.explain.timeline import Timeline
from forebay.replay.explain.timeline_parts import SubmissionEvent, submission_of_event
from forebay.replay.verify.divergence import DivergenceTrail
from forebay.replay.walk import LogStates, Start, States, Walk, oldest
from forebay.transport.base import Log, Record
from forebay.transport.history.reader import decode_or_none, records_of

__all__ = ["Explanation", "UnknownRequest", "explain"]

OnPlan = Callable[[Plan], None]

BREATHE_EVERY = 64  # journal records between yields to the event loop, for time limits and signals


async def explain(
    log: Log,
    partition: int,
    request_id: str,
    *,
    thorough: bool = True,
    progress: OnProgress | None = None,
    custom: CustomPolicies = ONLY_BUILT_IN,
    states: States | None = None,
    mentions: Mentions | None = None,
) -> Explanation:
    """Explain the most recent request with this ID.

    Args:
        log: the log to read.
        partition: control partition of the request's group.
        request_id: ID of the request on the log, or the ID that its client chose.
        thorough: whether to search the whole journal, for earlier and other requests with the same ID.
        progress: called with the number of records done and their total, first for the search, then for the derivation.
        custom: custom policies that may run.
        states: states at which the derivation may begin; None for the snapshots of the log.
        mentions: known records about the ID; None to search the journal for them.

    Raises:
        UnknownRequest: no record on the log is about the request.
        OtherRules: a program with other decision rules wrote the journal.
        LogError: the log is damaged, or no longer holds a state before the request.
    """
    try:
        found = await find(log, partition, request_id, thorough=thorough, progress=progress, mentions=mentions)
    except UnknownRequest:
        lately = await find_unapplied_submission(log, partition, request_id)
        if lately is None:
            raise
        return _not_applied(await log.end(DECISIONS.name, partition), *lately)
    first = found.first
    if mentions is not None:  # the request is not active yet in a state before the record that counts its submission
        first = next((offset for offset in mentions.submissions if offset <= first), first)
    start = await _start(log, partition, found.request_id, first, states or LogStates(log, partition, custom), custom)
    walk = Walk(log, partition, start, await log.end(DECISIONS.name, partition))
    timeline, trail = Timeline(found.request_id, start.world), DivergenceTrail(walk)
    _add_plan_listener(walk.world, timeline.on_plan)
    done, divergence = start.offset, None
    async for step in walk:
        if step.divergence is not None:
            divergence = await trail.report(log, partition, step.divergence, step)
            break
        trail.add_verified(step)
        timeline.apply(step, walk.consumed_from(step.record))
        done = step.offset + 1
        if timeline.over and done > found.last:
            break
        if done % BREATHE_EVERY == 0:
            if progress is not None:
                progress(done - start.offset, walk.end - start.offset)
            await asyncio.sleep(0)
    if divergence is None and not timeline.over:
        if not timeline.begun:
            raise UnknownRequest(found.request_id, ())
        await _observe_tail(log, partition, timeline, walk)
    explanation = timeline.explanation(diverged=divergence is not None)
    return msgspec.structs.replace(
        explanation,
        earlier_uses=found.earlier,
        others=found.others,
        derived_from=start.offset,
        derived_to=done,
        unverified=walk.unverified,
        divergence=divergence,
    )


def _add_plan_listener(world: World, also: OnPlan) -> None:
    """Call `also` for each routing decision, after the existing listener."""
    first = world.on_plan
    assert first is not None, "DivergenceTrail sets a listener"

    def both(plan: Plan) -> None:
        first(plan)
        also(plan)

    world.on_plan = both


async def _start(
    log: Log, partition: int, request_id: str, first: int, states: States, custom: CustomPolicies
) -> Start:
    """Return the newest state before the request, or the oldest state if the request was already active there."""
    start = await states.before(first)
    while start.world.requests.get(request_id) is not None:
        eldest = await oldest(log, partition, await log.end(DECISIONS.name, partition), custom)
        if eldest.offset >= start.offset:
            break
        start = await states.before(start.offset - 1)
    return start


def _not_applied(end: int, offset: int, event: SubmissionEvent) -> Explanation:
    """Return the explanation of a request that no owner has applied; the journal ends at `end`."""
    text = "written to the log, not applied by an owner yet"
    moment = TimelineEntry(what="submitted", text=text, now_us=None, after_us=None, topic=REQUESTS.name, offset=offset)
    return Explanation(
        request_id=event.request_id,
        kind="query" if isinstance(event, RouteQueried) else "request",
        state="submitted",
        earlier_uses=0,
        derived_from=end,
        derived_to=end,
        submitted=submission_of_event(event, offset, None),
        held=None,
        routings=(),
        first_token=None,
        output_tokens=None,
        ending=None,
        timeline=(moment,),
    )


async def _observe_tail(log: Log, partition: int, timeline: Timeline, walk: Walk) -> None:
    """Add the events about an active request that follow the journal's end, in append order."""
    found: list[tuple[Topic, Record]] = []
    for topic in (REQUESTS, PROGRESS, FLEET):
        needle = b"" if topic is FLEET else timeline.request_id.encode()
        start, end = walk.world.view.get(topic.name, 0), await log.end(topic.name, partition)
        records = records_of(log, topic, partition, start, end)
        found += [(topic, record) async for record in records if needle in record.value]
    for topic, record in sorted(found, key=lambda one: one[1].at_us):
        event = decode_or_none(topic, record.value)
        if isinstance(event, ProgressEvent | WorkerFact | RequestCancelled):
            timeline.observe(topic.name, record.offset, event, None)
