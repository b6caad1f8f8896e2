"""Evaluate another policy or configuration on every decision of a live log, read-only.

Theory of operation. A shadow follows the journal like a standby, so it evaluates each choice in the state in which the
owner made it. It evaluates a choice when the choice is derived, and emits the result when it reads the journal record
of that choice. A restarted shadow continues after the last decision in its sink, from the newest snapshot before that
decision. At a snapshot every derived choice is also journalled, so no decision is emitted twice or skipped.

The position of a shadow is a state, which a committed offset could not restore and a rebalance would discard. A shadow
therefore reads partitions without a consumer group.
"""

import asyncio
import logging
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

import msgspec
from prometheus_client.core import HistogramMetricFamily, Metric
from xxhash import xxh3_64_intdigest

from forebay import runtime
from forebay.core.routing.plan import Plan
from forebay.core.routing.policies import CustomPolicies
from forebay.core.selection.counterfactual import Alternative, Counterfactual, changed_booking_fields, counterfactual
from forebay.core.world import World
from forebay.events.base import hex_digest
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.control import PoolConfigured
from forebay.events.decisions import JournalRecord, RequestRouted, RouteAnswered
from forebay.events.shadow import DecisionShadowed, ShadowEvent, ShadowStarted
from forebay.events.topics import DECISIONS, SHADOW
from forebay.journal.records import OtherRules
from forebay.journal.snapshots import newest_snapshot
from forebay.live.standby import RecoveryDiverged, Standby
from forebay.runtime.metrics import collector, counter, gauge
from forebay.transport.base import PAGE_RECORDS, Draft, Log, LogError, PolicyNotAllowed, Record

logger = logging.getLogger(__name__)

REGRET_BUCKETS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)  # blocks
NEWEST = 10_000  # newest regrets, of which the 99th percentile is computed exactly


@dataclass(slots=True)
class PoolStatistics:
    """Statistics of one pool.

    Regret is the cost of the recorded selection minus the cost of the shadow's selection, in blocks, by the shadow's
    cost function. Overlap counts device blocks of the selected rank. `COUNTERS` explains the counts.

    Attributes:
        failures: Number of decisions for which the shadow selected no rank, by reason.
        excess_blocks: Sum of the negative regrets, as a positive number. A shadow that does not always select the
            cheapest rank has such decisions.
        buckets: Number of regrets per bucket of `REGRET_BUCKETS`, and above the last bound.
    """

    decisions: int = 0
    agreements: int = 0
    held: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    incomparable: int = 0
    compared: int = 0
    regret_blocks: float = 0.0
    excess_blocks: float = 0.0
    overlap_blocks_won: int = 0
    overlap_blocks_lost: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(REGRET_BUCKETS) + 1))

    def add(self, event: DecisionShadowed) -> None:
        self.decisions += 1
        if event.failure:
            self.failures[event.failure.partition(":")[0]] += 1
            return
        self.agreements += event.agrees
        self.held += event.would_hold
        difference = event.shadow_overlap_blocks - event.overlap_blocks
        self.overlap_blocks_won += max(0, difference)
        self.overlap_blocks_lost += max(0, -difference)
        if event.regret_blocks is None:
            self.incomparable += 1
            return
        self.compared += 1
        regret = max(0.0, event.regret_blocks)
        self.regret_blocks += regret
        self.excess_blocks += max(0.0, -event.regret_blocks)
        self.buckets[bisect_left(REGRET_BUCKETS, regret)] += 1


class ShadowStatistics:
    def __init__(self) -> None:
        self.pools: dict[str, PoolStatistics] = {}
        self._newest: deque[float] = deque(maxlen=NEWEST)

    def add(self, event: DecisionShadowed) -> None:
        pool = self.pools.get(event.pool)
        if pool is None:
            pool = self.pools[event.pool] = PoolStatistics()
        pool.add(event)
        if event.regret_blocks is not None:
            self._newest.append(event.regret_blocks)

    @property
    def decisions(self) -> int:
        return sum(pool.decisions for pool in self.pools.values())

    def __str__(self) -> str:
        pools = self.pools.values()
        decisions = self.decisions
        if not decisions:
            return "no decisions yet"
        agreement = sum(pool.agreements for pool in pools) / decisions
        compared = sum(pool.compared for pool in pools)
        regret = sum(pool.regret_blocks - pool.excess_blocks for pool in pools) / compared if compared else 0.0
        newest = sorted(self._newest)
        p99 = newest[(len(newest) - 1) * 99 // 100] if newest else 0.0
        won, lost = sum(pool.overlap_blocks_won for pool in pools), sum(pool.overlap_blocks_lost for pool in pools)
        parts = [
            f"{decisions} decisions, {agreement:.1%} agree",
            f"regret mean {regret:.2f} p99 {p99:.2f} blocks",
            f"overlap won {won} lost {lost} blocks",
        ]
        held, incomparable = sum(pool.held for pool in pools), sum(pool.incomparable for pool in pools)
        failures = sum((pool.failures for pool in pools), Counter[str]())
        parts += [f"{held} would wait"] if held else []
        parts += [f"{incomparable} not comparable"] if incomparable else []
        parts += [f"{count} failed ({reason})" for reason, count in sorted(failures.items())]
        return ", ".join(parts)


POLL_S = 0.25  # between two polls of the journal's end, because each pass reads every input topic once
SLICE_RECORDS = 512  # journal records derived between two writes; bounds the number of pending events


class ShadowSink(Protocol):
    async def last(self) -> ShadowEvent | None:
        """Return the newest event of this shadow, or None if there is none. Raises LogError."""

    async def write(self, events: Sequence[ShadowEvent]) -> None:
        """Append all events durably. Raises LogError if the log does not accept them."""


class ShadowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a shadow.

    Attributes:
        name: Name by which the shadow's events are found again. Another `text` needs another name.
        alternative: Returns the changed configuration of a recorded pool.
        from_start: Whether a new shadow begins with the first decision of the journal, instead of the next one.
    """

    name: str
    text: str
    alternative: Alternative
    from_start: bool = False
    custom: CustomPolicies = {}

    @property
    def digest(self) -> str:
        """XXH3-64 digest of `text` in hexadecimal."""
        return hex_digest(xxh3_64_intdigest(self.text.encode()))


class Shadow:
    """Evaluates what an alternative would select at each decision of a group's owners. Call `start`, then `run`."""

    def __init__(
        self,
        log: Log,
        partition: int,
        settings: ShadowSettings,
        sink: ShadowSink,
    ) -> None:
        self._log = log
        self._partition = partition
        self._sink = sink
        self._stopping = asyncio.Event()
        self._observer = _ChoiceObserver(settings)
        self._standby = Standby(log, partition, self._observer, settings.custom)
        self.settings = settings
        self.statistics = ShadowStatistics()
        self.end = 0

    @property
    def from_offset(self) -> int:
        """Journal offset of the first decision to evaluate."""
        return self._observer.from_offset

    @property
    def position(self) -> int:
        return self._standby.position

    @property
    def pools(self) -> Mapping[str, PoolConfigured]:
        return self._standby.world.pools

    async def start(self) -> None:
        """Derive the state from which the shadow continues, without writing events.

        Raises RecoveryDiverged, OtherRules or LogError.
        """
        self.end = await self._journal_end()
        last = await self._sink.last()
        await self._begin_at(await self._offset_after(last))

    async def run(self) -> None:
        """Write `ShadowStarted`, and follow the journal until `stop`. Raises the same errors as `start`."""
        if not self._stopping.is_set():
            await self._write_start()
            await self._publish()
        while not self._stopping.is_set():
            self.end = await self._journal_end()
            if self.end < self.position:
                where = f"{DECISIONS.name}/{self._partition}"
                raise LogError(
                    f"{where} ends at offset {self.end}, before {self.position}: the log was recreated; choose another"
                    " --id"
                )
            while self.position < self.end and not self._stopping.is_set():
                try:
                    await self._standby.catch_up(min(self.end, self.position + SLICE_RECORDS))
                finally:  # decisions derived before a divergence are valid
                    await self._publish()
            try:
                await asyncio.wait_for(self._stopping.wait(), POLL_S)
            except TimeoutError:
                continue

    async def stop(self) -> None:
        """End `run` after writing the events of all derived decisions."""
        self._stopping.set()

    async def _write_start(self) -> None:
        settings = self.settings
        started = ShadowStarted(
            shadow=settings.name,
            alternative=settings.text,
            alternative_digest=settings.digest,
            from_offset=self.from_offset,
            at_us=runtime.wall_us(),
        )
        await self._sink.write([started])
        logger.info("shadow %s: evaluating decisions from journal offset %d", settings.name, self.from_offset)

    async def _publish(self) -> None:
        events = self._observer.take()
        for at in range(0, len(events), SLICE_RECORDS):
            batch = events[at : at + SLICE_RECORDS]
            await self._sink.write(batch)
            for event in batch:
                self.statistics.add(event)

    async def _offset_after(self, last: ShadowEvent | None) -> int:
        settings = self.settings
        if last is None:
            if not settings.from_start:
                return self.end
            begin = await self._log.begin(DECISIONS.name, self._partition)
            if begin:
                raise LogError(
                    f"the journal begins at offset {begin}, retention removed earlier records: omit --from-start"
                )
            return 0
        if last.alternative_digest != settings.digest:
            raise LogError(f"another alternative already used the shadow name {settings.name}: choose another --id")
        after = last.from_offset if isinstance(last, ShadowStarted) else last.decision_offset + 1
        if after > self.end:
            raise LogError(
                f"the shadow {settings.name} has evaluated journal offset {after - 1}, but the journal ends at"
                f" {self.end}: this is another log; choose another --id"
            )
        return after

    async def _begin_at(self, offset: int) -> None:
        """Restore the state at `offset`, or the newest snapshot if retention removed the required records."""
        self._observer.from_offset = offset
        try:
            await self._follow(offset)
        except (RecoveryDiverged, OtherRules, PolicyNotAllowed):
            raise
        except LogError as error:
            newest = await newest_snapshot(self._log, self._partition, self.end)
            if newest is None or newest.journal_offset <= offset:
                raise
            self._standby = Standby(self._log, self._partition, self._observer, self.settings.custom)
            self._observer.from_offset = newest.journal_offset
            await self._follow(self.end)
            text = "shadow %s: skipped the decisions from journal offset %d to %d: %s"
            logger.warning(text, self.settings.name, offset, self.from_offset - 1, error)

    async def _follow(self, end: int) -> None:
        """Follow the journal up to `end`, or until stopped."""
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


class _Evaluated(NamedTuple):
    """A derived choice, with the evaluation of the alternative in the same state."""

    request_id: str
    pool: str
    now_us: int
    result: Counterfactual


class _ChoiceObserver:
    """Observer of a standby that evaluates choices. Choices are journalled in the order in which they are derived."""

    def __init__(self, settings: ShadowSettings) -> None:
        self.from_offset = 0
        self._settings = settings
        self._world = World()
        self._evaluated: deque[_Evaluated] = deque()
        self._events: list[DecisionShadowed] = []
        self._pools: dict[str, tuple[PoolConfigured, PoolConfigured]] = {}

    def on_start(self, world: World) -> None:
        """Begin with `world`, at a point of the journal where every derived decision is also journalled."""
        self._world = world
        self._evaluated.clear()
        world.on_plan = self._evaluate

    def on_record(self, offset: int, record: JournalRecord) -> None:
        if isinstance(record, RequestRouted):
            evaluated = self._evaluated.popleft()
            assert evaluated.request_id == record.request_id, "choices are journalled in order"
            if offset >= self.from_offset:
                self._events.append(_event(self._settings, offset, record.attempt, evaluated))
        elif isinstance(record, RouteAnswered) and record.choice is not None:
            self._evaluated.popleft()  # a route query, which routes no request

    def take(self) -> list[DecisionShadowed]:
        events, self._events = self._events, []
        return events

    def _evaluate(self, plan: Plan) -> None:
        world = self._world
        result = counterfactual(world, self._changed(plan.pool), plan)
        self._evaluated.append(_Evaluated(plan.request.request_id, plan.pool.pool, world.now_us, result))

    def _changed(self, pool: PoolConfigured) -> PoolConfigured:
        known = self._pools.get(pool.pool)
        if known is not None and known[0] is pool:
            return known[1]
        changed = self._settings.alternative(pool)
        self._pools[pool.pool] = (pool, changed)
        booked = changed_booking_fields(pool, changed)
        if booked:
            text = "shadow %s: the state of %s of the pool %s is the recorded one, not that of the alternative"
            logger.warning(text, self._settings.name, ", ".join(booked), pool.pool)
        return changed


def _event(settings: ShadowSettings, offset: int, attempt: int, evaluated: _Evaluated) -> DecisionShadowed:
    found = evaluated.result
    history = found.history.selected
    ours = None if found.choice is None else found.choice.selected
    return DecisionShadowed(
        shadow=settings.name,
        alternative_digest=settings.digest,
        decision_offset=offset,
        request_id=evaluated.request_id,
        attempt=attempt,
        pool=evaluated.pool,
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
        at_us=evaluated.now_us,
    )


class TopicSink:
    """Sink that appends the events of the shadow `name` to its group's partition, with its name as the record key.

    At most one process runs a shadow of a given name. A newer process writes `ShadowStarted`, and the older process
    ends when it reads that event.
    """

    def __init__(self, log: Log, partition: int, name: str) -> None:
        self._log = log
        self._partition = partition
        self._name = name
        self._end: int | None = None  # offset after the last append of this process

    async def last(self) -> ShadowEvent | None:
        """Return the newest event of this shadow that the topic still holds. Raises LogError."""
        begin = await self._log.begin(SHADOW.name, self._partition)
        end = await self._log.end(SHADOW.name, self._partition)
        while end > begin:
            start = max(begin, end - PAGE_RECORDS)
            ours = self._ours(await self._between(start, end))
            if ours:
                return ours[-1]
            end = start
        return None

    async def write(self, events: Sequence[ShadowEvent]) -> None:
        """Append the events. Raises LogError if this fails, or if another process has started the same shadow."""
        key = self._name.encode()
        drafts = [Draft(SHADOW.name, self._partition, encode(SHADOW, event), key) for event in events]
        offsets = await self._log.append(drafts)
        before = offsets[0] if self._end is None else self._end
        self._end = offsets[-1] + 1
        if self._end - before == len(offsets):
            return
        own = set(offsets)
        others = [record for record in await self._between(before, self._end) if record.offset not in own]
        if any(isinstance(event, ShadowStarted) for event in self._ours(others)):
            raise LogError(
                f"another process started the shadow {self._name}, so this process ends; choose another --id to"
                " run both"
            )

    async def _between(self, start: int, end: int) -> list[Record]:
        found: list[Record] = []
        while start < end:
            records = await self._log.read(SHADOW.name, self._partition, start, min(PAGE_RECORDS, end - start))
            if not records:
                raise LogError(f"{SHADOW.name}/{self._partition} ends at offset {start}, expected records up to {end}")
            found += records
            start = records[-1].offset + 1
        return found

    def _ours(self, records: Sequence[Record]) -> list[ShadowEvent]:
        key = self._name.encode()
        found: list[ShadowEvent] = []
        for record in records:
            if record.key == key:
                try:
                    event: ShadowEvent = decode(SHADOW, record.value)
                except DecodeError:
                    continue  # no decision depends on this topic, and any producer may write to it
                found.append(event)
        return found


# Name of the metric, attribute of `PoolStatistics`, and help text.
COUNTERS = (
    ("forebay_shadow_decisions", "decisions", "recorded decisions that the shadow evaluated"),
    ("forebay_shadow_agreements", "agreements", "decisions for which the shadow selected the same rank"),
    ("forebay_shadow_held", "held", "decisions for which the shadow would have queued the request"),
    ("forebay_shadow_incomparable", "incomparable", "decisions whose recorded rank was not a candidate of the shadow"),
    (
        "forebay_shadow_excess_blocks",
        "excess_blocks",
        "cost of the shadow's selections above the recorded ones, by the shadow's cost function, in blocks",
    ),
    (
        "forebay_shadow_overlap_blocks_won",
        "overlap_blocks_won",
        "blocks of overlap of the shadow's selections above the recorded ones",
    ),
    (
        "forebay_shadow_overlap_blocks_lost",
        "overlap_blocks_lost",
        "blocks of overlap of the recorded selections above the shadow's",
    ),
)


@collector
def shadow_metrics(shadow: Shadow) -> Iterator[Metric]:
    """Prometheus metrics of one shadow by pool, counted since the start of this process."""
    name = shadow.settings.name
    pools = sorted(shadow.statistics.pools.items())
    text = "journal records that the shadow has not followed yet"
    yield gauge("forebay_shadow_lag_records", text, {name: max(0, shadow.end - shadow.position)}, "shadow")
    for series, attribute, text in COUNTERS:
        counts = {(name, pool): getattr(statistics, attribute) for pool, statistics in pools}
        yield counter(series, text, counts, "shadow", "pool")
    text = "decisions for which the shadow selected no rank, by reason"
    failures = {
        (name, pool, reason): count
        for pool, statistics in pools
        for reason, count in sorted(statistics.failures.items())
    }
    yield counter("forebay_shadow_failures", text, failures, "shadow", "pool", "reason")
    text = "cost of the recorded selection above the shadow's, by the shadow's cost function, in blocks"
    regret = HistogramMetricFamily("forebay_shadow_regret_blocks", text, labels=["shadow", "pool"])
    for pool, statistics in pools:
        limits = [*map(str, REGRET_BUCKETS), "+Inf"]
        buckets = list(zip(limits, accumulate(statistics.buckets), strict=True))
        regret.add_metric([name, pool], buckets, statistics.regret_blocks)
    yield regret
