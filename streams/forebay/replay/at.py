"""Derive the state of a recorded group at any journal record, as its owner had it when it wrote that record.

The state includes the events that `consumed` of the record counts, and the decision itself. If the record is an
`Advanced`, its digest is the digest of this state. The derivation begins at the newest earlier snapshot; an older one
would give the same state.
"""

from collections import deque

import msgspec

from forebay.core.rederive import Divergence
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.state.fleet import FleetWorker
from forebay.events.base import hex_digest
from forebay.events.fleet import OwnershipAnnounced, WorkerLost
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import DECISIONS, FLEET, REQUESTS
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
from forebay.replay.spans import clock_before, moment_error, sealed_start
from forebay.replay.walk import LogStates, Start, States, StateTime, Step, Walk
from forebay.transport.base import Log, LogError
from forebay.transport.history.claims import validity_at
from forebay.transport.history.reader import (
    OtherRules,
    decode_journal,
    decode_or_none,
    events_of,
    journal,
    journal_records,
)
from forebay.transport.history.snapshots import OwnerState, claim_at, newest_snapshot
from forebay.transport.history.start import begins_of, oldest_state, usable_state
from forebay.transport.recording.manifest import utc

LOST_MAX = 1_024  # only the most recently lost workers are reported
PAGE_RECORDS = 512
PAGE_REQUESTS = 64  # requests contain prompts, so a page may be megabytes


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
        self._walk = Walk(log, partition, start, end)
        self._steps = aiter(self._walk)
        self._lost: deque[LossFacts] = deque(maxlen=LOST_MAX)
        self._lost_before: list[LossFacts] | None = None if start.lost is None else list(start.lost)
        self._fleet_start = start.world.view.get(FLEET.name, 0)
        self._timeouts_us: dict[int, int] = {}
        self.world.on_loss = self._note_loss

    @property
    def rules(self) -> int:
        return self._walk.validity.rules

    @property
    def owner(self) -> OwnerState:
        """The owner at this position, with the sequence number of its next record."""
        return OwnerState(self.world.owner_epoch, self.world.owner_nonce, self._walk.followed.next_seq)

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
            self._lost_before = await read_losses(self._log, self._partition, self._fleet_start)
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
            unverified=self._walk.unverified,
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


async def seek(
    log: Log,
    partition: int,
    offset: int | None = None,
    custom: CustomPolicies = ONLY_BUILT_IN,
    states: States | None = None,
) -> Position:
    """Return the position at the journal record at `offset`, by default at the last record.

    If that record is stale or foreign, the position is at the last valid record before it. The derivation begins at the
    newest of `states` before it, by default at the newest snapshot. Raises NoSuchRecord if the recording has no record
    at `offset`. Raises NotDerivable if an owner with other decision rules wrote the record, unless it is a `Sealed`.
    """
    begin, end = await _extent(log, partition)
    wanted = end - 1 if offset is None else offset
    if not begin <= wanted < end:
        raise NoSuchRecord(f"no journal record {wanted}: the recording has records {begin} to {end - 1}")
    known = LogStates(log, partition, custom) if states is None else states
    try:
        start = await known.before(wanted)
    except OtherRules as other:
        sealed = await sealed_start(log, partition, wanted, custom)
        if sealed is None:
            raise await moment_error(log, partition, wanted) from other
        start = sealed
    last = await _last_valid(log, partition, start, wanted)
    position = Position(log, partition, start, end)
    while position.offset < last and await position.forward():
        pass
    return position


async def _last_valid(log: Log, partition: int, start: Start, wanted: int) -> int:
    """Return the offset of the last valid record from `start` up to `wanted`, inclusive; -1 if there is none."""
    last = -1
    validity = await validity_at(log, partition, start.offset, start.world, start.rules)
    async for at, _ in journal(log, partition, start.offset, wanted + 1, validity):
        last = at
    return last


async def offset_at(log: Log, partition: int, time_us: int, states: States | None = None) -> int:
    """Return the offset of the last valid journal record written at or before `time_us` on the owner's clock.

    The search begins at a state of `states` before `time_us`, if any. Raises NoSuchRecord if the recording begins
    later.
    """
    begin, end = await _extent(log, partition)
    start = None if states is None else states.by_time(time_us)
    if start is None:
        start = await _state_near(log, partition, time_us)
    clock_us = start.now_us
    found = start.offset - 1 if start.offset > begin else -1  # the seal right before a snapshot's state
    newest = found
    validity = await validity_at(log, partition, start.offset, start, start.rules)
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
        if clock_us:
            found = offset
    return newest if found < 0 else found  # an owner that has applied no event yet has no clock


async def last_clock(log: Log, partition: int) -> int:
    """Return the owner's clock at the journal's end in microseconds, 0 if the owner applied no event."""
    _, end = await _extent(log, partition)
    return await clock_before(log, partition, end)


async def _extent(log: Log, partition: int) -> tuple[int, int]:
    begin, end = await log.begin(DECISIONS.name, partition), await log.end(DECISIONS.name, partition)
    if begin >= end:
        raise NoSuchRecord(f"the journal of control partition {partition} is empty: no decision was recorded")
    return begin, end


async def _state_near(log: Log, partition: int, time_us: int) -> StateTime:
    """Return a state of the log shortly before `time_us`; the oldest state if all are later."""
    begin, end = await _extent(log, partition)
    hint = await _near(log, partition, begin, end, time_us)
    taken = await newest_snapshot(log, partition, min(hint + 1, end))
    stored = None if taken is None else await usable_state(log, partition, taken, await begins_of(log, partition))
    if stored is None or stored.now_us > time_us:
        stored = await oldest_state(log, partition)
    rules = stored.core_version
    return StateTime(stored.offset, stored.now_us, stored.owner_epoch, rules, stored.owner_nonce, stored.seq)


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
