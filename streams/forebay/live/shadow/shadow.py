"""Another policy or configuration on the live log: what it would have chosen, decision by decision. Only looks.

Theory of operation. A shadow follows the journal as a standby does, so it is asked in history's own state. What it
would have chosen is noted when a choice is derived, and said when the journal record of that choice is met, which may
be another owner's. It goes on behind the last decision that it spoke of, as its sink tells, from the newest snapshot
before: no choice is under way in one, so none is said twice or missed.

Its place in the log is a state, which no committed offset could replace, and which a rebalance would throw away. So it
reads partitions without a consumer group, and commits only to show tools how far it is.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.core.routing.counterfactual import (
    Alternative,
    Counterfactual,
    changed_booking_fields,
    counterfactual,
    selected_rank,
)
from forebay.core.routing.router import Selection
from forebay.core.state.active_request import ActiveRequest
from forebay.core.world import World
from forebay.events.base import hex_digest
from forebay.events.control import PoolConfigured
from forebay.events.decisions import JournalRecord, RequestRouted, RouteAnswered
from forebay.events.shadow import DecisionShadowed, ShadowEvent, ShadowStarted
from forebay.events.topics import DECISIONS
from forebay.live.router.standby import RecoveryDiverged, Standby
from forebay.live.shadow.statistics import Figures
from forebay.transport.base import Log, LogError
from forebay.transport.history.reader import OtherRules, newest_snapshot

logger = logging.getLogger(__name__)

POLL_S = 0.25  # between two looks at the journal's end: each then reads every input topic once, pages not records
SLICE_RECORDS = 512  # of the journal, derived between two writes: bounds what waits to be written


class Sink(Protocol):
    """Where a shadow's events go. One shadow writes to it."""

    async def last(self) -> ShadowEvent | None:
        """The newest event of this shadow there. Raises LogError."""

    async def write(self, events: Sequence[ShadowEvent]) -> None:
        """Append them all; they are there when this returns. Raises LogError."""


class ShadowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a shadow is told.

    Attributes:
        name: tells its events from other shadows'.
        text: what the alternative changes, for people; another text is another shadow.
        alternative: history's configuration of a pool, changed.
        from_start: begin with the journal's first decision, not with the next one; who goes on does so where it was.
    """

    name: str
    text: str
    alternative: Alternative
    from_start: bool = False

    @property
    def digest(self) -> str:
        """Names the text."""
        return hex_digest(xxh3_64_intdigest(self.text.encode()))


class Shadow:
    """Asks an alternative at every choice of a group's owners. `start`, then `run` until `stop`.

    Attributes:
        figures: what came of it since the start of this process.
        end: the journal's end when it last looked.
    """

    def __init__(
        self,
        log: Log,
        partition: int,
        settings: ShadowSettings,
        sink: Sink,
        on_position: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        self._log = log
        self._partition = partition
        self._sink = sink
        self._on_position = on_position
        self._stopping = asyncio.Event()
        self._watch = _Watch(settings)
        self._standby = Standby(log, partition, self._watch)
        self.settings = settings
        self.figures = Figures()
        self.end = 0

    @property
    def from_offset(self) -> int:
        """Decisions of the journal from here on are spoken of."""
        return self._watch.from_offset

    @property
    def position(self) -> int:
        """The journal offset up to which it has followed."""
        return self._standby.position

    @property
    def pools(self) -> Mapping[str, PoolConfigured]:
        """The pools as they are configured where it is."""
        return self._standby.world.pools

    async def start(self) -> None:
        """Derive the state from which it goes on; nothing is said yet.

        Raises:
            RecoveryDiverged: this version's rules lead to other decisions.
            OtherRules: the journal says that it was decided by others.
            LogError: a part that is needed is missing or damaged, or the shadow is another one.
        """
        self.end = await self._journal_end()
        last = await self._sink.last()
        await self._begin_at(await self._offset_after(last))

    async def run(self) -> None:
        """Say that it begins, and follow the journal as it grows, until `stop`. Raises as `start`."""
        if not self._stopping.is_set():
            await self._say_start()
            await self._publish()
        while not self._stopping.is_set():
            self.end = await self._journal_end()
            if self.end < self.position:
                where = f"{DECISIONS.name}/{self._partition}"
                raise LogError(f"{where} ends at offset {self.end}, before {self.position}: the log was made anew")
            while self.position < self.end and not self._stopping.is_set():
                try:
                    await self._standby.catch_up(min(self.end, self.position + SLICE_RECORDS))
                finally:  # what was derived before a divergence is right
                    await self._publish()
            try:
                await asyncio.wait_for(self._stopping.wait(), POLL_S)
            except TimeoutError:
                continue

    async def stop(self) -> None:
        """End `run` once what was derived is said."""
        self._stopping.set()

    async def _say_start(self) -> None:
        settings = self.settings
        started = ShadowStarted(
            shadow=settings.name,
            alternative=settings.text,
            alternative_digest=settings.digest,
            from_offset=self.from_offset,
            at_us=time.time_ns() // 1000,
        )
        await self._sink.write([started])
        logger.info("shadow %s: decisions from journal offset %d on", settings.name, self.from_offset)

    async def _publish(self) -> None:
        events = self._watch.take()
        for at in range(0, len(events), SLICE_RECORDS):
            batch = events[at : at + SLICE_RECORDS]
            await self._sink.write(batch)
            for event in batch:
                self.figures.add(event)
        if self._on_position is not None:
            await self._on_position(self.position)

    async def _offset_after(self, last: ShadowEvent | None) -> int:
        """The first decision to speak of."""
        settings = self.settings
        if last is None:
            if not settings.from_start:
                return self.end
            begin = await self._log.begin(DECISIONS.name, self._partition)
            if begin:
                raise LogError(
                    f"the journal begins at offset {begin}, what came before is gone: leave --from-start out"
                )
            return 0
        if last.alternative_digest != settings.digest:
            raise LogError(f"the shadow {settings.name} changed something else before: give this one another --name")
        after = last.from_offset if isinstance(last, ShadowStarted) else last.decision_offset + 1
        if after > self.end:
            text = f"the shadow {settings.name} has spoken of journal offset {after - 1}, but the journal ends at "
            raise LogError(f"{text}{self.end}: it is another log; give this shadow another --name")
        return after

    async def _begin_at(self, offset: int) -> None:
        """Restore a state before `offset`; where that is gone, the next one that is there."""
        self._watch.from_offset = offset
        try:
            await self._caught_up(offset)
        except (RecoveryDiverged, OtherRules):
            raise
        except LogError as error:
            newest = await newest_snapshot(self._log, self._partition, self.end)
            if newest is None or newest.journal_offset <= offset:
                raise
            self._standby = Standby(self._log, self._partition, self._watch)
            self._watch.from_offset = newest.journal_offset
            await self._caught_up(self.end)
            text = "shadow %s: decisions from journal offset %d to %d are passed over: %s"
            logger.warning(text, self.settings.name, offset, self.from_offset - 1, error)

    async def _caught_up(self, end: int) -> None:
        """Follow up to `end`, or until stopped."""
        following = asyncio.create_task(self._standby.catch_up(end))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((following, stopping), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            for task in (following, stopping):
                task.cancel()
            await asyncio.gather(following, stopping, return_exceptions=True)

    async def _journal_end(self) -> int:
        return await self._log.end(DECISIONS.name, self._partition)


class _Seen(NamedTuple):
    """A choice that was derived, with what the alternative says to it."""

    request_id: str
    pool: str
    now_us: int
    found: Counterfactual


class _Watch:
    """Looks on as a standby follows. Choices are journalled in the order in which they are made."""

    def __init__(self, settings: ShadowSettings) -> None:
        self.from_offset = 0
        self._settings = settings
        self._world = World()
        self._seen: deque[_Seen] = deque()
        self._said: list[DecisionShadowed] = []
        self._pools: dict[str, tuple[PoolConfigured, PoolConfigured]] = {}

    def on_start(self, world: World) -> None:
        """A state in which no choice is under way."""
        self._world = world
        self._seen.clear()
        self._said.clear()
        world.on_selection = self._chosen

    def on_record(self, offset: int, record: JournalRecord) -> None:
        """A choice has its place in the journal."""
        if isinstance(record, RequestRouted):
            seen = self._seen.popleft()
            assert seen.request_id == record.request_id, "choices keep their order"
            if offset >= self.from_offset:
                self._said.append(_event(self._settings, offset, record.attempt, seen))
        elif isinstance(record, RouteAnswered) and record.choice is not None:
            self._seen.popleft()  # nobody went there

    def take(self) -> list[DecisionShadowed]:
        """What is to be said since the last call."""
        said, self._said = self._said, []
        return said

    def _chosen(self, pool: PoolConfigured, request: ActiveRequest, choice: Selection) -> None:
        world = self._world
        found = counterfactual(world, self._changed(pool), request, choice)
        self._seen.append(_Seen(request.request_id, pool.pool, world.now_us, found))

    def _changed(self, pool: PoolConfigured) -> PoolConfigured:
        known = self._pools.get(pool.pool)
        if known is not None and known[0] is pool:
            return known[1]
        changed = self._settings.alternative(pool)
        self._pools[pool.pool] = (pool, changed)
        booked = changed_booking_fields(pool, changed)
        if booked:
            text = "shadow %s: what %s of the pool %s would have booked is not there, only what history booked"
            logger.warning(text, self._settings.name, ", ".join(booked), pool.pool)
        return changed


def _event(settings: ShadowSettings, offset: int, attempt: int, seen: _Seen) -> DecisionShadowed:
    found = seen.found
    history = selected_rank(found.history)
    ours = None if found.choice is None else selected_rank(found.choice)
    return DecisionShadowed(
        shadow=settings.name,
        alternative_digest=settings.digest,
        decision_offset=offset,
        request_id=seen.request_id,
        attempt=attempt,
        pool=seen.pool,
        worker_id=history.worker.spec.worker_id,
        rank=history.rank,
        overlap_blocks=found.history_overlap_blocks,
        shadow_worker_id="" if ours is None else ours.worker.spec.worker_id,
        shadow_rank=0 if ours is None else ours.rank,
        shadow_overlap_blocks=found.overlap_blocks,
        agrees=found.agrees,
        would_hold=found.would_hold,
        regret_blocks=found.regret_blocks,
        failure="" if found.refusal is None else f"{found.refusal.reason}: {found.refusal}",
        at_us=seen.now_us,
    )
