"""Benchmark of the indexer on Kafka: memory and time of a restoration, and overlaps over HTTP while KV events arrive.

Each worker has cached `PROMPTS` prompts of `PROMPT_BLOCKS` blocks, and `COPIES` workers share a prompt. An owner runs
in a process of its own, and `forebay indexer` in another. A client in a third process sends queries of a whole prompt
over one connection, at `QUERIES_PER_S`. This process writes KV events at a fixed rate, each of `EVENT_BLOCKS` blocks,
which are stored and then removed. Queries without and with events alternate. A restoration reads the newest snapshot
from Kafka in a fresh process.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

from forebay.core.block_hashes import extend_chain
from forebay.events.base import pack_u64
from forebay.events.codec import decode, encode
from forebay.events.decisions import SnapshotTaken
from forebay.events.fleet import WorkerJoined
from forebay.events.groups import GroupPlaced
from forebay.events.kv import BlocksRemoved, BlocksStored
from forebay.events.topics import DECISIONS, FLEET, GROUPS, KV_EVENTS, PROGRESS, work_topic
from forebay.live.standby import Standby
from forebay.transport.base import Draft, LogUnavailable, records_of
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import TopicPlan, create_topics
from infra.kafka.kafka import HOST
from tests.benchmarks.bench_index import in_fresh_process, rss_bytes
from tests.benchmarks.bench_owner import owner_process
from tests.benchmarks.recordings import MODEL, POOL
from tests.harness.cluster import FOREBAY, remove_topics
from tests.harness.local import free_ports
from tests.harness.processes import Processes

PROMPTS, PROMPT_BLOCKS, COPIES = 16, 125, 4
EVENT_BLOCKS = 4
QUERIES_PER_S = 25
TICK_S = 0.02  # between two appends of KV events
WRITE_AT_ONCE = 256
SNAPSHOT_AGE_S = 15.0
PATIENCE_S = 300.0
SEED = 20_261_130


class Caches:
    """KV events of the workers, with their epochs and sequence numbers."""

    def __init__(self, epochs: dict[str, int], chance: random.Random) -> None:
        self._epochs = epochs
        self._chance = chance
        self._seqs: Counter[str] = Counter()
        self.prompts: list[list[int]] = []  # hashes of the blocks, independent of the blocks before them

    def fill(self) -> Iterator[Draft]:
        workers = list(self._epochs)
        for number in range(len(workers) * PROMPTS // COPIES):
            self.prompts.append([self._chance.getrandbits(64) for _ in range(PROMPT_BLOCKS)])
            hashes = pack_u64(extend_chain(None, self.prompts[-1]))
            for copy in range(COPIES):
                yield self._draft(BlocksStored, workers[(number * COPIES + copy) % len(workers)], hashes)

    def change(self) -> Iterator[Draft]:
        while True:
            for worker in self._epochs:
                hashes = pack_u64([self._chance.getrandbits(64) for _ in range(EVENT_BLOCKS)])
                yield self._draft(BlocksStored, worker, hashes)
                yield self._draft(BlocksRemoved, worker, hashes)

    def _draft(self, kind: type[BlocksStored | BlocksRemoved], worker: str, hashes: bytes) -> Draft:
        self._seqs[worker] += 1
        seq, epoch = self._seqs[worker], self._epochs[worker]
        event = kind(worker_id=worker, worker_epoch=epoch, seq=seq, sequence_hashes=hashes)
        return Draft(KV_EVENTS.name, 0, encode(KV_EVENTS, event))


def query(port: int, prompts: list[list[int]], seconds: float) -> str:
    """Send queries at a fixed rate over one connection. Return a line about their times and the age of the state."""
    connection, took_ms, lags = HTTPConnection(HOST, port), [], []
    began_s = time.monotonic()
    for number in range(int(seconds * QUERIES_PER_S)):
        body = json.dumps({"block_hashes": prompts[number % len(prompts)]})
        time.sleep(max(0.0, began_s + number / QUERIES_PER_S - time.monotonic()))
        sent_s = time.perf_counter()
        connection.request("POST", f"/groups/{MODEL}/overlaps", body, {"content-type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        took_ms.append((time.perf_counter() - sent_s) * 1e3)
        assert [one["device"] for one in answer["ranks"]] == [PROMPT_BLOCKS] * COPIES, answer
        lags.append((answer["position"]["lag_s"], answer["position"]["lag_events"]))
    took_ms.sort()
    p50, p99 = (took_ms[int(len(took_ms) * share)] for share in (0.5, 0.99))
    lag_s, events = sorted(lags)[len(lags) // 2]
    text = f"{len(took_ms)} queries, p50 {p50:.1f} ms, p99 {p99:.1f} ms, longest {took_ms[-1]:.1f} ms"
    return f"{text}; lag p50 {lag_s:.1f} s with {events} events, longest {max(lags)[0]:.1f} s"


def restore(settings: KafkaSettings) -> str:
    """Restore the newest snapshot and read the journal after it. Return a line about the time and the memory."""

    async def measure() -> str:
        log = await KafkaLog.open(settings)
        standby, before, began_s = Standby(log, 0), rss_bytes(), time.monotonic()
        await standby.catch_up(await log.end(DECISIONS.name, 0))
        took_s, size = time.monotonic() - began_s, (rss_bytes() - before) / 1e6
        await log.close()
        blocks = sum(standby.world.index.blocks_held(*key, "device") for key in standby.world.index.holders())
        return f"{blocks:,} blocks restored from a snapshot in {took_s:.2f} s, {size:.0f} MB of memory"

    return asyncio.run(measure())


async def measure(settings: KafkaSettings, folder: Path, args: argparse.Namespace) -> None:
    log = await KafkaLog.open(settings)
    await log.append([Draft(GROUPS.name, 0, encode(GROUPS, GroupPlaced(group=MODEL, partition=0)), MODEL.encode())])
    joined = [record async for record in records_of(log, FLEET, 0, 0, await log.end(FLEET.name, 0))]
    events = ((record.offset, decode(FLEET, record.value)) for record in joined)
    epochs = {event.spec.worker_id: offset for offset, event in events if isinstance(event, WorkerJoined)}
    caches = Caches(epochs, random.Random(SEED))
    drafts = list(caches.fill())
    for start in range(0, len(drafts), WRITE_AT_ONCE):
        await log.append(drafts[start : start + WRITE_AT_ONCE])
    await _until_snapshot(log, len(drafts))
    print(in_fresh_process(restore, settings), flush=True)
    processes, port = Processes(folder), free_ports(1)
    where = ("--kafka", settings.bootstrap, "--namespace", settings.namespace)
    process = processes.start("indexer", [FOREBAY, "indexer", *where, "--port", str(port)]).process

    async def follows() -> bool:
        return f'following{{group="{MODEL}"}} 1' in await asyncio.to_thread(_metrics, port)

    try:
        await processes.until("the indexer follows", follows, within_s=PATIENCE_S)
        changes = caches.change()
        for rate in (0, args.rate) * args.rounds:
            asking = asyncio.create_task(asyncio.to_thread(in_fresh_process, query, port, caches.prompts, args.seconds))
            began_s, written = time.monotonic(), 0
            while not asking.done():
                due = int((time.monotonic() - began_s) * rate) - written
                log.append_soon([next(changes) for _ in range(due)])
                written += due
                await asyncio.sleep(TICK_S)
            print(f"{written / (time.monotonic() - began_s):5.0f} events/s: {await asking}", flush=True)
        print(f"the indexer has {rss_bytes(process.pid) / 1e6:.0f} MB of memory; load {os.getloadavg()[0]:.1f}")
    finally:
        processes.end_all()
        await log.close()


async def _until_created(settings: KafkaSettings, slots: int) -> None:
    """Wait until a busy broker has created the topics, which takes longest for the partitions of a work topic."""
    log = await KafkaLog.open(settings)
    for topic, partition in ((PROGRESS, 0), (work_topic(POOL), slots - 1)):
        while True:
            try:
                await log.end(topic.name, partition)
            except LogUnavailable:
                continue
            break
    await log.close()


async def _until_snapshot(log: KafkaLog, events: int) -> None:
    """Wait for a snapshot after the owner has applied this number of KV events."""
    offset = applied = 0
    applied_at = -1
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for record in await log.read(DECISIONS.name, 0, offset, WRITE_AT_ONCE):
                offset, journalled = record.offset + 1, decode(DECISIONS, record.value)
                applied += sum(run.count for run in journalled.consumed if run.topic == KV_EVENTS.name)
                if applied_at < 0 and applied >= events:
                    applied_at = record.offset
                if isinstance(journalled, SnapshotTaken) and 0 <= applied_at < journalled.journal_offset:
                    return
            await asyncio.sleep(TICK_S)


def _metrics(port: int) -> str:
    connection = HTTPConnection(HOST, port)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    except OSError:
        return ""
    finally:
        connection.close()


async def run(args: argparse.Namespace) -> None:
    """Measure on topics of this run, which are removed afterwards."""
    settings = KafkaSettings(args.kafka, f"bench-{uuid.uuid4().hex[:8]}")
    try:
        await create_topics(settings, TopicPlan(groups=1, slots=args.workers, replies=1, kafka_api=1), [POOL])
        await _until_created(settings, args.workers)
        with (
            tempfile.TemporaryDirectory() as folder,
            owner_process(settings, args.workers, heartbeats=True, snapshot_age_s=SNAPSHOT_AGE_S),
        ):
            await measure(settings, Path(folder), args)
    finally:
        await remove_topics(args.kafka, settings.namespace)


def main() -> None:
    """Run with the options of the command line."""
    parser = argparse.ArgumentParser(prog="bench indexer", description=__doc__)
    parser.add_argument("--kafka", required=True, help="host:port; topics of its own are created and removed")
    parser.add_argument("--workers", type=int, default=512, help="(default %(default)s)")
    parser.add_argument("--rate", type=int, default=5_000, help="KV events per second (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of a measurement (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="(default %(default)s)")
    asyncio.run(run(parser.parse_args()))
