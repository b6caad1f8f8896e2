"""Poll partitions for new records: one long poll per broker, which responds as soon as one of them has a record.

Theory of operation. A poll in flight cannot be changed. If a partition is added, or is fetched from another offset, the
poll in flight lacks it. A second connection then fetches what the poll lacks, with short waits, until the next poll
includes it. Both may return the same records, of which the second ones are dropped. An idle process therefore sends one
request per broker and `POLL_MS`, and a new partition is followed within `CATCH_UP_MS`.

A partition whose fetch fails rests for `RETRY_S`, while the polls of its broker go on without it.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from aiokafka import TopicPartition
from aiokafka.consumer.fetcher import READ_UNCOMMITTED
from aiokafka.errors import KafkaError, OffsetOutOfRangeError, UnknownError
from aiokafka.structs import ConsumerRecord

from forebay.transport.kafka.consumer import Batches, DenseRecords
from forebay.transport.kafka.errors import is_transient
from forebay.transport.kafka.wire import Channel, Fetched, Wire

logger = logging.getLogger(__name__)

POLL_MS = 500
CATCH_UP_MS = 20
RETRY_S = 0.2  # pause after a transient error of a broker
RECORDS_MAX = 20_000  # of a partition, decoded at once; a gap after compaction may be a million records

OnRecords = Callable[[TopicPartition, list[ConsumerRecord]], None]


class Poller:
    """Polls partitions, each from its own position. `on_records` gets one record per offset.

    `ends` is the offset after the last record of each partition, as far as a broker has reported it.
    """

    def __init__(self, wire: Wire, on_records: OnRecords, on_failure: Callable[[Exception], None]) -> None:
        self.ends: dict[TopicPartition, int] = {}
        self._wire = wire
        self._on_records = on_records
        self._on_failure = on_failure
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._resting: set[TopicPartition] = set()
        self._reported: set[TopicPartition] = set()  # whose error is in the service log
        self._in_flight: dict[int, Mapping[TopicPartition, int]] = {}
        self._polls: dict[int, asyncio.Task[None]] = {}
        self._catch_ups: dict[int, asyncio.Task[None]] = {}
        self._search: asyncio.Task[None] | None = None
        self._is_due = False
        self._has_failed = False

    def seek(self, place: TopicPartition, offset: int) -> None:
        self._positions[place] = offset
        self._plan_soon()

    def remove(self, place: TopicPartition) -> None:
        del self._positions[place]
        self._paused.discard(place)
        self._reported.discard(place)
        self.ends.pop(place, None)

    def pause(self, place: TopicPartition) -> None:
        self._paused.add(place)

    def resume(self, place: TopicPartition) -> None:
        if place in self._paused:
            self._paused.discard(place)
            self._plan_soon()

    async def stop(self) -> None:
        self._has_failed = True
        tasks = [*self._polls.values(), *self._catch_ups.values(), *([self._search] if self._search else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _plan_soon(self) -> None:
        if not self._is_due and not self._has_failed:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._plan)

    def _plan(self) -> None:
        """Start what the partitions need that no request in flight covers."""
        self._is_due = False
        if self._has_failed:
            return
        idle = self._paused | self._resting
        nodes = {self._wire.leader(place) for place in self._positions if place not in idle}
        for node in nodes:
            if node is None:
                self._search_leaders()
            elif node not in self._polls:
                self._polls[node] = asyncio.create_task(self._poll(node), name=f"poll broker {node}")
            elif node not in self._catch_ups and self._lacking(node):
                self._catch_ups[node] = asyncio.create_task(self._catch_up(node), name=f"catch up at broker {node}")

    def _led_by(self, node: int) -> dict[TopicPartition, int]:
        """Return the positions of the partitions to be polled at a broker; none after a failure."""
        leader, paused, resting = self._wire.leader, self._paused, self._resting
        if self._has_failed:
            return {}
        return {
            place: position
            for place, position in self._positions.items()
            if place not in paused and place not in resting and leader(place) == node
        }

    def _lacking(self, node: int) -> dict[TopicPartition, int]:
        """Return the positions that the poll in flight does not cover."""
        covered = self._in_flight.get(node, {})
        return {
            place: position for place, position in self._led_by(node).items() if covered.get(place, math.inf) > position
        }

    async def _poll(self, node: int) -> None:
        try:
            while offsets := self._led_by(node):
                if self._in_flight.get(node, {}).keys() - offsets.keys():
                    self._plan_soon()  # the leader of a partition may have moved
                self._in_flight[node] = offsets
                await self._fetch(node, Channel.POLL, offsets, POLL_MS)
        finally:
            self._in_flight.pop(node, None)
            del self._polls[node]
        self._plan_soon()

    async def _catch_up(self, node: int) -> None:
        try:
            while offsets := self._lacking(node):
                await self._fetch(node, Channel.CATCH_UP, offsets, CATCH_UP_MS)
        finally:
            del self._catch_ups[node]

    def _search_leaders(self) -> None:
        if self._search is None:
            self._search = asyncio.create_task(self._find_leaders(), name="find leaders")

    async def _find_leaders(self) -> None:
        topics = {place.topic for place in self._positions if self._wire.leader(place) is None}
        try:
            await self._wire.refresh(sorted(topics))
        except KafkaError as error:
            self._fail(error)
            return
        leaderless = [place for place in self._positions if self._wire.leader(place) is None]
        for place in leaderless:
            if (gone := self._wire.gone(place.topic)) is not None:
                self._fail(gone)
                return
        if leaderless:
            await asyncio.sleep(RETRY_S)
        self._search = None
        self._plan_soon()

    async def _fetch(self, node: int, channel: Channel, offsets: dict[TopicPartition, int], wait_ms: int) -> None:
        try:
            for result in await self._wire.fetch(node, channel, offsets, wait_ms):
                error = self._apply(result, offsets)
                if error is not None:
                    self._rest(result.place, error)
        except (KafkaError, OSError) as lost:
            if not is_transient(lost):
                self._fail(lost)
                return
            await self._wire.refresh()
            await asyncio.sleep(RETRY_S)
            self._plan_soon()  # another broker may lead a partition now
        except Exception as error:  # readers must not wait for ever, whatever error ends this loop
            self._fail(error)
            raise

    def _rest(self, place: TopicPartition, error: Exception) -> None:
        """Poll a partition again after `RETRY_S`, or fail if the error is final."""
        if not is_transient(error):
            self._fail(error)
            return
        # A leader that moves is routine.
        if not getattr(error, "invalid_metadata", False) and place not in self._reported:
            self._reported.add(place)
            logger.warning("cannot fetch %s/%d yet, retrying: %s", *place, error)
        if place not in self._resting and not self._has_failed:
            self._resting.add(place)
            asyncio.get_running_loop().call_later(RETRY_S, self._wake, place)
        self._search_leaders()  # another broker may lead the partition now

    def _wake(self, place: TopicPartition) -> None:
        self._resting.discard(place)
        self._plan_soon()

    def _apply(self, result: Fetched, offsets: Mapping[TopicPartition, int]) -> Exception | None:
        """Pass on the new records of a partition. Return its error, if there is one that concerns its position."""
        place, position = result.place, self._positions.get(result.place)
        offset = offsets[place]
        if position is None or offset > position:
            return None  # the partition was removed, or is polled from an earlier offset meanwhile
        if isinstance(result.error, OffsetOutOfRangeError):
            missing: Exception = OffsetOutOfRangeError({place: offset})
            return missing if offset == position else None
        if result.error is not None:
            return result.error
        self._reported.discard(place)
        self.ends[place] = result.end
        if place in self._paused or not result.data:
            return None
        dense = _records(result, offset)
        fresh = dense if offset == position else (record for record in dense if record.offset >= position)
        records = list(islice(fresh, RECORDS_MAX))
        if dense.next_fetch_offset <= offset:
            incomplete: Exception = UnknownError(f"the response has no complete batch at offset {offset}")
            return incomplete
        # The partition comes last in the next request. A broker fills a response in the order of the request, and a
        # batch larger than `PARTITION_BYTES_MAX` fits only if it comes before all other records.
        del self._positions[place]
        self._positions[place] = max(position, dense.next_fetch_offset)
        if records:
            self._on_records(place, records)
        return None

    def _fail(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._on_failure(error)


class _PolledRecord(NamedTuple):
    """What tails read of a record. aiokafka's `ConsumerRecord` takes longer to create than to decode."""

    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class _PolledRecords(DenseRecords):
    def _consumer_record(self, place: TopicPartition, record: Any) -> _PolledRecord:
        return _PolledRecord(place.partition, record.offset, record.timestamp, record.key, record.value, record.headers)


def _records(fetched: Fetched, offset: int) -> DenseRecords:
    return _PolledRecords(
        fetched.place,
        Batches(fetched.data),
        aborted_transactions=None,
        fetch_offset=offset,
        key_deserializer=None,
        value_deserializer=None,
        check_crcs=True,
        isolation_level=READ_UNCOMMITTED,
    )
