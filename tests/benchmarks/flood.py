"""Write the KV events and load reports of eight busy engines into the control partition of one group.

The engines are members of the group in a pool without requests, so the owner applies all their events.
"""

import asyncio
import multiprocessing
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec
import redis

from forebay.events.base import pack_u64
from forebay.events.codec import encode
from forebay.events.fleet import WorkerLease, WorkerSpec
from forebay.events.kv import BlocksStored
from forebay.events.metrics import LoadReported
from forebay.events.topics import KV_EVENTS, METRICS
from forebay.transport.base import Draft
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.redis.leases import RedisLeases

WORKERS = [f"flood-{number}" for number in range(8)]
POOL = "flood"  # sorts after `default`, because requests go to the first pool by name that serves their model
STEPS_PER_S = 50
STEPS_PER_REPORT = 5  # ten reports per second
BLOCKS_PER_STEP = 4  # blocks of 64 tokens that 256 sequences fill per step
LEASE_MS = 3_600_000
SEED = 1
READY_S = 60.0


@contextmanager
def leases_held(redis_url: str, namespace: str, model: str) -> Iterator[None]:
    """Hold leases of the engines, which outlive any run without renewal."""
    with redis.Redis.from_url(redis_url) as client:
        leases = RedisLeases(client, namespace)
        for worker_id in WORKERS:
            spec = WorkerSpec(
                worker_id=worker_id,
                model=model,
                pool=POOL,
                block_size=64,
                kv_blocks_total=65_536,
                max_num_seqs=512,
                max_num_batched_tokens=65_536,
            )
            leases.acquire(model, worker_id, worker_id, msgspec.msgpack.encode(WorkerLease(spec=spec)), LEASE_MS)
        try:
            yield
        finally:
            for worker_id in WORKERS:
                leases.release(model, worker_id, worker_id)


@contextmanager
def flood(settings: KafkaSettings, epochs: Mapping[str, int]) -> Iterator[None]:
    """Write in a separate process; use each set of `epochs` only once, because sequence numbers restart."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=write, args=(settings, dict(epochs), there), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(READY_S):
            raise SystemExit("the flood does not begin")
        here.recv()
        yield
        if not process.is_alive():
            raise SystemExit("the flood ended too early, see above")
    finally:
        process.kill()
        process.join()


def write(settings: KafkaSettings, epochs: dict[str, int], starter: "Connection[None, None]") -> None:
    """Write until killed; send None once the first records are on Kafka."""
    asyncio.run(_write(settings, epochs, starter))


async def _write(settings: KafkaSettings, epochs: dict[str, int], starter: "Connection[None, None]") -> None:
    log = await KafkaLog.open(settings)
    chance = random.Random(SEED)
    tips: dict[str, int | None] = dict.fromkeys(epochs)
    step, due_s = 0, time.monotonic()
    while True:
        step += 1
        drafts = []
        for worker_id, epoch in epochs.items():
            hashes = [chance.getrandbits(64) for _ in range(BLOCKS_PER_STEP)]
            stored = BlocksStored(
                worker_id=worker_id,
                worker_epoch=epoch,
                seq=step,
                sequence_hashes=pack_u64(hashes),
                parent_hash=tips[worker_id],
            )
            tips[worker_id] = hashes[-1]
            drafts.append(Draft(KV_EVENTS.name, 0, encode(KV_EVENTS, stored)))
            if step % STEPS_PER_REPORT == 0:
                drafts.append(Draft(METRICS.name, 0, encode(METRICS, _report(worker_id, epoch, step))))
        await log.append(drafts)
        if step == 1:
            starter.send(None)
        due_s += 1 / STEPS_PER_S
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))


def _report(worker_id: str, epoch: int, step: int) -> LoadReported:
    return LoadReported(
        worker_id=worker_id,
        worker_epoch=epoch,
        running=256,
        waiting=step % 8,
        kv_blocks_used=step % 65_536,
        kv_blocks_total=65_536,
        at_us=time.time_ns() // 1000,
    )
