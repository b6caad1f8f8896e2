"""Explain one request from the log: derive the journal again, starting at the newest state before it.

All decisions in an explanation equal the journal. A divergence ends the explanation and is part of it. Events after
the end of the journal are listed as not yet applied by an owner.
"""

import asyncio
from collections.abc import Iterable, Mapping

import msgspec

from forebay.core.routing.plan import Plan
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.events.request_ids import log_id_of
from forebay.events.requests import RouteQueried
from forebay.events.topics import DECISIONS, FLEET, PROGRESS, REQUESTS, Topic
from forebay.journal.reader import JournalReader, Past
from forebay.journal.records import OtherRules, decode_or_none
from forebay.journal.start import Start, oldest_state
from forebay.replay.explain.explanation import Explanation, SubmissionEvent, TimelineEntry
from forebay.replay.explain.find import (
    OTHERS_MAX,
    Mentions,
    OnProgress,
    RequestUse,
    UnknownRequest,
    find,
    find_unapplied_submission,
)
from forebay.replay.explain.timeline import Timeline, TimelineEvent, submission_of
from forebay.replay.policies import require_allowed
from forebay.replay.states import States
from forebay.replay.verify.divergence import DivergenceReport, DivergenceTrail
from forebay.transport.base import Log, LogError, NotDerivable, Record, records_of

BREATHE_EVERY = 64  # journal records between yields to the event loop, for time limits and signals


async def explain(
    states: States,
    request_id: str,
    *,
    thorough: bool = True,
    with_changes: bool = False,
    progress: OnProgress | None = None,
    mentions: Mentions | None = None,
) -> Explanation:
    """Explain the most recent request with this ID: the one on the log, of its response, or that its client chose.

    Args:
        thorough: whether to search the whole journal, for earlier and other requests with the same ID.
        with_changes: whether to find the changes that would have changed each selection.
        mentions: records about the request that a catalog knows; None to search the journal.

    Raises:
        UnknownRequest: no record is about the request.
        NotDerivable: an owner with other decision rules decided about the request.
        LogError: the log is damaged.
    """
    log, partition = states.log, states.partition
    request_id = log_id_of(request_id)
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
    end = await log.end(DECISIONS.name, partition)
    try:
        start = await _start(states, found, first)
        timeline = Timeline(found.request_id, start.world)
        reader = JournalReader(log, partition, start, end, Past.ABANDONED_HISTORY)
        divergence = await _derive(reader, timeline, found.last, progress, with_changes=with_changes)
    except OtherRules as other:
        raise NotDerivable(str(other)) from other
    if divergence is None and not timeline.over:
        if not timeline.begun:
            raise UnknownRequest(found.request_id, ())
        await _observe_tail(log, partition, timeline, reader.world.view)
    return msgspec.structs.replace(
        timeline.explanation(diverged=divergence is not None),
        earlier_uses=found.earlier,
        others=found.others,
        derived_from=start.offset,
        derived_to=reader.position,
        unverified=reader.unverified,
        divergence=divergence,
    )


async def explain_among(
    log: Log,
    partitions: Iterable[int],
    request_id: str,
    *,
    thorough: bool = True,
    with_changes: bool = False,
    progress: OnProgress | None = None,
    custom: CustomPolicies = ONLY_BUILT_IN,
) -> Explanation:
    """Explain the most recent request with this ID in any of these control partitions.

    Raises as `explain`, and PolicyNotAllowed. A failure of a partition does not matter if another one has the request.
    """
    found: list[Explanation] = []
    errors: list[UnknownRequest | LogError] = []
    for partition in partitions:
        try:
            await require_allowed(log, partition, custom)
            states = States(log, partition, custom)
            one = await explain(states, request_id, thorough=thorough, with_changes=with_changes, progress=progress)
            found.append(one)
        except (UnknownRequest, LogError) as error:
            errors.append(error)
    if not found:
        errors.append(UnknownRequest(request_id, ()))
        raise min(errors, key=lambda one: (isinstance(one, UnknownRequest), not getattr(one, "near", ())))
    newest, *rest = sorted(found, key=lambda one: 0 if one.submitted is None else -one.submitted.wall_us)
    others = *(newest.others or ()), *(name for one in rest for name in (one.request_id, *(one.others or ())))
    return msgspec.structs.replace(newest, others=tuple(dict.fromkeys(others))[:OTHERS_MAX] if thorough else None)


async def _derive(
    reader: JournalReader, timeline: Timeline, last: int, progress: OnProgress | None, *, with_changes: bool
) -> DivergenceReport | None:
    """Apply the steps of a reader to a timeline, up to the end of the request and its `last` decision."""
    trail = _trail_of(reader, timeline, with_changes=with_changes)

    async def on_restored(_: int) -> None:
        nonlocal trail
        timeline.continue_in(reader.world)
        trail = _trail_of(reader, timeline, with_changes=with_changes)

    reader.on_restored = on_restored
    async for step in reader:
        if step.divergence is not None:
            return trail.report(step.divergence, step)
        trail.add_verified(step)
        timeline.apply(step)
        if timeline.over and step.offset >= last and not timeline.is_behind:
            break
        if reader.position % BREATHE_EVERY == 0:
            if progress is not None:
                progress(reader.position - reader.start, reader.end - reader.start)
            await asyncio.sleep(0)
    return None


def _trail_of(reader: JournalReader, timeline: Timeline, *, with_changes: bool) -> DivergenceTrail:
    """Register a trail and a timeline with the world of `reader`, which has derived no record in it yet."""
    trail = DivergenceTrail(reader)
    kept = reader.world.on_plan
    assert kept is not None, "DivergenceTrail sets a listener"

    def on_plan(plan: Plan) -> None:
        kept(plan)
        timeline.on_plan(plan, with_changes=with_changes)

    reader.world.on_plan = on_plan
    return trail


async def _start(states: States, found: RequestUse, first: int) -> Start:
    """Return the newest state before the request, or the oldest one if the request was already active there.

    If an owner with other decision rules decided about the request first, the state is before the last decision. Raises
    OtherRules if such an owner made this decision, too.
    """
    try:
        start = await states.before(first)
    except OtherRules:  # an owner with own rules may have continued the request
        start = await states.before(found.last)
    while start.world.requests.get(found.request_id) is not None:
        try:
            if (await oldest_state(states.log, states.partition)).offset >= start.offset:
                break
            start = await states.before(start.offset - 1)
        except OtherRules:
            break
    return start


def _not_applied(end: int, offset: int, event: SubmissionEvent) -> Explanation:
    text = "written to the log, not applied by an owner yet"
    moment = TimelineEntry(what="submitted", text=text, now_us=None, after_us=None, topic=REQUESTS.name, offset=offset)
    return Explanation(
        request_id=event.request_id,
        kind="query" if isinstance(event, RouteQueried) else "request",
        state="submitted",
        earlier_uses=0,
        derived_from=end,
        derived_to=end,
        submitted=submission_of(event, offset, None),
        timeline=(moment,),
    )


async def _observe_tail(log: Log, partition: int, timeline: Timeline, view: Mapping[str, int]) -> None:
    """Add the events about an active request that follow the journal's end, in append order."""
    found: list[tuple[Topic, Record]] = []
    for topic in (REQUESTS, PROGRESS, FLEET):
        needle = b"" if topic is FLEET else timeline.request_id.encode()
        start, end = view.get(topic.name, 0), await log.end(topic.name, partition)
        records = records_of(log, topic, partition, start, end)
        found += [(topic, record) async for record in records if needle in record.value]
    for topic, record in sorted(found, key=lambda one: one[1].at_us):
        event = decode_or_none(topic, record.value)
        if isinstance(event, TimelineEvent):
            timeline.observe(topic.name, record.offset, event, None)
