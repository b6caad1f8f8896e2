"""The feed on real sockets, with a publisher like vLLM's: PUB, and a ROUTER for replays."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from forebay.engine_model.model import Removed, Stored
from forebay.workers.engine import Cleared, EngineError
from forebay.workers.kv_events.resident import Change, ResidentBlocks
from forebay.workers.kv_events.zmq_feed import END_OF_REPLAY, KvEventMetrics, KvFeed, KvSource
from forebay.workers.kv_events.zmq_wire import VllmDecoder
from tests.workers.conftest import until
from tests.workers.kv_events.captured import A_HASHES, PROMPT, VLLM_BATCHES, ours, payload, vllm_stored

HOST = "tcp://127.0.0.1"
PORTS = (20_000, 32_000)
NAMES = ours(PROMPT, 32)
RANK = 3


class Publisher:
    """Publisher that numbers and keeps its batches, on two loopback ports."""

    def __init__(self, *, topics: bool = True) -> None:
        self.context = zmq.asyncio.Context()
        self.topics = topics
        self.answers = True
        self.requested: list[int] = []
        self._open()
        self.ports = (self.pub.bind_to_random_port(HOST, *PORTS), self.router.bind_to_random_port(HOST, *PORTS))

    def _open(self) -> None:
        self.next_seq = 0
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=100)
        self.pub = self.context.socket(zmq.PUB)
        self.router = self.context.socket(zmq.ROUTER)
        for one in (self.pub, self.router):
            one.set(zmq.LINGER, 0)
        self._serving = asyncio.create_task(self._serve())

    async def close(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self.pub.close()
        self.router.close()

    async def restart(self) -> None:
        await self.close()
        self._open()
        for one, port in zip((self.pub, self.router), self.ports, strict=True):
            await until(lambda one=one, port=port: is_bound(one, f"{HOST}:{port}"))  # type: ignore[misc]

    @property
    def source(self) -> KvSource:
        return KvSource(f"{HOST}:{self.ports[0]}", f"{HOST}:{self.ports[1]}", "kv")

    async def publish(self, events: Sequence[Any], *, dropped: bool = False, data: bytes | None = None) -> None:
        one = (self.next_seq, payload(events, float(self.next_seq)) if data is None else data)
        self.next_seq += 1
        self.buffer.append(one)
        if not dropped:
            await self.pub.send_multipart([b"kv", one[0].to_bytes(8, "big"), one[1]])

    async def _serve(self) -> None:
        while True:
            identity, empty, start = await self.router.recv_multipart()
            assert empty == b""
            self.requested.append(int.from_bytes(start, "big"))
            if not self.answers:
                continue
            topic = [b"kv"] if self.topics else []
            for seq, data in list(self.buffer):
                if seq >= self.requested[-1]:
                    await self.router.send_multipart([identity, b"", *topic, seq.to_bytes(8, "big"), data])
            await self.router.send_multipart([identity, b"", *([b""] if self.topics else []), END_OF_REPLAY, b""])


def is_bound(socket: zmq.asyncio.Socket, endpoint: str) -> bool:
    """Try to bind; return False while the closed socket still occupies the port."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        assert error.errno == zmq.EADDRINUSE
        return False
    return True


class FeedLog:
    """Changes that a feed reported, and the blocks that a reader holds."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.lost: list[str] = []

    def publish(self, rank: int, changes: Sequence[Change]) -> None:
        assert rank == RANK and changes
        self.changes += changes

    def on_lost(self, rank: int, reason: str) -> None:
        assert rank == RANK
        self.lost.append(reason)

    @property
    def held(self) -> set[int]:
        held: set[int] = set()
        for change in self.changes:
            match change:
                case Stored():
                    held |= set(change.hashes)
                case Removed():
                    held -= set(change.hashes)
                case Cleared():
                    held.clear()
        return held


@asynccontextmanager
async def publishing(**options: Any) -> AsyncIterator[Publisher]:
    publisher = Publisher(**options)
    try:
        yield publisher
    finally:
        await publisher.close()
        publisher.context.destroy(linger=0)


@asynccontextmanager
async def feeding(
    source: KvSource, *, quiet_s: float = 60.0, answer_timeout_s: float = 10.0
) -> AsyncIterator[tuple[KvFeed, FeedLog]]:
    """Run a feed, by default with an idle timeout that never matters."""
    blocks = ResidentBlocks(32, counts_copies=True)
    feed = KvFeed(RANK, source, VllmDecoder(), blocks, quiet_s=quiet_s, answer_timeout_s=answer_timeout_s)
    announced = FeedLog()
    task = asyncio.create_task(feed.run(announced.publish, announced.on_lost))
    try:
        yield feed, announced
        assert not task.done()
    finally:
        task.cancel()
        results = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)


async def subscribed(publisher: Publisher, feed: KvFeed, announced: FeedLog) -> None:
    """Wait until the subscription is active."""
    while not feed.counts["live"]:
        await publisher.publish([vllm_stored(A_HASHES, PROMPT[:64])] if not publisher.next_seq else [])
        await asyncio.sleep(0.001)
    await until(lambda: feed.sequence.next_seq == publisher.next_seq)
    assert announced.held == set(NAMES)


async def test_batches_before_the_subscription_are_replayed() -> None:
    async with publishing() as publisher:
        for _, events in VLLM_BATCHES:
            await publisher.publish(events)
        async with feeding(publisher.source) as (feed, announced):
            await until(lambda: feed.sequence.next_seq == len(VLLM_BATCHES))
            assert announced.held == set(NAMES) == set(feed.resident.held())
            assert feed.counts == {"replayed": len(VLLM_BATCHES)} and not announced.lost
            assert publisher.requested[0] == 0


@pytest.mark.parametrize("topics", [True, False], ids=["topics", "older releases"])
async def test_dropped_batches_are_replayed_in_order(topics: bool) -> None:
    async with publishing(topics=topics) as publisher, feeding(publisher.source) as (feed, announced):
        await subscribed(publisher, feed, announced)
        before, gaps = len(announced.changes), feed.sequence.gaps
        await publisher.publish(VLLM_BATCHES[1][1], dropped=True)
        await publisher.publish(VLLM_BATCHES[2][1], dropped=True)
        await publisher.publish(VLLM_BATCHES[3][1])
        await until(lambda: feed.sequence.next_seq == publisher.next_seq)
        assert [change.engine_hashes for change in announced.changes[before:] if isinstance(change, Stored)] == [
            tuple(events[0]["block_hashes"]) for _, events in VLLM_BATCHES[1:4]
        ]
        assert feed.sequence.gaps == gaps + 1 and not announced.lost and not feed.resident.counts
        registry = CollectorRegistry()
        registry.register(KvEventMetrics("w1", {RANK: feed.totals}))
        shown = {sample.labels["kind"]: sample.value for metric in registry.collect() for sample in metric.samples}
        assert shown["gaps"] == feed.sequence.gaps and shown["live"] == feed.counts["live"] and shown["replayed"] >= 2
        assert registry.get_sample_value(
            "forebay_worker_kv_events_total", {"worker_id": "w1", "rank": "3", "kind": "gaps"}
        )


async def test_gap_at_the_end_is_found_when_idle() -> None:
    async with publishing() as publisher, feeding(publisher.source, quiet_s=0.02) as (feed, announced):
        await subscribed(publisher, feed, announced)
        await publisher.publish([{"type": "AllBlocksCleared"}], dropped=True)
        await until(lambda: feed.sequence.next_seq == publisher.next_seq)
        assert announced.held == set() and not announced.lost


async def test_gap_is_a_loss_without_a_replay_socket() -> None:
    async with publishing() as publisher:
        source = KvSource(publisher.source.endpoint, None, "kv")
        await publisher.publish(VLLM_BATCHES[0][1])  # no subscriber yet
        async with feeding(source) as (feed, announced):
            while not feed.counts["live"]:
                await publisher.publish([])
                await asyncio.sleep(0.001)
            await until(lambda: announced.lost)
            assert announced.changes[0] == Cleared() and publisher.requested == []


async def test_new_publisher_on_the_same_ports_resets_the_rank() -> None:
    async with publishing() as publisher, feeding(publisher.source) as (feed, announced):
        await subscribed(publisher, feed, announced)
        await publisher.restart()
        await publisher.publish(VLLM_BATCHES[3][1])
        await until(lambda: feed.counts["restarted"] and feed.sequence.next_seq == 1)
        assert announced.held == set(ours(PROMPT, 32, "", "tenant-1")) and not announced.lost


async def test_undecodable_batch_is_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    async with publishing() as publisher, feeding(publisher.source) as (feed, announced):
        await subscribed(publisher, feed, announced)
        with caplog.at_level(logging.WARNING):
            await publisher.publish([], data=b"\xc1")
            await publisher.publish([{"type": "Novel"}])
            await until(lambda: feed.sequence.next_seq == publisher.next_seq)
        assert announced.held == set() and "cannot decode" in announced.lost[0]
        assert feed.counts["undecodable"] == 1 and feed.counts["unknown_event"] == 1
        assert "rank 3: batch" in caplog.text


async def test_invalid_messages_are_counted() -> None:
    async with publishing() as publisher, feeding(publisher.source) as (feed, announced):
        await subscribed(publisher, feed, announced)
        await publisher.pub.send_multipart([b"kv", b"short", b"x"])
        await publisher.pub.send_multipart([b"kv"])
        await until(lambda: feed.counts["frames"] == 2)
        assert announced.held == set(NAMES)


async def test_a_replay_without_a_reply_is_requested_again() -> None:
    options = {"answer_timeout_s": 0.05, "quiet_s": 0.02}
    async with publishing() as publisher, feeding(publisher.source, **options) as (feed, announced):
        await subscribed(publisher, feed, announced)
        publisher.answers = False
        await publisher.publish([{"type": "AllBlocksCleared"}], dropped=True)
        await until(lambda: feed.counts["unanswered"] >= 3)
        assert not announced.lost
        publisher.answers = True
        await until(lambda: feed.sequence.next_seq == publisher.next_seq)
        assert announced.held == set()


async def test_an_error_of_the_reader_ends_the_feed() -> None:
    def refuse(_rank: int, _changes: Sequence[Change]) -> None:
        raise LookupError("no room")

    async with publishing() as publisher:
        await publisher.publish(VLLM_BATCHES[0][1])
        feed = KvFeed(RANK, publisher.source, VllmDecoder(), ResidentBlocks(32, counts_copies=True))
        with pytest.raises(ExceptionGroup) as caught:
            await feed.run(refuse, lambda _rank, _reason: None)
        assert caught.group_contains(LookupError, match="no room")


@pytest.mark.parametrize("endpoint", ["nonsense", "tcp://127.0.0.1", "smoke://1"])
async def test_invalid_endpoint_is_refused(endpoint: str) -> None:
    for source in (KvSource(endpoint), KvSource(f"{HOST}:20000", endpoint)):
        feed = KvFeed(0, source, VllmDecoder(), ResidentBlocks(32, counts_copies=True))
        with pytest.raises(EngineError, match="cannot connect"):
            await feed.run(lambda _rank, _changes: None, lambda _rank, _reason: None)


def test_every_rank_has_its_own_ports() -> None:
    source = KvSource("tcp://*:5557", "tcp://[::1]:6000", "kv")
    assert source.at_rank(2) == KvSource("tcp://*:5559", "tcp://[::1]:6002", "kv")
    assert KvSource("ipc:///tmp/kv").at_rank(0) == KvSource("ipc:///tmp/kv")
    with pytest.raises(EngineError, match="no port to add the rank to"):
        KvSource("ipc:///tmp/kv").at_rank(1)
