"""Appends to Kafka: for each partition one batch in flight, everything that comes meanwhile in the next.

A batch stands in the log whole or not at all, and its records have consecutive offsets; so what one call
appends to one partition stays together unless it is larger than a batch. Idempotent, acknowledged by all
replicas. The first failure ends all writing: what was lost behind it cannot be known.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaError

from forebay.events.topics import KV_EVENTS, METRICS, PROGRESS
from forebay.transport.base import Draft, LogError, LogFull

logger = logging.getLogger(__name__)

RECORD_BYTES_MAX = 16 << 20  # what the topics are configured to take
BATCH_RECORDS_MAX = 10_000
BATCH_BYTES_MAX = 1 << 20  # a larger record gets a batch of its own
# Nobody waits for these: they leave after the tokens of the same step, and more of them together.
LINGER_S = {PROGRESS.name: 0.002, KV_EVENTS.name: 0.005, METRICS.name: 0.005}
HEADROOM_BYTES = 1 << 16  # of batch and record frames, within what a topic takes
# The broker may be away for as long as a batch is tried again; then this is what waits for it.
BUFFER_BYTES_MAX = 256 << 20


class Waiter:
    """One `append`: the offsets of its drafts, filled in partition by partition."""

    __slots__ = ("_missing", "future", "offsets")

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[list[int]] = loop.create_future()
        self.offsets = [-1] * count
        self._missing = count

    def place(self, index: int, offset: int) -> None:
        """The draft at `index` has its offset."""
        self.offsets[index] = offset
        self._missing -= 1
        if not self._missing and not self.future.done():
            self.future.set_result(self.offsets)


@dataclass(frozen=True, slots=True)
class Pending:
    """A draft in line; `waiter` is told of its offset under `index`."""

    draft: Draft
    size: int
    at_ms: int
    waiter: Waiter | None
    index: int


class KafkaWriter:
    """Keeps one line a partition. `name` maps a topic to its name on the broker, `producer_of` to who sends it."""

    def __init__(
        self,
        producer_of: Callable[[str], Awaitable[AIOKafkaProducer]],
        name: Callable[[str], str],
        on_failure: Callable[[LogError], None],
    ) -> None:
        self._producer_of = producer_of
        self._name = name
        self._on_failure = on_failure
        self._lines: dict[tuple[str, int], deque[Pending]] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._waiters: set[Waiter] = set()
        self._buffered = 0
        self.refused = 0

    def check(self, draft: Draft) -> int:
        """The size of a record. Raises ValueError for one that no topic takes."""
        size = size_of(draft)
        if size > RECORD_BYTES_MAX:
            raise ValueError(f"{draft.topic}: a record of {size} bytes; the limit is {RECORD_BYTES_MAX}")
        return size

    def write(self, drafts: Sequence[Draft], waiter: Waiter | None) -> None:
        """Put drafts in line. Raises ValueError as `check`, LogFull when too much waits for the broker."""
        sizes = [self.check(draft) for draft in drafts]
        if self._buffered + sum(sizes) > BUFFER_BYTES_MAX:
            raise LogFull(f"Kafka has not taken {self._buffered >> 20} MiB that wait for it")
        self._buffered += sum(sizes)
        at_ms = time.time_ns() // 1_000_000
        if waiter is not None:
            self._waiters.add(waiter)
            waiter.future.add_done_callback(lambda _: self._waiters.discard(waiter))
        for index, (draft, size) in enumerate(zip(drafts, sizes, strict=True)):
            place = (draft.topic, draft.partition)
            line = self._lines.get(place)
            if line is None:
                line = self._lines[place] = deque()
            line.append(Pending(draft, size, at_ms, waiter, index))
            if place not in self._tasks:
                task = asyncio.create_task(self._drain(place, line), name=f"append to {draft.topic}/{draft.partition}")
                self._tasks[place] = task

    def fail(self, error: LogError) -> None:
        """End every wait with this error."""
        for waiter in list(self._waiters):
            if not waiter.future.done():
                waiter.future.set_exception(LogError(str(error)))
        for line in self._lines.values():
            line.clear()

    async def flush(self) -> None:
        """Wait until everything in line is written, or failed."""
        while self._tasks:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of records in line, sent or not."""
        return self._buffered

    async def cancel(self) -> None:
        """Write nothing more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain(self, place: tuple[str, int], line: deque[Pending]) -> None:
        try:
            producer = await self._producer_of(place[0])
            if linger_s := LINGER_S.get(place[0]):
                await asyncio.sleep(linger_s)
            while line:
                await self._send(producer, place, line)
        except (KafkaError, OSError) as error:
            topic, partition = place
            self._on_failure(LogError(f"Kafka did not take records for {topic}/{partition}: {explain(error)}"))
        finally:
            del self._tasks[place]

    async def _send(self, producer: AIOKafkaProducer, place: tuple[str, int], line: deque[Pending]) -> None:
        topic, partition = self._name(place[0]), place[1]
        known = await producer.partitions_for(topic)
        if partition not in known and not await _grown(producer, topic, partition):
            self._refuse(f"{topic} has no partition {partition}", line)
            return
        batch = producer.create_batch()
        sent: list[Pending] = []
        size = 0
        while line and len(sent) < BATCH_RECORDS_MAX:
            pending = line[0]
            draft = pending.draft
            headers = [(name, value.encode()) for name, value in draft.headers.items()] if draft.headers else []
            if sent and size + pending.size > BATCH_BYTES_MAX:
                break
            if batch.append(timestamp=pending.at_ms, key=draft.key, value=draft.value, headers=headers) is None:
                break
            size += pending.size
            sent.append(line.popleft())
        batch.close()
        try:
            written = await (await producer.send_batch(batch, topic, partition=partition))
        finally:
            self._buffered -= size
        for offset, pending in enumerate(sent, written.offset):
            if pending.waiter is not None:
                pending.waiter.place(pending.index, offset)

    def _refuse(self, reason: str, line: deque[Pending]) -> None:
        """Nobody reads a partition that does not exist: its records end here, and nothing else does."""
        self.refused += len(line)
        logger.error("%d records are refused: %s", len(line), reason)
        while line:
            pending = line.popleft()
            self._buffered -= pending.size
            if pending.waiter is not None and not pending.waiter.future.done():
                pending.waiter.future.set_exception(LogError(reason))


async def _grown(producer: AIOKafkaProducer, topic: str, partition: int) -> bool:
    """Ask the broker again whether a partition is there: topics grow."""
    await producer.client.force_metadata_update()
    return partition in await producer.partitions_for(topic)


def size_of(draft: Draft) -> int:
    """Return the bytes of a record's value, key and headers."""
    size = len(draft.value) + len(draft.key or b"")
    return size + sum(len(name.encode()) + len(value.encode()) for name, value in (draft.headers or {}).items())


def explain(error: Exception) -> str:
    """What a Kafka error says, in one line that is never empty."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
