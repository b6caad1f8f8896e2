"""Benchmark of decision delays while a snapshot is taken: one owner on an embedded log file, with a large index.

Requests arrive at a fixed rate, each with a cached prompt. A delay lasts from the scheduled arrival of a request until
its decision is in the journal. Delays during a snapshot are measured separately. This process also simulates the
clients and the workers, so delays include their work. The snapshot's own share of a turn is measured in CPU time.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from forebay.core.block_hashes import extend_chain
from forebay.events.base import Event, pack_u64
from forebay.events.codec import decode, encode
from forebay.events.control import PoolConfigured
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import WorkerLease
from forebay.events.kv import BlocksStored
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.requests import RequestSubmitted, Sampling
from forebay.events.topics import DECISIONS, KV_EVENTS, PROGRESS, REQUESTS, SNAPSHOTS, Topic
from forebay.live.owner.owner import GroupSettings, Owner
from forebay.transport.base import Draft
from forebay.transport.redis.leases import embedded_leases
from forebay.transport.sqlite.log import SqliteLog
from tests.benchmarks.recordings import MODEL, attempt_of, worker_name, worker_spec

BLOCK_SIZE = 16
PROMPT_BLOCKS = 64
SEED = 20_261_121
HOUR_MS = 3_600_000
FILL_AT_ONCE = 64
NEVER = 1 << 60  # records until an automatic snapshot
NEVER_S = 86_400.0  # polling the in-process leases would block the interpreter


class System:
    """An owner, simulated workers that finish at once, and simulated clients."""

    def __init__(self, log: SqliteLog, workers: int) -> None:
        self.log = log
        self.leases = embedded_leases()
        self._random = random.Random(SEED)
        self._seqs: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._lasting: set[str] = set()
        self._sent = 0
        self.delays: list[float] = []
        self.prompts: list[list[int]] = []
        for number in range(workers):
            spec = worker_spec(worker_name(number), block_size=BLOCK_SIZE, max_num_seqs=1 << 20)
            payload = msgspec.msgpack.encode(WorkerLease(spec=spec))
            self.leases.acquire(MODEL, spec.worker_id, f"{spec.worker_id}-1", payload, HOUR_MS)
        pool = PoolConfigured(pool="default", model=MODEL, block_size=BLOCK_SIZE)
        self.owner = Owner(
            log,
            self.leases,
            GroupSettings(
                group=MODEL,
                partition=0,
                owner_id="bench",
                pools=(pool,),
                snapshot_every=NEVER,
                snapshot_age_s=NEVER_S,
                poll_s=NEVER_S,
            ),
        )

    async def fill(self, pairs: int) -> None:
        """Emit KV events until the workers hold `pairs` blocks in all, each prompt at one worker."""
        workers = self.owner.world.fleet.workers()
        for number in range(pairs // PROMPT_BLOCKS):
            blocks = extend_chain(None, [self._random.getrandbits(64) for _ in range(PROMPT_BLOCKS)])
            self.prompts.append(blocks)
            self._store(workers[number % len(workers)].spec.worker_id, blocks)
            if number % FILL_AT_ONCE == 0:
                await asyncio.sleep(0.002)
        await until(lambda: self.held() == len(self.prompts) * PROMPT_BLOCKS)

    def held(self) -> int:
        """Return the number of (worker, block) pairs in the index."""
        index = self.owner.world.index
        return sum(index.blocks_held(*key, "device") for key in index.holders())

    async def serve(self, rate: float, seconds: float) -> None:
        """Send requests at `rate` for `seconds`, and add the delay of each decision to `delays`."""
        begin = time.monotonic()
        for number in range(int(rate * seconds)):
            due = begin + number / rate
            if (ahead := due - time.monotonic()) > 0:
                await asyncio.sleep(ahead)
            self.send(self._random.choice(self.prompts), due)
        await until(lambda: not self._due)

    def send(self, blocks: Sequence[int], due: float, *, lasting: bool = False) -> None:
        """Send one request; a `lasting` request never ends."""
        name = f"r{self._sent}"
        self._sent += 1
        self._due[name] = due
        if lasting:
            self._lasting.add(name)
        event = RequestSubmitted(
            request_id=name,
            model=MODEL,
            token_ids=bytes(4 * BLOCK_SIZE * len(blocks)),
            sequence_hashes=pack_u64(blocks),
            reply_slot=0,
            timeout_us=HOUR_MS * 1000,
            tie_seed=self._random.getrandbits(64),
            sampling=Sampling(max_tokens=1),
        )
        self._append(REQUESTS, event)

    async def answer(self) -> None:
        """Simulate the workers: every request ends at once and caches a few blocks."""
        wake = asyncio.Event()
        tail = self.log.tail(DECISIONS.name, 0, self.log.next_offset(DECISIONS.name, 0), wake)
        while True:
            await wake.wait()
            wake.clear()
            for record in tail.take(1_000):
                decided = decode(DECISIONS, record.value)
                if isinstance(decided, RequestRouted):
                    self.delays.append(time.monotonic() - self._due.pop(decided.request_id))
                    if decided.request_id not in self._lasting:
                        self._finish(decided)

    def _finish(self, decided: RequestRouted) -> None:
        self._store(decided.worker_id, [self._random.getrandbits(64) for _ in range(4)])
        self._append(PROGRESS, FirstTokenEmitted(**attempt_of(decided)))
        self._append(PROGRESS, RequestFinished(finish_reason="length", **attempt_of(decided)))

    def _store(self, worker_id: str, blocks: list[int]) -> None:
        worker = self.owner.world.fleet.get(worker_id)
        assert worker is not None, "workers stay"
        seq = self._seqs[worker_id] = self._seqs.get(worker_id, 0) + 1
        hashes = pack_u64(blocks)
        self._append(
            KV_EVENTS,
            BlocksStored(worker_id=worker_id, worker_epoch=worker.worker_epoch, seq=seq, sequence_hashes=hashes),
        )

    def _append(self, topic: Topic, event: Event) -> None:
        self.log.append_soon([Draft(topic.name, 0, encode(topic, event))])


async def measure(arguments: argparse.Namespace, path: Path) -> None:
    """Fill the index, measure without and with a snapshot, and print."""
    log = SqliteLog.open(path)
    system = System(log, arguments.workers)
    owner = system.owner
    await owner.start()
    running = [asyncio.create_task(owner.run()), asyncio.create_task(system.answer())]
    await until(lambda: len(owner.world.fleet) == arguments.workers)
    await system.fill(arguments.pairs)
    for _ in range(arguments.under_way):
        blocks = extend_chain(None, [random.getrandbits(64) for _ in range(arguments.prompt_blocks)])
        system.send(blocks, time.monotonic(), lasting=True)
        await asyncio.sleep(0.001)
    print(f"{system.held():,} pairs at {arguments.workers} workers, {len(owner.world.requests)} requests in flight")
    await system.serve(arguments.rate, 1.0)
    slices = Stopwatch(owner.snapshots.work)
    seals = Stopwatch(owner.snapshots.records)
    owner.snapshots.work, owner.snapshots.records = slices, seals  # type: ignore[assignment]
    for number in range(arguments.rounds):
        system.delays.clear()
        await system.serve(arguments.rate, arguments.seconds)
        show("without a snapshot", system.delays)
        system.delays.clear()
        asking = asyncio.create_task(system.serve(arguments.rate, arguments.seconds))
        await asyncio.sleep(0.2)
        begin = time.monotonic()
        owner.snapshots.begin(owner.world)
        await until(partial(_taken, owner, number + 1))
        took = time.monotonic() - begin
        await asking
        show("with one", system.delays)
        print(
            f"{'':>20}  the snapshot took {took:.2f} s; CPU: {slices.summary()} of slices, {seals.summary()} of seals"
        )
    records = log.records(SNAPSHOTS.name, 0, 0, 1 << 20)
    sizes = [len(record.value) for record in records]
    print(f"{len(sizes)} chunks, {sum(sizes) / 1e6:.1f} MB in all, the largest {max(sizes) / 1e3:.0f} kB")
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    owner.drop()
    log.close()


class Stopwatch:
    """Wraps a function and measures the CPU time of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._total_ns = self._longest_ns = 0

    def __call__(self, *arguments: Any) -> Any:
        begin_ns = time.thread_time_ns()
        found = self._function(*arguments)
        took_ns = time.thread_time_ns() - begin_ns
        self._total_ns += took_ns
        self._longest_ns = max(self._longest_ns, took_ns)
        return found

    def summary(self) -> str:
        """Return the total and longest CPU time since the last call, and reset them."""
        text = f"{self._total_ns / 1e6:.0f} ms, the longest {self._longest_ns / 1e6:.2f} ms"
        self._total_ns = self._longest_ns = 0
        return text


def _taken(owner: Owner, count: int) -> bool:
    return owner.snapshots.taken >= count


async def until(condition: Callable[[], bool]) -> None:
    """Yield to the event loop until the condition holds."""
    while not condition():  # noqa: ASYNC110 - the condition has no event
        await asyncio.sleep(0.002)


def show(what: str, delays: list[float]) -> None:
    """Print a line about the delays of decisions."""
    delays = sorted(delays)
    at = [delays[min(len(delays) - 1, int(len(delays) * share))] * 1e3 for share in (0.5, 0.99, 0.999)]
    print(
        f"{what:>20}: {len(delays)} decisions, p50 {at[0]:.2f} ms, p99 {at[1]:.2f} ms, p99.9 {at[2]:.2f} ms, "
        f"longest {delays[-1] * 1e3:.2f} ms"
    )


def main() -> None:
    """Run with the options of the command line."""
    parser = argparse.ArgumentParser(prog="bench snapshot", description=__doc__)
    parser.add_argument("--pairs", type=int, default=1_000_000, help="(worker, block) pairs in the index")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--rate", type=float, default=400.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--under-way", type=int, default=0, help="number of requests that stay in flight")
    parser.add_argument("--prompt-blocks", type=int, default=1_500, help="of those")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(arguments, Path(folder) / "log.db"))
