"""Report a divergence: recorded and derived decision, both cost tables, and the events before.

If a digest in the journal matched the derived state, the cause was applied after that digest. The memory that a reader
needs for a later report does not grow with the length of the journal.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from forebay.core.rederive import Divergence
from forebay.core.routing.cost import CostTable
from forebay.core.routing.plan import Plan
from forebay.core.step import CLOCK, InputEvent
from forebay.events.base import U64_BYTES, hex_digest
from forebay.events.decisions import (
    Advanced,
    CostTerms,
    JournalRecord,
    OwnerClaimed,
    RequestRouted,
    RouteAnswered,
    ScoredCandidate,
)
from forebay.events.progress import ProgressEvent
from forebay.events.topics import INPUTS
from forebay.journal.reader import JournalReader, Step
from forebay.transport.readable import HEX_FIELDS

WINNER, RUNNER_UP = "winner", "runner-up"


class CostTableRow(msgspec.Struct, kw_only=True):
    """One candidate in the derived or the recorded cost table. A place is `winner`, `runner-up` or empty."""

    worker_id: str
    rank: int
    derived: CostTerms | None
    recorded: CostTerms | None
    place: str = ""
    recorded_place: str = ""
    differs: tuple[str, ...] = ()


class CostTables(msgspec.Struct, kw_only=True):
    """The derived and the recorded cost table of a decision.

    Attributes:
        digest: digest over every term of every derived candidate.
        comparable: whether the recorded decision is about the same request. Otherwise there are no recorded terms.
        recorded_in_full: whether the journal holds the terms of every recorded candidate.
    """

    request_id: str
    pool: str
    mode: str
    digest: str
    rows: list[CostTableRow]
    comparable: bool
    recorded_in_full: bool
    recorded_digest: str | None
    recorded_candidates: int | None


def tables(plan: Plan, record: JournalRecord) -> CostTables:
    derived, request_id = plan.table, plan.request.request_id
    next_best = plan.runner_up()
    second = None if next_best is None else (next_best.worker_id, next_best.rank)
    rows: dict[tuple[str, int], CostTableRow] = {}
    for at in range(len(derived.costs)):
        one = derived.candidate(at)
        key = one.worker_id, one.rank
        place = WINNER if at == plan.at else RUNNER_UP if key == second else ""
        rows[key] = CostTableRow(worker_id=key[0], rank=key[1], derived=one.terms, recorded=None, place=place)
    about = record if isinstance(record, RequestRouted | RouteAnswered) and record.request_id == request_id else None
    for place, known in () if about is None else _recorded(about):
        row = rows.setdefault(
            (known.worker_id, known.rank),
            CostTableRow(worker_id=known.worker_id, rank=known.rank, derived=None, recorded=None),
        )
        row.recorded = known.terms
        row.recorded_place = place or row.recorded_place
        row.differs = _differing(row.derived, known.terms)
    return CostTables(
        request_id=request_id,
        pool=plan.pool.pool,
        mode=plan.config.mode,
        digest=digest_of(derived),
        rows=list(rows.values()),
        comparable=about is not None,
        recorded_in_full=isinstance(about, RouteAnswered),
        recorded_digest=None if about is None else about.table_digest,
        recorded_candidates=None if about is None else _candidates(about),
    )


def digest_of(table: CostTable) -> str:
    return hex_digest(table.digest())


def _recorded(record: RequestRouted | RouteAnswered) -> Iterator[tuple[str, ScoredCandidate]]:
    """Yield the recorded candidates of a decision, each with its place (`winner`, `runner-up` or empty)."""
    if isinstance(record, RequestRouted):
        yield WINNER, ScoredCandidate(worker_id=record.worker_id, rank=record.rank, terms=record.terms)
        if record.runner_up is not None:
            yield RUNNER_UP, record.runner_up
        return
    for one in record.candidates:
        yield "", one
    if record.choice is not None:
        yield WINNER, record.choice


def _candidates(record: RequestRouted | RouteAnswered) -> int:
    return record.candidates if isinstance(record, RequestRouted) else len(record.candidates)


def _differing(derived: CostTerms | None, recorded: CostTerms) -> tuple[str, ...]:
    if derived is None:
        return ()
    return tuple(name for name in recorded.__struct_fields__ if getattr(derived, name) != getattr(recorded, name))


OMITTED = frozenset({"at_us", "token_ids", "nonce", "reply_slot", "reply_from"})  # fields that change no decision


class EventSummary(msgspec.Struct, kw_only=True):
    """One input event in a report. `type` is its wire tag, or `undecodable`; `offset` is None for a clock tick."""

    topic: str
    offset: int | None
    type: str
    text: str
    now_us: int | None = None


def summarize(topic: str, offset: int, event: InputEvent | None, now_us: int | None = None) -> EventSummary:
    if event is None:
        tag, text = "undecodable", "a record that did not decode and had no effect"
    else:
        tag, text = str(type(event).__struct_config__.tag), ", ".join(_changed_fields(event))
    if isinstance(event, ProgressEvent):
        text = f"{event.request_id}, attempt {event.attempt}: {event.SUMMARY.format(event)} at {event.worker_id}"
    return EventSummary(topic=topic, offset=offset, type=tag, text=text, now_us=now_us)


def _changed_fields(struct: msgspec.Struct) -> Iterator[str]:
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if value != default and field.name not in OMITTED:
            is_hash = field.name in HEX_FIELDS and isinstance(value, int)
            yield f"{field.name} {f'{value:016x}' if is_hash else _value(value)}"


def _value(value: object) -> str:
    match value:
        case bytes():
            count, rest = divmod(len(value), U64_BYTES)
            return f"{len(value)} bytes" if rest else f"of {count} block{'' if count == 1 else 's'}"
        case msgspec.Struct():
            return f"({', '.join(_changed_fields(value))})"
        case tuple():
            return f"[{', '.join(map(_value, value))}]"
        case _:
            return str(value)


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


class DivergenceTrail:
    """Collects the data for a divergence report while `reader` derives. Create it before its first step."""

    def __init__(self, reader: JournalReader) -> None:
        self._reader = reader
        self._plans: deque[Plan] = deque(maxlen=PLANS_KEPT)
        self._previous: tuple[int, JournalRecord] | None = None
        self._consuming: Step | None = None
        self._seq = reader.world.seq - 1
        self._held, self._sealed = reader.start, False
        self._view = dict(reader.world.view)
        reader.world.on_plan = self._plans.append

    def add_verified(self, step: Step) -> None:
        record = step.record
        self._previous = (step.offset, record)
        if record.consumed:
            self._consuming = step
        if not self._reader.pending:
            self._plans.clear()
        if not isinstance(record, OwnerClaimed):
            self._seq = record.seq
        if isinstance(record, Advanced):
            self._held, self._sealed, self._view = step.offset, True, dict(self._reader.world.view)

    def report(self, divergence: Divergence, step: Step) -> DivergenceReport:
        recorded, derived = divergence.recorded, divergence.derived
        made = self._plan_of(derived)
        table = None if made is None else tables(made, recorded)
        consuming = step if step.record.consumed or self._consuming is None else self._consuming
        events, count = self._events(consuming)
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
            held=LastVerifiedState(journal_offset=self._held, sealed=self._sealed, since=self._since()),
        )

    def _plan_of(self, derived: JournalRecord | None) -> Plan | None:
        if not isinstance(derived, RequestRouted | RouteAnswered):
            return None
        for made in reversed(self._plans):
            if made.request.request_id == derived.request_id and digest_of(made.table) == derived.table_digest:
                return made
        return None

    def _events(self, step: Step) -> tuple[list[EventSummary], int]:
        last: deque[EventSummary] = deque(maxlen=EVENTS_SHOWN)
        count = 0
        for run, events in step.runs():
            if run.topic == CLOCK:
                count += 1
                last.append(EventSummary(topic=CLOCK, offset=None, type=CLOCK, text="time passed", now_us=run.now_us))
            for offset, event in events:
                count += 1
                last.append(summarize(run.topic, offset, event, run.now_us))
        return list(last), count

    def _since(self) -> dict[str, tuple[int, int]]:
        order = self._reader.order
        spans = {topic.name: (self._view.get(topic.name, 0), order.offset(topic.name)) for topic in INPUTS}
        return {topic: span for topic, span in spans.items() if span[0] < span[1]}

    def _hint(self, recorded: JournalRecord, derived: JournalRecord | None, table: CostTables | None) -> str:
        """Return the likely kind of cause as text, or an empty string."""
        unknown = sum(reader.unknown for reader in self._reader.order.readers.values())
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
