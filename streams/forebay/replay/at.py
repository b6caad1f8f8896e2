"""Derive the state of a recorded group as its owner had it, at any journal record or at any time.

The state at a record includes the events that `consumed` of the record counts, and the decision itself. The derivation
begins at the newest earlier snapshot; an older one would give the same state. The state at a time follows exactly from
the last journal record before it, and those events of the next record that the owner applied by then: the record
counts them, each run with a reading of the owner's clock.

After the last journal record there are no counts. An idle owner applies events, for example ends of requests, and
writes nothing until its next decision. They are applied here in the order of the log, up to the first event that leads
to a decision, which the owner would have written. Whether the owner had applied them by that time is unknown, so
`LaterFacts.unrecorded` counts them.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import msgspec

from forebay.core.rederive import Divergence
from forebay.core.routing.policies import PolicyMissing
from forebay.core.state.fleet import FleetWorker
from forebay.core.step import CLOCK, AnyDecision, InputEvent, open_run, step
from forebay.core.world import CORE_VERSION, World
from forebay.events.base import hex_digest
from forebay.events.decisions import JournalRecord, OwnerClaimed
from forebay.events.fleet import OwnershipAnnounced, WorkerLost
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import DECISIONS, FLEET, INPUTS, REQUESTS, Topic
from forebay.journal.claims import validity_at
from forebay.journal.reader import JournalReader, Step
from forebay.journal.records import (
    OtherRules,
    RecordedOrder,
    Validity,
    decode_journal,
    decode_or_none,
    journal,
    journal_records,
    last_append_us,
)
from forebay.journal.snapshots import OwnerState, claim_at, newest_snapshot
from forebay.journal.start import Start, StoredState, begins_of, oldest_state, usable_state
from forebay.replay.moment import (
    LaterFacts,
    LossFacts,
    Moment,
    loss_of,
    pools_of,
    queues_of,
    ranks_of,
    requests_of,
    workers_of,
)
from forebay.replay.states import CheckpointStart, States
from forebay.transport.base import PAGE_RECORDS, Log, LogError, NotDerivable, events_of, records_of
from forebay.transport.sqlite.recording import utc

LOST_MAX = 1_024  # only the most recently lost workers are reported
PAGE_REQUESTS = 64  # requests contain prompts, so a page may be megabytes
BREATHE_EVERY = 128  # events between yields to the event loop

OnUnrecorded = Callable[[str, int, InputEvent | None, int], None]


class NoSuchRecord(LogError):
    """Raised if the recording does not contain the requested record or time."""


class JournalDiverged(LogError):
    """Raised if a record does not follow from the events, because the state cannot be derived from there on."""

    def __init__(self, divergence: Divergence) -> None:
        super().__init__(
            f"journal record {divergence.offset} does not follow from the events ({divergence.reason}): the state from"
            " there on cannot be derived; `forebay verify` shows the difference"
        )
        self.divergence = divergence


class Position:
    """The state of a group at one journal record, which `forward` moves to the next record. Create it with `seek`.

    `world` is the state right after `step`, or at the beginning of the derivation if `step` is None. If some of the
    `later` events were applied, `forward` must not be called again.
    """

    def __init__(self, log: Log, partition: int, start: Start, end: int) -> None:
        self.world = start.world
        self.step: Step | None = None
        self.start = start.offset
        self.later = LaterFacts()
        self._log = log
        self._partition = partition
        self._reader = JournalReader(log, partition, start, end)
        self._steps = aiter(self._reader)
        self._lost: deque[LossFacts] = deque(maxlen=LOST_MAX)
        self._lost_before = start.lost if isinstance(start, CheckpointStart) else None
        self._fleet_start = start.world.view.get(FLEET.name, 0)
        self._timeouts_us: dict[int, int] = {}
        self.world.on_loss = self._note_loss

    @property
    def rules(self) -> int:
        return self._reader.validity.rules

    @property
    def owner(self) -> OwnerState:
        """The owner at this position, with the sequence number of its next record."""
        return OwnerState(self.world.owner_epoch, self.world.owner_nonce, self._reader.followed.next_seq)

    @property
    def offset(self) -> int:
        """Journal offset of the last derived record; `start` - 1 if there is none yet."""
        return self.start - 1 if self.step is None else self.step.offset

    async def forward(self) -> Step | None:
        step = await anext(self._steps, None)
        if step is not None:
            if step.divergence is not None:
                raise JournalDiverged(step.divergence)
            self.step = step
        return step

    async def moment(self) -> Moment:
        if self._lost_before is None:
            self._lost_before = tuple(await read_losses(self._log, self._partition, self._fleet_start))
        world = self.world
        claimed = await claim_at(self._log, self._partition, world.owner_epoch)
        return Moment(
            offset=self.offset,
            now_us=world.now_us,
            owner_epoch=world.owner_epoch,
            owner_id="" if claimed is None else claimed.owner_id,
            digest=hex_digest(world.digest()),
            record=None if self.step is None else msgspec.to_builtins(self.step.record),
            start=self.start,
            view=dict(sorted(world.view.items())),
            pools=pools_of(world),
            workers=workers_of(world),
            ranks=ranks_of(world),
            lost=[*self._lost_before, *self._lost][-LOST_MAX:],
            queues=queues_of(world),
            requests=requests_of(world, await self._read_timeouts()),
            sessions=len(world.sessions),
            unverified=self._reader.unverified,
            stores=world.index.stores.sizes(),
            later=self.later,
        )

    def _note_loss(self, event: WorkerLost, worker: FleetWorker) -> None:
        self._lost.append(loss_of(self.world, event, worker))

    async def _read_timeouts(self) -> dict[int, int]:
        """Return the timeouts of active requests by the offset of their submission, as far as the log holds them."""
        offsets = [request.submitted.offset for request in self.world.requests.active()]
        known = {offset: self._timeouts_us[offset] for offset in offsets if offset in self._timeouts_us}
        begin = await self._log.begin(REQUESTS.name, self._partition)
        for offset in offsets:
            if offset in known or offset < begin:
                continue
            limit = min(PAGE_REQUESTS, offsets[-1] - offset + 1)
            for record in await self._log.read(REQUESTS.name, self._partition, offset, limit):
                event = decode_or_none(REQUESTS, record.value)
                if isinstance(event, RequestSubmitted):
                    known[record.offset] = event.timeout_us
        self._timeouts_us = known
        return known


async def read_losses(log: Log, partition: int, fleet_end: int) -> list[LossFacts]:
    """Return the workers that were lost before an offset of `fleet`. Their load and cache are unknown."""
    found: dict[tuple[str, int], LossFacts] = {}
    epoch = -1
    async for offset, event in events_of(log, FLEET, partition):
        if offset >= fleet_end:
            break
        if isinstance(event, OwnershipAnnounced):
            epoch = max(epoch, event.owner_epoch)
        elif isinstance(event, WorkerLost) and event.owner_epoch >= epoch:
            loss = msgspec.convert(event, LossFacts, from_attributes=True)
            found.setdefault((event.worker_id, event.worker_epoch), loss)
    return list(found.values())[-LOST_MAX:]


async def seek(states: States, offset: int | None = None) -> Position:
    """Return the position at the journal record at `offset`, by default at the last record.

    If that record is stale or foreign, the position is at the last valid record before it. The derivation begins at the
    newest of `states` before it. Raises NoSuchRecord if the recording has no record at `offset`. Raises NotDerivable if
    an owner with other decision rules wrote the record.
    """
    log, partition = states.log, states.partition
    begin, end = await _extent(log, partition)
    wanted = end - 1 if offset is None else offset
    if not begin <= wanted < end:
        raise NoSuchRecord(f"no journal record {wanted}: the recording has records {begin} to {end - 1}")
    try:
        start = await states.before(wanted)
        last = await _last_valid(log, partition, start, wanted)
        position = Position(log, partition, start, end)
        while position.offset < last and await position.forward():
            pass
    except OtherRules as other:
        raise NotDerivable(str(other)) from other
    return position


async def _last_valid(log: Log, partition: int, start: Start, wanted: int) -> int:
    """Return the offset of the last valid record from `start` up to `wanted`, inclusive; -1 if there is none."""
    last = -1
    async for at, _ in journal(log, partition, start.offset, wanted + 1, await start.validity(log, partition)):
        last = at
    return last


async def offset_at(states: States, time_us: int) -> int:
    """Return the offset of the last valid journal record written at or before `time_us` on the owner's clock.

    The search begins at a state of `states` before `time_us`, if any. Raises NoSuchRecord if the recording begins
    later.
    """
    log, partition = states.log, states.partition
    begin, end = await _extent(log, partition)
    start = states.by_time(time_us) or await _state_near(log, partition, time_us)
    clock_us = start.now_us
    found = start.offset - 1 if start.offset > begin else -1  # the seal right before a snapshot's state
    newest = found
    validity = await validity_at(log, partition, start.offset, start, start.core_version)
    async for offset, record in journal(log, partition, start.offset, end, validity):
        if record.consumed:
            clock_us = record.consumed[-1].now_us
        if clock_us > time_us:
            if found < 0:
                raise NoSuchRecord(
                    f"the recording begins at {utc(clock_us)} on its owner's clock, after the requested time; give a "
                    "later time"
                )
            return found
        newest = offset
        if clock_us and not (isinstance(record, OwnerClaimed) and record.at_us > time_us):
            found = offset
    return newest if found < 0 else found  # an owner that has applied no event yet has no clock


async def last_clock(log: Log, partition: int) -> int:
    """Return the owner's clock at the journal's end in microseconds, 0 if the owner applied no event."""
    begin, end = await _extent(log, partition)
    while begin < end:
        start = max(begin, end - PAGE_RECORDS)
        records = [decode_journal(one) async for one in journal_records(log, partition, start, end)]
        clocks = [record.consumed[-1].now_us for record in records if record is not None and record.consumed]
        if clocks:
            return max(clocks)  # a repeated record may be the last one
        end = start
    return 0


async def _extent(log: Log, partition: int) -> tuple[int, int]:
    begin, end = await log.begin(DECISIONS.name, partition), await log.end(DECISIONS.name, partition)
    if begin >= end:
        raise NoSuchRecord(f"the journal of control partition {partition} is empty: no decision was recorded")
    return begin, end


async def _state_near(log: Log, partition: int, time_us: int) -> StoredState:
    """Return a state of the log shortly before `time_us`; the oldest state if all are later."""
    begin, end = await _extent(log, partition)
    hint = await _near(log, partition, begin, end, time_us)
    taken = await newest_snapshot(log, partition, min(hint + 1, end))
    stored = None if taken is None else await usable_state(log, partition, taken, await begins_of(log, partition))
    if stored is None or stored.now_us > time_us:
        stored = await oldest_state(log, partition)
    return stored


async def _near(log: Log, partition: int, begin: int, end: int, time_us: int) -> int:
    """Return an offset shortly before the last record written by `time_us`. Stale records may shift it either way."""
    low, high = begin, end
    while high - low > PAGE_RECORDS:
        middle = (low + high) // 2
        clock_us = await _clock_from(log, partition, middle, min(high, middle + PAGE_RECORDS))
        if clock_us is None or clock_us > time_us:
            high = middle
        else:
            low = middle
    return low


async def _clock_from(log: Log, partition: int, start: int, end: int) -> int | None:
    """Return the owner's clock at the first record in [start, end) that contains a clock reading."""
    async for record in journal_records(log, partition, start, end):
        decision = decode_journal(record)
        if decision is not None and decision.consumed:
            return decision.consumed[0].now_us
    return None


class _LaterEvent(NamedTuple):
    """Event after the last journal record, with its append time, but not before the previous event of its topic."""

    at_us: int
    topic: str
    event: InputEvent | None


async def seek_time(states: States, time_us: int) -> Position:
    """Return the position at `time_us`: at the last journal record written by then, with the events applied after it.

    The derivation begins at the newest of `states` before it. Raises NoSuchRecord if the log begins after `time_us` or
    ends before it, NotDerivable if an owner with other decision rules decided then.
    """
    log, partition = states.log, states.partition
    offset = await offset_at(states, time_us)
    position = await seek(states, offset)
    following = await _next_record(log, partition, position)
    if following is not None:
        at, record, owner = following
        if owner.rules != CORE_VERSION and any(run.now_us <= time_us for run in record.consumed):
            raise NotDerivable(str(OtherRules(at, owner.rules, owner.release)))
        applied = await _apply_recorded(log, partition, position.world, record, time_us)
        position.later = LaterFacts(requested_us=time_us, applied=dict(applied))
        return position
    await _require_not_after_end(log, partition, position.world, time_us)
    applied, left, deciding = await apply_unrecorded(log, partition, position.world, time_us)
    if deciding is not None:  # one event too many: derive the state again, and stop before this event
        position = await seek(states, offset)
        applied, left, _ = await apply_unrecorded(log, partition, position.world, time_us, deciding)
    position.later = LaterFacts(requested_us=time_us, unrecorded=dict(applied), not_applied=dict(left))
    return position


async def seek_record(states: States, offset: int | None = None) -> Position:
    """Return the position of `seek`. At the last journal record, it has the number of later events on the log."""
    log, partition = states.log, states.partition
    position = await seek(states, offset)
    if await _next_record(log, partition, position) is None:
        view = position.world.view
        counts = {topic.name: await log.end(topic.name, partition) - view.get(topic.name, 0) for topic in INPUTS}
        position.later = LaterFacts(not_applied={name: count for name, count in counts.items() if count > 0})
    return position


async def last_time(log: Log, partition: int) -> int:
    """Return when the last event was applied or appended, in microseconds since 1970; 0 if there is none."""
    return max(await last_clock(log, partition), await last_append_us(log, partition))


async def _next_record(log: Log, partition: int, position: Position) -> tuple[int, JournalRecord, Validity] | None:
    """Return the first valid journal record after `position` that consumes events, with its offset and its owner."""
    start, end = position.offset + 1, await log.end(DECISIONS.name, partition)
    validity = await validity_at(log, partition, start, position.owner, position.rules)
    async for offset, record in journal(log, partition, start, end, validity):
        if record.consumed:
            return offset, record, validity
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
