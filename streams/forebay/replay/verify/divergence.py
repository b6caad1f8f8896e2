"""Report a divergence: recorded and derived decision, both cost tables, the events before, and what the cause may be.

If a digest in the journal matched the derived state, the cause was applied after that digest. The memory that a walk
needs for a later report does not grow with the length of the walk.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from forebay.core.rederive import Divergence
from forebay.core.routing.plan import Plan
from forebay.core.step import CLOCK
from forebay.events.decisions import Advanced, JournalRecord, OwnerClaimed, RequestRouted, RouteAnswered
from forebay.events.topics import INPUTS
from forebay.replay.verify.cost_tables import CostTables, digest_of, tables
from forebay.replay.verify.suspects import EventSummary, Suspicion, summarize, suspicion_of
from forebay.replay.walk import Step, Walk
from forebay.transport.base import Log

EVENTS_SHOWN = 50  # the last consumed events, which are nearest to the decision
PLANS_KEPT = 1_024  # derived from the events of one record and not in the journal yet


class LastVerifiedState(msgspec.Struct, kw_only=True):
    """The last state known to be correct: `sealed` by a digest in the journal, or else where the derivation began.

    `since` has the offset of the first event applied after that state and the offset after the last one, by topic.
    """

    journal_offset: int
    sealed: bool
    since: dict[str, tuple[int, int]]


class DivergenceReport(msgspec.Struct, kw_only=True):
    """The first journal record that does not follow from the events, and what may explain it.

    Attributes:
        events_before: number of events that were applied together with `events` but earlier, and are not listed.
        events_offset: offset of the journal record whose `consumed` counts these events. They may have led to several
            decisions.
        suspicion: events that may be the cause; None if any event since `held` may be the cause.
    """

    offset: int
    reason: str
    hint: str
    owner_epoch: int
    differs: dict[str, Any]
    recorded: dict[str, Any]
    derived: dict[str, Any] | None
    previous: dict[str, Any] | None
    events: list[EventSummary]
    events_before: int
    events_offset: int
    table: CostTables | None
    held: LastVerifiedState
    suspicion: Suspicion | None


class DivergenceTrail:
    """Collects the data for a divergence report during a walk. Create it before the first step of `walk`."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._plans: deque[Plan] = deque(maxlen=PLANS_KEPT)
        self._previous: tuple[int, JournalRecord] | None = None
        self._consuming: Step | None = None
        self._seq = walk.world.seq - 1
        self._held, self._sealed = walk.start, False
        self._view = dict(walk.world.view)
        walk.world.on_plan = self._plans.append

    def add_verified(self, step: Step) -> None:
        record = step.record
        self._previous = (step.offset, record)
        if record.consumed:
            self._consuming = step
        if not self._walk.pending:
            self._plans.clear()
        if not isinstance(record, OwnerClaimed):
            self._seq = record.seq
        if isinstance(record, Advanced):
            self._held, self._sealed, self._view = step.offset, True, dict(self._walk.world.view)

    async def report(self, log: Log, partition: int, divergence: Divergence, step: Step) -> DivergenceReport:
        recorded, derived = divergence.recorded, divergence.derived
        made = self._plan_of(derived)
        table = None if made is None else tables(made, recorded)
        blocks = frozenset() if made is None else frozenset(made.request.blocks)
        consuming = step if step.record.consumed or self._consuming is None else self._consuming
        events, count = self._events(consuming)
        since = self._since()
        return DivergenceReport(
            offset=divergence.offset,
            reason=divergence.reason,
            hint=self._hint(recorded, derived, table),
            owner_epoch=recorded.owner_epoch,
            differs={} if derived is None else dict(_differences(_plain(recorded), _plain(derived))),
            recorded=_plain(recorded),
            derived=None if derived is None else _plain(derived),
            previous=None if self._previous is None else {"offset": self._previous[0], **_plain(self._previous[1])},
            events=events,
            events_before=count - len(events),
            events_offset=consuming.offset,
            table=table,
            held=LastVerifiedState(journal_offset=self._held, sealed=self._sealed, since=since),
            suspicion=await suspicion_of(log, partition, (recorded, derived), table, blocks, since),
        )

    def _plan_of(self, derived: JournalRecord | None) -> Plan | None:
        if not isinstance(derived, RequestRouted | RouteAnswered):
            return None
        for made in reversed(self._plans):
            if made.request.request_id == derived.request_id and digest_of(made.table) == derived.table_digest:
                return made
        return None

    def _events(self, step: Step) -> tuple[list[EventSummary], int]:
        offsets = self._walk.consumed_from(step.record)
        taken: dict[str, int] = {}
        last: deque[EventSummary] = deque(maxlen=EVENTS_SHOWN)
        count = 0
        for run in step.record.consumed:
            if run.topic == CLOCK:
                count += 1
                last.append(EventSummary(topic=CLOCK, offset=None, type=CLOCK, text="time passed", now_us=run.now_us))
                continue
            start = taken.get(run.topic, 0)
            taken[run.topic] = start + run.count
            events = step.events.get(run.topic, ())[start : start + run.count]
            count += len(events)
            first = max(0, len(events) - EVENTS_SHOWN)
            for at, event in enumerate(events[first:], offsets[run.topic] + start + first):
                last.append(summarize(run.topic, at, event, run.now_us))
        return list(last), count

    def _since(self) -> dict[str, tuple[int, int]]:
        order = self._walk.order
        spans = {topic.name: (self._view.get(topic.name, 0), order.offset(topic.name)) for topic in INPUTS}
        return {topic: span for topic, span in spans.items() if span[0] < span[1]}

    def _hint(self, recorded: JournalRecord, derived: JournalRecord | None, table: CostTables | None) -> str:
        """Return the likely kind of cause as text, or an empty string."""
        unknown = sum(reader.unknown for reader in self._walk.order.readers.values())
        if unknown:
            return f"{unknown} earlier events of unknown types had no effect here: they may be the cause"
        if recorded.seq != self._seq + 1:
            return f"{_number_text(recorded.seq, self._seq)}; so the derived decision used the wrong events"
        if isinstance(recorded, Advanced) and derived is not None:
            return "the state differs from the sealed digest: some event since the last matching digest differs"
        if table is None or not table.comparable:
            return ""
        if table.digest == table.recorded_digest:
            return "the cost tables have equal digests: the record was changed, or the policy decides differently"
        if not any(row.differs for row in table.rows):
            return "the recorded terms are equal: the digest or a candidate that is only in the digest differs"
        return ""


def _number_text(seq: int, before: int) -> str:
    missing = seq - before - 1  # a lower seq repeats an earlier record, which is skipped
    text = f"its seq is {seq}, that of the previous record is {before}"
    return f"{text}: {missing} records in between are missing or were moved"


def _plain(record: JournalRecord) -> dict[str, Any]:
    return dict(msgspec.to_builtins(record))


def _differences(recorded: dict[str, Any], derived: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name in sorted({*recorded, *derived}):
        left, right = recorded.get(name), derived.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from _differences(left, right, f"{path}{name}.")
        elif left != right:
            yield f"{path}{name}", {"recorded": left, "derived": right}
