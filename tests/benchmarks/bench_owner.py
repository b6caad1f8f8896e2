"""Benchmark of one owner on Kafka with many simulated workers: decisions/s, CPU and journal bytes per decision.

The owner runs in a separate process as in production (`Owner.run` on a `KafkaLog`, plain tails), with its leases in
process. It is paused while every request is written, then resumed. This process simulates the workers: it follows the
decisions and emits the events of a worker for each, KV events included. Its own CPU time is not counted.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import signal
import sys
import time
import uuid
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import uvloop

from forebay.core.block_hashes import sequence_hashes
from forebay.core.state.fleet import WorkerPhase
from forebay.events.base import Event, pack_u32, pack_u64, unpack_u64
from forebay.events.codec import decode, encode
from forebay.events.control import PoolConfigured
from forebay.events.decisions import JournalRecord, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerLease
from forebay.events.kv import BlocksStored
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.requests import RequestSubmitted, Sampling
from forebay.events.topics import DECISIONS, KV_EVENTS, PROGRESS, REQUESTS, Topic, work_topic
from forebay.events.work import WorkCancelled
from forebay.live.owner.owner import GroupSettings, Owner
from forebay.transport.base import Draft, LogError
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import TopicPlan, create_topics
from forebay.transport.redis.leases import embedded_leases
from tests.benchmarks.recordings import BLOCK_SIZE, MODEL, POOL, attempt_of, worker_name, worker_spec
from tests.harness.cluster import remove_topics

PROMPT_TOKENS, SHARED_TOKENS = 1_000, 512
PREFIXES = 256
VOCABULARY = 8_000
SEED = 20_261_120
HOUR_MS = 3_600_000
READY_S, DONE_S = 120.0, 600.0
WRITE_AT_ONCE = 1_000
READ_MAX = 256
POLL_S = 0.02


class Workload:
    """Seeded requests of `PROMPT_TOKENS`, each with one of `PREFIXES` shared prefixes and a unique suffix."""

    def __init__(self, count: int) -> None:
        self._random = random.Random(SEED)
        self._prefixes = [self._tokens(SHARED_TOKENS) for _ in range(PREFIXES)]
        self.count = count
        self.hashes: list[bytes] = []

    def requests(self) -> Iterator[RequestSubmitted]:
        """Yield all requests in order; `hashes` has the packed sequence hashes of the yielded requests."""
        for number in range(self.count):
            prefix = self._random.choice(self._prefixes)
            token_ids = pack_u32(prefix + self._tokens(PROMPT_TOKENS - SHARED_TOKENS))
            self.hashes.append(sequence_hashes(token_ids, BLOCK_SIZE))
            yield RequestSubmitted(
                request_id=f"bench-{number}",
                model=MODEL,
                token_ids=token_ids,
                sequence_hashes=self.hashes[-1],
                reply_slot=0,
                timeout_us=HOUR_MS * 1000,
                tie_seed=self._random.getrandbits(64),
                sampling=Sampling(max_tokens=128),
                nonce=self._random.getrandbits(64),
            )

    def _tokens(self, count: int) -> "array[int]":
        return array("I", self._random.choices(range(VOCABULARY), k=count))


class Workers:
    """The simulated workers: their unbounded caches, and the events that they emit for a request."""

    def __init__(self, workload: Workload) -> None:
        self._hashes = workload.hashes
        self._cached: dict[str, set[int]] = {}
        self._seqs: dict[str, int] = {}
        self.kv_events = 0

    def answer(self, decided: RequestRouted) -> list[Draft]:
        """Return the events of a request: newly cached blocks, first token, and end."""
        hashes = unpack_u64(self._hashes[int(decided.request_id.rpartition("-")[2])])
        cached = self._cached.setdefault(decided.worker_id, set())
        known = next((at for at, one in enumerate(hashes) if one not in cached), len(hashes))
        drafts = []
        if known < len(hashes):
            cached.update(hashes[known:])
            self._seqs[decided.worker_id] = seq = self._seqs.get(decided.worker_id, 0) + 1
            self.kv_events += 1
            stored = BlocksStored(
                worker_id=decided.worker_id,
                worker_epoch=decided.worker_epoch,
                seq=seq,
                sequence_hashes=pack_u64(hashes[known:]),
                parent_hash=hashes[known - 1] if known else None,
            )
            drafts.append(_draft(KV_EVENTS, stored))
        about = attempt_of(decided) | {"at_us": time.time_ns() // 1000}
        drafts.append(_draft(PROGRESS, FirstTokenEmitted(**about)))
        drafts.append(_draft(PROGRESS, RequestFinished(**about, finish_reason="length")))
        return drafts


@dataclass(frozen=True, slots=True)
class RunResult:
    """The measurements of one run. `wall_s` lasts until the owner has applied every response.

    If the owner's CPU time is nearly all of `wall_s`, the owner was the bottleneck; otherwise the broker, the driver or
    the machine was.
    """

    workers: int
    decisions: int
    wall_s: float
    driver_cpu_s: float
    journal_bytes: int
    kv_events: int
    cpu_s: float  # of the owner

    @property
    def decisions_per_s(self) -> float:
        """Decisions per second."""
        return self.decisions / self.wall_s

    @property
    def cpu_us(self) -> float:
        """CPU time of the owner per decision in microseconds."""
        return self.cpu_s / self.decisions * 1e6

    def row(self) -> str:
        count = self.decisions
        cells = (
            self.workers,
            f"{self.decisions_per_s:.0f}",
            f"{self.cpu_us:.0f}",
            f"{self.cpu_s / self.wall_s:.2f}",
            f"{self.driver_cpu_s / self.wall_s:.2f}",
            f"{self.journal_bytes / count:.0f}",
            f"{3 + self.kv_events / count:.1f}",
        )
        return f"| {' | '.join(map(str, cells))} |"


# --- the owner's process ----------------------------------------------------------------------------------------------


def serve(settings: KafkaSettings, workers: int, driver: Connection, changes: dict[str, Any]) -> None:
    """Own the group: send None once all workers are admitted, receive the ends of the inputs, and send the usage."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, workers, driver, changes))


async def _serve(settings: KafkaSettings, workers: int, driver: Connection, changes: dict[str, Any]) -> None:
    leases = embedded_leases()
    for number in range(workers):
        sizes = {"kv_blocks_total": 65_536, "max_num_seqs": 512, "max_num_batched_tokens": 65_536}
        spec = worker_spec(worker_name(number), **sizes)
        leases.acquire(MODEL, spec.worker_id, spec.worker_id, msgspec.msgpack.encode(WorkerLease(spec=spec)), HOUR_MS)
    pool = PoolConfigured(pool=POOL, model=MODEL, block_size=BLOCK_SIZE)
    log = await KafkaLog.open(settings)
    owner = Owner(log, leases, GroupSettings(MODEL, 0, "bench", pools=(pool,), slots_max=workers, **changes))
    await owner.start()
    running = asyncio.create_task(owner.run())
    await _until(running, lambda: _ready(owner) == workers)
    driver.send(None)
    began_s = time.process_time()
    await _until(running, driver.poll)
    ends: dict[str, int] = driver.recv()
    await _until(running, lambda: all(owner.world.view.get(topic, 0) >= end for topic, end in ends.items()))
    driver.send(time.process_time() - began_s)
    await owner.stop()
    await running
    owner.drop()
    await log.close()


async def _until(running: "asyncio.Task[None]", condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(POLL_S)
        if running.done():
            await running


def _ready(owner: Owner) -> int:
    return sum(worker.phase is WorkerPhase.READY for worker in owner.world.fleet.workers())


@contextmanager
def owner_process(settings: KafkaSettings, workers: int, **changes: Any) -> Iterator["OwnerProcess"]:
    """Run the owner process until its workers are admitted, and end it after the body. `changes` are its settings."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(settings, workers, there, changes), daemon=True)
    process.start()
    assert process.pid is not None
    there.close()  # so that this process notices its end
    try:
        owner = OwnerProcess(process.pid, here)
        owner.receive(READY_S)
        yield owner
    finally:
        process.kill()  # works on a paused process too
        process.join()


class OwnerProcess:
    """The driver's handle of the owner process."""

    def __init__(self, pid: int, pipe: "Connection[object, object]") -> None:
        self._pid = pid
        self._pipe = pipe

    def pause(self) -> None:
        """Pause the process until `resume`."""
        os.kill(self._pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def send(self, message: object) -> None:
        self._pipe.send(message)

    def receive(self, within_s: float) -> object:
        """Return the next message of the process; exit if none arrives in time."""
        if not self._pipe.poll(within_s):
            raise SystemExit(f"the owner's process sent nothing for {within_s:g} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit("the owner's process ended, see above") from None


# --- the driver -------------------------------------------------------------------------------------------------------


async def drive(settings: KafkaSettings, owner: OwnerProcess, workers: int, requests: int) -> RunResult:
    """Write all requests while the owner is paused, resume it, and answer its decisions until all are applied."""
    workload = Workload(requests)
    log = await KafkaLog.open(settings)
    try:
        start = await log.end(DECISIONS.name, 0)
        owner.pause()
        await _touch_slots(log, workers)
        await _submit_all(log, workload)
        began_s, driver_began_s = time.monotonic(), time.process_time()
        owner.resume()
        async with asyncio.timeout(DONE_S):
            played = await _play(log, workload, start)
        owner.send({REQUESTS.name: requests, PROGRESS.name: 2 * requests, KV_EVENTS.name: played.kv_events})
        cpu_s = await asyncio.to_thread(owner.receive, DONE_S)
    finally:
        await log.close()
    assert isinstance(cpu_s, float)
    return RunResult(
        workers=workers,
        decisions=requests,
        wall_s=time.monotonic() - began_s,
        driver_cpu_s=time.process_time() - driver_began_s,
        journal_bytes=played.journal_bytes,
        kv_events=played.kv_events,
        cpu_s=cpu_s,
    )


@dataclass(slots=True)
class DriverResult:
    """The driver's view of the journal, and the number of KV events that it emitted."""

    routed: int = 0
    journal_bytes: int = 0
    kv_events: int = 0


async def _touch_slots(log: KafkaLog, workers: int) -> None:
    """Write to every work partition once, because a broker is slow at the first record of each."""
    topic = work_topic(POOL)
    nothing = encode(topic, WorkCancelled(request_id="nobody", attempt=0, owner_epoch=0, worker_epoch=0))
    await log.append([Draft(topic.name, slot, nothing) for slot in range(workers)])


async def _submit_all(log: KafkaLog, workload: Workload) -> None:
    drafts = []
    for request in workload.requests():
        drafts.append(_draft(REQUESTS, request))
        if len(drafts) == WRITE_AT_ONCE:
            await log.append(drafts)
            drafts = []
    await log.append(drafts)


async def _play(log: KafkaLog, workload: Workload, start: int) -> DriverResult:
    """Follow the journal from `start` and simulate all workers until every request is routed."""
    played, workers, wake = DriverResult(), Workers(workload), asyncio.Event()
    tail = log.tail(DECISIONS.name, 0, start, wake)
    try:
        while played.routed < workload.count:
            wake.clear()
            drafts: list[Draft] = []
            while records := tail.take(READ_MAX):
                for record in records:
                    played.journal_bytes += len(record.value)
                    decided: JournalRecord = decode(DECISIONS, record.value)
                    if isinstance(decided, RequestRouted):
                        played.routed += 1
                        drafts += workers.answer(decided)
                    elif isinstance(decided, RequestRejected):
                        raise SystemExit(f"a request was refused: {decided.message}")
            if drafts:
                log.append_soon(drafts)
            if played.routed < workload.count:
                await wake.wait()
    finally:
        tail.close()
    played.kv_events = workers.kv_events
    return played


def _draft(topic: Topic, event: Event) -> Draft:
    return Draft(topic.name, 0, encode(topic, event))


async def measure(bootstrap: str, workers: int, requests: int) -> RunResult:
    """Measure one run on its own topics, which are removed afterwards."""
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    plan = TopicPlan(groups=1, slots=workers, replies=1, kafka_api=1)
    settings = KafkaSettings(bootstrap, namespace)
    try:
        await create_topics(settings, plan, [POOL])
        with owner_process(settings, workers) as owner:
            return await drive(settings, owner, workers, requests)
    finally:
        await remove_topics(bootstrap, namespace)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kafka", required=True, help="host:port; topics of its own are created and removed")
    parser.add_argument(
        "--workers", default="8,64,512", help="numbers of workers, separated by commas (default %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=20_000, help="requests per run (default %(default)s)")
    args = parser.parse_args()
    runs = []
    for workers in (int(number) for number in args.workers.split(",")):
        sys.stderr.write(f"{workers} workers\n")
        try:
            runs.append(asyncio.run(measure(args.kafka, workers, args.requests)))
        except LogError as error:
            raise SystemExit(str(error)) from None
    print(f"seed {SEED}, {args.requests} requests of {PROMPT_TOKENS} tokens, {SHARED_TOKENS} shared by {PREFIXES}\n")
    print(
        "| workers | decisions/s | CPU us/decision | owner busy | driver busy | journal B/decision | events/decision |"
    )
    print("|---|---|---|---|---|---|---|")
    for run in runs:
        print(run.row())


if __name__ == "__main__":
    main()
