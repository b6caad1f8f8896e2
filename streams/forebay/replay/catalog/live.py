"""Publish the current status of a group in its catalog, so that readers only copy bytes.

Theory of operation. While requests run, an owner may write no decision for a while, although their progress is on the
log. After the journal has been idle for a moment, these events are applied to a copy of the world, each once. The copy
is dropped at the next journal record. An event that leads to a decision ends the copy, because its owner has not made
this decision: the copy is derived again without the event, and stays.
"""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable

import msgspec

from forebay import runtime
from forebay.core.restore import restore
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.step import InputEvent
from forebay.core.world import World
from forebay.events.topics import INPUTS, KV_EVENTS, METRICS
from forebay.replay.at import apply_unrecorded
from forebay.replay.catalog.facts import CatalogState
from forebay.replay.catalog.follow import PAUSE_S, Follower
from forebay.replay.catalog.markers import add_scaling_markers
from forebay.replay.catalog.store import Store
from forebay.replay.status import GroupStatus, build_status
from forebay.transport.base import Log, LogError

IDLE_S = 0.5  # without a journal record, before later events are applied
RETRY_S = 2.0  # between two tries to read a log that cannot be read
SCALING_EVERY_S = 2.0  # a planner decides every few seconds
COPY_SHARE = 10  # a copy must not take more than a tenth of the time
NO_LIMIT_US = 1 << 62
HIDDEN = (KV_EVENTS.name, METRICS.name)  # topics whose events observers need not see


class LaterWorld:
    """Copy of a world, to which events after the newest journal record are applied."""

    def __init__(self, log: Log, partition: int, base: World, custom: CustomPolicies) -> None:
        self.world = base
        self.applied: Counter[str] = Counter()
        self.copy_s = 0.0
        self._base = base
        self._log = log
        self._partition = partition
        self._custom = custom
        self._is_final = False

    async def copy(self) -> None:
        """Copy the base again. It must not change until this returns."""
        started_s = runtime.monotonic_s()
        chunks = list(self._base.snapshot())
        self.world = await runtime.offload(restore, chunks, self._custom)
        self.copy_s = runtime.monotonic_s() - started_s

    async def advance(self, follower: Follower) -> bool:
        """Apply the events that were appended since the last call, and report them. Return whether there were any."""
        if self._is_final:
            return False

        def report(topic: str, offset: int, event: InputEvent | None, at_us: int) -> None:
            if topic not in HIDDEN:
                for observer in follower.observers:
                    observer.on_unrecorded(topic, offset, event, at_us)

        world = self.world
        applied, _, deciding = await apply_unrecorded(self._log, self._partition, world, NO_LIMIT_US, on_event=report)
        self.applied += applied
        most = self.applied.total()
        while deciding is not None:  # once, unless events were appended with an earlier time meanwhile
            self._is_final = True
            await self.copy()
            _, _, deciding = await apply_unrecorded(self._log, self._partition, self.world, NO_LIMIT_US, most)
            most = most if deciding is None else deciding
        return bool(applied)


class LivePublisher:
    """Writes the status of a followed group into the `live` row of the catalog, if it has changed.

    `complete` adds to a status what the log does not show, such as the heartbeats of routers.
    """

    def __init__(
        self, log: Log, partition: int, group: str, follower: Follower, custom: CustomPolicies = ONLY_BUILT_IN
    ) -> None:
        self.state: CatalogState | None = None
        self.complete: Callable[[GroupStatus], GroupStatus] = lambda status: status
        self._log = log
        self._partition = partition
        self._group = group
        self._follower = follower
        self._custom = custom
        self._later: LaterWorld | None = None
        self._position = -1
        self._moved_s = runtime.monotonic_s()
        self._copy_s = 0.0
        self._key: object = None
        self._derived: GroupStatus | None = None
        self._status = b""
        self._is_reported = False
        self._was_at_end = False
        self._scaling_s = float("-inf")

    async def publish(self) -> bool:
        """Write the newest status and state. The follower must not run meanwhile."""
        moved = await self._follow_tail()
        reader = self._follower.reader
        state = self._follower.state
        if self._later is not None:
            now_us = self._later.world.now_us
            # A claim has no clock reading. Without another record, no moment before the later events can be shown.
            state = msgspec.structs.replace(state, begin_us=state.begin_us or now_us, end_us=max(state.end_us, now_us))
        if reader is not None:
            ends = tuple([await self._log.end(topic.name, self._partition) for topic in INPUTS])
            key = (reader.derived, ends, None if self._later is None else self._later.applied.total())
            if key != self._key:
                shown = reader.world if self._later is None else self._later.world
                self._derived = await build_status(self._log, self._partition, self._group, shown, "log")
                self._key = key
        if self._derived is not None:
            derived = self._derived
            if self._follower.is_blocked:
                derived = msgspec.structs.replace(derived, problems=[self._follower.error, *derived.problems])
            status = msgspec.json.encode(self.complete(derived))
            moved = moved or status != self._status
            self._status = status
        if not moved and state == self.state:
            return False
        with self._follower.store.transaction() as connection:
            if self._is_reported:
                for observer in self._follower.observers:
                    observer.write(connection)
            write_live(connection, state, self._status)
        self.state = state
        return True

    async def follow_scaling(self) -> None:
        """Add markers of a planner's newest decisions, at most every `SCALING_EVERY_S`. Raises LogError."""
        now_s = runtime.monotonic_s()
        if now_s - self._scaling_s >= SCALING_EVERY_S:
            self._scaling_s = now_s
            await add_scaling_markers(self._follower.store, self._log, self._group)

    async def _follow_tail(self) -> bool:
        """Apply the events after the newest journal record, if the journal is idle. Return whether rows changed."""
        reader = self._follower.reader
        now_s = runtime.monotonic_s()
        if reader is None or reader.derived != self._position:
            self._position = -1 if reader is None else reader.derived
            self._moved_s, self._later = now_s, None
            was_reported, self._is_reported = self._is_reported, False
            if was_reported:
                for observer in self._follower.observers:
                    observer.clear_unrecorded()
        if reader is None or not self._follower.is_at_end:
            return False
        # At first at once: in a log without decisions, no journal record counts that workers have joined.
        is_first, self._was_at_end = not self._was_at_end, True
        if not is_first and now_s - self._moved_s < max(IDLE_S, COPY_SHARE * self._copy_s):
            return False
        if self._later is None:
            if not await self._has_later_events(reader.world):
                return False
            self._later = LaterWorld(self._log, self._partition, reader.world, self._custom)
            await self._later.copy()
            self._copy_s = self._later.copy_s
            for observer in self._follower.observers:
                observer.clear_unrecorded()
            self._is_reported = True
        return await self._later.advance(self._follower)

    async def _has_later_events(self, world: World) -> bool:
        for topic in INPUTS:
            if await self._log.end(topic.name, self._partition) > world.view.get(topic.name, 0):
                return True
        return False


def write_live(connection: sqlite3.Connection, state: CatalogState, status: bytes) -> None:
    row = (msgspec.json.encode(state), status)
    connection.execute("INSERT OR REPLACE INTO live VALUES (1, ?, ?)", row)


def read_live(store: Store) -> tuple[CatalogState, bytes] | None:
    """Return the published state and the `GroupStatus` as JSON, None before the first publication.

    The JSON is empty before the log was read.
    """
    row = store.connection.execute("SELECT state, status FROM live").fetchone()
    return None if row is None else (msgspec.json.decode(row[0], type=CatalogState), bytes(row[1]))


async def follow(follower: Follower, publisher: LivePublisher) -> None:
    follower.on_pause = publisher.publish
    while True:
        await follower.catch_up()
        try:
            await publisher.publish()
            await publisher.follow_scaling()
        except LogError as error:
            follower.note_error(error)
        except sqlite3.Error as error:
            follower.handle_store_error(error)
        await asyncio.sleep(RETRY_S if follower.error else PAUSE_S)
