"""Append records to Kafka with one batch in flight per partition. Later records go into the next batch.

A batch is written completely or not at all, and its records have consecutive offsets. The records that one call appends
to a partition therefore stay together, unless they exceed a batch. Appends are idempotent and acknowledged by all
replicas. The first failure ends all writing, because the writer cannot know which later records were lost.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from forebay import runtime
from forebay.events.topics import KV_EVENTS, METRICS, PROGRESS
from forebay.transport.base import Draft, LogError, LogFull
from forebay.transport.kafka.errors import explain
from forebay.transport.kafka.producer import Producer

logger = logging.getLogger(__name__)

RECORD_BYTES_MAX = 16 << 20  # the configured maximum message size of the topics
BATCH_RECORDS_MAX = 10_000
BATCH_BYTES_MAX = 1 << 20  # a larger record gets a batch of its own
# Records of these topics are not latency-critical. They wait equally long, so those of an engine step share a request.
LINGER_S = dict.fromkeys((PROGRESS.name, KV_EVENTS.name, METRICS.name), 0.002)
HEADROOM_BYTES = 1 << 16  # for batch and record headers within the maximum message size
# Maximum bytes of records that wait while the broker is unreachable, including those that follow other records.
BUFFER_BYTES_MAX = 256 << 20


class Waiter:
    """State of one `append`: a future for the offsets of its drafts, which arrive partition by partition."""

    __slots__ = ("_missing", "future", "offsets")

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[list[int]] = loop.create_future()
        self.offsets = [-1] * count
        self._missing = count

    def place(self, index: int, offset: int) -> None:
        self.offsets[index] = offset
        self._missing -= 1
        if not self._missing and not self.future.done():
            self.future.set_result(self.offsets)

    def refuse(self, index: int, reason: str) -> None:
        """Note that the draft at `index` was dropped, which fails the append."""
        del index
        if not self.future.done():
            self.future.set_exception(LogError(reason))


class LenientWaiter(Waiter):
    """Waiter that counts a dropped draft as done, and so resolves once all other drafts have their offsets."""

    __slots__ = ()

    def refuse(self, index: int, reason: str) -> None:
        del reason
        self.place(index, -1)


class PendingAppend(NamedTuple):
    """Queued draft, with its index in the waiter. The waiter is None for an append without waiting."""

    draft: Draft
    size: int
    at_ms: int
    waiter: Waiter | None
    draft_index: int


class KafkaWriter:
    """Writer with one queue per partition. `name` maps a topic to its name on the broker.

    `buffered` is the number of bytes of queued records, including those in flight.
    """

    def __init__(
        self,
        producer_of: Callable[[str], Awaitable[Producer]],
        name: Callable[[str], str],
        on_failure: Callable[[LogError], None],
    ) -> None:
        self._producer_of = producer_of
        self._name = name
        self._on_failure = on_failure
        self._queues: dict[tuple[str, int], deque[PendingAppend]] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._waiters: dict[Waiter, None] = {}  # ordered, so that failures resolve in the order of the appends
        self.buffered = 0
        self._queued: Counter[tuple[str, int]] = Counter()
        self._settled: Counter[tuple[str, int]] = Counter()  # of the queued drafts: written, dropped or failed
        self._has_settled = asyncio.Event()
        self.refused = 0

    def check(self, draft: Draft) -> int:
        """Return the size of a record. Raises ValueError if it exceeds `RECORD_BYTES_MAX`."""
        size = size_of(draft)
        if size > RECORD_BYTES_MAX:
            raise ValueError(f"{draft.topic}: a record of {size} bytes; the limit is {RECORD_BYTES_MAX}")
        return size

    def write(self, drafts: Sequence[Draft], waiter: Waiter | None) -> None:
        """Queue drafts for their partitions. Raises the errors of `reserve`."""
        self.reserve(drafts)
        self.write_reserved(drafts, waiter)

    def reserve(self, drafts: Sequence[Draft]) -> int:
        """Count drafts as buffered that `write_reserved` queues later, and return their bytes.

        Raises ValueError for a large draft, and LogFull if more than `BUFFER_BYTES_MAX` would wait for the broker.
        """
        size = sum(map(self.check, drafts))
        if self.buffered + size > BUFFER_BYTES_MAX:
            raise LogFull(
                f"{self.buffered >> 20} MiB of records wait for Kafka, the limit is {BUFFER_BYTES_MAX >> 20} MiB;"
                " check the broker"
            )
        self.buffered += size
        return size

    def release(self, size: int) -> None:
        """Uncount bytes that `reserve` counted, because their drafts will not be written."""
        self.buffered -= size

    def write_reserved(self, drafts: Sequence[Draft], waiter: Waiter | None) -> None:
        at_ms = runtime.wall_ns() // 1_000_000
        if waiter is not None:
            self._waiters[waiter] = None
            waiter.future.add_done_callback(lambda _: self._waiters.pop(waiter, None))
        for index, draft in enumerate(drafts):
            place = (draft.topic, draft.partition)
            queue = self._queues.get(place)
            if queue is None:
                queue = self._queues[place] = deque()
            queue.append(PendingAppend(draft, size_of(draft), at_ms, waiter, index))
            self._queued[place] += 1
            if place not in self._tasks:
                task = asyncio.create_task(self._drain(place, queue), name=f"append to {draft.topic}/{draft.partition}")
                self._tasks[place] = task

    def fail(self, error: LogError) -> None:
        """Fail every waiting append with this error, and drop all queued drafts."""
        for waiter in list(self._waiters):
            if not waiter.future.done():
                waiter.future.set_exception(LogError(str(error)))
        for queue in self._queues.values():
            queue.clear()

    async def flush(self) -> None:
        """Wait until every draft that is queued now is written, dropped or failed."""
        goals = {place: self._queued[place] for place in self._tasks}
        while any(place in self._tasks and self._settled[place] < goal for place, goal in goals.items()):
            self._has_settled.clear()
            await self._has_settled.wait()

    async def cancel(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, place: tuple[str, int], queue: deque[PendingAppend]) -> None:
        try:
            producer = await self._producer_of(place[0])
            if linger_s := LINGER_S.get(place[0]):
                await asyncio.sleep(linger_s)
            while queue:
                await self._send(producer, place, queue)
        except (KafkaError, OSError) as error:
            topic, partition = place
            self._on_failure(LogError(f"Kafka rejected records for {topic}/{partition}: {explain(error)}"))
        finally:
            del self._tasks[place]
            self._has_settled.set()

    async def _send(self, producer: Producer, place: tuple[str, int], queue: deque[PendingAppend]) -> None:
        topic, partition = self._name(place[0]), place[1]
        known = await producer.wire.partitions(topic)
        if partition not in known and not await _grown(producer, topic, partition):
            self._settle(place, len(queue))
            self._refuse(f"{topic} has no partition {partition}", queue)
            return
        sent: list[PendingAppend] = []
        size = 0
        while queue and len(sent) < BATCH_RECORDS_MAX and (not sent or size + queue[0].size <= BATCH_BYTES_MAX):
            size += queue[0].size
            sent.append(queue.popleft())
        if not sent:  # the log failed meanwhile
            return
        drafts = [(pending.draft, pending.at_ms) for pending in sent]
        try:
            first = await producer.append(TopicPartition(topic, partition), drafts, size)
        finally:
            self.buffered -= size
        self._settle(place, len(sent))
        for offset, pending in enumerate(sent, first):
            if pending.waiter is not None:
                pending.waiter.place(pending.draft_index, offset)

    def _settle(self, place: tuple[str, int], count: int) -> None:
        self._settled[place] += count
        self._has_settled.set()

    def _refuse(self, reason: str, queue: deque[PendingAppend]) -> None:
        """Drop the records of a partition that does not exist, without failing the log."""
        self.refused += len(queue)
        logger.error("dropped %d records: %s", len(queue), reason)
        while queue:
            pending = queue.popleft()
            self.buffered -= pending.size
            if pending.waiter is not None:
                pending.waiter.refuse(pending.draft_index, reason)


async def _grown(producer: Producer, topic: str, partition: int) -> bool:
    await producer.wire.refresh()
    return partition in await producer.wire.partitions(topic)


def size_of(draft: Draft) -> int:
    size = len(draft.value) + len(draft.key or b"")
    if draft.headers:
        size += sum(len(name.encode()) + len(value.encode()) for name, value in draft.headers.items())
    return size
