"""Follow the topics of groups, and observe their pools per interval.

Theory of operation. For each group, the observer restores workers and requests from the newest snapshot, applies the
events after it, and then follows the topics. It derives no decision again, so it also reads groups whose owner has
other decision rules or custom policies. A group is part of an observation only if it was followed for the whole
interval. Its control partition is unknown until a router has placed the group.
"""

import asyncio
import logging
from collections.abc import Sequence

from forebay import runtime
from forebay.core.scaling.observation import GroupObservation
from forebay.events.codec import DecodeError
from forebay.events.scaling import PoolObserved, PoolScaling
from forebay.events.snapshots import Booking, Reported, RequestState, WorkerState, WorldState
from forebay.events.topics import DECISIONS, FLEET, METRICS, PROGRESS, REQUESTS, Topic
from forebay.journal.records import Validity
from forebay.journal.snapshots import newest_snapshot, owner_state, parts_of
from forebay.transport.base import Log, LogError, Record, Tail, event_of, records_of
from forebay.transport.directory import Directory
from forebay.transport.patience import until_available

logger = logging.getLogger(__name__)

TOPICS = (REQUESTS, FLEET, DECISIONS, METRICS, PROGRESS)
PARTS = WorldState | WorkerState | Reported | Booking | RequestState
BATCH_RECORDS = 64  # records applied before other tasks of the event loop run


class PoolObserver:
    """Observes the pools of a planner while `run` runs."""

    def __init__(self, log: Log, pools: Sequence[PoolScaling]) -> None:
        """Observe `pools`, which may belong to several groups."""
        self._log = log
        self._pools = [(pool.group, pool.pool) for pool in pools]
        names = dict.fromkeys(pool.group for pool in pools)
        self._groups = [_Group(log, name, [pool for pool in pools if pool.group == name]) for name in names]

    @property
    def undecodable(self) -> int:
        return sum(group.undecodable for group in self._groups)

    @property
    def forgotten(self) -> int:
        """Number of requests that were forgotten although no event has ended them."""
        return sum(group.observation.forgotten for group in self._groups)

    async def run(self) -> None:
        """Follow all groups until cancelled. Raises LogError if the log cannot be read."""
        directory = Directory(self._log)
        await directory.start()
        tasks = [asyncio.create_task(group.run(directory), name=f"observe {group.name}") for group in self._groups]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            directory.close()

    def observe(self) -> tuple[PoolObserved, ...]:
        """Return the observation of each pool since the last call, and begin a new interval.

        Pools of a group that was not followed for the whole interval are missing. The first call returns nothing.
        """
        now_us = _now_us()
        observed = {(pool.group, pool.pool): pool for group in self._groups for pool in group.observe(now_us)}
        return tuple(observed[key] for key in self._pools if key in observed)


class _Group:
    def __init__(self, log: Log, name: str, pools: Sequence[PoolScaling]) -> None:
        self._log = log
        self._wake = asyncio.Event()
        self._followed = False
        self._whole = False
        self._pools = pools
        self.name = name
        self.observation = GroupObservation(pools)
        self.undecodable = 0
        self._validity = Validity()

    async def run(self, directory: Directory) -> None:
        """Catch up with the topics of the group once it is placed, and follow them until cancelled."""
        partition = await directory.placed(self.name)
        ends = await until_available(lambda: self._catch_up(partition))
        tails = [(topic, self._log.tail(topic.name, partition, ends[topic.name], self._wake)) for topic in TOPICS]
        self.observation.begin(_now_us())
        self._followed = True
        try:
            while True:
                self._wake.clear()
                if not self._take(tails):
                    await self._wake.wait()
                await asyncio.sleep(0)
        finally:
            self._followed = self._whole = False
            for _, tail in tails:
                tail.close()

    def observe(self, now_us: int) -> tuple[PoolObserved, ...]:
        """Return the observation since the last call, nothing if the group was not followed since then."""
        if not self._followed:
            return ()
        observed, whole = self.observation.observe(now_us), self._whole
        self._whole = True
        return observed if whole else ()

    async def _catch_up(self, partition: int) -> dict[str, int]:
        """Apply the newest snapshot and all records after it. Return the end offset by topic."""
        self.observation = GroupObservation(self._pools)  # an earlier call may have failed halfway
        starts: dict[str, int] = {}
        taken = await newest_snapshot(self._log, partition, await self._log.end(DECISIONS.name, partition))
        self._validity = Validity()
        if taken is not None:
            self._validity = Validity.after(await owner_state(self._log, partition, taken), taken.core_version)
            parts = [part async for part in parts_of(self._log, partition, taken) if isinstance(part, PARTS)]
            self.observation.restore(parts, _now_us())
            view = [run for part in parts if isinstance(part, WorldState) for run in part.view]
            starts = {run.topic: run.count for run in view} | {DECISIONS.name: taken.journal_offset}
        for topic in TOPICS:
            starts[topic.name] = await self._apply_stored(topic, partition, starts.get(topic.name, 0))
        logger.info("observing group %s in control partition %d", self.name, partition)
        return starts

    async def _apply_stored(self, topic: Topic, partition: int, start: int) -> int:
        """Apply the stored records of a topic from offset `start`. Return the end offset."""
        begin, end = await self._log.begin(topic.name, partition), await self._log.end(topic.name, partition)
        if topic is FLEET and begin > start:
            raise LogError(
                f"{FLEET.name}/{partition} begins at offset {begin}, but the workers of group {self.name} are unknown"
                f" from offset {start} on: keep the records of this topic until a snapshot covers them"
            )
        at = max(start, begin)
        async for record in records_of(self._log, topic, partition, at, end):
            self._apply(topic, record)
            at = record.offset + 1
        return at

    def _take(self, tails: Sequence[tuple[Topic, Tail]]) -> bool:
        found = False
        for topic, tail in tails:
            for record in tail.take(BATCH_RECORDS):
                self._apply(topic, record)
                found = True
        return found

    def _apply(self, topic: Topic, record: Record) -> None:
        try:
            event = event_of(topic, record)
            if topic is DECISIONS:
                event = self._validity.read(record)
        except DecodeError:
            self.undecodable += 1  # the owner writes it to `dead-letters`
            return
        if event is not None:
            self.observation.apply(event, record.offset, _now_us())


def _now_us() -> int:
    return runtime.monotonic_ns() // 1000
