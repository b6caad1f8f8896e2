"""In-memory broker with a fault model, and the port `Log` on it.

A `Broker` has the partitions. A `VirtualLog` is the connection of one process. Like a Kafka client it has one batch in
flight per partition, so the order within a partition is that of the appends, but partitions overtake each other. Every
step takes a random time: to the broker, back to the writer, and to each reader. A network split, or a broker that is
down, delays a batch until it is healed; the batch of a process that died meanwhile is lost. `Faults` injects errors.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from forebay import runtime
from forebay.transport.base import Draft, LogError, LogFull, LogUnavailable, Record, Wake
from forebay.transport.kafka.log import Following
from tests.faults.loop import VirtualLoop
from tests.faults.process import Process

Place = tuple[str, int]
HOP_S = 0.0015  # mean time from a process to the broker, or back
RETRY_S = 0.05  # until a client tries an unreachable broker again
BATCH_MAX = 64
FETCH_MAX = 48  # records per partition and fetch; less than a reader takes at once
LATE_S_MIN, LATE_S = 0.5, 9.0  # delay of a late acknowledgement: the ingress stops waiting after 5 s
REFUSALS = {"disk_full": "the disk of the broker is full", "append_rejected": "the broker rejected a batch"}
READ_S_MAX = 10.0  # time after which a read of an unreachable broker fails, as with the real client


class _Waiter:
    """State of one `append`: a future for the offsets of its drafts."""

    def __init__(self, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[list[int]] = loop.create_future()
        self._offsets = [-1] * count
        self._missing = count

    def place(self, index: int, offset: int) -> bool:
        """Set the offset of a draft. Return whether it was the last one."""
        self._offsets[index] = offset
        self._missing -= 1
        if not self._missing and not self.future.done():
            self.future.set_result(self._offsets)
        return not self._missing


@dataclass(frozen=True, slots=True)
class _Queued:
    draft: Draft
    at_us: int
    waiter: _Waiter | None
    index: int


class _Lane:
    """Records of one process for one partition that the broker has not acknowledged."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.waiting: deque[_Queued] = deque()
        self.in_flight = False


class Faults:
    """Errors that the next operations of one process meet, and the state of its network.

    Attributes:
        pending: number of injected errors of each kind that have not happened yet.
        fired: called with the kind of each error that happens.
        cut: whether the process cannot reach the broker.
        slowness: factor of all network delays.
        lag_s: additional seconds until fetched records arrive.
        truncates: whether fetches and reads return as little as possible.
    """

    def __init__(self, fired: Callable[[str], None]) -> None:
        self.pending: dict[str, int] = {}
        self.fired = fired
        self.cut = False
        self.slowness = 1.0
        self.lag_s = 0.0
        self.truncates = False
        self._failing_call: int | None = None
        self._calls = 0

    def fail_call(self, number: int) -> None:
        """Let one call of the broker fail: the one with this number, counted from 1 from now on."""
        self._failing_call, self._calls = number, 0

    def fails(self) -> int:
        """Count a call of the broker, and return its number if it fails, otherwise 0."""
        self._calls += 1
        if self._calls != self._failing_call:
            return 0
        self.fired("call_failed")
        return self._calls

    def take(self, kind: str) -> bool:
        """Return whether an injected error of this kind happens now, and count it."""
        if not self.pending.get(kind):
            return False
        self.pending[kind] -= 1
        self.fired(kind)
        return True


class Watcher(Protocol):
    @property
    def alive(self) -> bool:
        """Whether new records are announced to the reader."""

    def is_appending(self, topic: str) -> bool:
        """Return whether its process has records of a topic that the broker has not acknowledged."""

    def announce(self, place: Place) -> None:
        """Take note of a new record in a partition."""


class Broker:
    """Partitions of the simulated log.

    Attributes:
        partitions: records by topic and partition.
        down: whether the broker accepts and delivers nothing.
        full: whether the disk of the broker is full, so that it rejects appends.
        on_append: called with each new record and the process that wrote it, before any reader sees the record.
    """

    def __init__(self, loop: VirtualLoop, seed: str) -> None:
        self.loop = loop
        self.partitions: dict[Place, list[Record]] = {}
        self.down = False
        self.full = False
        self.on_append: Callable[[Record, str], None] = lambda _, __: None
        self._random = Random(f"{seed}/broker")
        self._watchers: list[Watcher] = []

    def connect(self, process: Process, faults: Faults, on_failure: Callable[[LogError], None]) -> "VirtualLog":
        """Return the log of a process. `on_failure` is called once if the log fails."""
        log = VirtualLog(self, process, faults, on_failure)
        self.watch(log)
        return log

    def watch(self, watcher: Watcher) -> None:
        """Announce new records to a reader as long as it is alive."""
        self._watchers = [one for one in self._watchers if one.alive]
        self._watchers.append(watcher)

    def records(self, place: Place) -> list[Record]:
        return self.partitions.setdefault(place, [])

    def append(self, draft: Draft, at_us: int, writer: str = "") -> int:
        """Append a record of a process for all readers, and return its offset."""
        records = self.records((draft.topic, draft.partition))
        record = Record(draft.topic, draft.partition, len(records), at_us, draft.value, draft.key, draft.headers)
        records.append(record)
        self.loop.trace(b"%s/%d@%d " % (draft.topic.encode(), draft.partition, record.offset) + draft.value)
        self.on_append(record, writer)
        for watcher in self._watchers:
            watcher.announce((draft.topic, draft.partition))
        return record.offset

    def is_awaiting(self, topic: str) -> bool:
        """Return whether a process that runs has records of a topic that the broker has not acknowledged."""
        return any(watcher.alive and watcher.is_appending(topic) for watcher in self._watchers)

    def refusal(self, faults: Faults) -> str:
        """Return the kind of fault because of which the broker rejects a batch now; empty if it accepts the batch."""
        if self.full:
            faults.fired("disk_full")
            return "disk_full"
        return "append_rejected" if faults.take("append_rejected") else ""

    def hop_s(self, faults: Faults) -> float:
        """Return the random duration of one step over the network."""
        return self._random.expovariate(1 / HOP_S) * faults.slowness

    def chance(self) -> float:
        """Return a random number from 0 to 1."""
        return self._random.random()


class VirtualTail:
    def __init__(self, log: "VirtualLog", place: Place, offset: int, wake: Wake) -> None:
        self.place = place
        self.position = offset
        self.wake = wake
        self._log = log
        self._buffer: deque[Record] = deque()

    def __len__(self) -> int:
        return 1 if self._log.failure is not None else len(self._buffer)

    def take(self, limit: int) -> list[Record]:
        if self._log.failure is not None:
            raise LogError(str(self._log.failure))
        return [self._buffer.popleft() for _ in range(min(limit, len(self._buffer)))]

    def close(self) -> None:
        self._buffer.clear()
        self._log.leave(self)

    def push(self, records: Sequence[Record]) -> None:
        self._buffer.extend(records)
        self.position = records[-1].offset + 1
        self.wake.set()


class VirtualLog:
    """The port `Log` for one process."""

    def __init__(
        self, broker: Broker, process: Process, faults: Faults, on_failure: Callable[[LogError], None]
    ) -> None:
        self.process = process
        self.failure: LogError | None = None
        self._broker = broker
        self._faults = faults
        self._on_failure = on_failure
        self._lanes: dict[Place, _Lane] = {}
        self._waiters: dict[_Waiter, None] = {}
        self._tails: dict[VirtualTail, None] = {}
        self._followed: Counter[Place] = Counter()
        self._is_fetching = False
        self._following = Following(self._write_soon, self._write_followers)
        self._has_settled = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self.process.alive

    async def append(self, drafts: Sequence[Draft]) -> list[int]:
        waiter = _Waiter(len(drafts), asyncio.get_running_loop())
        if drafts:
            self._write(drafts, waiter)
        else:
            waiter.future.set_result([])
        return await waiter.future

    def append_soon(self, drafts: Sequence[Draft], then: Sequence[Draft] = ()) -> None:
        self._require_open()
        self._following.append(drafts, then)

    async def flush(self) -> None:
        self._require_open()
        while self._following or any(lane.in_flight for lane in self._lanes.values()):
            self._has_settled.clear()
            await self._has_settled.wait()
            self._require_open()

    def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> VirtualTail:
        self._require_open()
        tail = VirtualTail(self, (topic, partition), offset, wake)
        self._tails[tail] = None
        self._followed[tail.place] += 1
        self._fetch_soon()
        return tail

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        await self._query()
        if self._faults.truncates and limit > 1:
            self._faults.fired("truncated_fetch")
            limit = 1 + int(self._broker.chance() * min(limit - 1, 3))
        return self._broker.records((topic, partition))[offset : offset + limit]

    async def begin(self, topic: str, partition: int) -> int:
        del topic, partition
        await self._query()
        return 0

    async def end(self, topic: str, partition: int) -> int:
        await self._query()
        return len(self._broker.records((topic, partition)))

    def is_appending(self, topic: str) -> bool:
        """Return whether records of a topic are not acknowledged yet."""
        return any(lane.in_flight for lane in self._lanes.values() if lane.place[0] == topic)

    def leave(self, tail: VirtualTail) -> None:
        if tail in self._tails:
            del self._tails[tail]
            self._followed[tail.place] -= 1

    def announce(self, place: Place) -> None:
        if self._followed[place]:
            self._fetch_soon()

    def fail(self, error: LogError) -> None:
        """End the log: every append in flight and every later operation fails."""
        if self.failure is not None:
            return
        self.failure = error
        self._lanes.clear()
        self._following.clear()
        for waiter in self._waiters:
            if not waiter.future.done():
                waiter.future.set_exception(LogError(str(error)))
        self._waiters.clear()
        for tail in self._tails:
            tail.wake.set()
        self._has_settled.set()
        self._on_failure(error)

    def _require_open(self) -> None:
        if self.failure is not None:
            raise LogError(str(self.failure))

    def _write_soon(self, drafts: Sequence[Draft], on_durable: Callable[[], None] | None) -> None:
        if self.failure is not None:
            return
        if on_durable is None:
            self._write(drafts, None)
            return
        waiter = _Waiter(len(drafts), asyncio.get_running_loop())

        def done(future: "asyncio.Future[list[int]]") -> None:
            if not future.cancelled() and future.exception() is None:
                on_durable()

        self._write(drafts, waiter)
        waiter.future.add_done_callback(done)

    def _write_followers(self, drafts: Sequence[Draft]) -> None:
        if self.failure is None:
            self._queue(drafts, None)

    def _write(self, drafts: Sequence[Draft], waiter: _Waiter | None) -> None:
        self._require_open()
        if self._faults.take("log_full"):
            raise LogFull("too many bytes wait for the broker (injected)")
        self._queue(drafts, waiter)

    def _queue(self, drafts: Sequence[Draft], waiter: _Waiter | None) -> None:
        if waiter is not None:
            self._waiters[waiter] = None
        at_us = runtime.wall_us()
        for index, draft in enumerate(drafts):
            place = (draft.topic, draft.partition)
            lane = self._lanes.get(place)
            if lane is None:
                lane = self._lanes[place] = _Lane(place)
            lane.waiting.append(_Queued(draft, at_us, waiter, index))
            if not lane.in_flight:
                self._send(lane)

    def _send(self, lane: "_Lane") -> None:
        lane.in_flight = True
        # The harness delivers the batch: what was sent arrives, even if its sender is killed or paused meanwhile.
        self._broker.loop.call_main_later(self._broker.hop_s(self._faults), self._arrive, lane)

    def _arrive(self, lane: "_Lane") -> None:
        broker, faults, place = self._broker, self._faults, f"{lane.place[0]}/{lane.place[1]}"
        if self.failure is not None:
            return
        if broker.down or faults.cut:
            if self.process.alive:  # otherwise nobody tries again
                broker.loop.call_main_later(RETRY_S, self._arrive, lane)
            return
        if refusal := broker.refusal(faults):
            self._reject(f"{place}: {REFUSALS[refusal]} (injected)")
            return
        count = min(len(lane.waiting), BATCH_MAX)
        if faults.truncates:
            count = 1 + int(broker.chance() * min(count - 1, 3))
        batch = [lane.waiting.popleft() for _ in range(count)]
        offsets = [broker.append(queued.draft, queued.at_us, self.process.label) for queued in batch]
        if faults.take("append_without_ack"):
            self._reject(f"{place}: the broker wrote a batch but did not acknowledge it (injected)")
            return
        delay_s = broker.hop_s(faults)
        if faults.take("ack_late"):
            delay_s += LATE_S_MIN + LATE_S * broker.chance()
        self.process.call_later(delay_s, self._acknowledge, lane, batch, offsets)

    def _acknowledge(self, lane: "_Lane", batch: "list[_Queued]", offsets: list[int]) -> None:
        if self.failure is not None:
            return
        lane.in_flight = False
        for queued, offset in zip(batch, offsets, strict=True):
            if queued.waiter is not None and queued.waiter.place(queued.index, offset):
                self._waiters.pop(queued.waiter, None)
        if lane.waiting:
            self._send(lane)
        self._has_settled.set()

    def _reject(self, reason: str) -> None:
        self.process.call_later(
            self._broker.hop_s(self._faults), self.fail, LogError(f"Kafka rejected records for {reason}")
        )

    def _fetch_soon(self) -> None:
        if not self._is_fetching:
            self._is_fetching = True
            self.process.call_later(self._broker.hop_s(self._faults) + self._faults.lag_s, self._fetch)

    def _fetch(self) -> None:
        """Deliver new records to the tails, sometimes not all of them, so that partitions overtake each other."""
        self._is_fetching = False
        broker, faults = self._broker, self._faults
        if self.failure is not None:
            return
        is_reachable = not (broker.down or faults.cut)
        has_more = False
        for tail in list(self._tails):
            records = broker.records(tail.place)
            if tail.position >= len(records):
                continue
            if not is_reachable or broker.chance() < 0.1:
                has_more = True
                continue
            limit = FETCH_MAX
            if faults.truncates:
                faults.fired("truncated_fetch")
                limit = 1
            tail.push(records[tail.position : tail.position + limit])
            has_more = has_more or tail.position < len(records)
        if faults.take("spurious_wake"):
            for tail in self._tails:
                tail.wake.set()
        if has_more:
            self._fetch_soon()

    async def _query(self) -> None:
        self._require_open()
        broker, faults = self._broker, self._faults
        waited_s = 0.0
        await asyncio.sleep(broker.hop_s(faults))
        while broker.down or faults.cut:
            await asyncio.sleep(RETRY_S)
            waited_s += RETRY_S
            if waited_s >= READ_S_MAX:
                raise LogUnavailable("the broker does not respond (injected)")
        if faults.fails():
            raise LogUnavailable("the broker did not respond in time (injected)")
        if faults.take("read_failed"):
            raise LogUnavailable("the broker cannot be read (injected)")
        await asyncio.sleep(broker.hop_s(faults))
        self._require_open()
