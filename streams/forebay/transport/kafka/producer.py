"""Append batches so that each is written once, and in the order of the calls within a partition.

Each broker has one request in flight, with at most one batch per partition. Batches that become ready meanwhile share
the next request. A batch is numbered for the broker, which recognises a repeated one. So a batch whose request got no
response, or a transient error, is sent again until the broker accepts or rejects it. Its bytes stay the same.
"""

import asyncio
from collections.abc import Sequence

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from forebay import runtime
from forebay.transport.base import Draft
from forebay.transport.kafka.settings import REQUEST_MS, RETRY_BACKOFF_MS
from forebay.transport.kafka.wire import Channel, ProducerId, Wire, is_transient

MAGIC = 2
NO_CODEC, SNAPPY = 0, 2
# Below this size compression saves less time on the network and the disk than it costs.
COMPRESSED_BYTES_MIN = 1 << 10
SEQUENCES = 1 << 31  # numbers of records, which begin again at 0


class _Batch:
    __slots__ = ("data", "future", "place")

    def __init__(self, place: TopicPartition, data: bytes) -> None:
        self.place = place
        self.data = data
        self.future: asyncio.Future[int] = asyncio.get_running_loop().create_future()


class Producer:
    """Idempotent producer. A partition may have one batch in flight.

    Args:
        wire: connections to the brokers.
        channel: the connections to use.
    """

    def __init__(self, wire: Wire, channel: Channel) -> None:
        self.wire = wire
        self._channel = channel
        self._id = ProducerId(-1, -1)
        self._sequences: dict[TopicPartition, int] = {}
        self._waiting: list[_Batch] = []
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
        """Cancel all requests in flight."""
        tasks = [*self._busy.values(), *([self._recovery] if self._recovery is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def append(self, place: TopicPartition, drafts: Sequence[tuple[Draft, int]], size: int) -> int:
        """Append records with their times in milliseconds as one batch, and return the offset of the first one.

        Args:
            place: partition, which must have no other batch in flight.
            drafts: the records.
            size: their bytes.

        Raises:
            KafkaError: the broker rejected the batch.
        """
        first = self._sequences.get(place, 0)
        self._sequences[place] = (first + len(drafts)) % SEQUENCES
        codec = SNAPPY if size >= COMPRESSED_BYTES_MIN else NO_CODEC
        batch = _Batch(place, _encoded(drafts, codec, self._id, first))
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
        for batch in waiting:
            node = self.wire.leader(batch.place)
            if node is None:
                self._waiting.append(batch)
                self._recover()
            elif node in self._busy:
                self._waiting.append(batch)
            else:
                requests.setdefault(node, []).append(batch)
        for node, batches in requests.items():
            self._busy[node] = asyncio.create_task(self._request(node, batches), name=f"produce to broker {node}")

    async def _request(self, node: int, batches: list[_Batch]) -> None:
        try:
            try:
                results = await self.wire.produce(node, self._channel, {batch.place: batch.data for batch in batches})
            except (KafkaError, OSError) as error:
                results = dict.fromkeys([batch.place for batch in batches], _as_kafka_error(error))
            again = []
            for batch in batches:
                result = results[batch.place]
                if batch.future.done():  # the appending task was cancelled
                    continue
                if isinstance(result, int):
                    batch.future.set_result(result)
                elif is_transient(result):
                    again.append(batch)
                else:
                    batch.future.set_exception(result)
            if again:
                await self._pause()
                self._waiting[:0] = again
        finally:
            del self._busy[node]
        self._send()

    def _recover(self) -> None:
        """Look for the leaders of partitions that have none."""
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._find_leaders(), name="find leaders")

    async def _find_leaders(self) -> None:
        await self._pause()
        self._recovery = None
        self._send_soon()

    async def _pause(self) -> None:
        await self.wire.refresh()
        await asyncio.sleep(RETRY_BACKOFF_MS / 1000)


def _as_kafka_error(error: Exception) -> KafkaError:
    if isinstance(error, KafkaError):
        return error
    failed = KafkaError(str(error))
    failed.retriable = True  # the connection failed
    return failed


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
        builder.append(index, at_ms, draft.key, draft.value, headers)
    return bytes(builder.build())
