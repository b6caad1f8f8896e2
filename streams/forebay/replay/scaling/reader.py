"""Read the topic `scaling` of a log from its beginning, derive each decision again, and verify it."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from forebay.core.scaling.rederive import RecordedDecision, ScalingRederivation, Verification
from forebay.core.scaling.state import PlannerState, PoolKey
from forebay.events.codec import DecodeError, decode
from forebay.events.scaling import PlannerClaimed, PlannerPaused, PlannerStopped, PoolSizeSet, ScalingEvent
from forebay.events.topics import SCALING
from forebay.replay.moment import Fact
from forebay.transport.base import Log, LogError, records_of
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.topics import partitions_of
from forebay.transport.sqlite.log import SqliteLog

DIFFERENT_MAX = 8  # differences in a report; the count is complete
PARTITION = 0
PROGRESS_EVERY = 1_000  # records between two progress reports

OnProgress = Callable[[int, int], None]


class NoPlanner(LogError):
    pass


class ScalingReader:
    """Reader of the topic. Its attributes describe the records that it has read.

    `sizes_set` has the newest manual size of each pool with its offset. A released pool has the record of its release.
    """

    def __init__(self, log: Log, on_progress: OnProgress | None = None, until_us: int | None = None) -> None:
        """Read the records appended by `until_us` of Unix time; None for all. `on_progress` gets offset and end."""
        self._log = log
        self._until_us = until_us
        self._on_progress = on_progress
        self._rederivation = ScalingRederivation()
        self.records = 0
        self.undecodable = 0
        self.claim: tuple[int, PlannerClaimed] | None = None
        self.stopped: PlannerStopped | None = None
        self.paused: PlannerPaused | None = None
        self.sizes_set: dict[PoolKey, tuple[int, PoolSizeSet]] = {}
        self.decisions = 0
        self.newest: RecordedDecision | None = None
        self.pools: dict[PoolKey, None] = {}

    @property
    def state(self) -> PlannerState:
        return self._rederivation.state

    async def read(self) -> AsyncIterator[RecordedDecision]:
        """Yield each decision up to the present end of the topic. Its replies are added as they are read."""
        begin, end = await self._log.begin(SCALING.name, PARTITION), await self._log.end(SCALING.name, PARTITION)
        if begin:
            raise LogError(
                f"the topic {SCALING.name} begins at offset {begin}, so its decisions cannot be derived again: keep all"
                " of its records"
            )
        async for record in records_of(self._log, SCALING, PARTITION, begin, end):
            if self._until_us is not None and record.at_us > self._until_us:
                break
            self.records += 1
            if self._on_progress is not None and self.records % PROGRESS_EVERY == 0:
                self._on_progress(record.offset + 1, end)
            try:
                event: ScalingEvent = decode(SCALING, record.value)
            except DecodeError:
                self.undecodable += 1
                self.state.skip(record.offset)
                continue
            decision = self._apply(record.offset, event)
            if decision is not None:
                yield decision
        if self.claim is None:
            raise NoPlanner("no planner has claimed the topic scaling; start one with `forebay planner run`")

    def _apply(self, offset: int, event: ScalingEvent) -> RecordedDecision | None:
        decision = self._rederivation.apply(offset, event)
        match event:
            case PlannerClaimed():
                self.claim, self.stopped = (offset, event), None
                self.pools |= dict.fromkeys((pool.group, pool.pool) for pool in event.settings.pools)
            case PlannerStopped() if self.state.claim is None:
                self.stopped = event
            case PlannerPaused():
                self.paused = event
            case PoolSizeSet():
                self.sizes_set[event.group, event.pool] = (offset, event)
        if decision is not None:
            self.decisions += 1
            if decision.outcome == "applied":
                self.newest = decision
        return decision


async def has_scaling(log: Log) -> bool:
    """Return whether a log has the topic `scaling`. Recordings without a planner and old namespaces lack it."""
    if isinstance(log, KafkaLog):  # the client would wait for ever for a missing topic
        return SCALING.name in await partitions_of(log.settings)
    return not isinstance(log, SqliteLog) or SCALING.name in {topic for topic, _, _ in log.topics()}


def pool_text(pool: PoolKey) -> str:
    return f"{pool[0]}/{pool[1]}"


class DifferentDecision(Fact, frozen=True, kw_only=True):
    """A recorded decision that does not follow from the records before it.

    `differs` has the recorded and derived value of each field that differs. Fields of a pool begin with `GROUP/POOL `.
    """

    offset: int
    differs: dict[str, dict[str, Any]]


class ScalingVerification(Fact, frozen=True, kw_only=True):
    """Result of deriving the decisions of a topic `scaling` again.

    `stale` decisions had no effect, because the planner did not know a record before them. Decisions by `other_rules`,
    those of another version, were not derived again.
    """

    decisions: int
    equal: int
    stale: int
    other_rules: int
    undecodable: int
    different: int
    first: list[DifferentDecision]


class VerificationTally:
    def __init__(self) -> None:
        self._counts: Counter[Verification] = Counter()
        self._first: list[DifferentDecision] = []

    def add(self, decision: RecordedDecision) -> None:
        self._counts[decision.verification] += 1
        if decision.verification == "different" and len(self._first) < DIFFERENT_MAX:
            self._first.append(DifferentDecision(offset=decision.offset, differs=differences_of(decision)))

    def report(self, undecodable: int) -> ScalingVerification:
        return ScalingVerification(
            decisions=self._counts.total(),
            equal=self._counts["equal"],
            stale=self._counts["stale"],
            other_rules=self._counts["other_rules"],
            undecodable=undecodable,
            different=self._counts["different"],
            first=self._first,
        )


async def verify_scaling(log: Log) -> ScalingVerification | None:
    """Derive all decisions of the topic `scaling` again. None if the log has no record of this topic."""
    if not await has_scaling(log) or await log.end(SCALING.name, PARTITION) == 0:
        return None
    reader, tally = ScalingReader(log), VerificationTally()
    try:
        async for decision in reader.read():
            tally.add(decision)
    except NoPlanner:  # an operator has written to the topic before the first planner
        pass
    return tally.report(reader.undecodable)


def differences_of(decision: RecordedDecision) -> dict[str, dict[str, Any]]:
    """Return the recorded and the derived value of each field that differs, empty if none does."""
    derived = decision.derived
    if derived is None:
        return {}
    found = {}
    for name in ("planner_epoch", "after", "advisory"):
        values = getattr(decision.decided, name), getattr(derived, name)
        if values[0] != values[1]:
            found[name] = {"recorded": values[0], "derived": values[1]}
    pools = [{pool_text((one.group, one.pool)): one for one in made.pools} for made in (decision.decided, derived)]
    for pool in pools[0] | pools[1]:
        parts = [msgspec.to_builtins(made[pool]) if pool in made else {} for made in pools]
        for name in parts[0] | parts[1]:
            recorded, again = parts[0].get(name), parts[1].get(name)
            if recorded != again:
                found[f"{pool} {name}"] = {"recorded": recorded, "derived": again}
    return found
