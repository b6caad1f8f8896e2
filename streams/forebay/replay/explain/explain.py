"""Explain one request from the log: derive its history again, starting at the newest state before it.

All decisions in an explanation equal the journal. A divergence ends the explanation and is part of it. Events after
the end of the journal are listed as not yet applied by an owner. Of decisions by owners with other decision rules, the
timeline has the journal records without the reasons, which only a program with these rules can derive.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from forebay.core.routing.plan import Plan
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.world import World
from forebay.events.decisions import OwnerClaimed
from forebay.events.fleet import WorkerFact
from forebay.events.progress import ProgressEvent
from forebay.events.requests import RequestCancelled, RouteQueried
from forebay.events.topics import DECISIONS, FLEET, INPUTS, PROGRESS, REQUESTS, Topic
from forebay.replay.explain.explanation import Explanation, SubmissionEvent, TimelineEntry
from forebay.replay.explain.find import (
    Mentions,
    OnProgress,
    RequestLocation,
    UnknownRequest,
    find,
    find_unapplied_submission,
)
from forebay.replay.explain.timeline import Timeline, submission_of
from forebay.replay.recorded import RecordedStep, RecordedSteps
from forebay.replay.spans import OtherSpan
from forebay.replay.verify.divergence import DivergenceReport, DivergenceTrail
from forebay.replay.walk import LogStates, Start, States, Walk, oldest
from forebay.transport.base import Log, Record
from forebay.transport.history.reader import OtherRules, SpanEnds, decode_or_none, records_of
from forebay.transport.history.release import rules_text
from forebay.transport.history.snapshots import load_continued

BREATHE_EVERY = 64  # journal records between yields to the event loop, for time limits and signals


class Known(NamedTuple):
    states: States
    mentions: Mentions


async def explain(
    log: Log,
    partition: int,
    request_id: str,
    *,
    thorough: bool = True,
    with_changes: bool = False,
    progress: OnProgress | None = None,
    custom: CustomPolicies = ONLY_BUILT_IN,
    known: Known | None = None,
) -> Explanation:
    """Explain the most recent request with this ID, which is the ID on the log or the one that its client chose.

    Args:
        thorough: whether to search the whole journal, for earlier and other requests with the same ID.
        with_changes: whether to find the changes that would have changed each selection.
        known: what a catalog knows; None to search the journal, and to begin at a snapshot of the log.
    """
    states, mentions = (None, None) if known is None else known
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
    derived = _Derived(log, partition, found, end, progress, with_changes)
    await derived.follow(first, states or LogStates(log, partition, custom), custom)
    timeline = derived.timeline
    if derived.divergence is None and not timeline.over:
        if not timeline.begun:
            raise UnknownRequest(found.request_id, ())
        await _observe_tail(log, partition, timeline, derived.view)
    explanation = timeline.explanation(diverged=derived.divergence is not None)
    return msgspec.structs.replace(
        explanation,
        earlier_uses=found.earlier,
        others=found.others,
        derived_from=derived.begin,
        derived_to=derived.done,
        unverified=derived.unverified,
        divergence=derived.divergence,
        recorded=tuple(derived.recorded),
    )


@dataclass(slots=True)
class _Derived:
    """Derives the timeline of a request. Parts of the journal by other rules are read as recorded.

    The derivation covers the journal offsets [`begin`, `done`); `begin` is the journal's end if nothing was derived.
    """

    log: Log
    partition: int
    found: RequestLocation
    end: int
    progress: OnProgress | None
    with_changes: bool
    timeline: Timeline = field(init=False)
    divergence: DivergenceReport | None = None
    recorded: list[OtherSpan] = field(default_factory=list)
    unverified: dict[str, int] = field(default_factory=dict)
    view: Mapping[str, int] = field(default_factory=dict)
    begin: int = field(init=False)
    done: int = field(init=False)

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.found.request_id, World())
        self.begin = self.done = self.end

    async def follow(self, first: int, states: States, custom: CustomPolicies) -> None:
        """Follow the journal from a state before offset `first` to the end of the request."""
        log, partition = self.log, self.partition
        try:
            start = await _start(log, partition, self.found.request_id, first, states, custom)
        except OtherRules:
            steps = await RecordedSteps.before(log, partition, first)
        else:
            self.begin = start.offset
            self.timeline = Timeline(self.found.request_id, start.world)
            walk = await self._derive(start)
            if walk is None:
                return
            steps = RecordedSteps.after(log, partition, walk)
        while (claim := await self._read(steps)) is not None:
            start = Start(await load_continued(log, partition, claim, custom), steps.position, begins_span=True)
            self.begin = min(self.begin, start.offset)
            self.timeline.continue_in(start.world)
            walk = await self._derive(start)
            if walk is None:
                return
            steps = RecordedSteps.after(log, partition, walk)

    async def _derive(self, start: Start) -> Walk | None:
        """Derive records up to the end of the request. Return the walk if its span ends before."""
        self.done = start.offset
        walk = Walk(self.log, self.partition, start, self.end)
        trail = DivergenceTrail(walk)
        kept = walk.world.on_plan
        assert kept is not None, "DivergenceTrail sets a listener"

        def on_plan(plan: Plan) -> None:
            kept(plan)
            self.timeline.on_plan(plan, with_changes=self.with_changes)

        walk.world.on_plan = on_plan
        try:
            await self._apply(walk, trail, start.offset)
        except SpanEnds:
            return walk
        finally:
            self.view, self.unverified = walk.world.view, walk.unverified
        return None

    async def _apply(self, walk: Walk, trail: DivergenceTrail, begin: int) -> None:
        async for step in walk:
            if step.divergence is not None:
                self.divergence = trail.report(step.divergence, step)
                return
            trail.add_verified(step)
            begins = walk.consumed_from(step.record)
            self.timeline.apply(RecordedStep(step.offset, step.record, step.record.consumed, step.events, begins))
            self.done = step.offset + 1
            if self._is_complete(self.done):
                return
            if self.done % BREATHE_EVERY == 0:
                if self.progress is not None:
                    self.progress(self.done - begin, walk.end - begin)
                await asyncio.sleep(0)

    async def _read(self, steps: RecordedSteps) -> OwnerClaimed | None:
        """Read records as recorded. Return the claim with this program's rules that follows before the request ends."""
        rules, release, end = steps.validity.rules, steps.validity.release, steps.first
        async for step in steps.read(self.end):
            rules, release, end = steps.validity.rules, steps.validity.release, step.offset + 1
            self.timeline.apply(step, rules_text(rules, release))
            if self._is_complete(end):
                break
        if end > steps.first:
            self.recorded.append(OtherSpan(rules=rules, release=release, first=steps.first, end=end))
        self.view = {topic.name: steps.order.offset(topic.name) for topic in INPUTS}
        return None if self._is_complete(end) else steps.claim

    def _is_complete(self, end: int) -> bool:
        return self.timeline.over and end > self.found.last


async def _start(
    log: Log, partition: int, request_id: str, first: int, states: States, custom: CustomPolicies
) -> Start:
    """Return the newest state before the request, or the oldest one if the request was already active there.

    Raises OtherRules if an owner with other decision rules decided about the request first.
    """
    start = await states.before(first)
    while start.world.requests.get(request_id) is not None:
        try:
            eldest = await oldest(log, partition, await log.end(DECISIONS.name, partition), custom)
            if eldest.offset >= start.offset:
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
        if isinstance(event, ProgressEvent | WorkerFact | RequestCancelled):
            timeline.observe(topic.name, record.offset, event, None)
