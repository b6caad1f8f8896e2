"""Append batches so that each is written once, and in the order of the calls within a partition.

Each broker has one request in flight, with at most one batch per partition. Batches that become ready meanwhile share
the next request. A batch is numbered for the broker, which recognises a repeated one. So a batch whose request got no
response, or a transient error, is sent again until the broker accepts or rejects it. Its bytes stay the same.

The next batch of a partition is sent only after the broker accepted or rejected the previous one, even if its leader
moved meanwhile or the appending task was cancelled. Otherwise the broker would reject the numbers as out of order.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from aiokafka import TopicPartition
from aiokafka.errors import IllegalStateError, KafkaConnectionError, KafkaError
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from forebay import runtime
from forebay.events.topics import FIXED_TOPICS
from forebay.transport.base import Draft
from forebay.transport.kafka.errors import is_transient
from forebay.transport.kafka.settings import REQUEST_MS, RETRY_BACKOFF_MS
from forebay.transport.kafka.wire import Channel, ProducerId, Wire

MAGIC = 2
COMPACTED = frozenset(topic.name for topic in FIXED_TOPICS if topic.is_compacted)
NO_CODEC, SNAPPY = 0, 2
# Below this size compression saves less time on the network and the disk than it costs.
COMPRESSED_BYTES_MIN = 1 << 10
SEQUENCES = 1 << 31  # numbers of records, which begin again at 0
# Of the batches of one request, unless the first one is larger. A broker closes the connection without a response if a
# request exceeds `socket.request.max.bytes`, by default 100 MiB, so such a request would be repeated for ever.
REQUEST_BYTES_MAX = 16 << 20


class _Batch:
    __slots__ = ("data", "future", "place")

    def __init__(self, place: TopicPartition, data: bytes) -> None:
        self.place = place
        self.data = data
        self.future: asyncio.Future[int] = asyncio.get_running_loop().create_future()


class Producer:
    def __init__(self, wire: Wire, channel: Channel) -> None:
        self.wire = wire
        self._channel = channel
        self._id = ProducerId(-1, -1)
        self._sequences: dict[TopicPartition, int] = {}
        self._next: dict[TopicPartition, _Batch] = {}  # the only batch of a partition that may be sent
        self._waiting: list[_Batch] = []
        self._resting: list[_Batch] = []  # until the recovery ends
        self._busy: dict[int, asyncio.Task[None]] = {}
        self._is_due = False
        self._recovery: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Get an id from a broker. Raises KafkaError, also if a transient error persists for `REQUEST_MS`."""
        until_s = runtime.monotonic_s() + REQUEST_MS / 1000
        while True:
            try:
                self._id = await self.wire.producer_id()
            except KafkaError as error:
                if not is_transient(error) or runtime.monotonic_s() >= until_s:
                    raise
                await self._pause()
            else:
                return

    async def stop(self) -> None:
        tasks = [*self._busy.values(), *([self._recovery] if self._recovery is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def append(self, place: TopicPartition, drafts: Sequence[tuple[Draft, int]], size: int) -> int:
        """Append records with their times in milliseconds as one batch, and return the offset of the first one.

        A batch whose append is cancelled is sent nevertheless. Raises KafkaError if the broker rejected the batch. The
        broker will then reject all later batches of the partition.
        """
        first = self._sequences.get(place, 0)
        codec = SNAPPY if size >= COMPRESSED_BYTES_MIN else NO_CODEC
        batch = _Batch(place, _encoded(drafts, codec, self._id, first))
        self._sequences[place] = (first + len(drafts)) % SEQUENCES
        self._waiting.append(batch)
        self._send_soon()
        return await batch.future

    def _send_soon(self) -> None:
        """Send at the end of this iteration of the event loop, so that its batches share a request."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._is_due = False
        waiting, self._waiting = self._waiting, []
        requests: dict[int, list[_Batch]] = {}
        sizes: Counter[int] = Counter()
        for batch in waiting:
            node, size = self.wire.leader(batch.place), len(batch.data)
            if self._next.setdefault(batch.place, batch) is not batch:
                self._waiting.append(batch)
            elif node is None:
                gone = self.wire.gone(batch.place.topic)
                if gone is None:
                    self._rest([batch])
                else:
                    self._finish(batch, gone)
            elif node in self._busy or (node in requests and sizes[node] + size > REQUEST_BYTES_MAX):
                self._waiting.append(batch)
            else:
                requests.setdefault(node, []).append(batch)
                sizes[node] += size
        for node, batches in requests.items():
            self._busy[node] = asyncio.create_task(self._request(node, batches), name=f"produce to broker {node}")

    async def _request(self, node: int, batches: list[_Batch]) -> None:
        results: Mapping[TopicPartition, int | Exception] = {}
        lost: Exception | None = None
        try:
            try:
                results = await self.wire.produce(node, self._channel, {batch.place: batch.data for batch in batches})
            except Exception as error:  # noqa: BLE001 - appends must not wait for ever, whatever error ends a request
                lost = _as_kafka_error(error)
            absent = lost or KafkaConnectionError("the response lacks the partition")
            again = [batch for batch in batches if not self._settle(batch, results.get(batch.place, absent))]
            if lost is not None and again:
                await self._pause()  # the broker gets no other requests meanwhile
                self._waiting[:0] = again
        finally:
            del self._busy[node]
        if lost is None:
            self._rest(again)
        self._send()

    def _settle(self, batch: _Batch, result: int | Exception) -> bool:
        """Set the result of a batch, and return whether it is final. If not, the batch must be sent again."""
        if isinstance(result, Exception) and is_transient(result):
            return False
        self._finish(batch, result)
        return True

    def _finish(self, batch: _Batch, result: int | Exception) -> None:
        del self._next[batch.place]
        if not batch.future.done():  # done if the appending task was cancelled
            if isinstance(result, int):
                batch.future.set_result(result)
            else:
                batch.future.set_exception(result)

    def _rest(self, batches: Sequence[_Batch]) -> None:
        """Send batches again after a pause, in which other batches may be sent to the same broker."""
        self._resting += batches
        if self._resting and self._recovery is None:
            self._recovery = asyncio.create_task(self._recover(), name="find leaders")

    async def _recover(self) -> None:
        await self._pause()
        self._recovery = None
        self._waiting += self._resting
        self._resting.clear()
        self._send_soon()

    async def _pause(self) -> None:
        await self.wire.refresh()
        await asyncio.sleep(RETRY_BACKOFF_MS / 1000)


def _as_kafka_error(error: Exception) -> KafkaError:
    if isinstance(error, KafkaError):
        return error
    return (KafkaConnectionError if is_transient(error) else IllegalStateError)(f"{type(error).__name__}: {error}")


def _encoded(drafts: Sequence[tuple[Draft, int]], codec: int, producer: ProducerId, first: int) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=MAGIC,
        compression_type=codec,
        is_transactional=0,
        producer_id=producer.number,
        producer_epoch=producer.epoch,
        base_sequence=first,
        batch_size=1 << 30,
    )
    for index, (draft, at_ms) in enumerate(drafts):
        headers = [(name, value.encode()) for name, value in draft.headers.items()] if draft.headers else []
        value = None if draft.topic in COMPACTED and not draft.value else draft.value  # removes the key
        builder.append(index, at_ms, draft.key, value, headers)
    return bytes(builder.build())
