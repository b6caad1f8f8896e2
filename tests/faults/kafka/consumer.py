"""Stand-in for `DenseConsumer` and `AIOKafkaConsumer`.

Like aiokafka's fetcher, it has one fetch in flight per node, and leaves out partitions with records that nobody has
taken, paused partitions and partitions without a position. While a node has such records, it gets no new fetch for
`PREFETCH_S`. A node without new records holds a fetch until a record is appended. In production it would respond after
the maximum wait, and get the same fetch again. So a change of the fetched partitions has effect only after that wait.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from aiokafka.errors import (
    BrokerResponseError,
    ConsumerStoppedError,
    IllegalStateError,
    KafkaConnectionError,
    KafkaError,
    NoOffsetForPartitionError,
    NotLeaderForPartitionError,
    OffsetOutOfRangeError,
    TopicAuthorizationFailedError,
)
from aiokafka.structs import ConsumerRecord, OffsetAndMetadata, TopicPartition

from tests.faults.broker import FETCH_MAX
from tests.faults.kafka.client import FakeClient
from tests.faults.kafka.coordinator import Membership
from tests.faults.kafka.server import Fetch, place_of
from tests.faults.process import Process

PREFETCH_S = 0.1
LEFT_OUT = 0.1  # share of the partitions that a response leaves out, because it has a size limit


@dataclass(slots=True)
class _State:
    """Assigned partition. Its position is None until it is set."""

    position: int | None = None
    paused: bool = False
    highwater: int | None = None
    committed: bool = False  # whether the position was looked up


@dataclass(slots=True)
class _Fetched:
    """Records or an error that nobody has taken."""

    at_s: float
    offset: int
    records: Sequence[ConsumerRecord] = ()
    error: KafkaError | None = None


class FakeConsumer(FakeClient):
    def __init__(
        self,
        *,
        group_id: str | None = None,
        fetch_max_wait_ms: int = 500,
        auto_offset_reset: str = "latest",
        session_timeout_ms: int = 10_000,
        heartbeat_interval_ms: int = 3_000,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._fetcher = SimpleNamespace()  # `KafkaReader` sets a pause there that simulated consumers lack
        self._client = SimpleNamespace(set_topics=lambda _topics: None)  # simulated metadata has all topics
        self.process: Process = self.host.process
        self._wait_s = fetch_max_wait_ms / 1000
        self._resets = auto_offset_reset == "earliest"
        self._states: dict[TopicPartition, _State] = {}
        self._fetched: dict[TopicPartition, _Fetched] = {}
        self._fetches: dict[int, Fetch] = {}
        self._waiters: dict[asyncio.Future[None], None] = {}
        self._is_planning = False
        self._pokes_at_s = 0.0
        self._membership: Membership | None = None
        if group_id is not None:
            group = self.host.kafka.group(group_id)
            self._membership = Membership(self, group, session_timeout_ms / 1000, heartbeat_interval_ms / 1000)

    async def start(self) -> None:
        self.count_call()
        await self.bootstrap()

    async def stop(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self._membership is not None:
            await self._membership.leave()
        self.cancel_tasks()
        for fetch in self._fetches.values():
            fetch.is_over = True
            self.host.kafka.release(fetch)
        self._notify()

    # Assignment and positions

    def assign(self, places: Sequence[TopicPartition]) -> None:
        """Replace the assignment. All positions are reset."""
        for fetch in self._fetches.values():
            fetch.is_over = True
            if self.host.kafka.release(
                fetch
            ):  # the connection is free again only after the wait of the cancelled fetch
                self._pokes_at_s = self.broker.loop.time() + self._wait_s * self.broker.chance()
        self._fetches.clear()
        self._fetched.clear()
        self._states = {place: _State() for place in sorted(places)}
        self._plan_soon()

    def subscribe(self, topics: Sequence[str], *, listener: Any) -> None:
        """Join the group, and serve the partitions that its coordinator assigns."""
        del topics  # all members subscribe to the topic of the group
        assert self._membership is not None
        self._membership.begin(listener)

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._states)

    def seek(self, place: TopicPartition, offset: int) -> None:
        state = self._state(place)
        state.position = offset
        self._fetched.pop(place, None)
        self._plan_soon()

    def pause(self, *places: TopicPartition) -> None:
        """Stop fetching partitions. Records that were fetched before are dropped when they would be taken."""
        for place in places:
            self._state(place).paused = True

    def resume(self, *places: TopicPartition) -> None:
        """Fetch paused partitions again."""
        for place in places:
            self._state(place).paused = False
        self._plan_soon()

    def highwater(self, place: TopicPartition) -> int | None:
        """Return the end of a partition at the time of the last fetch."""
        return self._state(place).highwater

    async def position(self, place: TopicPartition) -> int:
        while True:
            position = self._state(place).position
            if position is not None:
                return position
            await asyncio.sleep(PREFETCH_S)

    def partitions_for_topic(self, topic: str) -> set[int]:
        """Return all partitions, because a simulated consumer needs no metadata before its first request."""
        return set(range(self.host.kafka.count(topic) or 1))

    async def beginning_offsets(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        self.count_call()
        await self._query(places)
        return dict.fromkeys(places, 0)

    async def end_offsets(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        self.count_call()
        await self._query(places)
        return {place: len(self.broker.records(place_of(place))) for place in places}

    async def commit(self, offsets: dict[TopicPartition, Any]) -> None:
        """Commit positions, each an offset or a pair of offset and metadata. Raises KafkaError."""
        self.count_call()
        assert self._membership is not None
        if not self._states.keys() >= offsets.keys():
            raise IllegalStateError("a partition is not assigned")
        await self._membership.commit(
            {
                place: OffsetAndMetadata(*(position if isinstance(position, tuple) else (position, "")))
                for place, position in offsets.items()
            }
        )

    # Records

    async def getmany(
        self, *places: TopicPartition, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Return fetched records, waiting up to `timeout_ms` for the first. Raises KafkaError of a fetch."""
        if places:  # otherwise a member of a group polls
            self.count_call()
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + timeout_ms / 1000
        while True:
            if self.closed:
                raise ConsumerStoppedError
            if self._membership is not None:
                await self._membership.assigned()
            taken = self._take(places, max_records)
            left_s = ends_s - loop.time()
            if taken or left_s <= 0:
                return taken
            waiter = loop.create_future()
            self._waiters[waiter] = None
            timer = loop.call_later(left_s, _resolve, waiter, "timeout")
            try:
                reason = await waiter
            finally:
                self._waiters.pop(waiter, None)
                timer.cancel()
            if reason is not None:
                return {}

    def _take(self, wanted: Sequence[TopicPartition], limit: int | None) -> dict[TopicPartition, list[ConsumerRecord]]:
        taken: dict[TopicPartition, list[ConsumerRecord]] = {}
        for place in list(self._fetched):
            if wanted and place not in wanted:
                continue
            fetched, state = self._fetched[place], self._states[place]
            if fetched.error is not None:
                if taken:
                    break
                del self._fetched[place]
                self._plan_soon()
                raise fetched.error
            if state.paused or state.position != fetched.offset:
                del self._fetched[place]
                self._plan_soon()
                continue
            count = len(fetched.records) if limit is None else min(limit, len(fetched.records))
            taken[place] = list(fetched.records[:count])
            state.position = fetched.offset = taken[place][-1].offset + 1
            fetched.records = fetched.records[count:]
            if not fetched.records:
                del self._fetched[place]
                self._plan_soon()
            if limit is not None:
                limit -= count
                if not limit:
                    break
        return taken

    def _notify(self, reason: str | None = None) -> None:
        for waiter in self._waiters:
            _resolve(waiter, reason)

    # Fetches

    def _plan_soon(self) -> None:
        if not self._is_planning and not self.closed:
            self._is_planning = True
            self.process.call_soon(self._plan)

    def _hurry(self, fetch: Fetch) -> None:
        """End the hold of a fetch after the maximum wait of the node, because it lacks a fetchable partition."""
        if not fetch.is_hurried:
            fetch.is_hurried = True
            if self.host.kafka.release(fetch):
                self._serve_late(fetch)

    def _serve_late(self, fetch: Fetch) -> None:
        self.broker.loop.call_main_later(self._wait_s * self.broker.chance(), self._serve, fetch, True)

    def _plan(self) -> None:
        """Start a fetch for each node that has fetchable partitions and no fetch in flight."""
        self._is_planning = False
        if self.closed:
            return
        now_s = self.broker.loop.time()
        blocked_s: dict[int, float] = {}
        fetchable: dict[int, dict[TopicPartition, int]] = {}
        for place, state in self._states.items():
            node = self.leader(place)
            fetched = self._fetched.get(place)
            if fetched is not None:
                left_s = fetched.at_s + PREFETCH_S - now_s
                if left_s > 0:
                    blocked_s[node] = max(left_s, blocked_s.get(node, 0.0))
            elif node in self._fetches:
                in_flight = self._fetches[node]
                lacks = state.position is None or in_flight.offsets.get(place) != state.position
                if lacks and not (state.paused and state.position is not None):
                    self._hurry(in_flight)
            elif state.position is None:
                if not state.committed:
                    state.committed = True
                    self.spawn(self._find_position(place, state))
            elif not state.paused:
                fetchable.setdefault(node, {})[place] = state.position
        for node, offsets in fetchable.items():
            if node not in blocked_s:
                self._send(node, offsets)
        if blocked_s:
            self.process.call_later(min(blocked_s.values()), self._plan_soon)

    def _send(self, node: int, offsets: dict[TopicPartition, int]) -> None:
        fetch = self._fetches[node] = Fetch(node, offsets, self._serve)
        delay_s = max(0.0, self._pokes_at_s - self.broker.loop.time()) + self.hop_s()
        self.broker.loop.call_main_later(delay_s, self._serve, fetch)

    def _serve(self, fetch: Fetch, is_due: bool = False) -> None:
        """Answer a fetch at its node, or hold it until there is a record."""
        if fetch.is_over or not self.process.alive:
            return
        if not self.is_reachable:
            self.process.call_later(self.hop_s(), self._retry, fetch)
            return
        faults, kafka = self.host.faults, self.host.kafka
        found: dict[TopicPartition, _Fetched] = {}
        ends: dict[TopicPartition, int] = {}
        at_s, is_left_out = self.broker.loop.time(), False
        for place, offset in fetch.offsets.items():
            messages = kafka.messages(place)
            ends[place] = len(messages)
            error = self._error_of(fetch.node, place, offset, len(messages))
            if error is not None:
                found[place] = _Fetched(at_s, offset, error=error)
            elif offset < len(messages):
                if self.broker.chance() < LEFT_OUT:
                    is_left_out = True
                    continue
                limit = FETCH_MAX
                if faults.truncates:
                    faults.fired("truncated_fetch")
                    limit = 1
                found[place] = _Fetched(at_s, offset, messages[offset : offset + limit])
        if not (found or is_left_out or is_due or faults.pending.get("spurious_wake")):
            if fetch.is_hurried:
                self._serve_late(fetch)
            else:
                kafka.hold(fetch)
            return
        self.process.call_later(self.hop_s() + faults.lag_s, self._deliver, fetch, found, ends)

    def _error_of(self, node: int, place: TopicPartition, offset: int, end: int) -> KafkaError | None:
        try:
            self.host.kafka.require_leader(node, place)
        except NotLeaderForPartitionError as error:
            return error
        if offset > end:
            return OffsetOutOfRangeError({place: offset})
        if self.host.faults.take("read_failed"):
            return TopicAuthorizationFailedError(place.topic)
        return None

    def _retry(self, fetch: Fetch) -> None:
        """Wait for the backoff after a fetch failed."""
        if not fetch.is_over:
            self.process.call_later(self.backoff_s, self._end, fetch)

    def _end(self, fetch: Fetch) -> None:
        if not fetch.is_over:
            fetch.is_over = True
            del self._fetches[fetch.node]
            self._plan_soon()

    def _deliver(self, fetch: Fetch, found: dict[TopicPartition, _Fetched], ends: dict[TopicPartition, int]) -> None:
        if fetch.is_over:
            return
        if not self.is_reachable:
            self._retry(fetch)
            return
        has_old_metadata = False
        for place, offset in fetch.offsets.items():
            state = self._states[place]
            if state.position != offset:
                continue  # the consumer was moved meanwhile
            state.highwater = ends[place]
            fetched = found.get(place)
            if fetched is None:
                continue
            fetched.at_s = self.broker.loop.time()
            if isinstance(fetched.error, NotLeaderForPartitionError):
                has_old_metadata = True
            elif isinstance(fetched.error, OffsetOutOfRangeError) and self._resets:
                state.position, state.committed = None, False
            else:
                self._fetched[place] = fetched
        if self._fetched:
            self._notify()
        elif self.host.faults.take("spurious_wake"):
            self._notify("spurious")
        if has_old_metadata:
            self.spawn(self._end_after_refresh(fetch))
        else:
            self._end(fetch)

    async def _end_after_refresh(self, fetch: Fetch) -> None:
        """Fetch from the new leaders. aiokafka asks an old leader again at once, which costs too many callbacks."""
        epoch = self.epoch
        await self.force_metadata_update()
        if epoch == self.epoch:
            await asyncio.sleep(self.backoff_s)
        self._end(fetch)

    async def _find_position(self, place: TopicPartition, state: _State) -> None:
        """Set a position that nobody has set: the committed one, or the beginning."""
        found: OffsetAndMetadata | None = None
        if self._membership is not None:
            await self._until_reached()
            found = self._membership.group.offsets.get(place)
        if state.position is None and self._states.get(place) is state:
            if found is not None:
                state.position = found.offset
            elif self._resets:
                state.position = 0
            else:
                error = NoOffsetForPartitionError(place)
                self._fetched[place] = _Fetched(self.broker.loop.time(), -1, error=error)
                self._notify()
        self._plan_soon()

    async def _until_reached(self) -> None:
        while True:
            try:
                await self.round_trip()
            except KafkaConnectionError:
                await asyncio.sleep(self.backoff_s)
            else:
                return

    async def _query(self, places: Sequence[TopicPartition]) -> None:
        """Wait for a response of the leaders about offsets. Raises KafkaError."""
        began_s = self.broker.loop.time()
        while True:
            try:
                await self.round_trip()
                for place in places:
                    self.host.kafka.require_leader(self.leader(place), place)
            except (KafkaConnectionError, BrokerResponseError) as error:
                if self.broker.loop.time() - began_s > self.request_timeout_s:
                    self.fail_in(began_s, error)
                if error.invalid_metadata:
                    await self.force_metadata_update()
                await asyncio.sleep(self.backoff_s)
            else:
                break
        if self.host.faults.take("read_failed"):
            raise TopicAuthorizationFailedError(places[0].topic)

    def _state(self, place: TopicPartition) -> _State:
        state = self._states.get(place)
        if state is None:
            raise IllegalStateError(f"No current assignment for partition {place}")
        return state


def _resolve(waiter: "asyncio.Future[Any]", value: str | None) -> None:
    if not waiter.done():
        waiter.set_result(value)
