"""Read the KV events of one rank from the ZMQ sockets of its engine, and publish each once, in order, as cache changes.

The protocol is vLLM's; SGLang uses it too. A PUB socket sends messages of three frames: topic, number of the batch (8
bytes, big-endian), payload. On a DEALER socket a reader requests a replay from a number on, and a ROUTER socket of the
engine replies. Each rank has its own sockets, so the rank of an event is known without its payload. This module needs
`pyzmq`, on which both engines depend.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from typing import assert_never

import msgspec
import zmq
import zmq.asyncio
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from xxhash import xxh3_64_intdigest
from zmq.utils.monitor import recv_monitor_message

from forebay.runtime.metrics import counter
from forebay.workers.engine import EngineError
from forebay.workers.kv_events.engine_events import Decode, KvEventError
from forebay.workers.kv_events.resident import Change, KvTracker, ResidentBlocks, TrackerResult

HELD_MAX = 4_096  # live batches queued during a replay: half a minute of a busy engine
FAILURES_MAX = 3


class Deliver(msgspec.Struct, frozen=True):
    """Instruction to the caller: process this batch of KV events, the next one in order."""

    seq: int
    payload: bytes


class RequestReplay(msgspec.Struct, frozen=True):
    """Instruction to the caller: request a replay from the publisher, and ignore an earlier replay in progress."""

    from_seq: int


class Lost(msgspec.Struct, frozen=True):
    """Instruction to the caller: batches before the next delivered one are lost, so the known blocks are incomplete."""

    reason: str


class Restarted(msgspec.Struct, frozen=True):
    """Instruction to the caller: the engine has restarted, so forget all its blocks.

    The next delivered batch is the first one that the new publisher still has.
    """


Step = Deliver | RequestReplay | Lost | Restarted


class Sequence:
    """State machine that orders the batches of one publisher. Its methods return instructions to execute in order.

    Theory of operation. A publisher numbers its batches from 0 and publishes each once. On request it replays the
    batches that it has buffered, from a number on. Live batches (those that are not replayed) arrive in order. So if a
    number does not increase, the batch belongs to a new publisher, which began at 0. Every replay request except the
    first begins with the last delivered batch. If that batch is missing in the replay, or differs, the replay is from a
    new publisher, too.

    During a replay, live batches are queued. If there is a gap between the replay and the queued batches, a replay is
    requested once more, because the publisher may have read its buffer before it published them. If the gap remains,
    the batches in it are lost.

    If the publisher cannot replay batches, the batches of every gap are lost. During a replay, at most `held_max` live
    batches are queued. `late` counts batches that arrived after a later batch, and were dropped.
    """

    def __init__(self, *, replays: bool, held_max: int = HELD_MAX) -> None:
        self.next_seq = 0
        self.asking = False
        self.gaps = 0
        self.late = 0
        self._replays = replays
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_max = held_max
        self._live_seq = -1  # highest number of a live batch
        self._known: int | None = None  # digest of the last delivered batch
        self._known_awaited = False
        self._again = False
        self._requested_from = -1  # value of `next_seq` when a replay was last requested because of a gap
        self._failures = 0

    def check(self) -> list[Step]:
        """Request a replay to find missed batches: at the start, after a reconnection, and after a silence."""
        if not self._replays:
            return []
        if self.asking:
            self._again = True  # the replay in flight may have been read before this call
            return []
        return [self._request_replay()]

    def live(self, seq: int, payload: bytes) -> list[Step]:
        """Handle a batch that the publisher has just published."""
        steps: list[Step] = []
        if seq <= self._live_seq:
            steps += self._restart()
        self._live_seq = seq
        if not self.asking:
            return steps + self._take(seq, payload)
        if len(self._held) < self._held_max:
            self._held.append((seq, payload))
        return steps

    def replayed(self, seq: int, payload: bytes) -> list[Step]:
        """Handle a batch of the requested replay. The caller drops batches of earlier replays."""
        steps: list[Step] = []
        if self._known_awaited:
            self._known_awaited = False
            if seq < self.next_seq:
                return [] if seq == self.next_seq - 1 and xxh3_64_intdigest(payload) == self._known else self._restart()
            # The replay may also come from a new publisher.
            steps.append(self._lose(seq, "the replay does not begin with the last known batch"))
        if seq < self.next_seq:
            return steps
        if seq > self.next_seq:
            self.gaps += 1
            steps.append(self._lose(seq, "the publisher no longer has them"))
        return [*steps, self._deliver(seq, payload)]

    def replay_ended(self) -> list[Step]:
        if self._known_awaited:
            return self._restart()
        self._failures = 0
        return [self._request_replay()] if self._again else self._go_on()

    def failed(self) -> list[Step]:
        """Handle a timeout of the requested replay: request it again, or continue without it after several timeouts."""
        self._failures += 1
        if self._failures < FAILURES_MAX:
            return [self._request_replay()]
        self._failures = 0
        return self._go_on()

    def _go_on(self) -> list[Step]:
        self.asking = False
        steps: list[Step] = []
        held, self._held = self._held, deque()
        while held and not self.asking:
            steps += self._take(*held.popleft())
        if self.asking:
            self._held.extend(held)
        elif self._live_seq >= self.next_seq:  # the queue was full
            steps += self._missing(self._live_seq + 1)
        return steps

    def _take(self, seq: int, payload: bytes) -> list[Step]:
        if seq < self.next_seq:
            self.late += 1
            return []
        steps: list[Step] = []
        if seq > self.next_seq:
            self.gaps += 1
            steps = self._missing(seq)
            if self.asking:
                self._held.append((seq, payload))
                return steps
        return [*steps, self._deliver(seq, payload)]

    def _missing(self, seq: int) -> list[Step]:
        if self._replays and self._requested_from != self.next_seq:
            self._requested_from = self.next_seq
            return [self._request_replay()]
        return [self._lose(seq, "the publisher does not have them" if self._replays else "replays are not available")]

    def _deliver(self, seq: int, payload: bytes) -> Deliver:
        self.next_seq = seq + 1
        self._known = xxh3_64_intdigest(payload)
        return Deliver(seq, payload)

    def _lose(self, seq: int, why: str) -> Lost:
        first, self.next_seq = self.next_seq, seq
        self._known = None
        which = f"{first} to {seq - 1}" if seq > first else f"around {seq}"
        return Lost(f"KV events are missing, batches {which}: {why}")

    def _request_replay(self) -> RequestReplay:
        self.asking = True
        self._again = False
        self._known_awaited = self._known is not None
        return RequestReplay(self.next_seq - self._known_awaited)

    def _restart(self) -> list[Step]:
        self.next_seq = 0
        self._known = None
        self._live_seq = -1
        self._requested_from = -1
        self._failures = 0
        self._held.clear()
        return [Restarted(), self._request_replay()] if self._replays else [Restarted()]


logger = logging.getLogger(__name__)

SEQ_BYTES = 8
LIVE_FRAMES = 3
REPLY_FRAMES_MIN = 3
END_OF_REPLAY = (-1).to_bytes(SEQ_BYTES, "big", signed=True)
RECEIVE_HWM = 10_000  # queued batches; batches that the publisher drops beyond that are fetched by a replay
ANSWER_TIMEOUT_S = 2.0  # publishers reply within a tenth of a second
QUIET_S = 5.0  # after this time without a batch, request a replay


class KvSource(msgspec.Struct, frozen=True):
    """The ZMQ sockets on which an engine publishes KV events: a PUB socket, and a ROUTER socket for replays.

    Without the second one, missed batches are lost.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""

    def at_rank(self, rank: int) -> "KvSource":
        """Return the sockets of a data-parallel rank. Engines add the index of the rank to each port.

        Raises EngineError if an address has no port, so that ranks would share it.
        """
        replay = self.replay_endpoint
        return KvSource(_at_rank(self.endpoint, rank), None if replay is None else _at_rank(replay, rank), self.topic)


PublishChanges = Callable[[int, Items[Change]], None]
"""Callback with a rank and its changes, in order, on the event loop."""
OnLost = Callable[[int, str], None]
"""Callback with a rank and the reason of a loss. It should make the engine drop its prefix cache, with retries.

The rank was reported as empty before this is called.
"""


class KvFeed:
    """Reads the KV events of one rank, and publishes the changes of its cache.

    A replay fails if no reply arrives for `answer_timeout_s`. After `quiet_s` without a batch, a replay is
    requested.

    Attributes:
        counts: counters by kind: batches `live`, `replayed` and `undecodable`, occasions on which batches were `lost`,
            publishers `restarted`, malformed messages (`frames`), replay requests `unanswered`, and skipped events by
            the reasons of the decoder.
    """

    def __init__(
        self,
        rank: int,
        source: KvSource,
        decode: Decode,
        resident: ResidentBlocks,
        *,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
        quiet_s: float = QUIET_S,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.resident = resident
        self.sequence = Sequence(replays=source.replay_endpoint is not None)
        self._rank = rank
        self._source = source
        self._decode = decode
        self._tracker = KvTracker(resident)
        self._answer_timeout_s = answer_timeout_s
        self._quiet_s = quiet_s
        self._publish: PublishChanges | None = None
        self._on_lost: OnLost | None = None
        self._requested: RequestReplay | None = None
        self._wake = asyncio.Event()

    def totals(self) -> Mapping[str, int]:
        """Return all counters of the rank by kind, for `KvEventMetrics`."""
        return self.counts + self.resident.counts + Counter(gaps=self.sequence.gaps, late=self.sequence.late)

    async def run(self, publish: PublishChanges, on_lost: OnLost) -> None:
        """Read the sockets until cancelled, from the first batch that the publisher still has.

        If events are lost, `on_lost` must make the engine drop its prefix cache. Raises EngineError if an endpoint is
        invalid, and a group with the exceptions of `publish` and `on_lost`.
        """
        self._publish, self._on_lost = publish, on_lost
        context = zmq.asyncio.Context()
        try:
            live = context.socket(zmq.SUB)
            live.set(zmq.RCVHWM, RECEIVE_HWM)
            live.subscribe(self._source.topic.encode())
            # Before connecting: the event of the connection could be missed otherwise.
            monitor = live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            _connect(live, self._source.endpoint)
            if self._source.replay_endpoint is not None:
                with context.socket(zmq.DEALER) as probe:  # reject an invalid endpoint now instead of at the first gap
                    _connect(probe, self._source.replay_endpoint)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive(live))
                tasks.create_task(self._on_connections(monitor))
                tasks.create_task(self._on_quiet())
                tasks.create_task(self._run_replays(context))
        finally:
            self._publish = None
            context.destroy(linger=0)

    async def _receive(self, live: zmq.asyncio.Socket) -> None:
        while True:
            frames = await live.recv_multipart()
            if len(frames) == LIVE_FRAMES and len(frames[1]) == SEQ_BYTES:
                self.counts["live"] += 1
                self._do(self.sequence.live(int.from_bytes(frames[1], "big"), frames[2]))
            else:
                self._no_batch(frames)
            await asyncio.sleep(0)  # receives available messages without letting other tasks run

    async def _on_connections(self, monitor: zmq.asyncio.Socket) -> None:
        """Request a replay after each connection, because batches that were published before it were missed."""
        while True:
            await recv_monitor_message(monitor)
            self._do(self.sequence.check())

    async def _on_quiet(self) -> None:
        """Request a replay if no batch arrives for some time. If the last batch was missed, nothing else shows it."""
        while True:
            before = self.counts["live"]
            await asyncio.sleep(self._quiet_s)
            if self.counts["live"] == before:
                self._do(self.sequence.check())

    async def _run_replays(self, context: zmq.asyncio.Context) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while (request := self._requested) is not None:
                await self._replay(context, request)

    async def _replay(self, context: zmq.asyncio.Context, request: RequestReplay) -> None:
        """Run one replay on its own socket, so that a late reply to an earlier request cannot be taken for it."""
        assert self._source.replay_endpoint is not None
        with context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RCVHWM, RECEIVE_HWM)
            _connect(dealer, self._source.replay_endpoint)
            await dealer.send_multipart([b"", request.from_seq.to_bytes(SEQ_BYTES, "big")])
            while self._requested is request:
                try:
                    async with asyncio.timeout(self._answer_timeout_s):
                        frames = await dealer.recv_multipart()
                except TimeoutError:
                    self.counts["unanswered"] += 1
                    self._requested = None
                    self._do(self.sequence.failed())
                    break
                self._on_reply(frames)
                await asyncio.sleep(0)

    def _on_reply(self, frames: list[bytes]) -> None:
        """Handle a reply to a replay request: a delimiter and a batch, or the end. Older engines send no topic."""
        if len(frames) < REPLY_FRAMES_MIN or len(frames[-2]) != SEQ_BYTES:
            self._no_batch(frames)
        elif frames[-2] == END_OF_REPLAY:
            self._requested = None
            self._do(self.sequence.replay_ended())
        else:
            self.counts["replayed"] += 1
            self._do(self.sequence.replayed(int.from_bytes(frames[-2], "big"), frames[-1]))

    def _no_batch(self, frames: list[bytes]) -> None:
        # If it was a batch, its number will be missing.
        self.counts["frames"] += 1
        logger.warning(
            "rank %s: got a message of %s frames, which is not a batch of KV events", self._rank, len(frames)
        )

    def _do(self, steps: list[Step]) -> None:
        assert self._publish is not None and self._on_lost is not None
        changes: list[Change] = []
        lost = ""
        for step in steps:
            match step:
                case RequestReplay():
                    self._requested = step
                    self._wake.set()
                    continue
                case Deliver():
                    outcome = self._deliver(step)
                case Lost():
                    self.counts["lost"] += 1
                    logger.warning("rank %s: %s", self._rank, step.reason)
                    outcome = self._tracker.missed(step.reason)
                case Restarted():
                    self.counts["restarted"] += 1
                    logger.warning("rank %s: the publisher of KV events was restarted or replaced", self._rank)
                    outcome = self._tracker.restarted()
                case _:
                    assert_never(step)
            changes += outcome.changes
            lost = outcome.lost or lost
        if changes:
            self._publish(self._rank, changes)
        if lost and self._tracker.lost:
            self._on_lost(self._rank, lost)

    def _deliver(self, step: Deliver) -> TrackerResult:
        try:
            batch = self._decode(step.payload)
        except KvEventError as error:
            self.counts["undecodable"] += 1
            logger.warning("rank %s: batch %s of KV events is invalid: %s", self._rank, step.seq, error)
            return self._tracker.undecodable(str(error))
        self.counts += batch.skipped
        return self._tracker.batch(batch)


def _at_rank(endpoint: str, rank: int) -> str:
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal():
        if rank:
            raise EngineError(
                f"KV events of rank {rank}: {endpoint!r} has no port to add the rank to; use tcp://host:port"
            )
        return endpoint
    return f"tcp://{host}:{int(port) + rank}"


def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    try:
        socket.connect(endpoint.replace("tcp://*:", "tcp://127.0.0.1:"))
    except zmq.ZMQError as error:
        raise EngineError(f"KV events: cannot connect to {endpoint!r}: {error}") from error


class KvEventMetrics(Collector):
    """Prometheus collector of batches of KV events and anomalies in them, by rank and kind."""

    def __init__(self, worker_id: str, totals: Mapping[int, Callable[[], Mapping[str, int]]]) -> None:
        self._worker_id = worker_id
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        totals = ((rank, sorted(total().items())) for rank, total in self._totals.items())
        counts = {(self._worker_id, str(rank), kind): count for rank, found in totals for kind, count in found}
        text = "Batches of the engine's KV events, and anomalies in them, by kind."
        yield counter("forebay_worker_kv_events", text, counts, "worker_id", "rank", "kind")
