"""Define the two ports of the transport: `Log` for events, and `Leases` for liveness.

Theory of operation. A log is a set of topics, a topic is a set of partitions, and a partition is a dense sequence of
records from offset 0. An append is acknowledged once it survives the death of this process. Readers see a record only
after that. Appends of one caller keep their order. A log does not interpret its records.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from heapq import heapify, heappop, heapreplace
from typing import Annotated, Any, Literal, Protocol

import msgspec

from forebay.events.codec import DecodeError, decode
from forebay.events.topics import Topic

FOLLOWED_RECORDS = 256  # per iteration of the event loop
PAGE_RECORDS = 512  # records per read; bounds memory whatever the length of the log
# When a commit of the embedded log reaches the disk: `normal` leaves that to the operating system, so a commit survives
# the death of the process. `full` waits for the disk, so a commit also survives a power loss.
LogSync = Literal["normal", "full"]


class LogError(Exception):
    """A log operation failed. The message says what to do. After a failed append, every later append fails too."""


class NotDerivable(LogError):
    """Only a program with other decision rules can derive what was requested. The message names the version."""


class PolicyNotAllowed(LogError):
    """A recorded owner ran a custom policy that this process may not run. The message names the option to allow it."""


class LogFull(LogError):
    """Too many bytes wait to be written. This append was rejected as a whole; a later append may succeed."""


class RecordsRemoved(LogError):
    """Retention removed the requested records."""


class LogUnavailable(LogError):
    """The log cannot be read now, for example because the broker does not respond. A later read may succeed."""


class LeaseError(Exception):
    """The lease store did not respond. The text says what to check. Callers retry later."""


class Draft(msgspec.Struct, frozen=True):
    """A record to append.

    On a compacted topic of Kafka, an empty value becomes a null value, which removes the older records of the key.
    """

    topic: str
    partition: int
    value: bytes
    key: bytes | None = None
    headers: Mapping[str, str] | None = None


class Record(msgspec.Struct, frozen=True):
    """A stored record.

    Attributes:
        at_us: Wall-clock time of the append in microseconds, 0 if the producer did not set it. No decision uses it.
        is_stamped: Whether the broker set `at_us`, and not the producer.
        fault: Why the record has no value that can be decoded, for example a null value. None if it has a value.
    """

    topic: str
    partition: int
    offset: int
    at_us: int
    value: bytes
    key: bytes | None = None
    headers: Mapping[str, str] | None = None
    fault: str | None = None
    is_stamped: bool = False


class Tail(Protocol):
    """Reader that follows one partition from an offset."""

    def take(self, limit: int) -> list[Record]:
        """Return up to `limit` next records without waiting; an empty list if none is ready."""

    def __len__(self) -> int:
        """Return how many records are known to be ready. More may be ready, but none if the number is 0."""

    def close(self) -> None:
        """Stop following the partition."""


class Log(Protocol):
    """An append-only log. Used from one event loop."""

    async def append(self, drafts: Sequence[Draft]) -> list[int]:
        """Append records in order within each partition, and return their offsets once all records are durable.

        Raises LogError if any record is not durable, and then on every later call. After a failure, a partition may
        hold only the first of the records for it. The embedded log appends all records or none.
        """

    def append_soon(self, drafts: Sequence[Draft], then: Sequence[Draft] = ()) -> None:
        """Append without waiting. A failure ends the log, and shows in `append` and `failure`.

        Args:
            drafts: Records to append.
            then: Records that no reader may see before `drafts` are durable. If the log fails before that, these are
                never appended. A record of `drafts` whose partition does not exist is dropped and not waited for.
                `then` records of several calls keep the order of the calls, so they wait for the slowest partition.
        """

    async def flush(self) -> None:
        """Wait until all records of earlier `append_soon` calls, including `then`, are durable or dropped.

        Raises LogError if the log fails.
        """

    def tail(self, topic: str, partition: int, offset: int, wake: "Wake") -> Tail:
        """Return a tail that follows a partition from `offset`, which is at most the partition's end.

        The log calls `wake.set()` whenever records become ready.
        """

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        """Return up to `limit` records from `offset`: fewer if they are large, and none only at the end.

        Raises LogError if a record is damaged, and RecordsRemoved if retention removed it.
        """

    async def begin(self, topic: str, partition: int) -> int:
        """Return the oldest offset that retention has not removed. Raises LogError if the log cannot be read."""

    async def end(self, topic: str, partition: int) -> int:
        """Return the offset of the next record to be appended. Raises LogError if the log cannot be read."""


class Wake(Protocol):
    """Wake-up signal of a tail, for example an asyncio.Event."""

    def set(self) -> None:
        """Signal that records are ready."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Lease of a worker or an ingress, as read by the owner.

    Attributes:
        worker_id: Id of the worker or ingress that holds the lease.
        expires_in_ms: Milliseconds until the lease expires, negative after the expiry.
        deadline_ms: Time of expiry on the store's clock, which may jump. It changes with every renewal.
    """

    worker_id: str
    token: str
    payload: bytes
    expires_in_ms: int
    ttl_ms: Annotated[int, msgspec.Meta(ge=1)]
    deadline_ms: int = 0
    released: bool = False


class Leases(Protocol):
    """Store of leases, used for liveness only. The owner turns each change into an event before anything uses it."""

    def acquire(self, group: str, worker_id: str, token: str, payload: bytes, ttl_ms: int) -> None:
        """Take or replace the lease of a worker. `token` identifies the incarnation."""

    def renew(self, group: str, worker_id: str, token: str, ttl_ms: int) -> bool:
        """Extend the lease. Return False if another incarnation holds it, or it was deleted."""

    def release(self, group: str, worker_id: str, token: str) -> None:
        """Mark the lease as released if this incarnation holds it. Polls return it until `forget` deletes it."""

    def poll(self, group: str) -> list[Lease]:
        """Return every lease of the group ordered by worker id, including expired and released leases."""

    def forget(self, group: str, worker_id: str, token: str) -> None:
        """Delete an ended lease after the owner appended the loss to `fleet`."""

    def groups(self) -> list[str]:
        """Return every group with at least one unexpired lease, sorted."""

    def announce(self, group: str, ttl_ms: int) -> None:
        """Make `groups` return a group for `ttl_ms`, although no worker has a lease in it yet."""


def event_of(topic: Topic, record: Record) -> Any:
    """Return the event in a record of `topic`. Raises DecodeError, and no other error, if it does not decode."""
    if record.fault is not None:
        raise DecodeError(f"{topic.name}: {record.fault}")
    return decode(topic, record.value)


async def event_at(log: Log, topic: Topic, partition: int, offset: int) -> Any:
    """Return the event in the record at this offset; None if the log does not have it, or it does not decode."""
    try:
        records = await log.read(topic.name, partition, offset, 1)
        return event_of(topic, records[0]) if records and records[0].offset == offset else None
    except (RecordsRemoved, DecodeError):
        return None


async def newest_first(log: Log, topic: Topic, partitions: Iterable[int]) -> AsyncIterator[Record]:
    """Yield the records of partitions, newest first by the time of their append."""
    readers = {one: reversed_records(log, topic, one, await log.end(topic.name, one)) for one in partitions}
    firsts = [(one, record) for one, reader in readers.items() if (record := await anext(reader, None)) is not None]
    heads = [(-record.at_us, one, record) for one, record in firsts]
    heapify(heads)
    while heads:
        _, one, record = heads[0]
        yield record
        if (following := await anext(readers[one], None)) is None:
            heappop(heads)
        else:
            heapreplace(heads, (-following.at_us, one, following))


async def reversed_records(log: Log, topic: Topic, partition: int, end: int) -> AsyncGenerator[Record]:
    """Yield the records of a partition before offset `end`, newest first."""
    begin = await log.begin(topic.name, partition)
    while end > begin:
        start = max(begin, end - PAGE_RECORDS)
        for record in reversed([record async for record in records_of(log, topic, partition, start, end)]):
            yield record
        end = start


async def records_of(log: Log, topic: Topic, partition: int, start: int, end: int) -> AsyncIterator[Record]:
    """Yield the records in [start, end) of a topic."""
    while start < end:
        records = await log.read(topic.name, partition, start, min(PAGE_RECORDS, end - start))
        if not records:
            return
        for record in records:
            if record.offset < end:
                yield record
        start = records[-1].offset + 1


async def events_of(log: Log, topic: Topic, partition: int) -> AsyncIterator[tuple[int, Any]]:
    """Yield the offset and the event of every record that a partition has now and that decodes."""
    start, end = await log.begin(topic.name, partition), await log.end(topic.name, partition)
    async for record in records_of(log, topic, partition, start, end):
        with suppress(DecodeError):
            yield record.offset, event_of(topic, record)
