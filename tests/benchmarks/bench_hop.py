"""Measure one hop through a broker: produce a record of 300 bytes, get the acknowledgement, and consume the record.

`requests` is the floor: bare produce and fetch requests on two connections. `log` is `KafkaLog`. Both run in one
process, alternately, each on a topic of its own.
"""

import argparse
import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from forebay.transport.base import Draft
from forebay.transport.kafka.batches import frames_of, head_of, records_of
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.producer import Producer
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.wire import Channel, Wire

VALUE = bytes(range(256)) + bytes(44)
WAIT_MS = 500
WARM_UP = 50
COUNTS = {1: 600, 64: 6_000}  # records by the number in flight

Send = Callable[[bytes], Awaitable[object]]
Receive = Callable[[bytes], None]
Client = Callable[[KafkaSettings, str, Receive], AbstractAsyncContextManager[Send]]


@asynccontextmanager
async def requests(settings: KafkaSettings, topic: str, receive: Receive) -> AsyncIterator[Send]:
    """Send bare requests; concurrent records share the next one."""
    wire, place = Wire(settings), TopicPartition(settings.topic(topic), 0)
    await wire.start()
    await wire.partitions(place.topic)
    node = wire.leader(place)
    assert node is not None
    producer = Producer(wire, Channel.APPENDS)
    await producer.start()
    waiting: list[tuple[Draft, asyncio.Future[None]]] = []
    sending: list[asyncio.Task[None]] = []

    async def drain() -> None:
        while waiting:
            taken = waiting[:]
            waiting.clear()
            await producer.append(place, [(draft, 1) for draft, _ in taken], 0)
            for _, future in taken:
                future.set_result(None)
        sending.clear()

    async def send(key: bytes) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.append((Draft(topic, 0, VALUE, key), future))
        if not sending:
            sending.append(asyncio.create_task(drain()))
        await future

    async def consume() -> None:
        offset = 0
        while True:
            for fetched in await wire.fetch(node, Channel.POLL, {place: offset}, WAIT_MS):
                for frame in frames_of(fetched.data):
                    for record in records_of(frame, head_of(frame))[0]:
                        offset = record.offset + 1
                        receive(record.key)

    async with _running(consume()):
        yield send
    await wire.close()


@asynccontextmanager
async def log(settings: KafkaSettings, topic: str, receive: Receive) -> AsyncIterator[Send]:
    """Append to a `KafkaLog`, and follow it."""
    opened, wake = await KafkaLog.open(settings), asyncio.Event()
    tail = opened.tail(topic, 0, 0, wake)

    async def consume() -> None:
        while True:
            await wake.wait()
            wake.clear()
            for record in tail.take(1_000):
                assert record.key is not None
                receive(record.key)

    async with _running(consume()):
        yield lambda key: opened.append([Draft(topic, 0, VALUE, key)])
    await opened.close()


@asynccontextmanager
async def _running(work: Awaitable[None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


CLIENTS: dict[str, Client] = {"requests": requests, "log": log}


async def measure(settings: KafkaSettings, client: Client, in_flight: int) -> tuple[float, float]:
    """Return the median hop in ms, and the client's CPU us per record."""
    topic = f"hop-{uuid.uuid4().hex[:8]}"
    admin = AIOKafkaAdminClient(bootstrap_servers=settings.bootstrap)
    await admin.start()
    name = settings.topic(topic)
    await admin.create_topics([NewTopic(name, 1, 1)])
    sent: dict[bytes, float] = {}
    hops: list[float] = []
    arrived = asyncio.Condition()
    free = asyncio.Semaphore(in_flight)

    def receive(key: bytes) -> None:
        hops.append(time.perf_counter() - sent[key])
        free.release()

    async def send_all(send: Send, keys: Sequence[bytes]) -> None:
        goal = len(hops) + len(keys)
        async with asyncio.TaskGroup() as tasks:
            for key in keys:
                await free.acquire()
                sent[key] = time.perf_counter()
                tasks.create_task(_ignore(send(key)))
        async with arrived:
            while len(hops) < goal:
                with suppress(TimeoutError):
                    await asyncio.wait_for(arrived.wait(), 0.001)

    try:
        async with client(settings, topic, receive) as send:
            await send_all(send, [b"warm%d" % number for number in range(WARM_UP)])
            hops.clear()
            count, began_s = COUNTS[in_flight], time.process_time()
            await send_all(send, [b"%d" % number for number in range(count)])
            cpu_us = (time.process_time() - began_s) / count * 1e6
    finally:
        await admin.delete_topics([name])
        await admin.close()
    return sorted(hops)[len(hops) // 2] * 1e3, cpu_us


async def _ignore(work: Awaitable[object]) -> None:
    await work


async def compare(kafka: str, rounds: int) -> None:
    """Measure all clients in turn, and print a table."""
    settings = KafkaSettings(kafka, "bench")
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for in_flight in COUNTS:
            for name, client in CLIENTS.items():
                found.setdefault((name, in_flight), []).append(await measure(settings, client, in_flight))
    print("| records in flight | client | hop p50 ms | client CPU us/record |")
    print("|---|---|---:|---:|")
    for (name, in_flight), results in found.items():
        hop, cpu = (sorted(part)[len(part) // 2] for part in zip(*results, strict=True))
        print(f"| {in_flight} | {name} | {hop:.2f} | {cpu:.0f} |")


def main() -> None:
    """Measure, and print a table with medians of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kafka", required=True, help="host:port; topics of its own are created and removed")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    asyncio.run(compare(args.kafka, args.rounds))


if __name__ == "__main__":
    main()
