"""A divergence, told in full: both decisions, both cost tables, the events in between, and where the cause may lie.

A digest of the state that held brackets the cause: what is wrong was applied after it. What is kept on the way for that
is bounded, and no more on a longer walk.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from forebay.core.rederive import Divergence
from forebay.core.routing.router import Selection
from forebay.core.state.active_request import ActiveRequest
from forebay.core.step import CLOCK, InputEvent
from forebay.events.control import PoolConfigured
from forebay.events.decisions import Advanced, JournalRecord, OwnerClaimed, RequestRouted, RouteAnswered
from forebay.events.topics import INPUTS
from forebay.replay.explain.event_text import EventTold, tag_of, text_of
from forebay.replay.verify.cost_tables import Table, digest_of, tables
from forebay.replay.verify.suspects import Suspicion, suspicion_of
from forebay.replay.walk import Step, Walk
from forebay.transport.base import Log

EVENTS_SHOWN = 50  # of those consumed: the last, which are nearest to the decision
CHOICES_KEPT = 1_024  # that the events of one record led to, and that are not in the journal yet


class Held(msgspec.Struct, kw_only=True):
    """The last state that is known to be right: `sealed` by a digest at a journal offset, else where the walk began.

    `since` holds by topic the first offset applied after it, and the one after the last.
    """

    journal_offset: int
    sealed: bool
    since: dict[str, tuple[int, int]]


class Told(msgspec.Struct, kw_only=True):
    """The first record that the events do not lead to.

    Attributes:
        offset: of the record in the journal.
        reason: what is wrong with it.
        hint: what that looks like; may be empty.
        owner_epoch: of the owner that wrote it.
        differs: by field, what is recorded and what is derived, where there is something derived.
        recorded: the record.
        derived: what the events lead to; None for nothing.
        previous: the valid record before it, with its offset.
        events: the last of those applied since the record before it, `events_before` more came before these.
        events_offset: the journal record that consumed them: it may have led to several decisions.
        table: both cost tables; None when no choice was derived.
        held: the last state that is known to be right.
        suspicion: which events may be the cause; None when it may be any since `held`.
    """

    offset: int
    reason: str
    hint: str
    owner_epoch: int
    differs: dict[str, Any]
    recorded: dict[str, Any]
    derived: dict[str, Any] | None
    previous: dict[str, Any] | None
    events: list[EventTold]
    events_before: int
    events_offset: int
    table: Table | None
    held: Held
    suspicion: Suspicion | None


class Trail:
    """What a walk leaves behind so that a divergence can be told. Made before its first step."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._choices: deque[tuple[PoolConfigured, ActiveRequest, Selection]] = deque(maxlen=CHOICES_KEPT)
        self._previous: tuple[int, JournalRecord] | None = None
        self._consuming: Step | None = None
        self._seq = walk.world.seq - 1
        self._held, self._sealed = walk.start, False
        self._view = dict(walk.world.view)
        walk.world.on_selection = lambda pool, request, choice: self._choices.append((pool, request, choice))

    def passed(self, step: Step) -> None:
        """A step that holds."""
        record = step.record
        self._previous = (step.offset, record)
        if record.consumed:
            self._consuming = step
        if not self._walk.pending:
            self._choices.clear()
        if not isinstance(record, OwnerClaimed):
            self._seq = record.seq
        if isinstance(record, Advanced):
            self._held, self._sealed, self._view = step.offset, True, dict(self._walk.world.view)

    async def told(self, log: Log, partition: int, divergence: Divergence, step: Step) -> Told:
        """The divergence of the last step. Raises LogError."""
        recorded, derived = divergence.recorded, divergence.derived
        made = self._choice_of(derived)
        table = None if made is None else tables(made[0].pool, made[1].request_id, made[2], recorded)
        blocks = frozenset() if made is None else frozenset(made[1].blocks)
        consuming = step if step.record.consumed or self._consuming is None else self._consuming
        events, count = self._events(consuming)
        since = self._since()
        return Told(
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
            held=Held(journal_offset=self._held, sealed=self._sealed, since=since),
            suspicion=await suspicion_of(log, partition, (recorded, derived), table, blocks, since),
        )

    def _choice_of(self, derived: JournalRecord | None) -> tuple[PoolConfigured, ActiveRequest, Selection] | None:
        """The choice that a derived decision says; None for one that is none."""
        if not isinstance(derived, RequestRouted | RouteAnswered):
            return None
        for made in reversed(self._choices):
            if made[1].request_id == derived.request_id and digest_of(made[2].table) == derived.table_digest:
                return made
        return None

    def _events(self, step: Step) -> tuple[list[EventTold], int]:
        """The last events that a step applied, and how many there were."""
        offsets = self._walk.consumed_from(step.record)
        taken: dict[str, int] = {}
        last: deque[EventTold] = deque(maxlen=EVENTS_SHOWN)
        count = 0
        for run in step.record.consumed:
            if run.topic == CLOCK:
                count += 1
                last.append(EventTold(topic=CLOCK, offset=None, type=CLOCK, text="time passed", now_us=run.now_us))
                continue
            start = taken.get(run.topic, 0)
            taken[run.topic] = start + run.count
            events = step.events.get(run.topic, ())[start : start + run.count]
            count += len(events)
            first = max(0, len(events) - EVENTS_SHOWN)
            for at, event in enumerate(events[first:], offsets[run.topic] + start + first):
                last.append(_told(run.topic, at, event, run.now_us))
        return list(last), count

    def _since(self) -> dict[str, tuple[int, int]]:
        order = self._walk.order
        spans = {topic.name: (self._view.get(topic.name, 0), order.offset(topic.name)) for topic in INPUTS}
        return {topic: span for topic, span in spans.items() if span[0] < span[1]}

    def _hint(self, recorded: JournalRecord, derived: JournalRecord | None, table: Table | None) -> str:
        """What it looks like."""
        unknown = sum(reader.unknown for reader in self._walk.order.readers.values())
        if unknown:
            return f"{unknown} events of unknown kinds before it did nothing here: they may be the cause"
        if recorded.seq != self._seq + 1:
            return f"{_number_text(recorded.seq, self._seq)}; what was derived is of the wrong events, then"
        if isinstance(recorded, Advanced) and derived is not None:
            return "the state is another than the one sealed here: some event since the last digest that held differs"
        if table is None or not table.comparable:
            return ""
        if table.digest == table.recorded_digest:
            return "the cost tables are the same by their digests: the record differs, or the policy decides otherwise"
        if not any(row.differs for row in table.rows):
            return "the terms in the journal are the same: the digest or a candidate that only the digest has differs"
        return ""


def _number_text(seq: int, before: int) -> str:
    text = f"its seq is {seq}, the record before it has {before}"
    if seq > before:
        return f"{text}: {seq - before - 1} records between them are missing, or were moved"
    return f"{text}: it was put in, repeated or moved"


def _told(topic: str, offset: int, event: InputEvent | None, now_us: int) -> EventTold:
    return EventTold(topic=topic, offset=offset, type=tag_of(event), text=text_of(event), now_us=now_us)


def _plain(record: JournalRecord) -> dict[str, Any]:
    return dict(msgspec.to_builtins(record))


def _differences(recorded: dict[str, Any], derived: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name in sorted({*recorded, *derived}):
        left, right = recorded.get(name), derived.get(name)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from _differences(left, right, f"{path}{name}.")
        elif left != right:
            yield f"{path}{name}", {"recorded": left, "derived": right}
